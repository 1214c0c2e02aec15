"""WKV-6: the scan and the time mix around it against their references, and the same bits however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.ops.packed import Packed
from kittiwake.ops.wkv6 import cpu, reference
from kittiwake.ops.wkv6.cases import LARGE_KEY, SCAN_CASES, TIME_MIX_CASES, ScanCase, TimeMixCase
from tests.ops.bits import same_bits
from tests.ops.pieces import check_threads, cut_in_two, spared, unwritten
from tests.oracles import rwkv6_float64
from tests.oracles.measure import relative_error

EPS = np.float32(64e-5)
ROWS = "rwkv"
"""What a scan has a row of for each token."""
Arrays = dict[str, np.ndarray]
scan_cases = pytest.mark.parametrize("case", SCAN_CASES, ids=str)
time_mix_cases = pytest.mark.parametrize("case", TIME_MIX_CASES, ids=str)


# The scan


def scan(inputs: Arrays, starts: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y [N, H, V] and the states after it; the inputs stay as they are."""
    y, state = np.full_like(inputs["v"], np.nan), inputs["state"].copy()
    cpu.scan(*(inputs[name] for name in "rwkvu"), starts, slots, state, y)
    return y, state


@scan_cases
def test_the_scan_agrees_with_the_reference(case: ScanCase) -> None:
    inputs, packed = case.make(), case.packed
    state = inputs["state"].copy()
    expected = reference.scan(*(inputs[name] for name in "rwkvu"), packed.starts, packed.slots, state)
    found, found_state = scan(inputs, packed.starts, packed.slots)
    assert relative_error(found, expected) < 1e-6
    assert relative_error(found_state, state) < 1e-6
    others = np.setdiff1d(np.arange(packed.table_slots), packed.slots)
    assert same_bits(found_state[others], inputs["state"][others])


@scan_cases
def test_the_scan_agrees_with_the_equations_in_float64(case: ScanCase) -> None:
    inputs, packed = case.make(), case.packed
    found, state = scan(inputs, packed.starts, packed.slots)
    for start, length, slot in zip(packed.starts, packed.lengths, packed.slots, strict=False):
        rows = [inputs[name][start : start + length].astype(np.float64) for name in ROWS]
        y, after = rwkv6_float64.wkv6_scan(
            *rows, inputs["u"].astype(np.float64), inputs["state"][slot].astype(np.float64)
        )
        assert relative_error(found[start : start + length], y) < 1e-6
        assert relative_error(state[slot], after) < 1e-6


def test_a_key_of_its_own_is_read_through_the_bonus_and_an_old_one_through_the_state() -> None:
    rows = {"r": [[2.0], [2.0]], "w": [[0.5], [0.25]], "k": [[3.0], [0.0]], "v": [[5.0, 7.0], [0.0, 0.0]]}
    inputs = {name: np.array(row, np.float32)[:, None] for name, row in rows.items()}
    inputs |= {"u": np.array([[0.5]], np.float32), "state": np.array([[[[1.0, 1.0]]]], np.float32)}
    y, state = scan(inputs, np.array([0, 2]), np.array([0]))
    assert y[:, 0].tolist() == [[2 * (0.5 * 15 + 1), 2 * (0.5 * 21 + 1)], [2 * 15.5, 2 * 21.5]]
    assert state[0, 0].tolist() == [[15.5 / 4, 21.5 / 4]]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 700])
def test_decays_of_zero_and_long_prompts_of_fast_decays_stay_finite_and_right(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    shape = (tokens, 2, 8)
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name in "rkv"}
    inputs["k"] *= np.float32(LARGE_KEY)
    # the products of all decays of a prompt reach far below the smallest float32
    inputs["w"] = np.exp(-np.exp(rng.uniform(1, 5, shape))).astype(np.float32)
    inputs["w"][::7] = 0
    inputs["u"] = rng.standard_normal((2, 8)).astype(np.float32)
    inputs["state"] = rng.standard_normal((1, 2, 8, 8)).astype(np.float32)
    y, state = scan(inputs, np.array([0, tokens]), np.array([0]))
    rows = [inputs[name].astype(np.float64) for name in ROWS]
    expected, after = rwkv6_float64.wkv6_scan(*rows, inputs["u"].astype(np.float64), inputs["state"][0].astype(float))
    assert np.isfinite(y).all() and relative_error(y, expected) < 1e-6
    assert np.isfinite(state).all() and relative_error(state[0], after) < 1e-6


def test_a_state_kept_whole_keeps_its_bits() -> None:
    case = SCAN_CASES[3]
    inputs = case.make()
    inputs["w"][:] = 1
    inputs["k"][:] = 0
    _, state = scan(inputs, case.packed.starts, case.packed.slots)
    assert same_bits(state, inputs["state"])


@scan_cases
def test_threads_change_no_bit_of_a_scan(case: ScanCase) -> None:
    packed = case.packed
    expected = scan(case.make(), packed.starts, packed.slots)
    check_threads(lambda: scan(case.make(), packed.starts, packed.slots), expected)


@pytest.mark.parametrize("seed", range(3))
@scan_cases
def test_cuts_change_no_bit_of_a_scan(case: ScanCase, seed: int) -> None:
    inputs = case.make()
    expected, expected_state = scan(inputs, case.packed.starts, case.packed.slots)
    for rows, starts, slots in cut_in_two(case.packed, seed):
        part = {name: inputs[name][rows] for name in ROWS} | {"u": inputs["u"], "state": inputs["state"]}
        y, inputs["state"] = scan(part, starts, slots)
        assert same_bits(y, expected[rows])
    assert same_bits(inputs["state"], expected_state)


