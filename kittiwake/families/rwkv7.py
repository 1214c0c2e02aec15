"""RWKV-7 ("x070"): config from tensor shapes, names, and the forward.

Sources: RWKV-LM, RWKV-v7/rwkv_v7_numpy.py; arXiv 2503.14456. Tensor names of ``.pth`` files are BlinkDL's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kittiwake.checkpoints.reader import TensorInfo, TensorSource
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StatePart, StateSpec, StateTable
from kittiwake.errors import BundleError, ModelError
from kittiwake.families.contract import Model, ModelConfig, Progress
from kittiwake.layers.linear import LinearGroup, Product, Workspace, padded, threads_in_force
from kittiwake.layers.probe import pick_products
from kittiwake.ops.matmul.cpu import activate_columns
from kittiwake.ops.shift_mix.cpu import PARALLEL_VALUES, embed_rows, norm_rows, shift_mix
from kittiwake.ops.wkv7.cpu import time_mix

NORM_EPS = 1e-5
GROUP_NORM_EPS = 64e-5
"""A constant of BlinkDL's files, whatever the head size."""
_EPS, _GROUP_EPS = np.float32(NORM_EPS), np.float32(GROUP_NORM_EPS)
MIXES = ("r", "w", "k", "v", "a", "g")
RANKS = {"decay": "w", "iclr": "a", "value_residual": "v", "gate": "g"}
"""Low-rank pairs: kittiwake's name → the letter in BlinkDL's names."""
_BLOCK = re.compile(r"blocks\.(0|[1-9]\d{0,5})\.(.+)")
_OUTER = {
    "emb.weight": "embedding.weight",
    "blocks.0.ln0.weight": "embedding_norm.weight",
    "blocks.0.ln0.bias": "embedding_norm.bias",
    "ln_out.weight": "output_norm.weight",
    "ln_out.bias": "output_norm.bias",
    "head.weight": "head.weight",
}


@dataclass(frozen=True)
class Sizes:
    """Everything the shapes of an RWKV-7 depend on."""

    layers: int
    width: int
    heads: int
    ffn: int
    vocab: int
    decay_rank: int
    iclr_rank: int
    value_residual_rank: int
    gate_rank: int

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.width // self.heads


def _block_names(layer: int) -> dict[str, str]:
    """BlinkDL's name → ours, for one layer."""
    names = {}
    for ours, theirs in (("time_norm", "ln1"), ("channel_norm", "ln2"), ("time_mix.group_norm", "att.ln_x")):
        for part in ("weight", "bias"):
            names[f"{theirs}.{part}"] = f"{ours}.{part}"
    for letter in MIXES:
        names[f"att.x_{letter}"] = f"time_mix.mix_{letter}"
    for rank, letter in RANKS.items():
        if rank == "value_residual" and layer == 0:
            continue
        names[f"att.{letter}1"] = f"time_mix.{rank}_down"
        names[f"att.{letter}2"] = f"time_mix.{rank}_up"
        if rank != "gate":
            names[f"att.{letter}0"] = f"time_mix.{rank}_bias"
    for name in ("k_k", "k_a", "r_k"):
        names[f"att.{name}"] = f"time_mix.{name}"
    for name in ("receptance", "key", "value", "output"):
        names[f"att.{name}.weight"] = f"time_mix.{name}.weight"
    names |= {"ffn.x_k": "channel_mix.mix_k", "ffn.key.weight": "channel_mix.key.weight"}
    names["ffn.value.weight"] = "channel_mix.value.weight"
    return {f"blocks.{layer}.{theirs}": f"layers.{layer}.{ours}" for theirs, ours in names.items()}


def _names(layers: int) -> dict[str, str]:
    """BlinkDL's name → ours, for a whole model."""
    names = dict(_OUTER)
    for layer in range(layers):
        names |= _block_names(layer)
    return names


_UNUSED_IN_FIRST_LAYER = {f"blocks.0.att.v{i}" for i in range(3)}


