from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kittiwake
from kittiwake.async_llm import AsyncLLM
from kittiwake.engine.request import SamplingParams
from kittiwake.errors import KittiwakeError, RequestError, UsageError
from tests.models import tiny_llm

DOCUMENT = Path(__file__).parent.parent / "docs" / "chat.md"
LONG = SamplingParams(max_tokens=100_000, seed=1)


def _with(work: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def run() -> Any:
        async with AsyncLLM.from_llm(tiny_llm(**options)) as llm:
            return await asyncio.wait_for(work(llm), 30)

    return asyncio.run(run())


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen within 5 s")


def test_many_streams_at_once_give_what_each_gives_alone() -> None:
    params = [SamplingParams(max_tokens=10 + index, seed=index, temperature=index % 3 / 2) for index in range(20)]
    prompts = ["x" * (1 + 7 * index) for index in range(20)]
    with tiny_llm(slots=4) as llm:
        expected = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]

    async def stream(llm: AsyncLLM, index: int) -> tuple[int, ...]:
        deltas = [delta async for delta in llm.stream(prompts[index], params[index])]
        assert "".join(delta.text for delta in deltas) == expected[index].text
        assert deltas[-1].finish_reason == expected[index].finish_reason
        return tuple(token for delta in deltas for token in delta.token_ids)

    async def work(llm: AsyncLLM) -> list[tuple[int, ...]]:
        return list(await asyncio.gather(*(stream(llm, index) for index in range(20))))

    assert _with(work, slots=8) == [completion.token_ids for completion in expected]


def test_requests_are_batched_together() -> None:
    async def work(llm: AsyncLLM) -> int:
        steps, widest = llm.llm.engine.runner.run, 0

        def count(batch: Any) -> Any:
            nonlocal widest
            widest = max(widest, len(batch.slots))
            return steps(batch)

        llm.llm.engine.runner.run = count  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=20)
        await asyncio.gather(*(llm.generate("hello", params) for _ in range(6)))
        return widest

    assert _with(work, slots=8) == 6


