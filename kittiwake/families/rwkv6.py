"""RWKV-6 ("x060"): the family's side of the contract, and the forward.

Sources: RWKV-LM, RWKV-v5/src/model.py; arXiv 2404.05892. Names are in rwkv6_names.py, settings in rwkv56_settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.errors import ModelError
from kittiwake.families.contract import ModelConfig
from kittiwake.families.rwkv6_names import (
    CHANNEL_MIXES,
    GGUF,
    MIXES,
    PRODUCTS,
    RANKS,
    Sizes,
    canonical_shapes,
    find_layout,
    places_of,
    read_sizes,
)
from kittiwake.families.rwkv56_names import HINT
from kittiwake.families.rwkv56_settings import read_config, read_metadata
from kittiwake.families.rwkv_channel_mix import GatedChannelMix
from kittiwake.families.rwkv_cpu import MakeGroup, Rows, RwkvCpuLayer
from kittiwake.families.rwkv_matrix import MatrixFamily, MatrixModel, check_manifest_ranks
from kittiwake.families.rwkv_names import Place, Shapes, check_places
from kittiwake.layers.linear import Product
from kittiwake.ops.dynamic_mix.cpu import close_mix, open_mix
from kittiwake.ops.wkv6.cpu import time_mix
from kittiwake.progress import Progress

if TYPE_CHECKING:
    from kittiwake.families.cuda_model import CudaModel


def _sizes(config: ModelConfig) -> Sizes:
    extra = config.extra
    common = (config.layers, config.width, extra["heads"], extra["ffn"], config.vocab_size)
    return Sizes(*common, extra["ranks"]["mix"], extra["ranks"]["decay"])


class Rwkv6Family(MatrixFamily):
    """The family's side of the contract."""

    name = "rwkv6"
    own_extra = ("ranks",)

    def recognises(self, source: TensorSource) -> bool:
        """RWKV-6 is told by its token shifts ``time_maa``, and in GGUF by the architecture."""
        return find_layout(source) is not None

    def read_config(self, source: TensorSource) -> ModelConfig:
        """Sizes from the tensors, every tensor checked by name and shape; epsilons from the settings, each key checked."""
        layout = find_layout(source)
        if layout is None:
            raise ModelError(f"{source.path} does not hold the tensors of an RWKV-6")
        sizes = read_sizes(layout, source)
        if layout is GGUF:
            ranks = {"time_mix_extra_dim": sizes.mix_rank, "time_decay_extra_dim": sizes.decay_rank}
            eps = read_metadata(sizes, ranks, source.config or {}, source.path)
        else:
            eps = read_config("6.0", sizes, layout.key, source.config, source.path)
        check_places(source, places_of(layout, sizes, source), canonical_shapes(sizes), "RWKV-6", hint=HINT)
        own = {"ranks": {"mix": sizes.mix_rank, "decay": sizes.decay_rank}}
        return self.make_config(sizes, own, layout.key, eps)

    def shapes(self, config: ModelConfig) -> Shapes:
        """See :class:`RwkvFamily`."""
        return canonical_shapes(_sizes(config))

    def places(self, source: TensorSource, config: ModelConfig) -> Mapping[str, Place] | None:
        """See :class:`RwkvFamily`."""
        layout = find_layout(source)
        return None if layout is None else places_of(layout, _sizes(config), source)

    def make_model(self, config: ModelConfig, dtype: str, threads: int, progress: Progress | None) -> Rwkv6Model:
        """See :class:`RwkvFamily`."""
        return Rwkv6Model(config, dtype, threads, progress)

    def make_cuda_model(self, config: ModelConfig, dtype: str) -> CudaModel:
        """See :class:`RwkvFamily`."""
        from kittiwake.families.rwkv6_cuda import Rwkv6Cuda  # Triton is there only where a card is

        return Rwkv6Cuda(config, _sizes(config), self.state_spec(config), dtype)

    def check_own(self, model: Mapping[str, Any]) -> None:
        """See :class:`MatrixFamily`."""
        check_manifest_ranks(model, RANKS)


