"""qwen4exp on a card: right by the CPU's model, and the same bits however it is run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from kittiwake.bench.qwen4exp_shapes import Qwen4ExpShape
from kittiwake.bench.random import RandomSource, RandomWeights
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.request import SamplingParams
from kittiwake.engine.states import SavedState, StateTable, new_states
from kittiwake.errors import DeviceError, PagesError
from kittiwake.families.contract import Model
from kittiwake.families.qwen4exp.cuda_model import Qwen4ExpCuda
from kittiwake.llm import LLM
from kittiwake.load import Loaded, load_source
from kittiwake.verify.laws import verify
from kittiwake.verify.trace import Table, Trace, fingerprint
from tests.device.answers import Answers, answers_of, answers_of_cpu, check_answers
from tests.device.ledger import LEDGER

pytestmark = pytest.mark.device
CASES = {
    "one n-gram layer": Qwen4ExpShape(),
    "two n-gram layers": Qwen4ExpShape(ngram_layers=(0, 2), gate="silu", kv_heads=1),
    "attention twice": Qwen4ExpShape(
        layers=3, attention_layers=(0, 2), ngram_layers=(1,), ngram_size=2, budget=12, ratio=3, streams=3, value_heads=2,
        rotary_size=8,
    ),
    "heads as released": Qwen4ExpShape(
        layers=4, width=256, attention_layers=(1, 3), heads=12, kv_heads=2, head_size=256, rotary_size=64, theta=1e7,
        index_heads=4, index_size=128, budget=32, key_heads=4, value_heads=12, key_size=128, value_size=128,
        stream_rank=40, experts=64, experts_used=10, expert_width=80, shared_width=80, ngram_layers=(0, 2), ngram_heads=8,
        ngram_row=16,
    ),
}  # fmt: skip
COMPARED = CASES
ERRORS = {"fp32": 2e-5, "fp16": 5e-2, "bf16": 3e-1}
TOKENS = 72
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
MODELS = [
    ("one n-gram layer", "bf16"),
    ("two n-gram layers", "fp32"),
    ("two n-gram layers", "fp16"),
    ("attention twice", "bf16"),
    *(("heads as released", dtype) for dtype in ERRORS),
]
"""Each compiles a hundred kernels of its own: every shape, every dtype, and every dtype of the sizes that are released."""
GROUPED_BY = ("name", "dtype")
every_model = pytest.mark.parametrize(("name", "dtype"), MODELS)


@cache
def loaded(name: str, dtype: str) -> Loaded:
    """On the card, with weights that the host drew, as the CPU's model has them."""
    return load_source(RandomSource(RandomWeights(CASES[name], 1), name), EngineConfig(device="cuda", dtype=dtype))


def ids_of(name: str, count: int = TOKENS, seed: int = 3) -> list[int]:
    """A text with ends in it."""
    ids = np.random.default_rng(seed).integers(0, CASES[name].vocab, count)
    ids[[5, 6, 17, 19, 40]] = CASES[name].end_token
    return [int(token) for token in ids]


def pieces_of(count: int, draw: random.Random) -> list[int]:
    """A random split, 1s among the pieces."""
    out: list[int] = []
    while count:
        out.append(1 if draw.random() < 0.3 else draw.randint(1, count))
        count -= out[-1]
    return out


@cache
def traced(name: str, dtype: str) -> Trace:
    """What a text gives alone, one token a step."""
    return Trace(loaded(name, dtype).model, ids_of(name))


@cache
def on_cpu(name: str) -> Answers:
    """In float32."""

    def make() -> Model:
        source = RandomSource(RandomWeights(CASES[name], 1), name)
        return load_source(source, EngineConfig(device="cpu", dtype="fp32", threads=2)).model

    return answers_of_cpu(f"qwen4exp {name}", make, ids_of(name), range(CASES[name].layers + 1), 30)


@every_model
def test_logits_states_and_hidden_are_those_of_the_cpu(name: str, dtype: str) -> None:
    """The CPU computes in float32 with the same weights; a state goes from the one to the other half-way."""
    expected, layers = on_cpu(name), range(CASES[name].layers + 1)
    start = SavedState(TOKENS, expected.parts)
    found = answers_of(loaded(name, dtype).model, ids_of(name), layers, 30, start)
    assert np.array_equal(found.parts["ngram_ids"], expected.parts["ngram_ids"])
    check_answers(found, expected, f"{name} {dtype}", ERRORS[dtype])


@every_model
def test_splits_have_the_bits_of_single_steps(name: str, dtype: str) -> None:
    trace, table, draw = traced(name, dtype), Table(loaded(name, dtype).model, 1), random.Random(1)
    for pieces in ([TOKENS], [TOKENS - 1, 1], [1, TOKENS - 1], *(pieces_of(TOKENS, draw) for _ in range(6))):
        slot = table.states.allocate()
        LEDGER.case("chunked = stepwise, qwen4exp", table.follows(trace, slot, pieces))
        table.states.free(slot)
    assert LEDGER.holds("chunked = stepwise, qwen4exp")