def _canonical_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Our name → shape, products as [N, K]."""
    width = (sizes.width,)
    square = (sizes.width, sizes.width)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (sizes.vocab, sizes.width)}
    shapes |= {f"{norm}.{part}": width for norm in ("embedding_norm", "output_norm") for part in ("weight", "bias")}
    shapes["head.weight"] = (sizes.vocab, sizes.width)
    for layer in range(sizes.layers):
        block: dict[str, tuple[int, ...]] = {}
        for norm in ("time_norm", "channel_norm", "time_mix.group_norm"):
            block |= {f"{norm}.weight": width, f"{norm}.bias": width}
        block |= {f"time_mix.mix_{letter}": width for letter in MIXES}
        for rank in RANKS:
            if rank == "value_residual" and layer == 0:
                continue
            size = getattr(sizes, f"{rank}_rank")
            block |= {f"time_mix.{rank}_down": (size, sizes.width), f"time_mix.{rank}_up": (sizes.width, size)}
            if rank != "gate":
                block[f"time_mix.{rank}_bias"] = width
        block |= {f"time_mix.{name}": width for name in ("k_k", "k_a", "r_k")}
        block |= {f"time_mix.{name}.weight": square for name in ("receptance", "key", "value", "output")}
        block |= {
            "channel_mix.mix_k": width,
            "channel_mix.key.weight": (sizes.ffn, sizes.width),
            "channel_mix.value.weight": (sizes.width, sizes.ffn),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def _stored_shape(name: str, sizes: Sizes) -> tuple[int, ...]:
    """The shape BlinkDL's file has for a tensor of ours; vectors are compared without their leading ones."""
    if name.endswith("time_mix.r_k"):
        return (sizes.heads, sizes.head_size)
    shape = _canonical_shapes_of(sizes)[name]
    return shape[::-1] if name.endswith(("_down", "_up")) else shape


_shape_cache: dict[Sizes, dict[str, tuple[int, ...]]] = {}


