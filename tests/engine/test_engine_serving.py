"""What a server needs of the engine: queue limits, deadlines, progress, figures."""

from __future__ import annotations

import random
import re
import time
import tracemalloc
from typing import Any

import pytest

from kittiwake.engine.prefix import PrefixCache
from kittiwake.engine.request import CacheHints, Delta, RequestOptions, SamplingParams
from kittiwake.engine.stats import QueueLimits, StepReport, Totals
from kittiwake.errors import DeadlineError, QueueFullError, RequestError
from tests.engine.drive import ask, finish, make_engine, prompt_of

PARAMS = SamplingParams(max_tokens=6, seed=1)


def of(client: str = "", **more: Any) -> RequestOptions:
    return RequestOptions(client=client, **more)


# Queue limits


def test_a_full_queue_refuses_with_429_and_takes_again_once_there_is_room() -> None:
    engine = make_engine(slots=2, limits=QueueLimits(max_waiting=3))
    numbers = [engine.add([1, 2], PARAMS) for _ in range(5)]  # two for the free slots, three more wait
    with pytest.raises(QueueFullError, match="5 requests wait already, at most 3 may") as caught:
        engine.add([1, 2], PARAMS)
    assert caught.value.http_status == 429 and caught.value.retry_after_s >= 1
    assert str(caught.value.retry_after_s) in caught.value.hint
    engine.step()
    with pytest.raises(QueueFullError):
        engine.add([1, 2], PARAMS)
    engine.abort(numbers[-1])
    numbers[-1] = engine.add([1, 2], PARAMS)
    outcomes = finish(engine, *numbers)
    assert all(outcome.tokens == outcomes[0].tokens for outcome in outcomes)
    assert engine.stats().refused == 2 and engine.free_slots == 2


def test_one_client_cannot_fill_the_queue_of_the_others() -> None:
    engine = make_engine(slots=1, limits=QueueLimits(max_waiting=10, max_waiting_per_client=2))
    engine.add([1], PARAMS, options=of("a"))
    engine.step()
    for _ in range(2):
        engine.add([1], PARAMS, options=of("a"))
    with pytest.raises(QueueFullError, match="2 requests of this client wait already"):
        engine.add([1], PARAMS, options=of("a"))
    engine.add([1], PARAMS, options=of("b"))


def test_a_refused_request_leaves_nothing() -> None:
    engine = make_engine(slots=1, limits=QueueLimits(max_waiting=1))
    for _ in range(2):
        engine.add([1], PARAMS)
    before = engine.stats()
    for _ in range(20):
        with pytest.raises(QueueFullError):
            engine.add_samples([1], SamplingParams(max_tokens=3, n=4, seed=1))
    assert engine.stats().waiting == before.waiting and len(vars(engine)["_outbox"]) == 2


def test_samples_share_a_long_prompt_until_they_draw() -> None:
    engine = make_engine(slots=4, cache=PrefixCache(1 << 20))
    prompt = prompt_of(200_000)
    tracemalloc.start()
    try:
        numbers = engine.add_samples(prompt, SamplingParams(max_tokens=3, n=64, seed=1))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000  # a copy for each would be 150 MB
    finally:
        tracemalloc.stop()
    for number in numbers:
        engine.forget(number)
    assert engine.free_slots == 4 and not engine.has_work


@pytest.mark.parametrize("wrong", [256, -1, True, 2.0, "a", None])
def test_one_wrong_id_in_a_long_prompt_is_named(wrong: Any) -> None:
    with pytest.raises(RequestError, match=re.escape(f"prompt holds {wrong!r}, which is no token id from 0 to 255")):
        make_engine().add([*prompt_of(100), wrong, *prompt_of(100)], PARAMS)


def test_when_to_come_again_follows_from_how_long_requests_take() -> None:
    totals = Totals()
    assert totals.retry_after_s(10, 2) == 1  # nothing is known yet
    for _ in range(100):
        totals.note_held(6.0)
    assert totals.retry_after_s(9, 2) == 30 and totals.retry_after_s(0, 100) == 1
    assert totals.retry_after_s(10**9, 1) == 600


