"""The client in an HTTP worker and the engine's loop, over real sockets and a real engine."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq

from kittiwake.engine import named_states
from kittiwake.engine.batch import Batch
from kittiwake.engine.request import SamplingParams
from kittiwake.engine.scoring import Given, score_steps
from kittiwake.errors import OutputError
from kittiwake.llm import LLM
from kittiwake.server import messages as wire
from kittiwake.server import remote_engine
from kittiwake.server.engine_client import AnswerEnd, AnswerEvent, EngineError, Submission
from kittiwake.server.engine_host import FAULT, Caller
from kittiwake.server.remote_engine import RemoteEngine, RemoteStream
from kittiwake.server.transport import private_folder, socket_address
from kittiwake.text.tokenizer import load_tokenizer
from tests.models import tiny_llm, tiny_llm_with

from .running import RunningEngine, client_of, run, running_engine, until

LONG = SamplingParams(max_tokens=100_000, seed=1)


def _ask(text: str, params: SamplingParams | None = None, **more: object) -> Submission:
    return replace(Submission("test", tuple(text.encode()), params or SamplingParams(max_tokens=8)), **more)  # type: ignore[arg-type]


async def _all(stream: RemoteStream) -> list[AnswerEvent]:
    return [event async for events in stream for event in events]


@pytest.fixture
def folder() -> Iterator[Path]:
    with private_folder() as found:
        yield found


@pytest.fixture
def engine(folder: Path) -> Iterator[RunningEngine]:
    with running_engine(folder, slots=4) as found:
        yield found


def script() -> LLM:
    """The same model in an engine of its own: the loop collects whatever there is in the one that it runs."""
    return tiny_llm(slots=4)


def test_an_answer_is_that_of_the_engine_itself(engine: RunningEngine, folder: Path) -> None:
    params = SamplingParams(max_tokens=30, seed=5, logprobs=True, top_logprobs=3)
    expected = script().generate("hello", params)[0]

    async def work() -> None:
        async with client_of(folder) as client:
            events = await _all(await client.submit(_ask("hello", params)))
        assert tuple(token for event in events for token in event.token_ids) == expected.token_ids
        assert "".join(event.text for event in events) == expected.text
        assert tuple(logprob for event in events for logprob in event.logprobs) == expected.logprobs
        ends = [event.end for event in events if event.end is not None]
        assert [end.reason for end in ends] == ["length"]
        assert events[-1].end is ends[0]

    run(work())


def test_what_the_workers_need_to_know_of_the_model_comes_over(engine: RunningEngine, folder: Path) -> None:
    async def work() -> None:
        async with RemoteEngine(folder, "http7") as client:
            with pytest.raises(EngineError, match="loading"):
                _ = client.info
            await client.wait_ready()
            assert client.info == engine.host.info
            assert client.info.tokenizer.open().encode("hi") == engine.llm.encode("hi")
            assert client.info.template is not None and client.info.template.open(client.info.tokenizer.open())

    run(work())


def test_samples_come_in_one_stream_and_each_ends_once(engine: RunningEngine, folder: Path) -> None:
    params = SamplingParams(max_tokens=12, n=3, seed=2)

    async def work() -> None:
        async with client_of(folder) as client:
            events = await _all(await client.submit(_ask("abc", params)))
        ends = [event.index for event in events if event.end is not None]
        assert sorted(ends) == [0, 1, 2]
        for index, sample in enumerate(script().generate("abc", params)[0].choices):
            tokens = tuple(token for event in events if event.index == index for token in event.token_ids)
            assert tokens == sample.token_ids

    run(work())


def test_wrong_requests_are_refused_with_their_status(engine: RunningEngine, folder: Path) -> None:
    async def refused(client: RemoteEngine, submission: Submission) -> tuple[int, str]:
        with pytest.raises(EngineError) as caught:
            await client.submit(submission)
        return caught.value.http_status, caught.value.failure.code

    async def work() -> None:
        async with client_of(folder) as client:
            assert await refused(client, _ask("")) == (400, "")
            assert await refused(client, replace(_ask("x"), prompt_ids=(999,))) == (400, "")
            assert await refused(client, _ask("x", start_from="nobody")) == (404, "state_not_found")
            assert await refused(client, _ask("x", keep_as="no/name")) == (400, "")
            assert len(await _all(await client.submit(_ask("x")))) >= 8
        await until(lambda: engine.is_idle)

    run(work())


def test_a_call_that_cannot_be_read_is_refused_by_its_number(engine: RunningEngine, folder: Path) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(socket_address(folder))
    good = wire.encode_call(4, wire.Submit(_ask("x")))
    socket.send(good.replace(b"max_tokens\x08", b"max_tokens\x00"))
    assert socket.poll(5000)
    (notice,) = wire.decode_notices(socket.recv())
    assert isinstance(notice, wire.Refused)
    assert (notice.call, notice.failure.http_status) == (4, 400)
    assert "max_tokens" in notice.failure.message
    context.destroy()


@pytest.mark.parametrize("how", ["aclose", "cancelled submit", "client gone"])
def test_a_reader_that_leaves_frees_its_slot(engine: RunningEngine, folder: Path, how: str) -> None:
    async def work() -> None:
        async with client_of(folder) as client:
            if how == "cancelled submit":
                task = asyncio.create_task(client.submit(_ask("x", LONG)))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                stream = await client.submit(_ask("x", LONG))
                await anext(stream)
                assert engine.llm.engine.free_slots == 3
            if how == "aclose":
                await stream.aclose()
                await stream.aclose()
            if how != "client gone":
                await until(lambda: engine.is_idle)
        await until(lambda: engine.is_idle)

    run(work())


def test_many_abandoned_streams_leave_nothing_behind(engine: RunningEngine, folder: Path) -> None:
    async def work() -> None:
        async with client_of(folder) as client:
            for _ in range(10):
                streams = await asyncio.gather(*(client.submit(_ask("x" * 50, LONG)) for _ in range(100)))
                await anext(streams[0])
                await asyncio.gather(*(stream.aclose() for stream in streams))
            await until(lambda: engine.is_idle)
            assert not client._streams and not client._waiting
            assert len(await _all(await client.submit(_ask("x")))) >= 8

    run(work())


def test_a_slow_reader_is_bounded_and_dropped(engine: RunningEngine, folder: Path) -> None:
    async def work() -> None:
        async with client_of(folder, max_buffered_bytes=5000) as client:
            slow = await client.submit(_ask("x", LONG))
            quick = await client.submit(_ask("y", SamplingParams(max_tokens=300, ignore_eos=True)))
            assert sum(len(event.token_ids) for event in await _all(quick)) == 300
            await until(lambda: engine.is_idle)
            assert slow._buffered_bytes < 20_000
            with pytest.raises(EngineError) as caught:
                await _all(slow)
            assert caught.value.failure.code == "slow_reader"

    run(work())


def test_one_who_reads_what_comes_is_not_too_slow_however_much_comes_at_once(
    engine: RunningEngine, folder: Path
) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, n=4, seed=1, logprobs=True, top_logprobs=20)

    async def work() -> None:
        async with client_of(folder, max_buffered_bytes=4096) as client:
            events = await _all(await client.submit(_ask("x", params)))
        assert sum(len(event.token_ids) for event in events) == 120

    run(work())


def test_a_worker_that_is_gone_has_its_requests_ended(engine: RunningEngine, folder: Path) -> None:
    async def work() -> None:
        async with client_of(folder, "http1") as client:
            await anext(await client.submit(_ask("x", LONG)))
            waiting = [await client.submit(_ask("x", LONG)) for _ in range(8)]
            assert waiting
            engine.parent.tell("gone http1")
            await until(lambda: engine.is_idle)

    run(work())


def test_a_worker_that_stands_still_loses_its_calls_and_nobody_waits_for_it(folder: Path) -> None:
    async def work() -> None:
        context = zmq.Context()
        stuck = context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
            stuck.setsockopt(option, value)
        stuck.connect(socket_address(folder))
        stuck.send(wire.encode_call(1, wire.Submit(_ask("x" * 10, replace(LONG, logprobs=True, top_logprobs=20)))))
        async with client_of(folder) as client:
            await until(lambda: engine.host.running == 1)
            await until(lambda: engine.host.running == 0, 50)
            assert len(await _all(await client.submit(_ask("x")))) >= 8
        found = []
        while not any(isinstance(notice, wire.Lost) for notice in found):
            assert await asyncio.to_thread(stuck.poll, 5000)
            found = wire.decode_notices(stuck.recv())
        await until(lambda: engine.is_idle)
        context.destroy()

    with running_engine(folder, backlog_bytes=20_000, slots=2) as engine:
        run(work())


def test_an_engine_that_is_gone_is_told_to_everyone_at_once_and_found_again(folder: Path) -> None:
    async def work() -> None:
        with running_engine(folder, slots=2):
            client = RemoteEngine(folder, "http0")
            await client.__aenter__()
            await client.wait_ready()
            stream = await client.submit(_ask("x", LONG))
            await anext(stream)
            waiting = asyncio.create_task(client.submit(_ask("x", LONG)))
            await waiting
        with pytest.raises(EngineError) as caught:
            await _all(stream)
        assert (caught.value.http_status, caught.value.failure.code) == (503, "engine_gone")
        with pytest.raises(EngineError, match="gone"):
            await client.submit(_ask("x"))
        assert not client.is_ready
        with running_engine(folder, slots=2) as engine:
            await until(lambda: client.is_ready)
            assert len(await _all(await client.submit(_ask("x")))) >= 8
            assert engine.is_idle  # nothing of before was sent to it
            await client.__aexit__(None, None, None)

    run(work())


def test_shutting_down_refuses_the_new_and_ends_the_old(engine: RunningEngine, folder: Path) -> None:
    async def work() -> None:
        async with client_of(folder) as client:
            stream = await client.submit(_ask("x", LONG))
            await anext(stream)
            client.stop_taking()
            assert not client.is_ready
            with pytest.raises(EngineError, match="shutting down"):
                await client.submit(_ask("x"))
            assert await anext(stream)
            client.break_off()
            with pytest.raises(EngineError, match="shutting down"):
                await _all(stream)
            await until(lambda: engine.is_idle)

    run(work())


def test_scores_are_those_of_the_model_beside_running_answers(engine: RunningEngine, folder: Path) -> None:
    text = "the old house by the sea " * 30

    async def work() -> None:
        async with client_of(folder) as client:
            stream = await client.submit(_ask("x", LONG))
            await anext(stream)
            scores = await client.score(_ask(text), 2)
            await stream.aclose()
        assert scores.tokens[0] is None
        found = [token.logprob for token in scores.tokens if token is not None]
        assert np.array_equal(np.array(found), engine.llm.score(text))
        assert all(token is None or len(token.top) == 2 for token in scores.tokens)

    run(work())


def test_named_states_are_made_kept_forked_saved_and_loaded(
    engine: RunningEngine, folder: Path, tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=10, seed=4)
    expected = script().generate("Once upon a time", params)[0].token_ids

    async def work() -> None:
        async with client_of(folder) as client:
            made = await client.make_state("story", _ask("Once upon"))
            assert (made.name, made.tokens) == ("story", 9)
            with pytest.raises(EngineError) as caught:
                await client.make_state("story", _ask("Once upon"))
            assert (caught.value.http_status, caught.value.failure.code) == (409, "state_exists")
            fork = await client.fork_state("story", "other")
            assert fork.digest == made.digest
            await client.export_state("other", tmp_path / "other.state")
            await client.delete_state("other")
            again = await client.import_state("third", tmp_path / "other.state")
            assert again.digest == made.digest
            assert [state.name for state in await client.list_states()] == ["story", "third"]
            with pytest.raises(EngineError, match="neither"):
                await client.import_state("bad", Path(__file__))
            events = await _all(await client.submit(_ask(" a time", params, start_from="third", keep_as="told")))
            assert tuple(token for event in events for token in event.token_ids) == expected
            told = await client.get_state("told")
            assert told.tokens > 9 + 7

    run(work())


def test_a_state_that_is_deleted_or_replaced_is_held_by_nobody(engine: RunningEngine, folder: Path) -> None:
    def held() -> weakref.ref[object]:
        return weakref.ref(engine.host._states.get("story").kept)

    async def work() -> None:
        async with client_of(folder) as client:
            await client.make_state("story", _ask("Once upon"))
            first = held()
            await client.get_state("story")
            await _all(await client.submit(_ask("Twice", keep_as="story")))
            second = held()
            await client.list_states()
            await client.delete_state("story")
            await until(lambda: engine.is_idle)
            gc.collect()
            assert first() is None and second() is None

    run(work())


def test_verbs_halt_as_often_as_prompts_do_beside_others(folder: Path) -> None:
    rows: list[int] = []
    with running_engine(folder, slots=4, prefill_chunk=16) as engine:
        model = engine.llm.loaded.model
        works = model.forward

        def forward(batch: Batch, *more: object, **named: object) -> object:
            rows.append(batch.rows)
            return works(batch, *more, **named)  # type: ignore[arg-type]

        async def work() -> None:
            async with client_of(folder) as client:
                await client.make_state("story", _ask("x" * 100))
                await client.score(_ask("x" * 100), 0)

        model.forward = forward  # type: ignore[assignment, method-assign]
        try:
            run(work())
        finally:
            del model.forward
    assert sum(rows) == 100 + 99 and max(rows) == 16


def test_figures_are_told(engine: RunningEngine, folder: Path) -> None:
    async def work() -> str:
        async with client_of(folder) as client:
            await _all(await client.submit(_ask("x")))
            stats = await client.stats()
            assert (stats.slots, stats.free_slots, stats.running) == (4, 4, 0)
            assert stats.values["generated_tokens"] >= 8
            return await client.metrics_text()

    text = run(work())
    assert "kittiwake_engine_free_slots 4.0" in text
    assert 'kittiwake_answers_total{reason="length"}' in text
    assert "kittiwake_batch_width_bucket" in text


def test_prompts_and_answers_are_logged_where_that_is_asked_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> str:
        async with client_of(folder) as client:
            events = await _all(await client.submit(_ask("hello you")))
            await client.score(_ask("score me"), 0)
            return "".join(event.text for event in events)

    for is_asked in (False, True):
        caplog.clear()
        with caplog.at_level("INFO", "kittiwake.engine"), running_engine(folder, log_prompts=is_asked):
            answer = run(work())
        told = [vars(record) for record in caplog.records]
        prompts = [entry["prompt"] for entry in told if "prompt" in entry]
        assert prompts == (["hello you", "score me"] if is_asked else [])
        assert [entry["answer"] for entry in told if "answer" in entry] == ([answer] if is_asked else [])
        assert all(entry["request_id"] == "test" for entry in told if "prompt" in entry)


def test_ids_that_the_tokenizer_does_not_know_are_logged_as_they_are(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = tiny_llm_with(load_tokenizer("bytes"), 300)  # as models whose rows were rounded up

    async def work() -> list[AnswerEvent]:
        async with client_of(folder) as client:
            await client.make_state("s", replace(_ask(""), prompt_ids=(5, 299)))
            return await _all(await client.submit(replace(_ask(""), prompt_ids=(5, 299))))

    with caplog.at_level("INFO", "kittiwake.engine"), running_engine(folder, llm=llm, log_prompts=True) as engine:
        assert run(work())[-1].end is not None
        assert engine.is_idle
    told = [vars(record) for record in caplog.records if record.getMessage() == "prompt"]
    assert [entry["prompt_ids"] for entry in told] == [(5, 299)] * 2


def test_an_idle_engine_does_nothing(engine: RunningEngine, folder: Path) -> None:
    async def work() -> None:
        async with client_of(folder) as client:
            await _all(await client.submit(_ask("x")))
            polls, poll = 0, engine.loop._poller.poll

            def count(timeout: int | None = None) -> list[tuple[object, int]]:
                nonlocal polls
                polls += 1
                return poll(timeout)

            engine.loop._poller.poll = count  # type: ignore[method-assign]
            await asyncio.sleep(0.3)
            assert polls <= 1
            await client.stats()

    run(work())


def test_a_step_that_fails_ends_its_requests_and_the_rest_goes_on(engine: RunningEngine, folder: Path) -> None:
    runner = engine.llm.engine.runner

    async def work() -> None:
        async with client_of(folder) as client:
            broken = runner.run

            def fail(batch: object) -> None:
                runner.run = broken  # type: ignore[method-assign]
                raise ZeroDivisionError("deep inside")

            runner.run = fail  # type: ignore[method-assign, assignment]
            events = await _all(await client.submit(_ask("x", LONG)))
            end = events[-1].end
            assert isinstance(end, AnswerEnd) and end.reason == "error" and end.failure is not None
            assert len(await _all(await client.submit(_ask("x")))) >= 8

    run(work())


def test_a_verb_that_fails_in_an_unexpected_way_is_refused_and_the_rest_goes_on(
    engine: RunningEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("deep inside")

    async def refused(call: Awaitable[object]) -> None:
        with pytest.raises(EngineError) as caught:
            await asyncio.wait_for(call, 60)
        assert caught.value.http_status == 500 and "inside" not in str(caught.value)

    async def work() -> None:
        async with client_of(folder) as client:
            with monkeypatch.context() as patch:
                patch.setattr(engine.llm.loaded.model, "forward", fail)
                await refused(client.score(_ask("score me"), 0))
                await refused(client.make_state("s", _ask("keep me")))
            with monkeypatch.context() as patch:
                patch.setattr(engine.llm, "load_initial_state", fail)
                (folder / "upload").write_bytes(b"x" * 100)
                await refused(client.import_state("s", folder / "upload"))
                patch.setattr(engine.llm.engine, "add_samples", fail)
                await refused(client.submit(_ask("x")))
            with monkeypatch.context() as patch:
                patch.setattr(engine.host._states, "save", fail)
                events = await _all(await client.submit(_ask("x", keep_as="s")))
                assert events[-1].end is not None and events[-1].end.failure == FAULT
            with monkeypatch.context() as patch:
                patch.setattr(engine.llm.engine, "check", fail)
                await refused(client.score(_ask("score me"), 0))
                await refused(client.make_state("s", _ask("keep me")))
            assert len(await _all(await client.submit(_ask("x")))) >= 8

    run(work())
    assert engine.is_idle


def test_a_state_that_finds_no_room_on_the_disk_does_not_tell_where_the_server_keeps_them(
    engine: RunningEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        raise OutputError(f"{path} cannot be written: the disk is full")

    async def work() -> None:
        async with client_of(folder) as client:
            monkeypatch.setattr(engine.host._states, "_folder", folder)
            monkeypatch.setattr(named_states, "save_state", full)
            with pytest.raises(EngineError) as caught:
                await client.make_state("s", _ask("keep me"))
            assert caught.value.http_status == 507 and str(folder) not in str(caught.value)
            events = await _all(await client.submit(_ask("x", keep_as="s")))
            assert events[-1].end is not None and events[-1].end.failure == caught.value.failure
            assert await client.list_states() == ()

    run(work())


def test_the_scores_of_a_long_prompt_are_written_down_bit_by_bit(engine: RunningEngine) -> None:
    host, text = engine.host, "x" * 600
    verb = wire.Score(_ask(text), 15)
    job = host._scoring(Caller(b"w", 1), verb)
    forwards = len(list(score_steps(engine.llm.loaded.model, [Given(np.frombuffer(text.encode(), np.uint8))], top=15)))
    assert len(list(job.steps)) == forwards + 3


def test_a_request_has_its_deadline_even_where_the_engine_hangs(
    engine: RunningEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "DEADLINE_GRACE_S", 0.2)
    monkeypatch.setattr(remote_engine, "LOOK_TIMEOUT_S", 0.2)
    runner, goes_on = engine.llm.engine.runner, threading.Event()
    works = runner.run

    def hang(batch: Batch) -> np.ndarray:
        goes_on.wait(100)
        return works(batch)

    async def given_up(client: RemoteEngine) -> None:
        with pytest.raises(EngineError) as caught:
            await asyncio.wait_for(_answer(client), 60)
        assert (caught.value.http_status, caught.value.failure.code) == (504, "deadline")

    async def _answer(client: RemoteEngine) -> None:
        await _all(await client.submit(_ask("x", LONG, deadline_s=0.1)))

    async def work() -> None:
        async with client_of(folder) as client:
            runner.run = hang  # type: ignore[method-assign, assignment]
            await given_up(client)  # taken, and then nothing
            await given_up(client)  # not even taken
            with pytest.raises(EngineError) as caught:
                await asyncio.wait_for(client.get_state("s"), 60)
            assert caught.value.http_status == 503 and "has not answered" in str(caught.value)
            goes_on.set()
            runner.run = works  # type: ignore[method-assign]
            await until(lambda: engine.is_idle)
            assert len(await _all(await client.submit(_ask("x", deadline_s=100.0)))) >= 8
            await asyncio.sleep(0)
            assert not client._streams and not client._waiting

    run(work())
