from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kittiwake.cli.run import StreamFigures, summary

from .conftest import Call, FakeLLM


def test_json_is_the_one_document_on_stdout(call: Call, llm: FakeLLM) -> None:
    result = call("run", "--prompt", "Once", "--json")
    assert result.code == 0
    document = json.loads(result.stdout)
    assert document.pop("timings") == {"load_ms": 12.5, "prefill_ms": 1.5, "decode_ms": 2.5}
    assert document == {
        "text": "the cat sat",
        "token_ids": [1, 2, 3],
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "finish_reason": "length",
    }


def test_json_gains_choices_and_logprobs_when_asked_for(call: Call, llm: FakeLLM) -> None:
    one = {"token_id": 1, "text": "\ufffd", "bytes": [0xC3], "logprob": -0.5}
    best = {"token_id": 9, "text": "x", "bytes": [ord("x")], "logprob": -1.0}
    plain = json.loads(call("run", "--prompt", "Once", "--json", "--logprobs", "0").stdout)
    assert [plain["logprobs"][0], len(plain["logprobs"])] == [{**one, "top": []}, 3]
    assert "choices" not in plain
    document = json.loads(call("run", "--prompt", "Once", "--json", "--logprobs", "1", "--n", "2").stdout)
    assert document["logprobs"][0] == {**one, "top": [best]}
    assert (document["text"], document["finish_reason"]) == ("the cat sat", "length")
    assert [choice["text"] for choice in document["choices"]] == ["the cat sat", "the cat sat 1"]
    assert document["choices"][1].pop("logprobs") == [{**one, "token_id": token, "top": [best]} for token in (1, 2, 3)]
    assert document["choices"][1] == {
        "index": 1,
        "text": "the cat sat 1",
        "token_ids": [1, 2, 1],
        "completion_tokens": 3,
        "finish_reason": "stop",
    }


def test_several_answers_stand_under_their_numbers(call: Call, llm: FakeLLM) -> None:
    result = call("run", "--prompt", "Once, ", "--n", "2", "--echo")
    assert result.stdout == "--- 1 of 2 ---\nOnce, the cat sat\n--- 2 of 2 ---\nOnce, the cat sat 1\n"
    assert llm.opened[0][1]["config"].slots == 2


def test_json_survives_text_that_no_terminal_could_show(call: Call, llm: FakeLLM) -> None:
    llm.reply = "caf\u00e9 \U0001f600 \u2028"
    result = call("run", "--prompt", "x", "--json")
    assert result.stdout.isascii()
    assert json.loads(result.stdout)["text"] == llm.reply


def test_text_streams_to_stdout_and_the_summary_goes_to_stderr(call: Call, llm: FakeLLM) -> None:
    result = call("run", "--prompt", "Once")
    assert (result.code, result.stdout) == (0, "the cat sat\n")
    assert result.stderr.count("\n") == 1
    assert "3 tokens" in result.stderr
    assert "ended by length" in result.stderr


def test_echo_prints_the_prompt_first(call: Call, llm: FakeLLM) -> None:
    assert call("run", "--prompt", "Once, ", "--echo").stdout == "Once, the cat sat\n"
    assert call("run", "--prompt", "Once, ", "--echo", "--json").code == 2


def test_every_option_reaches_the_model(call: Call, llm: FakeLLM) -> None:
    options = (
        "run some.pth --prompt x --max-tokens 9 --temperature 0.5 --top-k 7 --top-p 0.6 --seed 3 --stop A --stop B "
        "--stop-token-id 4 --stop-token-id 5 --ignore-eos --min-tokens 2 --tokenizer world --chunk 16 --dtype bf16 "
        "--device cpu --threads 1 --min-p 0.1 --presence-penalty 0.2 --frequency-penalty 0.3 --repetition-penalty 1.4 "
        "--logit-bias 7=-100 --logit-bias 3=1.5 --sampling-order rwkv"
    )
    assert call(*options.split()).code == 0
    prompt, params = llm.asked[0]
    assert prompt == "x"
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.seed) == (9, 0.5, 7, 0.6, 3)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.min_tokens) == (("A", "B"), (4, 5), True, 2)
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.1, 0.2, 0.3)
    assert (params.repetition_penalty, params.sampling_order) == (1.4, "rwkv")
    assert (params.logit_bias, params.n, params.logprobs) == ({3: 1.5, 7: -100.0}, 1, False)
    model, opened = llm.opened[0]
    assert (model, opened["tokenizer"]) == (Path("some.pth"), "world")
    config = opened["config"]
    assert (config.prefill_chunk, config.dtype, config.device, config.threads) == (16, "bf16", "cpu", 1)


