"""The engine: the same answers alone and in a crowd, slots that come back clean, and errors that stay where they are."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kittiwake.engine.batch import Batch
from kittiwake.engine.request import SamplingParams
from kittiwake.engine.states import StateTable
from kittiwake.errors import KittiwakeError, RequestError
from kittiwake.text.bytes_level import BytesTokenizer
from tests.engine.drive import Outcome, Tampered, ask, finish, make_engine, prompt_of
from tests.tiny import run_alone, tiny_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
REQUESTS = [
    (prompt_of(5), SamplingParams(max_tokens=12, temperature=0.0)),
    (prompt_of(1), SamplingParams(max_tokens=20, seed=1)),
    (prompt_of(67), SamplingParams(max_tokens=3, seed=2, top_p=0.8)),
    (prompt_of(30), SamplingParams(max_tokens=17, seed=3, top_k=5, temperature=0.7)),
    (prompt_of(129), SamplingParams(max_tokens=1, seed=4)),
    (prompt_of(8), SamplingParams(max_tokens=9, seed=5, stop=("e", "\n", " "))),
    (prompt_of(5), SamplingParams(max_tokens=12, temperature=0.0)),
]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Tokens of each request, alone in an engine of its own."""
    return [ask(make_engine(slots=1), prompt, params).tokens for prompt, params in REQUESTS]


# The same tokens, whoever else is there


@pytest.mark.parametrize(
    ("slots", "chunk", "max_rows"),
    [(8, 0, 2048), (2, 0, 2048), (1, 3, 2048), (7, 1, 2048), (7, 16, 20), (5, 0, 3), (7, 2, 1)],
)
def test_a_request_draws_the_same_tokens_alone_and_in_a_crowd(
    alone: list[list[int]], slots: int, chunk: int, max_rows: int
) -> None:
    engine = make_engine(slots=slots, chunk=chunk, max_rows=max_rows)
    numbers = [engine.add(prompt, params) for prompt, params in REQUESTS]
    assert [outcome.tokens for outcome in finish(engine, *numbers)] == alone
    assert engine.free_slots == slots and not engine.has_work


def test_requests_may_come_at_any_time(alone: list[list[int]]) -> None:
    engine = make_engine(slots=3, chunk=10)
    numbers = []
    for index in (3, 6, 0, 4, 2, 5, 1):
        numbers.append((index, engine.add(*REQUESTS[index])))
        engine.step()
    outcomes = finish(engine, *(number for _, number in numbers))
    assert [outcome.tokens for _, outcome in sorted(zip([i for i, _ in numbers], outcomes, strict=True))] == alone


def test_the_first_token_follows_from_the_logits_of_the_prompt(alone: list[list[int]]) -> None:
    prompt, params = REQUESTS[0]
    logits, _ = run_alone(tiny_model().model, prompt)
    assert alone[0][0] == int(logits.argmax())
    for count in range(1, params.max_tokens):
        logits, _ = run_alone(tiny_model().model, prompt + alone[0][:count])
        assert alone[0][count] == int(logits.argmax())


def test_the_seed_changes_the_answer_and_greedy_does_not_read_it() -> None:
    engine = make_engine()
    sampled = {tuple(ask(engine, [1, 2], SamplingParams(max_tokens=12, seed=seed)).tokens) for seed in range(4)}
    greedy = {
        tuple(ask(engine, [1, 2], SamplingParams(max_tokens=12, seed=s, temperature=0.0)).tokens) for s in range(4)
    }
    assert len(sampled) == 4 and len(greedy) == 1


def test_timings_are_those_of_the_request() -> None:
    engine = make_engine(slots=1)
    first, second = (engine.add([1, 2], GREEDY) for _ in range(2))
    one, other = (outcome.deltas[-1].timings for outcome in finish(engine, first, second))
    assert one is not None and other is not None
    assert min(one.queue_ms, one.prefill_ms, one.decode_ms) >= 0
    assert other.queue_ms >= one.prefill_ms + one.decode_ms  # it had to wait for the slot
    assert all(delta.timings is None for delta in finish(engine, engine.add([1], GREEDY))[0].deltas[:-1])


# Ends


class EndingTokenizer(BytesTokenizer):
    """Bytes, but these tokens end a text."""

    def __init__(self, *ends: int) -> None:
        super().__init__()
        self.eos_ids = ends


def test_an_end_of_text_ends_the_answer_unless_it_is_ignored_or_too_early() -> None:
    free = ask(make_engine(), [7, 8], SamplingParams(max_tokens=30, seed=6)).tokens
    assert len(set(free)) > 10
    at = next(i for i in range(4, 30) if free[i] not in free[:i])
    tokenizer = EndingTokenizer(free[at])

    def run(**params: int) -> Outcome:
        return ask(make_engine(tokenizer=tokenizer), [7, 8], SamplingParams(max_tokens=30, seed=6, **params))  # type: ignore[arg-type]

    ended = run()
    assert (ended.tokens, ended.reason) == (free[: at + 1], "stop")
    assert run(ignore_eos=True).tokens == free
    later = run(min_tokens=at + 3)
    assert later.tokens[:at] == free[:at] and free[at] not in later.tokens[: at + 3]
    assert len(later.tokens) >= at + 3
    by_id = ask(make_engine(), [7, 8], SamplingParams(max_tokens=30, seed=6, stop_token_ids=(free[at],)))
    assert (by_id.tokens, by_id.reason) == (free[: at + 1], "stop")