class _Layer(RwkvCpuLayer):
    """Weights of one layer as its forward wants them."""

    def __init__(self, index: int, sizes: Sizes, group: MakeGroup) -> None:
        width = sizes.width
        super().__init__(index, width)
        prefix = f"{self.prefix}time_mix."
        rank = sizes.mix_rank
        self.mix_down = self.group(group, Product(f"{prefix}mix_down", width, len(MIXES) * rank, 0, "tanh"))
        ups = (Product(f"{prefix}mix_up_{letter}", rank, width, i * rank) for i, letter in enumerate(MIXES))
        self.mix_up = self.group(group, *ups)
        columns = {letter: index * width for index, letter in enumerate(MIXES)}
        letters = {"receptance": "r", "key": "k", "value": "v", "gate": "g"}
        self.projections = self.group(
            group,
            *(Product(f"{prefix}{name}.weight", width, width, columns[letters[name]]) for name in PRODUCTS[:-1]),
            Product(f"{prefix}decay_down", width, sizes.decay_rank, columns["w"], "tanh"),
        )
        self.decay_up = self.group(group, Product(f"{prefix}decay_up", sizes.decay_rank, width, len(letters) * width))
        self.output = self.group(group, Product(f"{prefix}output.weight", width, width, 0))
        self.mix_x = self.vectors(width, "time_mix.mix_x")[0]
        self.time_mixes = self.vectors(width, *(f"time_mix.mix_{letter}" for letter in MIXES))
        vectors = ("decay_bias", "bonus", "group_norm.weight", "group_norm.bias")
        self.head_vectors = self.vectors(width, *(f"time_mix.{name}" for name in vectors))
        self.channel_mix = GatedChannelMix(self, width, sizes.ffn, CHANNEL_MIXES, group)


class Rwkv6Model(MatrixModel[_Layer]):
    """An RWKV-6 on the CPU: float32 arithmetic and states, weights in float32 or bfloat16."""

    def __init__(self, config: ModelConfig, dtype: str, threads: int, progress: Progress | None) -> None:
        self._sizes = _sizes(config)
        super().__init__(config, canonical_shapes(self._sizes), dtype, threads, progress)

    def make_layer(self, index: int, group: MakeGroup) -> _Layer:
        """See :class:`RwkvCpuModel`."""
        return _Layer(index, self._sizes, group)

    def run_layer(self, index: int, layer: _Layer, rows: Rows, y: np.ndarray) -> np.ndarray:
        """See :class:`RwkvCpuModel`."""
        width = self._sizes.width
        mixed = self._mixed(layer, rows, y, rows.state("att_shift")[index])
        rkvg = rows.product(layer.projections, mixed, "rkvg")
        low, out = rows.product(layer.decay_up, rkvg, "decay_low"), rows.get("out", width)
        wkv = rows.state("wkv")[index]
        time_mix(rkvg, low, layer.head_vectors, self._group_eps, True, rows.starts, rows.slots, wkv, out)
        y = rows.product(layer.output, out, "y")
        return layer.channel_mix(rows, y, self._eps, rows.state("ffn_shift")[index])

    def _mixed(self, layer: _Layer, rows: Rows, y: np.ndarray, shift: np.ndarray) -> np.ndarray:
        """The five inputs of the time mix's products side by side, [padded rows, 5 C], in the order of MIXES."""
        width, norm = self._sizes.width, layer.time_norm
        normed, difference, z = (rows.get(name, width) for name in ("normed", "difference", "z"))
        open_mix(
            rows.x, y, norm[0], norm[1], self._eps, rows.starts, rows.slots, rows.owner, shift, layer.mix_x,
            normed, difference, z,
        )  # fmt: skip
        low = rows.product(layer.mix_up, rows.product(layer.mix_down, z, "mix_low"), "mix_added")
        mixed = rows.get("mixed", len(MIXES) * width)
        close_mix(normed, difference, rows.count, low, layer.time_mixes, mixed)
        return mixed