@every_model
def test_a_crowd_changes_no_bit(name: str, dtype: str) -> None:
    trace, draw = traced(name, dtype), random.Random(2)
    model = loaded(name, dtype).model
    for others in (1, 4, 23):
        table = Table(model, others + 1)
        slots = [table.states.allocate() for _ in range(others)]
        mine, at, same = table.states.allocate(), 0, True
        for length in pieces_of(TOKENS, draw):
            vocab = CASES[name].vocab
            sequences = [
                (slot, [draw.randrange(vocab) for _ in range(draw.choice((1, 1, 1, 3, 20)))]) for slot in slots
            ]
            place = draw.randint(0, others)
            sequences.insert(place, (mine, trace.ids[at : at + length]))
            at += length
            same &= table.step(sequences)[place] == trace.marks[at - 1]
        LEDGER.case("alone = in a crowd, qwen4exp", same)
    assert LEDGER.holds("alone = in a crowd, qwen4exp")


@every_model
def test_decoding_at_every_bucket_has_the_bits_of_one_alone(name: str, dtype: str) -> None:
    """Few sequences take other kernels than many: pairs of experts in their own order, other layouts of products."""
    trace, table = traced(name, dtype), Table(loaded(name, dtype).model, 47)
    for count in (1, 2, 3, 4, 5, 9, 33, 47):
        slots = [table.states.allocate() for _ in range(count)]
        for at in range(3):
            marks = table.step([(slot, [trace.ids[at]]) for slot in slots])
        LEDGER.case("bucket = alone, qwen4exp", set(marks) == {trace.marks[2]})
        for slot in slots:
            table.states.free(slot)
    assert LEDGER.holds("bucket = alone, qwen4exp")


@every_model
def test_graphs_and_overlap_have_the_bits_of_plain_launches(name: str, dtype: str) -> None:
    """Asked for hidden states, a step is launched kernel by kernel."""
    trace, model = traced(name, dtype), loaded(name, dtype).model
    assert isinstance(model, Qwen4ExpCuda)
    for overlap in (False, True):
        if overlap and torch.cuda.get_device_capability()[0] < 9:
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "overlap", overlap)
            for is_eager in (False, True):
                LEDGER.case("graph = eager, qwen4exp", _follows_by(model, trace, is_eager))
    assert LEDGER.holds("graph = eager, qwen4exp")


def _follows_by(model: Model, trace: Trace, is_eager: bool) -> bool:
    states = new_states(model, 1)
    slot, same = states.allocate(), True
    for token, mark in zip(trace.ids, trace.marks, strict=True):
        hidden = {0: np.zeros((1, model.config.width), np.float32)} if is_eager else None
        logits = model.forward(Batch.pack([(slot, [token])]), states, hidden=hidden)
        same &= fingerprint(logits[0], states.save(slot).parts) == mark
    return same


@every_model
def test_a_state_comes_back_by_way_of_the_host(name: str, dtype: str) -> None:
    trace, table = traced(name, dtype), Table(loaded(name, dtype).model, 2)
    home, away = table.states.allocate(), table.states.allocate()
    for first in (6, 7, 18, 42):
        table.states.clear(home)
        table.step([(home, trace.ids[:first])])
        between = StateTable(table.model.state_spec, 1, 2)
        place = between.allocate()
        between.restore(place, table.states.save(home))
        table.states.restore(away, between.save(place))
        LEDGER.case("restored = fresh, qwen4exp", table.step([(away, trace.ids[first:])])[0] == trace.marks[-1])
    assert LEDGER.holds("restored = fresh, qwen4exp")


@every_model
def test_every_law_holds(name: str, dtype: str) -> None:
    differing: dict[str, str] = {}
    for law in verify(loaded(name, dtype), EngineConfig(device="cuda", dtype=dtype)):
        assert law.cases > 0
        LEDGER.case(f"verify, qwen4exp {name}", law.differing == 0)
        differing |= {law.name: f"{law.differing} of {law.cases}"} if law.differing else {}
    assert not differing


def answers(llm: LLM, prompts: Sequence[str]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in llm.generate(list(prompts), GREEDY)]


@pytest.mark.parametrize(("name", "dtype"), [("two n-gram layers", "fp16")])
def test_answers_are_the_same_whatever_the_engine_holds(name: str, dtype: str) -> None:
    """The host draws, so answers' states are kept, and a prompt alone may be longer than what requests share."""
    model = loaded(name, dtype)
    texts = ["It was a dark night, and the old house by the sea", "a", "In the beginning " * 9] * 3
    expected = []
    for text in texts[:3]:
        with LLM.from_loaded(model, EngineConfig(device="cuda", slots=1)) as alone:
            expected += answers(alone, [text])
    for options in (
        {"slots": 9},
        {"slots": 2, "prefill_chunk": 7, "max_rows": 16, "max_chunk": 64},
        {"cache_ram_bytes": 64 << 20},
    ):
        with LLM.from_loaded(model, EngineConfig(device="cuda", **options)) as llm:
            for _ in range(2):
                LEDGER.case("answers: engine settings, qwen4exp", answers(llm, texts) == expected * 3)
    assert LEDGER.holds("answers: engine settings, qwen4exp")


@pytest.mark.parametrize(("name", "dtype"), [("two n-gram layers", "fp32")])
def test_too_long_a_text_is_refused_with_nothing_changed(name: str, dtype: str) -> None:
    model = loaded(name, dtype).model
    states = new_states(model, 1, 2 * model.state_spec.page_bytes)
    slot = states.allocate()
    model.forward(Batch.pack([(slot, [1, 2, 3])]), states)
    before = states.save(slot)
    with pytest.raises(PagesError):
        model.forward(Batch.pack([(slot, [1] * 3 * model.state_spec.page_tokens)]), states)
    assert states.save(slot).digest == before.digest and states.save(slot).position == 3
    with pytest.raises(DeviceError, match="the card has no room for"):
        new_states(model, 1, 1 << 45)
