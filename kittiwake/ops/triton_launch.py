"""How Triton kernels are launched: the options that many of them share."""

from __future__ import annotations

from typing import Any

import triton


def launch_options(overlap: bool, **more: Any) -> dict[str, Any]:
    """Options of a launch that may begin before the one in front of it has ended (``overlap``), or not; ``more`` of its own."""
    return more | {"OVERLAP": overlap} | ({"launch_pdl": True} if overlap else {})


def warps_for(block: int) -> int:
    """Warps of a program that sums over ``block`` values."""
    return min(max(block // 256, 1), 8)


def row_options(width: int, overlap: bool) -> dict[str, Any]:
    """Of programs that sum over a whole row, without contraction.

    The block that holds a row and its warps shape the trees of its sums: they depend on the width alone.
    """
    block = triton.next_power_of_2(width)
    return launch_options(overlap, BLOCK=block, num_warps=warps_for(block), enable_fp_fusion=False)


def piece_options(width: int, most: int, overlap: bool) -> dict[str, Any]:
    """Of programs that take up to ``most`` channels and no sum over them, so that it changes no bit; without contraction."""
    block = min(most, triton.next_power_of_2(width))
    return launch_options(overlap, BLOCK=block, num_warps=4, enable_fp_fusion=False)
