"""A tiny qwen4exp in GGUF files through the doors, by the tokenizer and the chat template inside them; one file or parts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kittiwake.bench.qwen4exp_shapes import Qwen4ExpShape, random_qwen4exp
from kittiwake.build import build_bundle
from kittiwake.chat import prepare
from kittiwake.checkpoints.bundle import read_bundle
from kittiwake.cli.inspect import examine
from kittiwake.cli.main import main
from kittiwake.config import EngineConfig
from kittiwake.engine.request import SamplingParams
from kittiwake.errors import CheckpointError, ModelError, TokenizerError
from kittiwake.llm import LLM
from kittiwake.load import load_model
from kittiwake.server.conversation import with_reasoning
from tests.families.qwen4exp_layouts import write_gguf, write_hf
from tests.server.live import live_server
from tests.test_qwen4exp_doors import TEMPLATE
from tests.text.gguf_metadata import vocabulary
from tests.text.tiny import make_qwen

BACKEND = make_qwen()
END, TURN_END = BACKEND.token_to_id("<|endoftext|>"), BACKEND.token_to_id("<|im_end|>")
SHAPE = Qwen4ExpShape(vocab=384, end_token=END, drafts=1)
TENSORS = random_qwen4exp(SHAPE, 1)
KEYS = {**vocabulary(BACKEND, SHAPE.vocab), "tokenizer.chat_template": TEMPLATE}
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PROMPT = "hello world, it's the end of text " * 4
MESSAGES = [{"role": "user", "content": "say <|im_end|> and </think>, hello"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file with everything in it."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", SHAPE, TENSORS, keys=KEYS)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same in parts, the first without tensors."""
    first = write_gguf(tmp_path_factory.mktemp("parts") / "model.gguf", SHAPE, TENSORS, keys=KEYS, part_tensors=30)
    return sorted(first.parent.iterdir())


@pytest.fixture(scope="module")
def llm(file: Path) -> LLM:
    return LLM(file, threads=1, slots=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the file was made from."""
    found = write_hf(tmp_path_factory.mktemp("hf"), SHAPE, TENSORS, eos_token_id=[END, TURN_END])
    BACKEND.save(str(found / "tokenizer.json"))
    (found / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (found / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return found


def json_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """What a command prints."""
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def test_the_file_reads_and_answers_as_its_folder_does(folder: Path, llm: LLM) -> None:
    with LLM(folder, threads=1, slots=2) as other:
        assert llm.encode(PROMPT) == other.encode(PROMPT)
        assert set(llm.tokenizer.eos_ids) == set(other.tokenizer.eos_ids) == {END, TURN_END}
        expected = other.generate(PROMPT, GREEDY)[0]
        found = llm.generate(PROMPT, GREEDY)[0]
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        for options in ({}, {"enable_thinking": False}, {"reasoning_effort": "low"}):
            theirs = prepare(other.chat_template(), other.tokenizer, MESSAGES, GREEDY, options)
            ours = prepare(llm.chat_template(), llm.tokenizer, MESSAGES, GREEDY, options)
            assert (ours.ids, ours.opening) == (theirs.ids, theirs.opening)
            assert ours.params.stop_token_ids == theirs.params.stop_token_ids


def test_reasoning_and_effort_reach_the_template(llm: LLM) -> None:
    lengths = set()
    for effort, opening in (("none", "<think>\n\n</think>\n\n"), ("low", "<think>\n"), (None, "<think>\n")):
        template, options = with_reasoning(llm.chat_template(), effort, None)
        prompt = prepare(template, llm.tokenizer, MESSAGES, GREEDY, options)
        assert prompt.opening.rstrip() == opening.rstrip()
        assert list(prompt.ids).count(TURN_END) == (2 if effort == "low" else 1)
        lengths.add(len(prompt.ids))
    assert len(lengths) == 3
    said = llm.chat(MESSAGES, GREEDY)
    assert len(said.completion.token_ids) == GREEDY.max_tokens and said.reasoning is not None


def test_run_and_inspect(file: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(
        capsys, *f"run {file} --max-tokens 20 --temperature 0 --ignore-eos --threads 1".split(), "--prompt", PROMPT
    )
    assert tuple(found["token_ids"]) == llm.generate(PROMPT, GREEDY)[0].token_ids
    report = json_of(capsys, "inspect", file)
    assert report["runs"], report["why_not"]
    assert report["layout"] == "gguf"
    assert report["tokenizer"]["found_by"] == "tokenizer.ggml.model 'gpt2', tokenizer.ggml.pre 'qwen35'"
    assert (report["tokenizer"]["kind"], report["tokenizer"]["vocab_size"]) == ("hf", llm.tokenizer.vocab_size)
    assert report["tokenizer"]["digest"] == llm.tokenizer.digest()
    assert report["metadata"]["tokenizer.ggml.tokens"] == "384 values of string"
    assert report["config"]["end_ids"] == [TURN_END]


def test_chat_through_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a template that lets the model answer at once."""
    text = TEMPLATE.replace("{{ '<think>\\n' }}", "")
    assert text != TEMPLATE
    path = write_gguf(tmp_path / "m.gguf", SHAPE, TENSORS, keys={**KEYS, "tokenizer.chat_template": text})
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello <|im_end|>\n"))
    assert main(f"chat {path} --max-tokens 20 --temperature 0 --threads 1".split()) == 0
    with LLM(path, threads=1, slots=1) as llm:
        said = llm.chat(
            [{"role": "user", "content": "hello <|im_end|>"}], SamplingParams(max_tokens=20, temperature=0.0)
        )
    assert said.content and capsys.readouterr().out == said.content + "\n"


def test_a_bundle_carries_tokenizer_and_template(file: Path, llm: LLM, tmp_path: Path) -> None:
    path = build_bundle(file, tmp_path / "bundle", goldens=1)
    bundle = read_bundle(path)
    bundle.source.close()
    assert bundle.tokenizer_files == llm.tokenizer.files()
    assert bundle.chat_template is not None and bundle.chat_template.endswith(TEMPLATE)
    with LLM(path, threads=1, slots=2) as other:
        assert other.tokenizer.digest() == llm.tokenizer.digest()
        assert set(other.tokenizer.eos_ids) == set(llm.tokenizer.eos_ids)
        for options in ({}, {"enable_thinking": False}):
            ours = prepare(other.chat_template(), other.tokenizer, MESSAGES, GREEDY, options)
            assert ours.ids == prepare(llm.chat_template(), llm.tokenizer, MESSAGES, GREEDY, options).ids
    chosen = build_bundle(file, tmp_path / "other", goldens=0, chat_template="{{ messages }}")
    assert read_bundle(chosen).chat_template == "{{ messages }}"


def test_lambada(file: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"hello {i} the end"}) + "\n" for i in range(3)), encoding="utf-8")
    found = [
        json_of(capsys, *f"eval lambada {path} --data {data} --threads 1 --save {tmp_path / path.name}.json".split())
        for path in (file, folder)
    ]
    assert found[0]["total"] == 3
    assert found[0]["accuracy"] == found[1]["accuracy"]
    assert found[0]["perplexity"] == pytest.approx(found[1]["perplexity"], rel=1e-4)


