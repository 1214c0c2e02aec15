"""RWKV-7 ("x070"): the family's side of the contract, and the forward.

Sources: RWKV-LM, RWKV-v7/rwkv_v7_numpy.py; arXiv 2503.14456. Names are in rwkv7_names.py, settings in rwkv7_settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.engine.states import StatePart, StateSpec
from kittiwake.errors import BundleError, ModelError
from kittiwake.families.contract import ModelConfig, Progress
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
from kittiwake.families.rwkv7_settings import Epsilons, read_epsilons
from kittiwake.families.rwkv_cpu import MakeGroup, Rows, RwkvCpuLayer, RwkvCpuModel
from kittiwake.families.rwkv_family import (
    RwkvFamily,
    check_manifest_count,
    check_manifest_epsilons,
    check_manifest_keys,
)
from kittiwake.families.rwkv_names import Place, Shapes
from kittiwake.families.rwkv_time_state import read_time_state
from kittiwake.layers.linear import Product
from kittiwake.ops.wkv7.cpu import time_mix

if TYPE_CHECKING:
    from kittiwake.families.cuda_model import CudaModel

_EXTRA = ("heads", "ffn", "ranks", "norm_eps", "group_norm_eps")


def _config(sizes: Sizes, layout: str, eps: Epsilons) -> ModelConfig:
    extra: dict[str, Any] = {
        "heads": sizes.heads,
        "ffn": sizes.ffn,
        "ranks": {rank: getattr(sizes, f"{rank}_rank") for rank in RANKS},
        "norm_eps": eps.norm,
        "group_norm_eps": eps.group_norm,
    }
    origins = {"layout": layout, "norm_eps": eps.norm_origin, "group_norm_eps": eps.group_norm_origin}
    return ModelConfig("rwkv7", sizes.layers, sizes.width, sizes.vocab, extra, origins)


def _sizes(config: ModelConfig) -> Sizes:
    extra = config.extra
    ranks = {f"{rank}_rank": extra["ranks"][rank] for rank in RANKS}
    return Sizes(config.layers, config.width, extra["heads"], extra["ffn"], config.vocab_size, **ranks)


class Rwkv7Family(RwkvFamily):
    """The family's side of the contract."""

    name = "rwkv7"
    devices: tuple[str, ...] = ("cpu", "cuda")

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
        return _config(sizes, layout.key, eps)

    def shapes(self, config: ModelConfig) -> Shapes:
        """See :class:`RwkvFamily`."""
        return canonical_shapes(_sizes(config))

    def places(self, source: TensorSource, config: ModelConfig) -> Mapping[str, Place] | None:
        """See :class:`RwkvFamily`."""
        layout = find_layout(source)
        return None if layout is None else layout.places(config.layers)

    def state_spec(self, config: ModelConfig) -> StateSpec:
        """See :class:`RwkvFamily`."""
        return _state_spec(_sizes(config))

    def make_model(self, config: ModelConfig, dtype: str, threads: int, progress: Progress | None) -> Rwkv7Model:
        """See :class:`RwkvFamily`."""
        return Rwkv7Model(config, dtype, threads, progress)

    def make_cuda_model(self, config: ModelConfig, dtype: str) -> CudaModel:
        """See :class:`RwkvFamily`."""
        from kittiwake.families.rwkv7_cuda import Rwkv7Cuda  # Triton is there only where a card is

        sizes = _sizes(config)
        return Rwkv7Cuda(config, sizes, _state_spec(sizes), dtype)

    def config_from_manifest(self, model: dict[str, Any]) -> ModelConfig:
        """The config a bundle's manifest gives; strict about keys and kinds."""
        check_manifest_keys(model, "rwkv7", _EXTRA)
        if not isinstance(model["ranks"], dict) or set(model["ranks"]) != set(RANKS):
            raise BundleError(f"manifest model.ranks must name {sorted(RANKS)}, got {model['ranks']!r}")
        numbers = {key: model[key] for key in ("layers", "width", "vocab_size", "heads", "ffn")}
        for key, value in (numbers | model["ranks"]).items():
            check_manifest_count(key, value, 0 if key == "value_residual" and model["layers"] == 1 else 1)
        check_manifest_epsilons(model, "norm_eps", "group_norm_eps")
        if model["width"] % model["heads"]:
            raise BundleError(f"manifest model.width {model['width']} is not a multiple of heads {model['heads']}")
        origins = {"layout": "bundle", "norm_eps": "manifest", "group_norm_eps": "manifest"}
        extra = {key: model[key] for key in _EXTRA}
        return ModelConfig("rwkv7", model["layers"], model["width"], model["vocab_size"], extra, origins)


def _state_spec(sizes: Sizes) -> StateSpec:
    heads, size = sizes.heads, sizes.head_size
    return StateSpec(
        sizes.layers,
        (
            StatePart("att_shift", (sizes.width,)),
            StatePart("wkv", (heads, size, size)),
            StatePart("ffn_shift", (sizes.width,)),
        ),
    )


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


class Rwkv7Model(RwkvCpuModel[_Layer]):
    """An RWKV-7 on the CPU: float32 arithmetic and states, weights in float32 or bfloat16."""

    def __init__(self, config: ModelConfig, dtype: str, threads: int, progress: Progress | None) -> None:
        self._sizes = sizes = _sizes(config)
        self._group_eps = np.float32(config.extra["group_norm_eps"])
        super().__init__(config, canonical_shapes(sizes), _state_spec(sizes), dtype, threads, progress)

    def make_layer(self, index: int, group: MakeGroup) -> _Layer:
        """See :class:`RwkvCpuModel`."""
        return _Layer(index, self._sizes, group)

    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """A tuned initial state; see :class:`kittiwake.families.contract.Model`."""
        sizes = self._sizes
        wkv = read_time_state(source, sizes.layers, sizes.heads, sizes.head_size, transpose=transpose)
        shift = np.zeros((sizes.layers, sizes.width), dtype=np.float32)
        return {"att_shift": shift, "wkv": wkv, "ffn_shift": shift.copy()}

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
