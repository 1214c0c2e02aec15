"""RWKV-6's token shift: both halves against the reference, and the same bits however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.ops.dynamic_mix import cpu, reference
from kittiwake.ops.dynamic_mix.cases import CASES, DynamicMixCase
from kittiwake.ops.shift_mix.cpu import shift_mix
from tests.ops.bits import same_bits
from tests.ops.pieces import check_threads, cut_in_two, spared, unwritten

EPS = np.float32(1e-5)
Arrays = dict[str, np.ndarray]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def run(inputs: Arrays, starts: np.ndarray, slots: np.ndarray) -> Arrays:
    """Both kernels on copies of the inputs: x, normed, difference, z [N, C], out [N, M C] and shift after them."""
    rows, width = inputs["x"].shape
    x, y = spared(inputs["x"]), inputs["y"]
    y = spared(y) if len(y) else y
    normed, difference, z = (unwritten(rows, width) for _ in range(3))
    shift, owner = inputs["shift"].copy(), np.repeat(np.arange(len(slots)), np.diff(starts))
    cpu.open_mix(
        x, y, inputs["weight"], inputs["bias"], EPS, starts, slots, owner, shift, inputs["mix_x"], normed, difference, z
    )
    columns = len(inputs["mix"]) * width
    low, out = spared(inputs["low"]), unwritten(rows, columns)
    cpu.close_mix(normed, difference, rows, low, inputs["mix"], out)
    found = {"x": x, "normed": normed, "difference": difference, "z": z, "out": out}
    assert all(np.isnan(array[rows:]).all() for array in found.values())
    return {name: array[:rows] for name, array in found.items()} | {"shift": shift}


def whole(case: DynamicMixCase) -> Arrays:
    return run(case.make(), case.shift.packed.starts, case.shift.packed.slots)


@every_case
def test_the_kernels_agree_with_the_reference(case: DynamicMixCase) -> None:
    inputs, packed = case.make(), case.shift.packed
    x = inputs["x"] + inputs["y"] if case.shift.adds else inputs["x"]
    shift = inputs["shift"].copy()
    normed, difference, z = reference.open_mix(
        x, inputs["weight"], inputs["bias"], float(EPS), packed.starts, packed.slots, shift, inputs["mix_x"]
    )
    out = reference.close_mix(normed, difference, inputs["low"], inputs["mix"])
    found = run(inputs, packed.starts, packed.slots)
    assert same_bits(found["x"], x)
    for name, expected in (("normed", normed), ("difference", difference), ("z", z), ("out", out), ("shift", shift)):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=2e-6 * scale, err_msg=name)


@every_case
def test_norms_and_states_have_the_bits_of_the_plain_token_shift(case: DynamicMixCase) -> None:
    inputs, packed, found = case.make(), case.shift.packed, whole(case)
    x, shift = inputs["x"].copy(), inputs["shift"].copy()
    normed, z = np.empty_like(x), np.empty_like(x)
    mix = inputs["mix_x"][None]
    shift_mix(
        x, inputs["y"], inputs["weight"], inputs["bias"], EPS, packed.starts, packed.slots, packed.owner, shift, mix,
        normed, z,
    )  # fmt: skip
    assert all(map(same_bits, (found["normed"], found["shift"], found["z"]), (normed, shift, z)))


@pytest.mark.parametrize("parallel_values", [0, 1 << 60], ids=["threads", "one thread"])
@every_case
def test_threads_change_no_bit(case: DynamicMixCase, parallel_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(case)
    monkeypatch.setattr(cpu, "PARALLEL_VALUES", parallel_values)
    check_threads(lambda: whole(case), expected)


@pytest.mark.parametrize("seed", range(4))
@every_case
def test_cuts_change_no_bit(case: DynamicMixCase, seed: int) -> None:
    inputs, expected = case.make(), whole(case)
    for rows, starts, slots in cut_in_two(case.shift.packed, seed):
        part = inputs | {"x": inputs["x"][rows], "low": inputs["low"][rows]}
        part["y"] = inputs["y"][rows] if case.shift.adds else inputs["y"]
        found = run(part, starts, slots)
        names = ("x", "normed", "difference", "z", "out")
        assert all(same_bits(found[name], expected[name][rows]) for name in names)
        inputs["shift"] = found["shift"]
    assert same_bits(inputs["shift"], expected["shift"])
