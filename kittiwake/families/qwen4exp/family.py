"""The family's side of the contract: its checkpoints told, sized and checked, its tensors and tables handed out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from kittiwake.checkpoints.reader import TensorInfo, TensorSource
from kittiwake.checkpoints.row_table import RowTable, unpacked_table
from kittiwake.engine.states import MOST_TOKENS
from kittiwake.errors import BundleError, CheckpointError, ModelError
from kittiwake.families.canonical import FLOATS, check_bundle_names, check_manifest_keys, check_tensor, fill
from kittiwake.families.contract import Model, ModelConfig
from kittiwake.families.qwen4exp import config as hf_config
from kittiwake.families.qwen4exp import gguf_names, names
from kittiwake.families.qwen4exp.geometry import FAMILY, Geometry, Ngram
from kittiwake.families.qwen4exp.places import Place
from kittiwake.families.qwen4exp.state import state_spec
from kittiwake.progress import Progress

if TYPE_CHECKING:
    from kittiwake.families.qwen4exp.cuda_model import Qwen4ExpCuda
    from kittiwake.families.qwen4exp.model import Qwen4ExpModel


class Qwen4ExpFamily:
    """See :class:`kittiwake.families.contract.Family`."""

    name = FAMILY
    devices: tuple[str, ...] = ("cpu", "cuda")

    def recognises(self, source: TensorSource) -> bool:
        """An HF folder is told by its mixers of streams, a GGUF file by its architecture."""
        if source.format == "gguf":
            return gguf_names.is_ours(source)
        return names.find_prefix(info.name for info in source.infos()) is not None

    def read_config(self, source: TensorSource) -> ModelConfig:
        """Sizes and constants from ``config.json`` or metadata, every key checked, and every tensor by name and shape."""
        if gguf_names.is_ours(source):
            geometry, is_tied = gguf_names.read_geometry(source)
            layout, places = "gguf", gguf_names.gguf_places(geometry, is_tied)
            ends, others = _gguf_ends(source, geometry.vocab_size), set(_gguf_tables(geometry))
        else:
            geometry, is_tied, prefix = _hf_geometry(source)
            layout, places = "hf", names.hf_places(geometry, prefix, is_tied)
            ends, others = hf_config.end_ids(source.config or {}), _hf_others(source, geometry, prefix)
            if not all(0 <= end < geometry.vocab_size for end in ends):
                expected = f"ids of tokens, 0 to {geometry.vocab_size - 1}"
                raise ModelError(f"{source.path}: eos_token_id is {list(ends)}, expected {expected}")
        names.check_names(source, places, others)
        _check_tables(source, geometry, _stored_tables(source, geometry))
        extra = geometry.extra() | {"end_ids": list(ends), "tied": is_tied}
        origins = {"layout": layout, "norm_eps": "metadata" if layout == "gguf" else "config.json"}
        return ModelConfig(FAMILY, geometry.layers, geometry.width, geometry.vocab_size, extra, origins)

    def canonical(self, source: TensorSource, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Our tensors one by one, those of tables left out."""
        geometry = _geometry(config)
        places = _places(source, geometry, config)
        for name, shape in names.canonical_shapes(geometry).items():
            yield name, source.read(name) if places is None else places[name].take(source, shape)

    def table_names(self, source: TensorSource, config: ModelConfig) -> Set[str]:
        """Names of the parts of every table."""
        return {name for parts in _stored_tables(source, _geometry(config)).values() for name in parts}

    def open_tables(self, source: TensorSource, config: ModelConfig) -> dict[str, RowTable]:
        """The table of every n-gram layer, by the name of its first part."""
        geometry = _geometry(config)
        stored = _stored_tables(source, geometry)
        return {
            names.table_names(ngram)[0]: _open_table(source, stored[ngram.layer], geometry) for ngram in geometry.ngrams
        }

    def table_parts(self, source: TensorSource, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """Every part of every table."""
        geometry = _geometry(config)
        stored = _stored_tables(source, geometry)
        for ngram in geometry.ngrams:
            for ours, theirs in zip(names.table_names(ngram), stored[ngram.layer], strict=True):
                yield ours, source.read(theirs)

    def check_canonical(self, source: TensorSource, config: ModelConfig) -> None:
        """Raise BundleError unless the source holds exactly the canonical tensors and table parts of this config."""
        geometry = _geometry(config)
        infos = {info.name: info for info in source.infos()}
        if config.layers > len(infos) or sum(ngram.parts for ngram in geometry.ngrams) > len(infos):
            raise BundleError(f"{source.path} holds {len(infos)} tensors, fewer than its manifest asks for")
        shapes = names.canonical_shapes(geometry)
        tables = {name for ngram in geometry.ngrams for name in names.table_names(ngram)}
        check_bundle_names(source, {*shapes} | tables)
        for name, shape in shapes.items():
            check_tensor(infos[name], shape, source)
        _check_tables(source, geometry, _stored_tables(source, geometry))

    def config_from_manifest(self, model: dict[str, Any]) -> ModelConfig:
        """The config of a bundle's manifest; strict about keys, kinds and rules of structure."""
        check_manifest_keys(model, FAMILY, (*Geometry.__dataclass_fields__, "end_ids", "tied"))
        ends, is_tied = model["end_ids"], model["tied"]
        if not isinstance(is_tied, bool):
            raise BundleError(f"manifest model.tied is {is_tied!r}, expected true or false")
        try:
            geometry = Geometry.from_values(model)
        except ModelError as error:
            raise BundleError(f"manifest model: {error.message}", error.hint) from error
        vocab = geometry.vocab_size
        if not isinstance(ends, list) or not all(type(one) is int and 0 <= one < vocab for one in ends):
            raise BundleError(f"manifest model.end_ids is {ends!r}, expected a list of ids of tokens, 0 to {vocab - 1}")
        extra = geometry.extra() | {"end_ids": ends, "tied": is_tied}
        origins = {"layout": "bundle", "norm_eps": "manifest"}
        return ModelConfig(FAMILY, geometry.layers, geometry.width, geometry.vocab_size, extra, origins)

    def footprint(self, config: ModelConfig) -> dict[str, int]:
        """Bytes of the weights in memory, of one state before it grows, of what a token adds to it, and on disk."""
        geometry = _geometry(config)
        shapes = {name: s for name, s in names.canonical_shapes(geometry).items() if not names.is_draft(name)}
        kept = {name: shape for name, shape in shapes.items() if len(shape) > 1 and not name.endswith(".conv")}
        weights, others = sum(map(prod, kept.values())), sum(map(prod, shapes.values()))
        spec = state_spec(geometry)
        return {
            "fp32": 4 * others,
            "bf16": 2 * weights + 4 * (others - weights),
            "state": spec.slot_bytes,
            "state_per_token": spec.page_bytes // spec.page_tokens,
            **_card_workspace(geometry),
            "table": 2 * sum(ngram.rows * geometry.ngram_row for ngram in geometry.ngrams),
        }

    def workspace_bytes(self, config: ModelConfig, rows: int, threads: int) -> int:
        """Bytes that a forward of the first ``rows`` tokens of a text works in, weights kept as bfloat16."""
        # imported when wanted, as the model is
        from kittiwake.families.qwen4exp.room import workspace_bytes

        return workspace_bytes(_geometry(config), rows, rows, threads, "bf16")

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
        model = _empty_model(config, device, dtype, threads, tables or {}, progress)
        fill(model, tensors, names.canonical_shapes(_geometry(config)), progress)
        return model


def _empty_model(
    config: ModelConfig,
    device: str,
    dtype: str,
    threads: int,
    tables: Mapping[str, RowTable],
    progress: Progress | None,
) -> Qwen4ExpModel | Qwen4ExpCuda:
    """A model that waits for its tensors. Imported when wanted: its kernels are not what telling a checkpoint needs."""
    if device == "cuda":
        from kittiwake.families.qwen4exp.cuda_model import Qwen4ExpCuda

        return Qwen4ExpCuda(config, dtype, tables)
    from kittiwake.families.qwen4exp.model import Qwen4ExpModel

    return Qwen4ExpModel(config, dtype, threads, tables, progress)


def _card_workspace(geometry: Geometry) -> dict[str, int]:
    """Bytes that forwards work in on a card, with 16-bit weights; nothing where what runs there is not installed."""
    try:
        from kittiwake.families.qwen4exp.cuda_model import all_workspace_bytes
    except ImportError:
        return {}
    return {"card_workspace": all_workspace_bytes(geometry, MOST_TOKENS, torch.bfloat16)}


def _geometry(config: ModelConfig) -> Geometry:
    return Geometry.of(config)


def _places(source: TensorSource, geometry: Geometry, config: ModelConfig) -> dict[str, Place] | None:
    """Our name → place in this source, or None where its names are ours already."""
    is_tied = config.extra["tied"]
    if gguf_names.is_ours(source):
        return gguf_names.gguf_places(geometry, is_tied)
    prefix = names.find_prefix(info.name for info in source.infos())
    return None if prefix is None else names.hf_places(geometry, prefix, is_tied)


def _hf_geometry(source: TensorSource) -> tuple[Geometry, bool, str]:
    found = [info.name for info in source.infos()]
    prefix = names.find_prefix(found)
    if prefix is None:
        raise ModelError(f"{source.path} does not hold the tensors of a {FAMILY}")
    if source.config is None:
        raise ModelError(
            f"{source.path} has no config.json, and the tensors do not tell all sizes", "give the model's folder"
        )
    parts = {layer: len(tables) for layer, tables in names.stored_tables(found, prefix).items()}
    has_draft = any(name.startswith(names.DRAFT) for name in found)
    geometry, is_tied = hf_config.read_geometry(source.config, source.path, parts, has_draft)
    return geometry, is_tied, prefix


def _hf_others(source: TensorSource, geometry: Geometry, prefix: str) -> set[str]:
    """Tensors without a place of ours: table parts, and the hash's whole numbers, which must be the derived ones."""
    infos = {info.name for info in source.infos()}
    stored = names.stored_tables(infos, prefix)
    known = {name for ngram in geometry.ngrams for name in stored.get(ngram.layer, ())}
    for ngram in geometry.ngrams:
        for name, expected in names.hash_buffers(ngram, prefix).items():
            if name in infos:
                _check_numbers(source, name, expected)
                known.add(name)
    return known


def _check_numbers(source: TensorSource, name: str, expected: tuple[int, ...]) -> None:
    found = tuple(source.read(name).reshape(-1).tolist())
    if found != expected:
        raise ModelError(f"{name} in {source.path} holds {found[:4]} ..., the config gives {expected[:4]} ...")


def _gguf_ends(source: TensorSource, vocab_size: int) -> tuple[int, ...]:
    """The ids that a GGUF file says end a text, a turn or a message. Raises ModelError for one that is no token's."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = {key: source.config[key] for key in keys if source.config and key in source.config}
    for key, end in ends.items():
        if type(end) is not int or not 0 <= end < vocab_size:
            raise ModelError(f"{source.path}: {key} is {end!r}, expected the id of a token, 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(ends.values()))


def _gguf_tables(geometry: Geometry) -> list[str]:
    return [gguf_names.TABLE] if geometry.ngrams else []


def _stored_tables(source: TensorSource, geometry: Geometry) -> dict[int, list[str]]:
    """Layer → names of the parts of its table in this source. Raises ModelError where one has none."""
    infos = {info.name for info in source.infos()}
    if gguf_names.is_ours(source):
        return {ngram.layer: [gguf_names.TABLE] for ngram in geometry.ngrams}
    prefix = names.find_prefix(infos)
    if prefix is None:
        return {ngram.layer: names.table_names(ngram) for ngram in geometry.ngrams}
    stored = names.stored_tables(infos, prefix)
    if lacking := [ngram.layer for ngram in geometry.ngrams if ngram.layer not in stored]:
        raise ModelError(f"{source.path} lacks the n-gram table of layer {lacking[0]}")
    return stored


def _check_tables(source: TensorSource, geometry: Geometry, stored: Mapping[int, list[str]]) -> None:
    """Raise ModelError unless the parts of each table are whole rows of it, and as many as the hash reaches."""
    infos: dict[str, TensorInfo] = {info.name: info for info in source.infos()}
    for ngram in geometry.ngrams:
        parts = [infos[name] for name in stored[ngram.layer]]
        for info in parts:
            if len(info.shape) != 2 or info.shape[1] != geometry.ngram_row:
                raise ModelError(
                    f"{info.name} in {source.path} has shape {info.shape}, expected rows of {geometry.ngram_row}"
                )
            if info.dtype not in FLOATS:
                raise ModelError(f"{info.name} in {source.path} is {info.dtype}, expected a floating type")
        _check_rows(source, ngram, sum(info.shape[0] for info in parts))


def _check_rows(source: TensorSource, ngram: Ngram, rows: int) -> None:
    if rows != ngram.rows:
        raise ModelError(
            f"{source.path}: the n-gram table of layer {ngram.layer} has {rows:,} rows in {ngram.parts} parts, "
            f"expected {ngram.rows:,}"
        )


def _open_table(source: TensorSource, parts: list[str], geometry: Geometry) -> RowTable:
    """The table where it lies; one that does not lie in a file row by row, in a temporary file."""
    try:
        return RowTable([source.place(name) for name in parts], geometry.ngram_row)
    except CheckpointError:
        if len(parts) > 1:
            raise
        return unpacked_table(source, parts[0])
