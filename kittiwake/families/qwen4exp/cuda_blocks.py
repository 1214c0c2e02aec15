"""The blocks of blocks.py on a card: their weights, and what each does to packed rows.

Weights of products and experts are in the element type, all others float32. What passes from launch to launch has the
element type, the residual streams and the states are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.families.qwen4exp.blocks import Taker, around_one, plain_vector, rate_of, taps_first
from kittiwake.families.qwen4exp.cuda_rooms import Rooms, delta_columns
from kittiwake.families.qwen4exp.cuda_rows import CudaRows
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.families.qwen4exp.sizes import attention_shape, attention_sizes, delta_sizes, expert_sizes
from kittiwake.layers.cuda_experts import CudaExpertGroup, ExpertRooms
from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct
from kittiwake.ops.block_attention import AttentionColumns
from kittiwake.ops.block_attention.triton import (
    AttentionRooms,
    AttentionRows,
    DeviceMemory,
    DeviceNorms,
    block_attention,
)
from kittiwake.ops.experts.triton import silu_times
from kittiwake.ops.gated_delta.triton import gated_delta
from kittiwake.ops.hyper_mix.triton import mix_low, mix_streams
from kittiwake.ops.ngram_mix.triton import ngram_mix
from kittiwake.ops.short_conv.triton import short_conv

Change = Callable[[torch.Tensor], np.ndarray]


@dataclass(frozen=True)
class Launch:
    """The rows of one launch, the states of their sequences, and where it works."""

    g: Geometry
    rows: CudaRows
    states: CudaStateTable
    rooms: Rooms
    expert_rooms: ExpertRooms
    embedded: torch.Tensor | None
    """The table's rows of every token [N, E], as they were sent last."""
    attention: tuple[AttentionRows, AttentionRooms] | None
    most_keys: int | None
    """The longest of the sequences, these rows included; None where a graph is captured, which must serve any."""
    overlap: bool

    @property
    def count(self) -> int:
        """Rows, spare ones among them."""
        return self.rows.shape.rows

    def get(self, name: str, columns: int) -> torch.Tensor:
        """The room of this name, [rows, columns]."""
        return self.rooms.get(name, self.count, columns)

    def product(self, group: CudaGroup, x: torch.Tensor, name: str, *, is_first: bool = False) -> torch.Tensor:
        """The products of a group, written to the room of this name. The first launch of a graph waits for all before."""
        out = self.rooms.get(name, x.shape[0], group.columns)
        group(x, out, overlap=self.overlap and not is_first)
        return out


class CudaBlock:
    """Weights under names that begin with ``prefix``, of a type and at a place."""

    def __init__(self, prefix: str, element: torch.dtype, place: torch.device) -> None:
        self.prefix, self._element, self._place = prefix, element, place
        self.groups: list[CudaGroup] = []
        self.takers: dict[str, Taker] = {}
        """Name of a tensor → what takes it in."""

    def group(self, depth: int, sizes: dict[str, int]) -> CudaGroup:
        """A group of products of one input, whose names are completed here: columns by name."""
        products = [CudaProduct(self.prefix + name, depth, columns) for name, columns in sizes.items()]
        group = CudaGroup(products, self._element, self._place)
        self.groups.append(group)
        self.takers |= {product.name: partial(group.load, product.name) for product in products}
        return group

    def array(self, name: str, shape: tuple[int, ...], change: Change) -> torch.Tensor:
        """Float32 zeros, to which the tensor of this name is copied when it comes, changed."""
        array = torch.zeros(shape, dtype=torch.float32, device=self._place)

        def take(tensor: torch.Tensor) -> None:
            array.copy_(torch.from_numpy(change(tensor.cpu())))

        self.takers[self.prefix + name] = take
        return array


