"""Two forms of the WKV-7 prompt path side by side: the serial scan of ops/wkv7, and blocks of tokens in three launches.

    python lab/wkv7_blocks.py [--heads 12,32,64]    # on a CUDA device: errors, cuts, times, and a line of JSON
    TRITON_INTERPRET=1 python lab/wkv7_blocks.py    # anywhere: errors and cuts of a small case

The block form, its maths and its launches are in wkv7_block_kernels.py.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import triton
from triton.runtime import interpreter
from wkv7_block_kernels import finish_blocks, prepare_blocks, scan_blocks

from kittiwake.ops.head_kernels import TILINGS, choose_tiling
from kittiwake.ops.wkv7.cuda import kernels

INTERPRET = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRET else "cuda"
EPS = 64e-5
Part = Callable[[], object]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""float16 [N, r|k|v], [N, decay|rate|gate|residual], v_first [N, C]; float32 vectors [8, C]: as Wkv7.prompt takes them."""
_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor, scope) -> None:  # type: ignore[no-untyped-def]
    """NumPy no longer takes an array of one element for a whole number, which the interpreter still asks of it."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index


@dataclass(frozen=True)
class Form:
    """Blocks of ``length`` rows, float16 operands or tf32x3, ``warps`` a program of the scan; or the serial form."""

    name: str
    length: int = 0
    half: bool = False
    warps: int = 1

    def launches(
        self, x: Inputs, state: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, longest: int,
        out: torch.Tensor, y: torch.Tensor, keep: bool,
    ) -> tuple[list[Part], dict[str, Part]]:  # fmt: skip
        """The whole path, and launches alone. state [S, H, K, V] is that before each sequence's first row."""
        return (self._blocks if self.length else self._serial)(x, state, starts, slots, longest, out, y, keep)

    def _blocks(self, x, state, starts, slots, longest, out, y_kept, keep):  # type: ignore[no-untyped-def]
        L, half, heads, batch = self.length, self.half, state.shape[1], slots.shape[0]
        nb = -(-longest // L)
        grid, wide, size = (nb, heads, batch), L // 4, (heads, nb)

        def room(values: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(batch * heads * nb * values, dtype=dtype, device=DEVICE)

        w, b, k, v, r = (room(L * 64, torch.float16 if half else torch.float32) for _ in range(5))
        z, y, decay, bonus, borders = (room(values) for values in (L * 64, L * 64, 64, L, 64 * 64))
        first = (*x, starts, w, b, k, v, z, r, y, decay, bonus, *size, L, L.bit_length() - 1, half)
        middle = (w, b, k, v, z, decay, state, starts, slots, borders, *size, L, 16, 3, half)
        last = (x[1], x[3], v, r, y, bonus, borders, starts, out, y_kept, *size, EPS, L, keep, half)
        scans = {n: lambda n=n: scan_blocks[(4, heads, batch)](*middle, num_warps=n) for n in (1, 2, 4)}
        prepare = lambda: prepare_blocks[grid](*first, num_warps=wide)  # noqa: E731
        finish = lambda: finish_blocks[grid](*last, num_warps=wide)  # noqa: E731
        alone = {f"scan in {n} warps": scan for n, scan in scans.items()}
        return [prepare, scans[self.warps], finish], {"prepare": prepare, "finish": finish, **alone}

    def _serial(self, x, state, starts, slots, longest, out, y, keep):  # type: ignore[no-untyped-def]
        op, rows, heads, batch = kernels(64, torch.float16), out.shape[0], state.shape[1], slots.shape[0]
        made, tile = torch.empty(rows * op.made_values(heads), device=DEVICE), choose_tiling(TILINGS, heads * batch)
        given, scan = (*x, state, starts, slots, made, y, out), op._scans[tile]
        threads, grid = tile.threads, (64 // tile.columns_per_block, heads, batch)
        path = lambda: op.prompt(*given, first_layer=False, eps=EPS, overlap=True)  # noqa: E731
        return [path], {"scan": lambda: scan(grid, threads, (made, y, state, starts, slots, rows), overlap=True)}


def make(batch: int, rows: int, heads: int, case: str = "random") -> Inputs:
    """``repeated``: each sequence one token over and over, slow decay; ``fast``: the fastest decay, large keys."""
    width, many = heads * 64, batch * rows
    projected, low, v_first = (torch.randn(many, n * width, device=DEVICE).half() for n in (3, 4, 1))
    vectors = torch.randn(8, width, device=DEVICE)
    vectors[0].uniform_(-7, 3)
    if case == "repeated":
        vectors[0], vectors[1] = -7, 5
        first = torch.arange(many, device=DEVICE) // rows * rows
        projected, low = projected[first], low[first]
    if case == "fast":
        vectors[0], vectors[1] = 12, 5
        projected[:, width : 2 * width] *= 2
    return projected, low, v_first, vectors


def oracle(x: Inputs, state: torch.Tensor, border: int) -> list[torch.Tensor]:
    """Float64: the path's outputs and the scan's, both [N, C], and the state after ``border`` rows."""
    batch, heads, width = len(state), state.shape[1], x[3].shape[1]
    r, k, v, raw, rate, gate, residual, v_first = (
        t.reshape(batch, -1, heads, 64) for t in torch.cat(x[:3], 1).double().split(width, 1)
    )
    w0, a0, v0, kk, ka, rk, weight, bias = x[3].double().view(8, heads, 64)
    decay, rate = torch.exp(-0.6065306597126334 * torch.sigmoid(raw + w0)), torch.sigmoid(rate + a0)
    v = v + (v_first - v) * torch.sigmoid(residual + v0)
    unit = torch.nn.functional.normalize(k * kk, dim=-1, eps=1e-12)
    k = k * (1 + (rate - 1) * ka)
    s, ys, kept = state.double(), [], state.double()
    for t in range(r.shape[1]):
        removed = torch.einsum("bhk,bhkv->bhv", -unit[:, t], s)
        s = s * decay[:, t, :, :, None] + (unit * rate)[:, t, :, :, None] * removed[:, :, None]
        s = s + k[:, t, :, :, None] * v[:, t, :, None]
        ys.append(torch.einsum("bhk,bhkv->bhv", r[:, t], s))
        kept = s if t + 1 == border else kept
    y = torch.stack(ys, 1)
    normed = torch.nn.functional.layer_norm(y, (64,), eps=EPS) * weight + bias
    out = (normed + (r * k * rk).sum(-1, keepdim=True) * v) * gate
    return [out.reshape(-1, width), y.view(-1, width), kept]


def run(
    form: Form, x: Inputs, state: torch.Tensor, at: torch.Tensor, lengths: list[int], slots: list[int]
) -> list[torch.Tensor]:
    """Outputs of path and scan for the rows ``at`` of x; state moves to the last border, with the serial form to the end."""
    x = (x[0][at], x[1][at], x[2][at], x[3])
    out, y = torch.empty_like(x[2]), torch.empty_like(x[2], dtype=torch.float32)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    where = (torch.tensor(given, dtype=torch.int32, device=DEVICE) for given in (starts, slots))
    for part in form.launches(x, state, *where, max(lengths), out, y, True)[0]:
        part()
    return [out, y]


def errors(form: Form, x: Inputs, state: torch.Tensor, rows: int, exact: list[torch.Tensor]) -> dict[str, float]:
    """Relative RMS errors of the outputs, and of the state after rows // 32 * 32."""
    batch, made, table = len(state), [], state.clone()
    for n in (rows, rows // 32 * 32):
        table = state.clone()
        at = torch.cat([torch.arange(n, device=DEVICE) + i * rows for i in range(batch)])
        made.append(run(form, x, table, at, [n] * batch, list(range(batch))))
    found = zip(("out", "y", "state"), (*made[0], table), exact, strict=True)
    return {name: float((value.double() - true).norm() / true.norm()) for name, value, true in found}


def cuts_agree(form: Form, x: Inputs, state: torch.Tensor, rows: int, seed: int) -> bool:
    """Each sequence in pieces of its own random lengths, its open block again from raw rows: the bits of one piece?"""
    batch, L, pick, every = len(state), form.length, random.Random(seed), torch.arange(len(x[0]), device=DEVICE)
    whole_state, table, position = state.clone(), state.clone(), [0] * batch
    whole = run(form, x, whole_state, every, [rows] * batch, list(range(batch)))
    cut = [torch.zeros_like(t) for t in whole]
    while slots := [b for b in range(batch) if position[b] < rows]:
        begin = {b: position[b] // L * L for b in slots}
        end = {b: min(rows, position[b] + pick.choice((1, 2, 7, 15, 16, 17, 40, 200))) for b in slots}
        at = torch.cat([every[b * rows + begin[b] : b * rows + end[b]] for b in slots])
        new = torch.cat([torch.arange(begin[b], end[b], device=DEVICE) >= position[b] for b in slots])
        for to, made in zip(cut, run(form, x, table, at, [end[b] - begin[b] for b in slots], slots), strict=True):
            to[at[new]] = made[new]
        position = [end.get(b, rows) for b in range(batch)]
    return all(map(torch.equal, (*cut, table), (*whole, whole_state)))


def captured(parts: list[Part], repeats: int) -> torch.cuda.CUDAGraph:
    """The parts in order, so many times over, after a warm-up."""
    for part in parts:
        part()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for part in parts * repeats:
            part()
    return graph


def times(forms: list[Form], heads: int, rows: int, batch: int) -> dict[str, dict[str, float]]:
    """Median µs of each form's path and of its launches, A B C C B A in each of five rounds."""
    x, repeats = make(batch, rows, heads), 8 if batch == 1 else 1
    slots = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * rows
    graphs, kept = {}, []  # what graphs write must outlive them
    for form in forms:
        state, out = torch.zeros(batch, heads, 64, 64, device=DEVICE), torch.empty_like(x[2])
        y = torch.empty_like(out, dtype=torch.float32)
        path, alone = form.launches(x, state, starts, slots, rows, out, y, False)
        kept.append((path, alone))
        graphs[form.name, "path"] = captured(path, repeats)
        graphs |= {(form.name, name): captured([part], repeats) for name, part in alone.items()}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for key in [*graphs, *reversed(graphs)] * 5:
        start.record()
        graphs[key].replay()
        end.record()
        end.synchronize()
        samples[key].append(start.elapsed_time(end) * 1e3 / repeats)
    median = {key: round(statistics.median(taken), 1) for key, taken in samples.items()}
    return {form.name: {part: us for (name, part), us in median.items() if name == form.name} for form in forms}


def say(line: str) -> None:
    """A line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Errors and cuts, then times; a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="12,32,64", help="of the cases that are timed")
    timed_heads = [int(count) for count in parser.parse_args().heads.split(",")]
    torch.manual_seed(0)
    begun = time.perf_counter()
    batch, rows, heads = (2, 37, 2) if INTERPRET else (2, 1000, 3)
    blocks = [
        Form("blocks of 16", 16, False, 2),
        Form("blocks of 32", 32, False, 2),
        Form("blocks of 16, fp16", 16, True),
    ]
    forms = blocks if INTERPRET else [Form("serial"), *blocks]
    report: dict[str, object] = {"device": DEVICE if INTERPRET else torch.cuda.get_device_name()}
    for case in ("random", "repeated", "fast"):
        x, state = make(batch, rows, heads, case), torch.randn(batch, heads, 64, 64, device=DEVICE)
        exact = oracle(x, state, rows // 32 * 32)
        for form in forms:
            found = report[f"errors, {case}, {form.name}"] = errors(form, x, state, rows, exact)
            say(f"{case:9} {form.name:18} errors: " + "  ".join(f"{name} {e:.1e}" for name, e in found.items()))
        for form in blocks:
            found = report[f"cuts, {case}, {form.name}"] = [cuts_agree(form, x, state, rows, seed) for seed in range(2)]
            say(f"{case:9} {form.name:18} random cuts with equal bits: {found}")
    for heads in [] if INTERPRET else timed_heads:
        for rows, batch in ((1024, 1), (4096, 1), (1024, 8), (4096, 8)):
            measured = report[f"us, H {heads} T {rows} B {batch}"] = times(forms, heads, rows, batch)
            for name, parts in measured.items():
                ratio = measured["serial"]["path"] / parts["path"]
                line = "  ".join(f"{part} {us:.1f}" for part, us in parts.items())
                say(f"H {heads:2} T {rows} B {batch}  {name:18} x {ratio:.2f}  µs: {line}")
    report["seconds"] = round(time.perf_counter() - begun, 1)
    say(json.dumps(report))


if __name__ == "__main__":
    main()
