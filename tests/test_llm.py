"""The engine in a script: prompts of every kind, streams, scores, and errors before any work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.request import Delta
from kittiwake.engine.scoring import SCORE_ROWS as SCORE_CHUNK
from kittiwake.engine.scoring import Given, score
from kittiwake.engine.states import StateTable
from kittiwake.errors import KittiwakeError, RequestError, UsageError
from kittiwake.llm import LLM, SamplingParams
from tests.engine.drive import Tampered
from tests.oracles import rwkv7_float64
from tests.oracles.measure import random_ids
from tests.tiny import SHAPE, tiny_model, tiny_tensors

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=14, seed=5)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_loaded(tiny_model(), EngineConfig(slots=3))


def idle(llm: LLM) -> bool:
    """Whether nothing is left behind: no request, no taken slot, no outbox."""
    engine = llm.engine
    return not engine.has_work and engine.free_slots == llm.config.slots and not engine._outbox


# Prompts


def test_a_text_is_answered(llm: LLM) -> None:
    (completion,) = llm.generate("Hello", SAMPLED)
    assert completion.text == bytes(completion.token_ids).decode("utf-8", "replace")
    assert (completion.prompt_tokens, completion.completion_tokens, completion.finish_reason) == (5, 14, "length")
    assert min(completion.timings.queue_ms, completion.timings.prefill_ms, completion.timings.decode_ms) >= 0
    assert idle(llm)


@pytest.mark.parametrize(
    "prompt", [list(b"Hello"), tuple(b"Hello"), np.frombuffer(b"Hello", np.uint8), [list(b"Hello")], ["Hello"]]
)
def test_ids_are_taken_as_they_are(llm: LLM, prompt: Any) -> None:
    assert [c.token_ids for c in llm.generate(prompt, SAMPLED)] == [llm.generate("Hello", SAMPLED)[0].token_ids]


def test_many_prompts_are_answered_in_their_order_as_each_alone(llm: LLM) -> None:
    prompts = ["a", list(b"some ids"), "Hello there, " * 9, "b", "a", "Ünïcödé", [0]]
    alone = [llm.generate(prompt, SAMPLED)[0] for prompt in prompts]
    together = llm.generate(prompts, SAMPLED)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.prompt_tokens for c in together] == [1, 8, 117, 1, 1, 11, 1]
    assert idle(llm)


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    params = [GREEDY, SAMPLED, SamplingParams(max_tokens=3, seed=5), SamplingParams(max_tokens=14, seed=6)]
    found = llm.generate(["x"] * 4, params)
    assert [c.completion_tokens for c in found] == [10, 14, 3, 14]
    assert found[2].token_ids == found[1].token_ids[:3]
    assert found[3].token_ids != found[1].token_ids
    assert [c.token_ids for c in found] == [llm.generate("x", one)[0].token_ids for one in params]


def test_without_parameters_the_defaults_hold(llm: LLM) -> None:
    (completion,) = llm.generate("y")
    assert completion.token_ids == llm.generate("y", SamplingParams())[0].token_ids
    assert completion.completion_tokens == SamplingParams().max_tokens


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([], None, "no prompt to answer"),
        ("", None, "the prompt is empty"),
        ([[]], None, "the prompt is empty"),
        (["fine", ""], None, "the prompt is empty"),
        ([1, 2, 256], None, "256, which is no token id from 0 to 255"),
        ([["fine"], [1]], None, "prompt holds 'fine'"),
        (["fine", [-1]], None, "prompt holds -1"),
        (["a", "b"], [GREEDY], "2 prompts need one SamplingParams or 2 of them, got 1"),
        (["a"], [], "1 prompts need one SamplingParams or 1 of them, got 0"),
        (["a", "b"], [GREEDY, SamplingParams(stop_token_ids=(999,))], "stop_token_ids holds 999"),
        (["a", "b"], [GREEDY, SamplingParams(stop=("x" * 70_000,))], "stop string"),
        ("\ud800", None, "lone surrogate"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_any_work(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert idle(llm)


# Streams


def test_a_stream_is_what_generate_gives(llm: LLM) -> None:
    for params in (GREEDY, SAMPLED, SamplingParams(max_tokens=40, seed=2, stop=("a", "\n"))):
        deltas = list(llm.stream("Once", params))
        (completion,) = llm.generate("Once", params)
        assert "".join(delta.text for delta in deltas) == completion.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == completion.token_ids
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == completion.finish_reason and deltas[-1].timings is not None
    assert idle(llm)


def test_a_stream_gives_each_token_when_it_is_drawn(llm: LLM) -> None:
    stream = llm.stream("Once", SAMPLED)
    next(stream)
    assert llm.engine.has_work  # thirteen tokens are still to come
    assert len(list(stream)) == 13


@pytest.mark.parametrize("read", [0, 1, 5])
def test_closing_a_stream_aborts_its_request(llm: LLM, read: int) -> None:
    stream = llm.stream("Once", SamplingParams(max_tokens=1000))
    for _ in range(read):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert idle(llm)


def test_a_stream_that_is_dropped_leaves_nothing(llm: LLM) -> None:
    stream: Iterator[Delta] | None = llm.stream("Once", SamplingParams(max_tokens=1000))
    next(stream)  # type: ignore[arg-type]
    del stream
    assert idle(llm)


@pytest.mark.parametrize(("prompt", "message"), [("", "the prompt is empty"), ([300], "prompt holds 300")])
def test_a_stream_refuses_when_it_is_asked_for_and_not_when_it_is_read(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.stream(prompt)


def test_streams_of_several_threads_are_those_of_each_alone(llm: LLM) -> None:
    def read(prompt: str) -> list[str]:
        return [delta.text for delta in llm.stream(prompt, SAMPLED)]

    prompts = ["one", "two " * 20, "three", "four"]
    alone = {prompt: read(prompt) for prompt in prompts}
    found: dict[str, list[str]] = {}
    threads = [threading.Thread(target=lambda p=prompt: found.update({p: read(p)})) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == alone
    assert idle(llm)


def test_streams_may_be_read_in_turns(llm: LLM) -> None:
    alone = [list(llm.stream(prompt, SAMPLED)) for prompt in ("one", "two")]
    turns = list(zip(*(llm.stream(prompt, SAMPLED) for prompt in ("one", "two")), strict=True))
    for index in range(2):
        assert [turn[index].token_ids for turn in turns] == [delta.token_ids for delta in alone[index]]


# Errors while running


def failing() -> LLM:
    """A batch of nine rows fails; a sequence of three tokens gets logits that are not finite."""

    def tamper(batch: Batch, states: StateTable, run: Callable[[], np.ndarray]) -> np.ndarray:
        logits = run()
        if batch.rows == 9:
            raise ValueError("forward failed")
        logits[states.positions[batch.slots] == 3] = np.nan
        return logits

    return LLM.from_loaded(replace(tiny_model(), model=Tampered(tamper)), EngineConfig(slots=3))


def test_logits_that_are_not_finite_are_an_error_of_generate_and_of_stream() -> None:
    llm = failing()
    with pytest.raises(KittiwakeError, match="not finite"):
        llm.generate(["four", "one", "three"], SAMPLED)
    assert idle(llm)
    with pytest.raises(KittiwakeError, match="not finite"):
        list(llm.stream([1, 2, 3], SAMPLED))
    assert idle(llm)


def test_a_forward_that_fails_is_raised_and_leaves_an_llm_that_works() -> None:
    llm = failing()
    with pytest.raises(ValueError, match="forward failed"):
        llm.generate([[1] * 4, [1] * 5], SAMPLED)
    assert idle(llm)
    assert llm.generate("four", SAMPLED)[0].completion_tokens == 14


# Scores


@pytest.mark.parametrize("count", [2, 3, SCORE_CHUNK, SCORE_CHUNK + 1, SCORE_CHUNK + 2, 2 * SCORE_CHUNK + 40])
def test_scores_are_log_probabilities_of_the_equations_in_float64(llm: LLM, count: int) -> None:
    ids = random_ids(SHAPE, count)
    logits, _ = rwkv7_float64.run(tiny_tensors(), ids[:-1])
    top = logits.max(axis=-1, keepdims=True)
    expected = (logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))[np.arange(count - 1), ids[1:]]
    found = llm.score(ids)
    assert found.dtype == np.float64 and found.shape == (count - 1,)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_scores_do_not_depend_on_what_follows_or_on_where_they_are_cut(
    llm: LLM,
) -> None:
    ids = random_ids(SHAPE, 300)
    whole = llm.score(ids)
    assert np.array_equal(llm.score(np.array(ids)), whole)  # type: ignore[arg-type]
    assert np.array_equal(llm.score(ids[:100]), whole[:99])
    for chunk in (1, 7, 1000):
        cut = score(llm.loaded.model, [Given(np.array(ids))], max_rows=chunk)[0]
        assert np.array_equal(cut.log_probs, whole)


def test_scoring_while_requests_run_changes_neither(llm: LLM) -> None:
    ids = random_ids(SHAPE, 40)
    scores, tokens = llm.score(ids), [delta.token_ids for delta in llm.stream("Once", SAMPLED)]
    stream = llm.stream("Once", SAMPLED)
    first = next(stream)
    assert np.array_equal(llm.score(ids), scores)
    assert [first.token_ids, *(delta.token_ids for delta in stream)] == tokens


def test_one_token_has_nothing_to_score_and_none_are_refused(llm: LLM) -> None:
    assert llm.score([5]).shape == (0,)
    for ids, message in (([], "the prompt is empty"), ([1, 256], "prompt holds 256")):
        with pytest.raises(RequestError, match=message):
            llm.score(ids)


# Opening and closing


def test_a_model_is_opened_from_a_path_with_options(tmp_path: Path) -> None:
    torch.save(tiny_tensors(), tmp_path / "tiny.pth")
    told: list[str] = []
    with LLM(tmp_path / "tiny.pth", threads=1, slots=2, progress=lambda what, done, total: told.append(what)) as llm:
        assert (llm.config.threads, llm.loaded.threads, llm.config.slots) == (1, 1, 2)
        assert (llm.vocab_size, llm.tokenizer.kind) == (256, "bytes")
        assert llm.generate("x", GREEDY)[0].completion_tokens == 10
    assert "loading tensors" in told


def test_options_that_do_not_exist_or_contradict_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no option thread, top_k"):
        LLM(tmp_path, thread=1, top_k=3)
    with pytest.raises(UsageError, match="config or options, not both: threads"):
        LLM(tmp_path, config=EngineConfig(), threads=1)
    for options, message in (
        ({"slots": 0}, "slots must be a whole number from 1 to 1048576, got 0"),
        ({"dtype": "int8"}, "dtype must be one of auto, fp32, fp16, bf16, got 'int8'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"max_rows": True}, "max_rows must be a whole number"),
        ({"prefill_chunk": -1}, "prefill_chunk must be a whole number from 0 to 2147483647, got -1"),
        ({"threads": 1.5}, "threads must be a whole number"),
    ):
        with pytest.raises(UsageError, match=message):
            LLM(tmp_path, **options)


def test_a_closed_llm_refuses_and_lets_its_streams_end_quietly() -> None:
    llm = LLM.from_loaded(tiny_model(), EngineConfig(slots=1))
    stream, other = llm.stream("Once", SAMPLED), llm.stream("Once", SAMPLED)
    next(stream)
    next(other)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate("x"), lambda: llm.stream("x"), lambda: llm.score([1, 2]), lambda: list(stream)):
        with pytest.raises(UsageError, match="this LLM is closed"):
            call()
    other.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("chunk", "max_rows", "slots"), [(1, 2048, 1), (3, 5, 2), (0, 1, 7)])
def test_options_of_the_engine_change_no_token(llm: LLM, chunk: int, max_rows: int, slots: int) -> None:
    prompts = ["Once upon a time", "x", "The", "a longer prompt than the others, by far"]
    other = LLM.from_loaded(tiny_model(), EngineConfig(slots=slots, prefill_chunk=chunk, max_rows=max_rows))
    assert [c.token_ids for c in other.generate(prompts, SAMPLED)] == [
        c.token_ids for c in llm.generate(prompts, SAMPLED)
    ]


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {"a": 1}, {1, 2}, [1.0], ["text", b"bytes"], [None]])
def test_what_is_no_prompt_is_refused_by_its_type(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is a text or a list of token ids, got "):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [{"max_tokens": 2}, "greedy", 5, [None]])
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="params are one SamplingParams, or a list of them"):
        llm.generate("a", params)
    with pytest.raises(RequestError, match="params are one SamplingParams, or a list of them"):
        llm.stream("a", params)


def test_what_is_no_kept_state_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="start_from is a KeptState, None, or a list of such, got int 5"):
        llm.generate("a", start_from=5)  # type: ignore[arg-type]
