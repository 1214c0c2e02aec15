"""TileLang beside Triton, CUDA C++ and cuBLASLt: token shift with mixes, mixes inside products, squared-ReLU FFN, WKV-7 scan.

    python lab/tilelang_compare.py [--parts shift,mixed,ffn,scan] [--json FILE]

Needs `pip install tilelang==0.1.15` (and its nvcc). For each op every contender is checked first, bits where an order of
sums is given and else errors against float64, then timed in turns; the fastest right one wins. 1.5B shape, fp16.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from card import Launch, Report, captured, medians_us
from wkv7_blocks import make

from kittiwake.device import usable_cores
from kittiwake.layers.cuda_linear import Choice, CudaGroup, CudaProduct, exact_products
from kittiwake.ops.head_kernels import TILINGS, choose_tiling
from kittiwake.ops.matmul.triton import Config
from kittiwake.ops.shift_mix.triton import shift_mix
from kittiwake.ops.wkv7.cuda import kernels

WIDTH, FFN, ROWS, EPS = 2048, 8192, (1024, 8192), 1e-5
TOKENS, HEADS = 1024, (12, 32, 64)
PLAIN = {"tl.disable_warp_specialized": True, "tl.disable_tma_lower": True}
"""For the scan: with warps specialised, TileLang 0.1.15 drops the body of its loop."""
SHIFTS = ((1, 1, 256), (1024, 1, 256), (1024, 8, 512), (8192, 1, 256), (8192, 8, 512))
"""Rows, rows of a block, threads."""
PRODUCTS = {1024: ((128, 256, 64, 4, 256), (128, 128, 64, 4, 256)), 8192: ((128, 256, 64, 4, 256),)}
MIXED = {1024: ((128, 128, 32, 2, 256), (128, 256, 32, 2, 256)), 8192: ((128, 256, 32, 2, 256),)}
"""By rows: rows and columns of a tile, K of a stage, stages, threads."""
SCANS = {
    12: ((8, 1, 16, 3), (16, 1, 8, 3)),
    32: ((8, 1, 16, 3), (16, 1, 8, 3), (16, 2, 8, 3), (32, 2, 8, 3)),
    64: ((16, 2, 8, 3), (32, 2, 8, 3)),
}
"""By heads: state rows of a block, of a thread; tokens of a stage, stages."""
Check = Callable[[], str]
"""Runs a contender once; nothing when it is right, else what is wrong. A text that begins with "error" is right too."""


class Tiles:
    """TileLang's kernels, compiled side by side; one that cannot be compiled is told and left out."""

    def __init__(self, report: Report) -> None:
        os.environ.setdefault("TQDM_DISABLE", "1")
        import tilelang
        import tilelang_kernels as given

        tilelang.set_log_level("ERROR")
        wanted: dict[tuple[Any, ...], Any] = {}
        if "shift" in report.parts:
            wanted |= {("shift", *s): given.shift(s[0], WIDTH, s[1], 6, s[2]) for s in SHIFTS}
        for rows in ROWS:
            if "mixed" in report.parts:
                wanted |= {("mixed", rows, *c): given.mixed_products(rows, WIDTH, WIDTH, *c) for c in MIXED[rows]}
            if "ffn" in report.parts:
                wanted |= {("key", rows, *c): given.product(rows, FFN, WIDTH, *c, squares=True) for c in PRODUCTS[rows]}
                wanted |= {
                    ("value", rows, *c): given.product(rows, WIDTH, FFN, *c, squares=False) for c in PRODUCTS[rows]
                }
        scans: dict[tuple[Any, ...], Any] = {}
        if "scan" in report.parts:
            scans = {("scan", heads, *s): given.scan(heads, TOKENS, *s) for heads in HEADS for s in SCANS[heads]}
        self.made: dict[tuple[Any, ...], Any] = {}
        for some, settings in ((wanted, {}), (scans, PLAIN)):
            if some:
                built = tilelang.par_compile(
                    list(some.values()), pass_configs=settings,
                    num_workers=min(16, usable_cores()), ignore_error=True,
                )  # fmt: skip
                self.made |= dict(zip(some, built, strict=True))
        if lost := [key for key, kernel in self.made.items() if kernel is None]:
            report.check(f"TileLang compiles {lost}", False)
        report.say(f"TileLang {tilelang.__version__}: {len(self.made) - len(lost)} kernels compiled")

    def of(self, *begins: Any) -> dict[str, Any]:
        """The kernels whose keys begin so, by the rest of their keys."""
        found = {key[len(begins) :]: kernel for key, kernel in self.made.items() if key[: len(begins)] == begins}
        return {f"TileLang {'x'.join(map(str, key))}": kernel for key, kernel in found.items() if kernel is not None}


