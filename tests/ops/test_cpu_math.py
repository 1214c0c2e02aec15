"""Float32 building blocks: error bounds over the whole range, and the same bits at every place of a vector."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from kittiwake.ops.cpu_math import (
    exp32,
    fma,
    norm_row,
    rms_row,
    row_square_sum,
    row_sum,
    sigmoid32,
    silu32,
    softplus32,
    tanh32,
    widen,
)
from kittiwake.ops.matmul.cpu import ACTIVATIONS, activate
from tests.ops.bits import same_bits, ulps_off

Map = Callable[[np.ndarray], np.ndarray]


@njit(error_model="numpy")
def _exp_all(values: Any, out: Any) -> None:
    for i in range(values.shape[0]):
        out[i] = exp32(values[i])


@njit(error_model="numpy")
def _silu_all(values: Any, out: Any) -> None:
    for i in range(values.shape[0]):
        out[i] = silu32(values[i])


@njit(error_model="numpy")
def _softplus_all(values: Any, out: Any) -> None:
    for i in range(values.shape[0]):
        out[i] = softplus32(values[i])


@njit
def _fma_all(a: Any, b: Any, c: Any, out: Any) -> None:
    for i in range(a.shape[0]):
        out[i] = fma(a[i], b[i], c[i])


@njit
def _widen_all(stored: Any, out: Any) -> None:
    for i in range(stored.shape[0]):
        out[i] = widen(stored[i])


def exp_all(values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    _exp_all(values, out)
    return out


def silu_all(values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    _silu_all(values, out)
    return out


def softplus_all(values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    _softplus_all(values, out)
    return out


def activation(name: str) -> Map:
    def run(values: np.ndarray) -> np.ndarray:
        out = values.copy()
        activate(out, ACTIVATIONS.index(name))
        return out

    return run


sigmoid_all, tanh_all = activation("sigmoid"), activation("tanh")


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def every_exponent(seed: int) -> np.ndarray:
    """Random finite float32 of both signs, every exponent equally likely, denormals and zeros among them."""
    values = np.random.default_rng(seed).integers(0, 1 << 32, 500_000, dtype=np.uint32).view(np.float32)
    return np.concatenate([values[np.isfinite(values)], f32(0.0, -0.0, 1e-45, -1e-45)])


VALUES = {"all exponents": every_exponent(1), "-105 to 90": np.linspace(-105, 90, 500_001, dtype=np.float32)}
over_the_range = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())


@over_the_range
def test_exp_is_within_one_and_a_half_units(values: np.ndarray) -> None:
    inside = values[(values > -103.97) & (values < 88.722)]
    exact = np.exp(inside.astype(np.float64))
    assert ulps_off(exp_all(inside), exact).max() <= 1.5
    assert not exp_all(values[values < -103.98]).any()
    assert np.isposinf(exp_all(values[values > 88.7229])).all()


def test_exp_of_the_ends_of_the_range() -> None:
    largest = float(np.finfo(np.float32).max)
    assert exp_all(f32(np.inf, largest, 89, 88.72284)).tolist() == [np.inf] * 4
    assert exp_all(f32(-np.inf, -largest, -104, -103.98)).tolist() == [0.0] * 4
    assert exp_all(f32(0.0, -0.0, 1e-45, -1e-45)).tolist() == [1.0] * 4
    assert exp_all(f32(-103.5)).tolist() == [2.0**-149]  # a denormal, not zero
    assert np.isfinite(exp_all(f32(88.72283))).all()
    assert np.isnan(exp_all(f32(np.nan))).all()


@over_the_range
def test_sigmoid_is_within_two_and_a_half_units_where_it_is_normal(values: np.ndarray) -> None:
    found = sigmoid_all(values)
    with np.errstate(over="ignore"):
        exact = 1 / (1 + np.exp(-values.astype(np.float64)))
    normal = values > -87.3
    assert ulps_off(found[normal], exact[normal]).max() <= 2.5
    assert np.abs(found[~normal] - exact[~normal]).max() < 2.0**-126  # denormals may be zero
    assert found.min() >= 0 and found.max() <= 1


@over_the_range
def test_tanh_is_within_three_units(values: np.ndarray) -> None:
    found = tanh_all(values)
    assert ulps_off(found, np.tanh(values.astype(np.float64))).max() <= 3
    assert np.abs(found).max() <= 1


def test_sigmoid_and_tanh_of_the_ends_of_the_range() -> None:
    assert sigmoid_all(f32(np.inf, 89, 0, -104, -np.inf)).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert tanh_all(f32(np.inf, 1e30, 40, 0, -40, -1e30, -np.inf)).tolist() == [1, 1, 1, 0, -1, -1, -1]
    assert np.isnan(sigmoid_all(f32(np.nan))).all() and np.isnan(tanh_all(f32(np.nan))).all()


@over_the_range
def test_silu_is_within_three_units_where_it_is_normal(values: np.ndarray) -> None:
    inside = values[values > -80]
    exact = inside / (1 + np.exp(-inside.astype(np.float64)))
    normal = np.abs(exact) >= 2.0**-126
    assert ulps_off(silu_all(inside)[normal], exact[normal]).max() <= 3


@over_the_range
def test_softplus_is_within_three_and_a_half_units_where_it_is_normal(values: np.ndarray) -> None:
    found, exact = softplus_all(values), np.logaddexp(0, values.astype(np.float64))
    normal = exact >= 2.0**-126
    assert ulps_off(found[normal], exact[normal]).max() <= 3.5
    assert np.abs(found[~normal] - exact[~normal]).max(initial=0) < 2.0**-126
    assert found.min() >= 0


def test_silu_and_softplus_of_the_ends_of_the_range() -> None:
    assert silu_all(f32(np.inf, 89, 0, -104)).tolist() == [np.inf, 89, 0, 0]
    assert softplus_all(f32(np.inf, 1e30, 40, -104, -np.inf)).tolist() == [np.inf, f32(1e30)[0], 40, 0, 0]
    assert softplus_all(f32(0, 20)).tolist() == f32(np.log(2), 20).tolist()
    assert np.isnan(silu_all(f32(np.nan))).all() and np.isnan(softplus_all(f32(np.nan))).all()


def test_relu2_squares_what_is_positive() -> None:
    squared = activation("relu2")
    assert squared(f32(3, 1e20, 0, -0.0, -2, -np.inf)).tolist() == [9, np.inf, 0, 0, 0, 0]
    values = VALUES["-105 to 90"]
    assert same_bits(squared(values), np.maximum(values, np.float32(0)) ** 2)


@pytest.mark.parametrize(
    "run",
    [exp_all, sigmoid_all, tanh_all, silu_all, softplus_all, activation("relu2")],
    ids="exp sigmoid tanh silu softplus relu2".split(),
)
def test_a_value_has_its_bits_at_every_place_of_a_vector(run: Map) -> None:
    """Vector lanes, their remainder and a lone value: one function."""
    values = np.concatenate([np.linspace(-9, 9, 51), [-103.5, 88.7, 1e-39, -1e-39, 1e30]]).astype(np.float32)
    alone = np.concatenate([run(values[i : i + 1]) for i in range(len(values))])
    for first in range(17):
        for last in range(first + 1, len(values) + 1):
            assert same_bits(run(values[first:last]), alone[first:last]), (first, last)


@pytest.mark.parametrize(("scalar", "run"), [(exp32, exp_all), (sigmoid32, sigmoid_all), (tanh32, tanh_all)])
def test_inlined_or_called_alone_the_bits_are_the_same(scalar: Callable[[np.float32], float], run: Map) -> None:
    values = np.linspace(-20, 20, 77, dtype=np.float32)
    assert same_bits(f32(*(scalar(value) for value in values)), run(values))


# fused multiply-add, stored weights


def rounded(exact: Fraction) -> np.float32:
    """An exact number to float32, once: float64 conversion of a Fraction is right, so only ties could be hurt."""
    nearest = np.float32(float(exact))
    candidates = (np.nextafter(nearest, np.float32(-np.inf)), nearest, np.nextafter(nearest, np.float32(np.inf)))
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.uint32)) & 1))


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(3000).astype(np.float32) for _ in range(2))
    # c cancels all but the last bits of the product, or stands halfway between two float32
    c = np.where(rng.random(3000) < 0.7, -(a * b), rng.standard_normal(3000) * 2.0 ** rng.integers(-30, 30, 3000))
    c = c.astype(np.float32)
    found = np.empty_like(a)
    _fma_all(a, b, c, found)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert [float(value) for value in found] == [float(rounded(value)) for value in exact]
    assert np.count_nonzero(found != a * b + c) > 1000  # rounding twice would have shown


def test_every_bfloat16_is_widened_exactly() -> None:
    stored = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(1 << 16, dtype=np.float32)
    _widen_all(stored, out)
    assert same_bits(out, torch.from_numpy(stored).view(torch.bfloat16).float().numpy())


# sums and norms of a row


def eight_chains(terms: np.ndarray, add: Callable[[np.float32, np.float32], np.float32]) -> np.float32:
    """The fixed tree: eight interleaved chains, the rest on the first, then pairs."""
    chains = [np.float32(0)] * 8
    full = len(terms) - len(terms) % 8
    for index, term in enumerate(terms):
        chain = index % 8 if index < full else 0
        chains[chain] = add(chains[chain], term)
    a, b, c, d, e, f, g, h = chains
    return np.float32(((a + b) + (c + d)) + ((e + f) + (g + h)))


@pytest.mark.parametrize("width", [1, 7, 8, 9, 63, 64, 65, 127, 768])
def test_a_row_is_summed_by_one_tree(width: int) -> None:
    rng, mean = np.random.default_rng(width), np.float32(0.3)

    def add_square(total: np.float32, x: np.float32) -> np.float32:
        return np.float32(float(x - mean) ** 2 + float(total))  # exact in float64 up to the one rounding of the sum

    for row in rng.standard_normal((20, width)).astype(np.float32):
        assert np.float32(row_sum(row)) == eight_chains(row, lambda total, x: total + x)
        assert np.float32(row_square_sum(row, mean)) == eight_chains(row, add_square)


@pytest.mark.parametrize("width", [1, 5, 8, 63, 65, 128])
def test_a_norm_has_its_bits_wherever_the_row_lies(width: int) -> None:
    rng = np.random.default_rng(width)
    row, weight, bias = rng.standard_normal((3, width)).astype(np.float32)
    expected = np.empty(width, np.float32)
    norm_row(row, weight, bias, np.float32(1e-5), expected)
    for offset in range(1, 17):
        memory = np.full(width + 32, np.nan, np.float32)
        memory[offset : offset + width] = row
        norm_row(memory[offset : offset + width], weight, bias, np.float32(1e-5), memory[offset : offset + width])
        assert same_bits(memory[offset : offset + width], expected)
        assert np.isnan(memory[:offset]).all() and np.isnan(memory[offset + width :]).all()


@pytest.mark.parametrize("size", [1e-4, 1, 1e4])
def test_a_norm_is_that_of_float64(size: float) -> None:
    rng = np.random.default_rng(3)
    row, weight, bias = rng.standard_normal((3, 127)).astype(np.float32)
    row = (row * np.float32(size)).astype(np.float32)
    found = np.empty(127, np.float32)
    norm_row(row, weight, bias, np.float32(1e-5), found)
    wide = row.astype(np.float64)
    exact = (wide - wide.mean()) / np.sqrt(wide.var() + np.float32(1e-5)) * weight + bias
    np.testing.assert_allclose(found, exact, rtol=0, atol=3e-6)


@pytest.mark.parametrize("width", [1, 5, 8, 63, 65, 128])
def test_an_rms_norm_is_right_and_has_its_bits_wherever_the_row_lies(width: int) -> None:
    rng, eps = np.random.default_rng(width), np.float32(1e-6)
    row, weight = rng.standard_normal((2, width)).astype(np.float32)
    expected = np.empty(width, np.float32)
    rms_row(row, weight, eps, expected)
    exact = row.astype(np.float64) / np.sqrt(np.mean(row.astype(np.float64) ** 2) + 1e-6) * weight
    assert ulps_off(expected, exact).max() <= 4
    for shift in range(9):
        buffer = np.empty(width + 9, np.float32)
        moved = buffer[shift : shift + width]
        moved[:] = row
        rms_row(moved, weight, eps, moved)  # in place
        assert same_bits(moved, expected), shift
