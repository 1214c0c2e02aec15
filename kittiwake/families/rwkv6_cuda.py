"""RWKV-6 on CUDA: the layers. Weights in float32, float16 or bfloat16; residual stream, norms and states in float32."""

from __future__ import annotations

import torch

from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.states import StateSpec
from kittiwake.families.contract import ModelConfig
from kittiwake.families.cuda_model import CudaModel
from kittiwake.families.cuda_rows import Rows
from kittiwake.families.rwkv6_names import CHANNEL_MIXES, MIXES, PRODUCTS, Sizes
from kittiwake.families.rwkv56_cuda import MatrixCuda, MatrixCudaLayer
from kittiwake.families.rwkv_cuda import LayerShift
from kittiwake.layers.cuda_linear import CudaProduct, same_bits
from kittiwake.ops.dynamic_mix.cuda import LOW_ROWS, can_take_low, close_mix_low
from kittiwake.ops.dynamic_mix.triton import close_mix
from kittiwake.ops.wkv6.cuda import Kind

_PROVED_AT = (1, 7, 8, 9, 31, LOW_ROWS)
"""Rows at which the mix that makes its low-rank products itself is compared with the launches apart."""
_LETTERS = {"receptance": "r", "key": "k", "value": "v", "gate": "g"}


class _Layer(MatrixCudaLayer):
    """Weights of one layer as the launches want them."""

    def __init__(self, index: int, sizes: Sizes, model: CudaModel) -> None:
        super().__init__(index, model, sizes.ffn, CHANNEL_MIXES)
        width, rank, prefix = sizes.width, sizes.mix_rank, f"{self.prefix}time_mix."
        self.mix_down = self.group(CudaProduct(f"{prefix}mix_down", width, len(MIXES) * rank, activation="tanh"))
        self.mix_up = self.group(
            *(CudaProduct(f"{prefix}mix_up_{letter}", rank, width, 0, i * rank) for i, letter in enumerate(MIXES))
        )
        self.projections = self.group(
            *(
                CudaProduct(f"{prefix}{name}.weight", width, width, MIXES.index(_LETTERS[name]))
                for name in PRODUCTS[:-1]
            ),
            CudaProduct(f"{prefix}decay_down", width, sizes.decay_rank, MIXES.index("w"), activation="tanh"),
        )
        self.decay_up = self.group(CudaProduct(f"{prefix}decay_up", sizes.decay_rank, width, 0, len(_LETTERS) * width))
        self.mix_x = self.vectors(width, "time_mix.mix_x")
        self.time_mixes = self.vectors(width, *(f"time_mix.mix_{letter}" for letter in MIXES))


class Rwkv6Cuda(MatrixCuda):
    """An RWKV-6 on one CUDA device."""

    def __init__(
        self, config: ModelConfig, sizes: Sizes, spec: StateSpec, dtype: str, *, place: torch.device | None = None
    ) -> None:
        self._sizes = sizes
        self._keeps_bits = True
        """Of the mix that makes its low-rank products itself: proved on the card, see :meth:`prove`."""
        super().__init__(config, spec, dtype, Kind(True, True), place=place)

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
        projected = self.outputs("projected", rows.shape.rows, layer.projections.columns)
        layer.projections(self._mixed(layer, shift, rows.shape.rows), projected, overlap=self.overlap)
        self.recur(layer, projected, self.wkv_state(states, index), rows, out)

    def _mixed(self, layer: _Layer, shift: LayerShift, count: int) -> torch.Tensor:
        """The inputs of the projections [5, N, C], in the order of MIXES."""
        z = self.room("z", count, self.width, lead=1)
        kept = self.room("kept", count, self.width, lead=2, dtype=torch.float32)
        shift(layer.mix_x, z, kept=kept)
        down = self.outputs("mix_down", count, layer.mix_down.columns)
        layer.mix_down(z[0], down, overlap=self.overlap)
        mixed = self.room("mixed", count, self.width, lead=len(MIXES))
        self._close_mix(layer, kept, down, mixed, is_apart=not self._keeps_bits)
        return mixed

    def _close_mix(
        self, layer: _Layer, kept: torch.Tensor, down: torch.Tensor, mixed: torch.Tensor, *, is_apart: bool
    ) -> None:
        """From the first low-rank products [N, 5 rank] to the mixed rows; ``is_apart``: the second ones in another launch."""
        count, mixes = down.shape[0], layer.time_mixes
        if not is_apart and can_take_low(self.element, self.width, self._sizes.mix_rank, count):
            close_mix_low(kept, down, layer.mix_up.weight, mixes, mixed, overlap=self.overlap)
            return
        low = self.outputs("mix_low", count, layer.mix_up.columns)
        layer.mix_up(down, low, overlap=self.overlap)
        close_mix(kept, low, mixes, mixed, overlap=self.overlap)

    def prove(self) -> None:
        """See :class:`CudaModel`; the mix makes its products itself where that has the bits of the launches apart here."""
        super().prove()
        self._keeps_bits = all(self._has_bits_of_launches_apart(rows) for rows in _PROVED_AT)

    def _has_bits_of_launches_apart(self, rows: int) -> bool:
        """Of the first layer's mix, on random rows."""
        layer, generator = self._layer_list[0], torch.Generator(self.place).manual_seed(rows)
        assert isinstance(layer, _Layer)
        kept = torch.randn((2, rows, self.width), generator=generator, device=self.place)
        down = self.outputs("mix_down", rows, layer.mix_down.columns)
        down.copy_(torch.rand(down.shape, generator=generator, device=self.place) * 2 - 1)
        made = torch.full((2, len(MIXES), rows, self.width), torch.nan, dtype=self.element, device=self.place)
        for mixed, is_apart in zip(made, (False, True), strict=True):
            self._close_mix(layer, kept, down, mixed, is_apart=is_apart)
        return same_bits(made[0], made[1])
