"""Groups of products as the tests of this folder use them, and what they must give."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from kittiwake.layers.linear import LinearGroup, Pick, Product, padded
from kittiwake.ops.matmul import reference
from kittiwake.ops.matmul.cpu import ACTIVATIONS, activate

GROUPS: dict[str, tuple[Product, ...]] = {
    "as in a time mix": (
        Product("r", 96, 96, 0),
        Product("k", 96, 96, 192),
        Product("v", 96, 96, 288),
        Product("w1", 96, 5, 96, "tanh"),
        Product("a1", 96, 9, 384),
        Product("g1", 96, 33, 480, "sigmoid"),
    ),
    "odd places": (
        Product("one", 33, 17, 0),
        Product("two", 33, 130, 33, "relu2"),
        Product("three", 7, 1, 66),
        Product("four", 200, 64, 73),
    ),
    "several blocks and tiles": (Product("wide", 700, 1100, 0), Product("deep", 1001, 35, 3)),
    "one number": (Product("one", 1, 1, 0),),
}


def depths(products: Sequence[Product]) -> set[tuple[int, int]]:
    """The shapes (K, N) of these products."""
    return {(product.depth, product.columns) for product in products}


def same_picks(products: Sequence[Product], k_block: int, wide_from: int) -> dict[tuple[int, int], Pick]:
    """One pick for all."""
    return dict.fromkeys(depths(products), Pick(k_block, wide_from))


def weight_of(product: Product) -> torch.Tensor:
    """Random [N, K] whose values bfloat16 holds, the same ones for the same product."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(product).encode()))
    return torch.randn(product.columns, product.depth, generator=generator).bfloat16()


def make_group(
    products: Sequence[Product], picks: dict[tuple[int, int], Pick], dtype: str = "fp32", threads: int = 2
) -> LinearGroup:
    """A group with its weights loaded."""
    group = LinearGroup(products, picks, dtype, threads)
    for product in products:
        group.load(product.name, weight_of(product))
    return group


def make_rows(products: Sequence[Product], rows: int) -> np.ndarray:
    """x [padded rows, X] of widely different sizes, rows beyond ``rows`` zero; the first rows are the same for any count."""
    columns = max(product.x_column + product.depth for product in products)
    rng = np.random.default_rng(columns)
    x = np.zeros((padded(rows), columns), np.float32)
    for row in x[:rows]:
        row[:] = rng.standard_normal(columns) * np.exp2(rng.integers(-12, 13, columns))
    return x


def expected_rows(products: Sequence[Product], picks: dict[tuple[int, int], Pick], x: np.ndarray) -> np.ndarray:
    """y by the definition."""
    parts = []
    for product in products:
        left = x[:, product.x_column : product.x_column + product.depth]
        block = picks[product.depth, product.columns].k_block
        part = reference.product(left, weight_of(product).float().numpy().T, block)
        for row in part:
            activate(row, ACTIVATIONS.index(product.activation))
        parts.append(part)
    return np.concatenate(parts, axis=1)


def outputs(group: LinearGroup, rows: int) -> np.ndarray:
    """A buffer for y, full of NaN."""
    return np.full((padded(rows), group.columns), np.nan, np.float32)