def test_tokens_the_tokenizer_does_not_know_are_never_drawn() -> None:
    tokenizer = BytesTokenizer()
    tokenizer.is_valid = lambda token_id: token_id % 2 == 0 and token_id < 200  # type: ignore[method-assign]
    tokens = ask(make_engine(tokenizer=tokenizer), [1], SamplingParams(max_tokens=60, temperature=3.0)).tokens
    assert all(token % 2 == 0 and token < 200 for token in tokens) and len(set(tokens)) > 20


def test_text_comes_piece_by_piece_and_whole() -> None:
    outcome = ask(make_engine(), [3], SamplingParams(max_tokens=25, seed=9))
    assert outcome.text == bytes(outcome.tokens).decode("utf-8", "replace")
    assert [len(delta.token_ids) for delta in outcome.deltas] == [1] * 25
    assert [delta.finish_reason for delta in outcome.deltas] == [None] * 24 + ["length"]


# Refusals


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([1, 256], GREEDY, "prompt holds 256, which is no token id from 0 to 255"),
        ([-1], GREEDY, "prompt holds -1"),
        ([1.0], GREEDY, "prompt holds 1.0"),
        ([True], GREEDY, "prompt holds True"),
        (["a"], GREEDY, "prompt holds 'a'"),
        ([1], SamplingParams(stop_token_ids=(256,)), "stop_token_ids holds 256"),
        ([1], SamplingParams(stop=("x" * 70_000,)), "stop string"),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_nothing(
    prompt: list[int], params: SamplingParams, message: str
) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.add(prompt, params)
    assert not engine.has_work
    assert engine.step() is False


# The outbox


def test_collecting_empties_the_outbox_and_forgets_after_the_end() -> None:
    engine = make_engine()
    number = engine.add([1], SamplingParams(max_tokens=3, seed=1))
    assert engine.collect(number) == []
    engine.step()
    assert len(engine.collect(number)) == 1 and engine.collect(number) == []
    engine.step()
    engine.step()
    deltas = engine.collect(number)
    assert [delta.finish_reason for delta in deltas] == [None, "length"]
    with pytest.raises(RequestError, match=f"request {number} is not known"):
        engine.collect(number)
    assert engine.step() is False


def test_unknown_requests_are_told_and_aborting_them_is_harmless() -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="request 77 is not known"):
        engine.collect(77)
    engine.abort(77)
    number = engine.add([1], SamplingParams(max_tokens=1))
    finish(engine, number)
    engine.abort(number)
    with pytest.raises(RequestError):
        engine.collect(number)


def test_a_forgotten_request_leaves_nothing_behind() -> None:
    engine = make_engine(slots=1)
    for steps in (0, 1, 9):
        number = engine.add([1, 2, 3], SamplingParams(max_tokens=4))
        for _ in range(steps):
            engine.step()
        engine.forget(number)
        assert engine.free_slots == 1 and not engine.has_work
        with pytest.raises(RequestError, match="not known"):
            engine.collect(number)
    engine.forget(12345)


# Cancellation and reuse


@pytest.mark.parametrize("steps", [0, 1, 4, 20, 25])
def test_an_aborted_request_frees_its_slot_and_the_next_one_finds_it_clean(alone: list[list[int]], steps: int) -> None:
    """Waiting, in the middle of a prompt of 67 fed four a step, and in the middle of decoding."""
    engine = make_engine(slots=1, max_rows=4)
    number = engine.add(prompt_of(67, seed=1), SamplingParams(max_tokens=50, seed=8))
    for _ in range(steps):
        engine.step()
    engine.abort(number)
    assert engine.free_slots == 1 and not engine.has_work
    last = engine.collect(number)[-1]
    assert (last.finish_reason, last.token_ids, last.text) == ("abort", (), "")
    assert ask(engine, *REQUESTS[2]).tokens == alone[2]


def test_aborting_one_of_many_changes_nothing_for_the_others(alone: list[list[int]]) -> None:
    engine = make_engine(slots=3, chunk=5)
    numbers = [engine.add(prompt, params) for prompt, params in REQUESTS]
    for victim in (4, 0, 2):
        engine.step()
        engine.abort(numbers[victim])
    kept = [index for index in range(len(REQUESTS)) if index not in (4, 0, 2)]
    outcomes = finish(engine, *(numbers[index] for index in kept))
    assert [outcome.tokens for outcome in outcomes] == [alone[index] for index in kept]
    assert engine.free_slots == 3


def test_a_slot_serves_many_requests_one_after_another(alone: list[list[int]]) -> None:
    engine = make_engine(slots=1)
    for index in (0, 2, 5, 1, 3, 0):
        assert ask(engine, *REQUESTS[index]).tokens == alone[index]


