"""The side of the contract that every RWKV has in common: tensors in, tensors checked, a model built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any

import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.checkpoints.row_table import RowTable
from kittiwake.config import is_epsilon
from kittiwake.engine.states import StateSpec
from kittiwake.errors import BundleError
from kittiwake.families.canonical import check_bundle_names, check_tensor, fill
from kittiwake.families.contract import Model, ModelConfig
from kittiwake.families.rwkv_cpu import RwkvCpuModel
from kittiwake.families.rwkv_names import Place, Shapes
from kittiwake.progress import Progress

if TYPE_CHECKING:
    from kittiwake.families.cuda_model import CudaModel


class RwkvFamily(ABC):
    """What is left to a version: to tell and size its checkpoints, its tensors, its state and its model."""

    name: str
    devices: tuple[str, ...] = ("cpu",)

    @abstractmethod
    def shapes(self, config: ModelConfig) -> Shapes:
        """Every canonical tensor of this config, products as [N, K]."""

    @abstractmethod
    def places(self, source: TensorSource, config: ModelConfig) -> Mapping[str, Place] | None:
        """Our name → place in this source, or None where its names are ours already."""

    @abstractmethod
    def state_spec(self, config: ModelConfig) -> StateSpec:
        """What one sequence carries."""

    @abstractmethod
    def make_model(self, config: ModelConfig, dtype: str, threads: int, progress: Progress | None) -> RwkvCpuModel[Any]:
        """A model that waits for its tensors."""

    def make_cuda_model(self, config: ModelConfig, dtype: str) -> CudaModel:
        """The same on CUDA, where ``devices`` has it."""
        raise NotImplementedError(f"{self.name} runs on {', '.join(self.devices)}")

    def canonical(self, source: TensorSource, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Our tensors one by one; products as [N, K], vectors as float32 [C]."""
        shapes, places = self.shapes(config), self.places(source, config)
        if places is None:
            for name in shapes:
                yield name, source.read(name)
            return
        for name, place in places.items():
            yield name, place.take(source, shapes[name])

    def table_names(self, source: TensorSource, config: ModelConfig) -> Set[str]:
        """There are none."""
        return frozenset()

    def open_tables(self, source: TensorSource, config: ModelConfig) -> Mapping[str, RowTable]:
        """There are none."""
        return {}

    def table_parts(self, source: TensorSource, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """There are none."""
        return iter(())

    def check_canonical(self, source: TensorSource, config: ModelConfig) -> None:
        """Raise BundleError unless the source holds exactly the canonical tensors of this config."""
        infos = {info.name: info for info in source.infos()}
        if config.layers > len(infos):
            raise BundleError(f"{source.path} holds {len(infos)} tensors, its manifest asks for {config.layers} layers")
        shapes = self.shapes(config)
        check_bundle_names(source, shapes)
        for name, shape in shapes.items():
            check_tensor(infos[name], shape, source)

    def footprint(self, config: ModelConfig) -> dict[str, int]:
        """Bytes in memory of the weights and of one state. Vectors are float32; the embedding may stay in its file."""
        shapes = self.shapes(config).values()
        matrices = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
        vectors = 4 * sum(shape[0] for shape in shapes if len(shape) == 1)
        return {
            "fp32": 4 * matrices + vectors,
            "bf16": 2 * matrices + vectors,
            "state": self.state_spec(config).slot_bytes,
        }

    def workspace_bytes(self, config: ModelConfig, rows: int, threads: int) -> int:
        """Not planned: a forward takes its buffers as it goes."""
        return 0

    def build(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        device: str,
        dtype: str,
        threads: int,
        tables: Mapping[str, RowTable] | None = None,
        progress: Progress | None = None,
    ) -> Model:
        """Take the tensors one at a time into a model."""
        model: RwkvCpuModel[Any] | CudaModel
        on_card = device == "cuda"
        model = self.make_cuda_model(config, dtype) if on_card else self.make_model(config, dtype, threads, progress)
        fill(model, tensors, self.shapes(config), progress)
        return model


def check_manifest_count(key: str, value: Any, low: int = 1) -> None:
    """Raise BundleError unless a value of the model section is a whole number of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise BundleError(f"manifest model.{key} must be a whole number of at least {low}, got {value!r}")


def check_manifest_epsilons(model: Mapping[str, Any], *keys: str) -> None:
    """Raise BundleError unless these values of the model section can be epsilons."""
    for key in keys:
        if not is_epsilon(model[key]):
            raise BundleError(f"manifest model.{key} is {model[key]!r}; supported: a number above 0 and below 1")
