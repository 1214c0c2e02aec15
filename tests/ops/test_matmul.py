"""Products: the kernel against the definition, bit for bit, however rows, columns and strips are cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.ops.matmul import reference
from kittiwake.ops.matmul.cases import CASES, MatmulCase
from kittiwake.ops.matmul.cpu import ACTIVATIONS, STRIP, WIDE_STRIP, activate, activate_columns, group_product
from tests.ops.bits import same_bits
from tests.ops.pieces import spared, unwritten

Share = tuple[int, int, int, int]
"""(thread, product, first column, last column)."""
EDGE = 3
"""Columns beside the outputs, which must stay as they are."""


def run_group(
    x: np.ndarray,
    weights: Sequence[np.ndarray],
    k_blocks: Sequence[int],
    *,
    x_columns: Sequence[int] | None = None,
    activations: Sequence[str] | None = None,
    shares: Sequence[Share] | None = None,
    strip: int = STRIP,
) -> np.ndarray:
    """All products of a group through the kernel → y [R, columns]; weights [K, N] float32, or uint16 bits of bfloat16."""
    table, offset, y_column = [], 0, EDGE
    for index, weight in enumerate(weights):
        depth, columns = weight.shape
        activation = ACTIVATIONS.index(activations[index]) if activations else 0
        x_column = x_columns[index] if x_columns else 0
        table.append((x_column, depth, columns, offset, y_column, k_blocks[index], activation))
        offset, y_column = offset + weight.size, y_column + columns
    whole = [(0, index, 0, weight.shape[1]) for index, weight in enumerate(weights)]
    flat = np.concatenate([weight.reshape(-1) for weight in weights])
    rows = x.shape[0]
    x, y = spared(x), unwritten(rows, y_column + EDGE)
    group_product(x, rows, flat, np.array(table, dtype=np.int64), np.array(shares or whole, dtype=np.int64), y, strip)
    assert np.isnan(y[:, :EDGE]).all() and np.isnan(y[:, y_column:]).all() and np.isnan(y[rows:]).all()
    return y[:rows, EDGE:y_column]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_has_the_bits_of_the_definition(case: MatmulCase) -> None:
    x, weight = case.make()
    expected = reference.product(x, weight, case.k_block)
    assert same_bits(run_group(x, [weight], [case.k_block]), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_definition_is_a_product(case: MatmulCase) -> None:
    x, weight = case.make()
    exact = x.astype(np.float64) @ weight.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64)
    assert (np.abs(reference.product(x, weight, case.k_block) - exact) <= size * case.depth * 2.0**-24).all()


def test_the_order_and_the_blocks_of_the_sum_show_in_the_bits() -> None:
    """Otherwise the comparisons of this file would prove nothing."""
    x, weight = MatmulCase(7, 385, 33, 192).make()
    plain = reference.product(x, weight, 192)
    for other in (385, 193, 191, 96):
        assert np.count_nonzero(reference.product(x, weight, other) != plain) > 20
    turned = reference.product(x[:, ::-1], weight[::-1], 192)
    assert np.count_nonzero(turned != plain) > 100


@pytest.mark.parametrize("rows", range(1, 10))
def test_a_row_has_its_bits_however_many_stand_beside_it(rows: int) -> None:
    x, weight = MatmulCase(9, 77, 37, 32).make()
    alone = np.concatenate([run_group(x[i : i + 1], [weight], [32]) for i in range(9)])
    assert same_bits(run_group(x[:rows], [weight], [32]), alone[:rows])
    assert same_bits(run_group(x[9 - rows :], [weight], [32]), alone[9 - rows :])


@pytest.mark.parametrize("strip", [1, 7, 16, STRIP, WIDE_STRIP])
def test_strips_change_no_bit(strip: int) -> None:
    x, weight = MatmulCase(3, 50, 2 * STRIP + 5, 16).make()
    assert same_bits(run_group(x, [weight], [16], strip=strip), reference.product(x, weight, 16))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_shares_change_no_bit(data: st.DataObject) -> None:
    """Any cut of the columns among any number of threads."""
    cases = [MatmulCase(3, 40, 45, 16), MatmulCase(3, 9, 1, 9), MatmulCase(3, 17, 130, 8)]
    x = cases[0].make()[0]
    weights = [case.make()[1] for case in cases]
    shares: list[Share] = []
    for index, case in enumerate(cases):
        cuts = sorted(data.draw(st.sets(st.integers(1, case.columns), max_size=5)) | {0, case.columns})
        shares += [(0, index, first, last) for first, last in itertools.pairwise(cuts)]
    threads = data.draw(st.integers(1, 7))
    owners = sorted(data.draw(st.lists(st.integers(0, threads - 1), min_size=len(shares), max_size=len(shares))))
    shares = [(owner, *share[1:]) for owner, share in zip(owners, shares, strict=True)]
    expected = np.concatenate([reference.product(x[:, :d], w, b) for (d, w, b) in _parts(cases, weights)], axis=1)
    assert same_bits(run_group(x, weights, [case.k_block for case in cases], shares=shares), expected)


def test_columns_that_nobody_was_given_stay_as_they_are() -> None:
    x, weight = MatmulCase(3, 9, 40, 9).make()
    found = run_group(x, [weight], [9], shares=[(0, 0, 0, 7), (1, 0, 20, 33)], strip=16)
    expected = reference.product(x, weight, 9)
    assert same_bits(found[:, :7], expected[:, :7]) and same_bits(found[:, 20:33], expected[:, 20:33])
    assert np.isnan(found[:, 7:20]).all() and np.isnan(found[:, 33:]).all()


def _parts(cases: Sequence[MatmulCase], weights: Sequence[np.ndarray]) -> list[tuple[int, np.ndarray, int]]:
    return [(case.depth, weight, case.k_block) for case, weight in zip(cases, weights, strict=True)]


def test_products_of_a_group_read_their_own_columns_of_one_buffer() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 100)).astype(np.float32)
    sizes, places, blocks = [(30, 17), (30, 3), (7, 64), (100, 5)], [0, 41, 93, 0], [192, 8, 7, 33]
    weights = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    expected = np.concatenate(
        [
            reference.product(x[:, at : at + weight.shape[0]], weight, block)
            for at, weight, block in zip(places, weights, blocks, strict=True)
        ],
        axis=1,
    )
    assert same_bits(run_group(x, weights, blocks, x_columns=places), expected)


@pytest.mark.parametrize("case", CASES[:8], ids=str)
def test_bfloat16_weights_are_float32_weights_of_the_same_values(case: MatmulCase) -> None:
    x, weight = case.make()
    stored = torch.from_numpy(weight).bfloat16()
    bits = stored.view(torch.uint16).numpy()
    expected = reference.product(x, stored.float().numpy(), case.k_block)
    assert same_bits(run_group(x, [bits], [case.k_block]), expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("strip", [5, STRIP])
def test_an_activation_is_applied_once_to_the_finished_product(name: str, strip: int) -> None:
    x, weight = MatmulCase(3, 21, 19, 8).make()
    x /= np.float32(2**20)
    expected = reference.product(x, weight, 8)
    activate(expected.reshape(-1), ACTIVATIONS.index(name))
    found = run_group(x, [weight, weight], [8, 8], activations=[name, "none"], strip=strip)
    assert same_bits(found[:, :19], expected)
    assert same_bits(found[:, 19:], reference.product(x, weight, 8))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activating_columns_of_a_wide_product_gives_the_same_bits(name: str) -> None:
    y = (np.random.default_rng(2).standard_normal((7, 41)) * 3).astype(np.float32)
    expected = y.copy()
    for row in expected[:5]:
        activate(row[6:29], ACTIVATIONS.index(name))
    activate_columns(y, 5, 6, 29, ACTIVATIONS.index(name))
    assert same_bits(y, expected)


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    x, weight = MatmulCase(5, 20, 11, 8).make()
    expected = reference.product(x, weight, 8)
    x[2, 3] = np.nan
    weight[4, 7] = np.inf
    found = run_group(x, [weight], [8])
    assert np.isnan(found[2]).all()
    assert not np.isfinite(found[:, 7]).any()
    clean = np.ix_([0, 1, 3, 4], [c for c in range(11) if c != 7])
    assert same_bits(found[clean], expected[clean])
