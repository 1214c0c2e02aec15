"""Where the time of one RWKV-7 decode step goes: the kernels of a layer in sequence, with overlapping launches and without.

    python lab/step_profile.py [--parts trace,without,begin] [--json FILE]

``trace``: CUPTI's begin and end of every kernel of a replayed step, medians over replays for the middle layer. It says how
much the tracing itself slows the step. ``without``: no tracing; the step as it is, the step with one kind of kernel left
out (what that kind costs in sequence), and that kind alone over all layers. ``begin``: whole steps and a prompt of the 1.5B
shape with kernels that let the next one begin earlier or later. Random weights, fp16.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from card import Report, captured, medians_us

from kittiwake.bench.random import load_random
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.families import rwkv7_cuda
from kittiwake.layers.cuda_linear import exact_products
from kittiwake.ops import head_kernels
from kittiwake.ops.matmul import triton as tiles
from tests.device.runs import Runs

SHAPES = ("1.5b", "0.1b")
REQUESTS = (1, 8, 32)
REPLAYS = 7
BEGINS: tuple[dict[str, int], ...] = (
    {}, {"tile": 1}, {"tile": 2}, {"mix": 0}, {"mix": 1},
    {"tile": 1, "mix": 1}, {"tile": 2, "mix": 1},
)  # fmt: skip
"""What differs from today in when a kind of kernel lets the next begin; narrow products are for step_search.py."""
MODULES = {"tile": tiles, "mix": head_kernels}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a trace; µs."""

    name: str
    begin: float
    end: float
    blocks: int
    threads: int
    registers: int
    shared: int


@dataclass(frozen=True)
class Role:
    """What a kernel of a layer is for, and the bytes it has to move."""

    name: str
    nbytes: int


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """The kernels of a Chrome trace as torch.profiler writes it, in the order they began."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            given, begin = event["args"], float(event["ts"])
            blocks, threads = (_product(given.get(part, [0])) for part in ("grid", "block"))
            sizes = int(given.get("registers per thread", 0)), int(given.get("shared memory", 0))
            found.append(Kernel(event["name"], begin, begin + float(event["dur"]), blocks, threads, *sizes))
    return sorted(found, key=lambda kernel: kernel.begin)


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total


def layers_of(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels of each layer: two token shifts a layer, and what stands before the last norm."""
    names = [kernel.name for kernel in kernels]
    end = next(i for i, name in enumerate(names) if name.startswith("commit_kernel"))
    shifts = [i for i, name in enumerate(names[:end]) if name.startswith("shift_kernel")]
    borders = [*shifts[::2], end]
    return [list(kernels[first:last]) for first, last in itertools.pairwise(borders)]


