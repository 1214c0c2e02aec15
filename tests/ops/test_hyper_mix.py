"""Hyper-connections around their products: against the reference and float64, and a row's bits alone and in a crowd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kittiwake.ops.hyper_mix import cpu, reference
from kittiwake.ops.hyper_mix.cases import CASES, HyperMixCase
from tests.ops.bits import same_bits
from tests.ops.pieces import check_threads, spared, unwritten
from tests.oracles import hybrid_float64
from tests.oracles.measure import relative_error

EPS = np.float32(1e-6)
Arrays = dict[str, np.ndarray]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def run(case: HyperMixCase, inputs: Arrays) -> Arrays:
    """All kernels on copies of the inputs; spare rows must stay as they are."""
    rows, streams, weight = len(inputs["x"]), case.streams, inputs["weight"]
    x, combined, low = (spared(inputs[name]) for name in ("x", "x", "low"))
    normed, alone = np.full_like(x, np.nan), np.full_like(x, np.nan)
    mixed = unwritten(rows, case.width)
    y, inject = spared(inputs["y"]), spared(inputs["low"])
    cpu.combine_and_norm(x, y, inject, case.rank, rows, streams, weight, EPS, normed)
    cpu.combine_streams(combined, y, inject, case.rank, rows, streams)
    cpu.norm_streams(combined, rows, streams, weight, EPS, alone)
    cpu.mix_low(low, rows, case.rank, streams)
    cpu.mix_streams(spared(inputs["normed"]), spared(inputs["gate"]), rows, streams, mixed)
    found = {"x": x, "combined": combined, "normed": normed, "alone": alone, "low": low, "mixed": mixed}
    assert all(np.isnan(array[rows:]).all() for array in found.values())
    return {name: array[:rows] for name, array in found.items()}


@every_case
def test_the_kernels_agree_with_the_reference(case: HyperMixCase) -> None:
    inputs = case.make()
    found = run(case, inputs)
    x = reference.combine_streams(inputs["x"], inputs["y"], inputs["low"][:, case.rank :])
    assert relative_error(found["x"], x) < 1e-6
    normed = reference.norm_streams(found["x"], case.streams, inputs["weight"], float(EPS))
    assert relative_error(found["normed"], normed) < 1e-6
    low = reference.mix_low(inputs["low"][:, : case.rank], case.streams)
    assert relative_error(found["low"][:, : case.rank], low) < 1e-6
    assert same_bits(found["low"][:, case.rank :], inputs["low"][:, case.rank :])
    mixed = reference.mix_streams(inputs["normed"], inputs["gate"], case.streams)
    assert relative_error(found["mixed"], mixed) < 1e-6


@every_case
def test_the_kernels_agree_with_the_equations_in_float64(case: HyperMixCase) -> None:
    inputs = case.make()
    found = run(case, inputs)
    made = {name: array.astype(np.float64) for name, array in inputs.items()}
    split = (case.rows, case.streams, case.width)
    share = 2 * hybrid_float64.sigmoid(made["low"][:, case.rank :] / case.streams)
    x = made["x"].reshape(split) + np.einsum("nc,ns->nsc", made["y"], share)
    assert relative_error(found["x"], x.reshape(found["x"].shape)) < 1e-6
    before = found["x"].astype(np.float64).reshape(split)
    normed = hybrid_float64.rms_norm(before, made["weight"].reshape(split[1:]), float(EPS))
    assert relative_error(found["normed"], normed.reshape(found["normed"].shape)) < 1e-6
    low = hybrid_float64.silu(made["low"][:, : case.rank] / case.streams)
    assert relative_error(found["low"][:, : case.rank], low) < 1e-6
    mixed = (made["normed"] * hybrid_float64.sigmoid(made["gate"])).reshape(split).mean(1)
    assert relative_error(found["mixed"], mixed) < 1e-6


@every_case
def test_the_fused_kernel_has_the_bits_of_its_parts(case: HyperMixCase) -> None:
    found = run(case, case.make())
    assert same_bits(found["x"], found["combined"])
    assert same_bits(found["normed"], found["alone"])


@every_case
def test_with_nothing_to_add_the_streams_stay(case: HyperMixCase) -> None:
    inputs = case.make()
    x, normed, alone = inputs["x"].copy(), np.empty_like(inputs["x"]), np.empty_like(inputs["x"])
    nothing = np.empty((0, case.width), np.float32)
    cpu.combine_and_norm(x, nothing, nothing, 0, case.rows, case.streams, inputs["weight"], EPS, normed)
    cpu.norm_streams(x, case.rows, case.streams, inputs["weight"], EPS, alone)
    assert same_bits(x, inputs["x"])
    assert same_bits(normed, alone)


@every_case
def test_logits_of_zero_are_a_plain_residual(case: HyperMixCase) -> None:
    inputs = case.make()
    x, inject = inputs["x"].copy(), np.zeros((case.rows, case.streams), np.float32)
    cpu.combine_streams(x, inputs["y"], inject, 0, case.rows, case.streams)
    assert same_bits(x, inputs["x"] + np.tile(inputs["y"], case.streams))


@pytest.mark.parametrize("parallel_values", [0, 1 << 60], ids=["threads", "one thread"])
@every_case
def test_threads_change_no_bit(case: HyperMixCase, parallel_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(case, case.make())
    monkeypatch.setattr(cpu, "PARALLEL_VALUES", parallel_values)
    check_threads(lambda: run(case, case.make()), expected)


@every_case
def test_a_row_alone_has_the_bits_it_has_in_a_crowd(case: HyperMixCase) -> None:
    inputs = case.make()
    expected = run(case, inputs)
    for row in {0, case.rows // 2, case.rows - 1}:
        part = {name: array if array.ndim == 1 else array[row : row + 1] for name, array in inputs.items()}
        found = run(case, part)
        assert all(same_bits(found[name], expected[name][row : row + 1]) for name in expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_stream_opens_with_the_embedding(dtype: str) -> None:
    table = torch.randn(11, 7, generator=torch.Generator().manual_seed(1))
    stored = table.to(torch.bfloat16).view(torch.uint16).numpy() if dtype == "bf16" else table.numpy()
    exact = table.to(torch.bfloat16).float().numpy() if dtype == "bf16" else table.numpy()
    token_ids = np.array([10, 0, 3, 3])
    x = np.full((6, 21), np.nan, np.float32)
    cpu.open_streams(stored, token_ids, 3, x)
    assert same_bits(x[:4], np.tile(exact[token_ids], 3))
    assert np.isnan(x[4:]).all()
