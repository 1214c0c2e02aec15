"""States that are kept: that of the last accepted token, to the bit, whatever was drawn beyond it."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.engine.batch import Batch
from kittiwake.engine.engine import Engine
from kittiwake.engine.request import KeptState, SamplingParams
from kittiwake.engine.states import StateTable
from kittiwake.errors import RequestError, StateError
from tests.engine.drive import Outcome, Tampered, ask, finish, make_engine, prompt_of
from tests.tiny import run_alone, same_state, tiny_model

PROMPT = prompt_of(9)
LONGEST = 40


@cache
def free_run(seed: int) -> list[int]:
    """What the model goes on with when nothing stops it."""
    return ask(make_engine(slots=1), PROMPT, SamplingParams(max_tokens=LONGEST, seed=seed)).tokens


@cache
def engine_with(chunk: int) -> Engine:
    """One engine for many examples, so that each finds the slots that others left."""
    return make_engine(slots=2, chunk=chunk)


def is_fresh(kept: KeptState) -> bool:
    """Whether state and logits have the bits of a fresh run over the tokens they stand for."""
    logits, state = run_alone(tiny_model().model, kept.tokens)
    return (
        kept.logits.dtype == np.float32 and kept.logits.tobytes() == logits.tobytes() and same_state(kept.saved, state)
    )


def decode(tokens: list[int]) -> tuple[str, bool]:
    """Text of whole characters, and whether bytes of another stand after them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(bytes(tokens)), bool(decoder.getstate()[0])


def accepted(outcome: Outcome, params: SamplingParams) -> list[int]:
    """The tokens whose text stands wholly before the end of the answer, told from the answer alone."""
    tokens = outcome.tokens
    if tokens[-1] in params.stop_token_ids:
        tokens = tokens[:-1]
    text, is_open = decode(tokens)
    if outcome.text == text + "\ufffd" * is_open:
        return tokens
    shown = len(outcome.text)
    ends = [n for n in range(len(tokens) + 1) if not decode(tokens[:n])[1] and len(decode(tokens[:n])[0]) <= shown]
    return tokens[: max(ends)]


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_after_a_stop_string_the_state_is_that_of_a_fresh_run_over_the_accepted_tokens(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 4))
    text, _ = decode(free_run(seed))
    cuts = data.draw(st.lists(st.tuples(st.integers(0, len(text) - 1), st.integers(1, 7)), max_size=3))
    params = SamplingParams(
        max_tokens=data.draw(st.sampled_from([1, 2, 7, LONGEST])),
        seed=seed,
        stop=tuple(text[at : at + length] for at, length in cuts),
        stop_token_ids=data.draw(st.sampled_from([(), (free_run(seed)[20],)])),
    )
    outcome = ask(engine_with(data.draw(st.sampled_from([0, 1, 3]))), PROMPT, params, keep_state=True)
    assert outcome.tokens == free_run(seed)[: len(outcome.tokens)]
    assert outcome.state.tokens == (*PROMPT, *accepted(outcome, params))
    assert is_fresh(outcome.state)


def find_stop(length: int) -> tuple[int, int, str]:
    """(seed, place in its free run, stop string): ASCII characters of one token each that do not occur before."""
    for seed in range(20):
        free = bytes(free_run(seed))
        for at in range(1, LONGEST - length):
            piece = free[at : at + length]
            if piece.isascii() and piece not in free[: at + length - 1]:
                return seed, at, piece.decode()
    raise AssertionError("no free run holds such characters")


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_state_goes_back_over_tokens_that_spelled_a_stop_string(length: int, chunk: int) -> None:
    """The slot has eaten all but the last of them when the string is complete."""
    seed, at, stop = find_stop(length)
    params = SamplingParams(max_tokens=LONGEST, seed=seed, stop=(stop,))
    outcome = ask(engine_with(chunk), PROMPT, params, keep_state=True)
    assert outcome.reason == "stop" and len(outcome.tokens) == at + length
    assert outcome.state.tokens == (*PROMPT, *free_run(seed)[:at])
    assert is_fresh(outcome.state)


def test_text_held_for_long_and_then_taken_back_is_eaten_again() -> None:
    """A stop string that begins like a long run of the answer: what is accepted lies far behind what was eaten."""
    seed = 0
    text, _ = decode(free_run(seed)[: LONGEST - 1])
    # held from the third character on, shown to be no stop string only by the last; the other ends the answer there
    held = text[2:]
    params = SamplingParams(max_tokens=LONGEST, seed=seed, stop=(held, held[:-1] + "no"))
    outcome = ask(engine_with(3), PROMPT, params, keep_state=True)
    assert outcome.text == text[:2] and outcome.reason == "stop"
    assert len(outcome.tokens) > len(outcome.state.tokens) - len(PROMPT) + 20
    assert is_fresh(outcome.state)


def test_in_a_crowd_states_are_kept_as_alone() -> None:
    engine = make_engine(slots=3, chunk=2, max_rows=5)
    requests = [SamplingParams(max_tokens=5 + seed, seed=seed, stop=("e", find_stop(2)[2])) for seed in range(8)]
    numbers = [engine.add(PROMPT, params, keep_state=True) for params in requests]
    for outcome, params in zip(finish(engine, *numbers), requests, strict=True):
        alone = ask(make_engine(), PROMPT, params, keep_state=True)
        assert outcome.tokens == alone.tokens and outcome.state.tokens == alone.state.tokens
        assert same_state(outcome.state.saved, alone.state.saved) and is_fresh(outcome.state)
    assert engine.free_slots == 3


def test_nobody_keeps_a_state_who_did_not_ask() -> None:
    outcome = ask(make_engine(), PROMPT, SamplingParams(max_tokens=3))
    assert outcome.deltas[-1].state is None


