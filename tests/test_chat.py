from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kittiwake.chat import split_completion, split_stream, with_stops
from kittiwake.engine.request import Completion, Delta, SamplingParams
from kittiwake.errors import RequestError, UsageError
from kittiwake.llm import LLM
from kittiwake.text.chat import TEMPLATES
from tests.models import tiny_llm

HI = [{"role": "user", "content": "hi"}]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(slots=2)


def test_a_chat_is_the_prompt_that_its_template_writes(llm: LLM) -> None:
    answer = llm.chat(HI, GREEDY, template="g1")
    plain = llm.generate("User: hi\n\nAssistant:", with_stops(GREEDY, TEMPLATES["g1"]))[0]
    assert answer.completion.token_ids == plain.token_ids
    assert answer.content == plain.text.lstrip()
    assert answer.message == {"role": "assistant", "content": answer.content}
    assert answer.reasoning is None


def test_streamed_is_whole(llm: LLM) -> None:
    for template in ("g1", "g1-think", "g1-fast"):
        whole = llm.chat(HI, GREEDY, template=template)
        deltas = list(llm.stream_chat(HI, GREEDY, template=template))
        assert "".join(delta.content for delta in deltas) == whole.content
        assert "".join(delta.reasoning for delta in deltas) == (whole.reasoning or "")
        assert tuple(token for delta in deltas for token in delta.token_ids) == whole.completion.token_ids
        assert deltas[-1].finish_reason == whole.completion.finish_reason


def test_closing_a_stream_frees_its_slot(llm: LLM) -> None:
    stream = llm.stream_chat(HI, replace(GREEDY, max_tokens=500), template="g1")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm.engine.step()
    assert llm.engine.free_slots == 2


def test_a_model_without_a_template_says_so(llm: LLM) -> None:
    with pytest.raises(UsageError, match="memory has no chat template") as caught:
        llm.chat(HI)
    assert "g1" in caught.value.hint
    with pytest.raises(UsageError, match="no chat template 'nonsense'"):
        llm.chat(HI, template="nonsense")


def test_a_template_of_ones_own(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ name }}: {{ messages[0].content }}")
    answer = llm.chat(HI, GREEDY, template=path, options={"name": "Bo"})
    assert answer.completion.token_ids == llm.generate("Bo: hi", GREEDY)[0].token_ids


def test_stops_are_added_and_several_samples_refused() -> None:
    params = with_stops(SamplingParams(stop=("x", "\nUser:")), TEMPLATES["g1"])
    assert params.stop == ("x", "\nUser:", "\n\nUser:")
    with pytest.raises(RequestError, match="ask for n 2"):
        with_stops(SamplingParams(n=2), TEMPLATES["g1"])


def test_encode_and_decode(llm: LLM) -> None:
    assert llm.encode("hé") == [104, 195, 169]
    assert llm.decode([104, 195]) == "h\ufffd"


def test_reasoning_cut_off_by_the_last_token_is_reasoning() -> None:
    texts = [">we", "ll</thi", ""]
    deltas = [Delta(1, text, (0,), "length" if text == "" else None) for text in texts]
    parts = list(split_stream(deltas, "<think"))
    assert "".join(part.reasoning for part in parts) == "well</thi"
    whole = split_completion(Completion("".join(texts), (0, 0, 0), 1, "length"), "<think")
    assert (whole.reasoning, whole.content) == ("well</thi", "")
