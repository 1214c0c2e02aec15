"""What the model launches, by what Triton compiles for it: every kernel that takes a sum is one binary for all rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from triton.runtime.jit import JITFunction

from kittiwake.bench.qwen4exp_shapes import QWEN4EXP_SHAPES, Qwen4ExpShape
from kittiwake.bench.random import RandomSource, RandomWeights
from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.families.cuda_rows import Shape
from kittiwake.families.qwen4exp.cuda_blocks import Launch
from kittiwake.families.qwen4exp.cuda_rooms import Rooms
from kittiwake.families.qwen4exp.cuda_rows import MetaBuffer
from kittiwake.families.qwen4exp.cuda_trunk import CudaTrunk
from kittiwake.families.qwen4exp.family import Qwen4ExpFamily
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.families.qwen4exp.sizes import attention_shape
from kittiwake.families.qwen4exp.state import state_spec
from kittiwake.layers.cuda_linear import padded_row
from kittiwake.ops.block_attention.triton import AttentionRows, make_rooms

META, MOST_ROWS = torch.device("meta"), 600
ODD = Qwen4ExpShape(width=36, key_heads=1, value_heads=3, key_size=9, value_size=7, head_size=18, rotary_size=6)
SHAPES = {"released": QWEN4EXP_SHAPES["qwen4exp-4of48"], "small": Qwen4ExpShape(), "odd": ODD}
LAUNCHES = (
    *((Shape(True, rows, rows, rows), None) for rows in (1, 4, 6, 48)),
    (Shape(False, 1, 1, 1), 70),
    (Shape(False, 7, 3, 2), 5000),
    (Shape(False, 500, 1, 40), 500),
    (Shape(False, 600, 30, 0), 9000),
)
"""Of a step, where the longest sequence is not known, and of prompts."""
PROVED = {"product", "gate_up_kernel", "down_kernel"}
"""Tiled by the number of rows; proved at load."""
ROUND_ALIKE = {
    "combine_kernel",  # its sums lie alike whatever is added (test_hybrid_kernels.py)
    "group_kernel",  # whole numbers
    "sequences_kernel",  # no sum over channels, no contraction
    "rows_kernel",
    "keep_kernel",
}
Binary = tuple[Any, ...]


def binary_of(kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Binary:
    """What a launch is compiled for: constants and options, types, whether addresses and numbers are multiples of 16."""
    names = [parameter.name for parameter in kernel.params]
    options = tuple(sorted((name, value) for name, value in named.items() if name not in names))
    bound = kernel.signature.bind(*given, **{name: value for name, value in named.items() if name in names})
    bound.apply_defaults()
    parts: list[Any] = []
    for parameter in kernel.params:
        value = bound.arguments[parameter.name]
        if parameter.is_constexpr:
            parts.append(value)
        elif isinstance(value, torch.Tensor):
            is_aligned = value.storage_offset() * value.itemsize % 16 == 0
            parts.append((value.dtype, is_aligned or parameter.do_not_specialize_on_alignment))
        elif parameter.do_not_specialize or isinstance(value, float):
            parts.append(type(value))
        else:
            parts.append((value == 1, value % 16 == 0))
    return (*parts, *options)


class Model:
    """The launches of a model that has sizes and no memory."""

    def __init__(self, shape: Qwen4ExpShape, element: torch.dtype, slots: int) -> None:
        self.g = g = Geometry.of(Qwen4ExpFamily().read_config(RandomSource(RandomWeights(shape), "random")))
        spec = state_spec(g)
        self._trunk = CudaTrunk(g, element, META)
        self._states = CudaStateTable(spec, slots, META, 40)
        self._rooms, self._expert_rooms = (
            Rooms(g, MOST_ROWS, element, META),
            self._trunk.experts[0].make_rooms(MOST_ROWS),
        )
        self._turns = torch.empty((MOST_ROWS, 4, g.rotary_size // 2), device=META)
        self._embedded = torch.empty((MOST_ROWS, padded_row(g.ngram_width)), dtype=element, device=META)
        self._attention = make_rooms(attention_shape(g), MOST_ROWS, 40 * spec.page_tokens, element, META)
        self._meta = MetaBuffer(MOST_ROWS, torch.device("cpu"))
        self._logits = torch.empty((48, g.vocab_size), device=META)

    def launch(self, shape: Shape, most_keys: int | None) -> None:
        """Every segment, and the logits."""
        rows = self._meta.views(shape)
        attention = AttentionRows(
            rows.owners, rows.starts, rows.slots, rows.seen, rows.positions, self._turns[: shape.rows]
        )
        launch = Launch(
            self.g, rows, self._states, self._rooms, self._expert_rooms,
            self._embedded[: shape.rows, : self.g.ngram_width], (attention, self._attention), most_keys, True,
        )  # fmt: skip
        for segment in range(self._trunk.segments):
            self._trunk.run_segment(segment, launch, None)
        if shape.wanted:
            self._trunk.logits(launch, rows.want, self._logits[: shape.wanted])


@pytest.fixture
def binaries(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, set[Binary]]]:
    found: dict[str, set[Binary]] = defaultdict(set)

    def run(kernel: Any, *given: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> None:
        name = kernel.__name__ if kernel.__module__.split(".")[-2] != "matmul" else "product"
        assert all(0 < size <= limit for size, limit in zip(grid, (2**31 - 1, 65535, 65535), strict=False)), (
            name,
            grid,
        )
        found[name].add(binary_of(kernel, given, named))

    monkeypatch.setattr(JITFunction, "run", run)

    def launch_all(name: str, element: torch.dtype, *slots: int) -> dict[str, set[Binary]]:
        for count in slots:
            model = Model(SHAPES[name], element, count)
            for shape, most_keys in LAUNCHES:
                model.launch(shape, most_keys)
        return found

    return launch_all


@pytest.mark.parametrize(
    ("name", "element"), [("released", torch.bfloat16), ("small", torch.float32), ("odd", torch.float16)]
)
def test_rows_are_summed_by_one_binary_whatever_is_launched(
    name: str, element: torch.dtype, binaries: Callable[..., dict[str, set[Binary]]]
) -> None:
    """Of steps and prompts, of one sequence and many, of tables with few and many slots."""
    found = binaries(name, element, 48, 49)
    assert {
        "scan_kernel",
        "attend_kernel",
        "score_kernel",
        "gate_kernel",
        "route_kernel",
        "norm_kernel",
    } <= found.keys()
    several = {kernel: len(kinds) for kernel, kinds in found.items() if len(kinds) > 1}
    assert several.keys() <= ROUND_ALIKE | PROVED, several
