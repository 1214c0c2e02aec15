"""Decoding rows: every kind against numpy and the ``gguf`` package, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from kittiwake.checkpoints.row_table import BLOCKS
from kittiwake.ops.row_reads import layout, reference
from kittiwake.ops.row_reads.decode import decode_row
from tests.ops.bits import same_bits


def decoded(packed: bytes, kind: str, count: int) -> tuple[np.ndarray, bool]:
    values = np.full(count, np.nan, np.float32)
    is_finite = decode_row(np.frombuffer(packed, np.uint8), layout.KINDS.index(kind), values)
    return values, bool(is_finite)


def test_the_kernels_and_the_table_know_the_same_kinds() -> None:
    assert tuple(BLOCKS) == layout.KINDS


def test_every_half_is_widened_exactly() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    found, is_finite = decoded(halves.tobytes(), "F16", len(halves))
    expected = halves.view(np.float16).astype(np.float32)
    is_number = ~np.isnan(expected)
    assert same_bits(found[is_number], expected[is_number])
    assert np.isnan(found[~is_number]).all() and not is_finite


@pytest.mark.parametrize("kind", layout.KINDS)
def test_the_kernel_decodes_as_the_reference_does(kind: str) -> None:
    rng = np.random.default_rng(3)
    block, block_bytes = BLOCKS[kind]
    values = block * 5
    for _ in range(20):
        packed = rng.integers(0, 256, 5 * block_bytes, dtype=np.uint8)
        if block > 1:  # the highest byte of a block's scale: no infinity, no NaN
            packed.reshape(5, -1)[:, 1] &= 0xBB
        with np.errstate(invalid="ignore"):
            expected = reference.decode(packed.tobytes(), kind)
        found, is_finite = decoded(packed.tobytes(), kind, values)
        assert same_bits(found, expected)
        assert is_finite == bool(np.isfinite(expected).all())


@pytest.mark.parametrize("kind", ["Q8_0", "IQ4_NL"])
def test_blocks_are_those_of_the_gguf_package(kind: str) -> None:
    packed = np.random.default_rng(4).integers(0, 256, 7 * BLOCKS[kind][1], dtype=np.uint8)
    packed.reshape(7, -1)[:, 1] &= 0xBB
    expected = dequantize(packed, gguf.GGMLQuantizationType[kind])
    found, _ = decoded(packed.tobytes(), kind, 7 * 32)
    assert same_bits(found, expected)
