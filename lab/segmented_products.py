"""Do deep products get faster when a sum is defined as 2 or 4 chains over equal parts of K, for every row count?

    python lab/segmented_products.py [--parts bits,few,wide,wgmma] [--json FILE]

A part is walked in order; parts are added in order in float32. Three forms: the narrow kernel (a warp for each part),
Triton's tiles (an accumulator for each part), cuBLASLt in a pass for each part (float32 outputs, then beta = 1, then
rounded). ``bits``: do all three agree, and how far are they from float64; ``few``: 1 to 128 rows; ``wide``: 1,024 and
8,192 rows; ``wgmma``: what needs no other definition, one chain on Hopper's warpgroup instruction (wgmma_narrow.cu), whose
links are shorter, against today's kernels for up to 32 rows. Whole launches over weights that no L2 holds; fp16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from card import Launch, Report, captured, copies_of, medians_us
from wgmma import OTHERS, fitting, wide

from kittiwake.device import usable_cores
from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct, default_tile, exact_products
from kittiwake.ops.matmul.cuda import Narrow, narrow_product
from kittiwake.ops.matmul.triton import Config

SHAPES = ((2048, 8192), (8192, 2048), (2048, 2048), (768, 768), (768, 3072), (3072, 768), (4096, 16384))
"""Columns and depth: FFN value, FFN key and output of the 1.5B shape, the 0.1B shape's, and FFN value of the 7.2B shape."""
PARTS = (1, 2, 4)
FEW, WIDE = (1, 8, 32, 128), (1024, 8192)
NARROWS = {
    1: ((8, 8, 256, 6), (8, 8, 256, 4), (16, 8, 256, 3), (32, 8, 256, 4)),
    2: ((8, 8, 256, 3), (8, 8, 128, 6), (16, 8, 128, 4), (16, 8, 256, 3), (32, 8, 128, 4)),
    4: ((8, 8, 128, 3), (8, 8, 128, 4), (8, 8, 64, 6), (8, 8, 256, 3), (16, 8, 128, 3)),
}
"""Layouts by parts: a stage holds BK of every part."""
TILES = {
    16: ((16, 16, 256, 2, 4), (16, 32, 128, 2, 6), (16, 16, 128, 2, 6)),
    32: ((32, 16, 256, 2, 4), (32, 32, 128, 2, 6), (32, 32, 128, 4, 4)),
    128: ((64, 32, 128, 4, 4), (64, 64, 64, 4, 5), (64, 32, 256, 4, 2)),
}
"""Tiles by rows; BK is that of all parts together."""
Run = Callable[[CudaGroup, torch.Tensor, torch.Tensor], None]


def narrow(layout: Narrow, parts: int, group: CudaGroup, x: torch.Tensor, out: torch.Tensor) -> None:
    """By the narrow kernel."""
    narrow_product(x, group.weight, out, group.lines, group._codes, layout, overlap=True, parts=parts)


def tiled(config: Config, parts: int, group: CudaGroup, x: torch.Tensor, out: torch.Tensor) -> None:
    """By Triton's tiles."""
    group.tiled(x, out, config, overlap=True, parts=parts)


def library(parts: int, form: str, group: CudaGroup, x: torch.Tensor, out: torch.Tensor) -> None:
    """By cuBLASLt. ``form``: "passes" adds in the products, "joined" after them; "float32" leaves out the rounding."""
    weight = group.matrix("w").t()
    if parts == 1:
        torch.mm(x, weight, out=out)
        return
    part = group.depth // parts
    sums = _room("sums", out.shape)
    torch.mm(x[:, :part], weight[:part], torch.float32, out=sums)
    for p in range(1, parts):
        given = x[:, p * part : (p + 1) * part], weight[p * part : (p + 1) * part]
        if form == "joined":
            more = _room("more", out.shape)
            torch.mm(*given, torch.float32, out=more)
            sums.add_(more)
        else:
            torch.addmm(sums, *given, torch.float32, out=sums)
    if form != "float32":
        out.copy_(sums)


_rooms: dict[tuple[str, torch.Size], torch.Tensor] = {}


def _room(name: str, shape: torch.Size) -> torch.Tensor:
    if (name, shape) not in _rooms:
        _rooms[name, shape] = torch.empty(shape, dtype=torch.float32, device="cuda")
    return _rooms[name, shape]


