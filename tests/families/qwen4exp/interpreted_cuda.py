"""The whole model of the CUDA path in Triton's interpreter; test_qwen4exp_cuda.py runs this in a process of its own.

The shape has the traps: a budget that the text crosses, blocks of several tokens, value heads and query heads that share
key heads, a rotation of part of a head, two n-gram layers of which one is the first, and ends in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from kittiwake.bench.draw import made
from kittiwake.bench.qwen4exp_shapes import Qwen4ExpShape, one_table, qwen4exp_config, qwen4exp_recipes
from kittiwake.engine.batch import Batch
from kittiwake.engine.cuda_states import CudaStateTable
from kittiwake.engine.request import SamplingParams
from kittiwake.engine.states import SavedState, StateTable
from kittiwake.errors import DeviceError, PagesError
from kittiwake.families.contract import Model, SequencesError
from kittiwake.families.cuda_rows import Shape
from kittiwake.families.qwen4exp import cuda_model
from kittiwake.families.qwen4exp.cuda_model import Qwen4ExpCuda
from kittiwake.families.qwen4exp.family import Qwen4ExpFamily
from kittiwake.load import TensorDict
from tests.engine.drive import ask, make_engine
from tests.families.agreement import Run, same_run
from tests.families.recorded_graphs import recorded_graphs
from tests.ops.interpreted_kernels import dot_in_order, make_interpretable
from tests.oracles.measure import relative_error

CPU = torch.device("cpu")
SHAPE = Qwen4ExpShape(
    layers=3, width=16, vocab=64, attention_layers=(1,), heads=2, kv_heads=1, head_size=16, rotary_size=4, index_heads=2,
    index_size=8, budget=8, ratio=4, key_heads=1, value_heads=2, key_size=8, value_size=12, streams=2, stream_rank=8,
    experts=6, experts_used=2, expert_width=12, shared_width=20, ngram_layers=(0, 2), ngram_size=3, ngram_heads=1,
    ngram_row=8, ngram_base=30, ngram_parts=1, end_token=7,
)  # fmt: skip
IDS = [3, 9, 7, 11, 40, 7, 7, 19, 33, 5, 60, 21, 8]
"""The twelfth token is the first that does not see all before it."""
CONFIG = qwen4exp_config(SHAPE)
TENSORS = made(one_table(SHAPE, qwen4exp_recipes(SHAPE, 5, torch.float32)))


@pytest.fixture(scope="module", autouse=True)
def _interpretable() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        make_interpretable(patch)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_order)
        yield


FAMILY, SOURCE = Qwen4ExpFamily(), TensorDict(TENSORS, "memory", CONFIG)
MODEL = FAMILY.read_config(SOURCE)


@cache
def on_cpu() -> Model:
    tensors, tables = FAMILY.canonical(SOURCE, MODEL), FAMILY.open_tables(SOURCE, MODEL)
    return FAMILY.build(MODEL, tensors, device="cpu", dtype="fp32", threads=1, tables=tables)


@cache
def on_card(dtype: str = "fp32") -> Qwen4ExpCuda:
    """The model of a card, its tensors in host memory."""
    model = Qwen4ExpCuda(MODEL, dtype, FAMILY.open_tables(SOURCE, MODEL), place=CPU)
    for name, tensor in FAMILY.canonical(SOURCE, MODEL):
        model.load(name, tensor)
    return model


def table_of(model: Any, slots: int = 2, pages: int = 4) -> CudaStateTable:
    return CudaStateTable(model.state_spec, slots, CPU, pages)


def run(model: Any, ids: Sequence[int], pieces: Sequence[int] = (), states: Any = None, slot: int = 0) -> Run:
    """Logits at every position and the state after the last; from an empty state where none is given."""
    states = states if states is not None else table_of(model)
    slot, rows, at = slot or states.allocate(), [], 0
    for length in pieces or [len(ids)]:
        part = list(ids[at : at + length])
        rows.append(model.forward(Batch.pack([(slot, part)], [list(range(len(part)))]), states))
        at += length
    return np.concatenate(rows), dict(states.save(slot).parts)


@cache
def whole(dtype: str = "fp32") -> Run:
    """All tokens in one launch."""
    return run(on_card(dtype), IDS)


def test_logits_and_states_are_those_of_the_cpu() -> None:
    states = StateTable(on_cpu().state_spec, 1, 2)
    slot = states.allocate()
    expected = on_cpu().forward(Batch.pack([(slot, IDS)], [list(range(len(IDS)))]), states)
    logits, parts = whole()
    assert relative_error(logits, expected) < 1e-5
    for position, (row, wanted) in enumerate(zip(logits, expected, strict=True)):
        assert relative_error(row, wanted) < 1e-5, position
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).all()
    for name, part in states.save(slot).parts.items():
        assert parts[name].shape == part.shape and parts[name].dtype == part.dtype
        assert relative_error(parts[name], part) < 1e-5, name
    assert np.array_equal(parts["ngram_ids"], states.part("ngram_ids")[:, slot])


@pytest.mark.parametrize("pieces", [[9, 1, 1, 1, 1], [1, 10, 2]])
def test_cuts_change_no_bit(pieces: list[int]) -> None:
    assert same_run(run(on_card(), IDS, pieces), whole())


def test_a_launch_too_long_is_cut_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is cut within a forward, a single row beside it, and rows of the table that lie apart."""
    model = on_card()
    monkeypatch.setattr(model, "most_rows", 6)
    states = table_of(model, slots=3)
    slots = [states.allocate() for _ in range(3)]
    batch = Batch.pack([(slots[0], IDS[:2]), (slots[1], [5]), (slots[2], IDS)], [[], [0], [3, len(IDS) - 1]])
    logits = model.forward(batch, states)
    assert logits[1].tobytes() == whole()[0][3].tobytes() and logits[2].tobytes() == whole()[0][-1].tobytes()
    parts = states.save(slots[2]).parts
    assert all(parts[name].tobytes() == part.tobytes() for name, part in whole()[1].items())


