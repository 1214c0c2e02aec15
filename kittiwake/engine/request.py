"""A request and what it asks of the sampler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kittiwake.engine.states import SavedState
from kittiwake.errors import KittiwakeError, RequestError
from kittiwake.ops.sampling.reference import derived_seed

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_SAMPLES = 1024
MAX_TOP_LOGPROBS = 20
MAX_BIAS = 100.0
"""The largest logit bias; its negative bans the token."""
SAMPLING_ORDERS = ("standard", "rwkv")


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. Checked when made: a value that cannot be honoured raises RequestError.

    ``temperature`` 0 is greedy (ties to the lowest id). Otherwise logits are divided by it, then ``top_k`` (0: off),
    ``top_p`` (1: off) and ``min_p`` (0: off) filter, ties at the border kept; ``sampling_order`` "rwkv" filters on the
    probabilities before the temperature. ``seed`` and the absolute position of a token key its noise, so the same
    request draws the same tokens alone or in a crowd. ``stop`` strings are matched on text and not emitted;
    ``stop_token_ids`` end the completion and are not part of its text. ``ignore_eos`` goes on past the tokenizer's
    end-of-text; ``min_tokens`` bans ends of text and stop ids until that many tokens stand.

    Before all that ``logit_bias`` (token id → -100 to 100, -100 bans) is added, then ``repetition_penalty`` (1: off)
    divides positive and multiplies negative logits of tokens in the prompt or drawn, and ``presence_penalty`` and
    ``frequency_penalty`` are taken from the logits of drawn tokens, once and once a time. ``n`` completions share a
    prompt; :meth:`for_sample` tells what each is drawn with. ``logprobs`` asks for the natural log of each drawn
    token's probability, ``top_logprobs`` for that many of the likeliest beside it: the model's own, before bias,
    penalties, temperature and filters.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    sampling_order: str = "standard"
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        _check_int("top_k", self.top_k, 0, MAX_TOP_K)
        _check_int("seed", self.seed, 0, MAX_SEED)
        _check_float("temperature", self.temperature, 0.0, None)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_int("n", self.n, 1, MAX_SAMPLES)
        _check_int("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        _check_bool("ignore_eos", self.ignore_eos)
        _check_bool("logprobs", self.logprobs)
        if self.sampling_order not in SAMPLING_ORDERS:
            raise RequestError(
                f"sampling_order must be one of {', '.join(SAMPLING_ORDERS)}, got {self.sampling_order!r}"
            )
        self._check_together()
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        for text in self.stop:
            if not isinstance(text, str) or not text or _has_surrogate(text):
                raise RequestError(f"a stop string must be non-empty text that UTF-8 can hold, got {text!r}")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, None)

    def _check_together(self) -> None:
        """Raise RequestError for values that contradict each other."""
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0 and at most 1, got 0", "for greedy decoding set temperature to 0")
        if self.temperature == 0.0 and (self.top_k != 0 or self.top_p != 1.0 or self.min_p != 0.0):
            raise RequestError(
                f"temperature 0 is greedy and contradicts top_k {self.top_k}, top_p {self.top_p} and min_p {self.min_p}",
                "leave top_k at 0, top_p at 1 and min_p at 0, or raise the temperature",
            )
        if self.temperature == 0.0 and self.n > 1:
            raise RequestError(
                f"temperature 0 would draw the same completion {self.n} times", "raise it, or leave n at 1"
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs {self.top_logprobs} needs logprobs", "set logprobs to true")

    @property
    def has_penalties(self) -> bool:
        """Whether drawn tokens change the logits of later ones."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def for_sample(self, index: int) -> SamplingParams:
        """What sample ``index`` of ``n`` is drawn with: a request with these parameters gives the same bits.

        Sample 0 has the seed as it is, the others seeds derived from it (:func:`derived_seed`).
        """
        _check_int("the index of a sample", index, 0, self.n - 1)
        if self.n == 1:
            return self
        sample = copy(self)  # all else was checked already, and may be much
        object.__setattr__(sample, "n", 1)
        object.__setattr__(sample, "seed", derived_seed(self.seed, index))
        return sample


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _as_tuple(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, bytes | Mapping) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, got {values!r}")
    return tuple(values)


def _as_bias(biases: object) -> dict[int, float]:
    """A copy of the mapping, in order of the ids. Raises RequestError for what is no bias."""
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {biases!r}")
    if not _are_biases(biases):
        for token, bias in biases.items():
            _check_int("a token id of logit_bias", token, 0, None)
            _check_float(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
    return {token: float(biases[token]) for token in sorted(biases)}


def _are_biases(biases: Mapping[Any, Any]) -> bool:
    """Whether all of them are plainly what they should be: there may be one for each token of a vocabulary."""
    if not biases or set(map(type, biases)) != {int} or not set(map(type, biases.values())) <= {int, float}:
        return False
    return min(biases) >= 0 and all(-MAX_BIAS <= bias <= MAX_BIAS for bias in biases.values())


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}")


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, got {value!r}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} must be {_range(low, high)}, got {value}")


def _check_float(name: str, value: object, low: float, high: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}")
    if isinstance(value, int) and abs(value) > _LARGEST_WHOLE:
        raise RequestError(f"{name} must be {_range(low, high)}, got a whole number of {len(str(abs(value)))} digits")
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        raise RequestError(f"{name} must be {_range(low, high)}, got {value}")


_LARGEST_WHOLE = 2**63  # far below where a float overflows


def _range(low: float, high: float | None) -> str:
    ends = [end if isinstance(end, int) else f"{end:g}" for end in (low, high) if end is not None]
    return f"at least {ends[0]}" if high is None else f"from {ends[0]} to {ends[1]}"


