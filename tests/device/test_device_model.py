"""RWKV-7 on a card: right by the CPU's model, and the same bits however it is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from kittiwake.bench.random import load_random
from kittiwake.bench.shapes import SHAPES, Rwkv7Shape, random_rwkv7, small
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import SavedState, StateTable
from kittiwake.families.contract import Model
from kittiwake.load import load_tensors
from tests.device.answers import Answers, answers_of, answers_of_cpu, check_answers
from tests.device.ledger import LEDGER
from tests.device.runs import Runs, Trace, same_logits

pytestmark = pytest.mark.device
GROUPED_BY = ("name", "dtype")
ODD = small(3, 96, 32)  # ranks that are no multiples of 8, so other kernels than published shapes take
TENS = small(3, 60, 10)
MIDDLE = replace(SHAPES["0.1b"], layers=6, vocab=256)
COMPARED = {"small": small(), "heads of 32": ODD, "heads of 10": TENS, "0.1b": replace(SHAPES["0.1b"], vocab=256)}
ERRORS = {"fp32": 2e-5, "fp16": 2e-2, "bf16": 1e-1}


@cache
def tensors(shape: Rwkv7Shape) -> dict[str, torch.Tensor]:
    return random_rwkv7(shape, 1)


def on(device: str, shape: Rwkv7Shape, dtype: str) -> Model:
    """Random weights, the same on both devices."""
    return load_tensors(tensors(shape), EngineConfig(device=device, dtype=dtype)).model


@cache
def on_card(shape: Rwkv7Shape, dtype: str) -> Model:
    return on("cuda", shape, dtype)


@cache
def published(shape: str, dtype: str = "fp16") -> tuple[Runs, Trace]:
    """A published shape with weights drawn on the card, and what a sequence gives alone, one token a step."""
    runs = Runs(load_random(shape, EngineConfig(device="cuda", dtype=dtype)).model, slots=48)
    return runs, runs.trace(66 if shape == "0.1b" else 40)


@cache
def middling(dtype: str) -> tuple[Runs, Trace]:
    """Half the layers of 0.1B."""
    runs = Runs(on_card(MIDDLE, dtype), slots=48)
    return runs, runs.trace(50)


# Right


IDS = np.random.default_rng(5).integers(0, 256, 40).tolist()


@cache
def on_cpu(name: str) -> Answers:
    """In float32."""
    shape = COMPARED[name]
    return answers_of_cpu(f"rwkv-7 {name}", lambda: on("cpu", shape, "fp32"), IDS, (0, 1, shape.layers), 40)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", COMPARED)
def test_logits_states_and_hidden_are_those_of_the_cpu(name: str, dtype: str) -> None:
    """The CPU computes in float32 with the same weights; a state goes from the one to the other half-way."""
    expected, shape = on_cpu(name), COMPARED[name]
    start = SavedState(len(IDS), expected.parts)
    found = answers_of(on_card(shape, dtype), IDS, (0, 1, shape.layers), 40, start)
    check_answers(found, expected, f"{name} {dtype}", ERRORS[dtype])


def test_float16_stays_finite_where_keys_are_large() -> None:
    """Squares of the channel mix beyond 65,504, and keys of the time mix in their thousands."""
    shape = small()
    given = dict(tensors(shape))
    for name, tensor in given.items():
        for ending, factor in (("ffn.key.weight", 300), ("ffn.value.weight", 0.05), ("att.key.weight", 300)):
            if name.endswith(ending):
                given[name] = tensor * factor
    runs = Runs(load_tensors(given, EngineConfig(device="cuda", dtype="fp16")).model, slots=2)
    trace = runs.trace(40)
    assert np.isfinite(trace.logits).all()
    assert all(bool(torch.isfinite(state).all()) for steps in trace.states.values() for state in steps)
    assert runs.split(trace, [40])


# The same bits


@pytest.mark.parametrize("shape", ["0.1b", "1.5b"])
def test_steps_make_low_rank_products_themselves(shape: str) -> None:
    """Proved at load; a proof that failed would cost speed, and show nowhere else."""
    assert published(shape)[0].model._keeps_bits  # type: ignore[attr-defined]


@pytest.mark.parametrize(("shape", "splits", "crowds"), [("0.1b", 110, 70), ("1.5b", 20, 20)])
def test_splits_and_crowds_of_published_shapes(shape: str, splits: int, crowds: int) -> None:
    runs, trace = published(shape)
    length = len(trace.ids)
    for pieces in ([length], [length - 1, 1], [1, length - 1], *(runs.pieces(length) for _ in range(splits))):
        LEDGER.case(f"chunked = stepwise, {shape}", runs.split(trace, pieces))
    for _ in range(crowds):
        LEDGER.case(f"alone = in a crowd, {shape}", runs.crowd(trace, runs.draw.randint(1, 40)))
    assert LEDGER.holds(f"chunked = stepwise, {shape}") and LEDGER.holds(f"alone = in a crowd, {shape}")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_splits_and_crowds_in_other_types(dtype: str) -> None:
    runs, trace = middling(dtype)
    for _ in range(15):
        LEDGER.case(f"chunked = stepwise, {dtype}", runs.split(trace, runs.pieces(50)))
        LEDGER.case(f"alone = in a crowd, {dtype}", runs.crowd(trace, runs.draw.randint(1, 40)))
    assert LEDGER.holds(f"chunked = stepwise, {dtype}") and LEDGER.holds(f"alone = in a crowd, {dtype}")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("shape", [ODD, TENS], ids=["heads of 32", "heads of 10"])
def test_splits_and_crowds_of_odd_shapes(shape: Rwkv7Shape, dtype: str) -> None:
    runs = Runs(on_card(shape, dtype), slots=48)
    trace = runs.trace(66)
    for _ in range(8):
        LEDGER.case("odd shapes", runs.split(trace, runs.pieces(66)))
        LEDGER.case("odd shapes", runs.crowd(trace, runs.draw.randint(1, 40)))
    assert LEDGER.holds("odd shapes")


def test_a_graph_has_the_bits_of_eager_launches() -> None:
    """Asking for the residual stream launches eagerly and without padding."""
    runs, trace = published("0.1b")
    for pieces in ([66], [1] * 20, [17, 2, 40], [5, 1, 60]):
        (slot,) = runs.slots(1)
        at = 0
        for length in pieces:
            hidden = {3: np.empty((length, runs.model.config.width), np.float32)}
            batch = Batch.pack([(slot, trace.ids[at : at + length])])
            logits = runs.model.forward(batch, runs.states, hidden=hidden)[0]
            at += length
            LEDGER.case("graph = eager", runs.agrees(trace, at, slot, logits))
        runs.free([slot])
    assert LEDGER.holds("graph = eager")


def test_the_residual_stream_is_the_same_however_it_is_asked_for() -> None:
    runs, trace = published("0.1b")
    width, layers = runs.model.config.width, runs.model.config.layers
    arrays = []
    for pieces in ([66], [1] * 66, [31, 35]):
        (slot,), at = runs.slots(1), 0
        whole = {layer: np.full((66, width), np.nan, np.float32) for layer in (0, 5, layers)}
        for length in pieces:
            part = {layer: array[at : at + length] for layer, array in whole.items()}
            runs.model.forward(Batch.pack([(slot, trace.ids[at : at + length])]), runs.states, hidden=part)
            at += length
        runs.free([slot])
        arrays.append(whole)
    for other in arrays[1:]:
        LEDGER.case("residual stream", all(same_logits(other[layer], arrays[0][layer]) for layer in arrays[0]))
    assert LEDGER.holds("residual stream")


def test_states_may_move_be_saved_and_come_back() -> None:
    runs, trace = published("0.1b")
    for cut in (1, 17, 40, 65):
        home, away, third = runs.slots(3)
        runs.forward([(home, trace.ids[:cut])])
        runs.forward([(away, runs.ids(3))])
        saved = runs.states.save(home)
        runs.forward([(home, runs.ids(9))])  # the copy is a copy
        runs.states.restore(away, saved)
        between = StateTable(runs.model.state_spec, 1)  # in host memory, as a table of the CPU holds it
        place = between.allocate()
        between.restore(place, saved)
        runs.states.restore(third, between.save(place))
        for slot in (away, third):
            logits = runs.forward([(slot, trace.ids[cut:])])[0]
            LEDGER.case("moved and restored states", runs.agrees(trace, 66, slot, logits))
        assert int(runs.states.positions[away]) == 66
        runs.free([home, away, third])
    assert LEDGER.holds("moved and restored states")


def test_wanted_rows_may_stand_anywhere() -> None:
    runs, trace = published("0.1b")
    for index in range(12):
        slots = runs.slots(5)
        lengths = [66, 1, 40, 1, 17] if index % 2 else [1, 1, 30, 1, 2]
        want = [sorted(runs.draw.sample(range(length), runs.draw.randint(0, length))) for length in lengths]
        if index == 0:
            want = [[], [], [], [], []]
        rows = iter(
            runs.forward([(slot, trace.ids[:length]) for slot, length in zip(slots, lengths, strict=True)], want)
        )
        same = all(same_logits(next(rows), trace.logits[row]) for wanted in want for row in wanted)
        same &= all(runs.agrees(trace, n, slot, trace.logits[n - 1]) for slot, n in zip(slots, lengths, strict=True))
        LEDGER.case("wanted rows", same and next(rows, None) is None)
        runs.free(slots)
    assert LEDGER.holds("wanted rows")


@contextmanager
def most_rows(model: Model, rows: int) -> Iterator[None]:
    """A workspace that holds so many rows."""
    before = model.most_rows  # type: ignore[attr-defined]
    model.most_rows = rows  # type: ignore[attr-defined]
    try:
        yield
    finally:
        model.most_rows = before  # type: ignore[attr-defined]


def test_batches_beyond_the_workspace_are_cut_without_a_trace() -> None:
    runs, trace = published("0.1b")
    with most_rows(runs.model, 16):
        for _ in range(6):
            LEDGER.case("more rows than the workspace", runs.split(trace, runs.pieces(66)))
            LEDGER.case("more rows than the workspace", runs.crowd(trace, runs.draw.randint(1, 40)))
        slots = runs.slots(40)
        logits = runs.forward([(slot, trace.ids[:1]) for slot in slots])
        LEDGER.case("more rows than the workspace", all(same_logits(row, trace.logits[0]) for row in logits))
        runs.free(slots)
    assert LEDGER.holds("more rows than the workspace")


def test_more_sequences_than_the_largest_bucket_some_of_them_wanted() -> None:
    model = on_card(small(), "fp16")
    runs = Runs(model, slots=700)
    slots = runs.slots(700)
    firsts, seconds = runs.ids(700), runs.ids(700)
    expected = []
    for token, other in zip(firsts, seconds, strict=True):
        (slot,) = slots[:1]
        runs.states.clear(slot)
        runs.forward([(slot, [token])])
        expected.append(runs.forward([(slot, [other])])[0].copy())
    for slot in slots:
        runs.states.clear(slot)
    runs.forward([(slot, [token]) for slot, token in zip(slots, firsts, strict=True)])
    want = [[0] if index % 7 in (0, 3) else [] for index in range(700)]
    rows = runs.forward([(slot, [token]) for slot, token in zip(slots, seconds, strict=True)], want)
    wanted = [index for index, one in enumerate(want) if one]
    for row, index in zip(rows, wanted, strict=True):
        LEDGER.case("many sequences", same_logits(row, expected[index]))
    for slot in slots:
        runs.states.clear(slot)
    pairs = [(slot, list(pair)) for slot, *pair in zip(slots, firsts, seconds, strict=True)]
    found = model.forward_on_device(Batch.pack(pairs), runs.states).cpu().numpy()  # type: ignore[attr-defined]
    LEDGER.case("many sequences", all(map(same_logits, found, expected)))
    assert LEDGER.holds("many sequences")


def test_a_long_prompt_has_the_logits_of_all_its_rows() -> None:
    """More wanted rows than one launch makes logits for."""
    runs, _ = middling("bf16")
    ids = runs.ids(1100)
    first, second = runs.slots(2)
    rows = runs.forward([(first, ids)], [list(range(1100))])
    at = 0
    for length in (1, 511, 1, 87, 500):
        last = runs.forward([(second, ids[at : at + length])])[0]
        at += length
        LEDGER.case("all rows of a prompt", same_logits(last, rows[at - 1]))
    runs.free([first, second])
    assert LEDGER.holds("all rows of a prompt")


def test_logits_left_on_the_card_are_those_that_are_brought_home() -> None:
    runs, trace = published("0.1b")
    for lengths in ([66], [1] * 9, [1, 5, 1, 30]):
        slots = runs.slots(len(lengths))
        sequences = [(slot, trace.ids[:length]) for slot, length in zip(slots, lengths, strict=True)]
        found = runs.model.forward_on_device(Batch.pack(sequences), runs.states).cpu().numpy()  # type: ignore[attr-defined]
        same = all(runs.agrees(trace, n, s, row) for n, s, row in zip(lengths, slots, found, strict=True))
        LEDGER.case("logits on the card", same)
        runs.free(slots)
    assert LEDGER.holds("logits on the card")


def test_spare_rows_touch_no_state() -> None:
    """Padding of a bucket goes to the scratch slot; slots that no sequence of a batch has stay as they are."""
    runs, trace = published("0.1b")
    slots = runs.slots(6)
    for slot in slots:
        runs.forward([(slot, trace.ids[:9])])
    runs.forward([(slot, [5]) for slot in slots[:3]])  # a bucket of 3 and one of 4 beside it
    runs.forward([(slot, [7, 8, 9]) for slot in slots[:3]])
    runs.forward([(slot, [7]) for slot in slots[:5]])
    LEDGER.case("spare rows", runs.agrees(trace, 9, slots[5], trace.logits[8]))
    runs.free(slots)
    assert LEDGER.holds("spare rows")


def test_a_model_on_the_card_tells_its_picks_and_where_memory_goes() -> None:
    told = published("0.1b")[0].model.describe()
    assert told["device"] == "cuda" and told["card"] == torch.cuda.get_device_name()
    assert told["weight_bytes"] > 2 * 150e6 and told["workspace_bytes"] > 0
    assert {pick["shape"] for pick in told["picks"]} >= {"768x768", "65536x768", "768x3072", "3072x768"}
    assert all("bits proved" in pick["reason"] for pick in told["picks"])
    LEDGER.figure("0.1b: workspace, MB", told["workspace_bytes"] / 1e6)
    LEDGER.figure("0.1b: shapes with replaced picks", sum(bool(pick["replaced"]) for pick in told["picks"]))
