"""What RWKV-5 and RWKV-6 share on CUDA: states of matrices, and the launches between projections and output product."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.states import StateSpec
from kittiwake.families.contract import ModelConfig
from kittiwake.families.cuda_model import CudaModel
from kittiwake.families.cuda_rows import Rows
from kittiwake.families.rwkv_cpu import Change
from kittiwake.families.rwkv_cuda import GatedCuda, GatedCudaLayer
from kittiwake.families.rwkv_time_state import initial_matrix_state
from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct
from kittiwake.layers.cuda_probe import keeps_bits_inside
from kittiwake.ops.wkv6.cuda import LOW_ROWS, Kind, kernels


class MatrixCudaLayer(GatedCudaLayer):
    """Weights of one layer; a version adds its projections. ``decay_up`` is the decay's second low-rank product."""

    projections: CudaGroup
    decay_up: CudaGroup | None = None

    def __init__(
        self, index: int, model: CudaModel, ffn: int, channel_mixes: tuple[str, str], change: Change | None = None
    ) -> None:
        super().__init__(index, model, ffn, channel_mixes, change)
        product = CudaProduct(f"{self.prefix}time_mix.output.weight", model.width, model.width)
        self.output = self.group(product, behind="wkv6")
        self.head_vectors = model.vector(4, model.width)
        names = ("decay_bias", "bonus", "group_norm.weight", "group_norm.bias")
        for name, row in zip(names, self.head_vectors, strict=True):
            self.place(f"time_mix.{name}", row)


class MatrixCuda(GatedCuda[MatrixCudaLayer]):
    """An RWKV-5 or RWKV-6 on one CUDA device."""

    def __init__(
        self,
        config: ModelConfig,
        state_spec: StateSpec,
        dtype: str,
        kind: Kind,
        *,
        place: torch.device | None = None,
    ) -> None:
        super().__init__(config, state_spec, dtype, place=place)
        self._heads = int(config.extra["heads"])
        self._group_eps = float(config.extra["group_norm_eps"])
        self._wkv = kernels(config.width // self._heads, self.element, kind)
        self._keeps_low_bits = True
        """Of steps that make the decay's low-rank product themselves: proved on the card, see :meth:`prove`."""

    def output(self, layer: MatrixCudaLayer) -> CudaGroup:
        """See :class:`GatedCuda`."""
        return layer.output

    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """A tuned initial state; see :class:`kittiwake.families.contract.Model`."""
        return initial_matrix_state(source, self.config.layers, self.width, self._heads, transpose=transpose)

    def recur(
        self,
        layer: MatrixCudaLayer,
        projected: torch.Tensor,
        state: torch.Tensor,
        rows: Rows,
        out: torch.Tensor,
    ) -> None:
        """From the projections of a layer to the input of its output product; state [S, H, K, V] is moved on."""
        up, count, overlap, eps = layer.decay_up, rows.shape.rows, self.overlap, self._group_eps
        low: torch.Tensor | None = None
        if up is not None:
            product = up.products[0]
            if rows.shape.is_decode and self._keeps_low_bits and self._wkv.can_take_low(product.depth, count):
                given = (projected, up.weight, product.input_column, product.depth, layer.head_vectors, state)
                self._wkv.decode_low(*given, rows.slots, out, eps=eps, overlap=overlap)
                return
            low = self.room("decay_low", count, self.width)
            up(projected, low, overlap=overlap)
        if rows.shape.is_decode:
            self._wkv.decode(projected, low, layer.head_vectors, state, rows.slots, out, eps=eps, overlap=overlap)
            return
        made = self.room("made", count, self._wkv.made_values(self._heads), dtype=torch.float32)
        scanned = self.room("scanned", count, self.width, dtype=torch.float32)
        given_states = (layer.head_vectors, state, rows.starts, rows.slots)
        self._wkv.prompt(projected, low, *given_states, made, scanned, out, eps=eps, overlap=overlap)

    def prove(self) -> None:
        """See :class:`CudaModel`; steps make a low-rank product themselves where that has the bits of launches apart here."""
        super().prove()
        self._keeps_low_bits = self._has_low_bits_of_launches_apart()

    def _has_low_bits_of_launches_apart(self) -> bool:
        """Of a step from random states."""
        layer = self._layer_list[0]
        up = layer.decay_up
        if up is None or not self._wkv.can_take_low(up.products[0].depth, 1):
            return True  # they never do
        product = up.products[0]

        def run(projected: torch.Tensor, low: torch.Tensor | None) -> list[torch.Tensor]:
            vectors, state, slots, out = self._wkv.random_step(len(projected), layer.head_vectors)
            given = (vectors, state, slots, out)
            settings: dict[str, Any] = {"eps": self._group_eps, "overlap": self.overlap}
            if low is None:
                self._wkv.decode_low(projected, up.weight, product.input_column, product.depth, *given, **settings)
            else:
                self._wkv.decode(projected, low, *given, **settings)
            return [out, state]

        return keeps_bits_inside(up, LOW_ROWS, run)

    def wkv_state(self, states: CudaStateTable, index: int) -> torch.Tensor:
        """The matrices of a layer, [S, H, K, V]."""
        state: torch.Tensor = states.part("wkv")[index]
        return state