# The time mix


def time_mix(case: TimeMixCase, inputs: Arrays, starts: np.ndarray, slots: np.ndarray) -> Arrays:
    """The kernel on copies of the inputs: out [N, C] and state after it. Spare rows must stay as they are."""
    rows = len(inputs["rkvg"])
    out = unwritten(rows, case.width)
    low = inputs["decay_low"] if case.is_decay_constant else spared(inputs["decay_low"])
    state = inputs["state"].copy()
    cpu.time_mix(spared(inputs["rkvg"]), low, inputs["vectors"], EPS, case.is_gated, starts, slots, state, out)
    assert np.isnan(out[rows:]).all()
    return {"out": out[:rows], "state": state}


def whole(case: TimeMixCase) -> Arrays:
    return time_mix(case, case.make(), case.packed.starts, case.packed.slots)


def part_of(case: TimeMixCase, inputs: Arrays, rows: np.ndarray) -> Arrays:
    """The inputs of some rows."""
    low = inputs["decay_low"] if case.is_decay_constant else inputs["decay_low"][rows]
    return inputs | {"rkvg": inputs["rkvg"][rows], "decay_low": low}


def composed(case: TimeMixCase, inputs: Arrays) -> Arrays:
    """The same from the reference's parts."""
    names = ("decay_bias", "bonus", "norm_weight", "norm_bias")
    r, k, v, *g = np.split(inputs["rkvg"], 4 if case.is_gated else 3, axis=1)
    state = inputs["state"].copy()
    out = reference.time_mix(
        r, k, v, g[0] if g else None, None if case.is_decay_constant else inputs["decay_low"],
        reference.HeadParams(
            **dict(zip(names, inputs["vectors"], strict=True)), norm_eps=float(EPS), heads=case.heads
        ),
        case.packed.starts, case.packed.slots, state,
    )  # fmt: skip
    return {"out": out, "state": state}


@time_mix_cases
def test_the_fused_time_mix_is_its_composition(case: TimeMixCase) -> None:
    found, expected = whole(case), composed(case, case.make())
    assert np.isfinite(found["out"]).all() and np.isfinite(found["state"]).all()
    # a decay near 1 is rounded by 3e-8 of itself, and a constant one is so in the same direction at every token
    assert relative_error(found["state"], expected["state"]) < (5e-6 if case.is_decay_constant else 1e-6)
    # a head whose outputs barely differ is divided by little more than epsilon: rounding grows there
    assert relative_error(found["out"], expected["out"]) < 5e-6
    others = np.setdiff1d(np.arange(case.packed.table_slots), case.packed.slots)
    assert same_bits(found["state"][others], case.make()["state"][others])


def test_all_kinds_of_time_mix_are_tried() -> None:
    kinds = {(case.is_decay_constant, case.is_gated) for case in TIME_MIX_CASES}
    assert kinds == {(False, True), (True, True), (True, False)}


@pytest.mark.parametrize("parallel_work", [0, 1 << 60], ids=["threads", "one thread"])
@time_mix_cases
def test_threads_change_no_bit_of_a_time_mix(
    case: TimeMixCase, parallel_work: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(case)
    monkeypatch.setattr(cpu, "PARALLEL_WORK", parallel_work)
    check_threads(lambda: whole(case), expected)


@pytest.mark.parametrize("seed", range(4))
@time_mix_cases
def test_cuts_change_no_bit_of_a_time_mix(case: TimeMixCase, seed: int) -> None:
    inputs, expected = case.make(), whole(case)
    for rows, starts, slots in cut_in_two(case.packed, seed):
        found = time_mix(case, part_of(case, inputs, rows), starts, slots)
        assert same_bits(found["out"], expected["out"][rows])
        inputs["state"] = found["state"]
    assert same_bits(inputs["state"], expected["state"])


@pytest.mark.parametrize("index", [1, 2, 3])
def test_one_step_at_a_time_has_the_bits_of_one_call(index: int) -> None:
    case = TIME_MIX_CASES[index]
    inputs, expected = case.make(), whole(case)
    slots = case.packed.slots[:1]
    for row in range(case.packed.lengths[0]):
        found = time_mix(case, part_of(case, inputs, np.array([row])), np.array([0, 1]), slots)
        assert same_bits(found["out"], expected["out"][row : row + 1])
        inputs["state"] = found["state"]
    assert same_bits(inputs["state"][slots], expected["state"][slots])


def test_a_constant_decay_is_one_by_token_that_adds_nothing() -> None:
    case = TimeMixCase(Packed((5, 9)), 3, 7, is_decay_constant=True)
    inputs, expected = case.make(), whole(case)
    inputs["decay_low"] = np.zeros((case.packed.rows, case.width), np.float32)
    other = TimeMixCase(case.packed, case.heads, case.size)
    found = time_mix(other, inputs, case.packed.starts, case.packed.slots)
    assert all(same_bits(found[name], expected[name]) for name in expected)


def test_a_sequence_that_is_not_finite_harms_no_neighbour() -> None:
    case = TimeMixCase(Packed((3, 4, 5)), 2, 16)
    inputs, expected = case.make(), whole(case)
    inputs["rkvg"][4] = np.nan
    inputs["state"][case.packed.slots[1]] = np.inf
    found = time_mix(case, inputs, case.packed.starts, case.packed.slots)
    assert np.isnan(found["out"][4]).all()
    for rows, slot in ((slice(0, 3), 0), (slice(7, 12), 2)):
        assert same_bits(found["out"][rows], expected["out"][rows])
        assert same_bits(found["state"][case.packed.slots[slot]], expected["state"][case.packed.slots[slot]])