def contest(report: Report, op: str, contenders: dict[str, tuple[Launch, Check]], repeats: int) -> None:
    """Check, then time; print the times and the fastest that is right."""
    works, notes = {}, {}
    for name, (launch, check) in contenders.items():
        try:
            notes[name] = check()
        except Exception as err:
            notes[name] = f"{type(err).__name__}: {str(err)[:160]}"
        if not report.check(f"{op}, {name}{': ' + notes[name] if notes[name] else ''}", _is_right(notes[name])):
            continue
        try:
            works[name] = (captured([launch] * repeats), repeats)
        except Exception:
            torch.cuda.synchronize()
            works[name] = (partial(_each, launch, repeats), repeats)
            notes[name] += " (no graph)"
    if not works:
        return
    taken = medians_us(works)
    winner = min(taken, key=taken.__getitem__)
    line = "  ".join(f"{name} {us:.1f}{' ' + notes[name] if notes[name] else ''}" for name, us in taken.items())
    report.say(f"{op}: {winner} wins; µs: {line}")
    report.put("ops", op, {"winner": winner, "us": taken, "notes": notes})


def _is_right(note: str) -> bool:
    return not note or note.startswith("error")


def _each(launch: Launch, repeats: int) -> None:
    for _ in range(repeats):
        launch()


def _same(launch: Launch, out: torch.Tensor, wanted: torch.Tensor) -> str:
    out.fill_(torch.nan)
    launch()
    torch.cuda.synchronize()
    wrong = int((out != wanted).sum())
    return f"{wrong} of {out.numel()} differ" if wrong else ""


def _near(launch: Launch, out: torch.Tensor, exact: torch.Tensor, most: float) -> str:
    out.fill_(torch.nan)
    launch()
    torch.cuda.synchronize()
    error = float((out.double() - exact).norm() / exact.norm())
    return f"error {error:.1e}" if error <= most else f"off by {error:.1e}"


# -- token shift


class Shift:
    """Inputs of one sequence, and its launch by Triton."""

    def __init__(self, rows: int, mixes: int) -> None:
        self.x = torch.randn(rows, WIDTH, device="cuda")
        self.y = torch.randn(rows, WIDTH, device="cuda").half()
        self.norm = torch.randn(2, WIDTH, device="cuda")
        self.mixes = torch.rand(mixes, WIDTH, device="cuda")
        self.before = torch.randn(1, WIDTH, device="cuda")
        self.x_out, self.last = torch.empty_like(self.x), torch.empty_like(self.before)
        self.mixed = torch.empty(mixes, rows, WIDTH, dtype=torch.float16, device="cuda")
        self.kept = torch.empty(2, rows, WIDTH, device="cuda")
        self._meta = tuple(torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([0] * rows, [0, rows], [0]))

    def triton(self, keeps: bool = False, most: int = 6) -> None:
        """By the kernel of ops/shift_mix."""
        shift_mix(
            self.x, self.y, self.x_out, self.norm, EPS, self.mixes[:most], self.before, *self._meta, self.mixed[:most],
            self.last, overlap=False, kept=self.kept if keeps else None,
        )  # fmt: skip

    def tilelang(self, kernel: Any) -> None:
        """By TileLang."""
        given = (self.x, self.y, self.norm, self.mixes, self.before[0], self.x_out, self.mixed, self.last[0])
        kernel(*given)

    def exact(self) -> torch.Tensor:
        """Mixed rows in float64."""
        total = self.x.double() + self.y.double()
        normed = (
            torch.nn.functional.layer_norm(total, (WIDTH,), eps=EPS) * self.norm[0].double() + self.norm[1].double()
        )
        above = torch.cat([self.before.double(), normed[:-1]])
        return normed + (above - normed) * self.mixes.double()[:, None]


