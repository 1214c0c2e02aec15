"""Layer norm, token shift and mixes: the kernels against the reference, and the same bits however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kittiwake.ops.packed import Packed
from kittiwake.ops.shift_mix import cpu, reference
from kittiwake.ops.shift_mix.cases import CASES, ShiftMixCase
from tests.ops.bits import same_bits
from tests.ops.pieces import check_threads, cut_in_two, spared, unwritten

EPS = np.float32(1e-5)
Arrays = dict[str, np.ndarray]


def run(inputs: Arrays, starts: np.ndarray, slots: np.ndarray) -> Arrays:
    """The kernel on copies of the inputs, outputs full of NaN before: x, normed, out [N, M C] and shift after it."""
    rows, width = inputs["x"].shape
    mixes = len(inputs["mix"])
    x, normed, out = spared(inputs["x"]), unwritten(rows, width), unwritten(rows, mixes * width)
    y = spared(inputs["y"]) if len(inputs["y"]) else inputs["y"]
    shift, owner = inputs["shift"].copy(), np.repeat(np.arange(len(slots)), np.diff(starts))
    cpu.shift_mix(x, y, inputs["weight"], inputs["bias"], EPS, starts, slots, owner, shift, inputs["mix"], normed, out)
    assert all(np.isnan(array[rows:]).all() for array in (x, normed, out))
    return {"x": x[:rows], "normed": normed[:rows], "out": out[:rows], "shift": shift}


def whole(case: ShiftMixCase) -> Arrays:
    return run(case.make(), case.packed.starts, case.packed.slots)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_agrees_with_the_reference(case: ShiftMixCase) -> None:
    inputs, packed = case.make(), case.packed
    x = inputs["x"] + inputs["y"] if case.adds else inputs["x"]
    shift = inputs["shift"].copy()
    expected = reference.shift_mix(
        x, inputs["weight"], inputs["bias"], float(EPS), packed.starts, packed.slots, shift, inputs["mix"]
    )
    found = run(inputs, packed.starts, packed.slots)
    assert same_bits(found["x"], x)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found["out"].reshape(expected.shape), expected, rtol=0, atol=2e-6 * scale)
    np.testing.assert_allclose(found["shift"], shift, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_state_is_the_last_normed_row_of_each_sequence_and_nothing_else(case: ShiftMixCase) -> None:
    found, packed = whole(case), case.packed
    assert same_bits(found["shift"][packed.slots], found["normed"][packed.starts[1:] - 1])
    others = np.setdiff1d(np.arange(packed.table_slots), packed.slots)
    assert same_bits(found["shift"][others], case.make()["shift"][others])


@pytest.mark.parametrize("parallel_values", [0, 1 << 60], ids=["threads", "one thread"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_change_no_bit(case: ShiftMixCase, parallel_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(case)
    monkeypatch.setattr(cpu, "PARALLEL_VALUES", parallel_values)
    check_threads(lambda: whole(case), expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuts_change_no_bit(case: ShiftMixCase, seed: int) -> None:
    inputs, expected = case.make(), whole(case)
    for rows, starts, slots in cut_in_two(case.packed, seed):
        part = inputs | {"x": inputs["x"][rows], "y": inputs["y"][rows] if case.adds else inputs["y"]}
        found = run(part, starts, slots)
        assert all(same_bits(found[name], expected[name][rows]) for name in ("x", "normed", "out"))
        inputs["shift"] = found["shift"]
    assert same_bits(inputs["shift"], expected["shift"])


def test_the_first_row_of_a_sequence_sees_its_state_and_no_neighbour() -> None:
    case = ShiftMixCase(Packed((2, 3, 1)), 8, 1, False)
    inputs = case.make()
    found = whole(case)
    for sequence, (start, slot) in enumerate(zip(case.packed.starts, case.packed.slots, strict=False)):
        first = found["normed"][start]
        mixed = first + (inputs["shift"][slot] - first) * inputs["mix"][0]
        np.testing.assert_allclose(found["out"][start], mixed, atol=1e-5, err_msg=str(sequence))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 63, 65, 128])
def test_embedding_rows_are_gathered_widened_and_normed(stored: str, width: int) -> None:
    rng = np.random.default_rng(width)
    table = torch.from_numpy(rng.standard_normal((11, width)).astype(np.float32))
    table = table.bfloat16() if stored == "bfloat16" else table
    weight, bias = rng.standard_normal((2, width)).astype(np.float32)
    ids = np.array([10, 0, 3, 3, 10])
    x = np.full((8, width), np.nan, np.float32)
    kept = table.view(torch.uint16).numpy() if stored == "bfloat16" else table.numpy()
    cpu.embed_rows(kept, ids, weight, bias, EPS, x)
    expected = reference.layer_norm(table.float().numpy()[ids], weight, bias, float(EPS))
    np.testing.assert_allclose(x[:5], expected, rtol=0, atol=3e-6)
    assert same_bits(x[2], x[3]) and same_bits(x[0], x[4])
    assert np.isnan(x[5:]).all()


def test_norm_in_place_touches_only_its_rows() -> None:
    case = ShiftMixCase(Packed((5,)), 65, 1, False)
    inputs = case.make()
    x = inputs["x"].copy()
    cpu.norm_rows(x, 3, inputs["weight"], inputs["bias"], EPS)
    assert same_bits(x[:3], whole(case)["normed"][:3])
    assert same_bits(x[3:], inputs["x"][3:])
