from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kittiwake.batch_file import AnswerFile, BatchFile, answer_all
from kittiwake.engine.request import SamplingParams
from kittiwake.errors import InputFileError, KittiwakeError, OutputError, UsageError
from kittiwake.llm import LLM
from tests.models import tiny_llm

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(slots=4)


def _write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def _requests(count: int) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = [
        {"id": f"p{index}", "prompt": f"Tale {index}", "max_tokens": 1 + 7 * index % 23, "seed": index}
        for index in range(count)
    ]
    chats = [{"custom_id": f"c{index}", "messages": HI, "max_tokens": 5, "seed": index} for index in range(3)]
    return [*plain, *chats, {"id": "ids", "prompt": [72, 105], "temperature": 0, "max_tokens": 4}]


def _answer(llm: LLM, batch: BatchFile, out: Path, concurrency: int = 4) -> list[str]:
    with AnswerFile(out, {item.id: item for item in batch.items}) as answers:
        answer_all(llm, batch, answers, concurrency)
    return out.read_text().splitlines()


def test_every_request_is_answered_as_it_would_be_alone(llm: LLM, tmp_path: Path) -> None:
    requests = _requests(8)
    batch = BatchFile(_write(tmp_path / "in", *requests), "g1-think")
    answers = [json.loads(line) for line in _answer(llm, batch, tmp_path / "out")]
    found = {answer.get("id", answer.get("custom_id")): answer for answer in answers}
    assert len(found) == len(answers) == len(requests)
    for request in requests:
        name = request.get("id", request.get("custom_id"))
        params = SamplingParams(
            **{key: value for key, value in request.items() if key in ("max_tokens", "seed", "temperature")}
        )
        if "messages" in request:
            chat = llm.chat(HI, params, template="g1-think")
            assert (found[name]["content"], found[name]["reasoning"]) == (chat.content, chat.reasoning)
            assert "text" not in found[name]
        else:
            completion = llm.generate(request["prompt"] if "seed" in request else [request["prompt"]], params)[0]
            assert found[name]["text"] == completion.text
            assert tuple(found[name]["token_ids"]) == completion.token_ids
            assert found[name]["finish_reason"] == completion.finish_reason
            assert found[name]["prompt_tokens"] == completion.prompt_tokens


