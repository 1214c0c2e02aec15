from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from kittiwake.server.engine_client import EngineError, Failure
from tests.server.ask import asking, error_of, events_of, in_loop
from tests.server.stub_engine import StubEngine, stub_info

PATH = "/v1/completions"


@in_loop
async def test_an_answer_has_exactly_what_clients_expect() -> None:
    async with asking(StubEngine()) as client:
        content = (await client.post(PATH, json={"model": "stub", "prompt": "ab", "max_tokens": 5})).json()
    assert content["id"].startswith("cmpl-")
    assert content["object"] == "text_completion"
    assert content["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]
    assert content["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0, "cache": "no_checkpoint"},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
@in_loop
async def test_all_forms_of_a_prompt(prompt: Any, ids: list[tuple[int, ...]]) -> None:
    engine = StubEngine()
    async with asking(engine) as client:
        whole = (await client.post(PATH, json={"prompt": prompt, "max_tokens": 3, "n": 2})).json()
        answer = await client.post(PATH, json={"prompt": prompt, "max_tokens": 3, "n": 2, "stream": True})
    assert [one.prompt_ids for one in engine.submitted] == ids * 2
    indices = [choice["index"] for choice in whole["choices"]]
    assert indices == list(range(2 * len(ids)))
    assert whole["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert whole["usage"]["completion_tokens"] == 6 * len(ids)
    stream = [chunk["choices"][0] for chunk in events_of(answer.text)[:-1]]
    for index in indices:
        mine = [choice for choice in stream if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "Hel"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]


@in_loop
async def test_the_usual_length_is_sixteen_tokens() -> None:
    engine = StubEngine()
    async with asking(engine) as client:
        await client.post(PATH, json={"prompt": "ab"})
        await client.post(PATH, json={"prompt": "ab", "min_tokens": 20})
    assert [one.params.max_tokens for one in engine.submitted] == [16, 20]


@in_loop
async def test_log_probabilities_are_four_lists() -> None:
    ask = {"prompt": "ab", "max_tokens": 3, "logprobs": 2}
    async with asking(StubEngine()) as client:
        found = (await client.post(PATH, json=ask)).json()["choices"][0]["logprobs"]
        none = (await client.post(PATH, json={**ask, "logprobs": 0})).json()["choices"][0]["logprobs"]
        answer = await client.post(PATH, json={**ask, "stream": True})
    assert found == {
        "tokens": ["H", "e", "l"],
        "token_logprobs": [-72 / 64, -101 / 64, -108 / 64],
        "top_logprobs": [{"H": -1.0, "I": -2.0}, {"e": -1.0, "f": -2.0}, {"l": -1.0, "m": -2.0}],
        "text_offset": [0, 1, 2],
    }
    assert none["top_logprobs"] == [{"H": -72 / 64}, {"e": -101 / 64}, {"l": -108 / 64}]
    parts = [chunk["choices"][0]["logprobs"] for chunk in events_of(answer.text)[:-1]]
    for key in found:
        assert list(itertools.chain.from_iterable(part[key] for part in parts if part)) == found[key]


@in_loop
async def test_offsets_are_in_characters() -> None:
    async with asking(StubEngine(reply="\u4f60a")) as client:
        answer = await client.post(PATH, json={"prompt": "\u00e9", "max_tokens": 4, "logprobs": 0, "echo": True})
    choice = answer.json()["choices"][0]
    assert choice["text"] == "\u00e9\u4f60a"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2]
    assert choice["logprobs"]["tokens"][-1] == "a" and choice["logprobs"]["tokens"][0] == "bytes:\\xc3"


@in_loop
async def test_echo() -> None:
    engine = StubEngine()
    ask = {"prompt": ["ab", "c"], "max_tokens": 2, "echo": True}
    async with asking(engine) as client:
        whole = (await client.post(PATH, json=ask)).json()
        answer = await client.post(PATH, json={**ask, "stream": True})
        ids = (await client.post(PATH, json={**ask, "prompt": [97, 98]})).json()
    assert [choice["text"] for choice in whole["choices"]] == ["abHe", "cHe"]
    assert whole["usage"]["completion_tokens"] == 4
    stream = [chunk["choices"][0] for chunk in events_of(answer.text)[:-1]]
    assert [(c["index"], c["text"]) for c in stream[:2]] == [(0, "ab"), (1, "c")]
    assert "".join(choice["text"] for choice in stream if choice["index"] == 0) == "abHe"
    assert ids["choices"][0]["text"] == "abHe"


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_prompt_can_be_scored_without_drawing(stream: bool) -> None:
    engine = StubEngine()
    ask = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    async with asking(engine) as client:
        answer = await client.post(PATH, json=ask)
    assert len(engine.submitted) == 1  # what was scored; nothing was drawn
    expected = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -98 / 64],
        "top_logprobs": [None, {"b": -1.0}],
        "text_offset": [0, 1],
    }
    if stream:
        first, last, done = events_of(answer.text)
        assert (first["choices"][0]["text"], first["choices"][0]["logprobs"]) == ("ab", expected)
        assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"], done) == ("", "length", "[DONE]")
    else:
        content = answer.json()
        assert content["choices"] == [{"index": 0, "text": "ab", "logprobs": expected, "finish_reason": "length"}]
        assert content["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"prompt": ["a", "b"], "keep_state": "x"}, "keep_state"),
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
@in_loop
async def test_what_is_refused(fields: dict[str, Any], param: str | None) -> None:
    engine = StubEngine()
    async with asking(engine, max_prompts=4) as client:
        answer = await client.post(PATH, json=fields)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param
    assert engine.submitted == []


@in_loop
async def test_of_several_prompts_all_are_taken_or_none() -> None:
    engine = StubEngine(step_s=0.01)
    whole = engine.submit

    async def submit(submission: Any) -> Any:
        engine.refuse = None if len(engine.submitted) < 2 else Failure("full", "", 429)
        return await whole(submission)

    engine.submit = submit  # type: ignore[method-assign]
    async with asking(engine) as client:
        answer = await client.post(PATH, json={"prompt": ["a", "b", "c"]})
    assert answer.status_code == 429
    assert len(engine.cancelled) == 2


@in_loop
async def test_all_prompts_are_on_their_way_before_the_first_is_taken() -> None:
    engine, asked, all_here = StubEngine(), [], asyncio.Event()
    whole = engine.submit

    async def submit(submission: Any) -> Any:
        asked.append(submission.prompt_ids)
        if len(asked) == 5:
            all_here.set()
        await all_here.wait()
        return await whole(submission)

    engine.submit = submit  # type: ignore[method-assign]
    async with asking(engine) as client:
        answer = await client.post(PATH, json={"prompt": ["a", "b", "c", "d", "e"], "max_tokens": 2})
    assert answer.status_code == 200 and asked == [(97 + index,) for index in range(5)]
    assert len(engine.finished) == 5 and engine.cancelled == []


@in_loop
async def test_a_prompt_that_cannot_be_scored_ends_the_scoring_of_the_others() -> None:
    engine, ended = StubEngine(), []
    whole = engine.score

    async def score(submission: Any, top: int) -> Any:
        if len(submission.prompt_ids) < 2:
            raise EngineError(Failure("the prompt is too short", "", 400))
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(submission.prompt_ids)
        return await whole(submission, top)

    engine.score = score  # type: ignore[method-assign]
    async with asking(engine) as client:
        ask = {"prompt": ["aa", "b", "cc"], "echo": True, "logprobs": 0}
        answer = await client.post(PATH, json=ask)
    assert answer.status_code == 400 and error_of(answer)["param"] == "prompt"
    assert ended == [(97, 97), (99, 99)] and engine.submitted == []


@in_loop
async def test_an_echo_has_one_deadline_for_its_scores_and_its_answer() -> None:
    engine = StubEngine()
    whole = engine.score

    async def score(submission: Any, top: int) -> Any:
        await asyncio.sleep(0.2)
        return await whole(submission, top)

    engine.score = score  # type: ignore[method-assign]
    async with asking(engine) as client:
        ask = {"prompt": "ab", "echo": True, "logprobs": 0, "timeout_s": 30}
        assert (await client.post(PATH, json=ask)).status_code == 200
        scored, drawn = engine.submitted
        assert scored.deadline_s == 30 and drawn.deadline_s is not None and 0 < drawn.deadline_s < 29.9
        answer = await client.post(PATH, json={**ask, "timeout_s": 0.05})
        assert answer.status_code == 504 and error_of(answer)["code"] == "deadline"
        assert len(engine.submitted) == 2


@in_loop
async def test_tokenizing_and_back() -> None:
    async with asking(StubEngine()) as client:
        for field in ("prompt", "content"):
            answer = await client.post("/tokenize", json={field: "a\u00e9", "return_token_strs": True})
            assert answer.json() == {
                "count": 3,
                "tokens": [97, 195, 169],
                "token_strs": ["a", "bytes:\\xc3", "bytes:\\xa9"],
            }
        answer = await client.post("/detokenize", json={"tokens": [97, 195, 169]})
        assert answer.json() == {"prompt": "a\u00e9", "content": "a\u00e9"}
        assert (await client.post("/detokenize", json={"tokens": []})).json()["content"] == ""
        chat = await client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]})
        assert bytes(chat.json()["tokens"]) == b"User: Hi\n\nAssistant:"
        for refused in (
            await client.post("/detokenize", json={"tokens": [256]}),
            await client.post("/tokenize", json={"prompt": "a", "content": "b"}),
            await client.post("/tokenize", json={}),
        ):
            assert refused.status_code == 400
            error_of(refused)


