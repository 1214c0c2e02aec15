"""Cached = fresh: whatever a request does not read itself, its answer has the same bits."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.engine.engine import Engine
from kittiwake.engine.prefix import PrefixCache
from kittiwake.engine.request import CacheHints, KeptState, RequestOptions, SamplingParams
from kittiwake.engine.reuse import GRID_TOKENS
from kittiwake.engine.states import SavedState
from kittiwake.errors import RequestError
from tests.engine.drive import Outcome, ask, finish, make_engine, prompt_of
from tests.tiny import same_state

PARAMS = SamplingParams(max_tokens=12, seed=5, logprobs=True, top_logprobs=3)
REQUESTS = [
    PARAMS,
    SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.4, logprobs=True),
    SamplingParams(max_tokens=9, seed=2, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    SamplingParams(max_tokens=1, seed=3, logit_bias={65: 5.0, 66: -100.0}, logprobs=True),
    SamplingParams(max_tokens=15, seed=4, stop=("e", "\n", " ", "t")),
    SamplingParams(max_tokens=11, seed=6, min_tokens=5, stop_token_ids=tuple(range(0, 256, 7))),
]
NO_ANSWER = RequestOptions(cache=CacheHints(answer=False))


def make(*, min_tokens: int = 4, budget: int = 1 << 26, slots: int = 4, chunk: int = 0, max_rows: int = 2048) -> Engine:
    cache = PrefixCache(budget, min_tokens=min_tokens)
    return make_engine(slots=slots, chunk=chunk, max_rows=max_rows, cache=cache)


def bits(outcome: Outcome) -> object:
    """All that a client may see of an answer."""
    return [
        [delta.text for delta in outcome.deltas if delta.text],
        outcome.tokens,
        [logprob for delta in outcome.deltas for logprob in delta.logprobs],
        outcome.reason,
    ]


def fresh(prompt: list[int], params: SamplingParams) -> object:
    """The answer of an engine without a cache."""
    return bits(ask(make_engine(), prompt, params))


def used(outcome: Outcome) -> tuple[int, str, str]:
    cache = outcome.deltas[-1].cache
    assert cache is not None
    return cache.cached_tokens, cache.source, cache.miss


@pytest.mark.parametrize("params", REQUESTS)
@pytest.mark.parametrize("more", [0, 1, 30])
def test_a_prompt_that_goes_on_from_a_cached_one_is_answered_as_if_it_were_new(
    params: SamplingParams, more: int
) -> None:
    engine, prompt = make(), prompt_of(40)
    longer = prompt + prompt_of(more, seed=1)
    assert bits(ask(engine, prompt, params)) == fresh(prompt, params)
    again = ask(engine, longer, params)
    assert used(again) == (40, "memory", "")
    assert bits(again) == fresh(longer, params)
    assert engine.free_slots == 4 and not engine.has_work


def test_the_same_prompt_twice_needs_nothing_to_be_read() -> None:
    rows: list[int] = []
    engine, prompt = make(), prompt_of(50)
    first = ask(engine, prompt, PARAMS)
    engine.observer = lambda report: rows.append(report.prefill_rows)
    second = ask(engine, prompt, PARAMS)
    assert used(second) == (50, "memory", "") and bits(first) == bits(second)
    assert sum(rows) == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_history_of_prompts_is_answered_as_if_each_were_new(data: st.DataObject) -> None:
    """Prompts that begin alike and part anywhere, together and one after another, under budgets that evict."""
    one_entry = 12_000
    engine = make(
        min_tokens=data.draw(st.sampled_from([1, 3, 16])),
        budget=one_entry * data.draw(st.sampled_from([1, 3, 1000])),
        slots=data.draw(st.integers(1, 4)),
        chunk=data.draw(st.sampled_from([0, 1, 5])),
        max_rows=data.draw(st.sampled_from([2048, 7])),
    )
    texts: list[list[int]] = [prompt_of(30)]
    for _ in range(data.draw(st.integers(1, 3))):
        numbers, expected = [], []
        for _ in range(data.draw(st.integers(1, 4))):
            base = data.draw(st.sampled_from(texts))
            cut = data.draw(st.integers(0, len(base)))
            prompt = base[:cut] + prompt_of(data.draw(st.integers(0 if cut else 1, 20)), data.draw(st.integers(0, 2)))
            borders = data.draw(st.sets(st.integers(1, len(prompt)), max_size=3))
            hints = CacheHints(
                use=data.draw(st.sampled_from([True, True, False])),
                borders=tuple(sorted(borders)),
                answer=data.draw(st.booleans()),
            )
            params = data.draw(st.sampled_from(REQUESTS))
            options = RequestOptions(cache=hints, client=data.draw(st.sampled_from("ab")))
            numbers.append(engine.add(prompt, params, options=options))
            expected.append((prompt, params))
            texts.append(prompt)
            if data.draw(st.booleans()):
                engine.step()
        for outcome, (prompt, params) in zip(finish(engine, *numbers), expected, strict=True):
            assert bits(outcome) == fresh(prompt, params)
            texts.append(prompt + outcome.tokens)
    assert not engine.has_work and engine.free_slots == engine.stats().slots
    assert engine.stats().held == 0


# Where states are taken


def test_the_next_turn_goes_on_from_the_answer() -> None:
    engine, prompt = make(), prompt_of(20)
    params = SamplingParams(max_tokens=10, seed=1)
    first = ask(engine, prompt, params)
    turn = prompt + first.tokens + prompt_of(7, seed=2)
    second = ask(engine, turn, params)
    assert used(second) == (30, "memory", "")
    assert bits(second) == fresh(turn, params)


def test_after_a_stop_string_the_state_of_what_was_accepted_is_kept() -> None:
    prompt = prompt_of(20)
    free = ask(make_engine(), prompt, SamplingParams(max_tokens=40, seed=1)).tokens
    at = next(
        i
        for i in range(8, 38)
        if bytes(free[i : i + 2]).isascii() and bytes(free[i : i + 2]) not in bytes(free[: i + 1])
    )
    params = SamplingParams(max_tokens=40, seed=1, stop=(bytes(free[at : at + 2]).decode(),))
    engine = make()
    outcome = ask(engine, prompt, params)
    assert len(outcome.tokens) == at + 2 and outcome.reason == "stop"
    assert [delta.finish_reason for delta in outcome.deltas].count(None) == len(outcome.deltas) - 1
    turn = prompt + free[:at] + [1, 2, 3]
    assert used(ask(engine, turn, params)) == (20 + at, "memory", "")


def test_a_state_is_taken_at_the_borders_that_the_request_names() -> None:
    engine, prompt = make(), prompt_of(60)
    hints = RequestOptions(cache=CacheHints(borders=(25, 52), answer=False))
    ask(engine, prompt, PARAMS, options=hints)
    assert used(ask(engine, prompt[:30] + [0] * 9, PARAMS, options=NO_ANSWER))[0] == 25
    assert used(ask(engine, prompt[:58] + [0] * 9, PARAMS, options=NO_ANSWER))[0] == 52


def test_a_place_where_texts_part_is_learned() -> None:
    """Three prompts with one beginning, which no border tells."""
    engine, stem = make(), prompt_of(40)
    found = [used(ask(engine, stem + prompt_of(20, seed), PARAMS, options=NO_ANSWER)) for seed in (1, 2, 3)]
    assert found == [(0, "none", "unknown"), (0, "none", "changed"), (40, "memory", "")]


def test_a_long_prompt_has_states_on_a_grid() -> None:
    engine, prompt = make(), prompt_of(3 * GRID_TOKENS + 300)
    ask(engine, prompt, SamplingParams(max_tokens=1), options=NO_ANSWER)
    edited = prompt[: 2 * GRID_TOKENS + 50] + [0] * 50
    again = ask(engine, edited, PARAMS, options=NO_ANSWER)
    assert used(again)[0] == 2 * GRID_TOKENS
    assert bits(again) == fresh(edited, PARAMS)


def test_states_too_close_to_each_other_are_not_taken() -> None:
    engine, prompt = make(min_tokens=16), prompt_of(100)
    hints = RequestOptions(cache=CacheHints(borders=(5, 20, 25, 30, 40, 95), answer=False))
    ask(engine, prompt, PARAMS, options=hints)
    stats = engine.stats().cache
    assert stats is not None and stats.entries == 4  # after 20, 40, 95 and 100 tokens
    ask(engine, prompt_of(14, seed=1), SamplingParams(max_tokens=1))
    assert engine.stats().cache.entries == 4  # type: ignore[union-attr]


def test_a_short_prompt_with_a_long_answer_is_kept_for_the_next_turn() -> None:
    engine, prompt = make(min_tokens=16), prompt_of(5)
    first = ask(engine, prompt, SamplingParams(max_tokens=20, seed=1))
    assert used(first) == (0, "none", "short")
    turn = prompt + first.tokens + [1, 2]
    second = ask(engine, turn, PARAMS)
    assert used(second) == (25, "memory", "") and bits(second) == fresh(turn, PARAMS)


# Going on from another request


def test_a_prompt_that_another_is_reading_is_not_read_again() -> None:
    rows: list[int] = []
    engine, stem = make(max_rows=10, slots=8), prompt_of(60)
    engine.observer = lambda report: rows.append(report.prefill_rows)
    prompts = [stem + prompt_of(5, seed) for seed in range(1, 6)] + [stem]
    numbers = [engine.add(prompt, PARAMS, options=NO_ANSWER) for prompt in prompts]
    engine.step()
    assert engine.stats().held == 5 and engine.stats().running == 1
    outcomes = finish(engine, *numbers)
    assert [bits(outcome) for outcome in outcomes] == [fresh(prompt, PARAMS) for prompt in prompts]
    assert [used(outcome) for outcome in outcomes] == [(0, "none", "unknown")] + [(60, "shared", "")] * 5
    assert sum(rows) <= 60 + 5 * 5 + 5  # the last token of a prompt may be told as a decode row
    waits = [outcome.deltas[-1].timings for outcome in outcomes]
    assert waits[0] is not None and waits[0].wait_ms == 0
    assert all(one is not None and 0 < one.wait_ms <= one.queue_ms for one in waits[1:])


def test_identical_prompts_at_once_are_read_once() -> None:
    engine, prompt = make(slots=8), prompt_of(30)
    numbers = [engine.add(prompt, replace(PARAMS, seed=seed)) for seed in range(6)]
    outcomes = finish(engine, *numbers)
    assert [bits(outcome) for outcome in outcomes] == [fresh(prompt, replace(PARAMS, seed=seed)) for seed in range(6)]
    assert sum(used(outcome)[0] for outcome in outcomes) == 5 * 30


@pytest.mark.parametrize("steps", [1, 3])
def test_those_who_wait_for_a_request_that_is_aborted_read_for_themselves(steps: int) -> None:
    engine, stem = make(max_rows=10), prompt_of(60)
    leader = engine.add(stem, PARAMS)
    others = [engine.add([*stem, seed], PARAMS) for seed in (1, 2)]
    for _ in range(steps):
        engine.step()
    assert engine.stats().held == 2
    engine.abort(leader)
    assert engine.stats().held == 0
    outcomes = finish(engine, *others)
    assert [bits(outcome) for outcome in outcomes] == [fresh([*stem, seed], PARAMS) for seed in (1, 2)]
    assert engine.free_slots == 4


def test_one_who_waits_may_be_aborted() -> None:
    engine, stem = make(max_rows=10), prompt_of(60)
    leader, other = engine.add(stem, PARAMS), engine.add([*stem, 1], PARAMS)
    engine.step()
    engine.abort(other)
    assert engine.collect(other)[-1].finish_reason == "abort"
    assert bits(finish(engine, leader)[0]) == fresh(stem, PARAMS)
    assert engine.free_slots == 4 and engine.stats().held == 0


def test_nobody_waits_for_a_request_of_lower_priority() -> None:
    engine, stem = make(max_rows=10), prompt_of(60)
    engine.add(stem, PARAMS, options=RequestOptions(priority=-1))
    engine.step()
    number = engine.add([*stem, 1], PARAMS)
    engine.step()
    assert engine.stats().held == 0 and engine.stats().running == 2
    assert bits(finish(engine, number)[0]) == fresh([*stem, 1], PARAMS)


def test_samples_of_a_prompt_that_is_cached_draw_the_same() -> None:
    engine, prompt = make(slots=2), prompt_of(30)
    several = replace(PARAMS, n=3)
    expected = [fresh(prompt, several.for_sample(index)) for index in range(3)]
    for _ in range(2):
        assert [bits(one) for one in finish(engine, *engine.add_samples(prompt, several))] == expected


@pytest.mark.parametrize(
    ("options", "cached"),
    [
        (RequestOptions(progress=True), (0, "none", "unknown")),
        (RequestOptions(progress=True, cache=CacheHints(use=False)), (0, "none", "disabled")),
    ],
    ids=["looked up", "opted out"],
)
def test_samples_of_a_fresh_prompt_do_not_say_that_it_was_cached(
    options: RequestOptions, cached: tuple[int, str, str]
) -> None:
    engine, prompt = make(slots=2), prompt_of(30)
    outcomes = finish(engine, *engine.add_samples(prompt, replace(PARAMS, n=3), options=options))
    assert [used(one) for one in outcomes] == [cached] * 3
    told = [delta.progress for one in outcomes for delta in one.deltas if delta.progress]
    assert told and all(one.cached == 0 for one in told)
    stats = engine.stats()
    assert stats.cache is not None
    assert (stats.cached_tokens, stats.cache.tokens_saved, stats.cache.hits) == (0, 0, {})
    again = finish(engine, *engine.add_samples(prompt, replace(PARAMS, n=3)))
    assert {used(one)[0] for one in again} == ({0} if cached[2] == "disabled" else {30})


# Who shares what


def test_a_request_that_opts_out_neither_reads_nor_leaves_anything() -> None:
    engine, prompt = make(), prompt_of(40)
    out = RequestOptions(cache=CacheHints(use=False))
    assert used(ask(engine, prompt, PARAMS, options=out)) == (0, "none", "disabled")
    assert engine.stats().cache.entries == 0  # type: ignore[union-attr]
    ask(engine, prompt, PARAMS)
    again = ask(engine, prompt, PARAMS, options=out)
    assert used(again) == (0, "none", "disabled") and bits(again) == fresh(prompt, PARAMS)


def test_why_nothing_was_found_is_told_and_counted() -> None:
    engine = make(min_tokens=8)
    prompt = prompt_of(40)
    ask(engine, prompt, PARAMS, options=NO_ANSWER)
    found = [
        used(ask(engine, ids, PARAMS, options=NO_ANSWER))[2]
        for ids in (prompt_of(5), prompt_of(40, seed=1), prompt[:20] + [0] * 20, prompt)
    ]
    assert found == ["short", "unknown", "changed", ""]
    stats = engine.stats()
    assert stats.cache is not None
    assert stats.cache.misses == {"unknown": 2, "short": 1, "changed": 1} and stats.cache.hits == {"memory": 1}
    assert stats.cached_tokens == stats.cache.tokens_saved == 40
    assert used(ask(make_engine(), prompt, PARAMS)) == (0, "none", "off")


def test_texts_that_follow_other_states_share_nothing() -> None:
    engine = make()
    one = ask(engine, prompt_of(9), SamplingParams(max_tokens=3), keep_state=True).state
    other = ask(engine, prompt_of(9, seed=1), SamplingParams(max_tokens=3), keep_state=True).state
    lying = KeptState(other.saved, one.tokens, other.logits)  # an upload may say that it has seen anything
    prompt = prompt_of(30, seed=2)
    answers = [bits(ask(make_engine(), prompt, PARAMS, start_from=start)) for start in (None, one, other, lying)]
    assert answers[2] == answers[3] != answers[1]
    for _ in range(2):
        for start, expected in zip((None, one, other, lying), answers, strict=True):
            assert bits(ask(engine, prompt, PARAMS, start_from=start)) == expected
    assert used(ask(engine, prompt, PARAMS, start_from=one)) == (30, "memory", "")


def test_a_tuned_initial_state_is_an_origin_of_its_own() -> None:
    rng = np.random.default_rng(0)
    plain = ask(make_engine(), [1], SamplingParams(max_tokens=1), keep_state=True).state.saved
    parts = {name: rng.normal(size=part.shape).astype(part.dtype) for name, part in plain.parts.items()}
    saved = SavedState(0, parts)
    start = KeptState(saved, (), None, saved.digest)
    engine, prompt = make(), prompt_of(30)
    ask(engine, prompt, PARAMS)
    expected = ask(make_engine(), prompt, PARAMS, start_from=start, keep_state=True)
    for count in (0, 30):
        found = ask(engine, prompt, PARAMS, start_from=start, keep_state=True)
        assert used(found)[0] == count and bits(found) == bits(expected)
        assert same_state(found.state.saved, expected.state.saved)
        assert found.state.initial == start.initial and found.state.tokens == expected.state.tokens


def test_a_state_kept_after_a_hit_is_whole() -> None:
    engine, prompt = make(), prompt_of(30)
    expected = ask(make_engine(), prompt, PARAMS, keep_state=True).state
    for _ in range(2):
        state = ask(engine, prompt, PARAMS, keep_state=True).state
        assert state.tokens == expected.tokens and same_state(state.saved, expected.saved)
        assert state.logits.tobytes() == expected.logits.tobytes()
        state.logits[:] = np.nan  # it is the caller's own


@pytest.mark.parametrize("borders", [(31,), (5, 5), (0,), (7, 3)])
def test_borders_that_cannot_be_are_refused(borders: tuple[int, ...]) -> None:
    engine = make()
    with pytest.raises(RequestError, match="border"):
        engine.add(prompt_of(30), PARAMS, options=RequestOptions(cache=CacheHints(borders=borders)))
    assert not engine.has_work


def test_a_forward_that_fails_leaves_nothing_half_read_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = make(max_rows=10), prompt_of(40)
    run, calls = engine.runner.run, iter(range(1000))

    def fails_once(batch: object) -> np.ndarray:
        if next(calls) == 2:
            engine.runner.states.part("wkv")[:] = np.nan
            raise OSError("device lost")
        return run(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "run", fails_once)
    number = engine.add(prompt, PARAMS, options=RequestOptions(cache=CacheHints(borders=(5, 15, 25))))
    waiting = engine.add([*prompt, 3], PARAMS)
    with pytest.raises(OSError, match="device lost"):
        all(engine.step() for _ in range(50))
    assert engine.collect(number)[-1].finish_reason == "error"
    assert bits(finish(engine, waiting)[0]) == fresh([*prompt, 3], PARAMS)
    assert engine.free_slots == 4


def test_a_client_with_many_prompts_does_not_hold_up_one_who_waits_for_one_of_them() -> None:
    """What they share is read as fast as the one who waits could have read it."""
    stem = prompt_of(200)
    engine = make(max_rows=1000, chunk=10, slots=30)
    decoder = engine.add([1], SamplingParams(max_tokens=5000, ignore_eos=True), options=RequestOptions(client="c"))
    engine.step()
    for seed in range(20):
        prompt = stem if seed == 13 else prompt_of(400, seed=seed + 1)
        engine.add(prompt, SamplingParams(max_tokens=1), options=RequestOptions(client="many"))
    engine.step()
    engine.step()
    number = engine.add([*stem, 7], SamplingParams(max_tokens=1), options=RequestOptions(client="one"))
    steps = 0
    while not engine.collect(number):
        engine.step()
        steps += 1
    assert steps <= 2 * 200 / 10 + 5  # half of the rows of prompts are its own, at least
    engine.forget(decoder)


@pytest.mark.parametrize("how", ["abort", "fault", "deadline"])
def test_an_answer_that_is_whole_stays_so_when_its_state_cannot_be_kept(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt = make(), prompt_of(20)
    params = SamplingParams(max_tokens=8, seed=1)
    number = engine.add(prompt, params, options=RequestOptions(deadline_s=0.5 if how == "deadline" else None))
    outcome = Outcome()
    while len(outcome.tokens) < 8:
        engine.step()
        outcome.deltas += engine.collect(number)
    assert outcome.reason is None  # one step more is for the cache alone
    if how == "abort":
        engine.abort(number)
    elif how == "deadline":
        time.sleep(0.5)
        engine.step()
    else:
        monkeypatch.setattr(engine.runner, "run", lambda _: (_ for _ in ()).throw(OSError("device lost")))
        with pytest.raises(OSError, match="device lost"):
            engine.step()
    outcome.deltas += engine.collect(number)
    assert bits(outcome) == fresh(prompt, params) and outcome.reason == "length"
    assert engine.free_slots == 4 and not engine.has_work
