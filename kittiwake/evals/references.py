"""Other implementations behind the face of an ``LLM``, so that a measure runs through them as it runs through kittiwake.

``rwkv`` is the package of that name (BlinkDL/ChatRWKV: RWKV-4 to RWKV-7), ``transformers`` its ``RwkvForCausalLM``
(RWKV-4). Both are imported when one is opened and not before. Text becomes ids and ids become text by kittiwake's
tokenizer, one prompt runs at a time, and a call ends where kittiwake's ends: with the text of the last token drawn,
which is not run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch

from kittiwake.checkpoints.bundle import read_bundle
from kittiwake.checkpoints.manifest import MANIFEST_NAME
from kittiwake.checkpoints.reader import TensorSource, open_checkpoint
from kittiwake.config import EngineConfig
from kittiwake.device import find_card, processor_name, resolve_threads
from kittiwake.engine.request import Completion, SamplingParams
from kittiwake.errors import KittiwakeError, ModelError, UsageError
from kittiwake.evals.runs import Answerer
from kittiwake.families import rwkv7_names
from kittiwake.families.contract import Family, ModelConfig
from kittiwake.families.registry import recognise
from kittiwake.load import bundle_family, bundle_tokenizer, find_tokenizer, packaged_model
from kittiwake.progress import Progress
from kittiwake.stdout import stdout_on_stderr
from kittiwake.text.tokenizer import Prompt, Tokenizer, load_tokenizer

REFERENCES = ("transformers", "rwkv")
_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_EMBEDDING = "emb.weight"

# transformers' names of RWKV-4 (with either prefix) → BlinkDL's, each replaced wherever it stands
_TO_BLINKDL = (
    (r"^(rwkv|backbone)\.", ""),
    (r"^embeddings\.", "emb."),
    (r"^norm_f\.", "ln_out."),
    (r"\.attention\.", ".att."),
    (r"\.feed_forward\.", ".ffn."),
    (r"\.pre_ln\.", ".ln0."),
    (r"\.time_mix_(k|v|r)(?:ey|alue|eceptance)$", r".time_mix_\1"),
)
_FROM_BLINKDL = (
    (r"^emb\.", "rwkv.embeddings."),
    (r"^ln_out\.", "rwkv.ln_out."),
    (r"^blocks\.", "rwkv.blocks."),
    (r"\.att\.", ".attention."),
    (r"\.ffn\.", ".feed_forward."),
    (r"\.ln0\.", ".pre_ln."),
    (r"\.time_mix_k$", ".time_mix_key"),
    (r"\.time_mix_v$", ".time_mix_value"),
    (r"\.time_mix_r$", ".time_mix_receptance"),
)


@dataclass(frozen=True)
class Weights:
    """A checkpoint's tensors under BlinkDL's names, as stored (do not write to them)."""

    path: Path
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    """transformers' config.json; empty where there is none."""
    digest: str
    """sha-256 (hex) over the checkpoint's files."""
    is_plain_pth: bool
    """The file itself has these names and ``torch.load`` reads it."""
    tokenizer: Tokenizer

    @property
    def version(self) -> int:
        """Of RWKV: 4 to 7."""
        return _version(self.tensors)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.tensors[_EMBEDDING].shape[0])

    @property
    def layers(self) -> int:
        """Blocks."""
        return 1 + max(int(name.split(".")[1]) for name in self.tensors if name.startswith("blocks."))


