"""RWKV-4: the family's side of the contract, and the forward.

Sources: RWKV-LM, RWKV-v4/src/model_run.py; arXiv 2305.13048. Names are in rwkv4_names.py, settings in
rwkv4_settings.py.

transformers halves the residual stream every ``rescale_every`` layers, and the products that are added to it with it,
so that it fits float16. In float32 there is no need: halving is exact, and a norm undoes it but for its epsilon, which
then weighs as much as 4 ** (halvings so far) of it would in the stream as it is. That is how its logits are met where
they are wanted: by the epsilon that its norms have in effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.engine.states import StatePart, StateSpec
from kittiwake.errors import BundleError, ModelError
from kittiwake.families.canonical import check_manifest_keys
from kittiwake.families.contract import ModelConfig
from kittiwake.families.rwkv4_names import (
    CHANNEL_SHIFTS,
    HEAD,
    TIME_SHIFTS,
    Sizes,
    canonical_shapes,
    check_tensors,
    find_layout,
    read_sizes,
)
from kittiwake.families.rwkv4_settings import read_settings
from kittiwake.families.rwkv_channel_mix import GatedChannelMix
from kittiwake.families.rwkv_cpu import MakeGroup, Rows, RwkvCpuLayer, RwkvCpuModel, share_of_the_token_before
from kittiwake.families.rwkv_family import (
    RwkvFamily,
    check_manifest_count,
    check_manifest_epsilons,
)
from kittiwake.families.rwkv_names import Place, Shapes
from kittiwake.layers.linear import Product
from kittiwake.ops.wkv4 import EMPTY_TOP
from kittiwake.ops.wkv4.cpu import time_mix
from kittiwake.progress import Progress

if TYPE_CHECKING:
    from kittiwake.families.cuda_model import CudaModel

_EXTRA = ("attention", "ffn", "norm_eps", "rescale_every", "end_ids")


def _sizes(config: ModelConfig) -> Sizes:
    return Sizes(config.layers, config.width, config.extra["attention"], config.extra["ffn"], config.vocab_size)


class Rwkv4Family(RwkvFamily):
    """The family's side of the contract."""

    name = "rwkv4"
    devices: tuple[str, ...] = ("cpu", "cuda")

    def recognises(self, source: TensorSource) -> bool:
        """RWKV-4 has a decay and a bonus, and none of what later versions add to the time mix."""
        return find_layout(source) is not None

    def read_config(self, source: TensorSource) -> ModelConfig:
        """Sizes from the tensors, every tensor checked by name and shape; every key of a config.json checked."""
        layout = find_layout(source)
        if layout is None:
            raise ModelError(f"{source.path} does not hold the tensors of an RWKV-4")
        sizes = read_sizes(layout, source)
        read = read_settings(sizes, source.config, source.path)
        check_tensors(layout, sizes, source, is_tied=read.is_tied)
        extra = {
            "attention": sizes.attention,
            "ffn": sizes.ffn,
            "norm_eps": read.norm_eps,
            "rescale_every": 0,
            "end_ids": list(read.end_ids),
        }
        origins = {"layout": layout.key, "norm_eps": read.norm_origin, "rescale_every": "default: exact"}
        if read.rescale_every:
            origins["rescale_every"] = f"exact; config.json: {read.rescale_every}, see option rescale_every"
        return ModelConfig("rwkv4", sizes.layers, sizes.width, sizes.vocab, extra, origins)

    def shapes(self, config: ModelConfig) -> Shapes:
        """See :class:`RwkvFamily`."""
        return canonical_shapes(_sizes(config))

    def places(self, source: TensorSource, config: ModelConfig) -> Mapping[str, Place] | None:
        """See :class:`RwkvFamily`."""
        layout = find_layout(source)
        if layout is None:
            return None
        return layout.places(config.layers, is_tied=read_settings(_sizes(config), source.config, source.path).is_tied)

    def canonical(self, source: TensorSource, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Our tensors one by one. A head that is told to be the embedding, and is another, is refused (ModelError)."""
        for name, tensor in super().canonical(source, config):
            if name == "head.weight" and not self._is_only_head(source, config, tensor):
                raise ModelError(
                    f"{source.path}: config.json says tie_word_embeddings, but {HEAD} is not the embedding",
                    f"set it to false to use {HEAD}, or remove the tensor",
                )
            yield name, tensor

    def _is_only_head(self, source: TensorSource, config: ModelConfig, head: torch.Tensor) -> bool:
        """Whether a source whose head is tied to the embedding holds no other."""
        places = self.places(source, config)
        if places is None or places["head.weight"].name == HEAD or all(info.name != HEAD for info in source.infos()):
            return True
        return torch.equal(head, source.read(HEAD).to(head.dtype))

    def config_from_manifest(self, model: dict[str, Any]) -> ModelConfig:
        """The config a bundle's manifest gives; strict about keys and kinds."""
        check_manifest_keys(model, "rwkv4", _EXTRA)
        for key in ("layers", "width", "vocab_size", "attention", "ffn"):
            check_manifest_count(key, model[key])
        check_manifest_count("rescale_every", model["rescale_every"], 0)
        check_manifest_epsilons(model, "norm_eps")
        ends, vocab = model["end_ids"], model["vocab_size"]
        if not isinstance(ends, list) or not all(type(token) is int and 0 <= token < vocab for token in ends):
            raise BundleError(f"manifest model.end_ids must be a list of ids from 0 to {vocab - 1}, got {ends!r}")
        origins = {"layout": "bundle", "norm_eps": "manifest", "rescale_every": "manifest"}
        extra = {key: model[key] for key in _EXTRA}
        return ModelConfig("rwkv4", model["layers"], model["width"], vocab, extra, origins)

    def state_spec(self, config: ModelConfig) -> StateSpec:
        """See :class:`RwkvFamily`."""
        width, inner = (config.width,), (config.extra["attention"],)
        return StateSpec(
            config.layers,
            (
                StatePart("att_shift", width),
                StatePart("num", inner),
                StatePart("den", inner),
                StatePart("top", inner, fill=EMPTY_TOP),
                StatePart("ffn_shift", width),
            ),
        )

    def make_model(self, config: ModelConfig, dtype: str, threads: int, progress: Progress | None) -> Rwkv4Model:
        """See :class:`RwkvFamily`."""
        return Rwkv4Model(config, self.shapes(config), self.state_spec(config), dtype, threads, progress)

    def make_cuda_model(self, config: ModelConfig, dtype: str) -> CudaModel:
        """See :class:`RwkvFamily`."""
        from kittiwake.families.rwkv4_cuda import Rwkv4Cuda  # Triton is there only where a card is

        return Rwkv4Cuda(config, _sizes(config), self.state_spec(config), dtype)


def log_decay(decay: np.ndarray) -> np.ndarray:
    """-e^decay, below 0: what a step adds to the exponents of the past."""
    return (-np.exp(decay.astype(np.float64))).astype(np.float32)


def effective_eps(eps: float, rescale_every: int, layer: int) -> float:
    """Epsilon in effect where the stream would have been halved once for every ``rescale_every`` layers before; 0: never."""
    return eps * 4.0 ** (layer // rescale_every) if rescale_every else eps


def no_tuned_states(source: TensorSource) -> ModelError:
    """What asking for an initial state is answered with: there are none."""
    return ModelError(
        f"{source.path} cannot be an initial state of RWKV-4, which keeps no matrices",
        "tuned states are for RWKV-5 to RWKV-7; a state kittiwake saved is loaded as such",
    )


class _Layer(RwkvCpuLayer):
    """Weights of one layer as its forward wants them."""

    def __init__(self, index: int, sizes: Sizes, group: MakeGroup) -> None:
        width, inner = sizes.width, sizes.attention
        super().__init__(index, width)
        self.time_shifts = self.vectors(
            width, *(f"time_mix.{shift}" for shift in TIME_SHIFTS), change=share_of_the_token_before
        )
        activations = {"receptance": "sigmoid"}
        self.projections = self.group(
            group,
            *(
                Product(f"{self.prefix}time_mix.{name}.weight", width, inner, i * width, activations.get(name, "none"))
                for i, name in enumerate(TIME_SHIFTS.values())
            ),
        )
        self.log_decay = self.vectors(inner, "time_mix.decay", change=log_decay)[0]
        self.bonus = self.vectors(inner, "time_mix.bonus")[0]
        self.output = self.group(group, Product(f"{self.prefix}time_mix.output.weight", inner, width, 0))
        shifts = (CHANNEL_SHIFTS[0], CHANNEL_SHIFTS[1])
        self.channel_mix = GatedChannelMix(self, width, sizes.ffn, shifts, group, share_of_the_token_before)


class Rwkv4Model(RwkvCpuModel[_Layer]):
    """An RWKV-4 on the CPU: float32 arithmetic and states, weights in float32 or bfloat16."""

    def make_layer(self, index: int, group: MakeGroup) -> _Layer:
        """See :class:`RwkvCpuModel`."""
        return _Layer(index, _sizes(self.config), group)

    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """There are no tuned initial states of RWKV-4. Raises ModelError."""
        raise no_tuned_states(source)

    def output_eps(self) -> np.float32:
        """See :class:`RwkvCpuModel`."""
        return self._eps_at(self.config.layers)

    def _eps_at(self, layer: int) -> np.float32:
        return np.float32(effective_eps(float(self._eps), self.config.extra["rescale_every"], layer))

    def run_layer(self, index: int, layer: _Layer, rows: Rows, y: np.ndarray) -> np.ndarray:
        """See :class:`RwkvCpuModel`."""
        eps = self._eps_at(index)
        mixed = rows.shift(y, layer.time_norm, eps, rows.state("att_shift")[index], layer.time_shifts, "mixed")
        rkv = rows.product(layer.projections, mixed, "rkv")
        out = rows.get("out", len(layer.bonus))
        num, den, top = (rows.state(name)[index] for name in ("num", "den", "top"))
        time_mix(rkv, layer.log_decay, layer.bonus, rows.starts, rows.slots, num, den, top, out)
        y = rows.product(layer.output, out, "y")
        return layer.channel_mix(rows, y, eps, rows.state("ffn_shift")[index])