# Errors


class BoomError(Exception):
    """Raised by a forward."""


def fails_at(call: int) -> Callable[[Batch, StateTable, Callable[[], np.ndarray]], np.ndarray]:
    """A forward that moves the states halfway and fails, at its n-th call only."""
    calls = itertools.count(1)

    def tamper(batch: Batch, states: StateTable, run: Callable[[], np.ndarray]) -> np.ndarray:
        if next(calls) == call:
            states.part("wkv")[:1, batch.slots] = np.nan
            raise BoomError
        return run()

    return tamper


@pytest.mark.parametrize("call", [1, 3])
def test_a_forward_that_fails_ends_its_requests_and_no_other(alone: list[list[int]], call: int) -> None:
    engine = make_engine(slots=2, model=Tampered(fails_at(call)))
    struck = [
        engine.add(prompt_of(4), SamplingParams(max_tokens=9)),
        engine.add(prompt_of(3), SamplingParams(max_tokens=9)),
    ]
    waiting = [engine.add(*REQUESTS[index]) for index in (0, 3, 1)]
    for _ in range(call - 1):
        engine.step()
    with pytest.raises(BoomError):
        engine.step()
    assert engine.free_slots == 2
    for number in struck:
        last = engine.collect(number)[-1]
        assert last.finish_reason == "error" and "broken off" in str(last.error)
    assert [outcome.tokens for outcome in finish(engine, *waiting)] == [alone[index] for index in (0, 3, 1)]


def test_an_interrupt_in_a_forward_leaves_an_engine_that_works(alone: list[list[int]]) -> None:
    def interrupted(batch: Batch, states: StateTable, run: Callable[[], np.ndarray]) -> np.ndarray:
        logits = run()
        if 99 in batch.token_ids:
            raise KeyboardInterrupt
        return logits

    engine = make_engine(slots=1, model=Tampered(interrupted))
    number = engine.add([99], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.collect(number)[-1].finish_reason == "error"
    assert ask(engine, *REQUESTS[1]).tokens == alone[1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_request_and_no_other(
    alone: list[list[int]], value: float, temperature: float
) -> None:
    def spoil(batch: Batch, states: StateTable, run: Callable[[], np.ndarray]) -> np.ndarray:
        logits = run()
        owners = np.searchsorted(batch.starts, batch.want_rows, side="right") - 1
        for row, owner in enumerate(owners):
            if states.positions[batch.slots[owner]] == 205:  # only one prompt is so long
                logits[row] = value
        return logits

    engine = make_engine(slots=8, model=Tampered(spoil))
    numbers = [engine.add(prompt, params) for prompt, params in REQUESTS]
    bad = engine.add(prompt_of(202), SamplingParams(max_tokens=9, temperature=temperature))
    outcomes = finish(engine, *numbers, bad)
    assert [outcome.tokens for outcome in outcomes[:-1]] == alone
    assert outcomes[-1].reason == "error" and len(outcomes[-1].tokens) == 3
    error = outcomes[-1].deltas[-1].error
    assert isinstance(error, KittiwakeError)
    assert ("every one is banned" if value == -np.inf else "not finite") in error.message
    assert engine.free_slots == 8


# Threads and memory


def test_two_threads_drive_one_engine(alone: list[list[int]]) -> None:
    engine = make_engine(slots=2, chunk=7)
    found: dict[int, list[int]] = {}

    def serve(indices: list[int]) -> None:
        for index in indices:
            found[index] = ask(engine, *REQUESTS[index]).tokens

    threads = [threading.Thread(target=serve, args=(indices,)) for indices in ([0, 2, 4, 6], [1, 3, 5])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[index] for index in range(len(REQUESTS))] == alone
    assert engine.free_slots == 2 and not engine.has_work


PEAKS = """
import json, resource
from tests.engine.drive import ask, make_engine, prompt_of
from kittiwake.engine.request import SamplingParams
engine, peaks = make_engine(max_rows=256), []
for length in (64, 8_000, 64_000):
    ask(engine, prompt_of(length), SamplingParams(max_tokens=2))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(json.dumps(peaks))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_prompt() -> None:
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    _, short, long = json.loads(done.stdout)
    assert long <= 1.05 * short


def test_a_fault_while_drawing_ends_its_step_and_leaves_the_engine_usable(
    alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(slots=8)
    numbers = [engine.add(prompt, params) for prompt, params in REQUESTS]
    with monkeypatch.context() as patch:
        patch.setattr("kittiwake.engine.engine.sample", lambda *_: (_ for _ in ()).throw(OverflowError("too large")))
        with pytest.raises(OverflowError):
            all(engine.step() for _ in range(50))
    broken = [number for number in numbers if any(d.finish_reason == "error" for d in engine.collect(number))]
    assert broken
    while engine.has_work:
        engine.step()
    assert engine.free_slots == 8
    assert ask(engine, *REQUESTS[1]).tokens == alone[1]