def candidates(rows: int, parts: int) -> Iterator[tuple[str, Run]]:
    """What can serve so many rows."""
    if rows <= 32:
        for numbers in NARROWS[parts] if rows <= 8 else ((16, 8, 128, 3), (32, 8, 128, 3)):
            yield f"narrow {'x'.join(map(str, numbers))}", partial(narrow, Narrow(*numbers), parts)
    if rows > 1:
        for bm, bn, bk, warps, stages in TILES[next((most for most in TILES if rows <= most), 128)]:
            # Triton counts a stage for each of the parts' loads
            config = Config(bm, bn, bk // parts, warps, (stages - 1) * parts + 1)
            yield f"tile {'x'.join(map(str, astuple(config)))}", partial(tiled, config, parts)
    if rows >= 32:
        for form in ("passes", "joined", "float32") if parts > 1 else ("",):
            yield f"library {form}".strip(), partial(library, parts, form)


def groups_of(columns: int, depth: int, count: int) -> list[CudaGroup]:
    """Random weights of one shape, so many times over."""
    made = []
    for _ in range(count):
        group = CudaGroup([CudaProduct("w", depth, columns)], torch.float16, torch.device("cuda"))
        group.load("w", torch.randn(columns, depth, device="cuda").half() / depth**0.5)
        made.append(group)
    return made


def definition(parts: int, group: CudaGroup, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """What every form has to give."""
    out = torch.full((x.shape[0], group.columns), torch.nan, dtype=out_dtype, device="cuda")
    tile = default_tile(group.depth // parts, torch.float16, x.shape[0], False)
    tiled(Config(32, 32, tile.bk, 4, 2) if parts > 1 else tile, parts, group, x, out)
    return out


def compile_all(works: Sequence[tuple[int, Run]]) -> None:
    """Every kernel that is timed, for its row count, side by side."""
    group, rooms = groups_of(2048, 2048, 1)[0], []

    def once(rows: int, run: Run) -> None:
        with torch.cuda.device(0):
            x, out = (torch.zeros(rows, 2048, dtype=torch.float16, device="cuda") for _ in range(2))
            rooms.append((x, out))  # kernels still run when this returns
            with suppress(Exception):  # told where it is timed
                run(group, x, out)

    with ThreadPoolExecutor(min(16, usable_cores())) as pool:
        list(pool.map(lambda work: once(*work), works))
    torch.cuda.synchronize()


def bits(report: Report) -> None:
    """Do the forms agree; and errors against float64."""
    for columns, depth in SHAPES:
        group = groups_of(columns, depth, 1)[0]
        x = torch.randn(1000, depth, device="cuda").half()
        some = slice(0, 64)
        exact = x[some].double() @ group.matrix("w").double().t()
        told: list[str] = []
        for parts in PARTS:
            wanted, kept = (definition(parts, group, x, t) for t in (torch.float16, torch.float32))
            error = float((kept[some].double() - exact).norm() / exact.norm())
            wrong: dict[str, list[str]] = {}
            for rows in (*FEW, 1000):
                for name, run in candidates(rows, parts):
                    if name != "library float32":
                        what = agrees(run, group, x, wanted, rows)
                        wrong.setdefault(what, []).append(f"{rows}: {name}")
            agreeing = wrong.pop("", [])
            name = f"{columns} x {depth}, {parts} parts"
            for why, names in wrong.items():
                report.check(f"{name}: {why}: {'; '.join(names)}", False)
            told.append(
                f"{parts} parts {len(agreeing)} agree, {sum(map(len, wrong.values()))} do not, error {error:.1e}"
            )
            report.put("bits", name, {"agree": len(agreeing), "wrong": wrong, "error": error})
        report.say(f"{columns} x {depth}: " + "; ".join(told))


def agrees(run: Run, group: CudaGroup, x: torch.Tensor, wanted: torch.Tensor, rows: int) -> str:
    """Nothing when a form has the bits of the definition; else what is wrong."""
    for count in {rows, max(1, rows - 1)}:
        out = torch.full_like(wanted[:count], torch.nan)
        try:
            run(group, x[:count], out)
            torch.cuda.synchronize()
        except Exception as err:
            return f"{type(err).__name__}: {str(err)[:120]}"
        if not torch.equal(out, wanted[:count]):
            return f"{int((out != wanted[:count]).sum())} bits of {out.numel()}"
    return ""


def times(report: Report, part: str, counts: Sequence[int]) -> None:
    """The fastest of each number of parts, and by how much."""
    for columns, depth in SHAPES:
        groups = groups_of(columns, depth, copies_of(columns * depth * 2) if part == "few" else 2)
        for rows in counts:
            given = {
                (f"{parts}, unrounded" if name == "library float32" else str(parts), name): run
                for parts in PARTS
                for name, run in candidates(rows, parts)
            }
            if rows >= 1024:
                given = {key: run for key, run in given.items() if "tile" not in key[1] or "64x64" in key[1]}
            taken = timed(report, groups, rows, given)
            tell(report, part, groups[0], rows, taken)
        _rooms.clear()
        torch.cuda.empty_cache()


def timed(
    report: Report, groups: Sequence[CudaGroup], rows: int, given: Mapping[tuple[Any, str], Run]
) -> dict[tuple[Any, str], float]:
    """Median µs of each form, over the weights of all groups."""
    x = torch.randn(rows, groups[0].depth, device="cuda").half()
    out = torch.empty(rows, groups[0].columns, dtype=torch.float16, device="cuda")
    works: dict[tuple[Any, str], tuple[Launch, int]] = {}
    for (key, name), run in given.items():
        try:
            works[key, name] = (captured([partial(run, group, x, out) for group in groups]), len(groups))
        except Exception as err:
            report.say(f"  {name}, {key} cannot run: {type(err).__name__} {str(err)[:80]}")
            torch.cuda.synchronize()
    return medians_us(works, 3 if rows > 1024 else 5)


def tell(report: Report, part: str, group: CudaGroup, rows: int, taken: Mapping[tuple[Any, str], float]) -> None:
    """The fastest of each kind, against the first kind."""
    columns, depth = group.columns, group.depth
    kinds = list(dict.fromkeys(kind for kind, _ in taken))
    best = {kind: min((us, name) for (own, name), us in taken.items() if own == kind) for kind in kinds}
    first = best[kinds[0]][0]
    ratios = "  ".join(f"{kind}: {us:.2f} ({name}) x {first / us:.2f}" for kind, (us, name) in best.items())
    floor = (columns * depth * 2 + rows * (columns + depth) * 2) / 3.9e6
    report.say(f"{columns} x {depth}, {rows} rows, floor {floor:.1f}: µs  {ratios}")
    report.put(part, f"{columns}x{depth}, {rows} rows", {f"{kind}, {name}": us for (kind, name), us in taken.items()})


def warpgroups(report: Report) -> None:
    """One chain by wgmma: bits, then times against today's kernels and against 2 parts."""
    layouts = {rows: fitting(rows, 64) for rows in (1, 8, 16, 32)}
    compile_all([(rows, partial(wide, w)) for rows, some in layouts.items() for w in some])
    for columns, depth in SHAPES:
        groups = groups_of(columns, depth, copies_of(columns * depth * 2))
        x = torch.randn(100, depth, device="cuda").half()
        wanted = definition(1, groups[0], x, torch.float16)
        if (columns, depth) == SHAPES[0]:
            others = {str(w): agrees(partial(wide, w), groups[0], x, wanted, 1) or "agrees" for w in OTHERS}
            report.say("; ".join(f"{name}: {told}" for name, told in others.items()))
            report.put("wgmma", "other layouts", others)
        for rows, some in layouts.items():
            right: dict[tuple[Any, str], Run] = {}
            for layout in some:
                told = agrees(partial(wide, layout), groups[0], x, wanted, rows)
                if report.check(f"{columns} x {depth}, {rows} rows, {layout}{': ' + told if told else ''}", not told):
                    right["wgmma", str(layout)] = partial(wide, layout)
            if rows == 1 and not agrees(partial(wide, OTHERS[1]), groups[0], x, wanted, 1):
                right["without fences", str(OTHERS[1])] = partial(wide, OTHERS[1])
            today = {("today", name): run for name, run in candidates(rows, 1)}
            parts = {("2 parts", name): run for name, run in candidates(rows, 2)}
            tell(report, "wgmma", groups[0], rows, timed(report, groups, rows, today | right | parts))


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when a form has other bits than the definition."""
    report = Report(__doc__, ("bits", "few", "wide", "wgmma"), arguments)
    torch.manual_seed(0)
    with exact_products():
        compile_all([(n, run) for p in PARTS for n in FEW for name, run in candidates(n, p) if "library" not in name])
        report.say("compiled")
        return report.each(
            {
                "bits": lambda: bits(report),
                "few": lambda: times(report, "few", FEW),
                "wide": lambda: times(report, "wide", WIDE),
                "wgmma": lambda: warpgroups(report),
            }
        )


if __name__ == "__main__":
    sys.exit(main())
