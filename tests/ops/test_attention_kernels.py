"""Block attention's kernels without a card: they compile for four kinds of card, and run in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from kittiwake.ops.block_attention import AttentionShape
from kittiwake.ops.block_attention import triton_sizes as sizes
from kittiwake.ops.block_attention.triton import workspace_bytes
from kittiwake.ops.block_attention.triton_kernels import attend_kernel, enter_kernel, merge_kernel, turn_kernel
from kittiwake.ops.block_attention.triton_select import score_kernel, select_kernel
from tests.ops.without_card import DTYPES, MOST_SHARED, built, cards, cards_and_dtypes, run_interpreted

INTERPRETED = Path(__file__).with_name("interpreted_attention.py")
RELEASED = AttentionShape(24, 2, 256, 64, 4, 128, ratio=4, budget=2048)
SHAPES = (RELEASED, AttentionShape(3, 1, 7, 2, 2, 5, ratio=3, budget=9), AttentionShape(4, 2, 512, 0))
PAGE = 256 * 3
FLOATS = (
    "q_norm", "k_norm", "index_q_norm", "index_k_norm", "turns", "keys", "values", "blocks", "open_rows", "partials",
    "sums", "scores", "maxima", "frequencies",
)  # fmt: skip
WHOLE = ("owners", "starts", "slots", "seen", "positions", "pages", "chosen")
NUMBERS = (
    "P", "first", "last", "line", "each", "most_splits", "q_at", "k_at", "v_at", "index_q_at", "index_k_at",
    "proj_stride", "context_stride",
)  # fmt: skip


@pytest.mark.slow
def test_the_kernels_agree_with_the_references_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


def compiled(kernel: Any, capability: int, dtype: torch.dtype, fixed: dict[str, Any], options: dict[str, Any]) -> Any:
    """As a launch of it would be; it must fit the smallest card, and contract nothing."""
    types = dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(WHOLE, "*i32") | dict.fromkeys(NUMBERS, "i32")
    types |= dict.fromkeys(("proj", "q", "index_q", "context"), DTYPES[dtype]) | dict.fromkeys(("eps", "scale"), "fp32")
    overlap = {"OVERLAP": options.pop("OVERLAP")}
    code = built(kernel, capability, types, fixed | overlap, **options)
    assert len(code.asm["cubin"]) > 0
    assert code.metadata.shared <= MOST_SHARED
    assert "fma.rn.f32" not in code.asm["ptx"]
    return code


@pytest.mark.slow
@cards_and_dtypes
def test_kernels_that_read_the_model_compile(capability: int, dtype: torch.dtype) -> None:
    overlap = capability >= 90
    for shape in SHAPES if capability == 90 else (RELEASED,):
        compiled(enter_kernel, capability, dtype, sizes.enter_sizes(shape, PAGE), sizes.options(1, overlap))
        fixed, options = sizes.attend_sizes(shape, PAGE, dtype), sizes.attend_options(shape, dtype, overlap)
        code = compiled(attend_kernel, capability, dtype, fixed, options).asm["ptx"]
        # three passes of TF32 or one of the dtype, on tensor cores
        assert (
            ".tf32.tf32." if dtype == torch.float32 else ".f32.bf16" if dtype == torch.bfloat16 else ".f32.f16"
        ) in code
        compiled(merge_kernel, capability, dtype, sizes.merge_sizes(shape), sizes.options(1, overlap))
        if shape.index_heads:
            fixed = sizes.score_sizes(shape, PAGE, dtype)
            compiled(score_kernel, capability, dtype, fixed, sizes.score_options(dtype, overlap))


@pytest.mark.slow
@cards
def test_the_selection_and_the_rotation_compile(capability: int) -> None:
    overlap = capability >= 90
    wide = AttentionShape(24, 2, 256, 64, 4, 128, ratio=1, budget=2048)
    for shape, most_tokens in ((RELEASED, 1 << 17), *([(RELEASED, 1 << 20), (wide, 5000)] if capability == 90 else [])):
        fixed, options = sizes.select_sizes(shape, most_tokens), sizes.select_options(shape, most_tokens, overlap)
        compiled(select_kernel, capability, torch.float32, fixed, options)
    compiled(turn_kernel, capability, torch.float32, {"HALF": 32, "BLOCK": 32, "RATIO": 4}, sizes.options(1, overlap))


def test_the_workspace_grows_with_the_rows_and_not_with_the_length() -> None:
    """The scores of a row are all that follows the length, and they are bounded together."""

    def needed(rows: int, tokens: int) -> int:
        return workspace_bytes(RELEASED, rows, tokens, torch.bfloat16)

    by_row = 2 * (24 * 256 + 4 * 128) + 4 * 512
    assert needed(8192, 1 << 18) - needed(4096, 1 << 18) == 4096 * by_row
    assert needed(8192, 1 << 20) <= 8192 * by_row + (1 << 27) + (1 << 26)
    assert needed(4096, 1 << 20) - needed(4096, 1 << 16) < 1 << 27
    assert needed(4096, 2048) < 4096 * by_row + (1 << 26)  # nothing is scored where no row can be sparse


def test_the_tiles_of_the_selection_cover_every_block() -> None:
    for most_tokens in (64, 5000, 1 << 17, 1 << 18, 1 << 20, 3 << 20):
        fixed = sizes.select_sizes(RELEASED, most_tokens)
        assert fixed["TILES"] <= sizes.MOST_TILES
        assert fixed["TILES"] * fixed["FOLD"] * fixed["TILE"] >= most_tokens // RELEASED.ratio
