"""RWKV-4, 5 and 6 on a card: right by the CPU's models, and the same bits however they are run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from kittiwake.bench.rwkv4_shapes import Rwkv4Shape, random_rwkv4
from kittiwake.bench.rwkv56_shapes import Rwkv5Shape, Rwkv6Shape, random_rwkv5, random_rwkv6
from kittiwake.config import EngineConfig
from kittiwake.engine.states import SavedState, StateTable
from kittiwake.families.contract import Model
from kittiwake.load import Loaded, load_tensors
from kittiwake.verify.laws import verify
from tests.device.answers import Answers, answers_of, answers_of_cpu, check_answers
from tests.device.ledger import LEDGER
from tests.device.runs import Runs, Trace, same_logits
from tests.oracles.measure import relative_error

pytestmark = pytest.mark.device
Tensors = dict[str, torch.Tensor]
CASES: dict[str, tuple[Callable[..., Tensors], Any, dict[str, Any]]] = {
    "4": (random_rwkv4, Rwkv4Shape(8, 64, vocab=256), {}),
    "4, other widths, large keys": (random_rwkv4, Rwkv4Shape(3, 60, vocab=256, ffn=100, attention=96), {"key_gain": 30.0}),
    "5.0": (random_rwkv5, Rwkv5Shape(3, 128, "5.0", 32, vocab=256), {}),
    "5.1, heads of 10": (random_rwkv5, Rwkv5Shape(3, 60, "5.1", 10, vocab=256), {}),
    "5.2, logarithm of the bonus": (random_rwkv5, Rwkv5Shape(8, 128, "5.2", 64, vocab=256), {"plain_bonus": False}),
    "6": (random_rwkv6, Rwkv6Shape(8, 128, 8, 16, 64, vocab=256), {}),
    "6, odd ranks": (random_rwkv6, Rwkv6Shape(3, 60, 3, 5, 10, vocab=256), {}),
}  # fmt: skip
COMPARED = CASES
ERRORS = {"fp32": 2e-5, "fp16": 5e-2, "bf16": 3e-1}
GROUPED_BY = ("name", "dtype")
every_case = pytest.mark.parametrize("name", CASES)
every_dtype = pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])


@cache
def tensors(name: str) -> Tensors:
    make, shape, options = CASES[name]
    return make(shape, 1, **options)


@cache
def loaded(name: str, device: str, dtype: str) -> Loaded:
    """Random weights, the same on both devices."""
    return load_tensors(tensors(name), EngineConfig(device=device, dtype=dtype))


def model_of(name: str, device: str, dtype: str) -> Model:
    return loaded(name, device, dtype).model


@cache
def traced(name: str, dtype: str) -> tuple[Runs, Trace]:
    """What a sequence gives alone, one token a step."""
    runs = Runs(model_of(name, "cuda", dtype), slots=48)
    return runs, runs.trace(66)


IDS = np.random.default_rng(5).integers(0, 256, 40).tolist()


@cache
def on_cpu(name: str) -> Answers:
    """In float32."""
    layers = (0, 1, CASES[name][1].layers)
    return answers_of_cpu(f"rwkv-{name}", lambda: model_of(name, "cpu", "fp32"), IDS, layers, 40)


@every_dtype
@every_case
def test_logits_states_and_hidden_are_those_of_the_cpu(name: str, dtype: str) -> None:
    """The CPU computes in float32 with the same weights; a state goes from the one to the other half-way."""
    expected, last = on_cpu(name), CASES[name][1].layers
    start = SavedState(len(IDS), expected.parts)
    found = answers_of(model_of(name, "cuda", dtype), IDS, (0, 1, last), 40, start)
    check_answers(found, expected, f"{name} {dtype}", ERRORS[dtype])


@pytest.mark.parametrize(("name", "dtype"), [("6", "fp16"), ("6", "bf16")])
def test_steps_make_low_rank_products_themselves(name: str, dtype: str) -> None:
    """Proved at load; a proof that failed would cost speed, and show nowhere else."""
    model: Any = traced(name, dtype)[0].model
    assert model._keeps_bits and model._keeps_low_bits


@every_dtype
@every_case
def test_splits_and_crowds_have_the_bits_of_single_steps(name: str, dtype: str) -> None:
    runs, trace = traced(name, dtype)
    for pieces in ([66], [65, 1], [1, 65], *(runs.pieces(66) for _ in range(6))):
        LEDGER.case(f"chunked = stepwise, RWKV-{name[0]}", runs.split(trace, pieces))
    for others in (1, 4, runs.draw.randint(5, 40)):
        LEDGER.case(f"alone = in a crowd, RWKV-{name[0]}", runs.crowd(trace, others))
    assert LEDGER.holds(f"chunked = stepwise, RWKV-{name[0]}") and LEDGER.holds(f"alone = in a crowd, RWKV-{name[0]}")


@pytest.mark.parametrize("dtype", ["fp16"])
@every_case
def test_decoding_at_every_bucket_has_the_bits_of_one_alone(name: str, dtype: str) -> None:
    """Few sequences take other kernels than many: low-rank products inside, other layouts of products."""
    runs, trace = traced(name, dtype)
    for count in (1, 2, 4, 5, 9, 33, 47):
        slots = runs.slots(count)
        for token in trace.ids[:3]:
            logits = runs.forward([(slot, [token]) for slot in slots])
        same = all(runs.agrees(trace, 3, slot, row) for slot, row in zip(slots, logits, strict=True))
        LEDGER.case(f"bucket = alone, RWKV-{name[0]}", same)
        runs.free(slots)
    assert LEDGER.holds(f"bucket = alone, RWKV-{name[0]}")


@pytest.mark.parametrize("dtype", ["fp32"])
@every_case
def test_states_are_saved_and_come_back_by_way_of_the_host(name: str, dtype: str) -> None:
    runs, trace = traced(name, dtype)
    home, away = runs.slots(2)
    runs.forward([(home, trace.ids[:17])])
    between = StateTable(runs.model.state_spec, 1)
    place = between.allocate()
    between.restore(place, runs.states.save(home))
    runs.states.restore(away, between.save(place))
    logits = runs.forward([(away, trace.ids[17:])])[0]
    LEDGER.case("restored = fresh", runs.agrees(trace, 66, away, logits))
    runs.free([home, away])
    assert LEDGER.holds("restored = fresh")


@pytest.mark.parametrize("dtype", ["fp16"])
@every_case
def test_every_law_holds(name: str, dtype: str) -> None:
    differing: dict[str, str] = {}
    for law in verify(loaded(name, "cuda", dtype), EngineConfig(device="cuda", dtype=dtype)):
        assert law.cases > 0
        LEDGER.case(f"verify, RWKV-{name[0]}", law.differing == 0)
        differing |= {law.name: f"{law.differing} of {law.cases}"} if law.differing else {}
    assert not differing


@pytest.mark.parametrize(("name", "dtype"), [("4", "fp32")])
def test_a_fresh_slot_begins_with_nothing_on_the_card_too(name: str, dtype: str) -> None:
    """RWKV-4's largest exponent begins far below zero: a first key of -110 has all the weight."""
    runs = Runs(model_of(name, "cuda", dtype), slots=2)
    (slot,) = runs.slots(1)
    assert float(runs.states.part("top")[:, slot].max()) == float(np.float32(-1e38))
    runs.forward([(slot, [1, 2])])
    runs.free([slot])
    (again,) = runs.slots(1)
    assert again == slot and float(runs.states.part("top")[:, again].max()) == float(np.float32(-1e38))


