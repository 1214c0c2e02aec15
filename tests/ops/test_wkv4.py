"""WKV-4: the kernel against its reference and the sums in float64, and the same bits however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.ops.packed import Packed
from kittiwake.ops.wkv4 import EMPTY_TOP, cpu, reference
from kittiwake.ops.wkv4.cases import LARGE_KEY, TIME_MIX_CASES, TimeMixCase
from tests.ops.bits import same_bits
from tests.ops.pieces import check_threads, cut_in_two, spared, unwritten
from tests.oracles import rwkv4_float64
from tests.oracles.measure import relative_error

STATE = ("num", "den", "top")
Arrays = dict[str, np.ndarray]
every_case = pytest.mark.parametrize("case", TIME_MIX_CASES, ids=str)


def time_mix(inputs: Arrays, starts: np.ndarray, slots: np.ndarray) -> Arrays:
    """The kernel on copies of the inputs: out [N, C] and the states after it. Spare rows must stay as they are."""
    rows, width = len(inputs["rkv"]), len(inputs["bonus"])
    out = unwritten(rows, width)
    state = {name: inputs[name].copy() for name in STATE}
    cpu.time_mix(spared(inputs["rkv"]), inputs["log_decay"], inputs["bonus"], starts, slots, *state.values(), out)
    assert np.isnan(out[rows:]).all()
    return {"out": out[:rows], **state}


def whole(case: TimeMixCase) -> Arrays:
    return time_mix(case.make(), case.packed.starts, case.packed.slots)


@every_case
def test_the_kernel_agrees_with_the_reference(case: TimeMixCase) -> None:
    inputs, packed, found = case.make(), case.packed, whole(case)
    state = {name: inputs[name].copy() for name in STATE}
    expected = reference.time_mix(
        *np.split(inputs["rkv"], 3, axis=1), inputs["log_decay"], inputs["bonus"], packed.starts, packed.slots,
        *state.values(),
    )  # fmt: skip
    assert relative_error(found["out"], expected) < 1e-6
    assert all(relative_error(found[name], state[name]) < 1e-6 for name in ("num", "den"))
    assert same_bits(found["top"], state["top"])
    others = np.setdiff1d(np.arange(packed.table_slots), packed.slots)
    assert all(same_bits(found[name][others], inputs[name][others]) for name in STATE)


@every_case
def test_the_kernel_agrees_with_the_sums_in_float64(case: TimeMixCase) -> None:
    inputs, packed, found = case.make(), case.packed, whole(case)
    log_decay, bonus = (inputs[name].astype(np.float64) for name in ("log_decay", "bonus"))
    for start, length, slot in zip(packed.starts, packed.lengths, packed.slots, strict=False):
        r, k, v = np.split(inputs["rkv"][start : start + length].astype(np.float64), 3, axis=1)
        before = tuple(inputs[name][slot].astype(np.float64) for name in STATE)
        y, num, den, top = rwkv4_float64.wkv(k, v, log_decay, bonus, before)
        # an exponent near 110 is known to 4e-6 only, and so is the weight made of it
        assert relative_error(found["out"][start : start + length], r * y) < 3e-5
        for name, expected in (("num", num), ("den", den), ("top", top)):
            assert relative_error(found[name][slot], expected) < 1e-4, name


@pytest.mark.parametrize("sign", [1, -1])
def test_a_first_key_of_110_is_right(sign: int) -> None:
    key = np.float32(sign * LARGE_KEY)
    inputs = {
        "rkv": np.array([[1, key, 2], [1, -key, 4], [1, 0, 8]], np.float32),
        "log_decay": np.array([-0.5], np.float32),
        "bonus": np.array([0.25], np.float32),
        "num": np.zeros((2, 1), np.float32),
        "den": np.zeros((2, 1), np.float32),
        "top": np.full((2, 1), EMPTY_TOP, np.float32),
    }
    found = time_mix(inputs, np.array([0, 3]), np.array([1]))
    # the larger key has all the weight, as long as it is remembered
    assert found["out"].ravel().tolist() == pytest.approx([2, 2, 2] if sign > 0 else [2, 4, 4], rel=1e-6)
    assert found["num"][1, 0] / found["den"][1, 0] == pytest.approx(2 if sign > 0 else 4)
    assert found["top"][1, 0] == LARGE_KEY - (1 if sign > 0 else 0.5)
    assert [found[name][0, 0] for name in STATE] == [0, 0, np.float32(EMPTY_TOP)]


@pytest.mark.parametrize("parallel_values", [0, 1 << 60], ids=["threads", "one thread"])
@every_case
def test_threads_change_no_bit(case: TimeMixCase, parallel_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(case)
    monkeypatch.setattr(cpu, "PARALLEL_VALUES", parallel_values)
    check_threads(lambda: whole(case), expected)


@pytest.mark.parametrize("seed", range(4))
@every_case
def test_cuts_change_no_bit(case: TimeMixCase, seed: int) -> None:
    inputs, expected = case.make(), whole(case)
    for rows, starts, slots in cut_in_two(case.packed, seed):
        found = time_mix(inputs | {"rkv": inputs["rkv"][rows]}, starts, slots)
        assert same_bits(found["out"], expected["out"][rows])
        inputs |= {name: found[name] for name in STATE}
    assert all(same_bits(inputs[name], expected[name]) for name in STATE)


def test_one_step_at_a_time_has_the_bits_of_one_call() -> None:
    case = TIME_MIX_CASES[2]
    inputs, expected = case.make(), whole(case)
    for row in range(case.packed.rows):
        found = time_mix(inputs | {"rkv": inputs["rkv"][row : row + 1]}, np.array([0, 1]), case.packed.slots)
        assert same_bits(found["out"], expected["out"][row : row + 1])
        inputs |= {name: found[name] for name in STATE}
    assert all(same_bits(inputs[name], expected[name]) for name in STATE)


def test_a_sequence_that_is_not_finite_harms_no_neighbour() -> None:
    case = TimeMixCase(Packed((3, 4, 5)), 32, 1)
    inputs, expected = case.make(), whole(case)
    inputs["rkv"][4] = np.nan
    inputs["num"][case.packed.slots[1]] = np.inf
    found = time_mix(inputs, case.packed.starts, case.packed.slots)
    assert np.isnan(found["out"][4]).all()
    for rows, slot in ((slice(0, 3), 0), (slice(7, 12), 2)):
        assert same_bits(found["out"][rows], expected["out"][rows])
        assert all(same_bits(found[n][case.packed.slots[slot]], expected[n][case.packed.slots[slot]]) for n in STATE)
