"""What the kernels of block attention are compiled for: of the model and its memory alone, whatever is launched."""

from __future__ import annotations

from typing import Any

import torch
import triton

from kittiwake.ops.block_attention import AttentionShape
from kittiwake.ops.block_attention.triton_select import COLUMNS, TILE
from kittiwake.ops.triton_launch import launch_options

SCORED_LINES = 64
"""Rows times index heads (rounded up to a power of two) of a tile of scores."""
DEPTH = 32
"""Values of a head between two steps of a score's chain of sums. It decides bits."""
MOST_TILES = 8192
"""Tiles of blocks whose highest scores are looked at first; where there are more, neighbours count as one."""
GATHERED = 16
"""Values that a thread of a selection holds, as far as there are threads."""
HALVINGS = 16
"""Steps of the search for the border of a selection that halve what two scores differ by; those behind halve numbers."""
MERGED = 64
"""Values of a head that a program merges, of all its splits."""
MOST_DIM = 512
"""Widest head that the kernels hold."""


def _block(size: int) -> int:
    """The power of two that holds a head, and that tensor cores take."""
    found: int = triton.next_power_of_2(size)
    return max(16, found)


def _split(shape: AttentionShape) -> int:
    """Keys whose share of the softmax is made at once. It decides bits."""
    return 32 if shape.head_dim <= MOST_DIM // 2 else 16


def score_rows(shape: AttentionShape) -> int:
    """Rows of a tile of scores."""
    heads: int = triton.next_power_of_2(shape.index_heads)
    return max(1, SCORED_LINES // heads)


def score_line(shape: AttentionShape, most_tokens: int) -> int:
    """Floats of one row's scores: whole tiles of blocks, and behind those of all rows the highest of each small tile."""
    blocks = -(-(most_tokens // shape.ratio) // COLUMNS) * COLUMNS
    return blocks + blocks // TILE


def most_splits(shape: AttentionShape, most_tokens: int) -> int:
    """Splits that a row walks at most."""
    most = min(most_tokens, shape.budget + shape.ratio - 1) if shape.index_heads else most_tokens
    return -(-most // _split(shape))


def partial_values(shape: AttentionShape, most_tokens: int) -> int:
    """Floats of the shares of one row's splits: weighted values, and beside them top and sum."""
    return shape.heads * most_splits(shape, most_tokens) * (shape.head_dim + 2)


def options(warps: int, overlap: bool, stages: int = 1) -> dict[str, Any]:
    """Of any of these kernels: no contraction, and whether it begins before the one in front of it has ended."""
    return launch_options(overlap, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


def attend_options(shape: AttentionShape, element: torch.dtype, overlap: bool) -> dict[str, Any]:
    """Keys of 16-bit models are fetched a split ahead; in float32 that would take more than a block's memory."""
    is_narrow = element != torch.float32 and shape.head_dim <= MOST_DIM // 2
    return options(4, overlap, 2) if is_narrow else options(8, overlap)


def score_options(element: torch.dtype, overlap: bool) -> dict[str, Any]:
    """Block keys are fetched ahead, in three passes of TF32 by more warps, which share what these take of registers."""
    return options(8, overlap, 2) if element == torch.float32 else options(4, overlap, 3)


def _precision(element: torch.dtype) -> str:
    return "tf32x3" if element == torch.float32 else "ieee"


def enter_sizes(shape: AttentionShape, page_tokens: int) -> dict[str, Any]:
    """Constants of ``enter_kernel``."""
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.head_dim,
        "INDEX_HEADS": shape.index_heads,
        "INDEX_DIM": shape.index_dim,
        "HALF": shape.rotary_dim // 2,
        "RATIO": shape.ratio,
        "PAGE": page_tokens,
        "BLOCK": _block(shape.head_dim),
        "INDEX_BLOCK": _block(max(1, shape.index_dim)),
    }


def score_sizes(shape: AttentionShape, page_tokens: int, element: torch.dtype) -> dict[str, Any]:
    """Constants of ``score_kernel``."""
    return {
        "HEADS": shape.index_heads,
        "HEADS_PADDED": triton.next_power_of_2(shape.index_heads),
        "DIM": shape.index_dim,
        "BLOCK": max(DEPTH, _block(shape.index_dim)),
        "DEPTH": DEPTH,
        "RATIO": shape.ratio,
        "BUDGET": shape.budget_blocks,
        "PAGE_BLOCKS": page_tokens // shape.ratio,
        "ROWS": score_rows(shape),
        "COLUMNS": COLUMNS,
        "TILE": TILE,
        "LINE": 32,
        "PRECISION": _precision(element),
    }


def select_sizes(shape: AttentionShape, most_tokens: int) -> dict[str, Any]:
    """Constants of ``select_kernel``; it counts whole numbers, so those of another memory change no bit."""
    tiles = triton.next_power_of_2(-(-(most_tokens // shape.ratio) // TILE))
    fold = max(1, tiles // MOST_TILES)
    return {
        "BUDGET": shape.budget_blocks,
        "BUDGET_PADDED": triton.next_power_of_2(shape.budget_blocks),
        "RATIO": shape.ratio,
        "TILE": TILE,
        "FOLD": fold,
        "TILES": tiles // fold,
        "HALVINGS": HALVINGS,
    }


def select_options(shape: AttentionShape, most_tokens: int, overlap: bool) -> dict[str, Any]:
    """What a program gathers lies in registers: it looks at it some twenty times."""
    fixed = select_sizes(shape, most_tokens)
    gathered = max(fixed["BUDGET_PADDED"] * fixed["TILE"] * fixed["FOLD"], fixed["TILES"] * fixed["FOLD"])
    return options(min(32, max(8, gathered // (32 * GATHERED))), overlap)


def _split_sizes(shape: AttentionShape) -> dict[str, Any]:
    return {
        "HEADS": shape.heads,
        "DIM": shape.head_dim,
        "RATIO": shape.ratio,
        "BUDGET": shape.budget_blocks,
        "SPLIT": _split(shape),
    }


def merge_sizes(shape: AttentionShape) -> dict[str, Any]:
    """Constants of ``merge_kernel``; no value meets another there, so that its own change no bit."""
    return _split_sizes(shape) | {"PART": min(MERGED, _block(shape.head_dim)), "AT_ONCE": 16}


def attend_sizes(shape: AttentionShape, page_tokens: int, element: torch.dtype) -> dict[str, Any]:
    """Constants of ``attend_kernel``."""
    return _split_sizes(shape) | {
        "BLOCK": _block(shape.head_dim),
        "KV_HEADS": shape.kv_heads,
        "PAGE": page_tokens,
        "GROUP_BLOCK": _block(shape.heads // shape.kv_heads),
        "PRECISION": _precision(element),
    }