MAX_PRIORITY = 10


@dataclass(frozen=True)
class CacheHints:
    """What the prefix cache does for a request. None of it changes a bit of the answer."""

    use: bool = True
    """False: nothing is read from the cache or put there, nor is another's prefix waited for."""
    borders: tuple[int, ...] = ()
    """Counts of prompt tokens after which the state is worth keeping: where later prompts may go on otherwise."""
    answer: bool = True
    """Whether the state after the answer is kept, for a next turn."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "borders", _as_tuple("borders", self.borders))
        _check_bool("use", self.use)
        _check_bool("answer", self.answer)
        for border in self.borders:
            _check_int("a border", border, 1, None)
        if list(self.borders) != sorted(set(self.borders)):
            raise RequestError(f"borders must rise, got {list(self.borders)}")


@dataclass(frozen=True)
class RequestOptions:
    """How a request is served, beside what it asks of the sampler. None of it changes a bit of the answer."""

    client: str = ""
    """Whose it is: slots and rows are shared fairly over clients."""
    priority: int = 0
    """From -10 to 10: what is served first of one client, and up to a point between clients; it rises with waiting."""
    deadline_s: float | None = None
    """Seconds from now until the request must have ended; past it, it ends with an error."""
    cache: CacheHints = CacheHints()
    progress: bool = False
    """Post Deltas that tell how much of the prompt is read."""

    def __post_init__(self) -> None:
        if not isinstance(self.client, str):
            raise RequestError(f"client must be a text, got {self.client!r}")
        _check_int("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        _check_bool("progress", self.progress)
        if self.deadline_s is not None:
            _check_float("deadline_s", self.deadline_s, 0.0, None)


@dataclass(frozen=True)
class Timings:
    """Wall time of one request in ms: waiting for a slot, prompt, decoding."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    wait_ms: float = 0.0
    """The part of ``queue_ms`` in which another request was reading the beginning of this one's prompt."""


@dataclass(frozen=True)
class PromptProgress:
    """Tokens of a prompt: in all, taken from the cache, and read so far (those from the cache among them)."""

    total: int
    cached: int
    done: int


@dataclass(frozen=True)
class CacheUse:
    """What a request did not have to read; samples of one prompt are one request."""

    cached_tokens: int = 0
    source: str = "none"
    """"none", "memory", "disk", or "shared": from a request that was reading the same beginning."""
    miss: str = "off"
    """Why nothing was found, empty where something was: "off" (this engine has no cache), "disabled" (the request
    wanted none), "short" (too few tokens to keep), "unknown" (nothing that is kept begins so), "changed" (something
    does, but goes on otherwise before its first kept state)."""


@dataclass(frozen=True)
class KeptState:
    """A sequence to go on from: the state after ``tokens``, and the logits that follow them.

    ``tokens`` are the prompt and every accepted token; text cut off by a stop string is not in it. A value: it belongs
    to no slot, and any number of requests may start from the same one.
    """

    saved: SavedState
    tokens: tuple[int, ...]
    logits: np.ndarray | None
    """float32 [vocab]; None where nothing was seen yet, so that a request needs a prompt to go on."""
    initial: str = ""
    """sha-256 (hex) of the tuned state that the sequence began from; empty where it began from zeros."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token and the natural log of its probability as the model gives it, whatever it was sampled with.

    Over the whole vocabulary, before bias, bans, penalties, temperature and filters; float64.
    """

    token_id: int
    logprob: float
    token_bytes: bytes
    """Exact bytes, which may be part of a character; empty for ends of text and unused ids."""
    top: tuple[TokenLogprob, ...] = ()
    """The likeliest tokens in its place, likeliest first, ties to the lowest id; their own ``top`` is empty."""

    @property
    def text(self) -> str:
        """The bytes as text, U+FFFD for what is no whole character."""
        return self.token_bytes.decode("utf-8", "replace")


@dataclass(slots=True)  # one is made for every token, and a frozen one takes three times as long
class Delta:
    """What one step added to a request; a value, not to be changed.

    ``text`` may be empty while a stop string or a character is undecided.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    """None while it runs; "stop" (end of text, stop id, stop string), "length", "abort" or "error"."""
    timings: Timings | None = None
    """Set on the last Delta."""
    state: KeptState | None = None
    """Set on the last Delta of a request that asked to keep its state."""
    error: KittiwakeError | None = None
    """Why, when finish_reason is "error"."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of ``token_ids`` where the request asked for them."""
    index: int = 0
    """Which of the request's ``n`` completions this belongs to, where they are streamed together."""
    progress: PromptProgress | None = None
    """Set on Deltas of a request that asked for it while its prompt is read; they have no tokens."""
    cache: CacheUse | None = None
    """Set on the last Delta."""


@dataclass(frozen=True)
class Completion:
    """A finished answer. ``token_ids`` are all drawn tokens, an ending token included; ``text`` stops before a stop string."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    timings: Timings = field(default_factory=Timings)
    state: KeptState | None = None
    """Where the request asked to keep it: the state after the last accepted token."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of ``token_ids`` where the request asked for them."""
    others: tuple[Completion, ...] = ()
    """Samples 1 to n - 1 where the request asked for several; this one is sample 0."""

    @property
    def completion_tokens(self) -> int:
        """How many tokens were drawn."""
        return len(self.token_ids)

    @property
    def choices(self) -> tuple[Completion, ...]:
        """All ``n`` samples of the request in order, this one first."""
        return (self, *self.others)