def test_model_left_out_is_the_packaged_one(call: Call, llm: FakeLLM) -> None:
    call("run", "--prompt", "x")
    assert llm.opened[0][0] is None


def test_temperature_zero_alone_is_greedy(call: Call, llm: FakeLLM) -> None:
    assert call("run", "--prompt", "x", "--temperature", "0").code == 0
    assert (llm.asked[0][1].temperature, llm.asked[0][1].top_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        "--temperature 0 --top-p 0.5",
        "--temperature -1",
        "--temperature nan",
        "--top-p 0",
        "--top-p 1.5",
        "--max-tokens 0",
        "--min-tokens 9 --max-tokens 3",
        "--seed -1",
        "--threads -1",
        "--dtype fp8",
        "--nonsense",
        "--min-p 2",
        "--temperature 0 --min-p 0.1",
        "--temperature 0 --n 2",
        "--n 0",
        "--presence-penalty 3",
        "--repetition-penalty 0",
        "--logit-bias 3",
        "--logit-bias x=1",
        "--logit-bias 3=nan",
        "--logit-bias 3=101",
        "--logit-bias 3=1 --logit-bias 3=2",
        "--logprobs 21",
        "--sampling-order backwards",
    ],
)
def test_wrong_options_are_usage_errors_and_leave_stdout_empty(call: Call, llm: FakeLLM, wrong: str) -> None:
    result = call("run", "--prompt", "x", "--json", *wrong.split())
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert llm.opened == []


def test_logprobs_are_for_the_json_document(call: Call, llm: FakeLLM) -> None:
    result = call("run", "--prompt", "x", "--logprobs", "2")
    assert result.code == 2
    assert "--logprobs needs --json" in result.stderr


def _pipe(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


@pytest.mark.parametrize(
    ("raw", "prompt"),
    [(b"Once\n", "Once"), (b"Once\r\n", "Once"), (b"Once\n\n", "Once\n"), (b" Once", " Once"), ("é\n".encode(), "é")],
)
def test_piped_prompt_loses_one_newline_and_nothing_else(
    call: Call, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, raw: bytes, prompt: str
) -> None:
    _pipe(monkeypatch, raw)
    assert call("run").code == 0
    assert llm.asked[0][0] == prompt


def test_prompt_file(call: Call, llm: FakeLLM, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"From a file\n")
    assert call("run", "--prompt-file", path).code == 0
    assert llm.asked[0][0] == "From a file"


def test_prompts_that_cannot_be_used(call: Call, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _pipe(monkeypatch, b"")
    assert call("run").code == 2
    assert call("run", "--prompt", "").code == 2
    assert call("run", "--prompt", "x", "--prompt-file", tmp_path / "y").code == 2
    missing = call("run", "--prompt-file", tmp_path / "missing.txt")
    assert missing.code == 3
    assert "missing.txt" in missing.stderr
    _pipe(monkeypatch, b"ok \xff")
    latin = call("run")
    assert latin.code == 3
    assert "byte 3 is 0xff" in latin.stderr
    assert llm.opened == []


def test_a_terminal_without_a_prompt_is_told_what_to_do(
    call: Call, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pipe(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    result = call("run")
    assert result.code == 2
    assert "hint: give --prompt" in result.stderr


def test_ctrl_c_frees_the_request_and_ends_the_line(call: Call, llm: FakeLLM) -> None:
    llm.interrupt_after = 2
    result = call("run", "--prompt", "x")
    assert (result.code, result.stdout) == (130, "the cat\n")
    assert result.stderr.strip() == "interrupted"
    assert llm.closed_streams == 1


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = textwrap.dedent(
        """
        import sys, types
        from kittiwake.engine.request import Delta
        class LLM:
            def __init__(self, *a, **k): pass
            def __enter__(self): return self
            def __exit__(self, *a): pass
            def stream(self, prompt, params):
                for index in range(100000):
                    yield Delta(0, "word " * 20, (1,))
        module = types.ModuleType("kittiwake.llm")
        module.LLM = LLM
        sys.modules["kittiwake.llm"] = module
        from kittiwake.cli.main import main
        sys.exit(main(["run", "--prompt", "x"]))
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=30) == 141


def test_summary_counts_the_rate_after_the_first_token() -> None:
    figures = StreamFigures(first_token_ms=12.0, tokens=101, rest_ms=500.0, finish_reason="length")
    assert figures.decode_tok_s == 200.0
    assert summary(figures, 640.0) == (
        "[101 tokens · 200 tokens/s · first token after 12 ms · loaded in 0.64 s · ended by length]"
    )
    assert StreamFigures(12.0, 1, 0.0, "stop").decode_tok_s == 0.0