def test_an_aborted_request_keeps_nothing() -> None:
    engine = make_engine()
    number = engine.add(PROMPT, SamplingParams(max_tokens=30), keep_state=True)
    engine.step()
    engine.abort(number)
    assert engine.collect(number)[-1].state is None


def test_asking_to_keep_changes_no_token() -> None:
    for seed in range(3):
        params = SamplingParams(max_tokens=LONGEST, seed=seed, stop=(find_stop(2)[2],))
        assert ask(make_engine(), PROMPT, params, keep_state=True).tokens == ask(make_engine(), PROMPT, params).tokens


# Going on


@pytest.fixture(scope="module")
def kept() -> KeptState:
    """After a stop string of two tokens."""
    seed, _, stop = find_stop(2)
    return ask(
        make_engine(), PROMPT, SamplingParams(max_tokens=LONGEST, seed=seed, stop=(stop,)), keep_state=True
    ).state


PARAMS = SamplingParams(max_tokens=15, seed=77, temperature=0.9)


@pytest.mark.parametrize("more", [[], [5], prompt_of(40)], ids=["nothing", "a token", "a prompt"])
@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_going_on_is_as_if_nothing_had_been_kept(kept: KeptState, more: list[int], chunk: int) -> None:
    engine = make_engine(chunk=chunk)
    fresh = ask(engine, [*kept.tokens, *more], PARAMS, keep_state=True)
    again = ask(engine, more, PARAMS, keep_state=True, start_from=kept)
    assert again.tokens == fresh.tokens
    assert again.state.tokens == fresh.state.tokens == (*kept.tokens, *more, *fresh.tokens)
    assert same_state(again.state.saved, fresh.state.saved) and is_fresh(again.state)
    assert again.state.logits.tobytes() == fresh.state.logits.tobytes()


def test_an_answer_may_be_cut_anywhere_and_gone_on_with() -> None:
    whole = free_run(2)
    state, tokens = None, []
    for count in (1, 2, 10, 1, 26):
        params = SamplingParams(max_tokens=count, seed=2)
        outcome = ask(make_engine(), PROMPT if state is None else [], params, keep_state=True, start_from=state)
        state = outcome.state
        tokens += outcome.tokens
    assert tokens == whole


def test_a_kept_state_serves_many_questions_at_once_and_stays_as_it_was(kept: KeptState) -> None:
    before = replace(
        kept, saved=replace(kept.saved, parts={name: part.copy() for name, part in kept.saved.parts.items()}),
        logits=kept.logits.copy(),
    )  # fmt: skip
    engine = make_engine(slots=5)
    questions = [[], [1], [2, 3], prompt_of(20), []]
    numbers = [engine.add(question, PARAMS, start_from=kept) for question in questions]
    for outcome, question in zip(finish(engine, *numbers), questions, strict=True):
        assert outcome.tokens == ask(make_engine(), [*kept.tokens, *question], PARAMS).tokens
    assert same_state(kept.saved, before.saved) and kept.logits.tobytes() == before.logits.tobytes()


def test_a_stop_string_in_the_first_token_gives_back_the_state_that_was_given(kept: KeptState) -> None:
    params = replace(PARAMS, temperature=0.0, ignore_eos=True)
    first = ask(make_engine(), [], params, start_from=kept).tokens[0]
    for stopping in (replace(params, stop_token_ids=(first,)), replace(params, stop=(decode([first])[0] or "�",))):
        outcome = ask(make_engine(), [], replace(stopping, max_tokens=1), keep_state=True, start_from=kept)
        assert outcome.tokens == [first] and outcome.text == ""
        assert outcome.state.tokens == kept.tokens
        assert same_state(outcome.state.saved, kept.saved)
        assert outcome.state.logits.tobytes() == kept.logits.tobytes()


def test_kept_requests_that_need_no_forward_survive_one_that_fails(kept: KeptState) -> None:
    calls = iter(range(100))

    def tamper(batch: Batch, states: StateTable, run: Callable[[], np.ndarray]) -> np.ndarray:
        if next(calls) == 0:
            raise ValueError("first forward")
        return run()

    engine = make_engine(model=Tampered(tamper))
    struck, ready = engine.add(PROMPT, PARAMS), engine.add([], PARAMS, start_from=kept)
    with pytest.raises(ValueError, match="first forward"):
        engine.step()
    assert engine.collect(struck)[-1].finish_reason == "error"
    assert finish(engine, ready)[0].tokens == ask(make_engine(), [], PARAMS, start_from=kept).tokens


# Refusals


@pytest.mark.parametrize("wrong", ["parts", "shape", "logits"])
def test_a_state_of_another_model_is_refused_before_it_takes_a_slot(kept: KeptState, wrong: str) -> None:
    parts = dict(kept.saved.parts)
    logits = kept.logits
    if wrong == "parts":
        parts.pop("wkv")
    elif wrong == "shape":
        parts["wkv"] = parts["wkv"][:, :1]
    else:
        logits = logits[:-1]
    engine = make_engine(slots=1)
    with pytest.raises(StateError):
        engine.add([1], PARAMS, start_from=KeptState(replace(kept.saved, parts=parts), kept.tokens, logits))
    assert engine.free_slots == 1 and not engine.has_work
    assert ask(engine, [1], PARAMS).reason == "length"


def test_an_empty_prompt_needs_a_state_to_go_on_from() -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        make_engine().add([], PARAMS)


def test_logits_of_a_kept_state_are_a_copy() -> None:
    engine = make_engine()
    one, other = (engine.add(PROMPT, replace(PARAMS, seed=seed), keep_state=True) for seed in (1, 2))
    first, second = finish(engine, one, other)
    first.state.logits[:] = np.nan
    assert np.isfinite(second.state.logits).all()
