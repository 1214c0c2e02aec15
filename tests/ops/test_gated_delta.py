"""The gated delta rule: against the reference and float64, and the same bits however rows are cut and heads ordered."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.errors import ModelError
from kittiwake.ops.gated_delta import cpu, reference
from kittiwake.ops.gated_delta.cases import CASES, GatedDeltaCase
from kittiwake.ops.gated_delta.heads import key_head_of
from kittiwake.ops.packed import Packed
from tests.ops.bits import same_bits
from tests.ops.pieces import check_threads, cut_in_two, spared, unwritten
from tests.oracles import hybrid_float64
from tests.oracles.measure import relative_error

EPS = np.float32(1e-5)
Arrays = dict[str, np.ndarray]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def run(case: GatedDeltaCase, inputs: Arrays, starts: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """out [N, nv V] and the states after it; the inputs stay as they are, and spare rows too."""
    rows, heads = len(inputs["qkv"]), case.value_heads
    out, state = unwritten(rows, case.width), inputs["state"].copy()
    cpu.gated_delta(
        spared(inputs["qkv"]), case.key_heads, case.key_of, spared(inputs["gates"]), case.width, case.width + heads, 0,
        inputs["decay_rate"], inputs["dt_bias"], inputs["norm_weight"], EPS, case.is_silu_gate, starts, slots, state, out,
    )  # fmt: skip
    assert np.isnan(out[rows:]).all()
    return out[:rows], state


def whole(case: GatedDeltaCase) -> tuple[np.ndarray, np.ndarray]:
    return run(case, case.make(), case.packed.starts, case.packed.slots)


def split(case: GatedDeltaCase, inputs: Arrays) -> tuple[np.ndarray, ...]:
    """q, k [N, nk, K], v, z [N, nv, V], a, b [N, nv]."""
    rows, keys, heads = case.packed.rows, case.key_heads * case.keys, case.value_heads
    q, k, v = np.split(inputs["qkv"], [keys, 2 * keys], axis=1)
    z, a, b = np.split(inputs["gates"], [case.width, case.width + heads], axis=1)
    by_key, by_value = (rows, case.key_heads, case.keys), (rows, heads, case.values)
    return q.reshape(by_key), k.reshape(by_key), v.reshape(by_value), z.reshape(by_value), a, b


@every_case
def test_it_agrees_with_the_reference(case: GatedDeltaCase) -> None:
    inputs, packed = case.make(), case.packed
    state = inputs["state"].copy()
    params = reference.Params(
        case.key_of, inputs["decay_rate"], inputs["dt_bias"], inputs["norm_weight"], float(EPS), case.is_silu_gate
    )
    expected = reference.gated_delta(*split(case, inputs), params, packed.starts, packed.slots, state)
    found, found_state = whole(case)
    assert relative_error(found, expected) < 2e-6
    assert relative_error(found_state[packed.slots], state[packed.slots]) < 1e-6
    others = np.setdiff1d(np.arange(packed.table_slots), packed.slots)
    assert same_bits(found_state[others], inputs["state"][others])


@every_case
def test_it_agrees_with_the_equation_in_float64(case: GatedDeltaCase) -> None:
    inputs, packed = case.make(), case.packed
    found, state = whole(case)
    q, k, v, z, a, b = (array.astype(np.float64) for array in split(case, inputs))
    q, k = q[:, case.key_of], k[:, case.key_of]
    rate, dt_bias, weight = (inputs[name].astype(np.float64) for name in ("decay_rate", "dt_bias", "norm_weight"))
    for start, length, slot in zip(packed.starts, packed.lengths, packed.slots, strict=False):
        rows = slice(start, start + length)
        before = inputs["state"][slot].swapaxes(-1, -2).astype(np.float64)
        expected, after = hybrid_float64.gated_delta_layer(
            q[rows], k[rows], v[rows], z[rows], a[rows], b[rows], rate, dt_bias, weight, float(EPS), case.is_silu_gate,
            before,
        )  # fmt: skip
        assert relative_error(found[rows], expected) < 2e-6
        assert relative_error(state[slot], after.swapaxes(-1, -2)) < 2e-6


@pytest.mark.parametrize("parallel_work", [0, 1 << 60], ids=["threads", "one thread"])
@every_case
def test_threads_change_no_bit(case: GatedDeltaCase, parallel_work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(case)
    monkeypatch.setattr(cpu, "PARALLEL_WORK", parallel_work)
    check_threads(lambda: whole(case), expected)


@pytest.mark.parametrize("seed", range(4))
@every_case
def test_cuts_change_no_bit(case: GatedDeltaCase, seed: int) -> None:
    inputs = case.make()
    expected, expected_state = whole(case)
    for rows, starts, slots in cut_in_two(case.packed, seed):
        part = inputs | {name: inputs[name][rows] for name in ("qkv", "gates")}
        found, inputs["state"] = run(case, part, starts, slots)
        assert same_bits(found, expected[rows])
    assert same_bits(inputs["state"], expected_state)


def test_one_step_at_a_time_has_the_bits_of_one_call() -> None:
    case = CASES[2]
    inputs, (expected, expected_state) = case.make(), whole(case)
    for row in range(case.packed.rows):
        part = inputs | {name: inputs[name][row : row + 1] for name in ("qkv", "gates")}
        found, inputs["state"] = run(case, part, np.array([0, 1]), case.packed.slots)
        assert same_bits(found, expected[row : row + 1])
    assert same_bits(inputs["state"], expected_state)


def test_the_order_of_value_heads_changes_no_bit() -> None:
    """A file with tiled value heads gives what the same weights grouped give, heads moved."""
    grouped = GatedDeltaCase(Packed((5, 1, 9)), 2, 6, 16, 8, "grouped", False)
    tiled = GatedDeltaCase(grouped.packed, 2, 6, 16, 8, "tiled", False)
    inputs = grouped.make()
    q, k, v, z, a, b = split(grouped, inputs)
    order = np.argsort(tiled.key_of, kind="stable")  # order[h]: where grouped head h stands in the tiled file
    back = np.argsort(order)
    rows = grouped.packed.rows
    moved = inputs | {
        "qkv": np.concatenate([q.reshape(rows, -1), k.reshape(rows, -1), v[:, back].reshape(rows, -1)], axis=1),
        "gates": np.concatenate([z[:, back].reshape(rows, -1), a[:, back], b[:, back]], axis=1),
        "decay_rate": inputs["decay_rate"][back],
        "dt_bias": inputs["dt_bias"][back],
        "state": np.ascontiguousarray(inputs["state"][:, back]),
    }
    expected, expected_state = whole(grouped)
    found, state = run(tiled, moved, tiled.packed.starts, tiled.packed.slots)
    assert same_bits(found.reshape(rows, 6, 8)[:, order], expected.reshape(rows, 6, 8))
    assert same_bits(state[:, order], expected_state)


def test_a_sequence_that_is_not_finite_harms_no_neighbour() -> None:
    case = GatedDeltaCase(Packed((3, 4, 5)), 1, 2, 16, 8, "grouped", True)
    inputs, (expected, expected_state) = case.make(), whole(case)
    inputs["qkv"][4] = np.nan
    inputs["state"][case.packed.slots[1]] = np.inf
    found, state = run(case, inputs, case.packed.starts, case.packed.slots)
    assert np.isnan(found[4]).all()
    for rows, sequence in ((slice(0, 3), 0), (slice(7, 12), 2)):
        slot = case.packed.slots[sequence]
        assert same_bits(found[rows], expected[rows])
        assert same_bits(state[slot], expected_state[slot])


def test_a_row_without_keys_is_finite() -> None:
    for case in CASES:
        found, state = whole(case)
        assert np.isfinite(found).all() and np.isfinite(state).all()


def test_gates_at_their_ends_stay_finite() -> None:
    """softplus and the exponential of it far out: a state kept as it is, and one gone at once."""
    case = GatedDeltaCase(Packed((2,)), 1, 2, 4, 3, "grouped", False)
    inputs = case.make()
    heads = case.value_heads
    inputs["gates"][:, case.width : case.width + heads] = [-1e4, 1e4]
    inputs["decay_rate"][:], inputs["dt_bias"][:] = 16, 0
    inputs["gates"][:, case.width + heads :] = -1e4  # beta 0: nothing is written
    _, state = run(case, inputs, case.packed.starts, case.packed.slots)
    slot = case.packed.slots[0]
    assert same_bits(state[slot, 0], inputs["state"][slot, 0])
    assert not state[slot, 1].any()


def test_key_heads_by_order() -> None:
    assert key_head_of(6, 2, "grouped").tolist() == [0, 0, 0, 1, 1, 1]
    assert key_head_of(6, 2, "tiled").tolist() == [0, 1, 0, 1, 0, 1]
    assert key_head_of(3, 3, "tiled").tolist() == [0, 1, 2]


@pytest.mark.parametrize(("value_heads", "key_heads", "order"), [(5, 2, "grouped"), (2, 4, "tiled"), (4, 0, "tiled")])
def test_heads_that_cannot_be_shared_out_are_refused(value_heads: int, key_heads: int, order: str) -> None:
    with pytest.raises(ModelError, match=f"{value_heads} value heads .* {key_heads} key heads"):
        key_head_of(value_heads, key_heads, order)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ModelError, match="'mixed', expected one of"):
        key_head_of(4, 2, "mixed")
