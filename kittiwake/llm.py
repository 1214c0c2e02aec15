"""``LLM``: the engine in a script, in the same process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kittiwake.chat import ChatCompletion, ChatDelta, Messages, prepare, split_completion, split_stream
from kittiwake.checkpoints.reader import open_checkpoint
from kittiwake.config import EngineConfig
from kittiwake.engine import state_file
from kittiwake.engine.engine import Engine
from kittiwake.engine.prefix import PrefixCache, least_tokens, ram_budget
from kittiwake.engine.prefix_disk import DiskTier
from kittiwake.engine.request import Completion, Delta, KeptState, SamplingParams, Timings
from kittiwake.engine.scoring import Given, Rows, Scored, prefill, run_rows, score, score_stream
from kittiwake.engine.states import SavedState, growing_budget
from kittiwake.engine.stats import QueueLimits
from kittiwake.errors import CheckpointError, ModelError, RequestError, StateFileError, UsageError
from kittiwake.load import Loaded, load_model
from kittiwake.progress import Progress
from kittiwake.receipt import make_receipt
from kittiwake.text.chat import TEMPLATES, ChatTemplate
from kittiwake.text.templates import choose_template
from kittiwake.text.tokenizer import Prompt, Tokenizer

Start = KeptState | None
"""What a prompt follows: a kept state, or nothing."""


class LLM:
    """A loaded model that answers prompts.

    ``model`` is a bundle folder, a checkpoint file or folder, or None for the packaged model; ``tokenizer`` overrides
    the one that belongs to it ("world", "bytes" or a tokenizer.json). ``options`` are the fields of
    :class:`EngineConfig`. ``progress(what, done, total)`` is called while loading. Methods may be called from several
    threads; their requests are batched together.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        progress: Progress | None = None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise UsageError(f"give config or options, not both: {', '.join(options)}")
        unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
        if unknown:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise UsageError(f"LLM has no option {', '.join(unknown)}", f"options: {known}")
        self.config = config or EngineConfig(**options)
        self._open(load_model(model, self.config, tokenizer=tokenizer, progress=progress))

    @classmethod
    def from_loaded(cls, loaded: Loaded, config: EngineConfig | None = None) -> LLM:
        """An LLM over a model that is loaded already."""
        llm = cls.__new__(cls)
        llm.config = config or EngineConfig()
        llm._open(loaded)
        return llm

    def _open(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._template: ChatTemplate | None = None
        self._engine: Engine | None = Engine(
            loaded.model,
            loaded.tokenizer,
            slots=self.config.slots,
            prefill_chunk=self.config.prefill_chunk,
            max_rows=self.config.max_rows,
            max_chunk=self.config.max_chunk,
            cache=self._make_cache(loaded),
            limits=QueueLimits(self.config.max_waiting, self.config.max_waiting_per_client),
            growing_bytes=self.config.growing_bytes,
        )

    def _make_cache(self, loaded: Loaded) -> PrefixCache | None:
        """The prefix cache as configured. Raises OutputError for a folder that cannot be used."""
        config = self.config
        model = loaded.model
        on_host = model.device == "cpu"
        growing = growing_budget(model.state_spec, config.slots, config.growing_bytes) if on_host else 0
        budget = ram_budget(config.cache_ram_bytes, growing)
        if budget == 0:
            return None
        disk = None
        if config.cache_disk is not None:
            build = make_receipt(loaded)["digest"]
            disk = DiskTier(Path(config.cache_disk), config.cache_disk_bytes, self.state_owner(), build)
        return PrefixCache(budget, min_tokens=config.cache_min_tokens or least_tokens(model.device), disk=disk)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the states and refuse further requests. Cached states that are still to be written are."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests. Raises UsageError once closed."""
        if self._engine is None:
            raise UsageError("this LLM is closed")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in force."""
        return self.loaded.tokenizer

    @property
    def vocab_size(self) -> int:
        """Rows of the model's output: ids run from 0 to vocab_size - 1."""
        return self.loaded.model.config.vocab_size

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        keep_state: bool = False,
        start_from: Start | Sequence[Start] = None,
    ) -> list[Completion]:
        """Answer all prompts, batched together; one completion a prompt, in the order of the prompts.

        One prompt (a text, or a list of ids) gives a list of one. ``params`` is one for all or one for each. Where they
        ask for ``n`` samples, a prompt's completion is its sample 0, and its ``choices`` are all of them. Raises
        RequestError before any work is done when a prompt is empty or holds an id outside the vocabulary.

        ``keep_state`` puts the state after the last accepted token into each completion's ``state``. ``start_from``, one
        for all or one for each, goes on from such a state instead of from nothing; the prompt may then be the empty text.
        """
        ids = [self._ids(prompt) for prompt in _as_prompts(prompts)]
        each, starts = _params_for(len(ids), params), _starts_for(len(ids), start_from)
        for prompt_ids, one, start in zip(ids, each, starts, strict=True):
            self.engine.check(prompt_ids, one, start)
        engine = self.engine
        groups: list[list[int]] = []
        try:
            for prompt_ids, one, start in zip(ids, each, starts, strict=True):
                groups.append(engine.add_samples(prompt_ids, one, keep_state=keep_state, start_from=start))
            deltas = [[list(self._drain([request])) for request in group] for group in groups]
        finally:
            for group in groups:
                for request in group:
                    engine.forget(request)
        return [
            _grouped([join_completion(len(prompt_ids), found, one) for found in samples])
            for prompt_ids, one, samples in zip(ids, each, deltas, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        keep_state: bool = False,
        start_from: KeptState | None = None,
    ) -> Iterator[Delta]:
        """Answer one prompt piece by piece; the last Delta has a finish_reason. Closing the iterator aborts the request.

        Where ``params`` ask for ``n`` samples, their Deltas come side by side, told apart by ``index``; the last Delta
        of each has a finish_reason, and with ``keep_state`` the state. ``start_from`` is as in :meth:`generate`.
        """
        ids, wanted = self._ids(prompt), _params_for(1, params)[0]
        self.engine.check(ids, wanted, start_from)
        return self._stream(self.engine, ids, wanted, keep_state, start_from)

    def _stream(
        self, engine: Engine, ids: list[int], params: SamplingParams, keep_state: bool, start: KeptState | None
    ) -> Iterator[Delta]:
        # added here, not before: an iterator that is never begun is never closed either
        requests = engine.add_samples(ids, params, keep_state=keep_state, start_from=start)
        try:
            yield from self._drain(requests)
        finally:
            for request in requests:
                engine.forget(request)

    def _drain(self, requests: Sequence[int]) -> Iterator[Delta]:
        """Deltas of requests as they come, until the last of each, moving the engine whenever there is none.

        A Delta's ``index`` is its request's place among them.
        """
        running = dict(enumerate(requests))
        while running:
            news = {index: self.engine.collect(request) for index, request in running.items()}
            for index, deltas in news.items():
                for delta in deltas:
                    if delta.error is not None:
                        raise delta.error
                    yield replace(delta, index=index) if index else delta
                if deltas and deltas[-1].finish_reason is not None:
                    del running[index]
            if not any(news.values()):
                self.engine.step()

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        template: str | Path | ChatTemplate | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ChatCompletion:
        """Answer a conversation: objects with ``role`` (system, user, assistant) and ``content``.

        ``template`` overrides the model's own (:meth:`chat_template`), ``options`` are variables of a Jinja template.
        Its stops are added to those of ``params``. Raises RequestError for messages that cannot be answered, UsageError
        for a model without a chat template.
        """
        prompt = prepare(self.chat_template(template), self.tokenizer, messages, params, options)
        return split_completion(self.generate(prompt.ids, prompt.params)[0], prompt.opening)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        template: str | Path | ChatTemplate | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Iterator[ChatDelta]:
        """The same piece by piece, reasoning apart; the last one has a finish_reason. Closing the iterator aborts it."""
        prompt = prepare(self.chat_template(template), self.tokenizer, messages, params, options)
        return split_stream(self.stream(prompt.ids, prompt.params), prompt.opening)

    def chat_template(self, chosen: str | Path | ChatTemplate | None = None) -> ChatTemplate:
        """The chat template in force, or the one chosen: a name, a Jinja file or a tokenizer_config.json.

        Raises UsageError where there is none, TokenizerError for one that cannot be used.
        """
        if chosen is None and self._template is not None:
            return self._template
        loaded = self.loaded
        found = choose_template(chosen, loaded.tokenizer, model=loaded.path, bundled=loaded.chat_template)
        if found is None:
            raise UsageError(
                f"{loaded.path} has no chat template: it was not made for conversations, as far as its files tell",
                f"name one to try all the same: {', '.join(TEMPLATES)}, or a Jinja file",
            )
        if chosen is None:
            self._template = found
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; what spells a control token stays text."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, U+FFFD for bytes that are no text."""
        return self.tokenizer.decode(ids)

    def receipt(self, progress: Progress | None = None) -> dict[str, Any]:
        """What the bits of this model's answers depend on, as JSON values: equal ``digest``, equal bits (docs/receipt.md)."""
        return make_receipt(self.loaded, progress)

    def prefill(self, prompt: Prompt, *, start_from: KeptState | None = None) -> KeptState:
        """The state after exactly this prompt, for many requests to start from; nothing is drawn."""
        return prefill(self.loaded.model, self._given([prompt], start_from)[0])

    def save_state(self, state: KeptState, path: str | Path, *, replace: bool = False) -> None:
        """Write a kept state of this model to a file, whole or not at all; an existing one only with ``replace``.

        Raises StateError for a state of another shape, OutputError for a file that exists or cannot be written.
        """
        state_file.save_state(Path(path), state, self.state_owner(), replace=replace)

    def load_state(self, path: str | Path) -> KeptState:
        """A state that :meth:`save_state` wrote, in this process or another: the same bits.

        Raises StateFileError naming what differs, for a file that is damaged or of another model, dtype or format.
        """
        return state_file.load_state(Path(path), self.state_owner())

    def load_initial_state(self, path: str | Path, *, transpose: bool = False) -> KeptState:
        """A tuned initial state (``time_state`` tensors, .pth or .safetensors) for prompts to begin from.

        Its matrices are taken as [V, K] a head, the way such files are written; ``transpose`` takes them as [K, V].
        Raises StateFileError for a file that is anything else.
        """
        try:
            with open_checkpoint(path) as source:
                parts = self.loaded.model.initial_state(source, transpose=transpose)
        except (CheckpointError, ModelError) as err:
            raise StateFileError(err.message, err.hint) from None
        saved = SavedState(0, parts)
        return KeptState(saved, (), None, saved.digest)

    def state_owner(self) -> state_file.StateOwner:
        """What a state must have been made by to go on here."""
        model = self.loaded.model
        return state_file.StateOwner(
            model.config.family, self.loaded.digest(), self.loaded.dtype, model.state_spec, model.config.vocab_size
        )

    def score(self, prompt: Prompt, *, start_from: KeptState | None = None) -> np.ndarray:
        """Natural-log probability of each token given all before it: float64.

        Of a text or ids of T tokens the first has nothing before it, so T - 1 come back; after a kept state all T do.
        """
        return self.score_all([prompt], start_from=start_from)[0].log_probs

    def score_all(
        self, prompts: Prompt | Sequence[Prompt], *, top: int = 0, start_from: Start | Sequence[Start] = None
    ) -> list[Scored]:
        """Score several texts side by side, with the ``top`` likeliest tokens of each place if asked for.

        The bits are those of the same texts scored alone, and of the ``logprobs`` that generation reports. Memory does
        not grow with the length of a text beyond what is returned. Raises RequestError as :meth:`generate`.
        """
        return score(self.loaded.model, self._given(prompts, start_from), top=top)

    def score_stream(self, pieces: Iterable[Sequence[int]]) -> Iterator[np.ndarray]:
        """Log-probabilities as :meth:`score` gives them, of one text whose ids come in pieces, in constant memory."""
        return score_stream(self.loaded.model, (self._given([piece], None)[0].ids for piece in pieces if len(piece)))

    def logits(
        self, prompt: Prompt, *, rows: Sequence[int] | None = None, start_from: KeptState | None = None
    ) -> np.ndarray:
        """Float32 logits [R, vocab] of what follows each token, or those at ``rows`` (negative ones count from the end)."""
        given = self._given([prompt], start_from)
        wanted = _wanted_rows(rows, len(given[0].ids))
        out = np.empty((len(wanted), self.vocab_size), dtype=np.float32)
        for piece in run_rows(self.loaded.model, given):
            here = (wanted >= piece.first) & (wanted < piece.first + piece.count)
            out[here] = piece.logits[wanted[here] - piece.first]
        return out

    def hidden_states(
        self, prompt: Prompt, *, layers: Sequence[int] | None = None, start_from: KeptState | None = None
    ) -> np.ndarray:
        """The residual stream, float32 [T, layers, C]: what enters layers 0 to L - 1, and as number L what leaves the last.

        All L + 1 where ``layers`` is left out. The output norm is not applied.
        """
        given, chosen = self._given([prompt], start_from), self.check_layers(layers)
        out = np.empty((len(given[0].ids), len(chosen), self.loaded.model.config.width), dtype=np.float32)
        for piece in run_rows(self.loaded.model, given, want_logits=False, layers=chosen):
            out[piece.first : piece.first + piece.count] = piece.hidden
        return out

    def stream_rows(
        self, prompt: Prompt, *, layers: Sequence[int] = (), want_logits: bool = True, start_from: Start = None
    ) -> Iterator[Rows]:
        """Logits and hidden rows of a long text piece by piece, in constant memory."""
        chosen = self.check_layers(layers)
        return run_rows(self.loaded.model, self._given([prompt], start_from), want_logits=want_logits, layers=chosen)

    def check_layers(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        """Numbers of hidden rows, all of them for None. Raises RequestError for one that the model does not have."""
        count = self.loaded.model.config.layers
        chosen = tuple(range(count + 1)) if layers is None else tuple(layers)
        for layer in chosen:
            if not 0 <= layer <= count:
                raise RequestError(f"layer {layer} was asked for", f"this model's hidden rows are 0 to {count}")
        return chosen

    def _given(self, prompts: Prompt | Sequence[Prompt], start_from: Start | Sequence[Start]) -> list[Given]:
        """Prompts as checked sequences to run."""
        ids = [self._ids(prompt) for prompt in _as_prompts(prompts)]
        starts = _starts_for(len(ids), start_from)
        for prompt_ids, start in zip(ids, starts, strict=True):
            self.engine.check(prompt_ids, SamplingParams(), start)
        pairs = zip(ids, starts, strict=True)
        return [Given(np.asarray(prompt_ids, dtype=np.int64), start) for prompt_ids, start in pairs]

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not _is_list(prompt):
            raise RequestError(f"a prompt is a text or a list of token ids, got {_named(prompt)}", _PROMPTS)
        return list(prompt)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one; a list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(f"a prompt is a text or a list of token ids, got {_named(prompts)}", _PROMPTS)
    if len(prompts) == 0:
        raise RequestError("there is no prompt to answer", _PROMPTS)
    if isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


_PROMPTS = "give a text, a list of token ids, or a list of such"


def _is_list(value: object) -> bool:
    """A list, tuple or vector; bytes are neither ids nor text."""
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, bytes | bytearray | memoryview | str)


def _named(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not _is_list(params) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(f"params are one SamplingParams, or a list of them, got {_named(params)}")
    if len(params) != count:
        raise RequestError(f"{count} prompts need one SamplingParams or {count} of them, got {len(params)}")
    return list(params)


def _starts_for(count: int, start_from: Start | Sequence[Start]) -> list[Start]:
    if start_from is None or isinstance(start_from, KeptState):
        return [start_from] * count
    if not _is_list(start_from) or not all(one is None or isinstance(one, KeptState) for one in start_from):
        raise RequestError(f"start_from is a KeptState, None, or a list of such, got {_named(start_from)}")
    if len(start_from) != count:
        raise RequestError(f"{count} prompts need one state to start from or {count} of them, got {len(start_from)}")
    return list(start_from)


def _wanted_rows(rows: Sequence[int] | None, count: int) -> np.ndarray:
    """Rows as int64 from 0 to count - 1. Raises RequestError for one that does not exist."""
    if rows is None:
        return np.arange(count)
    wanted = np.asarray(rows, dtype=np.int64)
    if wanted.size and not (wanted.min() >= -count and wanted.max() < count):
        raise RequestError(f"rows {list(rows)} were asked for of a prompt of {count} tokens")
    return np.where(wanted < 0, wanted + count, wanted)


def _grouped(samples: list[Completion]) -> Completion:
    """Sample 0, with the others beside it."""
    return replace(samples[0], others=tuple(samples[1:]))


def join_completion(prompt_tokens: int, deltas: list[Delta], params: SamplingParams) -> Completion:
    """A completion out of all the Deltas of its request, the last one with its finish_reason."""
    last = deltas[-1]
    logprobs = tuple(logprob for delta in deltas for logprob in delta.logprobs)
    return Completion(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        prompt_tokens=prompt_tokens,
        finish_reason=last.finish_reason or "abort",
        timings=last.timings or Timings(),
        state=last.state,
        logprobs=logprobs if params.logprobs else None,
    )