# Deadlines


@pytest.mark.parametrize("where", ["waiting", "reading", "decoding", "held"])
def test_a_request_past_its_deadline_ends_with_an_error_wherever_it_stands(where: str) -> None:
    engine = make_engine(slots=1 if where == "waiting" else 3, max_rows=10, cache=PrefixCache(1 << 20, min_tokens=4))
    other = engine.add(prompt_of(100), SamplingParams(max_tokens=4, seed=2))
    engine.step()
    prompt = {"waiting": [1], "reading": prompt_of(200, 1), "decoding": [1], "held": prompt_of(99)}[where]
    number = engine.add(prompt, SamplingParams(max_tokens=10_000, ignore_eos=True), options=of(deadline_s=0.05))
    found: list[Delta] = []
    if where != "decoding":
        engine.step()
        time.sleep(0.06)
    begin = time.perf_counter()
    while not found or found[-1].finish_reason is None:
        assert engine.step()
        found += engine.collect(number)
        assert time.perf_counter() - begin < 5
    assert found[-1].finish_reason == "error" and isinstance(found[-1].error, DeadlineError)
    assert found[-1].error.http_status == 504 and "0.05 s" in found[-1].error.message
    assert (len(found) > 1) == (where == "decoding")
    expected = ask(make_engine(), prompt_of(100), SamplingParams(max_tokens=4, seed=2)).tokens
    assert finish(engine, other)[0].tokens == expected
    assert engine.free_slots == engine.stats().slots and engine.stats().held == 0


def test_a_request_that_ends_in_time_is_left_alone() -> None:
    engine = make_engine()
    assert ask(engine, [1], PARAMS, options=of(deadline_s=60.0)).reason == "length"
    assert engine.step() is False


def test_deadlines_of_requests_that_ended_are_forgotten_though_there_is_always_another() -> None:
    engine = make_engine(slots=2)
    engine.add([1], SamplingParams(max_tokens=100_000, ignore_eos=True), options=of(deadline_s=1e6))
    for _ in range(300):
        engine.abort(engine.add([1], PARAMS, options=of(deadline_s=1e6)))
    assert len(engine._deadlines) < 100
    late = engine.add([1], SamplingParams(max_tokens=100_000, ignore_eos=True), options=of(deadline_s=0.0))
    engine.step()
    assert isinstance(engine.collect(late)[-1].error, DeadlineError)


def test_a_deadline_of_nothing_but_expired_requests_moves_the_engine() -> None:
    engine = make_engine()
    number = engine.add([1], PARAMS, options=of(deadline_s=0.0))
    assert engine.step() is True and engine.step() is False
    assert engine.collect(number)[-1].finish_reason == "error" and not engine.has_work


