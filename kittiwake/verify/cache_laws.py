"""Laws of the prefix cache: a request that goes on from a cached state has the bits of one that read all by itself."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kittiwake.engine.engine import Engine
from kittiwake.engine.prefix import PrefixCache
from kittiwake.engine.prefix_disk import DiskTier
from kittiwake.engine.request import CacheHints, Delta, RequestOptions, SamplingParams
from kittiwake.engine.state_file import StateOwner
from kittiwake.load import Loaded
from kittiwake.verify.trace import Trace, fingerprint

ROUNDS = 3
PROMPTS = 5
_BUDGET_BYTES = 1 << 30
_MIN_TOKENS = 2
MOST_ALIGNMENTS = 16
"""Most places within a block where texts part."""
_BUILD = "verify"

_PARAMS = (
    SamplingParams(max_tokens=6, temperature=0.0, repetition_penalty=1.3, logprobs=True, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=21, ignore_eos=True),
    SamplingParams(max_tokens=1, temperature=1.1, seed=22, logprobs=True, top_logprobs=3, ignore_eos=True),
    SamplingParams(
        max_tokens=7,
        temperature=0.8,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        seed=23,
        ignore_eos=True,
    ),
)

Asked = tuple[list[int], SamplingParams]


def from_memory(loaded: Loaded, traces: Sequence[Trace], draw: random.Random) -> Iterator[bool]:
    """Prompts that begin alike and part anywhere, in crowds and alone, over a cache that fills on the way."""
    cache = PrefixCache(_BUDGET_BYTES, min_tokens=_MIN_TOKENS)
    texts = [list(trace.ids) for trace in traces]
    for _ in range(ROUNDS):
        asked = _prompts(texts, draw)
        fresh = [_answers(_engine(loaded), [one], draw)[0] for one in asked]
        for together in (True, False):
            yield from _compare(_engine(loaded, cache), asked, fresh, draw, together)
        texts += [prompt for prompt, _ in asked]
    yield cache.stats().hits.get("memory", 0) > 0  # else nothing was proved


def from_disk(loaded: Loaded, traces: Sequence[Trace], draw: random.Random) -> Iterator[bool]:
    """The same over states that another cache wrote to files."""
    model = loaded.model
    owner = StateOwner(model.config.family, loaded.digest(), loaded.dtype, model.state_spec, model.config.vocab_size)
    asked = _prompts([list(trace.ids) for trace in traces], draw)
    fresh = [_answers(_engine(loaded), [one], draw)[0] for one in asked]
    with tempfile.TemporaryDirectory(prefix="kittiwake-verify-") as folder:
        hits = 0
        for together in (True, False):
            disk = DiskTier(Path(folder), _BUDGET_BYTES, owner, _BUILD)
            cache = PrefixCache(_BUDGET_BYTES, min_tokens=_MIN_TOKENS, disk=disk)
            yield from _compare(_engine(loaded, cache), asked, fresh, draw, together)
            hits += disk.stats().hits
            cache.close()
        yield hits > 0


def within_a_block(loaded: Loaded, draw: random.Random) -> Iterator[bool]:
    """Texts that part beyond the budget of a block selector, at every place of a block."""
    config, spec = loaded.model.config, loaded.model.state_spec
    block = min(config.selection_block, MOST_ALIGNMENTS)
    first = config.selection_budget + config.selection_block - 1
    ids = [draw.randrange(config.vocab_size) for _ in range(first + block + 1)]
    cuts = [first + place for place in range(block)]
    asked: list[Asked] = [(ids, _PARAMS[0])]
    for index, cut in enumerate(cuts):
        tail = [draw.randrange(config.vocab_size) for _ in range(1 + index % 3)]
        asked.append(([*ids[:cut], *tail], _PARAMS[index % len(_PARAMS)]))
    borders = [tuple(cuts), *((cut,) for cut in cuts)]
    budget = max(_BUDGET_BYTES, 4 * len(asked) * spec.bytes_for(len(ids) + 16))
    cache = PrefixCache(budget, min_tokens=1)
    fresh = [_answers(_engine(loaded), [one], draw)[0] for one in asked]
    engine = _engine(loaded, cache)
    for one, expected, places in zip(asked, fresh, borders, strict=True):
        yield _answers(engine, [one], draw, places) == [expected]
    yield cache.stats().hits.get("memory", 0) >= len(cuts)  # else nothing was proved


def _engine(loaded: Loaded, cache: PrefixCache | None = None) -> Engine:
    return Engine(loaded.model, loaded.tokenizer, slots=8, prefill_chunk=3, max_rows=2048, cache=cache)


def _prompts(texts: Sequence[list[int]], draw: random.Random) -> list[Asked]:
    """New prompts that begin as older ones do; the first is asked twice."""
    asked: list[Asked] = []
    for index in range(PROMPTS):
        base, rest = draw.choice(texts), draw.choice(texts)
        prompt = base[: draw.randint(1, len(base))] + rest[: draw.randint(0, 9)]
        asked.append((prompt, _PARAMS[index % len(_PARAMS)]))
    return [*asked, (asked[0][0], replace(asked[0][1], max_tokens=3))]


def _compare(
    engine: Engine, asked: Sequence[Asked], fresh: Sequence[object], draw: random.Random, together: bool
) -> Iterator[bool]:
    groups = [list(range(len(asked)))] if together else [[index] for index in range(len(asked))]
    for group in groups:
        found = _answers(engine, [asked[index] for index in group], draw)
        yield from (one == fresh[index] for index, one in zip(group, found, strict=True))


def _answers(
    engine: Engine, asked: Sequence[Asked], draw: random.Random, borders: tuple[int, ...] | None = None
) -> list[object]:
    """Text, tokens, log-probabilities and the fingerprint of the kept state of each; raises what ended a request.

    ``borders`` of prompts are where the cache is told that others may part from them; left out: two places at random.
    """
    numbers = []
    for prompt, params in asked:
        places = borders or tuple(sorted({draw.randint(1, len(prompt)) for _ in range(2)}))
        options = RequestOptions(cache=CacheHints(borders=places))
        numbers.append(engine.add(prompt, params, keep_state=True, options=options))
    while engine.has_work:
        engine.step()
    return [_told(engine.collect(number)) for number in numbers]


def _told(deltas: Sequence[Delta]) -> object:
    last = deltas[-1]
    if last.error is not None:
        raise last.error
    assert last.state is not None and last.state.logits is not None
    mark = fingerprint(last.state.logits, last.state.saved.parts)
    return [[(delta.text, delta.token_ids, delta.logprobs) for delta in deltas], last.finish_reason, mark]
