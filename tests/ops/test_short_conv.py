"""Short convolutions: against the reference and float64, and the same bits however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.ops.packed import Packed
from kittiwake.ops.short_conv import cpu, reference
from kittiwake.ops.short_conv.cases import CASES, ShortConvCase
from tests.ops.bits import same_bits
from tests.ops.pieces import check_threads, cut_in_two, spared, unwritten
from tests.oracles import hybrid_float64
from tests.oracles.measure import relative_error

Arrays = dict[str, np.ndarray]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def run(case: ShortConvCase, inputs: Arrays, starts: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """out [N, C] and the state after it; the inputs stay as they are, and spare rows and columns too."""
    rows = len(inputs["x"])
    out, state = unwritten(rows, case.width + 2), inputs["state"].copy()
    cpu.short_conv(
        spared(inputs["x"]), case.beside, inputs["weight"], case.dilation, starts, slots, state, out, case.is_silu
    )
    assert np.isnan(out[rows:]).all() and np.isnan(out[:, case.width :]).all()
    return out[:rows, : case.width], state


def whole(case: ShortConvCase) -> tuple[np.ndarray, np.ndarray]:
    return run(case, case.make(), case.packed.starts, case.packed.slots)


def own_columns(case: ShortConvCase, x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x[:, case.beside : case.beside + case.width])


@every_case
def test_it_agrees_with_the_reference(case: ShortConvCase) -> None:
    inputs, packed = case.make(), case.packed
    state = inputs["state"].copy()
    x = own_columns(case, inputs["x"])
    expected = reference.short_conv(
        x, inputs["weight"], case.dilation, case.is_silu, packed.starts, packed.slots, state
    )
    found, found_state = whole(case)
    assert relative_error(found, expected) < 1e-6
    assert same_bits(found_state, state)


@every_case
def test_it_agrees_with_numpys_convolution_in_float64(case: ShortConvCase) -> None:
    inputs, packed = case.make(), case.packed
    found, _ = whole(case)
    x = own_columns(case, inputs["x"]).astype(np.float64)
    for start, length, slot in zip(packed.starts, packed.lengths, packed.slots, strict=False):
        rows = slice(start, start + length)
        expected = hybrid_float64.short_conv(
            inputs["state"][slot].astype(np.float64), x[rows], inputs["weight"].astype(np.float64), case.dilation,
            case.is_silu,
        )  # fmt: skip
        assert relative_error(found[rows], expected) < 1e-6


@every_case
def test_the_state_is_the_last_raw_rows(case: ShortConvCase) -> None:
    inputs, packed = case.make(), case.packed
    _, state = whole(case)
    x, carried = own_columns(case, inputs["x"]), inputs["state"].shape[1]
    for start, length, slot in zip(packed.starts, packed.lengths, packed.slots, strict=False):
        seen = np.concatenate([inputs["state"][slot], x[start : start + length]])
        assert same_bits(state[slot], seen[len(seen) - carried :])


@pytest.mark.parametrize("parallel_values", [0, 1 << 60], ids=["threads", "one thread"])
@every_case
def test_threads_change_no_bit(case: ShortConvCase, parallel_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(case)
    monkeypatch.setattr(cpu, "PARALLEL_VALUES", parallel_values)
    check_threads(lambda: whole(case), expected)


@pytest.mark.parametrize("seed", range(4))
@every_case
def test_cuts_change_no_bit(case: ShortConvCase, seed: int) -> None:
    inputs = case.make()
    expected, expected_state = whole(case)
    for rows, starts, slots in cut_in_two(case.packed, seed):
        found, inputs["state"] = run(case, inputs | {"x": inputs["x"][rows]}, starts, slots)
        assert same_bits(found, expected[rows])
    assert same_bits(inputs["state"], expected_state)


@pytest.mark.parametrize("piece", [1, 2, 3, 8, 9, 10])
def test_pieces_shorter_and_longer_than_the_state_have_the_bits_of_one_call(piece: int) -> None:
    case = ShortConvCase(Packed((29,)), 5, 4, 3, True, 1)  # nine rows are carried
    inputs, (expected, expected_state) = case.make(), whole(case)
    for first in range(0, 29, piece):
        rows = np.arange(first, min(first + piece, 29))
        found, inputs["state"] = run(
            case, inputs | {"x": inputs["x"][rows]}, np.array([0, len(rows)]), case.packed.slots
        )
        assert same_bits(found, expected[rows])
    assert same_bits(inputs["state"], expected_state)


def test_a_sequence_that_is_not_finite_harms_no_neighbour() -> None:
    case = ShortConvCase(Packed((3, 4, 5)), 8, 4, 1, True, 0)
    inputs, (expected, expected_state) = case.make(), whole(case)
    inputs["x"][4] = np.nan
    found, state = run(case, inputs, case.packed.starts, case.packed.slots)
    assert np.isnan(found[4:7]).all() and same_bits(found[3:4], expected[3:4])
    for rows, sequence in ((slice(0, 3), 0), (slice(7, 12), 2)):
        slot = case.packed.slots[sequence]
        assert same_bits(found[rows], expected[rows])
        assert same_bits(state[slot], expected_state[slot])
