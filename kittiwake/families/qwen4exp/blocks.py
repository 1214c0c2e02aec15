"""The blocks that a layer is made of: their weights, and what each does to packed rows.

A block takes its weights one by one by name, and declares the buffers it works in, so that the room for a forward is
known, and had, before any state moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch

from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.families.qwen4exp.sizes import attention_shape, attention_sizes, delta_sizes, expert_sizes
from kittiwake.layers.experts import ExpertGroup
from kittiwake.layers.linear import LinearGroup, Product, Workspace
from kittiwake.ops.block_attention import (
    AttentionColumns,
    AttentionMemory,
    AttentionNorms,
    RotaryRows,
)
from kittiwake.ops.block_attention.cpu import AttentionRoom, attention_room, block_attention, rotary
from kittiwake.ops.experts.cpu import add_gated, silu_times
from kittiwake.ops.gated_delta.cpu import gated_delta
from kittiwake.ops.gated_delta.heads import key_head_of
from kittiwake.ops.hyper_mix.cpu import mix_low, mix_streams
from kittiwake.ops.ngram_mix.cpu import ngram_mix
from kittiwake.ops.short_conv.cpu import short_conv

MakeGroup = Callable[[Sequence[Product]], LinearGroup]
"""Makes a group of products with the picks, the storage and the threads of the model."""
Taker = Callable[[torch.Tensor], None]
Buffers = dict[str, int]
"""Columns of the float32 buffers [padded rows, columns] by name."""


def around_one(weight: torch.Tensor) -> np.ndarray:
    """A norm's weight as kept → as it is multiplied."""
    return 1 + weight.float().numpy()


def rate_of(rate_log: torch.Tensor) -> np.ndarray:
    """The logarithm of a decay rate → the rate, above 0."""
    return torch.exp(rate_log.float()).numpy()


def taps_first(conv: torch.Tensor) -> np.ndarray:
    """[C, taps] → [taps, C], so that the channels of one tap lie side by side."""
    return conv.float().t().contiguous().numpy()


def plain_vector(vector: torch.Tensor) -> np.ndarray:
    """As kept."""
    return vector.float().numpy()


class Rows:
    """The rows of one forward on their way through the layers, and the states of their sequences."""

    def __init__(self, g: Geometry, batch: Batch, states: StateTable, workspace: Workspace) -> None:
        self.g, self.count, self.workspace, self.states = g, batch.rows, workspace, states
        self.starts, self.slots = batch.starts, batch.slots
        self.seen: np.ndarray = states.positions[batch.slots]
        """int64 [B]: tokens that each sequence has seen before these rows."""
        self.attention: AttentionRoom | None = None
        if g.has_attention:
            self.attention = attention_room(attention_shape(g), batch.starts, self.seen, workspace.vector)
        self.eps = np.float32(g.norm_eps)
        self.x = self.get("x", g.stream_width)
        """The residual streams side by side, [padded rows, S C]."""

    def get(self, name: str, columns: int) -> np.ndarray:
        """A float32 buffer [padded rows, columns] of this name."""
        return self.workspace.get(name, self.count, columns)

    def product(self, group: LinearGroup, x: np.ndarray, name: str) -> np.ndarray:
        """The products of a group, written to the buffer of this name."""
        return group(x, self.count, self.get(name, group.columns), self.workspace)


