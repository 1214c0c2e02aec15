"""RWKV-5 (5.0, 5.1 and 5.2): the family's side of the contract, and the forward.

Sources: RWKV-LM, RWKV-v5/src/model.py; arXiv 2404.05892. Names are in rwkv5_names.py, settings in rwkv56_settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.errors import BundleError, ModelError
from kittiwake.families.contract import ModelConfig
from kittiwake.families.rwkv5_names import (
    CHANNEL_MIXES,
    VERSIONS,
    Sizes,
    canonical_shapes,
    find_layout,
    places_of,
    read_sizes,
)
from kittiwake.families.rwkv56_names import HINT
from kittiwake.families.rwkv56_settings import read_config
from kittiwake.families.rwkv_channel_mix import GatedChannelMix
from kittiwake.families.rwkv_cpu import MakeGroup, Rows, RwkvCpuLayer, share_of_the_token_before
from kittiwake.families.rwkv_matrix import MatrixFamily, MatrixModel
from kittiwake.families.rwkv_names import Place, Shapes, check_places
from kittiwake.layers.linear import Product
from kittiwake.ops.wkv6.cpu import time_mix
from kittiwake.progress import Progress

if TYPE_CHECKING:
    from kittiwake.families.cuda_model import CudaModel


def _sizes(config: ModelConfig) -> Sizes:
    extra = config.extra
    common = (config.layers, config.width, extra["heads"], extra["ffn"], config.vocab_size)
    return Sizes(*common, extra["version"], extra["is_bonus_log"])


class Rwkv5Family(MatrixFamily):
    """The family's side of the contract."""

    name = "rwkv5"
    own_extra = ("version", "is_bonus_log")

    def recognises(self, source: TensorSource) -> bool:
        """RWKV-5 has the decay of RWKV-4 and the group norm of RWKV-6, and the token shifts of neither RWKV-6 nor 7."""
        return find_layout(source) is not None

    def read_config(self, source: TensorSource) -> ModelConfig:
        """Version and sizes from the tensors, each checked by name and shape; epsilons from the settings, each key checked."""
        layout = find_layout(source)
        if layout is None:
            raise ModelError(f"{source.path} does not hold the tensors of an RWKV-5")
        sizes = read_sizes(layout, source)
        eps = read_config(sizes.version, sizes, layout.key, source.config, source.path)
        check_places(
            source, places_of(layout, sizes, source), canonical_shapes(sizes), f"RWKV-{sizes.version}", hint=HINT
        )
        own = {"version": sizes.version, "is_bonus_log": sizes.is_bonus_log}
        return self.make_config(sizes, own, layout.key, eps)

    def shapes(self, config: ModelConfig) -> Shapes:
        """See :class:`RwkvFamily`."""
        return canonical_shapes(_sizes(config))

    def places(self, source: TensorSource, config: ModelConfig) -> Mapping[str, Place] | None:
        """See :class:`RwkvFamily`."""
        layout = find_layout(source)
        return None if layout is None else places_of(layout, _sizes(config), source)

    def make_model(self, config: ModelConfig, dtype: str, threads: int, progress: Progress | None) -> Rwkv5Model:
        """See :class:`RwkvFamily`."""
        return Rwkv5Model(config, dtype, threads, progress)

    def make_cuda_model(self, config: ModelConfig, dtype: str) -> CudaModel:
        """See :class:`RwkvFamily`."""
        from kittiwake.families.rwkv5_cuda import Rwkv5Cuda  # Triton is there only where a card is

        return Rwkv5Cuda(config, _sizes(config), self.state_spec(config), dtype)

    def check_own(self, model: Mapping[str, Any]) -> None:
        """See :class:`MatrixFamily`."""
        if model["version"] not in VERSIONS:
            raise BundleError(f"manifest model.version is {model['version']!r}; supported: {', '.join(VERSIONS)}")
        if not isinstance(model["is_bonus_log"], bool):
            raise BundleError(f"manifest model.is_bonus_log is {model['is_bonus_log']!r}; supported: true, false")


def plain_bonus(log_bonus: np.ndarray) -> np.ndarray:
    """A bonus [C] that is stored as its logarithm."""
    return np.exp(log_bonus.astype(np.float64)).astype(np.float32)


class _Layer(RwkvCpuLayer):
    """Weights of one layer as its forward wants them."""

    def __init__(self, index: int, sizes: Sizes, group: MakeGroup) -> None:
        width = sizes.width
        super().__init__(index, width)
        prefix = f"{self.prefix}time_mix."
        self.projections = self.group(
            group,
            *(
                Product(f"{prefix}{name}.weight", width, width, column * width)
                for column, name in enumerate(sizes.mixed_products)
            ),
        )
        self.output = self.group(group, Product(f"{prefix}output.weight", width, width, 0))
        mixes = (f"time_mix.{mix}" for mix in sizes.mixes)
        self.time_mixes = self.vectors(width, *mixes, change=share_of_the_token_before)
        names = ("decay_bias", sizes.bonus, "group_norm.weight", "group_norm.bias")
        self.head_vectors = self.vectors(width, *(f"time_mix.{name}" for name in names))
        self.channel_mix = GatedChannelMix(
            self, width, sizes.ffn, CHANNEL_MIXES, group, change=share_of_the_token_before
        )

    def take(self, name: str, values: np.ndarray) -> None:
        """Copy a vector to its row; of a bonus that is stored as its logarithm, the exponential."""
        super().take(name, plain_bonus(values) if name == "time_mix.log_bonus" else values)


class Rwkv5Model(MatrixModel[_Layer]):
    """An RWKV-5 on the CPU: float32 arithmetic and states, weights in float32 or bfloat16."""

    def __init__(self, config: ModelConfig, dtype: str, threads: int, progress: Progress | None) -> None:
        self._sizes = _sizes(config)
        self._no_low = np.zeros((0, config.width), dtype=np.float32)
        super().__init__(config, canonical_shapes(self._sizes), dtype, threads, progress)

    def make_layer(self, index: int, group: MakeGroup) -> _Layer:
        """See :class:`RwkvCpuModel`."""
        return _Layer(index, self._sizes, group)

    def run_layer(self, index: int, layer: _Layer, rows: Rows, y: np.ndarray) -> np.ndarray:
        """See :class:`RwkvCpuModel`."""
        shift = rows.state("att_shift")[index]
        mixed = rows.shift(y, layer.time_norm, self._eps, shift, layer.time_mixes, "mixed")
        rkvg, out = rows.product(layer.projections, mixed, "rkvg"), rows.get("out", self._sizes.width)
        wkv, eps, is_gated = rows.state("wkv")[index], self._group_eps, self._sizes.is_gated
        time_mix(rkvg, self._no_low, layer.head_vectors, eps, is_gated, rows.starts, rows.slots, wkv, out)
        y = rows.product(layer.output, out, "y")
        return layer.channel_mix(rows, y, self._eps, rows.state("ffn_shift")[index])
