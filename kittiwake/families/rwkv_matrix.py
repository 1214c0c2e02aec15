"""What RWKV-5 to RWKV-7 have in common, whose state is a matrix a head: configs, the states, and the CPU model's frame."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.engine.states import StateSpec
from kittiwake.errors import BundleError
from kittiwake.families.canonical import SIZES, check_manifest_keys
from kittiwake.families.contract import ModelConfig
from kittiwake.families.rwkv_cpu import Layer, RwkvCpuModel
from kittiwake.families.rwkv_family import (
    RwkvFamily,
    check_manifest_count,
    check_manifest_epsilons,
)
from kittiwake.families.rwkv_names import MatrixSizes, Shapes
from kittiwake.families.rwkv_settings import Epsilons
from kittiwake.families.rwkv_time_state import initial_matrix_state, matrix_state_spec
from kittiwake.progress import Progress


class MatrixFamily(RwkvFamily):
    """The family's side of the contract, but for what a version's tensors are called and how its layers run."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    own_extra: ClassVar[tuple[str, ...]]
    """Keys of a config's ``extra`` that other versions do not have."""

    @abstractmethod
    def check_own(self, model: Mapping[str, Any]) -> None:
        """Raise BundleError unless a manifest's model section has values for ``own_extra`` that can be."""

    def state_spec(self, config: ModelConfig) -> StateSpec:
        """See :class:`RwkvFamily`."""
        return matrix_state_spec(config.layers, config.width, config.extra["heads"])

    def make_config(self, sizes: MatrixSizes, own: Mapping[str, Any], layout: str, eps: Epsilons) -> ModelConfig:
        """The config of a checkpoint; ``own`` are the values of ``own_extra``."""
        extra = {"heads": sizes.heads, "ffn": sizes.ffn, **own, "norm_eps": eps.norm, "group_norm_eps": eps.group_norm}
        origins = {"layout": layout, "norm_eps": eps.norm_origin, "group_norm_eps": eps.group_norm_origin}
        return ModelConfig(self.name, sizes.layers, sizes.width, sizes.vocab, extra, origins)

    def config_from_manifest(self, model: dict[str, Any]) -> ModelConfig:
        """The config a bundle's manifest gives; strict about keys and kinds."""
        keys = ("heads", "ffn", *self.own_extra, "norm_eps", "group_norm_eps")
        check_manifest_keys(model, self.name, keys)
        for key in (*SIZES, "heads", "ffn"):
            check_manifest_count(key, model[key])
        self.check_own(model)
        check_manifest_epsilons(model, "norm_eps", "group_norm_eps")
        if model["width"] % model["heads"]:
            raise BundleError(f"manifest model.width {model['width']} is not a multiple of heads {model['heads']}")
        origins = {"layout": "bundle", "norm_eps": "manifest", "group_norm_eps": "manifest"}
        extra = {key: model[key] for key in keys}
        return ModelConfig(self.name, model["layers"], model["width"], model["vocab_size"], extra, origins)


def check_manifest_ranks(model: Mapping[str, Any], names: Collection[str], absent: Collection[str] = ()) -> None:
    """Raise BundleError unless ``ranks`` of the model section has these names, a whole number for each.

    Those of ``absent`` low-rank pairs may be 0.
    """
    ranks = model["ranks"]
    if not isinstance(ranks, dict) or set(ranks) != set(names):
        raise BundleError(f"manifest model.ranks must name {sorted(names)}, got {ranks!r}")
    for key, value in ranks.items():
        check_manifest_count(key, value, 0 if key in absent else 1)


class MatrixModel(RwkvCpuModel[Layer]):
    """The frame of a model on the CPU: its states, and the group norm's epsilon."""

    def __init__(
        self, config: ModelConfig, shapes: Shapes, dtype: str, threads: int, progress: Progress | None
    ) -> None:
        self._heads = int(config.extra["heads"])
        self._group_eps = np.float32(config.extra["group_norm_eps"])
        spec = matrix_state_spec(config.layers, config.width, self._heads)
        super().__init__(config, shapes, spec, dtype, threads, progress)

    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """A tuned initial state; see :class:`kittiwake.families.contract.Model`."""
        config = self.config
        return initial_matrix_state(source, config.layers, config.width, self._heads, transpose=transpose)
