"""The n-gram layer's mix: the kernels against float64, and the same bits however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.ops.ngram_mix import cpu, reference
from kittiwake.ops.ngram_mix.cases import CASES, NgramMixCase
from kittiwake.ops.short_conv import cpu as short_conv_cpu
from tests.ops.bits import same_bits
from tests.ops.pieces import check_threads, cut_in_two, spared, unwritten

EPS = np.float32(1e-6)
Arrays = dict[str, np.ndarray]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
WEIGHTS = ("norm_key", "norm_query", "norm_conv", "conv_weight")


def run(case: NgramMixCase, inputs: Arrays, starts: np.ndarray, slots: np.ndarray) -> Arrays:
    """The kernels on copies of the inputs, scratch and spare rows full of NaN before: x and state after it."""
    rows, columns = inputs["x"].shape
    x, kv, state = spared(inputs["x"]), spared(inputs["kv"]), inputs["state"].copy()
    gated, normed = unwritten(rows, columns), unwritten(rows, columns)
    weights = [inputs[name] for name in WEIGHTS]
    cpu.ngram_mix(x, kv, case.streams, *weights, case.dilation, EPS, starts, slots, state, gated, normed)
    assert all(np.isnan(array[rows:]).all() for array in (x, kv, gated, normed))
    return {"x": x[:rows], "state": state}


def whole(case: NgramMixCase) -> Arrays:
    return run(case, case.make(), case.packed.starts, case.packed.slots)


def expected_by(case: NgramMixCase, dtype: type) -> Arrays:
    inputs = {name: array.astype(dtype) for name, array in case.make().items()}
    weights = [inputs[name] for name in WEIGHTS]
    packed = case.packed
    x = reference.ngram_mix(
        inputs["x"], inputs["kv"], case.streams, *weights, case.dilation, float(EPS), packed.starts, packed.slots,
        inputs["state"],
    )  # fmt: skip
    return {"x": x, "state": inputs["state"]}


@every_case
@pytest.mark.parametrize("source", ["kernel", "reference"])
def test_float32_agrees_with_float64(case: NgramMixCase, source: str) -> None:
    found = whole(case) if source == "kernel" else expected_by(case, np.float32)
    for name, exact in expected_by(case, np.float64).items():
        assert found[name].dtype == np.float32
        # the square root of a |d| near 0 magnifies its error: rows are of very different size, so each has its own scale
        scale = np.abs(exact).max(axis=-1, keepdims=True) + 1e-30
        assert (np.abs(found[name] - exact) / scale).max() < 2e-5, name


@every_case
def test_slots_of_others_are_not_touched(case: NgramMixCase) -> None:
    others = np.setdiff1d(np.arange(case.packed.table_slots), case.packed.slots)
    assert same_bits(whole(case)["state"][others], case.make()["state"][others])


@pytest.mark.parametrize("parallel_values", [0, 1 << 60], ids=["threads", "one thread"])
@every_case
def test_threads_change_no_bit(case: NgramMixCase, parallel_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(case)
    for module in (cpu, short_conv_cpu):
        monkeypatch.setattr(module, "PARALLEL_VALUES", parallel_values)
    check_threads(lambda: whole(case), expected)


@pytest.mark.parametrize("seed", range(4))
@every_case
def test_cuts_change_no_bit(case: NgramMixCase, seed: int) -> None:
    inputs, expected = case.make(), whole(case)
    for rows, starts, slots in cut_in_two(case.packed, seed):
        found = run(case, inputs | {"x": inputs["x"][rows], "kv": inputs["kv"][rows]}, starts, slots)
        assert same_bits(found["x"], expected["x"][rows])
        inputs["state"] = found["state"]
    assert same_bits(inputs["state"], expected["state"])


def test_a_key_of_zeros_opens_the_gate_by_half() -> None:
    case = CASES[2]
    inputs = case.make()
    columns = case.streams * case.width
    inputs["kv"][:, :columns] = 0
    inputs["conv_weight"][:] = 0
    found = run(case, inputs, case.packed.starts, case.packed.slots)
    half = np.tile(np.float32(0.5) * inputs["kv"][:, columns:], case.streams)
    assert same_bits(found["x"], inputs["x"] + half)
