"""WKV-7: the scan and the time mix around it against their references, and the same bits however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.ops.packed import Packed
from kittiwake.ops.wkv7 import cpu, reference
from kittiwake.ops.wkv7.cases import SCAN_CASES, TIME_MIX_CASES, ScanCase, TimeMixCase
from tests.ops.bits import same_bits
from tests.ops.pieces import check_threads, cut_in_two, spared, unwritten
from tests.oracles import fla_wkv7, rwkv7_float64
from tests.oracles.measure import relative_error

EPS = np.float32(64e-5)
Arrays = dict[str, np.ndarray]
scan_cases = pytest.mark.parametrize("case", SCAN_CASES, ids=str)
time_mix_cases = pytest.mark.parametrize("case", TIME_MIX_CASES, ids=str)


# The scan


def scan(inputs: Arrays, starts: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y [N, H, V] and the states after it; the inputs stay as they are."""
    y, state = np.full_like(inputs["v"], np.nan), inputs["state"].copy()
    cpu.scan(*(inputs[name] for name in "rwkvab"), starts, slots, state, y)
    return y, state


@scan_cases
def test_the_scan_agrees_with_the_reference(case: ScanCase) -> None:
    inputs, packed = case.make(), case.packed
    state = inputs["state"].copy()
    expected = reference.scan(*(inputs[name] for name in "rwkvab"), packed.starts, packed.slots, state)
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
        rows = [inputs[name][None, start : start + length].astype(np.float64) for name in "rwkvab"]
        before = inputs["state"][slot].swapaxes(-1, -2)[None].astype(np.float64)  # the oracle's states are [V, K]
        y, after = rwkv7_float64.wkv7_scan(*rows, before)
        assert relative_error(found[start : start + length], y[0]) < 1e-6
        assert relative_error(state[slot], after[0].swapaxes(-1, -2)) < 1e-6


@pytest.mark.parametrize("name", fla_wkv7.NAMES)
def test_the_scan_agrees_with_the_recorded_naive_recurrence(name: str) -> None:
    fixture = fla_wkv7.load(name)
    batch, tokens = fixture.r.shape[:2]
    packed = Packed((tokens,) * batch)
    inputs = {
        letter: np.ascontiguousarray(rows.reshape(batch * tokens, *rows.shape[2:]))
        for letter, rows in (("r", fixture.r), ("k", fixture.k), ("v", fixture.v), ("a", fixture.a), ("b", fixture.b))
    }
    inputs["w"] = np.exp(fixture.log_decay).reshape(inputs["r"].shape)
    initial, final = (s.swapaxes(-1, -2) for s in (fixture.initial_state, fixture.final_state))
    inputs["state"] = np.full((packed.table_slots, *initial.shape[1:]), np.nan, np.float32)
    inputs["state"][packed.slots] = initial
    y, state = scan(inputs, packed.starts, packed.slots)
    assert relative_error(y, fixture.y.reshape(y.shape)) < 1e-6
    assert relative_error(state[packed.slots], final) < 1e-6


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
        part = {name: inputs[name][rows] for name in "rwkvab"} | {"state": inputs["state"]}
        y, inputs["state"] = scan(part, starts, slots)
        assert same_bits(y, expected[rows])
    assert same_bits(inputs["state"], expected_state)


# The time mix


def time_mix(case: TimeMixCase, inputs: Arrays, starts: np.ndarray, slots: np.ndarray) -> Arrays:
    """The kernel on copies of the inputs: out [N, C], v_first and state after it. Spare rows must stay as they are."""
    rows = len(inputs["rkv"])
    v_first = spared(inputs["v_first"])
    out = unwritten(rows, case.width)
    state = inputs["state"].copy()
    cpu.time_mix(
        spared(inputs["rkv"]), spared(inputs["low"]), v_first, inputs["vectors"], EPS, case.is_first_layer,
        starts, slots, state, out,
    )  # fmt: skip
    assert np.isnan(out[rows:]).all() and np.isnan(v_first[rows:]).all()
    return {"out": out[:rows], "v_first": v_first[:rows], "state": state}


def whole(case: TimeMixCase) -> Arrays:
    return time_mix(case, case.make(), case.packed.starts, case.packed.slots)


def composed(case: TimeMixCase, inputs: Arrays) -> Arrays:
    """The same from the reference's parts."""
    names = ("w0", "a0", "v0", "k_k", "k_a", "r_k", "norm_weight", "norm_bias")
    vectors = dict(zip(names, inputs["vectors"], strict=True))
    if case.is_first_layer:
        vectors["v0"] = None
    r, k, v = np.split(inputs["rkv"], 3, axis=1)
    w_low, a_low, gate, *v_low = np.split(inputs["low"], 3 if case.is_first_layer else 4, axis=1)
    state, v_first = inputs["state"].copy(), inputs["v_first"].copy()
    out = reference.time_mix(
        r, k, v, w_low, a_low, gate, v_low[0] if v_low else None, v_first,
        reference.HeadParams(**vectors, norm_eps=float(EPS), heads=case.heads),
        case.packed.starts, case.packed.slots, state,
    )  # fmt: skip
    return {"out": out, "v_first": v_first, "state": state}


@time_mix_cases
def test_the_fused_time_mix_is_its_composition(case: TimeMixCase) -> None:
    found, expected = whole(case), composed(case, case.make())
    assert same_bits(found["v_first"], expected["v_first"])
    assert relative_error(found["state"], expected["state"]) < 1e-6
    # a head whose outputs barely differ is divided by little more than epsilon: rounding grows there
    assert relative_error(found["out"], expected["out"]) < 5e-6
    others = np.setdiff1d(np.arange(case.packed.table_slots), case.packed.slots)
    assert same_bits(found["state"][others], case.make()["state"][others])


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
        part = inputs | {name: inputs[name][rows] for name in ("rkv", "low", "v_first")}
        found = time_mix(case, part, starts, slots)
        assert same_bits(found["out"], expected["out"][rows])
        assert same_bits(found["v_first"], expected["v_first"][rows])
        inputs["state"] = found["state"]
    assert same_bits(inputs["state"], expected["state"])


def test_one_step_at_a_time_has_the_bits_of_one_call() -> None:
    case = TIME_MIX_CASES[2]
    inputs, expected = case.make(), whole(case)
    for row in range(case.packed.rows):
        part = inputs | {name: inputs[name][row : row + 1] for name in ("rkv", "low", "v_first")}
        found = time_mix(case, part, np.array([0, 1]), case.packed.slots)
        assert same_bits(found["out"], expected["out"][row : row + 1])
        inputs["state"] = found["state"]
    assert same_bits(inputs["state"], expected["state"])


def test_a_sequence_that_is_not_finite_harms_no_neighbour() -> None:
    case = TimeMixCase(Packed((3, 4, 5)), 2, 16, False)
    inputs, expected = case.make(), whole(case)
    inputs["rkv"][4] = np.nan
    inputs["state"][case.packed.slots[1]] = np.inf
    found = time_mix(case, inputs, case.packed.starts, case.packed.slots)
    assert np.isnan(found["out"][4]).all()
    for rows, slot in ((slice(0, 3), 0), (slice(7, 12), 2)):
        assert same_bits(found["out"][rows], expected["out"][rows])
        assert same_bits(found["state"][case.packed.slots[slot]], expected["state"][case.packed.slots[slot]])


def test_a_head_without_keys_is_finite() -> None:
    case = TIME_MIX_CASES[4]
    inputs = case.make()
    assert not inputs["rkv"][case.packed.rows // 2, case.width : case.width + case.size].any()
    assert np.isfinite(whole(case)["out"]).all()
