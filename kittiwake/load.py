"""A path → a loaded model with its tokenizer."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kittiwake.checkpoints.bundle import Bundle, Golden, read_bundle
from kittiwake.checkpoints.files import quoted
from kittiwake.checkpoints.manifest import MANIFEST_NAME
from kittiwake.checkpoints.reader import FilePlace, TensorInfo, TensorSource, open_checkpoint
from kittiwake.config import EngineConfig
from kittiwake.device import device_memory_for, resolve_threads, why_no_cuda
from kittiwake.errors import BundleError, CheckpointError, DeviceError, ModelError, TokenizerError, UsageError
from kittiwake.families.contract import Family, Model, ModelConfig
from kittiwake.families.registry import family_named, recognise
from kittiwake.progress import Progress
from kittiwake.text.gguf_vocabulary import PASS_ONE, PRE, Values, read_template, read_tokenizer_json
from kittiwake.text.table import TOKENIZER_FILE
from kittiwake.text.tokenizer import KINDS, Tokenizer, check_fits, default_tokenizer, load_tokenizer, with_ends
from kittiwake.text.world import WORLD_ROWS, WORLD_VOCABULARY_FILE


@dataclass(frozen=True)
class Loaded:
    """What came out of a checkpoint or bundle."""

    path: Path
    format: str
    """ "bundle", "pth", "safetensors", "gguf" or "random"."""
    model: Model
    tokenizer: Tokenizer
    dtype: str
    """ "fp32" or "bf16": how the weights are kept."""
    threads: int
    load_ms: float
    """Reading, converting and probing, imports left out."""
    goldens: tuple[Golden, ...] | None
    chat_template: str | None
    """The one inside a bundle or GGUF file; those of other checkpoints lie beside them."""
    weights_digest: Callable[[Progress | None], str] = field(default=lambda _: "", repr=False, compare=False)
    """sha-256 (hex) over the stored weights, computed when first asked for; a bundle's stands in its manifest."""

    def digest(self, progress: Progress | None = None) -> str:
        """64 hex digits that tell this model from every other: of its weights as stored, its family, sizes and constants.

        Of a bundle it is free; of another checkpoint the first call reads every byte of its files once. Raises
        CheckpointError when those files changed since they were loaded. The same weights in another layout of files
        are another digest. How the weights are kept (``dtype``) is not in it.
        """
        config = self.model.config
        parts = [config.family, config.layers, config.width, config.vocab_size, config.extra]
        identity = json.dumps([*parts, self.weights_digest(progress)], sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()


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

    Left out, ``tokenizer`` is the bundle's, or the one that :func:`find_tokenizer` finds.
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
        sizes = family.read_config(source).with_constants(config.group_norm_eps, config.rescale_every)
        text = with_ends(find_tokenizer(path, sizes.vocab_size, tokenizer, source).tokenizer, sizes.end_ids)
        template = own_template(source)
        device = choose_device(config.device, family)
        dtype = _dtype(config.dtype, family, sizes, source, device)
        built = _build(family, sizes, source, device, dtype, threads, progress)
    finally:
        source.close()
    load_ms = (time.perf_counter() - start) * 1e3
    return Loaded(path, source.format, built, text, dtype, threads, load_ms, None, template, source.digest)


def _build(
    family: Family,
    sizes: ModelConfig,
    source: TensorSource,
    device: str,
    dtype: str,
    threads: int,
    progress: Progress | None,
) -> Model:
    tensors, tables = family.canonical(source, sizes), family.open_tables(source, sizes)
    with device_memory_for(
        f"{source.path} kept as {dtype}", "free its memory, keep the weights in 16 bits, or take device cpu"
    ):
        return family.build(
            sizes, tensors, device=device, dtype=dtype, threads=threads, tables=tables, progress=progress
        )


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
        sizes = sizes.with_constants(config.group_norm_eps, config.rescale_every)
        text = bundle_tokenizer(bundle) if tokenizer is None else load_tokenizer(tokenizer)
        check_fits(text, sizes.vocab_size)
        text = with_ends(text, sizes.end_ids)
        device = choose_device(config.device, family)
        dtype = _dtype(config.dtype, family, sizes, bundle.source, device)
        built = _build(family, sizes, bundle.source, device, dtype, threads, progress)
    finally:
        bundle.source.close()
    load_ms = (time.perf_counter() - start) * 1e3
    weights = "".join(f"{bundle.manifest.files[name].sha256}  {name}\n" for name in bundle.manifest.weights)
    digest = hashlib.sha256(weights.encode()).hexdigest()
    goldens, template = bundle.goldens, bundle.chat_template
    return Loaded(path, "bundle", built, text, dtype, threads, load_ms, goldens, template, lambda _: digest)


def bundle_family(bundle: Bundle) -> tuple[Family, ModelConfig]:
    """The family and sizes a bundle declares, its tensors checked against them. Raises BundleError."""
    try:
        family = family_named(bundle.manifest.family)
        sizes = family.config_from_manifest(dict(bundle.manifest.model))
    except BundleError as err:
        raise BundleError(f"{bundle.path}: {err.message}", err.hint) from err
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


@dataclass(frozen=True)
class FoundTokenizer:
    """A tokenizer, and in a few words what told that it is the one."""

    tokenizer: Tokenizer
    origin: str


def find_tokenizer(
    path: Path, vocab_size: int, chosen: str | Path | None, source: TensorSource | None = None
) -> FoundTokenizer:
    """The tokenizer chosen, or the one of the checkpoint. Raises TokenizerError when none fits ``vocab_size`` rows.

    - GGUF: ``tokenizer.ggml.model`` "rwkv" is World; of "gpt2" the tokens and merges inside the file are read.
    - A folder: ``rwkv_vocab_v20230424.txt`` if it is the known one, else ``tokenizer.json`` where it can be read and fits.
    - Otherwise, and where that file does not serve, the size tells (65,536 rows: World; 50,277: GPT-NeoX; 256: bytes).
    - A lone file: the size, else a ``tokenizer.json`` beside it.
    """
    if chosen is not None:
        found = FoundTokenizer(load_tokenizer(chosen), "chosen")
    elif source is not None and source.format == "gguf":
        found = _gguf_tokenizer(source, vocab_size)
    elif path.is_dir():
        found = _folder_tokenizer(path, vocab_size)
    else:
        beside = path.parent / TOKENIZER_FILE
        try:
            found = FoundTokenizer(default_tokenizer(vocab_size), _SIZE)
        except TokenizerError:
            # a lone file's neighbour is a guess: taken only where the size of the vocabulary tells nothing
            if not beside.exists():
                raise
            found = FoundTokenizer(load_tokenizer(beside), f"{TOKENIZER_FILE} beside the file")
    check_fits(found.tokenizer, vocab_size)
    return found


_SIZE = "the size of the vocabulary"


def _gguf_tokenizer(source: TensorSource, vocab_size: int) -> FoundTokenizer:
    key = "tokenizer.ggml.model"
    model = (source.config or {}).get(key)
    if model == "rwkv":
        return FoundTokenizer(load_tokenizer("world"), f"{key} 'rwkv'")
    if model in (None, "none", "no_vocab"):
        return FoundTokenizer(default_tokenizer(vocab_size), _SIZE)
    if model != "gpt2":
        raise TokenizerError(
            f"{source.path}: {key} is {quoted(model)}, and of vocabularies inside GGUF files 'rwkv' and 'gpt2' are read",
            PASS_ONE,
        )
    from kittiwake.text.bpe import HFTokenizer  # brings a package that World has no use for

    metadata = source.config or {}
    found = read_tokenizer_json(metadata, _gguf_values(source), str(source.path), vocab_size)
    tokenizer = HFTokenizer(found, f"the vocabulary in {source.path}")
    return FoundTokenizer(tokenizer, f"{key} {model!r}, {PRE} {metadata[PRE]!r}")


def own_template(source: TensorSource) -> str | None:
    """The chat template inside a GGUF file, as a text that stands alone; None where there is none, or the checkpoint is
    another. Raises CheckpointError for one that cannot be used."""
    if source.format != "gguf":
        return None
    return read_template(source.config or {}, _gguf_values(source), str(source.path))


def _gguf_values(source: TensorSource) -> Values:
    # imported when wanted: other checkpoints have no use for its package
    from kittiwake.checkpoints.gguf import GgufSource

    assert isinstance(source, GgufSource)
    return source.values


def _folder_tokenizer(folder: Path, vocab_size: int) -> FoundTokenizer:
    vocabulary, file = folder / WORLD_VOCABULARY_FILE, folder / TOKENIZER_FILE
    if vocabulary.exists():
        return FoundTokenizer(load_tokenizer(vocabulary), WORLD_VOCABULARY_FILE)
    if not file.exists():
        return FoundTokenizer(default_tokenizer(vocab_size), _SIZE)
    try:
        tokenizer = load_tokenizer(file)
        check_fits(tokenizer, vocab_size)
    except TokenizerError as err:
        if vocab_size != WORLD_ROWS:
            raise
        return FoundTokenizer(load_tokenizer("world"), f"{_SIZE}; {TOKENIZER_FILE} is not used: {err.message}")
    return FoundTokenizer(tokenizer, TOKENIZER_FILE)


def choose_device(wanted: str, family: Family) -> str:
    """ "cpu" or "cuda". Raises DeviceError when CUDA is asked for and cannot serve this family, saying why."""
    if wanted == "cpu":
        return "cpu"
    reason = why_no_cuda()
    if not reason and "cuda" not in family.devices:
        reason = f"{family.name} runs on {', '.join(family.devices)} so far"
    if not reason:
        return "cuda"
    if wanted == "cuda":
        raise DeviceError(f"device cuda cannot be used: {reason}", "see `kittiwake doctor`, or take device cpu")
    return "cpu"


def _dtype(wanted: str, family: Family, sizes: ModelConfig, source: TensorSource, device: str) -> str:
    """How to keep the weights: as asked; "auto" keeps what is stored in 16 bits where that rounds nothing, else float32.

    GGUF files keep small matrices of a bfloat16 model as float32: those are looked at, value by value. On the CPU there
    is no float16: such weights are widened.
    """
    if wanted == "fp16" and device == "cpu":
        raise UsageError("dtype fp16 needs a CUDA card; the CPU keeps weights as fp32 or bf16", "leave dtype at auto")
    if wanted != "auto":
        return wanted
    tables = family.table_names(source, sizes)
    found = [info for info in source.infos() if info.name not in tables]
    if device == "cuda" and _mostly(found, torch.float16):
        return "fp16"
    matrices = [info for info in found if len([size for size in info.shape if size > 1]) > 1]
    halves = sum(info.nbytes for info in matrices if info.dtype == torch.bfloat16)
    others = [info for info in matrices if info.dtype != torch.bfloat16]
    if sum(info.nbytes for info in others) >= halves or any(info.dtype != torch.float32 for info in others):
        return "fp32"
    return "bf16" if all(_is_bfloat16(source.read(info.name)) for info in others if not info.unreadable) else "fp32"


def _mostly(infos: Sequence[TensorInfo], dtype: torch.dtype) -> bool:
    """Whether most bytes of these tensors are of this type."""
    return 2 * sum(info.nbytes for info in infos if info.dtype == dtype) > sum(info.nbytes for info in infos)


def _is_bfloat16(tensor: torch.Tensor) -> bool:
    return bool(torch.equal(tensor, tensor.bfloat16().float()))


class TensorDict:
    """Tensors in memory as a source, for random weights and tests."""

    format = "memory"

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], name: str = "memory", config: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(name)
        self.config = config
        self._tensors = tensors

    def infos(self) -> list[TensorInfo]:
        """Every tensor, in the order of the mapping."""
        return [TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()]

    def read(self, name: str) -> torch.Tensor:
        """The tensor itself."""
        return self._tensors[name]

    def place(self, name: str) -> FilePlace:
        """Raises CheckpointError: they lie in no file."""
        raise CheckpointError(f"{name} of {self.path} lies in memory, not in a file")

    def digest(self, progress: Progress | None = None) -> str:
        """sha-256 (hex) over names, types, shapes and values, in the order of the mapping."""
        digest = hashlib.sha256()
        for name, tensor in self._tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

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
    return load_source(TensorDict(tensors, name), config, tokenizer=tokenizer, progress=progress)


def load_source(
    source: TensorSource,
    config: EngineConfig,
    *,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """A model from an open source that is no file; ``tokenizer`` is by default the one its vocabulary's size tells."""
    threads = resolve_threads(config.threads)
    start = time.perf_counter()
    family = recognise(source)
    sizes = family.read_config(source).with_constants(config.group_norm_eps, config.rescale_every)
    text = default_tokenizer(sizes.vocab_size) if tokenizer is None else tokenizer
    check_fits(text, sizes.vocab_size)
    device = choose_device(config.device, family)
    dtype = _dtype(config.dtype, family, sizes, source, device)
    built = _build(family, sizes, source, device, dtype, threads, progress)
    load_ms = (time.perf_counter() - start) * 1e3
    digest = source.digest()  # now: the tensors may be gone later
    return Loaded(source.path, "random", built, text, dtype, threads, load_ms, None, None, lambda _: digest)