class CudaStreamMix(CudaBlock):
    """Residual streams → one input of a block, and the shares by which its output goes back to the streams."""

    def __init__(
        self, prefix: str, g: Geometry, element: torch.dtype, place: torch.device, *, has_inject: bool = True
    ) -> None:
        super().__init__(prefix, element, place)
        self.norm = self.array("norm", (g.stream_width,), around_one)
        inject = {"inject": g.streams} if has_inject else {}
        self._low = self.group(g.stream_width, {"down": g.stream_rank} | inject)
        self._up = self.group(g.stream_rank, {"up": g.stream_width})

    def __call__(self, launch: Launch, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """normed [N, S C] → input [N, C], and the logits of the shares [N, S], no columns where there are none."""
        g, overlap = launch.g, launch.overlap
        low = launch.product(self._low, normed, "low")
        rank, inject = low[:, : g.stream_rank], low[:, g.stream_rank :]
        mix_low(rank, g.streams, overlap=overlap)
        up = launch.product(self._up, rank, "up")
        mixed = launch.rooms.get("mixed", len(normed), g.width)
        mix_streams(normed, up, g.streams, mixed, overlap=overlap)
        return mixed, inject


class CudaDelta(CudaBlock):
    """Gated DeltaNet: convolution, delta rule, gated norm."""

    def __init__(self, prefix: str, rank: int, g: Geometry, element: torch.dtype, place: torch.device) -> None:
        super().__init__(prefix, element, place)
        self._rank = rank
        sizes = delta_sizes(g)
        self._inputs = self.group(g.width, sizes)
        self._output = self.group(g.value_width, {"output": g.width})
        self._conv = self.array("conv", (g.conv_taps, g.conv_width), taps_first)
        self._rates = self.array("rate_log", (g.value_heads,), rate_of)
        self._bias = self.array("decay_bias", (g.value_heads,), plain_vector)
        self._norm = self.array("norm", (g.value_size,), plain_vector)
        self._ends = list(accumulate(sizes.values()))

    def __call__(self, launch: Launch, x: torch.Tensor) -> torch.Tensor:
        """x [N, C] → output [N, C]; the states move on."""
        g, rows, states, overlap = launch.g, launch.rows, launch.states, launch.overlap
        inputs = launch.product(self._inputs, x, "inputs")
        raw, z, a, b = inputs.tensor_split(self._ends[:-1], dim=1)
        qkv, out = launch.get("inner", g.conv_width), launch.get("out", g.value_width)
        conv_state = states.part("conv")[self._rank]
        short_conv(
            raw, self._conv, 1, True, rows.owners, rows.starts, rows.slots, conv_state, qkv, overlap=overlap
        )  # fmt: skip
        gated_delta(
            qkv, g.key_heads, z, a, b, self._rates, self._bias, self._norm, g.norm_eps, g.gate == "silu", rows.starts,
            rows.slots, states.part("delta")[self._rank], launch.get("floats", delta_columns(g)), out, overlap=overlap,
        )  # fmt: skip
        return launch.product(self._output, out, "y")


class CudaAttention(CudaBlock):
    """Gated attention of grouped heads over the blocks that a selector picks."""

    def __init__(self, prefix: str, rank: int, g: Geometry, element: torch.dtype, place: torch.device) -> None:
        super().__init__(prefix, element, place)
        self._rank = rank
        sizes = attention_sizes(g)
        self._inputs = self.group(g.width, sizes)
        self._output = self.group(g.heads * g.head_size, {"output": g.width})
        self._columns = AttentionColumns(*list(accumulate(sizes.values(), initial=0))[:-1])
        self._shape = attention_shape(g)
        self._norms = DeviceNorms(
            self.array("query_norm", (g.head_size,), around_one),
            self.array("key_norm", (g.head_size,), around_one),
            self.array("index_query_norm", (g.index_size,), around_one),
            self.array("index_key_norm", (g.index_size,), around_one),
            g.norm_eps,
        )

    def __call__(self, launch: Launch, x: torch.Tensor) -> torch.Tensor:
        """x [N, C] → output [N, C]; keys and values are added to the states."""
        g, states = launch.g, launch.states
        assert launch.attention is not None
        rows, rooms = launch.attention
        inputs = launch.product(self._inputs, x, "inputs")
        context = launch.get("out", g.heads * g.head_size)
        keys, values, blocks, open_rows = (
            states.part(name)[self._rank] for name in ("keys", "values", "index_blocks", "index_rows")
        )
        block_attention(
            inputs, self._columns, self._shape, self._norms, rows,
            DeviceMemory(keys, values, blocks, open_rows, states.device_pages), rooms, context,
            overlap=launch.overlap, most_keys=launch.most_keys,
        )  # fmt: skip
        return launch.product(self._output, context, "y")


class CudaExperts(CudaBlock):
    """Routed experts and a shared one."""

    def __init__(self, prefix: str, g: Geometry, element: torch.dtype, place: torch.device) -> None:
        super().__init__(prefix, element, place)
        experts = f"{prefix}experts."
        self.routed = CudaExpertGroup(
            experts, g.experts, g.width, g.expert_width, g.experts_used, g.renormalises, element, place
        )
        self.takers |= {name: partial(self.routed.load, name) for name in (f"{experts}gate_up", f"{experts}down")}
        sizes = expert_sizes(g)
        self._inputs = self.group(g.width, sizes)
        self._shared_down = self.group(g.shared_width, {"shared.down": g.width})
        self._borders = g.experts, g.experts + 2 * g.shared_width

    def __call__(self, launch: Launch, x: torch.Tensor) -> torch.Tensor:
        """x [N, C] → output [N, C]."""
        g, overlap = launch.g, launch.overlap
        inputs = launch.product(self._inputs, x, "inputs")
        logits, gate_up, share = inputs.tensor_split(self._borders, dim=1)
        hidden = launch.get("inner", g.shared_width)
        silu_times(gate_up, hidden, overlap=overlap)
        shared = launch.product(self._shared_down, hidden, "out")
        y = launch.get("y", g.width)
        self.routed(x, logits, shared, share, launch.expert_rooms, y, overlap=overlap, owners=launch.rows.owners)
        return y


class CudaNgram(CudaBlock):
    """What n-grams add to the streams before a layer."""

    def __init__(self, prefix: str, rank: int, g: Geometry, element: torch.dtype, place: torch.device) -> None:
        super().__init__(prefix, element, place)
        self._rank = rank
        self._inputs = self.group(g.ngram_width, {"key": g.stream_width, "value": g.width})
        norms = (self.array(f"{name}_norm", (g.stream_width,), around_one) for name in ("key", "query", "conv"))
        self._key_norm, self._query_norm, self._conv_norm = norms
        self._conv = self.array("conv", (g.ngram_taps, g.stream_width), taps_first)

    def __call__(self, launch: Launch, embedded: torch.Tensor) -> None:
        """embedded [N, E]: the table's rows of every token; the streams are added to."""
        g, rows = launch.g, launch.rows
        inputs = launch.product(self._inputs, embedded, "inputs", is_first=True)
        ngram_mix(
            launch.get("x", g.stream_width), inputs, g.streams, self._key_norm, self._query_norm, self._conv_norm,
            self._conv, g.ngram_size, g.norm_eps, rows.owners, rows.starts, rows.slots,
            launch.states.part("ngram_conv")[self._rank], launch.get("floats", 2 * g.streams), overlap=launch.overlap,
        )  # fmt: skip