def read_weights(model: Path | None, tokenizer: str | Path | None = None, progress: Progress | None = None) -> Weights:
    """Read a checkpoint for a reference: BlinkDL's names, RWKV-4 in transformers' layout, or RWKV-7 in any layout that
    kittiwake reads, its bundles too.

    Raises ModelError for any other, and as ``open_checkpoint`` and ``read_bundle``.
    """
    path = packaged_model() if model is None else model
    if (path / MANIFEST_NAME).exists():
        bundle = read_bundle(path, progress=progress)
        family, sizes = bundle_family(bundle)
        text = bundle_tokenizer(bundle) if tokenizer is None else load_tokenizer(tokenizer)
        with bundle.source as source:
            return Weights(path, _turned_back(source, family, sizes), {}, source.digest(progress), False, text)
    with open_checkpoint(path, progress=progress) as source:
        stored = {info.name: info.name for info in source.infos()}
        is_plain = source.format == "pth" and path.is_file() and path.suffix == ".pth" and _EMBEDDING in stored
        renamed = {_renamed(name, _TO_BLINKDL): name for name in stored}
        if _EMBEDDING in stored:
            tensors = {name: source.read(name) for name in stored}
        elif _EMBEDDING in renamed and _version(renamed) == 4:
            tensors = {name: source.read(theirs) for name, theirs in renamed.items()}
        else:
            family = recognise(source)
            tensors = _turned_back(source, family, family.read_config(source))
        text = find_tokenizer(path, int(tensors[_EMBEDDING].shape[0]), tokenizer, source).tokenizer
        return Weights(path, tensors, dict(source.config or {}), source.digest(progress), is_plain, text)


def _turned_back(source: TensorSource, family: Family, config: ModelConfig) -> dict[str, torch.Tensor]:
    """An RWKV-7 under BlinkDL's names, from whatever layout. Raises ModelError for another family."""
    if family.name != "rwkv7":
        raise ModelError(
            f"{source.path} cannot be given to a reference: its names are not BlinkDL's (emb.weight, …)",
            "name the .pth that it was made from",
        )
    places = rwkv7_names.BLINKDL.places(config.layers)
    tensors = {}
    for ours, tensor in family.canonical(source, config):
        place = places[ours]
        if place.name.endswith(".att.r_k"):  # the library reads the size of a head from it
            tensor = tensor.reshape(config.extra["heads"], -1)
        tensors[place.name] = tensor.t() if place.is_transposed else tensor
    return tensors


