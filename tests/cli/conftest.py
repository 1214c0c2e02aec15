"""A model that is not there: the commands are tested against fakes of the modules they import when they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kittiwake.chat import ChatCompletion
from kittiwake.cli.main import main
from kittiwake.engine.request import Completion, Delta, SamplingParams, Timings, TokenLogprob


class FakeTokenizer:
    """One token a byte; 256 ends a text."""

    kind = "fake"
    vocab_size = 257
    eos_ids = (256,)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return list(text.encode())


@dataclass
class FakeLLM:
    """Answers every prompt with ``reply``, a word at a time, and remembers what it was asked."""

    reply: str = "the cat sat"
    interrupt_after: int | None = None
    opened: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    asked: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    closed_streams: int = 0
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    vocab_size: int = 257
    loaded: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(load_ms=12.5))

    def __call__(self, model: Path | None = None, **options: Any) -> FakeLLM:
        self.opened.append((model, options))
        return self

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def prefill(self, prompt: str) -> None:
        return None

    def generate(self, prompts: Any, params: SamplingParams | None = None, **_: Any) -> list[Completion]:
        params = params or SamplingParams()
        many = [prompts] if isinstance(prompts, str) else list(prompts)
        self.asked += [(prompt, params) for prompt in many]
        timings = Timings(queue_ms=0.0, prefill_ms=1.5, decode_ms=2.5)
        logprobs = None
        if params.logprobs:
            top = tuple(TokenLogprob(9 - index, -1.0 - index, b"x") for index in range(params.top_logprobs))
            logprobs = tuple(TokenLogprob(token, -0.5, b"\xc3", top) for token in (1, 2, 3))
        others = tuple(
            Completion(f"{self.reply} {index}", (1, 2, index), 4, "stop", timings, logprobs=logprobs)
            for index in range(1, params.n)
        )
        return [
            Completion(self.reply, (1, 2, 3), len(prompt), "length", timings, logprobs=logprobs, others=others)
            for prompt in many
        ]

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[Delta]:
        self.asked.append((prompt, params))
        words = self.reply.split(" ")
        try:
            for index, word in enumerate(words):
                if index == self.interrupt_after:
                    raise KeyboardInterrupt
                last = index == len(words) - 1
                yield Delta(0, word if index == 0 else f" {word}", (index,), "length" if last else None)
        finally:
            self.closed_streams += 1

    def chat(self, messages: Any, params: SamplingParams | None = None, **_: Any) -> ChatCompletion:
        self.asked.append((messages, params or SamplingParams()))
        return ChatCompletion(self.reply, None, Completion(self.reply, (1, 2, 3), 4, "stop"))

    def receipt(self, _: object = None) -> dict[str, Any]:
        return {"digest": self.reply}

    def score(self, ids: Sequence[int]) -> np.ndarray:
        return np.full(len(ids) - 1, np.log(0.25))


@dataclass
class Result:
    """What one call of the command line gave."""

    code: int
    stdout: str
    stderr: str


Call = Callable[..., Result]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command line in this process: ``call("run", "--prompt", "x")``."""

    def run(*arguments: str | Path) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def fake_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Put a module with the given names in the place of one that a command imports when it runs."""

    def install(name: str, **contents: object) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


@pytest.fixture
def llm(fake_module: Callable[..., ModuleType]) -> FakeLLM:
    """A fake in the place of kittiwake.llm.LLM."""
    fake = FakeLLM()
    fake_module("kittiwake.llm", LLM=fake)
    return fake


def fake_loaded(model: object) -> SimpleNamespace:
    """What load_model returns, around a fake model."""
    return SimpleNamespace(
        path=Path("fake"),
        format="bundle",
        model=model,
        dtype="fp32",
        threads=2,
        load_ms=12.5,
        tokenizer=FakeTokenizer(),
    )