def test_a_crowd_changes_no_bit() -> None:
    """Among others that prefill and decode; the slot and the pages are others too."""
    model, states = on_card(), table_of(on_card(), slots=4, pages=6)
    slots = [states.allocate() for _ in range(4)]
    mine, at = slots[2], 0
    for length, others in ((4, [[1, 2], [3], [4]]), (1, [[5], [6], [7]]), (8, [[8], [9, 10]])):
        sequences = [(slot, ids) for slot, ids in zip((slots[0], slots[1], slots[3]), others, strict=False)]
        sequences.insert(1, (mine, IDS[at : at + length]))
        logits = model.forward(Batch.pack(sequences), states)
        at += length
        assert logits[1].tobytes() == whole()[0][at - 1].tobytes()
    parts = states.save(mine).parts
    assert all(parts[name].tobytes() == part.tobytes() for name, part in whole()[1].items())


def test_replayed_steps_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five sequences in a bucket of six, for the longest sequence that the table could hold; the spare one touches nothing.

    Captured before a token has come, then replayed at two places of the text.
    """
    model = on_card()
    states = table_of(model, slots=5, pages=6)
    slots = [states.allocate() for _ in range(5)]
    with recorded_graphs():
        monkeypatch.setattr(model, "_has_graphs", True)
        model._make_rooms_beside(states)
        model._graphs(Shape(True, 6, 6, 6), states)
        monkeypatch.setattr(model, "_capture", None)
        model.forward(Batch.pack([(slots[0], IDS[:11])], [[]]), states)
        for slot in slots[1:]:
            states.restore(slot, states.save(slots[0]))
        for at in (11, 12):
            logits = model.forward(Batch.pack([(slot, [IDS[at]]) for slot in slots], [[0], [0], [], [0], [0]]), states)
            assert [row.tobytes() for row in logits] == [whole()[0][at].tobytes()] * 4
    for slot in slots:
        parts = states.save(slot).parts
        assert all(parts[name].tobytes() == part.tobytes() for name, part in whole()[1].items())
    assert not any(states.part(name)[:, 0].any() for name in ("conv", "delta", "ngram_conv", "index_rows"))


def test_a_state_saved_within_a_block_goes_on_elsewhere() -> None:
    """By way of a table of the CPU's model, whose saved states are the same."""
    model, first = on_card(), 7
    states = table_of(model)
    slot = states.allocate()
    model.forward(Batch.pack([(slot, IDS[:first])], [[]]), states)
    saved = states.save(slot)
    model.forward(Batch.pack([(slot, [1, 2])], [[]]), states)
    between = StateTable(model.state_spec, 1, 2)
    place = between.allocate()
    between.restore(place, saved)
    other = states.allocate()
    states.restore(other, between.save(place))
    logits, parts = run(model, IDS[first:], states=states, slot=other)
    assert logits.tobytes() == whole()[0][first:].tobytes()
    assert all(parts[name].tobytes() == part.tobytes() for name, part in whole()[1].items())
    model.forward(Batch.pack([(slot, [1, 2])], [[]]), states)
    states.rewind(slot, SavedState(first, {name: saved.parts[name] for name in states.snapshot(slot).parts}))
    again = model.forward(Batch.pack([(slot, IDS[first : first + 1])]), states)
    assert again[0].tobytes() == whole()[0][first].tobytes()


