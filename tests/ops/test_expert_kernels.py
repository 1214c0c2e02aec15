"""Experts and the n-gram layer's mix without a card: they run interpreted, and compile for four kinds of card."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from kittiwake.layers.cuda_experts import tilings
from kittiwake.ops.experts import triton as experts
from kittiwake.ops.ngram_mix import triton as ngram
from tests.ops.without_card import DTYPES, MOST_SHARED, built, cards, cards_and_dtypes, run_interpreted

INTERPRETED = Path(__file__).with_name("interpreted_experts.py")
INTS = ("E", "P", "T", "C", "ff", "dilation")
STRIDES = ("logits", "x", "w", "expert", "shared", "gate", "y", "kv", "out")
TYPES = (
    dict.fromkeys(("chosen", "owners", "pairs", "tiles", "starts", "slots"), "*i32")
    | dict.fromkeys(("shares", "scales", "state", "norm_key", "norm_query", "norm_conv", "weight"), "*fp32")
    | dict.fromkeys(INTS, "i32")
    | dict.fromkeys((f"{name}_stride" for name in STRIDES), "i32")
    | {"stride": "i32", "root": "fp32", "eps": "fp32"}
)


def compiled(kernel: Any, capability: int, dtype: torch.dtype, fixed: dict[str, Any], **options: Any) -> Any:
    """A kernel for a card, overlapping where the card can; what has no type of its own has the element's."""
    overlap = {"launch_pdl": True} if capability >= 90 else {}
    types = dict.fromkeys(kernel.arg_names, DTYPES[dtype]) | TYPES
    if kernel in (ngram.gate_kernel, ngram.conv_kernel):
        types["x"] = "*fp32"
    made = built(kernel, capability, types, fixed | {"OVERLAP": bool(overlap)}, **options, **overlap)
    assert len(made.asm["cubin"]) > 0
    assert made.metadata.shared <= MOST_SHARED
    assert not re.search(r"\s(atom|red)\.", made.asm["ptx"])  # whose order would be another each time
    return made


@pytest.mark.slow
def test_the_kernels_agree_with_the_references_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.slow
@cards_and_dtypes
def test_every_tiling_compiles_and_fits_a_card(capability: int, dtype: torch.dtype) -> None:
    """In the sizes of Qwen3.8-Flash-Next; the narrow one in odd sizes and for pairs as they are, too."""
    for width, ff in ((2560, 640), (31, 17)):
        for place, tiling in enumerate(tilings(width, ff, dtype)):
            if place > 0 and width == 31:
                continue
            for is_direct in (False, True) if place == 0 else (False,):
                shared = {"DIRECT": is_direct, "PRECISION": "ieee"}
                for kernel, config, depth, more in (
                    (experts.gate_up_kernel, tiling.gate_up, width, {"TOP_K": 10}),
                    (experts.down_kernel, tiling.down, ff, {}),
                ):
                    sizes = {"BM": config.bm, "BN": config.bn, "BK": config.bk, "EVEN": depth % config.bk == 0}
                    compiled(
                        kernel, capability, dtype, shared | sizes | more, num_warps=config.warps, num_stages=config.stages
                    )  # fmt: skip


@pytest.mark.slow
@cards_and_dtypes
def test_row_kernels_compile(capability: int, dtype: torch.dtype) -> None:
    route = {"SMALLEST": experts.SMALLEST_SUM, "RENORMALISES": True, "TOP_K": 10, "RANKS": 16, "BLOCK": 512}
    compiled(experts.route_kernel, capability, dtype, route, num_warps=1, enable_fp_fusion=False)
    row: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
    summed = compiled(experts.sum_kernel, capability, dtype, {"TOP_K": 10, "HAS_SHARED": True, "BLOCK": 512}, **row)
    assert summed.asm["ptx"].count("mul.rn.f32") + summed.asm["ptx"].count("mul.f32") >= 11
    compiled(experts.silu_times_kernel, capability, dtype, {"BLOCK": 512}, **row)
    sizes = {"STREAMS": 4, "SMALLEST": ngram.SMALLEST, "BLOCK": 4096}
    compiled(ngram.gate_kernel, capability, dtype, sizes, num_warps=8, enable_fp_fusion=False)
    sizes = {"STREAMS": 4, "TAPS": 4, "BLOCK": 512}
    compiled(ngram.conv_kernel, capability, dtype, sizes, **row)
    compiled(ngram.state_kernel, capability, dtype, sizes, **row)


@pytest.mark.slow
@cards
def test_pairs_are_brought_together_on_every_card(capability: int) -> None:
    for bm, has_owners, by_place, block in ((16, True, True, 128), (128, False, False, 4096)):
        fixed = {"BM": bm, "TOP_K": 10, "HAS_OWNERS": has_owners, "BY_PLACE": by_place, "LINES": 32, "BLOCK": block}
        compiled(experts.group_kernel, capability, torch.float32, fixed, num_warps=max(1, block // 512))


@pytest.mark.slow
def test_sizes_of_one_compile() -> None:
    """A launch hands a size of one over as a constant."""
    ones = dict.fromkeys(("E", "C", "ff", "dilation", "stride", *(f"{name}_stride" for name in STRIDES)), 1)
    tile = {"DIRECT": False, "PRECISION": "ieee", "BM": 16, "BN": 32, "BK": 16, "EVEN": False, "TOP_K": 1}
    sizes = {"SMALLEST": 0.1, "RENORMALISES": True, "TOP_K": 1, "RANKS": 1, "HAS_SHARED": True, "HAS_OWNERS": True}
    sizes |= {"BM": 16, "BY_PLACE": True, "LINES": 32, "STREAMS": 1, "TAPS": 1}
    for kernel, given in (
        (experts.gate_up_kernel, tile),
        (experts.down_kernel, tile),
        (experts.route_kernel, sizes | {"BLOCK": 1}),
        (experts.group_kernel, sizes | {"BLOCK": 128}),
        (experts.sum_kernel, sizes | {"BLOCK": 1}),
        (experts.silu_times_kernel, sizes | {"BLOCK": 1}),
        (ngram.gate_kernel, sizes | {"BLOCK": 1}),
        (ngram.conv_kernel, sizes | {"BLOCK": 1}),
        (ngram.state_kernel, sizes | {"BLOCK": 1}),
    ):
        fixed = {name: value for name, value in (given | ones).items() if name in kernel.arg_names}
        compiled(kernel, 90, torch.float16, fixed, num_warps=1)