def test_log_probabilities_come_along(llm: LLM, tmp_path: Path) -> None:
    request = {"id": "a", "prompt": "x", "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "logit_bias": {"65": 5}}
    answer = json.loads(_answer(llm, BatchFile(_write(tmp_path / "in", request)), tmp_path / "out")[0])
    assert len(answer["logprobs"]) == 3
    assert all(len(one["top"]) == 2 and one["logprob"] <= 0 for one in answer["logprobs"])


WRONG = {
    "no json": ('{"id": "a"\n', "not JSON"),
    "a list": ("[1]\n", "a list stands"),
    "twice": ('{"id": "a", "id": "b", "prompt": "x"}\n', "given twice"),
    "nan": ('{"id": "a", "prompt": "x", "temperature": NaN}\n', "NaN"),
    "no id": ({"prompt": "x"}, "exactly one of id and custom_id"),
    "two ids": ({"id": "a", "custom_id": "a", "prompt": "x"}, "exactly one of id and custom_id"),
    "a number": ({"id": 3, "prompt": "x"}, "id must be a text"),
    "nothing": ({"id": "a"}, "exactly one of prompt and messages"),
    "both": ({"id": "a", "prompt": "x", "messages": HI}, "exactly one of prompt and messages"),
    "empty": ({"id": "a", "prompt": ""}, "not empty"),
    "unknown": ({"id": "a", "prompt": "x", "best_of": 3}, "no field 'best_of'"),
    "value": ({"id": "a", "prompt": "x", "top_p": 2}, "top_p must be from 0 to 1"),
    "several": ({"id": "a", "prompt": "x", "n": 2}, "n is 2"),
    "role": ({"id": "a", "messages": [{"role": "robot", "content": "x"}]}, "the role 'robot'"),
    "surrogate": ('{"id": "a", "prompt": "\\ud800"}\n', "surrogate"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_line_that_cannot_be_used_is_named_before_anything_is_done(tmp_path: Path, kind: str) -> None:
    line, complaint = WRONG[kind]
    with pytest.raises(UsageError) as caught:
        BatchFile(_write(tmp_path / "in", {"id": "ok", "prompt": "x"}, "\n", line))
    assert "1 line cannot be used" in caught.value.message
    assert "line 3: " in caught.value.message
    assert complaint in caught.value.message


def test_all_wrong_lines_are_listed_up_to_twenty(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        BatchFile(_write(tmp_path / "in", *({"id": "same", "prompt": "x"} for _ in range(30))))
    assert "29 lines cannot be used" in caught.value.message
    assert "line 2: the id 'same' stands in line 1 already" in caught.value.message
    assert "and 9 more" in caught.value.message


def test_files_without_requests(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no requests"):
        BatchFile(_write(tmp_path / "in", "\n\n"))
    with pytest.raises(InputFileError, match="cannot be read"):
        BatchFile(tmp_path / "missing")
    with pytest.raises(InputFileError, match="cannot be read"):
        BatchFile(tmp_path)


def test_what_the_model_cannot_take_is_listed_too(llm: LLM, tmp_path: Path) -> None:
    lines = [
        {"id": "ok", "prompt": "x"},
        {"id": "a", "prompt": [256]},
        {"id": "b", "prompt": "x", "stop_token_ids": [999]},
    ]
    batch = BatchFile(_write(tmp_path / "in", *lines))
    with pytest.raises(UsageError, match="2 lines cannot be used") as caught:
        _answer(llm, batch, tmp_path / "out")
    assert "line 2: " in caught.value.message
    assert "line 3: " in caught.value.message
    with pytest.raises(UsageError, match="no chat template"):
        _answer(llm, BatchFile(_write(tmp_path / "in2", {"id": "a", "messages": HI})), tmp_path / "out2")
    assert not any((tmp_path / name).exists() for name in ("out", "out2"))


def test_a_request_that_fails_has_an_error_and_the_others_go_on(llm: LLM, tmp_path: Path) -> None:
    bias = {str(token): -100 for token in range(256)}
    lines = [{"id": "a", "prompt": "x", "max_tokens": 2}, {"id": "b", "prompt": "x", "logit_bias": bias}]
    batch = BatchFile(_write(tmp_path / "in", *lines))
    with AnswerFile(tmp_path / "out", {item.id: item for item in batch.items}) as answers:
        answer_all(llm, batch, answers, 2)
        assert answers.errors == 1
    found = {one["id"]: one for one in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert "no token can be drawn" in found["b"]["error"]
    assert found["a"]["completion_tokens"] == 2


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_cut_anywhere_the_rest_is_done_and_nothing_twice(llm: LLM, tmp_path: Path, data: st.DataObject) -> None:
    batch = BatchFile(_write(tmp_path / "in", *_requests(4)), "g1")
    whole = tmp_path / "whole"
    if not whole.exists():
        _answer(llm, batch, whole)
    raw = whole.read_bytes()
    length = data.draw(st.integers(0, len(raw)))
    out = tmp_path / "out"
    out.write_bytes(raw[:length] + data.draw(st.sampled_from([b"", b"\0" * 5])))
    if raw[:length].endswith(b"\n") or length == 0:
        out.write_bytes(raw[:length])
    lines = _answer(llm, batch, out, data.draw(st.integers(1, 6)))
    assert sorted(lines) == sorted(whole.read_text().splitlines())
    assert lines[: raw[:length].count(b"\n")] == whole.read_text().splitlines()[: raw[:length].count(b"\n")]


def test_a_file_that_is_not_ours_is_left_alone(llm: LLM, tmp_path: Path) -> None:
    batch = BatchFile(_write(tmp_path / "in", {"id": "a", "prompt": "x", "max_tokens": 2}))
    good = _answer(llm, batch, tmp_path / "good")[0]
    asked = {item.id: item for item in batch.items}
    other = {**json.loads(good), "request": "0" * 16}
    for content, complaint in (
        ("a letter to a friend", "no answer, nor the beginning of one"),
        ("a letter\n", "line 1 is no answer"),
        (json.dumps({"id": "b"}) + "\n", "which is not asked"),
        (good + "\n" + good + "\n", "again"),
        (json.dumps(other) + "\n", "another request"),
        (good + "\n" + "a letter", "line 2 is no answer"),
    ):
        out = tmp_path / "out"
        out.write_text(content)
        with pytest.raises(OutputError, match=complaint):
            AnswerFile(out, asked)
        assert out.read_text() == content


def test_answers_of_another_model_are_not_gone_on_from(llm: LLM, tmp_path: Path) -> None:
    batch = BatchFile(_write(tmp_path / "in", *_requests(2)), "g1")
    line = json.loads(_answer(llm, batch, tmp_path / "out")[0])
    _write(tmp_path / "other", {**line, "model": "0123456789abcdef-fp32"})
    with pytest.raises(OutputError, match="another model"):
        _answer(llm, batch, tmp_path / "other")


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    batch = BatchFile(_write(tmp_path / "in", *_requests(1)))
    asked = {item.id: item for item in batch.items}
    with AnswerFile(tmp_path / "out", asked), pytest.raises(OutputError, match="another process"):
        AnswerFile(tmp_path / "out", asked)
    with pytest.raises(OutputError, match="cannot be written"):
        AnswerFile(tmp_path / "nowhere" / "out", asked)


def test_a_full_disk_leaves_whole_lines(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = BatchFile(_write(tmp_path / "in", *_requests(4)), "g1")
    room, write = 700, os.pwrite

    def pwrite(file: int, data: bytes, offset: int) -> int:
        if offset >= room:
            raise OSError(28, "No space left on device")
        return write(file, data[: max(1, room - offset)], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OutputError, match="No space left"):
        _answer(llm, batch, tmp_path / "out", concurrency=1)
    kept = (tmp_path / "out").read_bytes()
    assert 0 < len(kept) <= room
    assert kept.endswith(b"\n")
    assert llm.engine.free_slots == 4
    monkeypatch.undo()
    assert len(_answer(llm, batch, tmp_path / "out")) == len(batch.items)


def test_requests_that_change_under_way_are_noticed(llm: LLM, tmp_path: Path) -> None:
    batch = BatchFile(_write(tmp_path / "in", {"id": "a", "prompt": "xy"}))
    _write(tmp_path / "in", {"id": "a", "prompt": "yx"})
    with pytest.raises(InputFileError, match="changed"):
        _answer(llm, batch, tmp_path / "out")


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_requests_or_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise"
    for data in (raw, b'{"id": "a", "prompt": "' + raw + b'"}', b'{"id": "a", "prompt": "x", ' + raw + b"}"):
        path.write_bytes(data)
        try:
            BatchFile(path)
        except KittiwakeError as error:
            str(error).encode()