class Block:
    """Weights under names that begin with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.groups: list[LinearGroup] = []
        self.takers: dict[str, Taker] = {}
        """Name of a tensor → what takes it in."""

    def group(self, make: MakeGroup, *products: Product) -> LinearGroup:
        """A group of products, the names of which are completed here."""
        named = [Product(self.prefix + p.name, p.depth, p.columns, p.x_column) for p in products]
        group = make(named)
        self.groups.append(group)
        self.takers |= {p.name: partial(group.load, p.name) for p in named}
        return group

    def array(self, name: str, shape: tuple[int, ...], change: Callable[[torch.Tensor], np.ndarray]) -> np.ndarray:
        """Float32 zeros, to which the tensor of this name is copied when it comes, changed."""
        array = np.zeros(shape, dtype=np.float32)

        def take(tensor: torch.Tensor) -> None:
            array[:] = change(tensor)

        self.takers[self.prefix + name] = take
        return array


class StreamMix(Block):
    """Residual streams → one input of a block, and the shares by which its output goes back to the streams."""

    def __init__(self, prefix: str, g: Geometry, make: MakeGroup, *, has_inject: bool = True) -> None:
        super().__init__(prefix)
        self.norm = self.array("norm", (g.stream_width,), around_one)
        inject = [Product("inject", g.stream_width, g.streams, 0)] if has_inject else []
        self._low = self.group(make, Product("down", g.stream_width, g.stream_rank, 0), *inject)
        self._up = self.group(make, Product("up", g.stream_rank, g.stream_width, 0))

    @staticmethod
    def buffers(g: Geometry) -> Buffers:
        """See the module."""
        return {"low": g.stream_rank + g.streams, "up": g.stream_width, "mixed": g.width}

    def __call__(self, rows: Rows, normed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """normed [padded rows, S C] → input [padded rows, C], and the buffer that holds the shares' logits behind
        ``stream_rank`` columns."""
        g, n = rows.g, rows.count
        low = rows.product(self._low, normed, "low" if self._low.columns > g.stream_rank else "low_alone")
        mix_low(low, n, g.stream_rank, g.streams)
        up, mixed = rows.product(self._up, low, "up"), rows.get("mixed", g.width)
        mix_streams(normed, up, n, g.streams, mixed)
        return mixed, low


class Delta(Block):
    """Gated DeltaNet: convolution, delta rule, gated norm."""

    def __init__(self, prefix: str, rank: int, g: Geometry, make: MakeGroup) -> None:
        super().__init__(prefix)
        self._rank = rank
        sizes = delta_sizes(g)
        self._inputs = self.group(make, *(Product(name, g.width, columns, 0) for name, columns in sizes.items()))
        self._output = self.group(make, Product("output", g.value_width, g.width, 0))
        self._conv = self.array("conv", (g.conv_taps, g.conv_width), taps_first)
        self._rates = self.array("rate_log", (g.value_heads,), rate_of)
        self._bias = self.array("decay_bias", (g.value_heads,), plain_vector)
        self._norm = self.array("norm", (g.value_size,), plain_vector)
        self._key_of = key_head_of(g.value_heads, g.key_heads, "grouped")
        at = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self._columns = at["decay"], at["beta"], at["gate"]

    @staticmethod
    def buffers(g: Geometry) -> Buffers:
        """See the module."""
        inputs = sum(delta_sizes(g).values())
        return {"delta_in": inputs, "qkv": g.conv_width, "delta_out": g.value_width, "y": g.width}

    def __call__(self, rows: Rows, x: np.ndarray) -> np.ndarray:
        """x [padded rows, C] → output [padded rows, C]; the states move on."""
        g, states = rows.g, rows.states
        inputs = rows.product(self._inputs, x, "delta_in")
        qkv, out = rows.get("qkv", g.conv_width), rows.get("delta_out", g.value_width)
        conv_state = states.part("conv")[self._rank]
        short_conv(inputs, 0, self._conv, 1, rows.starts, rows.slots, conv_state, qkv)
        gated_delta(
            qkv, g.key_heads, self._key_of, inputs, *self._columns, self._rates, self._bias, self._norm, rows.eps,
            g.gate == "silu", rows.starts, rows.slots, states.part("delta")[self._rank], out,
        )  # fmt: skip
        return rows.product(self._output, out, "y")


def frequencies(g: Geometry) -> torch.Tensor:
    """Float32 [rotated pairs]: the angle by which each turns from one position to the next."""
    pairs = torch.arange(0, g.rotary_size, 2, dtype=torch.int64).float() / g.rotary_size
    return 1.0 / (g.rope_theta**pairs)


class Rotation:
    """Angles of the rotated pairs, and their table for the rows of a forward."""

    def __init__(self, g: Geometry) -> None:
        self._frequencies = frequencies(g).numpy()
        self._ratio = g.index_ratio

    def __call__(self, rows: Rows) -> RotaryRows:
        """Cosines and sines at the position of every row."""
        assert rows.attention is not None
        room = rows.workspace.vector("rotary", 4 * rows.count * len(self._frequencies))
        return rotary(rows.attention.positions, self._frequencies, 1.0, self._ratio, room)


class Attention(Block):
    """Gated attention of grouped heads over the blocks that a selector picks."""

    def __init__(self, prefix: str, rank: int, g: Geometry, make: MakeGroup) -> None:
        super().__init__(prefix)
        self._rank = rank
        sizes = attention_sizes(g)
        self._inputs = self.group(make, *(Product(name, g.width, columns, 0) for name, columns in sizes.items()))
        self._output = self.group(make, Product("output", g.heads * g.head_size, g.width, 0))
        ends = np.cumsum([0, *sizes.values()]).tolist()
        self._columns = AttentionColumns(*ends[:-1])
        self._shape = attention_shape(g)
        self._norms = AttentionNorms(
            self.array("query_norm", (g.head_size,), around_one),
            self.array("key_norm", (g.head_size,), around_one),
            self.array("index_query_norm", (g.index_size,), around_one),
            self.array("index_key_norm", (g.index_size,), around_one),
            np.float32(g.norm_eps),
        )

    @staticmethod
    def buffers(g: Geometry) -> Buffers:
        """See the module."""
        return {"attention_in": sum(attention_sizes(g).values()), "context": g.heads * g.head_size, "y": g.width}

    def __call__(self, rows: Rows, x: np.ndarray, rotation: RotaryRows) -> np.ndarray:
        """x [padded rows, C] → output [padded rows, C]; keys and values are added to the states."""
        states = rows.states
        inputs = rows.product(self._inputs, x, "attention_in")
        context = rows.get("context", rows.g.heads * rows.g.head_size)
        keys, values, blocks, open_rows = (
            states.part(name)[self._rank] for name in ("keys", "values", "index_blocks", "index_rows")
        )
        block_attention(
            inputs, self._columns, self._shape, self._norms, rotation, rows.starts, rows.slots, rows.seen,
            AttentionMemory(keys, values, blocks, open_rows, states.pages), context, rows.attention,
        )  # fmt: skip
        return rows.product(self._output, context, "y")


class Experts(Block):
    """Routed experts and a shared one."""

    def __init__(self, prefix: str, g: Geometry, make: MakeGroup, dtype: str) -> None:
        super().__init__(prefix)
        experts = f"{prefix}experts."
        self.routed = ExpertGroup(experts, g.experts, g.width, g.expert_width, g.experts_used, g.renormalises, dtype)
        self.takers |= {name: partial(self.routed.load, name) for name in (f"{experts}gate_up", f"{experts}down")}
        sizes = expert_sizes(g).items()
        self._inputs = self.group(make, *(Product(name, g.width, columns, 0) for name, columns in sizes))
        self._shared_down = self.group(make, Product("shared.down", g.shared_width, g.width, 0))

    @staticmethod
    def buffers(g: Geometry) -> Buffers:
        """See the module."""
        inputs = sum(expert_sizes(g).values())
        return {"experts_in": inputs, "shared_hidden": g.shared_width, "shared": g.width, "y": g.width}

    def __call__(self, rows: Rows, x: np.ndarray) -> np.ndarray:
        """x [padded rows, C] → output [padded rows, C]."""
        g, n = rows.g, rows.count
        inputs = rows.product(self._inputs, x, "experts_in")
        y, hidden = rows.get("y", g.width), rows.get("shared_hidden", g.shared_width)
        self.routed(x, n, inputs, 0, rows.workspace, y)
        silu_times(inputs, g.experts, n, g.shared_width, hidden)
        shared = rows.product(self._shared_down, hidden, "shared")
        add_gated(y, shared, inputs, g.experts + 2 * g.shared_width, n)
        return y


class NgramBlock(Block):
    """What n-grams add to the streams before a layer."""

    def __init__(self, prefix: str, rank: int, g: Geometry, make: MakeGroup) -> None:
        super().__init__(prefix)
        self._rank = rank
        self._inputs = self.group(
            make, Product("key", g.ngram_width, g.stream_width, 0), Product("value", g.ngram_width, g.width, 0)
        )
        norms = (self.array(f"{name}_norm", (g.stream_width,), around_one) for name in ("key", "query", "conv"))
        self._key_norm, self._query_norm, self._conv_norm = norms
        self._conv = self.array("conv", (g.ngram_taps, g.stream_width), taps_first)

    @staticmethod
    def buffers(g: Geometry) -> Buffers:
        """See the module."""
        wide = g.stream_width
        return {"ngram_in": wide + g.width, "ngram_gated": wide, "normed": wide}

    def __call__(self, rows: Rows, embedded: np.ndarray) -> None:
        """embedded [padded rows, E]: the table's rows of every token; ``rows.x`` is added to."""
        g = rows.g
        inputs = rows.product(self._inputs, embedded, "ngram_in")
        gated, normed = (rows.get(name, g.stream_width) for name in ("ngram_gated", "normed"))
        ngram_mix(
            rows.x, inputs, g.streams, self._key_norm, self._query_norm, self._conv_norm, self._conv, g.ngram_size,
            rows.eps, rows.starts, rows.slots, rows.states.part("ngram_conv")[self._rank], gated, normed,
        )  # fmt: skip


def all_buffers(g: Geometry) -> Buffers:
    """Every buffer of a forward that has a row for each token."""
    kinds: Iterable[type[StreamMix] | type[Delta] | type[Attention] | type[Experts] | type[NgramBlock]] = (
        StreamMix, Delta, Experts, *((Attention,) if g.has_attention else ()), *((NgramBlock,) if g.ngrams else ()),
    )  # fmt: skip
    found: Buffers = {"x": g.stream_width, "normed": g.stream_width}
    for kind in kinds:
        found |= kind.buffers(g)
    return found