@pytest.mark.parametrize(
    "options",
    [{"deadline_s": -1.0}, {"deadline_s": float("nan")}, {"priority": 11}, {"priority": True}, {"client": 5},
     {"progress": 1}],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        RequestOptions(**options)
    with pytest.raises(RequestError, match="use"):
        CacheHints(use="no")  # type: ignore[arg-type]


# Progress, ends, figures


def test_progress_tells_what_is_read_and_what_was_cached() -> None:
    engine = make_engine(max_rows=10, cache=PrefixCache(1 << 20, min_tokens=4))
    prompt = prompt_of(35)

    def progress(ids: list[int]) -> list[tuple[int, int, int]]:
        outcome = ask(engine, ids, PARAMS, options=of(progress=True))
        told = [delta.progress for delta in outcome.deltas if delta.progress is not None]
        first_token = next(index for index, delta in enumerate(outcome.deltas) if delta.token_ids)
        assert all(delta.progress is None for delta in outcome.deltas[first_token:])
        assert outcome.tokens == ask(make_engine(), ids, PARAMS).tokens
        return [(one.total, one.cached, one.done) for one in told]

    assert progress(prompt) == [(35, 0, done) for done in (0, 10, 20, 30, 35)]
    assert progress(prompt + prompt_of(12, 1)) == [(47, 35, done) for done in (35, 45, 47)]
    assert progress(prompt) == [(35, 35, 35)]
    assert all(delta.progress is None for delta in ask(engine, prompt, PARAMS).deltas)


@pytest.mark.parametrize("cached", [False, True])
def test_every_request_ends_once_with_figures_on_its_last_delta(cached: bool) -> None:
    engine = make_engine(slots=2, max_rows=7, cache=PrefixCache(1 << 20, min_tokens=4) if cached else None)
    ended: dict[int, list[Delta]] = {}
    numbers = []
    for index in range(12):
        params = SamplingParams(max_tokens=1 + index, seed=index, stop=("e", " ") if index % 3 else ())
        numbers += engine.add_samples(prompt_of(5 + index), params, keep_state=index % 4 == 0)
        if index % 5 == 4:
            engine.abort(numbers[-2])
        engine.step()
    while engine.has_work:
        engine.step()
    for number in numbers:
        ended[number] = engine.collect(number)
    for deltas in ended.values():
        assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert [delta.timings is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[-1].cache is not None
    stats = engine.stats()
    assert sum(stats.finished.values()) == len(numbers) and stats.finished["abort"] == 2
    assert stats.generated_tokens == sum(len(delta.token_ids) for one in ended.values() for delta in one)
    assert (stats.running, stats.waiting, stats.held, stats.free_slots) == (0, 0, 0, 2)


def test_all_news_can_be_collected_at_once() -> None:
    engine = make_engine(slots=3)
    numbers = [engine.add([number], SamplingParams(max_tokens=4, seed=number)) for number in range(1, 6)]
    found: dict[int, list[Delta]] = {number: [] for number in numbers}
    assert engine.collect_all() == []
    while engine.has_work:
        engine.step()
        for delta in engine.collect_all():
            found[delta.request_id].append(delta)
        assert engine.collect_all() == []
    for number, deltas in found.items():
        expected = ask(make_engine(), [number], SamplingParams(max_tokens=4, seed=number))
        assert [delta.token_ids for delta in deltas] == [delta.token_ids for delta in expected.deltas]
        with pytest.raises(RequestError, match="not known"):
            engine.collect(number)
    gone = engine.add([1], PARAMS)
    engine.step()
    engine.forget(gone)
    assert engine.collect_all() == []


def test_the_observer_is_told_of_every_step() -> None:
    engine = make_engine(slots=3, max_rows=10)
    reports: list[StepReport] = []
    engine.observer = reports.append
    finish(engine, engine.add([1, 2], PARAMS), engine.add(prompt_of(25), PARAMS))
    assert [one.rows for one in reports[:3]] == [10, 10, 9]
    assert all(one.rows == one.prefill_rows + one.decode_rows and one.step_ms > 0 for one in reports)
    assert sum(one.prefill_rows for one in reports) == 27
    assert sum(one.decode_rows for one in reports) == 2 * 5  # the last token of an answer is not read
    assert max(one.sequences for one in reports) == 2


def test_timings_add_up_to_the_whole() -> None:
    engine = make_engine(slots=1, cache=PrefixCache(1 << 20, min_tokens=4))
    begin = time.perf_counter()
    numbers = [engine.add(prompt_of(50), PARAMS) for _ in range(3)]
    outcomes = finish(engine, *numbers)
    whole_ms = (time.perf_counter() - begin) * 1e3
    for outcome in outcomes:
        timings = outcome.deltas[-1].timings
        assert timings is not None
        assert timings.queue_ms + timings.prefill_ms + timings.decode_ms <= whole_ms
        assert 0 <= timings.wait_ms <= timings.queue_ms


def test_requests_that_wait_for_anothers_prompt_count_as_waiting() -> None:
    """Else the queue would have no end for prompts that begin alike."""
    limits = QueueLimits(max_waiting=5, max_waiting_per_client=4)
    engine = make_engine(slots=2, max_rows=5, cache=PrefixCache(1 << 20, min_tokens=4), limits=limits)
    prompt = prompt_of(100)
    engine.add(prompt, PARAMS, options=of("a"))
    engine.step()

    def add_many(client: str) -> None:
        for _ in range(10):
            engine.add(prompt, PARAMS, options=of(client))
            engine.step()

    with pytest.raises(QueueFullError, match="of this client"):
        add_many("a")
    assert engine.stats().held == 5  # one for the free slot
    with pytest.raises(QueueFullError, match="at most 5 may"):
        add_many("b")


INTERNALS = ("_requests", "_outbox", "_fresh", "_deadlines", "_of_client")


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_of_requests_that_came_and_went_in_every_way(seed: int) -> None:
    draw = random.Random(seed)
    cache = PrefixCache(40_000, min_tokens=3)
    engine = make_engine(slots=4, chunk=4, max_rows=draw.choice([8, 64]), cache=cache, limits=QueueLimits(20, 8))
    texts = [prompt_of(30, number) for number in range(4)]
    ends: dict[int, int] = {}
    alive: set[int] = set()
    for _ in range(400):
        what = draw.random()
        if what < 0.45:
            prompt = draw.choice(texts)[: draw.randint(1, 30)] + prompt_of(draw.randint(0, 5), draw.randint(0, 9))
            params = SamplingParams(max_tokens=draw.randint(1, 9), seed=1, n=draw.choice([1, 1, 3]), stop=("e",))
            options = RequestOptions(
                client=draw.choice("abc"),
                priority=draw.randint(-2, 2),
                deadline_s=draw.choice([None, 0.0, 0.003, 60.0]),
                progress=draw.random() < 0.5,
                cache=CacheHints(use=draw.random() < 0.8, answer=draw.random() < 0.5),
            )
            try:
                alive.update(engine.add_samples(prompt, params, options=options, keep_state=draw.random() < 0.2))
            except QueueFullError:
                pass
        elif what < 0.55 and alive:
            engine.forget(gone := draw.choice(sorted(alive)))
            alive.discard(gone)
        elif what < 0.6 and alive:
            engine.abort(draw.choice(sorted(alive)))
        else:
            engine.step()
        for delta in engine.collect_all():
            if delta.finish_reason is not None:
                ends[delta.request_id] = ends.get(delta.request_id, 0) + 1
                alive.discard(delta.request_id)
        stats = engine.stats()
        assert stats.cache is not None and stats.cache.bytes <= stats.cache.budget_bytes
        assert stats.running + stats.free_slots == stats.slots and stats.held >= 0
    while engine.has_work:
        engine.step()
    for delta in engine.collect_all():
        if delta.finish_reason is not None:
            ends[delta.request_id] = ends.get(delta.request_id, 0) + 1
            alive.discard(delta.request_id)
    assert not alive and set(ends.values()) == {1}
    assert engine.free_slots == 4 and not engine.step()
    assert not any(vars(engine)[name] for name in INTERNALS)
    scheduler = vars(engine)["_scheduler"]
    assert not scheduler.running and not scheduler.waiting
    assert not scheduler.shares.slots and not vars(scheduler.waiting)["_queues"]


def test_a_thousand_abandoned_requests_leave_every_slot_free() -> None:
    engine = make_engine(slots=8, max_rows=64, cache=PrefixCache(1 << 20, min_tokens=4))
    for number in range(1000):
        one = engine.add(prompt_of(20, number % 7), SamplingParams(max_tokens=1000, ignore_eos=True))
        if number % 3:
            engine.step()
        engine.forget(one)
    assert engine.free_slots == 8 and not engine.has_work
    assert not any(vars(engine)[name] for name in INTERNALS)
