"""RWKV-4 on CUDA: the layers. Weights in float32, float16 or bfloat16; residual stream, norms and states in float32."""

from __future__ import annotations

import numpy as np
import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.states import StateSpec
from kittiwake.families.contract import ModelConfig
from kittiwake.families.cuda_model import CudaModel
from kittiwake.families.cuda_rows import Rows
from kittiwake.families.rwkv4 import effective_eps, log_decay, no_tuned_states
from kittiwake.families.rwkv4_names import CHANNEL_SHIFTS, TIME_SHIFTS, Sizes
from kittiwake.families.rwkv_cpu import share_of_the_token_before
from kittiwake.families.rwkv_cuda import GatedCuda, GatedCudaLayer, LayerShift
from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct
from kittiwake.ops.wkv4.cuda import kernels


class _Layer(GatedCudaLayer):
    """Weights of one layer as the launches want them."""

    def __init__(self, index: int, sizes: Sizes, model: CudaModel) -> None:
        shifts = (CHANNEL_SHIFTS[0], CHANNEL_SHIFTS[1])
        super().__init__(index, model, sizes.ffn, shifts, share_of_the_token_before)
        width, inner, prefix = sizes.width, sizes.attention, f"{self.prefix}time_mix."
        self.time_shifts = self.vectors(
            width, *(f"time_mix.{shift}" for shift in TIME_SHIFTS), change=share_of_the_token_before
        )
        activations = {"receptance": "sigmoid"}
        self.projections = self.group(
            *(
                CudaProduct(f"{prefix}{name}.weight", width, inner, i, activation=activations.get(name, "none"))
                for i, name in enumerate(TIME_SHIFTS.values())
            )
        )
        self.output = self.group(CudaProduct(f"{prefix}output.weight", inner, width))
        self.head_vectors = model.vector(2, inner)
        self.place("time_mix.decay", self.head_vectors[0], log_decay)
        self.place("time_mix.bonus", self.head_vectors[1])


class Rwkv4Cuda(GatedCuda[_Layer]):
    """An RWKV-4 on one CUDA device."""

    def __init__(
        self, config: ModelConfig, sizes: Sizes, spec: StateSpec, dtype: str, *, place: torch.device | None = None
    ) -> None:
        self._sizes = sizes
        super().__init__(config, spec, dtype, place=place)
        self.output_eps = self.eps_at(sizes.layers)
        self._wkv = kernels(self.element)

    def make_layer(self, index: int) -> _Layer:
        """See :class:`GatedCuda`."""
        return _Layer(index, self._sizes, self)

    def output(self, layer: _Layer) -> CudaGroup:
        """See :class:`GatedCuda`."""
        return layer.output

    def eps_at(self, index: int) -> float:
        """See :class:`GatedCuda`."""
        return effective_eps(self.eps, self.config.extra["rescale_every"], index)

    @property
    def inner(self) -> int:
        """See :class:`GatedCuda`."""
        return self._sizes.attention

    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """There are no tuned initial states of RWKV-4. Raises ModelError."""
        raise no_tuned_states(source)

    def time_mix(
        self, layer: _Layer, index: int, shift: LayerShift, rows: Rows, states: CudaStateTable, out: torch.Tensor
    ) -> None:
        """See :class:`GatedCuda`."""
        count, width = rows.shape.rows, self.width
        mixed = self.room("mixed", count, width, lead=len(TIME_SHIFTS))
        shift(layer.time_shifts, mixed)
        projected = self.outputs("projected", count, layer.projections.columns)
        layer.projections(mixed, projected, overlap=self.overlap)
        sums = (states.part("num")[index], states.part("den")[index], states.part("top")[index])
        given = (projected, layer.head_vectors, sums)
        if rows.shape.is_decode:
            self._wkv.decode(*given, rows.slots, out, overlap=self.overlap)
        else:
            self._wkv.prompt(*given, rows.starts, rows.slots, out, overlap=self.overlap)
