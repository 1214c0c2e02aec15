"""``LLM``: the engine in a script, in the same process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.engine import Engine
from kittiwake.engine.request import Completion, Delta, SamplingParams, Timings
from kittiwake.engine.states import StateTable
from kittiwake.errors import RequestError, UsageError
from kittiwake.families.contract import Progress
from kittiwake.load import Loaded, load_model
from kittiwake.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids as they are."""
SCORE_CHUNK = 256
"""Rows scored in one forward: bounds the logits held at a time."""


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
        self._engine: Engine | None = Engine(
            loaded.model,
            loaded.tokenizer,
            slots=self.config.slots,
            prefill_chunk=self.config.prefill_chunk,
            max_rows=self.config.max_rows,
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the states and refuse further requests."""
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
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer all prompts, batched together; completions in the order of the prompts.

        One prompt (a text, or a list of ids) gives a list of one. ``params`` is one for all or one for each. Raises
        RequestError before any work is done when a prompt is empty or holds an id outside the vocabulary.
        """
        ids = [self._ids(prompt) for prompt in _as_prompts(prompts)]
        each = _params_for(len(ids), params)
        for prompt_ids, one in zip(ids, each, strict=True):
            self.engine.check(prompt_ids, one)
        engine, requests = self.engine, []
        try:
            for prompt_ids, one in zip(ids, each, strict=True):
                requests.append(engine.add(prompt_ids, one))
            deltas = [list(self._drain(request)) for request in requests]
        finally:
            for request in requests:
                engine.forget(request)
        return [_completion(len(prompt_ids), found) for prompt_ids, found in zip(ids, deltas, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Answer one prompt piece by piece; the last Delta has a finish_reason. Closing the iterator aborts the request."""
        ids, wanted = self._ids(prompt), params or SamplingParams()
        self.engine.check(ids, wanted)
        return self._stream(self.engine, ids, wanted)

    def _stream(self, engine: Engine, ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        # added here, not before: an iterator that is never begun is never closed either
        request = engine.add(ids, params)
        try:
            yield from self._drain(request)
        finally:
            engine.forget(request)

    def _drain(self, request: int) -> Iterator[Delta]:
        """Deltas of a request until its last one, moving the engine whenever there is none."""
        while True:
            deltas = self.engine.collect(request)
            for delta in deltas:
                if delta.error is not None:
                    raise delta.error
                yield delta
            if deltas and deltas[-1].finish_reason is not None:
                return
            if not deltas:
                self.engine.step()

    def score(self, ids: Sequence[int]) -> np.ndarray:
        """Natural-log probability of ids[1:], each given all before it: float64 [len(ids) - 1], constant memory."""
        self.engine.check(ids, SamplingParams())
        tokens = np.asarray(ids, dtype=np.int64)
        table = StateTable(self.loaded.model.state_spec, 1)
        slot = table.allocate()
        scores = np.empty(len(tokens) - 1, dtype=np.float64)
        for first in range(0, len(tokens) - 1, SCORE_CHUNK):
            rows = tokens[first : min(first + SCORE_CHUNK, len(tokens) - 1)]
            logits = self.loaded.model.forward(Batch.pack([(slot, rows.tolist())], [list(range(len(rows)))]), table)
            scores[first : first + len(rows)] = _log_probs(logits, tokens[first + 1 : first + 1 + len(rows)])
        return scores

    def _ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one; a list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) == 0:
        raise RequestError("there is no prompt to answer", "give a text, a list of token ids, or a list of such")
    if isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts need one SamplingParams or {count} of them, got {len(params)}")
    return list(params)


def _completion(prompt_tokens: int, deltas: list[Delta]) -> Completion:
    last = deltas[-1]
    return Completion(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        prompt_tokens=prompt_tokens,
        finish_reason=last.finish_reason or "abort",
        timings=last.timings or Timings(),
    )


def _log_probs(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Log-softmax in float64 of float32 logits [W, vocab], picked at targets [W]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    total = np.log(np.exp(wide - top[:, None]).sum(axis=1)) + top
    return np.asarray(wide[np.arange(len(targets)), targets] - total)