def roles_of(model: Any, layer: Any, rows: int) -> list[Role]:
    """The kernels of a layer's decode step in order; a group the library serves has one for each product and activation."""
    width, state = model.width, 2 * rows * model._sizes.heads * model._sizes.head_size**2 * 4
    row = rows * width

    def product(name: str, group: Any) -> list[Role]:
        moved = group.nbytes + rows * 2 * (group.depth + group.columns)
        if group.picks.choice(rows).kind != "library":
            return [Role(name, moved)]
        parts = [p for p in group.products for _ in range(1 + (p.activation != "none"))]
        return [Role(f"{name} {i + 1}", moved // len(parts)) for i in range(len(parts))]

    depths = [p.depth for p in layer.low_rank.products]
    is_inside = model._wkv.can_take_low(depths, rows)
    mix = Role("time mix, low-rank ups inside", state + layer.low_rank.nbytes) if is_inside else Role("time mix", state)
    return [
        Role("shift, six mixes", row * (4 + 2 + 4 + 4 + 4 + 12)),
        *product("r, k, v, low-rank downs", layer.projections),
        *([] if is_inside else product("low-rank ups", layer.low_rank)),
        mix,
        *product("output", layer.output),
        Role("shift, one mix", row * (4 + 2 + 4 + 4 + 4 + 2)),
        *product("ffn key", layer.ffn_key),
        *product("ffn value", layer.ffn_value),
    ]


def table(replays: Sequence[list[list[Kernel]]], index: int, roles: Sequence[Role]) -> list[dict[str, Any]]:
    """Medians over replays for layer ``index``: from its first kernel's begin; ``gap`` < 0 is overlap with the one before."""
    lines = []
    for place, role in enumerate(roles):
        begins, lasts, gaps = [], [], []
        for layers in replays:
            layer = layers[index]
            kernel = layer[place]
            before = layer[place - 1] if place else layers[index - 1][-1]
            begins.append(kernel.begin - layer[0].begin)
            lasts.append(kernel.end - kernel.begin)
            gaps.append(kernel.begin - before.end)
        shown, took = replays[0][index][place], statistics.median(lasts)
        lines.append(
            {
                "role": role.name,
                "begin_us": round(statistics.median(begins), 2),
                "us": round(took, 2),
                "gap_us": round(statistics.median(gaps), 2),
                "blocks": shown.blocks,
                "threads": shown.threads,
                "registers": shown.registers,
                "shared": shown.shared,
                "mb": round(role.nbytes / 1e6, 2),
                "tb_s": round(role.nbytes / took / 1e6, 2),
                "kernel": shown.name[:24],
            }
        )
    return lines


def layer_us(replays: Sequence[list[list[Kernel]]], index: int) -> float:
    """Median µs from a layer's first begin to the next layer's."""
    return statistics.median(layers[index + 1][0].begin - layers[index][0].begin for layers in replays)


class Step:
    """A model with a batch of one row a request, and its captured step."""

    def __init__(self, shape: str, requests: int, runs: Runs) -> None:
        self.shape, self.requests, self.runs = shape, requests, runs
        self.model: Any = runs.model
        slots = runs.slots(requests)
        self.batch = Batch.pack([(slot, runs.ids(1)) for slot in slots])
        self.free = lambda: runs.free(slots)

    def overlap(self, is_on: bool) -> None:
        """Launches overlap from now on, or not; graphs are captured again."""
        self.model.overlap = is_on
        states: Any = self.runs.states
        states.graphs.clear()
        states.pool = None

    def replay(self) -> None:
        """One step."""
        self.model.forward_on_device(self.batch, self.runs.states)

    def layers(self) -> tuple[list[list[Kernel]], float]:
        """The kernels of one traced step by layer, and its µs from the first kernel to the end of the last."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            self.replay()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            traced.export_chrome_trace(str(path))
            kernels = kernels_of(json.loads(path.read_text(encoding="utf-8")))
        return layers_of(kernels), max(kernel.end for kernel in kernels) - kernels[0].begin

    def trace(self, report: Report, is_on: bool) -> None:
        """Print and keep the middle layer's table."""
        self.overlap(is_on)
        for _ in range(3):
            self.replay()
        plain = medians_us({"step": (self.replay, 1)}, 15)["step"]
        self.layers()  # the first trace starts CUPTI
        replays, spans = zip(*(self.layers() for _ in range(REPLAYS)), strict=True)
        count, index = len(replays[0]), len(replays[0]) // 2
        roles = roles_of(self.model, self.model._layer_list[index], self.requests)
        name = f"{self.shape}, {self.requests} requests, overlap {'on' if is_on else 'off'}"
        in_layer = {len(layers[index]) for layers in replays}
        if not report.check(f"{name}: {len(roles)} kernels a layer, not {in_layer}", in_layer == {len(roles)}):
            roles = [Role("?", 0)] * min(in_layer)
        lines = table(replays, index, roles)
        took = layer_us(replays, index)
        inner = [layer_us(replays, i) for i in range(1, count - 1)]
        busy = sum(line["us"] for line in lines)
        span = statistics.median(spans)
        report.say(
            f"{name}: step {plain:.0f} µs untraced, {span:.0f} traced; layer {index} of {count}: {took:.1f} µs from begin "
            f"to begin, kernels' own times {busy:.1f}; other layers' median {statistics.median(inner):.1f}"
        )
        for line in lines:
            report.say(
                f"  {line['begin_us']:6.2f} +{line['us']:6.2f} gap {line['gap_us']:6.2f}  {line['role'][:28]:28} "
                f"{line['blocks']:5} x {line['threads']:4}  {line['mb']:6.2f} MB {line['tb_s']:5.2f} TB/s"
            )
        kept = {"step_us": plain, "traced_us": span, "layer_us": took, "own_us": busy, "kernels": lines}
        report.put("trace", name, kept)

    def without(self, report: Report, is_on: bool) -> None:
        """The step without one kind of kernel, and that kind alone."""
        self.overlap(is_on)
        states, model = self.runs.states, self.model
        model._buffer()
        from kittiwake.families.cuda_rows import cut, shape_of

        piece = cut(self.batch, model.most_rows)[0]
        shape, _ = shape_of(piece, model.most_rows)
        model._buffer().fill(piece, shape)
        rows = model._buffer().views(shape)
        count = len(model._layer_list)

        def launch() -> None:
            x, y = model._layers(rows, states, None)
            model._logits(x, y, rows)

        def layers_alone() -> None:
            model.trunk(model.room("x0", shape.rows, model.width, dtype=torch.float32), rows, states, None)

        small = torch.zeros(1, device="cuda")
        works = {("all", "left out"): (captured([launch]), 1), ("one small", "alone"): (captured([small.zero_]), 1)}
        is_inside = model._wkv.can_take_low([p.depth for p in model._layer_list[1].low_rank.products], shape.rows)
        kinds = [kind for kind in KINDS if kind != "low ups" or not is_inside]
        for kind in kinds:
            for is_alone in (False, True):
                with only(model, kind, is_alone=is_alone):
                    graph = captured([layers_alone if is_alone else launch])
                works[kind, "alone" if is_alone else "left out"] = (graph, 1)
        taken = medians_us(works)
        whole, base = taken["all", "left out"], taken["one small", "alone"]
        name = f"{self.shape}, {self.requests} requests, overlap {'on' if is_on else 'off'}"
        report.say(f"{name}: step {whole:.0f} µs, {count} layers; µs a layer: in sequence, alone")
        found = {}
        for kind in kinds:
            costs = (whole - taken[kind, "left out"]) / count, (taken[kind, "alone"] - base) / count
            found[kind] = [round(cost, 2) for cost in costs]
            report.say(f"  {kind:10} {costs[0]:6.2f} {costs[1]:6.2f}")
        sums = [round(sum(costs), 2) for costs in zip(*found.values(), strict=True)]
        report.say(f"  {'sum':10} {sums[0]:6.2f} {sums[1]:6.2f}")
        report.put("without", name, {"step_us": whole, "in_sequence_and_alone_us": found, "sums": sums})


def begin(report: Report, runs: Runs) -> None:
    """Times and bits of every setting of BEGINS, case by case."""
    today = {name: module.BEGIN_NEXT for name, module in MODULES.items()}
    for sequences, tokens in ((1, 1), (8, 1), (32, 1), (1, 1024)):
        slots = runs.slots(sequences)
        batch = Batch.pack([(slot, runs.ids(tokens)) for slot in slots])
        model, states = cast(Any, runs.model), cast(Any, runs.states)
        kept: list[Any] = []
        works: dict[str, Any] = {}
        wanted: torch.Tensor | None = None
        for setting in BEGINS:
            name = ", ".join(f"{kind} {value}" for kind, value in setting.items()) or "today"
            for kind, module in MODULES.items():
                module.BEGIN_NEXT = type(today[kind])((today | setting)[kind])
            states.graphs.clear()
            states.pool = None
            for slot in slots:
                states.clear(slot)
            logits = [model.forward_on_device(batch, states).clone() for _ in range(3)]
            found = torch.cat(logits)
            wanted = found if wanted is None else wanted
            report.check(f"{sequences}x{tokens}, {name}: the bits of today", torch.equal(found, wanted))
            (graph, *_), *others = states.graphs.values()
            assert not others
            kept.append(graph)
            works[name] = (graph.replay, 1)
        for kind, module in MODULES.items():
            module.BEGIN_NEXT = today[kind]
        taken = medians_us(works, 10 if tokens == 1 else 5)
        ordered = sorted(taken.items(), key=lambda item: item[1])
        report.say(f"{sequences}x{tokens}: µs  " + "  ".join(f"{name} {us:.0f}" for name, us in ordered))
        report.put("begin", f"{sequences}x{tokens}", taken)
        states.graphs.clear()
        states.pool = None
        runs.free(slots)


KINDS = ("shifts", "r, k, v", "low ups", "time mix", "output", "ffn key", "ffn value")
"""Kinds of launches in a layer; low-rank ups inside the time mix count there."""


@contextmanager
def only(model: Any, kind: str, *, is_alone: bool) -> Iterator[None]:
    """Launches of one kind are left out inside; or with ``is_alone`` all others are. Addresses and sizes stay as they are."""
    keeps = lambda given: (given == kind) is is_alone  # noqa: E731
    groups = {"r, k, v": "projections", "low ups": "low_rank", "output": "output"}
    groups |= {"ffn key": "ffn_key", "ffn value": "ffn_value"}
    nothing = lambda *given, **named: None  # noqa: E731
    shift, wkv = rwkv7_cuda.shift_mix, model._wkv
    commit = rwkv7_cuda.commit_shifts
    kept = [
        (layer, attribute, getattr(layer, attribute)) for layer in model._layer_list for attribute in groups.values()
    ]
    try:
        if not keeps("shifts"):
            rwkv7_cuda.shift_mix = nothing
        if is_alone:
            rwkv7_cuda.commit_shifts = nothing
        if not keeps("time mix"):
            wkv.decode = wkv.decode_low = nothing
        for given, attribute in groups.items():
            if not keeps(given):
                for layer in model._layer_list:
                    setattr(layer, attribute, _Silent(getattr(layer, attribute)))
        with exact_products():
            yield
    finally:
        rwkv7_cuda.shift_mix, rwkv7_cuda.commit_shifts = shift, commit
        vars(wkv).pop("decode", None)
        vars(wkv).pop("decode_low", None)
        for layer, attribute, group in kept:
            setattr(layer, attribute, group)


class _Silent:
    """A group of products that launches nothing."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __call__(self, *given: Any, **named: Any) -> None:
        """Nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Tables, and 1 when a layer has other kernels than expected."""
    report = Report(__doc__, ("trace", "without", "begin"), arguments)
    works: dict[str, Callable[[], None]] = {"begin": lambda: begin(report, model_of(SHAPES[0]))}
    for part in ("trace", "without"):

        def work(part: str = part) -> None:
            for step in steps():
                for is_on in (True, False):
                    getattr(step, part)(report, is_on)

        works[part] = work

    def model_of(shape: str) -> Runs:
        if shape not in loaded:
            loaded[shape] = Runs(load_random(shape, EngineConfig(device="cuda", dtype="fp16")).model, 40)
            report.say(f"{shape} loaded")
        return loaded[shape]

    def steps() -> Iterator[Step]:
        for shape in SHAPES:
            for requests in REQUESTS:
                step = Step(shape, requests, model_of(shape))
                yield step
                step.free()

    loaded: dict[str, Runs] = {}
    return report.each(works)


if __name__ == "__main__":
    sys.exit(main())