def _renamed(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _version(names: Iterable[str]) -> int:
    """The RWKV version that tensors in BlinkDL's names belong to, as the ``rwkv`` package tells it."""
    joined = " ".join(names)
    marks = ((7, ".att.r_k"), (6, ".att.time_maa"), (5, ".att.ln_x"))
    return next((version for version, mark in marks if mark in joined), 4)


class Network(Protocol):
    """A reference's model: a state is whatever it gives, None stands for nothing seen."""

    version: str
    """Of the library, for the record."""

    def last(self, ids: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        """(float32 [vocab] of what follows the ids, the state after them)."""

    def rows(self, ids: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        """The same with what follows each of them: float32 [T, vocab]."""


class RwkvPackage:
    """The ``rwkv`` package. Its settings are environment variables that it reads when it is imported; RWKV_JIT_ON and
    RWKV_CUDA_ON are taken from the environment and default to 1 and 0."""

    def __init__(self, weights: Weights, device: str, dtype: str) -> None:
        os.environ.setdefault("RWKV_JIT_ON", "1")
        os.environ.setdefault("RWKV_CUDA_ON", "0")
        wanted = "1" if weights.version == 7 else "0"
        if "rwkv.model" in sys.modules and os.environ.get("RWKV_V7_ON", "0") != wanted:
            raise UsageError("the rwkv package serves RWKV-7 or older models, not both in one process")
        os.environ["RWKV_V7_ON"] = wanted
        with stdout_on_stderr():  # it tells its settings, which would end up in the answer
            library = _library("rwkv.model", "rwkv")
            with _as_pth(weights) as path:
                self._model = library.RWKV(str(path.with_suffix("")), f"{device} {dtype}")
        self.version = _version_of("rwkv")

    def last(self, ids: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        """See :class:`Network`."""
        logits, state = self._model.forward(list(ids), state)
        return logits.float().reshape(-1), state

    def rows(self, ids: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        """See :class:`Network`."""
        logits, state = self._model.forward(list(ids), state, True)
        return logits.float().reshape(len(ids), -1), state


@contextlib.contextmanager
def _as_pth(weights: Weights) -> Iterator[Path]:
    """A .pth with these weights: their own file, or one that is gone afterwards."""
    if weights.is_plain_pth:
        yield weights.path.absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pth")
        torch.save(
            {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.tensors.items()},
            path,
        )
        yield path


class TransformersRwkv:
    """``RwkvForCausalLM`` of transformers, driven token by token with its state, without the layers of ``generate``.

    A checkpoint without a config.json gets transformers' defaults, as its conversion script gives them: the residual is
    halved every 6 layers, which makes the epsilon of later norms 4, 16, … times as large.
    """

    def __init__(self, weights: Weights, device: str, dtype: str) -> None:
        if weights.version != 4:
            raise ModelError(
                f"transformers has RWKV-4 only, and {weights.path} is RWKV-{weights.version}", "use --reference rwkv"
            )
        library = _library("transformers", "transformers")
        with torch.device("meta"):  # no random weights are drawn only to be thrown away
            model = library.RwkvForCausalLM(library.RwkvConfig(**_rwkv4_config(weights)))
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        given = {_renamed(name, _FROM_BLINKDL): tensor for name, tensor in weights.tensors.items()}
        given.setdefault("head.weight", weights.tensors[_EMBEDDING])
        if given.keys() != shapes.keys():
            other = ", ".join(sorted(given.keys() ^ shapes.keys())[:3])
            raise ModelError(f"{weights.path} does not fit transformers' RWKV-4: {other}")
        kept = _TORCH_DTYPES[dtype]
        loaded = {name: given[name].reshape(shape).to(kept, copy=True) for name, shape in shapes.items()}
        model.load_state_dict(loaded, strict=True, assign=True)
        self._device = torch.device(device)
        self._model = model.to(self._device).eval()
        self.version = _version_of("transformers")

    def last(self, ids: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        """See :class:`Network`."""
        logits, state = self._run(ids, state, 1)
        return logits[-1], state

    def rows(self, ids: Sequence[int], state: Any) -> tuple[torch.Tensor, Any]:
        """See :class:`Network`."""
        return self._run(ids, state, 0)

    def _run(self, ids: Sequence[int], state: Any, keep: int) -> tuple[torch.Tensor, Any]:
        with torch.inference_mode():
            given = torch.tensor([list(ids)], device=self._device)
            found = self._model(given, state=state, use_cache=True, logits_to_keep=keep)
            return found.logits[0].float(), found.state


def _rwkv4_config(weights: Weights) -> dict[str, Any]:
    """RwkvConfig's arguments: sizes from the tensors, constants from config.json where there is one."""
    tensors = weights.tensors
    constants = {"layer_norm_epsilon", "rescale_every", "context_length"} & weights.config.keys()
    return {
        "vocab_size": weights.vocab_size,
        "hidden_size": int(tensors[_EMBEDDING].shape[1]),
        "num_hidden_layers": weights.layers,
        "attention_hidden_size": int(tensors["blocks.0.att.key.weight"].shape[0]),
        "intermediate_size": int(tensors["blocks.0.ffn.key.weight"].shape[0]),
        **{name: weights.config[name] for name in sorted(constants)},
    }


def _library(module: str, package: str) -> Any:
    """A library that is imported only when it is asked for. Raises UsageError where it cannot be."""
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise UsageError(
            f"the reference {package} cannot be used: {err}", f"install it: pip install {package}"
        ) from err


def _version_of(package: str) -> str:
    return f"{importlib.metadata.version(package)} (torch {torch.__version__})"


class Reference:
    """A reference that answers and scores as an ``LLM`` does: greedily, one prompt after another."""

    def __init__(self, network: Network, tokenizer: Tokenizer, vocab_size: int, answerer: Answerer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.answerer = answerer
        self._network = network
        # kittiwake's sampler draws no id that its tokenizer cannot spell
        valid = [token < tokenizer.vocab_size and tokenizer.is_valid(token) for token in range(vocab_size)]
        self._banned = torch.tensor([token for token, is_valid in enumerate(valid) if not is_valid], dtype=torch.long)
        self._threads_before = torch.get_num_threads()
        if answerer.threads:  # none on a card
            torch.set_num_threads(answerer.threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_num_threads(self._threads_before)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Completion]:
        """Answer all prompts in turn. Raises UsageError for parameters other than greedy ones of so many tokens."""
        if params != SamplingParams(max_tokens=params.max_tokens, temperature=0.0):
            raise UsageError("a reference decodes greedily: only max_tokens can be chosen")
        return [self._complete(self._ids(prompt), params.max_tokens) for prompt in prompts]

    def _ids(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UsageError("the prompt is empty")
        return ids

    def _complete(self, prompt: list[int], max_tokens: int) -> Completion:
        drawn: list[int] = []
        row, state = self._network.last(prompt, None)
        while True:
            drawn.append(self._greedy(row))
            is_end = drawn[-1] in self.tokenizer.eos_ids
            if is_end or len(drawn) == max_tokens:
                reason = "stop" if is_end else "length"
                return Completion(self.tokenizer.decode(drawn), tuple(drawn), len(prompt), reason)
            row, state = self._network.last(drawn[-1:], state)

    def _greedy(self, row: torch.Tensor) -> int:
        if len(self._banned):
            self._banned = self._banned.to(row.device)
            row = row.index_fill(0, self._banned, -torch.inf)
        return int(row.argmax())

    def score(self, ids: Sequence[int]) -> np.ndarray:
        """Natural-log probability of ids[1:], float64 [len(ids) - 1]."""
        return next(self.score_stream([ids]))

    def score_stream(self, pieces: Iterable[Sequence[int]]) -> Iterator[np.ndarray]:
        """The same of one text whose ids come in pieces, in constant memory."""
        state: Any = None
        before: torch.Tensor | None = None
        for ids in pieces:
            if not len(ids):
                continue
            rows, state = self._network.rows(ids, state)
            known = rows[:-1] if before is None else torch.cat([before, rows[:-1]])
            before = rows[-1:]
            targets = torch.tensor(list(ids[len(ids) - len(known) :]), device=known.device)
            found = torch.log_softmax(known.double(), -1).gather(1, targets[:, None])
            yield found[:, 0].cpu().numpy()


def open_reference(
    name: str,
    model: Path | None,
    config: EngineConfig,
    *,
    tokenizer: str | Path | None = None,
    progress: Progress | None = None,
) -> Reference:
    """Load a checkpoint into the reference ``name``, on the device and threads of ``config``.

    ``dtype`` auto is float32: the same weights in the arithmetic that rounds least. Raises UsageError for a library that
    is not installed and for options that a reference does not have, ModelError for a checkpoint that it cannot run.
    """
    if name not in REFERENCES:
        raise UsageError(f"the reference must be one of {', '.join(REFERENCES)}, got {name!r}")
    if config.group_norm_eps is not None or (config.rescale_every is not None and name != "transformers"):
        flag = "--rescale-every" if config.group_norm_eps is None else "--group-norm-eps"
        raise UsageError(f"{flag} does not reach the reference {name}", "leave it away")
    dtype = "fp32" if config.dtype == "auto" else config.dtype
    device = "cuda" if config.device.startswith("cuda") else "cpu"
    card = find_card().card if device == "cuda" else None
    # as kittiwake's own runs tell it, so that their times can be compared
    processor, threads = (processor_name(), resolve_threads(config.threads)) if card is None else (card.name, 0)
    weights = read_weights(model, tokenizer, progress)
    if config.rescale_every is not None:
        weights = replace(weights, config={**weights.config, "rescale_every": config.rescale_every})
    if progress is not None:
        progress(f"loading into {name}", 0, 1)
    try:
        network: Network = (RwkvPackage if name == "rwkv" else TransformersRwkv)(weights, device, dtype)
    except (KittiwakeError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as err:  # whatever a foreign library raises for a checkpoint it cannot run
        raise ModelError(f"the reference {name} cannot load {weights.path}: {type(err).__name__}: {err}") from err
    answerer = Answerer(
        implementation=name,
        version=network.version,
        model=str(weights.path),
        digest=weights.digest,
        family=f"rwkv{weights.version}",
        dtype=dtype,
        device=device,
        processor=processor,
        threads=threads,
        tokenizer=weights.tokenizer.digest(),
    )
    return Reference(network, weights.tokenizer, weights.vocab_size, answerer)
