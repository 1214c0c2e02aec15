"""Laws of states as values, and of scores: what was kept, saved, forked or scored has the bits of one plain run."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from kittiwake.config import EngineConfig
from kittiwake.engine.request import Completion, KeptState, SamplingParams
from kittiwake.llm import LLM
from kittiwake.load import Loaded
from kittiwake.verify.trace import Trace, fingerprint

CUTS = 9
FORKS = 4
SCORES = 6

_PARAMS = (
    SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=7, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=1, temperature=1.2, seed=12, ignore_eos=True),
)


def restored(loaded: Loaded, traces: Sequence[Trace], draw: random.Random) -> Iterator[bool]:
    """An answer kept in memory and gone on with, against prompt, answer and the rest in one."""
    llm = LLM.from_loaded(loaded, EngineConfig(slots=2))
    for index in range(CUTS):
        kept, more = _cut(llm, traces, draw, index)
        yield _goes_on(llm, kept, more, _PARAMS[index % len(_PARAMS)], kept)


def restored_from_file(loaded: Loaded, traces: Sequence[Trace], draw: random.Random) -> Iterator[bool]:
    """The same through a file."""
    llm = LLM.from_loaded(loaded, EngineConfig(slots=2))
    with tempfile.TemporaryDirectory(prefix="kittiwake-verify-") as folder:
        for index in range(CUTS):
            kept, more = _cut(llm, traces, draw, index)
            path = Path(folder) / f"{index}.state"
            llm.save_state(kept, path)
            read = llm.load_state(path)
            yield _mark(read) == _mark(kept) and _goes_on(llm, kept, more, _PARAMS[index % len(_PARAMS)], read)


def forked(loaded: Loaded, traces: Sequence[Trace], draw: random.Random) -> Iterator[bool]:
    """One state, several requests at once from it, each against a fresh one; the state itself stays as it was."""
    llm = LLM.from_loaded(loaded, EngineConfig(slots=8))
    for index in range(FORKS):
        kept, more = _cut(llm, traces, draw, index)
        before = _mark(kept)
        endings = [more, [], more[:1], more]
        params = [_PARAMS[place % len(_PARAMS)] for place in range(len(endings))]
        forks = llm.generate(endings, params, start_from=kept, keep_state=True)
        fresh = llm.generate([[*kept.tokens, *ending] for ending in endings], params, keep_state=True)
        yield before == _mark(kept) and [_answer(one) for one in forks] == [_answer(one) for one in fresh]


def scored(loaded: Loaded, traces: Sequence[Trace], draw: random.Random) -> Iterator[bool]:
    """Log-probabilities that generation reports, against those of scoring the same tokens, alone and packed."""
    llm = LLM.from_loaded(loaded, EngineConfig(slots=8))
    prompts = [traces[index % len(traces)].ids for index in range(SCORES)]
    params = [
        SamplingParams(
            max_tokens=9, temperature=index % 3 / 2, seed=index, logprobs=True, top_logprobs=2, ignore_eos=True
        )
        for index in range(SCORES)
    ]
    answers = llm.generate(prompts, params)
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    packed = llm.score_all(texts, top=2)
    for text, answer, found in zip(texts, answers, packed, strict=True):
        count = len(answer.token_ids)
        drawn = [(one.logprob, [(top.token_id, top.logprob) for top in one.top]) for one in answer.logprobs or ()]
        places = zip(found.top_ids[-count:].tolist(), found.top_log_probs[-count:].tolist(), strict=True)
        tops = [list(zip(*place, strict=True)) for place in places]
        same = drawn == list(zip(found.log_probs[-count:].tolist(), tops, strict=True))
        yield same and llm.score(text).tobytes() == found.log_probs.tobytes()


def _cut(llm: LLM, traces: Sequence[Trace], draw: random.Random, index: int) -> tuple[KeptState, list[int]]:
    """A kept state somewhere inside a sequence, and tokens to go on with, sometimes none."""
    ids = traces[2 + index % (len(traces) - 2)].ids
    cut = draw.randint(1, len(ids) - 1)
    kept = llm.generate([ids[:cut]], _PARAMS[index % len(_PARAMS)], keep_state=True)[0].state
    assert kept is not None, "a request that ended well keeps its state"
    return kept, ids[cut:] if index % 3 else []


def _goes_on(llm: LLM, kept: KeptState, more: list[int], params: SamplingParams, start: KeptState) -> bool:
    """Whether ``start`` continues as a fresh run of all tokens does."""
    after = llm.generate([more], params, start_from=start, keep_state=True)[0]
    fresh = llm.generate([[*kept.tokens, *more]], params, keep_state=True)[0]
    return _answer(after) == _answer(fresh)


def _answer(completion: Completion) -> tuple[tuple[int, ...], object]:
    assert completion.state is not None
    return completion.token_ids, _mark(completion.state)


def _mark(state: KeptState) -> tuple[object, ...]:
    assert state.logits is not None
    return state.tokens, state.saved.position, fingerprint(state.logits, state.saved.parts)
