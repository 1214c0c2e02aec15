"""RWKV-7 ("x070"): the family's side of the contract, and the forward.

Sources: RWKV-LM, RWKV-v7/rwkv_v7_numpy.py; arXiv 2503.14456. Names are in rwkv7_names.py, settings in rwkv7_settings.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StatePart, StateSpec, StateTable
from kittiwake.errors import BundleError, ModelError
from kittiwake.families.contract import Model, ModelConfig, Progress
from kittiwake.families.rwkv7_names import (
    MIXES,
    RANKS,
    Sizes,
    canonical_shapes,
    check_tensor,
    check_tensors,
    find_layout,
    listed,
    ranks_of,
    read_sizes,
)
from kittiwake.families.rwkv7_settings import Epsilons, is_epsilon, read_epsilons
from kittiwake.families.rwkv_time_state import read_time_state
from kittiwake.layers.linear import LinearGroup, Product, Workspace, padded, threads_in_force
from kittiwake.layers.probe import pick_products
from kittiwake.ops.matmul.cpu import activate_columns
from kittiwake.ops.shift_mix.cpu import PARALLEL_VALUES, embed_rows, norm_rows, shift_mix
from kittiwake.ops.wkv7.cpu import time_mix

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


class Rwkv7Family:
    """The family's side of the contract."""

    name = "rwkv7"
    devices = ("cpu", "cuda")

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

    def canonical(self, source: TensorSource, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Our tensors one by one; products as [N, K], vectors as float32 [C]."""
        shapes = canonical_shapes(_sizes(config))
        layout = find_layout(source)
        if layout is None:
            for name in shapes:
                yield name, source.read(name)
            return
        for name, place in layout.places(config.layers).items():
            yield name, place.take(source, shapes[name])

    def config_from_manifest(self, model: dict[str, Any]) -> ModelConfig:
        """The config a bundle's manifest gives; strict about keys and kinds."""
        keys = {"layers", "width", "vocab_size", *_EXTRA}
        if set(model) != keys:
            raise BundleError(f"manifest model section has keys {sorted(model)}, rwkv7 needs {sorted(keys)}")
        if not isinstance(model["ranks"], dict) or set(model["ranks"]) != set(RANKS):
            raise BundleError(f"manifest model.ranks must name {sorted(RANKS)}, got {model['ranks']!r}")
        numbers = {key: model[key] for key in ("layers", "width", "vocab_size", "heads", "ffn")}
        for key, value in (numbers | model["ranks"]).items():
            low = 0 if key == "value_residual" and model["layers"] == 1 else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise BundleError(f"manifest model.{key} must be a whole number of at least {low}, got {value!r}")
        for key in ("norm_eps", "group_norm_eps"):
            if not is_epsilon(model[key]):
                raise BundleError(f"manifest model.{key} is {model[key]!r}; supported: a number above 0 and below 1")
        if model["width"] % model["heads"]:
            raise BundleError(f"manifest model.width {model['width']} is not a multiple of heads {model['heads']}")
        origins = {"layout": "bundle", "norm_eps": "manifest", "group_norm_eps": "manifest"}
        extra = {key: model[key] for key in _EXTRA}
        return ModelConfig("rwkv7", model["layers"], model["width"], model["vocab_size"], extra, origins)

    def check_canonical(self, source: TensorSource, config: ModelConfig) -> None:
        """Raise BundleError unless the source holds exactly the canonical tensors of this config."""
        infos = {info.name: info for info in source.infos()}
        if config.layers > len(infos):
            raise BundleError(f"{source.path} holds {len(infos)} tensors, its manifest asks for {config.layers} layers")
        shapes = canonical_shapes(_sizes(config))
        unknown, missing = sorted(set(infos) - set(shapes)), sorted(set(shapes) - set(infos))
        if unknown or missing:
            raise BundleError(
                f"{source.path} does not hold the tensors its manifest asks for: "
                f"unknown {listed(unknown)}; missing {listed(missing)}"
            )
        for name, shape in shapes.items():
            check_tensor(infos[name], shape, source)

    def footprint(self, config: ModelConfig) -> dict[str, int]:
        """Bytes in memory of the weights and of one state. Vectors are float32; the embedding may stay in its file."""
        sizes = _sizes(config)
        shapes = canonical_shapes(sizes).values()
        matrices = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
        vectors = 4 * sum(shape[0] for shape in shapes if len(shape) == 1)
        return {
            "fp32": 4 * matrices + vectors,
            "bf16": 2 * matrices + vectors,
            "state": _state_spec(sizes).slot_bytes,
        }

    def build(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        device: str,
        dtype: str,
        threads: int,
        progress: Progress | None = None,
    ) -> Model:
        """Take the tensors one at a time into a model."""
        if device == "cuda":
            from kittiwake.families.rwkv7_cuda import build_cuda  # Triton is there only where a card is

            sizes = _sizes(config)
            return build_cuda(config, sizes, _state_spec(sizes), tensors, dtype=dtype, progress=progress)
        model = Rwkv7Model(config, dtype, threads, progress)
        total = len(canonical_shapes(_sizes(config)))
        for done, (name, tensor) in enumerate(tensors):
            model.load(name, tensor)
            if progress is not None:
                progress("loading tensors", done + 1, total)
        model.check_loaded()
        model.warm_up(progress)
        return model


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


class _Layer:
    """Weights of one layer as its forward wants them."""

    def __init__(self, index: int, sizes: Sizes, picks: Any, dtype: str, threads: int) -> None:
        width, prefix = sizes.width, f"layers.{index}."
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

        def group(products: list[Product]) -> LinearGroup:
            return LinearGroup(products, picks, dtype, threads)

        self.projections = group(first)
        self.low_rank = group(second)
        self.output = group([Product(f"{prefix}time_mix.output.weight", width, width, 0)])
        self.ffn_key = group([Product(f"{prefix}channel_mix.key.weight", width, sizes.ffn, 0, "relu2")])
        self.ffn_value = group([Product(f"{prefix}channel_mix.value.weight", sizes.ffn, width, 0)])
        self.time_norm = np.zeros((2, width), dtype=np.float32)
        self.channel_norm = np.zeros((2, width), dtype=np.float32)
        self.time_mixes = np.zeros((len(MIXES), width), dtype=np.float32)
        self.channel_mixes = np.zeros((1, width), dtype=np.float32)
        self.vectors = np.zeros((8, width), dtype=np.float32)
        self.vector_rows = {
            "time_norm.weight": self.time_norm[0],
            "time_norm.bias": self.time_norm[1],
            "channel_norm.weight": self.channel_norm[0],
            "channel_norm.bias": self.channel_norm[1],
            "channel_mix.mix_k": self.channel_mixes[0],
        }
        self.vector_rows |= {f"time_mix.mix_{letter}": self.time_mixes[i] for i, letter in enumerate(MIXES)}
        rows = (
            "decay_bias",
            "iclr_bias",
            "value_residual_bias",
            "k_k",
            "k_a",
            "r_k",
            "group_norm.weight",
            "group_norm.bias",
        )
        self.vector_rows |= {f"time_mix.{name}": self.vectors[i] for i, name in enumerate(rows)}

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        """Every group, in the order the forward runs them."""
        return (self.projections, self.low_rank, self.output, self.ffn_key, self.ffn_value)


class Rwkv7Model:
    """An RWKV-7 on the CPU: float32 arithmetic and states, weights in float32 or bfloat16."""

    def __init__(self, config: ModelConfig, dtype: str, threads: int, progress: Progress | None) -> None:
        self.config, self.device = config, "cpu"
        self.dtype, self.threads = dtype, threads
        self._sizes = sizes = _sizes(config)
        self._eps = np.float32(config.extra["norm_eps"])
        self._group_eps = np.float32(config.extra["group_norm_eps"])
        shapes = canonical_shapes(sizes)
        depths = {(k, n) for name, (n, k) in _matrices(shapes) if name != "embedding.weight"}
        picks = pick_products(depths, threads, progress)
        self._layers = [_Layer(index, sizes, picks, dtype, threads) for index in range(sizes.layers)]
        self._head = LinearGroup([Product("head.weight", sizes.width, sizes.vocab, 0)], picks, dtype, threads)
        self._embedding = np.zeros((0, sizes.width), dtype=np.float32)
        self._norms = {name: np.zeros((2, sizes.width), dtype=np.float32) for name in ("embedding_norm", "output_norm")}
        self._groups = {
            p.name: group
            for group in [group for layer in self._layers for group in layer.groups] + [self._head]
            for p in group.products
        }
        self._missing = set(shapes)
        self._workspace = Workspace()
        self.state_spec = _state_spec(sizes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of product weights a decode step reads."""
        return sum(group.nbytes for group in {id(g): g for g in self._groups.values()}.values())

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take one canonical tensor; NaN and infinite weights are refused by name."""
        # the ends tell of NaN too, in one pass and without a second tensor beside the first
        if not all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor)):
            raise ModelError(f"{name} holds values that are not finite", "the checkpoint is damaged or badly trained")
        self._missing.discard(name)
        if name in self._groups:
            self._groups[name].load(name, tensor)
        elif name == "embedding.weight":
            self._embedding = _stored_rows(tensor, self.dtype)
        elif name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            self._layers[int(layer)].vector_rows[rest][:] = tensor.float().numpy()
        else:
            norm, part = name.split(".")
            self._norms[norm][("weight", "bias").index(part)] = tensor.float().numpy()

    def check_loaded(self) -> None:
        """Raise ModelError when a tensor never came."""
        if self._missing:
            raise ModelError(f"tensors missing: {listed(sorted(self._missing))}")

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every kernel a request can meet, or fetch it from the cache, so that no request waits for it."""
        states = StateTable(self.state_spec, 1)
        slot = states.allocate()
        many = PARALLEL_VALUES // self._sizes.width + 1  # rows from which the row kernels run on threads
        tell: Progress = progress if progress is not None else lambda what, done, total: None
        tell("preparing kernels", 0, 3)
        self.forward(Batch.pack([(slot, [0])]), states)
        tell("preparing kernels", 1, 3)
        self.forward(Batch.pack([(slot, [0] * many)]), states)
        tell("preparing kernels", 2, 3)
        activate_columns(np.zeros((1, 1), np.float32), 1, 0, 1, 0)
        tell("preparing kernels", 3, 3)

    def forward(
        self, batch: Batch, states: StateTable, *, hidden: Mapping[int, np.ndarray] | None = None
    ) -> np.ndarray:
        """Run packed rows; see :class:`kittiwake.families.contract.Model`."""
        with self._workspace.lock, threads_in_force(self.threads):
            x, y = self._trunk(batch, states, hidden or {})
            states.positions[batch.slots] += np.diff(batch.starts)
            return self._logits(x, y, batch.want_rows)

    def initial_state(self, source: TensorSource, *, transpose: bool = False) -> dict[str, np.ndarray]:
        """A tuned initial state; see :class:`kittiwake.families.contract.Model`."""
        sizes = self._sizes
        wkv = read_time_state(source, sizes.layers, sizes.heads, sizes.head_size, transpose=transpose)
        shift = np.zeros((sizes.layers, sizes.width), dtype=np.float32)
        return {"att_shift": shift, "wkv": wkv, "ffn_shift": shift.copy()}

    def _trunk(
        self, batch: Batch, states: StateTable, wanted: Mapping[int, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The residual stream and the last block's output, not yet added; both [padded rows, C]."""
        rows, width, get = batch.rows, self._sizes.width, self._workspace.get
        x, normed, out = get("x", rows, width), get("normed", rows, width), get("out", rows, width)
        mixed, v_first = get("mixed", rows, len(MIXES) * width), get("v_first", rows, width)
        mixed_k = get("mixed_k", rows, width)
        starts, slots = batch.starts, batch.slots
        owner = np.repeat(np.arange(len(slots)), np.diff(starts))
        att_shifts, wkv_states, ffn_shifts = (states.part(name) for name in ("att_shift", "wkv", "ffn_shift"))

        def shift(y: np.ndarray, norm: np.ndarray, state: np.ndarray, mixes: np.ndarray, mixed: np.ndarray) -> None:
            shift_mix(x, y, norm[0], norm[1], self._eps, starts, slots, owner, state, mixes, normed, mixed)

        norm = self._norms["embedding_norm"]
        embed_rows(self._embedding, batch.token_ids, norm[0], norm[1], self._eps, x)
        y = get("nothing", 0, width)  # nothing to add before the first layer
        for index, layer in enumerate(self._layers):
            if index in wanted:
                wanted[index][:] = x[:rows] + y[:rows] if index else x[:rows]
            # time mix
            shift(y, layer.time_norm, att_shifts[index], layer.time_mixes, mixed)
            rkv = layer.projections(mixed, rows, get("rkv", rows, layer.projections.columns))
            low = layer.low_rank(rkv, rows, get("low", rows, layer.low_rank.columns))
            time_mix(
                rkv, low, v_first, layer.vectors, self._group_eps, index == 0, starts, slots, wkv_states[index], out
            )
            y = layer.output(out, rows, get("y", rows, width))
            # channel mix
            shift(y, layer.channel_norm, ffn_shifts[index], layer.channel_mixes, mixed_k)
            hidden = layer.ffn_key(mixed_k, rows, get("hidden", rows, self._sizes.ffn))
            y = layer.ffn_value(hidden, rows, get("y", rows, width))
        if len(self._layers) in wanted:
            wanted[len(self._layers)][:] = x[:rows] + y[:rows]
        return x, y

    def _logits(self, x: np.ndarray, y: np.ndarray, want_rows: np.ndarray) -> np.ndarray:
        """Float32 [W, vocab] of the wanted rows: last addition, output norm, head."""
        wanted, width = len(want_rows), self._sizes.width
        out = np.empty((padded(wanted), self._sizes.vocab), dtype=np.float32)
        if wanted == 0:
            return out
        rows = self._workspace.get("wanted", wanted, width)
        rows[:wanted] = x[want_rows] + y[want_rows]
        norm = self._norms["output_norm"]
        norm_rows(rows, wanted, norm[0], norm[1], self._eps)
        return self._head(rows, wanted, out)[:wanted]

    def describe(self) -> dict[str, Any]:
        """Device, dtype, threads, and the pick of every shape of product."""
        picks = {}
        for group in self._groups.values():
            for row in group.describe():
                picks[row["depth"], row["columns"]] = row
        return {
            "device": "cpu",
            "dtype": self.dtype,
            "threads": self.threads,
            "weight_bytes": self.weight_bytes,
            "state_bytes": self.state_spec.slot_bytes,
            "products": list(picks.values()),
        }


def _matrices(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, shape in shapes.items():
        if len(shape) == 2:
            yield name, (shape[0], shape[1])


def _stored_rows(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """The embedding table as the kernels read it: mapped from its file, unless its values must change for ``dtype``.

    A bfloat16 table serves float32 weights as it is: a gathered row is widened exactly.
    """
    if dtype == "bf16" or tensor.dtype == torch.bfloat16:
        return tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    return tensor.to(torch.float32).contiguous().numpy()
