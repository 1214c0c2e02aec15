"""What the kernels with a matrix state share, without a card."""

from __future__ import annotations

import pytest
import torch

from kittiwake.ops.head_kernels import (
    LOW_ROWS,
    TILINGS,
    Tiling,
    can_take_low,
    choose_tiling,
    head_defines,
    low_bytes,
    low_defines,
)


@pytest.mark.parametrize(
    ("states", "place"), [(1, 0), (16, 0), (17, 1), (48, 1), (49, 2), (96, 2), (97, 3), (1 << 31, 3)]
)
def test_the_tiling_of_a_scan_follows_the_number_of_states(states: int, place: int) -> None:
    assert choose_tiling(TILINGS, states) == TILINGS[place][1]


def test_every_tiling_fills_warps_and_fits_a_card() -> None:
    for _, tiling in TILINGS:
        assert tiling.columns_per_block % tiling.columns_per_thread == 0
        # a warp is filled by whole groups of 8 lanes, and every lane of it takes part in the exchanges
        assert tiling.threads == 8 * tiling.columns_per_block // tiling.columns_per_thread
        assert tiling.threads % 32 == 0
        assert tiling.ring_bytes(64, 6) <= 99 * 1024  # WKV-7's vectors of a head, the most there are


def test_sources_are_compiled_with_what_they_are_told() -> None:
    assert head_defines(40, torch.bfloat16, Tiling(4, 32, 8, 3)) == (
        "D=40", "DP=64", "DT=2", "R=4", "ROWS=32", "STEPS=8", "STAGES=3",
    )  # fmt: skip
    assert Tiling(4, 32, 8, 3).ring_bytes(64, 6) == 3 * 8 * 6 * 64 * 4


def test_decoding_makes_the_low_rank_products_itself_where_it_can() -> None:
    ranks, most = (64, 64, 128, 32), 160 * 1024
    assert can_take_low(64, torch.float16, ranks, 1, most)
    assert can_take_low(32, torch.bfloat16, ranks, LOW_ROWS, most)
    assert not can_take_low(64, torch.float16, ranks, LOW_ROWS + 1, most)
    assert not can_take_low(64, torch.float32, ranks, 1, most)  # there is no such product in float32
    assert not can_take_low(48, torch.float16, ranks, 1, most)
    assert not can_take_low(64, torch.float16, (64, 64, 128, 12), 1, most)  # not whole groups of 16 bytes
    assert low_bytes(64, ranks) == 288 * 2  # the inputs; weights are held in registers
    ranks = (128, 128, 480, 96)
    needed = low_bytes(64, ranks)
    assert needed == (64 * (832 + 4 * 8) + 832) * 2  # and weights in rows of 8 more
    assert can_take_low(64, torch.float16, ranks, 1, needed) and not can_take_low(
        64, torch.float16, ranks, 1, needed - 1
    )
    assert low_defines((24, 16, 72, 0)) == ("LOW_DEPTHS=32,16,80,0", "LOW_HELD=1")
    assert low_defines((256, 256, 8)) == ("LOW_DEPTHS=256,256,16", "LOW_HELD=0")
    assert low_bytes(64, (8,)) == low_bytes(64, (16,))  # rounded up to the 16 that a step of the matrix units takes
