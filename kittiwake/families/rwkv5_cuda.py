"""RWKV-5 (5.0, 5.1 and 5.2) on CUDA: the layers. Weights in float32, float16 or bfloat16; states in float32."""

from __future__ import annotations

import torch

from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.states import StateSpec
from kittiwake.families.contract import ModelConfig
from kittiwake.families.cuda_model import CudaModel
from kittiwake.families.cuda_rows import Rows
from kittiwake.families.rwkv5 import plain_bonus
from kittiwake.families.rwkv5_names import CHANNEL_MIXES, Sizes
from kittiwake.families.rwkv56_cuda import MatrixCuda, MatrixCudaLayer
from kittiwake.families.rwkv_cpu import share_of_the_token_before
from kittiwake.families.rwkv_cuda import LayerShift
from kittiwake.layers.cuda_linear import CudaProduct
from kittiwake.ops.wkv6.cuda import Kind


class _Layer(MatrixCudaLayer):
    """Weights of one layer as the launches want them."""

    def __init__(self, index: int, sizes: Sizes, model: CudaModel) -> None:
        super().__init__(index, model, sizes.ffn, CHANNEL_MIXES, share_of_the_token_before)
        width = sizes.width
        mixes = (f"time_mix.{mix}" for mix in sizes.mixes)
        self.time_mixes = self.vectors(width, *mixes, change=share_of_the_token_before)
        self.projections = self.group(
            *(
                CudaProduct(f"{self.prefix}time_mix.{name}.weight", width, width, i)
                for i, name in enumerate(sizes.mixed_products)
            )
        )
        self.place("time_mix.log_bonus", self.head_vectors[1], plain_bonus)


class Rwkv5Cuda(MatrixCuda):
    """An RWKV-5 on one CUDA device."""

    def __init__(
        self, config: ModelConfig, sizes: Sizes, spec: StateSpec, dtype: str, *, place: torch.device | None = None
    ) -> None:
        self._sizes = sizes
        super().__init__(config, spec, dtype, Kind(False, sizes.is_gated), place=place)

    def make_layer(self, index: int) -> _Layer:
        """See :class:`kittiwake.families.rwkv_cuda.GatedCuda`."""
        return _Layer(index, self._sizes, self)

    def time_mix(
        self,
        layer: MatrixCudaLayer,
        index: int,
        shift: LayerShift,
        rows: Rows,
        states: CudaStateTable,
        out: torch.Tensor,
    ) -> None:
        """See :class:`kittiwake.families.rwkv_cuda.GatedCuda`."""
        assert isinstance(layer, _Layer)
        count = rows.shape.rows
        mixed = self.room("mixed", count, self.width, lead=len(layer.time_mixes))
        shift(layer.time_mixes, mixed)
        projected = self.outputs("projected", count, layer.projections.columns)
        layer.projections(mixed, projected, overlap=self.overlap)
        self.recur(layer, projected, self.wkv_state(states, index), rows, out)