def shifts(report: Report, tiles: Tiles) -> None:
    """Add, norm, six mixes."""
    for rows in (1, *ROWS):
        given = Shift(rows, 6)
        exact = given.exact()
        contenders: dict[str, tuple[Launch, Check]] = {}
        launches: dict[str, Launch] = {"Triton": given.triton}
        launches |= {name: partial(given.tilelang, kernel) for name, kernel in tiles.of("shift", rows).items()}
        for name, launch in launches.items():
            contenders[name] = (launch, partial(_near, launch, given.mixed, exact, 5e-4))
        contest(report, f"add, norm, six mixes, {rows} rows", contenders, 20)


def mixed(report: Report, tiles: Tiles) -> None:
    """Three mixes and their products: mixed rows through memory, or made on the way into the product."""
    for rows in ROWS:
        given = Shift(rows, 3)
        weight = (torch.randn(3, WIDTH, WIDTH, device="cuda") / WIDTH**0.5).half()
        out = torch.empty(rows, 3, WIDTH, dtype=torch.float16, device="cuda")

        def library(given: Shift = given, weight: torch.Tensor = weight, out: torch.Tensor = out) -> None:
            given.triton(most=3)
            for i in range(3):
                torch.mm(given.mixed[i], weight[i].t(), out=out[:, i])

        def fused(kernel: Any, given: Shift = given, weight: torch.Tensor = weight, out: torch.Tensor = out) -> None:
            given.triton(keeps=True, most=1)
            kernel(given.kept, given.mixes, weight, out)

        library()
        wanted = out.clone()
        launches: dict[str, Launch] = {"Triton + library": library}
        launches |= {f"Triton + {name}": partial(fused, kernel) for name, kernel in tiles.of("mixed", rows).items()}
        contenders = {name: (launch, partial(_same, launch, out, wanted)) for name, launch in launches.items()}
        contest(report, f"norm, three mixes, r k v products, {rows} rows", contenders, 5)


# -- FFN


def ffn(report: Report, tiles: Tiles) -> None:
    """The key product with its squared ReLU, then both products."""
    key = _group(FFN, WIDTH, "relu2")
    value = _group(WIDTH, FFN, "none")
    configs = (Config(128, 64, 64, 4, 4), Config(64, 64, 64, 4, 3))
    for rows in ROWS:
        x = torch.randn(rows, WIDTH, device="cuda").half()
        middle = torch.empty(rows, FFN, dtype=torch.float16, device="cuda")
        out = torch.empty(rows, WIDTH, dtype=torch.float16, device="cuda")
        keys: dict[str, Launch] = {"library + activate": partial(key.library, x, middle)}
        keys |= {f"Triton {Choice('tile', c)}": partial(key.tiled, x, middle, c, overlap=False) for c in configs}
        weights = key.matrix("w"), value.matrix("w")
        keys |= {name: partial(kernel, x, weights[0], middle) for name, kernel in tiles.of("key", rows).items()}
        key.library(x, middle)
        wanted = middle.clone()
        contest(
            report,
            f"ffn key with squared ReLU, {rows} rows",
            {name: (launch, partial(_same, launch, middle, wanted)) for name, launch in keys.items()},
            5,
        )
        values: dict[str, Launch] = {"library": partial(value.library, middle, out)}
        values |= {name: partial(kernel, middle, weights[1], out) for name, kernel in tiles.of("value", rows).items()}
        value.library(wanted, out)
        expected = out.clone()
        pairs = {}
        for k, v in ((k, v) for k in keys for v in values if k == v or v == "library" or k == next(iter(keys))):
            pairs[f"{k}, {v}"] = partial(_pair, keys[k], values[v])
        contest(
            report,
            f"ffn, both products, {rows} rows",
            {name: (launch, partial(_same, launch, out, expected)) for name, launch in pairs.items()},
            5,
        )


def _group(columns: int, depth: int, activation: str) -> CudaGroup:
    group = CudaGroup([CudaProduct("w", depth, columns, activation=activation)], torch.float16, torch.device("cuda"))
    group.load("w", torch.randn(columns, depth, device="cuda").half() / depth**0.5)
    return group