def test_hidden_is_that_of_the_cpu_and_changes_nothing() -> None:
    ids, found = IDS[:5], {}
    for name, model, states in (
        ("cpu", on_cpu(), StateTable(on_cpu().state_spec, 1, 2)),
        ("card", on_card(), table_of(on_card())),
    ):
        hidden = {layer: np.full((5, SHAPE.width), np.nan, np.float32) for layer in range(SHAPE.layers + 1)}
        logits = model.forward(Batch.pack([(states.allocate(), ids)]), states, hidden=hidden)
        found[name] = hidden
    assert logits[0].tobytes() == whole()[0][4].tobytes()
    for layer, rows in found["cpu"].items():
        assert relative_error(found["card"][layer], rows) < 1e-5, layer


def test_16_bits_round_and_keep_the_law() -> None:
    """With float16: the interpreter multiplies the bits of bfloat16."""
    logits, _ = whole("fp16")
    assert relative_error(logits, whole()[0]) < 0.03
    assert same_run(run(on_card("fp16"), IDS, [1, 10, 1, 1]), whole("fp16"))


def test_the_engine_draws_on_the_host_and_keeps_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of a card without device steps: greedy answers are the CPU's, from a kept state on too."""
    monkeypatch.setattr("kittiwake.engine.runner.new_states", lambda model, slots, _: table_of(model, slots))
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    answers = {}
    for model in (on_card(), on_cpu()):
        engine = make_engine(model=model, slots=1)
        first = ask(engine, IDS[:6], params, keep_state=True)
        onward = ask(engine, [9], params, start_from=first.state)
        assert first.state.saved.position == 8
        answers[model.device] = (first.tokens, onward.tokens)
        if model is not on_cpu():
            monkeypatch.undo()
    assert answers["cuda"] == answers["cpu"]


def test_the_planned_workspace_is_what_is_made() -> None:
    model = on_card()
    assert model._embedded is not None
    made_bytes = model._rooms.nbytes + model._expert_rooms.nbytes + model._turns.nbytes + model._embedded.nbytes
    assert model.workspace_bytes == made_bytes


def test_no_room_is_told_before_a_state_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = on_card(), table_of(on_card(), pages=1)
    slot = states.allocate()
    before = states.save(slot)

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(cuda_model, "make_rooms", refuse)
        with pytest.raises(DeviceError, match="no room for the room to work in beside these states"):
            model.forward(Batch.pack([(slot, IDS)]), states)
    with pytest.raises(PagesError, match="a sequence of 300 tokens is longer"):
        model.forward(Batch.pack([(slot, [1] * 300)]), states)
    after = states.save(slot)
    assert after.position == 0 and after.digest == before.digest
    assert model.forward(Batch.pack([(slot, IDS[:5])]), states)[0].tobytes() == whole()[0][4].tobytes()


def test_rows_that_cannot_be_read_end_their_sequences_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = on_card(), table_of(on_card(), slots=2)
    good, bad = states.allocate(), states.allocate()
    reader = model._readers[1]
    take = reader.take

    def take_badly(ticket: Any) -> np.ndarray:
        rows = take(ticket)
        ticket.failures[bad] = DeviceError("the disk is gone", "")
        return rows

    monkeypatch.setattr(reader, "take", take_badly)
    with pytest.raises(SequencesError, match="the disk is gone") as caught:
        model.forward(Batch.pack([(bad, IDS[:2]), (good, IDS[:5])]), states)
    assert list(caught.value.errors) == [bad]
    assert caught.value.logits[1].tobytes() == whole()[0][4].tobytes()
    assert states.positions[[good, bad]].tolist() == [5, 2]