@in_loop
async def test_ids_of_rows_that_the_tokenizer_does_not_have() -> None:
    engine = StubEngine(info=replace(stub_info(), vocab_size=300))
    async with asking(engine) as client:
        assert (await client.post(PATH, json={"prompt": [5, 299], "max_tokens": 2})).status_code == 200
        for path, ask, param in (
            (PATH, {"prompt": [5, 299], "echo": True}, "prompt"),
            ("/detokenize", {"tokens": [5, 299]}, "tokens"),
        ):
            answer = await client.post(path, json=ask)
            assert answer.status_code == 400 and error_of(answer)["param"] == param


@in_loop
async def test_an_answer_cannot_be_made_huge() -> None:
    engine = StubEngine()
    many = {"prompt": "a", "n": 50, "logprobs": 20, "max_tokens": 4000}
    async with asking(engine, max_body_bytes=1024) as client:
        for ask, param in (
            ({"prompt": "a" * 900, "n": 5, "echo": True}, "echo"),
            ({"prompt": "a" * 900, "n": 64, "echo": True, "logprobs": 20}, "echo"),
            (many, "logprobs"),
        ):
            answer = await client.post(PATH, json=ask)
            assert answer.status_code == 400 and error_of(answer)["param"] == param
        assert engine.submitted == []
        assert (await client.post(PATH, json={**many, "stream": True})).status_code == 200
    async with asking(engine) as client:
        answer = await client.post(PATH, json={"prompt": "a" * 50_000, "echo": True, "logprobs": 20})
        assert answer.status_code == 400 and error_of(answer)["param"] == "logprobs"


@in_loop
async def test_a_long_prompt_is_not_copied_for_too_many_answers() -> None:
    engine = StubEngine()
    async with asking(engine) as client:
        for ask in (
            (PATH, {"prompt": "a" * 70_000, "n": 256, "max_tokens": 1}),
            (PATH, {"prompt": ["a" * 10_000] * 50, "n": 5, "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 70_000}], "n": 256}),
        ):
            fits = ask[1].get("n") == 5
            answer = await client.post(ask[0], json=ask[1])
            assert answer.status_code == (200 if fits else 400), answer.text
            if not fits:
                assert (error_of(answer)["param"], error_of(answer)["code"]) == ("n", "too_many")
    assert len(engine.submitted) == 50