def test_serve(parts: list[Path], llm: LLM, tmp_path: Path) -> None:
    """The parts, over HTTP: the answer of the same chat in this process, reasoning apart or switched off."""
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with live_server(parts[1], tmp_path) as server:
        for effort in (None, "none", "low"):
            asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
            status, text = server.call(
                "POST", "/v1/chat/completions", asked | ({"reasoning_effort": effort} if effort else {})
            )
            assert status == 200, text
            template, options = with_reasoning(llm.chat_template(), effort, None)
            said = llm.chat(MESSAGES, params, template=template, options=options)
            message = json.loads(text)["choices"][0]["message"]
            assert (message["content"] or "", message.get("reasoning_content")) == (said.content or "", said.reasoning)
            assert json.loads(text)["usage"]["prompt_tokens"] == said.completion.prompt_tokens


def test_parts_answer_as_the_file_does_whichever_is_given(parts: list[Path], llm: LLM) -> None:
    """The table of n-grams lies in a later part, and is read there."""
    assert len(parts) > 2
    expected = llm.generate(PROMPT, GREEDY)[0].token_ids
    digests = set()
    for given in (parts[0], parts[-1], parts[0].parent):
        with LLM(given, threads=1, slots=2) as other:
            assert other.generate(PROMPT, GREEDY)[0].token_ids == expected
            assert other.encode(PROMPT) == llm.encode(PROMPT)
            digests.add(other.receipt()["model"]["digest"])
    assert len(digests) == 1
    report = examine(parts[1], progress=lambda *_: None)
    assert report["runs"], report["why_not"]
    assert report["metadata"]["split.count"] == len(parts)


def test_a_part_that_is_missing_is_named_by_inspect_and_load(parts: list[Path], tmp_path: Path) -> None:
    for path in parts[:-1]:
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match=parts[-1].name):
        load_model(tmp_path, EngineConfig(threads=1))
    with pytest.raises(CheckpointError, match=parts[-1].name):
        examine(tmp_path / parts[0].name, progress=lambda *_: None)


def refusal(path: Path, error: type[Exception], **changes: Any) -> str:
    """What loading a file with other keys says; ``inspect`` must say the same."""
    keys = {key: value for key, value in {**KEYS, **changes}.items() if value is not None}
    write_gguf(path, SHAPE, TENSORS, keys=keys)
    with pytest.raises(error) as caught:
        load_model(path, EngineConfig(threads=1))
    report = examine(path, digest=False, progress=lambda *_: None)
    assert (report["runs"], report["why_not"]) == (False, str(caught.value))
    return str(caught.value)


def test_what_is_not_served_is_refused_with_what_to_do(folder: Path, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    message = refusal(path, TokenizerError, **{"tokenizer.ggml.pre": "gpt-4o"})
    assert "tokenizer.ggml.pre is 'gpt-4o'" in message and "--tokenizer" in message
    with LLM(path, tokenizer=folder / "tokenizer.json", threads=1, slots=1) as other:
        assert other.encode(PROMPT) == llm.encode(PROMPT)
        assert other.chat_template().takes("enable_thinking")  # type: ignore[attr-defined]
    message = refusal(path, TokenizerError, **{"tokenizer.ggml.model": "llama"})
    assert "tokenizer.ggml.model is 'llama'" in message and "--tokenizer" in message
    message = refusal(path, CheckpointError, **{"tokenizer.chat_template": 7})
    assert "tokenizer.chat_template is 7, expected a text" in message
    message = refusal(path, ModelError, **{"tokenizer.ggml.eot_token_id": 384})
    assert "tokenizer.ggml.eot_token_id is 384, expected the id of a token, 0 to 383" in message


def test_without_a_tokenizer_inside_one_must_be_given(folder: Path, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(TokenizerError, match=r"pass the tokenizer\.json"):
        load_model(write_gguf(path, SHAPE, TENSORS), EngineConfig(threads=1))
    with LLM(path, tokenizer=folder / "tokenizer.json", threads=1, slots=1) as other:
        assert other.generate(PROMPT, GREEDY)[0].token_ids == llm.generate(PROMPT, GREEDY)[0].token_ids