def _canonical_shapes_of(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    if sizes not in _shape_cache:
        _shape_cache.clear()
        _shape_cache[sizes] = _canonical_shapes(sizes)
    return _shape_cache[sizes]


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[1, 1, C] → [C]; other shapes as they are."""
    return shape[2:] if len(shape) == 3 and shape[:2] == (1, 1) else shape


def _config(sizes: Sizes) -> ModelConfig:
    extra: dict[str, Any] = {
        "heads": sizes.heads,
        "ffn": sizes.ffn,
        "ranks": {rank: getattr(sizes, f"{rank}_rank") for rank in RANKS},
        "norm_eps": NORM_EPS,
        "group_norm_eps": GROUP_NORM_EPS,
    }
    return ModelConfig("rwkv7", sizes.layers, sizes.width, sizes.vocab, extra)


def _sizes(config: ModelConfig) -> Sizes:
    extra = config.extra
    ranks = {f"{rank}_rank": extra["ranks"][rank] for rank in RANKS}
    return Sizes(config.layers, config.width, extra["heads"], extra["ffn"], config.vocab_size, **ranks)


class Rwkv7Family:
    """The family's side of the contract."""

    name = "rwkv7"

    def recognises(self, source: TensorSource) -> bool:
        """RWKV-7 is told by its bonus ``r_k``, which no other version has."""
        return any(info.name == "blocks.0.att.r_k" for info in source.infos())

    def read_config(self, source: TensorSource) -> ModelConfig:
        """Sizes from the tensors; every tensor is then checked by name and shape."""
        infos = {info.name: info for info in source.infos()}
        sizes = self._read_sizes(infos)
        expected = _names(sizes.layers)
        unknown = sorted(set(infos) - set(expected) - _UNUSED_IN_FIRST_LAYER)
        if unknown:
            raise ModelError(
                f"{source.path} holds tensors RWKV-7 does not have: {_listed(unknown)}",
                "variants such as v7a, v7b (DeepEmbed) and v8 are not supported",
            )
        missing = sorted(set(expected) - set(infos))
        if missing:
            raise ModelError(f"{source.path} lacks tensors of RWKV-7: {_listed(missing)}")
        for theirs, ours in expected.items():
            _check_tensor(infos[theirs], _stored_shape(ours, sizes), source)
        return _config(sizes)

    @staticmethod
    def _read_sizes(infos: dict[str, TensorInfo]) -> Sizes:
        def shape(name: str, dims: int) -> tuple[int, ...]:
            if name not in infos:
                raise ModelError(f"the checkpoint lacks {name}, which RWKV-7 is sized by")
            found = infos[name].shape
            if len(found) != dims or 0 in found:
                raise ModelError(f"{name} has shape {found}, expected {dims} sizes above 0")
            return found

        found = {int(match[1]) for name in infos if (match := _BLOCK.fullmatch(name))}
        layers = len(found)
        if found != set(range(layers)):
            first = min(set(range(layers)) - found)
            raise ModelError(f"the checkpoint has layers up to {max(found)}, but layer {first} is missing")
        vocab, width = shape("emb.weight", 2)
        heads, head_size = shape("blocks.0.att.r_k", 2)
        if heads * head_size != width:
            raise ModelError(f"blocks.0.att.r_k has shape {(heads, head_size)}, whose product is not the width {width}")
        ranks = {
            f"{rank}_rank": shape(f"blocks.{min(1, layers - 1) if rank == 'value_residual' else 0}.att.{letter}1", 2)[1]
            for rank, letter in RANKS.items()
            if not (rank == "value_residual" and layers == 1)
        }
        ranks.setdefault("value_residual_rank", 0)
        return Sizes(layers, width, heads, shape("blocks.0.ffn.key.weight", 2)[0], vocab, **ranks)

    def canonical(self, source: TensorSource, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Our tensors one by one; products as [N, K], vectors as float32 [C]."""
        if source.format == "bundle":
            for name in _canonical_shapes(_sizes(config)):
                yield name, source.read(name)
            return
        shapes = _canonical_shapes(_sizes(config))
        for theirs, ours in _names(config.layers).items():
            tensor = source.read(theirs)
            if ours.endswith(("_down", "_up")):
                tensor = tensor.t()
            elif len(shapes[ours]) == 1:
                tensor = tensor.reshape(-1).float()
            yield ours, tensor

    def config_from_manifest(self, model: dict[str, Any]) -> ModelConfig:
        """The config a bundle's manifest gives; strict about keys and kinds."""
        keys = {"layers", "width", "vocab_size", "heads", "ffn", "ranks", "norm_eps", "group_norm_eps"}
        if set(model) != keys:
            raise BundleError(f"manifest model section has keys {sorted(model)}, rwkv7 needs {sorted(keys)}")
        if not isinstance(model["ranks"], dict) or set(model["ranks"]) != set(RANKS):
            raise BundleError(f"manifest model.ranks must name {sorted(RANKS)}, got {model['ranks']!r}")
        numbers = {key: model[key] for key in ("layers", "width", "vocab_size", "heads", "ffn")}
        for key, value in (numbers | model["ranks"]).items():
            low = 0 if key == "value_residual" and model["layers"] == 1 else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise BundleError(f"manifest model.{key} must be a whole number of at least {low}, got {value!r}")
        for key, supported in (("norm_eps", NORM_EPS), ("group_norm_eps", GROUP_NORM_EPS)):
            if model[key] != supported:
                raise BundleError(f"manifest model.{key} is {model[key]!r}; supported: {supported}")
        if model["width"] % model["heads"]:
            raise BundleError(f"manifest model.width {model['width']} is not a multiple of heads {model['heads']}")
        extra = {key: model[key] for key in ("heads", "ffn", "ranks", "norm_eps", "group_norm_eps")}
        return ModelConfig("rwkv7", model["layers"], model["width"], model["vocab_size"], extra)

    def check_canonical(self, source: TensorSource, config: ModelConfig) -> None:
        """Raise BundleError unless the source holds exactly the canonical tensors of this config."""
        infos = {info.name: info for info in source.infos()}
        if config.layers > len(infos):
            raise BundleError(f"{source.path} holds {len(infos)} tensors, its manifest asks for {config.layers} layers")
        shapes = _canonical_shapes(_sizes(config))
        unknown, missing = sorted(set(infos) - set(shapes)), sorted(set(shapes) - set(infos))
        if unknown or missing:
            raise BundleError(
                f"{source.path} does not hold the tensors its manifest asks for: "
                f"unknown {_listed(unknown)}; missing {_listed(missing)}"
            )
        for name, shape in shapes.items():
            _check_tensor(infos[name], shape, source)

    def build(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: str,
        threads: int,
        progress: Progress | None = None,
    ) -> Model:
        """Take the tensors one at a time into a model on the CPU."""
        model = Rwkv7Model(config, dtype, threads, progress)
        total = len(_canonical_shapes(_sizes(config)))
        for done, (name, tensor) in enumerate(tensors):
            model.load(name, tensor)
            if progress is not None:
                progress("loading tensors", done + 1, total)
        model.check_loaded()
        model.warm_up(progress)
        return model


def _check_tensor(info: TensorInfo, shape: tuple[int, ...], source: TensorSource) -> None:
    if _squeezed(info.shape) != shape:
        raise ModelError(f"{info.name} in {source.path} has shape {info.shape}, expected {shape}")
    if info.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"{info.name} in {source.path} is {info.dtype}, expected float32, bfloat16 or float16")


def _listed(names: list[str], most: int = 6) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + rest


class _Layer:
    """Weights of one layer as its forward wants them."""

    def __init__(self, index: int, sizes: Sizes, picks: Any, dtype: str, threads: int) -> None:
        width, prefix = sizes.width, f"layers.{index}."
        ranks = [rank for rank in ("decay", "iclr", "gate", "value_residual") if index > 0 or rank != "value_residual"]
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
        self.config = config
        self.dtype, self.threads = dtype, threads
        self._sizes = sizes = _sizes(config)
        shapes = _canonical_shapes(sizes)
        self._vector_names = {name for name, shape in shapes.items() if len(shape) == 1}
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
        heads, size = sizes.heads, sizes.head_size
        self.state_spec = StateSpec(
            sizes.layers,
            (
                StatePart("att_shift", (sizes.width,)),
                StatePart("wkv", (heads, size, size)),
                StatePart("ffn_shift", (sizes.width,)),
            ),
        )

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
            raise ModelError(f"tensors missing: {_listed(sorted(self._missing))}")

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

    def forward(self, batch: Batch, states: StateTable) -> np.ndarray:
        """Run packed rows; see :class:`kittiwake.families.contract.Model`."""
        with self._workspace.lock, threads_in_force(self.threads):
            x, y = self._trunk(batch, states)
            states.positions[batch.slots] += np.diff(batch.starts)
            return self._logits(x, y, batch.want_rows)

    def _trunk(self, batch: Batch, states: StateTable) -> tuple[np.ndarray, np.ndarray]:
        """The residual stream and the last block's output, not yet added; both [padded rows, C]."""
        rows, width, get = batch.rows, self._sizes.width, self._workspace.get
        x, normed, out = get("x", rows, width), get("normed", rows, width), get("out", rows, width)
        mixed, v_first = get("mixed", rows, len(MIXES) * width), get("v_first", rows, width)
        mixed_k = get("mixed_k", rows, width)
        starts, slots = batch.starts, batch.slots
        owner = np.repeat(np.arange(len(slots)), np.diff(starts))
        att_shifts, wkv_states, ffn_shifts = (states.part(name) for name in ("att_shift", "wkv", "ffn_shift"))

        def shift(y: np.ndarray, norm: np.ndarray, state: np.ndarray, mixes: np.ndarray, mixed: np.ndarray) -> None:
            shift_mix(x, y, norm[0], norm[1], _EPS, starts, slots, owner, state, mixes, normed, mixed)

        norm = self._norms["embedding_norm"]
        embed_rows(self._embedding, batch.token_ids, norm[0], norm[1], _EPS, x)
        y = get("nothing", 0, width)  # nothing to add before the first layer
        for index, layer in enumerate(self._layers):
            # time mix
            shift(y, layer.time_norm, att_shifts[index], layer.time_mixes, mixed)
            rkv = layer.projections(mixed, rows, get("rkv", rows, layer.projections.columns))
            low = layer.low_rank(rkv, rows, get("low", rows, layer.low_rank.columns))
            time_mix(rkv, low, v_first, layer.vectors, _GROUP_EPS, index == 0, starts, slots, wkv_states[index], out)
            y = layer.output(out, rows, get("y", rows, width))
            # channel mix
            shift(y, layer.channel_norm, ffn_shifts[index], layer.channel_mixes, mixed_k)
            hidden = layer.ffn_key(mixed_k, rows, get("hidden", rows, self._sizes.ffn))
            y = layer.ffn_value(hidden, rows, get("y", rows, width))
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
        norm_rows(rows, wanted, norm[0], norm[1], _EPS)
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


def _matrices(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, int]]]:
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
