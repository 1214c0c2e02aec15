"""RWKV-7 ("x070"): the family's side of the contract, and the forward.

Sources: RWKV-LM, RWKV-v7/rwkv_v7_numpy.py; arXiv 2503.14456. Names are in rwkv7_names.py, settings in rwkv7_settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.errors import ModelError
from kittiwake.families.contract import ModelConfig
from kittiwake.families.rwkv7_names import (
    MIXES,
    RANKS,
    Sizes,
    canonical_shapes,
    check_tensors,
    find_layout,
    ranks_of,
    read_sizes,
)
from kittiwake.families.rwkv7_settings import read_epsilons
from kittiwake.families.rwkv_cpu import MakeGroup, Rows, RwkvCpuLayer
from kittiwake.families.rwkv_matrix import MatrixFamily, MatrixModel, check_manifest_ranks
from kittiwake.families.rwkv_names import Place, Shapes
from kittiwake.layers.linear import Product
from kittiwake.ops.wkv7.cpu import time_mix
from kittiwake.progress import Progress

if TYPE_CHECKING:
    from kittiwake.families.cuda_model import CudaModel


def _sizes(config: ModelConfig) -> Sizes:
    extra = config.extra
    ranks = {f"{rank}_rank": extra["ranks"][rank] for rank in RANKS}
    return Sizes(config.layers, config.width, extra["heads"], extra["ffn"], config.vocab_size, **ranks)


class Rwkv7Family(MatrixFamily):
    """The family's side of the contract."""

    name = "rwkv7"
    own_extra = ("ranks",)

    def recognises(self, source: TensorSource) -> bool:
        """RWKV-7 is told by its bonus ``r_k``, which no other version has, and in GGUF by the architecture."""
        return find_layout(source) is not None

    def read_config(self, source: TensorSource) -> ModelConfig:
        """Sizes from the tensors, every tensor checked by name and shape; epsilons from the settings, each key checked."""
        layout = find_layout(source)
        if layout is None:
            raise ModelError(f"{source.path} does not hold the tensors of an RWKV-7")
        sizes = read_sizes(layout, source)
        eps = read_epsilons(layout, sizes, source.config, source.path)
        check_tensors(layout, sizes, source)
        own = {"ranks": {rank: getattr(sizes, f"{rank}_rank") for rank in RANKS}}
        return self.make_config(sizes, own, layout.key, eps)

    def shapes(self, config: ModelConfig) -> Shapes:
        """See :class:`RwkvFamily`."""
        return canonical_shapes(_sizes(config))

    def places(self, source: TensorSource, config: ModelConfig) -> Mapping[str, Place] | None:
        """See :class:`RwkvFamily`."""
        layout = find_layout(source)
        return None if layout is None else layout.places(config.layers)

    def make_model(self, config: ModelConfig, dtype: str, threads: int, progress: Progress | None) -> Rwkv7Model:
        """See :class:`RwkvFamily`."""
        return Rwkv7Model(config, dtype, threads, progress)

    def make_cuda_model(self, config: ModelConfig, dtype: str) -> CudaModel:
        """See :class:`RwkvFamily`."""
        from kittiwake.families.rwkv7_cuda import Rwkv7Cuda  # Triton is there only where a card is

        return Rwkv7Cuda(config, _sizes(config), self.state_spec(config), dtype)

    def check_own(self, model: Mapping[str, Any]) -> None:
        """See :class:`MatrixFamily`. A model of one layer has no value residual."""
        check_manifest_ranks(model, RANKS, ("value_residual",) if model["layers"] == 1 else ())


class _Layer(RwkvCpuLayer):
    """Weights of one layer as its forward wants them."""

    def __init__(self, index: int, sizes: Sizes, group: MakeGroup) -> None:
        width = sizes.width
        super().__init__(index, width)
        prefix = self.prefix
        ranks = sorted(ranks_of(index), key=("decay", "iclr", "gate", "value_residual").index)
        first = [
            Product(f"{prefix}time_mix.{name}.weight", width, width, MIXES.index(letter) * width)
            for name, letter in (("receptance", "r"), ("key", "k"), ("value", "v"))
        ]
        second, column = [], 3 * width
        for rank in ranks:
            size = getattr(sizes, f"{rank}_rank")
            activation = {"decay": "tanh", "gate": "sigmoid"}.get(rank, "none")
            mixed = MIXES.index(RANKS[rank]) * width
            first.append(Product(f"{prefix}time_mix.{rank}_down", width, size, mixed, activation))
            second.append(Product(f"{prefix}time_mix.{rank}_up", size, width, column))
            column += size
        self.projections = self.group(group, *first)
        self.low_rank = self.group(group, *second)
        self.output = self.group(group, Product(f"{prefix}time_mix.output.weight", width, width, 0))
        self.ffn_key = self.group(group, Product(f"{prefix}channel_mix.key.weight", width, sizes.ffn, 0, "relu2"))
        self.ffn_value = self.group(group, Product(f"{prefix}channel_mix.value.weight", sizes.ffn, width, 0))
        self.time_mixes = self.vectors(width, *(f"time_mix.mix_{letter}" for letter in MIXES))
        self.channel_mixes = self.vectors(width, "channel_mix.mix_k")
        rows = "decay_bias iclr_bias value_residual_bias k_k k_a r_k group_norm.weight group_norm.bias".split()
        self.head_vectors = self.vectors(width, *(f"time_mix.{name}" for name in rows))


class Rwkv7Model(MatrixModel[_Layer]):
    """An RWKV-7 on the CPU: float32 arithmetic and states, weights in float32 or bfloat16."""

    def __init__(self, config: ModelConfig, dtype: str, threads: int, progress: Progress | None) -> None:
        self._sizes = _sizes(config)
        super().__init__(config, canonical_shapes(self._sizes), dtype, threads, progress)

    def make_layer(self, index: int, group: MakeGroup) -> _Layer:
        """See :class:`RwkvCpuModel`."""
        return _Layer(index, self._sizes, group)

    def run_layer(self, index: int, layer: _Layer, rows: Rows, y: np.ndarray) -> np.ndarray:
        """See :class:`RwkvCpuModel`."""
        width, eps = self._sizes.width, self._eps
        # time mix
        mixed = rows.shift(y, layer.time_norm, eps, rows.state("att_shift")[index], layer.time_mixes, "mixed")
        rkv = rows.product(layer.projections, mixed, "rkv")
        low = rows.product(layer.low_rank, rkv, "low")
        v_first, out = rows.get("v_first", width), rows.get("out", width)
        wkv, is_first = rows.state("wkv")[index], index == 0
        time_mix(rkv, low, v_first, layer.head_vectors, self._group_eps, is_first, rows.starts, rows.slots, wkv, out)
        y = rows.product(layer.output, out, "y")
        # channel mix
        shift = rows.state("ffn_shift")[index]
        mixed = rows.shift(y, layer.channel_norm, eps, shift, layer.channel_mixes, "mixed_k")
        hidden = rows.product(layer.ffn_key, mixed, "hidden")
        return rows.product(layer.ffn_value, hidden, "y")
