"""RWKV-7 on CUDA: the layers. Weights in float32, float16 or bfloat16; residual stream, norms and states in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.states import StateSpec
from kittiwake.families.contract import ModelConfig
from kittiwake.families.cuda_model import Copies, CudaModel
from kittiwake.families.cuda_rows import Rows
from kittiwake.families.rwkv7_names import MIXES, RANKS, Sizes, ranks_of
from kittiwake.families.rwkv_time_state import initial_matrix_state
from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct
from kittiwake.layers.cuda_probe import keeps_bits_inside
from kittiwake.ops.head_kernels import LOW_ROWS
from kittiwake.ops.shift_mix.triton import commit_shifts, shift_mix
from kittiwake.ops.wkv7.cuda import kernels

LOW_RANKS = ("decay", "iclr", "gate", "value_residual")
"""In the order of their columns, which the kernels know."""
VECTORS = (
    "decay_bias",
    "iclr_bias",
    "value_residual_bias",
    "k_k",
    "k_a",
    "r_k",
    "group_norm.weight",
    "group_norm.bias",
)
_ACTIVATIONS = {"decay": "tanh", "gate": "sigmoid"}
HIDDEN_ROWS = 2048
"""Rows of hidden channels that are worked on at a time: 34 MB of the 1.5B shape."""


class _Layer:
    """Weights of one layer as the launches want them."""

    def __init__(self, index: int, sizes: Sizes, model: CudaModel) -> None:
        width, prefix = sizes.width, f"layers.{index}."
        ranks = [rank for rank in LOW_RANKS if rank in ranks_of(index)]
        first = [
            CudaProduct(f"{prefix}time_mix.{name}.weight", width, width, MIXES.index(letter))
            for name, letter in (("receptance", "r"), ("key", "k"), ("value", "v"))
        ]
        second, column = [], 3 * width
        for rank in ranks:
            size = getattr(sizes, f"{rank}_rank")
            mix = MIXES.index(RANKS[rank])
            activation = _ACTIVATIONS.get(rank, "none")
            first.append(CudaProduct(f"{prefix}time_mix.{rank}_down", width, size, mix, 0, activation))
            second.append(CudaProduct(f"{prefix}time_mix.{rank}_up", size, width, 0, column))
            column += size

        def group(*products: CudaProduct) -> CudaGroup:
            return CudaGroup(products, model.element, model.place)

        self.projections = group(*first)
        self.low_rank = group(*second)
        self.output = group(CudaProduct(f"{prefix}time_mix.output.weight", width, width))
        self.ffn_key = group(CudaProduct(f"{prefix}channel_mix.key.weight", width, sizes.ffn, activation="relu2"))
        self.ffn_value = group(CudaProduct(f"{prefix}channel_mix.value.weight", sizes.ffn, width))
        self.time_norm, self.channel_norm = model.vector(2, width), model.vector(2, width)
        self.time_mixes, self.channel_mixes = model.vector(len(MIXES), width), model.vector(1, width)
        self.vectors = model.vector(len(VECTORS), width)
        rows = {"channel_mix.mix_k": self.channel_mixes[0]}
        for name, norm in (("time_norm", self.time_norm), ("channel_norm", self.channel_norm)):
            rows |= {f"{name}.weight": norm[0], f"{name}.bias": norm[1]}
        rows |= {f"time_mix.mix_{letter}": self.time_mixes[i] for i, letter in enumerate(MIXES)}
        rows |= {f"time_mix.{name}": self.vectors[i] for i, name in enumerate(VECTORS)}
        self.vector_rows = rows

    @property
    def groups(self) -> tuple[CudaGroup, ...]:
        """Every group, in the order the layer runs them."""
        return (self.projections, self.low_rank, self.output, self.ffn_key, self.ffn_value)


class Rwkv7Cuda(CudaModel):
    """An RWKV-7 on one CUDA device."""

    def __init__(
        self, config: ModelConfig, sizes: Sizes, spec: StateSpec, dtype: str, *, place: torch.device | None = None
    ) -> None:
        super().__init__(config, spec, dtype, place=place)
        self._sizes = sizes
        self._group_eps = float(config.extra["group_norm_eps"])
        self._layer_list = [_Layer(index, sizes, self) for index in range(sizes.layers)]
        self._by_name = {p.name: g for g in self.groups for p in g.products}
        self._wkv = kernels(sizes.head_size, self.element)
        self._keeps_bits = True
        """Of steps that make low-rank products themselves: proved on the card, see :meth:`prove`."""

    @property
    def groups(self) -> Iterator[CudaGroup]:
        """Every group but the head, in the order of the forward."""
        for layer in self._layer_list:
            yield from layer.groups

    def load_layer(self, name: str, tensor: torch.Tensor) -> None:
        """See :class:`CudaModel`."""
        if name in self._by_name:
            self._by_name[name].load(name, tensor)
        else:
            _, layer, rest = name.split(".", 2)
            self._layer_list[int(layer)].vector_rows[rest].copy_(tensor)

    def prove(self) -> None:
        """See :class:`CudaModel`; steps make low-rank products themselves where that has the bits of launches apart here."""
        self._keeps_bits = all(self._has_bits_of_launches_apart(index) for index in (0, -1))

    def _has_bits_of_launches_apart(self, index: int) -> bool:
        """Of a step of one layer, from random states."""
        layer = self._layer_list[index]
        depths = [product.depth for product in layer.low_rank.products]
        if not self._wkv.can_take_low(depths, 1):
            return True  # they never do
        is_first = layer is self._layer_list[0]
        settings: dict[str, Any] = {"first_layer": is_first, "eps": self._group_eps, "overlap": self.overlap}

        def run(projected: torch.Tensor, low: torch.Tensor | None) -> list[torch.Tensor]:
            vectors, state, slots, out = self._wkv.random_step(len(projected), layer.vectors)
            v_first = projected[:, : self.width].clone()  # any numbers
            given = (v_first, vectors, state, slots, out)
            if low is None:
                self._wkv.decode_low(projected, layer.low_rank.weight, layer.low_rank.lines, depths, *given, **settings)
            else:
                self._wkv.decode(projected, low, *given, **settings)
            return [out, state, v_first]

        return keeps_bits_inside(layer.low_rank, LOW_ROWS, run)

    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """A tuned initial state; see :class:`kittiwake.families.contract.Model`."""
        sizes = self._sizes
        return initial_matrix_state(source, sizes.layers, sizes.width, sizes.heads, transpose=transpose)

    def trunk(
        self, x: torch.Tensor, rows: Rows, states: CudaStateTable, hidden: Copies | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers; see :class:`CudaModel`."""
        count, width, overlap, sizes = rows.shape.rows, self.width, self.overlap, self._sizes
        x_next = self.room("x1", count, width, dtype=torch.float32)
        mixed = self.room("mixed", count, width, lead=len(MIXES))
        v_first, out, y = (self.room(name, count, width) for name in ("v_first", "out", "y"))
        projected_columns = max(layer.projections.columns for layer in self._layer_list)
        projected_all = self.outputs("projected", count, projected_columns)
        low_all = self.outputs("low", count, max(layer.low_rank.columns for layer in self._layer_list))
        sequences = rows.shape.sequences
        # a bucket of sequences is less than twice as many as there are
        last = states.room("last", (2 * sizes.layers * 2 * max(states.slots, 1) * width,))
        last = last[: 2 * sizes.layers * sequences * width].view(2, sizes.layers, sequences, width)
        att_shifts, wkv_states, ffn_shifts = (states.part(name) for name in ("att_shift", "wkv", "ffn_shift"))
        added: torch.Tensor | None = None

        def shift(norm: torch.Tensor, mixes: torch.Tensor, state: torch.Tensor, to: torch.Tensor, kept: Any) -> None:
            nonlocal x, x_next
            meta = (rows.owners, rows.starts, rows.slots)
            shift_mix(x, added, x_next, norm, self.eps, mixes, state, *meta, to, kept, overlap=overlap)
            x, x_next = x_next, x

        for index, layer in enumerate(self._layer_list):
            if hidden is not None:
                hidden(index, x, added)
            # time mix
            shift(layer.time_norm, layer.time_mixes, att_shifts[index], mixed, last[0, index])
            projected = projected_all[:, : layer.projections.columns]
            layer.projections(mixed, projected, overlap=overlap)
            low = low_all[:, : layer.low_rank.columns]
            self._time_mix(projected, low, v_first, layer, wkv_states[index], rows, out, is_first=index == 0)
            layer.output(out, y, overlap=overlap)
            added = y
            # channel mix
            shift(layer.channel_norm, layer.channel_mixes, ffn_shifts[index], mixed[:1], last[1, index])
            self._channel_mix(layer, mixed[0], y)
        if hidden is not None:
            hidden(len(self._layer_list), x, added)
        commit_shifts(last, att_shifts, ffn_shifts, rows.slots, overlap=overlap)
        return x, y

    def _channel_mix(self, layer: _Layer, mixed: torch.Tensor, y: torch.Tensor) -> None:
        """mixed [N, C] → y [N, C], so many rows at a time that what lies between the products stays in the card's L2."""
        for first in range(0, len(mixed), HIDDEN_ROWS):
            some = slice(first, min(first + HIDDEN_ROWS, len(mixed)))
            hidden = self.room("hidden", some.stop - first, self._sizes.ffn, most=min(HIDDEN_ROWS, self.most_rows))
            layer.ffn_key(mixed[some], hidden, overlap=self.overlap)
            layer.ffn_value(hidden, y[some], overlap=self.overlap)

    def _time_mix(
        self,
        projected: torch.Tensor,
        low: torch.Tensor,
        v_first: torch.Tensor,
        layer: _Layer,
        state: torch.Tensor,
        rows: Rows,
        out: torch.Tensor,
        *,
        is_first: bool,
    ) -> None:
        """From the products of a layer to the input of its output product."""
        settings: dict[str, Any] = {"first_layer": is_first, "eps": self._group_eps, "overlap": self.overlap}
        given = (v_first, layer.vectors, state)
        depths = [product.depth for product in layer.low_rank.products]
        if rows.shape.is_decode and self._keeps_bits and self._wkv.can_take_low(depths, rows.shape.rows):
            up, lines = layer.low_rank.weight, layer.low_rank.lines
            self._wkv.decode_low(projected, up, lines, depths, *given, rows.slots, out, **settings)
            return
        layer.low_rank(projected, low, overlap=self.overlap)
        if rows.shape.is_decode:
            self._wkv.decode(projected, low, *given, rows.slots, out, **settings)
            return
        count, heads = rows.shape.rows, self._sizes.heads
        made = self.room("made", count, self._wkv.made_values(heads), dtype=torch.float32)
        scanned = self.room("scanned", count, self.width, dtype=torch.float32)
        self._wkv.prompt(projected, low, *given, rows.starts, rows.slots, made, scanned, out, **settings)
