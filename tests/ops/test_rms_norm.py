"""The RMS norm of heads: against the reference and float64, beside columns that must stay."""

from __future__ import annotations

import numpy as np
import pytest

from kittiwake.ops.rms_norm import cpu, reference
from tests.ops.bits import same_bits
from tests.ops.pieces import check_threads
from tests.oracles import hybrid_float64
from tests.oracles.measure import relative_error

EPS = np.float32(1e-6)
SIZES = [(2, 1, 1), (3, 5, 7), (17, 2, 64), (65, 3, 33), (127, 1, 257)]
every_size = pytest.mark.parametrize(("rows", "heads", "dim"), SIZES)


def make(rows: int, heads: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """x [N + 3, 2 + heads dim + 3], one head of it all zeros, and weight [dim]."""
    rng = np.random.default_rng([rows, heads, dim])
    x = rng.standard_normal((rows + 3, 5 + heads * dim)) * np.exp2(rng.integers(-8, 9, (rows + 3, 1)))
    x[rows // 2, 2 : 2 + dim] = 0
    return x.astype(np.float32), rng.standard_normal(dim).astype(np.float32)


def run(x: np.ndarray, rows: int, heads: int, weight: np.ndarray) -> np.ndarray:
    x = x.copy()
    cpu.norm_heads(x, 2, heads, len(weight), weight, EPS, rows)
    return x


@every_size
def test_it_agrees_with_the_reference_and_with_float64(rows: int, heads: int, dim: int) -> None:
    x, weight = make(rows, heads, dim)
    found, columns = run(x, rows, heads, weight), slice(2, 2 + heads * dim)
    before = np.ascontiguousarray(x[:rows, columns])
    assert relative_error(found[:rows, columns], reference.norm_heads(before, heads, weight, float(EPS))) < 1e-6
    exact = hybrid_float64.rms_norm(
        before.reshape(rows, heads, dim).astype(np.float64), weight.astype(np.float64), 1e-6
    )
    assert relative_error(found[:rows, columns], exact.reshape(rows, -1)) < 1e-6
    found[:rows, columns] = x[:rows, columns]
    assert same_bits(found, x)


@every_size
def test_neither_threads_nor_neighbours_change_a_bit(
    rows: int, heads: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = make(rows, heads, dim)
    expected = run(x, rows, heads, weight)
    assert same_bits(run(x[rows - 1 : rows], 1, heads, weight), expected[rows - 1 : rows])
    monkeypatch.setattr(cpu, "PARALLEL_VALUES", 0)
    check_threads(lambda: run(x, rows, heads, weight), expected)