@pytest.mark.parametrize(("name", "dtype"), [("4", "fp32")])
@pytest.mark.parametrize("every", [1, 2])
def test_the_epsilons_of_a_halved_stream_are_those_of_the_cpu(every: int, name: str, dtype: str) -> None:
    ids = np.random.default_rng(3).integers(0, 256, 20).tolist()
    logits = {}
    for device in ("cpu", "cuda"):
        config = EngineConfig(device=device, dtype=dtype, rescale_every=every)
        runs = Runs(load_tensors(tensors(name), config).model, slots=2)
        (slot,) = runs.slots(1)
        logits[device] = runs.forward([(slot, ids)], [list(range(20))])
    assert relative_error(logits["cuda"], logits["cpu"]) < ERRORS["fp32"]


@pytest.mark.parametrize("dtype", ["fp16"])
@pytest.mark.parametrize("name", ["4", "5.2, logarithm of the bonus", "6"])
def test_float16_stays_finite_where_late_blocks_add_more_than_it_holds(name: str, dtype: str) -> None:
    """Outputs of up to 67,000 to 118,000 in layers 6 and 7, whose weights are halved for float16."""
    given = dict(tensors(name))
    for ending, factor in (("ffn.key.weight", 60), ("ffn.value.weight", 8)):
        for layer in (6, 7):
            given[f"blocks.{layer}.{ending}"] = given[f"blocks.{layer}.{ending}"] * factor
    runs = Runs(load_tensors(given, EngineConfig(device="cuda", dtype=dtype)).model, slots=2)
    trace = runs.trace(30)
    assert np.isfinite(trace.logits).all()
    assert runs.split(trace, [30])
    assert not same_logits(trace.logits[0], trace.logits[1])