def _pair(first: Launch, second: Launch) -> None:
    first()
    second()


# -- scan


@triton.jit
def triton_scan(made, state, y, N, H: tl.constexpr, ROWS: tl.constexpr):
    """One token after another, ROWS value channels a program; the next token's vectors are loaded one ahead."""
    h = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keys = tl.arange(0, 64)
    at = state + h * 4096 + keys[None, :] * 64 + rows[:, None]
    s = tl.load(at)
    token = made + h.to(tl.int64) * N * 384
    for n in tl.range(N, num_stages=3):
        w = tl.load(token + keys)
        k = tl.load(token + 64 + keys)
        a = tl.load(token + 128 + keys)
        b = tl.load(token + 192 + keys)
        r = tl.load(token + 256 + keys)
        v = tl.load(token + 320 + rows)
        removed = tl.sum(s * a[None, :], 1)
        s = s * w[None, :] + (removed[:, None] * b[None, :] + v[:, None] * k[None, :])
        tl.store(y + (n * H + h) * 64 + rows, tl.sum(s * r[None, :], 1))
        token += 384
    tl.store(at, s)


def scan(report: Report, tiles: Tiles) -> None:
    """A prompt of 1,024 tokens, one sequence, the scan alone."""
    op = kernels(64, torch.float16)
    for heads in HEADS:
        x, state = make(1, TOKENS, heads), torch.zeros(1, heads, 64, 64, device="cuda")
        made = torch.empty(TOKENS * op.made_values(heads), device="cuda")
        out, y = torch.empty_like(x[2]), torch.empty_like(x[2], dtype=torch.float32)
        starts, slots = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([0, TOKENS], [0]))
        op.prompt(*x, state, starts, slots, made, y, out, first_layer=False, eps=64e-5, overlap=False)
        tile = choose_tiling(TILINGS, heads)
        grid, threads = (64 // tile.columns_per_block, heads, 1), tile.threads
        passed = (made, y, state, starts, slots, TOKENS)
        launches: dict[str, Launch] = {"CUDA C++": partial(op._scans[tile], grid, threads, passed)}
        for rows, warps in ((8, 1), (16, 2), (32, 4)):
            launches[f"Triton {rows} rows"] = partial(
                triton_scan[(64 // rows, heads)], made, state, y, TOKENS, heads, rows, num_warps=warps
            )
        flat, view = made.view(heads, -1), y.view(TOKENS, heads, 64)
        launches |= {name: partial(kernel, flat, state[0], view) for name, kernel in tiles.of("scan", heads).items()}
        exact = _scanned(made.view(heads, TOKENS, 6, 64).double()).reshape(TOKENS, -1)
        contenders = {name: (launch, partial(_from_zero, launch, state, y, exact)) for name, launch in launches.items()}
        contest(report, f"WKV-7 scan, {TOKENS} tokens, {heads} heads", contenders, 4)


def _from_zero(launch: Launch, state: torch.Tensor, y: torch.Tensor, exact: torch.Tensor) -> str:
    state.zero_()
    return _near(launch, y, exact, 1e-5)


def _scanned(made: torch.Tensor) -> torch.Tensor:
    """y [T, H, 64] in float64, from vectors [H, T, 6, 64]."""
    heads, tokens = made.shape[:2]
    s = torch.zeros(heads, 64, 64, dtype=torch.float64, device=made.device)  # [value, key]
    found = []
    for t in range(tokens):
        w, k, a, b, r, v = made[:, t].unbind(1)
        removed = torch.einsum("hvk,hk->hv", s, a)
        s = s * w[:, None] + removed[:, :, None] * b[:, None] + v[:, :, None] * k[:, None]
        found.append(torch.einsum("hvk,hk->hv", s, r))
    return torch.stack(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when a contender is wrong."""
    report = Report(__doc__, ("shift", "mixed", "ffn", "scan"), arguments)
    torch.manual_seed(0)
    tiles = Tiles(report)
    parts: dict[str, Callable[[Report, Tiles], None]] = {"shift": shifts, "mixed": mixed, "ffn": ffn, "scan": scan}
    with exact_products():
        return report.each({name: partial(work, report, tiles) for name, work in parts.items()})


if __name__ == "__main__":
    sys.exit(main())
