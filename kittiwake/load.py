"""A path → a loaded model with its tokenizer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from kittiwake.checkpoints.bundle import Bundle, Golden, read_bundle
from kittiwake.checkpoints.manifest import MANIFEST_NAME
from kittiwake.checkpoints.reader import TensorInfo, TensorSource, open_checkpoint
from kittiwake.config import EngineConfig
from kittiwake.device import resolve_threads
from kittiwake.errors import BundleError, ModelError, TokenizerError
from kittiwake.families.contract import Family, Model, ModelConfig, Progress
from kittiwake.families.registry import family_named, recognise
from kittiwake.text.tokenizer import KINDS, Tokenizer, check_fits, default_tokenizer, load_tokenizer


@dataclass(frozen=True)
class Loaded:
    """What came out of a checkpoint or bundle."""

    path: Path
    format: str
    """ "bundle", "pth", "safetensors" or "random"."""
    model: Model
    tokenizer: Tokenizer
    dtype: str
    """ "fp32" or "bf16": how the weights are kept."""
    threads: int
    load_ms: float
    """Reading, converting and probing, imports left out."""
    goldens: tuple[Golden, ...] | None
    chat_template: str | None


def packaged_model() -> Path:
    """The folder of the bundle that ships with kittiwake."""
    return Path(__file__).parent / "demo" / "model"


def load_model(
    model: str | Path | None,
    config: EngineConfig,
    *,
    tokenizer: str | Path | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Open, recognise, check and load. Raises CheckpointError, BundleError, ModelError or TokenizerError.

    Left out, ``tokenizer`` is the bundle's, or the ``tokenizer.json`` beside the checkpoint, or the one the size of the
    vocabulary tells (65,536 rows: World; 256: bytes).
    """
    threads = resolve_threads(config.threads)
    import kittiwake.ops.wkv7.cpu  # noqa: F401  imports are not loading time

    start = time.perf_counter()
    path = packaged_model() if model is None else Path(model)
    if (path / MANIFEST_NAME).exists():
        return _load_bundle(path, config, threads, tokenizer, start, progress)
    source = open_checkpoint(path, progress=progress)
    try:
        family = recognise(source)
        sizes = family.read_config(source)
        text = tokenizer_for(path, sizes.vocab_size, tokenizer)
        dtype = _dtype(config.dtype, source)
        built = family.build(sizes, family.canonical(source, sizes), dtype=dtype, threads=threads, progress=progress)
    finally:
        source.close()
    load_ms = (time.perf_counter() - start) * 1e3
    return Loaded(path, source.format, built, text, dtype, threads, load_ms, None, None)


def _load_bundle(
    path: Path,
    config: EngineConfig,
    threads: int,
    tokenizer: str | Path | None,
    start: float,
    progress: Progress | None,
) -> Loaded:
    bundle = read_bundle(path, progress=progress)
    try:
        family, sizes = bundle_family(bundle)
        text = bundle_tokenizer(bundle) if tokenizer is None else load_tokenizer(tokenizer)
        check_fits(text, sizes.vocab_size)
        dtype = _dtype(config.dtype, bundle.source)
        tensors = family.canonical(bundle.source, sizes)
        built = family.build(sizes, tensors, dtype=dtype, threads=threads, progress=progress)
    finally:
        bundle.source.close()
    load_ms = (time.perf_counter() - start) * 1e3
    return Loaded(path, "bundle", built, text, dtype, threads, load_ms, bundle.goldens, bundle.chat_template)


def bundle_family(bundle: Bundle) -> tuple[Family, ModelConfig]:
    """The family and sizes a bundle declares, its tensors checked against them. Raises BundleError."""
    family = family_named(bundle.manifest.family)
    sizes = family.config_from_manifest(dict(bundle.manifest.model))
    try:
        family.check_canonical(bundle.source, sizes)
    except ModelError as err:
        raise BundleError(err.message, err.hint) from err
    return family, sizes


def bundle_tokenizer(bundle: Bundle) -> Tokenizer:
    """The tokenizer a bundle carries. Raises TokenizerError or BundleError."""
    kind = bundle.manifest.tokenizer_kind
    if kind not in KINDS:
        raise BundleError(f"{bundle.path} needs the tokenizer kind {kind!r}; known: {', '.join(KINDS)}")
    return load_tokenizer(kind, dict(bundle.tokenizer_files) or None)


def tokenizer_for(path: Path, vocab_size: int, chosen: str | Path | None) -> Tokenizer:
    """The tokenizer chosen, or the one found as :func:`load_model` says. Raises TokenizerError when it does not fit."""
    beside = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if chosen is not None:
        tokenizer = load_tokenizer(chosen)
    elif path.is_dir() and beside.exists():
        tokenizer = load_tokenizer(beside)
    else:
        try:
            tokenizer = default_tokenizer(vocab_size)
        except TokenizerError:
            # a lone file's neighbour is a guess: taken only where the size of the vocabulary tells nothing
            if not beside.exists():
                raise
            tokenizer = load_tokenizer(beside)
    check_fits(tokenizer, vocab_size)
    return tokenizer


def _dtype(wanted: str, source: TensorSource) -> str:
    """How to keep the weights: as asked; "auto" keeps bfloat16 files in bfloat16 and widens everything else."""
    if wanted != "auto":
        return wanted
    matrices = {info.dtype for info in source.infos() if len([size for size in info.shape if size > 1]) > 1}
    return "bf16" if matrices == {torch.bfloat16} else "fp32"


class TensorDict:
    """Tensors in memory as a source, for random weights and tests."""

    format = "memory"
    config: Mapping[str, object] | None = None

    def __init__(self, tensors: Mapping[str, torch.Tensor], name: str = "memory") -> None:
        self.path = Path(name)
        self._tensors = tensors

    def infos(self) -> list[TensorInfo]:
        """Every tensor, in the order of the mapping."""
        return [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()]

    def read(self, name: str) -> torch.Tensor:
        """The tensor itself."""
        return self._tensors[name]

    def digest(self, progress: Progress | None = None) -> str:
        """Nothing on disk, nothing to digest."""
        return ""

    def close(self) -> None:
        """Nothing to let go of."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def load_tensors(
    tensors: Mapping[str, torch.Tensor],
    config: EngineConfig,
    *,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
    name: str = "memory",
) -> Loaded:
    """A model from tensors in memory, under the names of a checkpoint."""
    threads = resolve_threads(config.threads)
    start = time.perf_counter()
    source = TensorDict(tensors, name)
    family = recognise(source)
    sizes = family.read_config(source)
    text = default_tokenizer(sizes.vocab_size) if tokenizer is None else tokenizer
    check_fits(text, sizes.vocab_size)
    dtype = _dtype(config.dtype, source)
    built = family.build(sizes, family.canonical(source, sizes), dtype=dtype, threads=threads, progress=progress)
    load_ms = (time.perf_counter() - start) * 1e3
    return Loaded(source.path, "random", built, text, dtype, threads, load_ms, None, None)