@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "cancel generate"])
def test_a_reader_that_leaves_frees_its_slot(how: str) -> None:
    async def read(llm: AsyncLLM) -> None:
        async for _ in llm.stream("x", LONG):
            if how == "break":
                return

    async def work(llm: AsyncLLM) -> None:
        if how == "aclose":
            stream = llm.stream("x", LONG)
            await anext(stream)
            await stream.aclose()
        elif how == "break":
            await read(llm)
        else:
            task = asyncio.create_task(read(llm) if how == "cancel" else llm.generate("x", LONG))  # type: ignore[arg-type]
            await _until(lambda: llm.llm.engine.free_slots == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await _until(lambda: llm.llm.engine.free_slots == 2)
        assert not llm.llm.engine.has_work
        assert (await llm.generate("x", SamplingParams(max_tokens=3))).completion_tokens == 3

    _with(work, slots=2)


def test_a_request_that_waits_can_be_cancelled_too() -> None:
    async def work(llm: AsyncLLM) -> None:
        first = asyncio.create_task(llm.generate("x", LONG))
        await _until(lambda: llm.llm.engine.free_slots == 0)
        second = asyncio.create_task(llm.generate("x", LONG))
        await asyncio.sleep(0.02)
        second.cancel()
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await _until(lambda: llm.llm.engine.free_slots == 1 and not llm.llm.engine.has_work)

    _with(work, slots=1)


def test_wrong_requests_are_told_at_once() -> None:
    async def work(llm: AsyncLLM) -> None:
        for prompt in ("", [999]):
            with pytest.raises(RequestError):
                await llm.generate(prompt)
        with pytest.raises(UsageError, match="n 2"):
            await llm.generate("x", SamplingParams(n=2))
        with pytest.raises(RequestError):
            await anext(llm.stream(""))

    _with(work)


def test_a_step_that_fails_is_told_to_its_requests_and_the_rest_goes_on() -> None:
    async def work(llm: AsyncLLM) -> None:
        run = llm.llm.engine.runner.run

        def fail(batch: Any) -> Any:
            llm.llm.engine.runner.run = run  # type: ignore[method-assign]
            raise ZeroDivisionError("deep inside")

        llm.llm.engine.runner.run = fail  # type: ignore[method-assign]
        with pytest.raises(KittiwakeError, match="broken off") as caught:
            await llm.generate("x")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert (await llm.generate("x", SamplingParams(max_tokens=2))).completion_tokens == 2

    _with(work)


def test_an_engine_that_cannot_step_tells_everyone() -> None:
    async def work(llm: AsyncLLM) -> None:
        def fail() -> bool:
            raise ZeroDivisionError("no step")

        step, llm.llm.engine.step = llm.llm.engine.step, fail  # type: ignore[method-assign]
        answers = await asyncio.gather(*(llm.generate("x") for _ in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ZeroDivisionError] * 3
        llm.llm.engine.step = step  # type: ignore[method-assign]
        assert (await llm.generate("x", SamplingParams(max_tokens=2))).completion_tokens == 2

    _with(work)


def test_closing_ends_what_is_in_flight() -> None:
    async def run() -> None:
        llm = AsyncLLM.from_llm(tiny_llm())
        tasks = [asyncio.create_task(llm.generate("x", LONG)) for _ in range(3)]
        await _until(lambda: llm.llm.engine.has_work)
        await llm.aclose()
        await llm.aclose()
        for task in tasks:
            with pytest.raises(UsageError, match="closed"):
                await task
        with pytest.raises(UsageError, match="closed"):
            await llm.generate("x")

    before = threading.active_count()
    asyncio.run(run())
    assert threading.active_count() == before


def test_nothing_is_done_while_there_is_nothing_to_do() -> None:
    async def work(llm: AsyncLLM) -> float:
        await llm.generate("x", SamplingParams(max_tokens=2))
        start = time.process_time()
        await asyncio.sleep(0.3)
        return time.process_time() - start

    assert _with(work) < 0.1


def test_the_loop_stays_free_while_the_engine_works() -> None:
    async def work(llm: AsyncLLM) -> float:
        task = asyncio.create_task(llm.generate("x" * 3000, SamplingParams(max_tokens=2)))
        worst, last = 0.0, time.perf_counter()
        while not task.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now
        return worst

    assert _with(work, prefill_chunk=0, max_rows=4000) < 1.0


def test_chat_and_its_stream() -> None:
    talk, params = [{"role": "user", "content": "hi"}], SamplingParams(max_tokens=12, seed=3)
    with tiny_llm() as llm:
        expected = llm.chat(talk, params, template="g1-think")

    async def work(llm: AsyncLLM) -> None:
        assert replace(await llm.chat(talk, params, template="g1-think"), completion=expected.completion) == expected
        deltas = [delta async for delta in llm.stream_chat(talk, params, template="g1-think")]
        assert "".join(delta.content for delta in deltas) == expected.content
        assert "".join(delta.reasoning for delta in deltas) == (expected.reasoning or "")

    _with(work)


def test_two_loops_share_one_engine() -> None:
    llm = AsyncLLM.from_llm(tiny_llm())
    params = SamplingParams(max_tokens=30, seed=1)
    found: list[tuple[int, ...]] = []
    threads = [
        threading.Thread(target=lambda: found.append(asyncio.run(llm.generate("x", params)).token_ids))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    asyncio.run(llm.aclose())
    assert len(found) == 3
    assert len(set(found)) == 1


def test_the_example_of_the_document_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"^```py\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert example is not None

    async def load(model: str) -> AsyncLLM:
        return AsyncLLM.from_llm(tiny_llm())

    monkeypatch.setattr(AsyncLLM, "load", load)
    monkeypatch.setattr(kittiwake, "AsyncLLM", AsyncLLM, raising=False)
    exec(compile(example[1], str(DOCUMENT), "exec"), {})
    assert capsys.readouterr().out


def test_loading_is_that_of_llm() -> None:
    with pytest.raises(UsageError, match="no option nonsense"):
        asyncio.run(AsyncLLM.load(None, nonsense=1))
    assert AsyncLLM is kittiwake.AsyncLLM
