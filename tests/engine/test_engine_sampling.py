"""Bias, penalties, log-probabilities and several samples, through the engine: the same bits however they are run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kittiwake.bench.shapes import random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.engine import request as request_module
from kittiwake.engine.engine import Engine
from kittiwake.engine.request import Delta, KeptState, SamplingParams
from kittiwake.errors import KittiwakeError, RequestError
from kittiwake.llm import LLM
from kittiwake.load import Loaded, load_tensors
from kittiwake.ops.log_softmax import reference as log_softmax
from kittiwake.ops.sampling import reference
from kittiwake.text.stops import StopMatcher

PROMPT = list(b"The sea was calm, and the sea was")
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5, logprobs=True),
    SamplingParams(max_tokens=7, seed=3, min_p=0.05, presence_penalty=1.5, logprobs=True, top_logprobs=4),
    SamplingParams(max_tokens=8, seed=4, top_p=0.8, top_k=30, temperature=1.3, sampling_order="rwkv"),
    SamplingParams(max_tokens=6, seed=5, logit_bias={65: 6.0, 66: 6.0, 10: -100}, frequency_penalty=1.0),
]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_tensors(random_rwkv7(small(), 0), EngineConfig(threads=2))


def _engine(loaded: Loaded, slots: int = 4, chunk: int = 0) -> Engine:
    return Engine(loaded.model, loaded.tokenizer, slots=slots, prefill_chunk=chunk, max_rows=512)


def _run(engine: Engine, numbers: list[int]) -> list[list[Delta]]:
    found: list[list[Delta]] = [[] for _ in numbers]
    while True:
        for number, deltas in zip(numbers, found, strict=True):
            if not deltas or deltas[-1].finish_reason is None:
                deltas += engine.collect(number)
        if not engine.step():
            return found


def _told(deltas: list[Delta]) -> list[object]:
    return [(delta.text, delta.token_ids, delta.logprobs, delta.finish_reason) for delta in deltas]


def _alone(loaded: Loaded, params: SamplingParams, prompt: list[int] = PROMPT, **more: Any) -> list[Delta]:
    engine = _engine(loaded, slots=1)
    return _run(engine, [engine.add(prompt, params, **more)])[0]


def _ids(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize(("slots", "chunk"), [(1, 0), (2, 1), (4, 5), (8, 3)])
def test_in_a_crowd_on_reused_slots_in_any_chunks_the_same_bits(loaded: Loaded, slots: int, chunk: int) -> None:
    prompts = [PROMPT[: 5 + 3 * index] for index in range(8)]
    expected = [_told(_alone(loaded, PARAMS[index % 4], prompt)) for index, prompt in enumerate(prompts)]
    engine = _engine(loaded, slots, chunk)
    numbers = [engine.add(prompt, PARAMS[index % 4]) for index, prompt in enumerate(prompts)]
    assert [_told(deltas) for deltas in _run(engine, numbers)] == expected
    again = [engine.add(prompt, PARAMS[index % 4]) for index, prompt in reversed(list(enumerate(prompts)))]
    assert [_told(deltas) for deltas in reversed(_run(engine, again))] == expected


@pytest.mark.parametrize("params", PARAMS)
def test_the_engine_draws_what_the_reference_draws(loaded: Loaded, params: SamplingParams) -> None:
    """Each step from the kept logits, the tokens before it and the position alone."""
    kept = _alone(loaded, replace(params, max_tokens=1), keep_state=True)
    found = _ids(_alone(loaded, params))
    drawn: list[int] = []
    engine = _engine(loaded)
    slot = engine.runner.states.allocate()
    logits = engine.runner.run(_batch(slot, PROMPT))[0]
    for token in found:
        row = reference.adjusted(
            logits,
            {i: -np.inf if bias == -100 else bias for i, bias in params.logit_bias.items()},
            PROMPT,
            drawn,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        assert token == reference.draw(
            row,
            params.temperature,
            params.top_k,
            params.top_p,
            params.seed,
            len(PROMPT) + len(drawn),
            params.min_p,
            params.sampling_order == "rwkv",
        )
        drawn.append(token)
        logits = engine.runner.run(_batch(slot, [token]))[0]
    assert _ids(kept) == found[:1]


def _batch(slot: int, ids: list[int]) -> Any:
    from kittiwake.engine.batch import Batch

    return Batch.pack([(slot, ids)])


def test_logprobs_stand_beside_their_tokens(loaded: Loaded) -> None:
    llm = LLM.from_loaded(loaded)
    params = SamplingParams(max_tokens=5, seed=1, logprobs=True, top_logprobs=3, temperature=0.5, logit_bias={65: 5.0})
    completion = llm.generate([PROMPT], params)[0]
    assert completion.logprobs is not None
    assert tuple(one.token_id for one in completion.logprobs) == completion.token_ids
    for one in completion.logprobs:
        assert one.token_bytes == bytes([one.token_id])
        assert len(one.top) == 3
        assert [other.logprob for other in one.top] == sorted((other.logprob for other in one.top), reverse=True)
        assert one.logprob <= one.top[0].logprob
    engine = _engine(loaded)
    slot = engine.runner.states.allocate()
    logits = engine.runner.run(_batch(slot, PROMPT))
    expected = log_softmax.log_probs(logits, np.array([completion.token_ids[0]]))[0]
    assert completion.logprobs[0].logprob == pytest.approx(expected, abs=1e-12)
    assert llm.generate([PROMPT], replace(params, logprobs=False, top_logprobs=0))[0].logprobs is None


@pytest.mark.parametrize(("slots", "chunk"), [(1, 0), (2, 4), (8, 1)])
@pytest.mark.parametrize("params", [one for one in PARAMS if one.temperature > 0])
def test_n_samples_are_n_requests(loaded: Loaded, params: SamplingParams, slots: int, chunk: int) -> None:
    several = replace(params, n=4)
    expected = [_told(_alone(loaded, several.for_sample(index))) for index in range(4)]
    engine = _engine(loaded, slots, chunk)
    numbers = engine.add_samples(PROMPT, several)
    assert [_told(deltas) for deltas in _run(engine, numbers)] == expected
    assert len({str(one) for one in expected}) > 1
    assert engine.free_slots == slots


def test_what_n_samples_have_in_common_is_made_once(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = _engine(loaded, slots=2), list[str]()
    params = SamplingParams(max_tokens=3, n=50, stop=("a" * 60_000, "b"), logit_bias=dict.fromkeys(range(200), 1.0))
    link, check = StopMatcher._link, request_module._as_bias
    monkeypatch.setattr(StopMatcher, "_link", lambda self: (made.append("stops"), link(self))[1])
    monkeypatch.setattr(request_module, "_as_bias", lambda biases: (made.append("bias"), check(biases))[1])
    numbers = engine.add_samples(PROMPT, params)
    assert len(numbers) == 50 and made == ["stops"]
    for number in numbers:
        engine.forget(number)


def test_the_prompt_of_n_samples_is_eaten_once(loaded: Loaded) -> None:
    engine = _engine(loaded, slots=8)
    rows: list[int] = []
    run = engine.runner.run

    def counted(batch: Any) -> np.ndarray:
        rows.append(batch.rows)
        return run(batch)

    engine.runner.run = counted  # type: ignore[method-assign]
    _run(engine, engine.add_samples(PROMPT, SamplingParams(max_tokens=3, n=5, ignore_eos=True)))
    assert sum(rows) == len(PROMPT) + 5 * 2  # the last token of each is drawn and not eaten


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_sample_that_is_aborted_takes_no_other_with_it(loaded: Loaded, steps: int) -> None:
    """Before, while and after the first of them eats the prompt they share."""
    several = replace(PARAMS[1], n=4)
    expected = [_told(_alone(loaded, several.for_sample(index))) for index in range(4)]
    engine = _engine(loaded, slots=2, chunk=len(PROMPT) // 2 + 1)
    numbers = engine.add_samples(PROMPT, several)
    for _ in range(steps):
        engine.step()
    engine.abort(numbers[2])  # waits still
    engine.abort(numbers[0])
    found = _run(engine, numbers)
    assert [found[index][-1].finish_reason for index in (0, 2)] == ["abort", "abort"]
    assert [_told(found[index]) for index in (1, 3)] == [expected[1], expected[3]]
    assert engine.free_slots == 2
    assert not engine.has_work


def test_samples_go_on_from_a_kept_state_and_are_kept(loaded: Loaded) -> None:
    kept = _state(_alone(loaded, replace(PARAMS[1], max_tokens=3), keep_state=True))
    for prompt in ([], [10, 11]):
        several = replace(PARAMS[1], n=3)
        expected = [_alone(loaded, several.for_sample(i), prompt, keep_state=True, start_from=kept) for i in range(3)]
        engine = _engine(loaded, slots=2)
        found = _run(engine, engine.add_samples(prompt, several, keep_state=True, start_from=kept))
        assert [_told(deltas) for deltas in found] == [_told(deltas) for deltas in expected]
        for one, other in zip(found, expected, strict=True):
            assert _state(one).tokens == _state(other).tokens
            assert all(
                np.array_equal(part, _state(other).saved.parts[name]) for name, part in _state(one).saved.parts.items()
            )


def _state(deltas: list[Delta]) -> KeptState:
    state = deltas[-1].state
    assert state is not None
    return state


def test_repetition_reads_the_kept_tokens_and_presence_only_those_drawn_by_this_request(loaded: Loaded) -> None:
    kept = _state(_alone(loaded, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), keep_state=True))
    assert len(kept.tokens) == len(PROMPT) + 8
    everything = [*kept.tokens, 10, 11]
    for params in (
        SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=3.0),
        SamplingParams(max_tokens=8, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0),
    ):
        # as a prompt, the eight drawn before are given ones: repetition reads them, the others do not
        assert _ids(_alone(loaded, params, [10, 11], start_from=kept)) == _ids(_alone(loaded, params, everything))


def test_a_request_of_banned_tokens_ends_alone_and_says_why(loaded: Loaded) -> None:
    everything = {token: -100.0 for token in range(256) if loaded.tokenizer.is_valid(token)}
    engine = _engine(loaded)
    numbers = [engine.add(PROMPT, PARAMS[1]), engine.add(PROMPT, SamplingParams(logit_bias=everything))]
    fine, banned = _run(engine, numbers)
    assert _told(fine) == _told(_alone(loaded, PARAMS[1]))
    assert banned[-1].finish_reason == "error"
    assert isinstance(banned[-1].error, RequestError)
    assert "every one is banned" in str(banned[-1].error)
    with pytest.raises(KittiwakeError, match="every one is banned"):
        LLM.from_loaded(loaded).generate([PROMPT], SamplingParams(logit_bias=everything))


def test_a_bias_on_a_token_that_is_not_there_is_refused(loaded: Loaded) -> None:
    engine = _engine(loaded)
    with pytest.raises(RequestError, match="logit_bias names token 256"):
        engine.add(PROMPT, SamplingParams(logit_bias={256: 1.0}))
    with pytest.raises(RequestError, match="n 2"):
        engine.add(PROMPT, SamplingParams(n=2))
    assert not engine.has_work


def test_generate_groups_samples_by_prompt_and_streams_them_side_by_side(loaded: Loaded) -> None:
    llm = LLM.from_loaded(loaded)
    params = SamplingParams(max_tokens=4, n=3, seed=2, logprobs=True, ignore_eos=True)
    completions = llm.generate([PROMPT, PROMPT[:4]], params)
    assert [len(one.choices) for one in completions] == [3, 3]
    for prompt, completion in zip((PROMPT, PROMPT[:4]), completions, strict=True):
        for index, choice in enumerate(completion.choices):
            single = llm.generate([prompt], params.for_sample(index))[0]
            assert (choice.text, choice.token_ids, choice.logprobs) == (single.text, single.token_ids, single.logprobs)
            assert choice.prompt_tokens == len(prompt)
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for delta in llm.stream(PROMPT, params):
        streamed[delta.index] += delta.token_ids
    assert [tuple(streamed[index]) for index in range(3)] == [one.token_ids for one in completions[0].choices]


def test_closing_a_stream_of_samples_frees_every_slot(loaded: Loaded) -> None:
    llm = LLM.from_loaded(loaded)
    free = llm.engine.free_slots
    deltas = llm.stream(PROMPT, SamplingParams(max_tokens=50, n=3, ignore_eos=True))
    assert isinstance(deltas, Iterator)
    next(deltas)
    deltas.close()  # type: ignore[attr-defined]
    assert llm.engine.free_slots == free
    assert not llm.engine.has_work
