"""The engine and the command line on a card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kittiwake.bench.random import load_random
from kittiwake.cli.main import cli
from kittiwake.config import EngineConfig
from kittiwake.engine.request import SamplingParams
from kittiwake.engine.states import new_states
from kittiwake.errors import DeviceError
from kittiwake.llm import LLM
from kittiwake.load import load_model, packaged_model
from tests.device.ledger import LEDGER

pytestmark = pytest.mark.device
PROMPTS = [
    "It was a dark night, and the old house by the sea",
    "a",
    "The sum of two and two is",
    "Once there was a bird that flew over the cliffs, and every evening it came back to the same ledge " * 3,
    "In the beginning",
] * 4
KINDS = (
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=17, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.0, presence_penalty=0.6, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.2, top_k=40, frequency_penalty=0.4, seed=4, ignore_eos=True),
)


@cache
def packaged(dtype: str = "fp16") -> LLM:
    """The packaged model on the card."""
    config = EngineConfig(device="cuda", dtype=dtype, slots=24)
    return LLM.from_loaded(load_model(None, config), config)


def params(index: int) -> SamplingParams:
    return KINDS[index % len(KINDS)]


def test_answers_are_the_same_alone_and_in_a_crowd() -> None:
    llm = packaged()
    crowd = llm.generate(PROMPTS, [params(index) for index in range(len(PROMPTS))])
    for index in range(0, len(PROMPTS), 3):
        (alone,) = llm.generate(PROMPTS[index], params(index))
        LEDGER.case("answers: alone = in a crowd", alone.token_ids == crowd[index].token_ids)
        assert len(alone.token_ids) == params(index).max_tokens
    assert LEDGER.holds("answers: alone = in a crowd")


def test_answers_are_the_same_whatever_the_engine_holds() -> None:
    """More requests than slots, prompts cut short, few rows a step."""
    loaded = packaged().loaded
    expected = packaged().generate(PROMPTS, [params(index) for index in range(len(PROMPTS))])
    for slots, chunk, rows in ((3, 7, 16), (1, 0, 2048), (20, 64, 64)):
        llm = LLM.from_loaded(loaded, EngineConfig(device="cuda", slots=slots, prefill_chunk=chunk, max_rows=rows))
        found = llm.generate(PROMPTS[:7], [params(index) for index in range(7)])
        for one, other in zip(found, expected, strict=False):
            LEDGER.case("answers: engine settings", one.token_ids == other.token_ids)
        llm.close()
    assert LEDGER.holds("answers: engine settings")


def test_an_answer_goes_on_from_a_state_kept_on_disk(tmp_path: Path) -> None:
    llm = packaged()
    whole, half = (SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (24, 10))
    (expected,) = llm.generate(PROMPTS[0], whole)
    (first,) = llm.generate(PROMPTS[0], half, keep_state=True)
    assert first.state is not None
    llm.save_state(first.state, tmp_path / "kept.state")
    (rest,) = llm.generate("", SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True),
                           start_from=llm.load_state(tmp_path / "kept.state"))  # fmt: skip
    LEDGER.case("answers: kept states", [*first.token_ids, *rest.token_ids] == list(expected.token_ids))
    assert LEDGER.holds("answers: kept states")


def test_goldens_of_the_packaged_model_are_nearly_those_of_the_cpu() -> None:
    """Greedy tokens on two devices may part at a near tie, and after that they are other texts."""
    cpu = LLM(device="cpu", dtype="fp32")
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    found, expected = (llm.generate(PROMPTS[:5], greedy) for llm in (packaged("fp32"), cpu))
    same = sum(one.token_ids[:4] == other.token_ids[:4] for one, other in zip(found, expected, strict=True))
    LEDGER.figure("of 5 greedy answers, float32 on card and CPU: equal for 4 tokens", same)
    assert same >= 4


# Memory


@contextmanager
def memory_limit(spare_bytes: int) -> Iterator[None]:
    """This process may take only so much more of the card."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + spare_bytes) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_a_model_that_does_not_fit_is_refused_in_clear_words() -> None:
    with (
        memory_limit(1 << 29),
        pytest.raises(DeviceError, match=r"no room for random 1\.5b kept as fp16: \S+ \w+ were asked for, "),
    ):
        load_random("1.5b", EngineConfig(device="cuda", dtype="fp16"))


def test_slots_that_do_not_fit_are_refused_in_clear_words() -> None:
    model = packaged().loaded.model
    slots = (1 << 30) // model.state_spec.slot_bytes
    expected = rf"^the card has no room for {slots} slots of [^:]+: [^:]+ may have [\d.]+ \w+ \(take fewer slots\)$"
    with memory_limit(1 << 28), pytest.raises(DeviceError, match=expected):
        new_states(model, slots)
    answer = packaged().generate(PROMPTS[1], KINDS[0])  # and the engine goes on
    assert len(answer[0].token_ids) == 24


# The command line


def test_verify_finds_the_packaged_model_exact() -> None:
    result = CliRunner().invoke(cli, ["verify", str(packaged_model()), "--device", "cuda", "--dtype", "fp16", "--json"])
    assert result.exit_code == 0, result.output[-2000:] + str(result.exception)
    document = json.loads(result.stdout)
    for law in document["laws"]:
        for case in range(law["cases"]):
            LEDGER.case(f"verify: {law['name']}", case >= law["differing"])
    assert document["ok"]


def test_doctor_names_the_card_and_what_was_picked() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--device", "cuda", "--json"])
    assert result.exit_code == 0, result.output[-2000:] + str(result.exception)
    report = json.loads(result.stdout)
    assert report["card"]["usable"] and report["card"]["name"] == torch.cuda.get_device_name()
    assert report["model"]["device"] == "cuda"
    assert report["model"]["picked"]["picks"]
    assert all(row["ok"] for row in report["kernel_languages"][:2])
