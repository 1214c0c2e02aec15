"""Float32 prompts of RWKV-4 169M on a card: every layout of its products alone, its scan and token shift, the whole prompt.

    python lab/float32_products.py [--parts alone,around,prompt] [--json FILE]

``alone``: the four products of a layer at 32, 128 and 512 rows by every layout that tuning tries and some more, eight
launches over other weights one behind the other, the next let in when the sums are done (2); the fastest three also with the
next let in at once (1) and at the end (0). ``around``: the scan and the token shift. ``prompt``: 128 tokens through all
layers with the best layouts, products and token shift letting the next in earlier or later. Bits are checked before
anything is timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from card import Launch, Report, captured, medians_us

from kittiwake.bench.random import load_random
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.layers import cuda_probe
from kittiwake.layers.cuda_linear import (
    CANNOT_RUN,
    ROW_LIMITS,
    Choice,
    CudaGroup,
    CudaProduct,
    Picks,
    same_bits,
)
from kittiwake.ops.matmul import float32
from kittiwake.ops.matmul.float32 import Plain
from kittiwake.ops.shift_mix import triton as shifts
from kittiwake.ops.wkv4.cuda import kernels
from tests.device.runs import Runs

WIDTH, FFN, LAYERS, TOKENS = 768, 3072, 12, 128
ROWS = (128, 32, 512)
COPIES = 8
PRODUCTS: dict[str, tuple[CudaProduct, ...]] = {
    "2304x768/3": tuple(CudaProduct(n, WIDTH, WIDTH, i, activation=a) for i, (n, a) in enumerate(
        (("r", "sigmoid"), ("k", "none"), ("v", "none")))),
    "768x768": (CudaProduct("output", WIDTH, WIDTH),),
    "3840x768/2": (CudaProduct("key", WIDTH, FFN, 0, activation="relu2"),
                   CudaProduct("gate", WIDTH, WIDTH, 1, activation="sigmoid")),
    "768x3072": (CudaProduct("value", FFN, WIDTH),),
}  # fmt: skip
MORE: dict[int, tuple[tuple[int, ...], ...]] = {
    32: ((16, 48, 4, 2, 64, 3), (16, 16, 2, 1, 64, 3), (8, 32, 2, 2, 64, 4)),
    128: ((32, 24, 2, 3, 128, 3), (32, 24, 4, 3, 64, 3), (16, 48, 2, 3, 64, 3), (64, 48, 4, 6, 64, 3),
          (64, 48, 8, 3, 32, 4), (32, 96, 4, 6, 32, 4), (16, 32, 2, 2, 64, 3), (64, 64, 8, 4, 32, 4)),
    512: ((64, 48, 4, 6, 64, 3), (128, 48, 8, 6, 32, 3)),
}  # fmt: skip
"""Layouts beside those that tuning tries."""
FEW, USUAL = Choice("plain", Plain(8, 32, 2, 1, 64, 4)), Choice("plain", Plain(32, 32, 4, 2, 64, 3))
"""What serves up to 8 rows, and more of what is not measured here."""


@contextmanager
def begins(products: int, shift: bool = True) -> Iterator[None]:
    """When products let the next kernel begin, and whether the token shift does so at once."""
    kept = float32.BEGIN_NEXT, shifts.EARLY_ROWS
    float32.BEGIN_NEXT, shifts.EARLY_ROWS = {1 << 30: products}, (1 << 30 if shift else 0)
    try:
        yield
    finally:
        float32.BEGIN_NEXT, shifts.EARLY_ROWS = kept


def layouts(group: CudaGroup, rows: int) -> list[Choice]:
    """The in-order kernel in tiles first, then what fits of the others."""
    limit = next(most for most in cuda_probe._PLAIN if rows <= most)
    plains = dict.fromkeys((*cuda_probe._PLAIN[limit], *MORE[rows]))
    choices = [Choice("plain", Plain(*sizes)) for sizes in plains]
    law = group.in_order(rows)
    return [law, *(choice for choice in choices if group.can_run(choice, torch.float32))]


def weighted(products: Sequence[CudaProduct]) -> CudaGroup:
    """A group with random weights."""
    group = CudaGroup(products, torch.float32, torch.device("cuda"))
    group.weight.normal_(std=group.depth**-0.5)
    return group


def alone(report: Report, best: dict[tuple[str, int], Choice]) -> None:
    """Every layout of every product; the fastest goes into ``best``."""
    groups = {key: [weighted(products) for _ in range(COPIES)] for key, products in PRODUCTS.items()}
    trials = {key: cuda_probe._trial(same[0], torch.float32, max(ROWS)) for key, same in groups.items()}
    cuda_probe._compile(
        partial(cuda_probe._run_once, groups[key][0], choice, trials[key][0][..., :rows, :], trials[key][1][:rows])
        for key in groups
        for rows in ROWS
        for choice in layouts(groups[key][0], rows)
    )
    report.say("compiled")
    for rows in ROWS:
        for key, same in groups.items():
            given, expected = trials[key]
            law = layouts(same[0], max(ROWS))[0]
            same[0].run(law, given, expected, overlap=True)
            given, out = given[..., :rows, :], torch.empty_like(expected)[:rows]
            right = []
            for choice in layouts(same[0], rows):
                out.fill_(torch.nan)
                try:
                    same[0].run(choice, given, out, overlap=True)
                except CANNOT_RUN as err:
                    report.say(f"{key} {rows}: {choice} cannot run: {str(err)[:80]}")
                    continue
                if report.check(f"{key} {rows}: {choice}", same_bits(out, expected[:rows])):
                    right.append(choice)
            times = partial(timed, same, given, out)
            taken = times(right, 2)
            fastest = [choice for (choice, _), _ in sorted(taken.items(), key=itemgetter(1))[:3]]
            taken |= times(fastest, 1) | times(fastest, 0)
            best[key, rows] = min((us, str(case), case) for (case, begin), us in taken.items() if begin == 2)[2]
            report.say(f"{key} {rows} rows: {summary(taken, 2e-6 * same[0].columns * same[0].depth * rows)}")
            named = {f"{choice} begin {begin}": round(us, 2) for (choice, begin), us in taken.items()}
            report.put("alone", f"{key} {rows}", named)


def timed(
    same: Sequence[CudaGroup], given: torch.Tensor, out: torch.Tensor, choices: Sequence[Choice], begin: int
) -> dict[tuple[Choice, int], float]:
    """µs of a launch by each choice, of a chain over groups of one shape."""
    works: dict[Any, tuple[Launch, int]] = {}
    with begins(begin):
        for choice in choices:
            launches = [partial(group.run, choice, given, out, overlap=True) for group in same]
            works[choice, begin] = captured(launches), len(same)
    return medians_us(works, 3)


def summary(taken: dict[tuple[Choice, int], float], mflop: float) -> str:
    """The fastest four, and the best where the next launch is let in at another time: µs (TFLOP/s)."""
    ordered = sorted((us, str(choice), begin) for (choice, begin), us in taken.items())
    told = [f"{name} {us:.1f} ({mflop / us:.0f})" for us, name, begin in ordered if begin == 2][:4]
    told += [next(f"begin {at}: {name} {us:.1f}" for us, name, begin in ordered if begin == at) for at in (1, 0)]
    tile = next(us for (choice, _), us in taken.items() if choice.kind == "tile")
    return ", ".join([*told, f"tile {tile:.1f}"])


def around(report: Report) -> None:
    """The scan of one sequence of 128 tokens against its steps, and the token shift; µs a launch."""
    wkv, place = kernels(torch.float32), torch.device("cuda")
    projected = torch.randn((TOKENS, 3 * WIDTH), device=place)
    projected[:, :WIDTH].sigmoid_()
    vectors = torch.stack([-torch.rand(WIDTH, device=place), torch.randn(WIDTH, device=place)])
    starts, slots = (torch.tensor(values, dtype=torch.int32, device=place) for values in ((0, TOKENS), (0,)))
    out, stepped = (torch.full((TOKENS, WIDTH), torch.nan, device=place) for _ in "ab")
    sums = [tuple(torch.full((1, WIDTH), value, device=place) for value in (0.0, 0.0, -1e38)) for _ in "ab"]
    given: list[Any] = [projected, vectors, sums[0], starts, slots, out]
    wkv.prompt(*given, overlap=True)
    for t in range(TOKENS):
        wkv.decode(projected[t : t + 1], vectors, cast(Any, sums[1]), slots, stepped[t : t + 1], overlap=True)
    same = [same_bits(one, other) for one, other in zip((out, *sums[0]), (stepped, *sums[1]), strict=True)]
    report.check("scan: the bits of steps", all(same))
    x = torch.randn((TOKENS, WIDTH), device=place)
    norm, mixes = torch.randn((2, WIDTH), device=place), torch.rand((3, WIDTH), device=place)
    state, last = torch.randn((1, WIDTH), device=place), torch.empty((1, WIDTH), device=place)
    owners = torch.zeros(TOKENS, dtype=torch.int32, device=place)
    mixed = torch.empty((3, TOKENS, WIDTH), device=place)
    rest: list[Any] = [x.clone(), x.clone(), norm, 1e-5, mixes, state, owners, starts, slots, mixed, last]
    works: dict[str, tuple[Launch, int]] = {}
    for overlap in (True, False):
        name = "overlapping" if overlap else "one by one"
        works[f"scan {name}"] = captured([partial(wkv.prompt, *given, overlap=overlap)] * LAYERS), LAYERS
        works[f"shift {name}"] = captured([partial(shifts.shift_mix, x, *rest, overlap=overlap)] * LAYERS), LAYERS
    taken = medians_us(works)
    report.say("µs: " + ", ".join(f"{name} {us:.1f}" for name, us in taken.items()))
    report.put("around", "us", taken)


def prompt(report: Report, best: dict[tuple[str, int], Choice]) -> None:
    """128 tokens through the model, whole: ms by replays of its graph, and by the host's clock as they are served."""

    def picks(same: Sequence[CudaGroup], out_dtype: torch.dtype) -> Picks:
        found = []
        for most in ROW_LIMITS:
            rows = next((rows for rows in sorted(ROWS) if most <= rows), max(ROWS))
            found.append(FEW if most <= 8 else best.get((same[0].key, rows), USUAL))
        return Picks(tuple(found), "measured")

    kept = cuda_probe._tune, cuda_probe._keep, cuda_probe._found, cuda_probe._shipped
    cuda_probe._tune, cuda_probe._keep = picks, lambda *_: None
    cuda_probe._found = cuda_probe._shipped = lambda element: {}
    try:
        runs = Runs(load_random("rwkv4-169m", EngineConfig(device="cuda", dtype="fp32")).model, 4)
    finally:
        cuda_probe._tune, cuda_probe._keep, cuda_probe._found, cuda_probe._shipped = kept
    model, states = cast(Any, runs.model), cast(Any, runs.states)
    replaced = [line for pick in model.describe()["picks"] for line in pick["replaced"]]
    report.check(f"no pick was replaced: {replaced}", not replaced)
    report.check("prompt: the bits of its tokens", runs.split(runs.trace(100), [70, 1, 29]))
    report.say("model loaded")
    (slot,) = runs.slots(1)
    batch = Batch.pack([(slot, runs.ids(TOKENS))])
    works: dict[str, tuple[Launch, int]] = {}
    graphs, wanted = [], None
    for begin, shift in ((2, True), (2, False), (0, True), (0, False), (1, True)):
        name = f"products {begin}, shift {int(shift)}"
        states.graphs.clear()
        states.pool = None
        states.clear(slot)
        with begins(begin, shift):
            logits = torch.cat([model.forward_on_device(batch, states).clone() for _ in range(3)])
            wanted = logits if wanted is None else wanted
            report.check(f"{name}: the same bits", same_bits(logits, wanted))
            ((graph, *_),) = states.graphs.values()
            graphs.append(graph)
            works[name] = graph.replay, 1
            if (begin, shift) == (2, True):
                served = host_ms(partial(model.forward_on_device, batch, states))
    taken = {name: us / 1e3 for name, us in medians_us(works, 15).items()}
    report.say(f"prompt of 128, ms: {', '.join(f'{name} {ms:.3f}' for name, ms in taken.items())}, served {served:.3f}")
    report.put("prompt", "ms", taken | {"served": served})
    report.put("prompt", "picks", {f"{key} {rows}": str(choice) for (key, rows), choice in best.items()})


def host_ms(work: Launch) -> float:
    """Median of 30 calls, from the call to the card's being done."""
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Lines, and 1 when bits differ."""
    report = Report(__doc__, ("alone", "around", "prompt"), arguments)
    best: dict[tuple[str, int], Choice] = {}
    return report.each(
        {
            "alone": lambda: alone(report, best),
            "around": lambda: around(report),
            "prompt": lambda: prompt(report, best),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
