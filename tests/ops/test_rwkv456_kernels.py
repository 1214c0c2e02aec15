"""The kernels of RWKV-4, 5 and 6 without a card: they compile for four kinds of card, and the Triton ones run interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from kittiwake.layers.cuda_probe import _PLAIN
from kittiwake.ops import nvrtc
from kittiwake.ops.dynamic_mix import cuda as dynamic_mix
from kittiwake.ops.head_kernels import TILINGS, head_defines, head_source, low_defines
from kittiwake.ops.matmul import float32
from kittiwake.ops.wkv4 import cuda as wkv4
from kittiwake.ops.wkv6 import cuda as wkv6
from kittiwake.ops.wkv6.cuda import Kind
from tests.ops.without_card import (
    DTYPES,
    HEADS,
    TILINGS_BY_CARD,
    built,
    cards,
    needs_nvrtc,
    run_interpreted,
)

INTERPRETED = Path(__file__).with_name("interpreted_mixes.py")
KINDS = (Kind(True, True), Kind(False, True), Kind(False, False))
"""RWKV-6, RWKV-5.1 and 5.2, RWKV-5.0."""
FLOAT32_LAYOUTS = sorted({sizes for layouts in _PLAIN.values() for sizes in layouts})


@pytest.mark.slow
def test_the_mixes_agree_with_the_references_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


@pytest.mark.slow
@cards
def test_the_second_half_of_the_mix_compiles_and_contracts_nothing(capability: int) -> None:
    from kittiwake.ops.dynamic_mix.triton import BLOCK, close_kernel

    types = dict.fromkeys(("kept", "mixes"), "*fp32") | dict.fromkeys(("low", "mixed"), "*fp16")
    types |= dict.fromkeys(("C", "kept_stride", "low_stride", "mixed_stride"), "i32")
    overlap = {"launch_pdl": True} if capability >= 90 else {}
    fixed = {"MIXES": 5, "BLOCK": BLOCK, "OVERLAP": bool(overlap)}
    code = built(close_kernel, capability, types, fixed, num_warps=4, enable_fp_fusion=False, **overlap).asm
    assert len(code["cubin"]) > 0 and "fma.rn" not in code["ptx"]


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("rank", [8, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@cards
def test_the_mix_with_its_products_inside_compiles(capability: int, dtype: torch.dtype, rank: int) -> None:
    for tile in (8, 16):
        given = dynamic_mix.defines(dtype, 5, rank, tile)
        assert b"close_low" in nvrtc.compile_source(dynamic_mix.source(), given, f"sm_{capability}")


def test_the_mix_makes_its_products_itself_where_it_can() -> None:
    for dtype, width, rank, rows, can in (
        (torch.float16, 2048, 32, 1, True),
        (torch.bfloat16, 4096, 64, dynamic_mix.LOW_ROWS, True),
        (torch.float16, 2048, 32, dynamic_mix.LOW_ROWS + 1, False),
        (torch.float32, 2048, 32, 1, False),  # there is no such product in float32
        (torch.float16, 60, 32, 1, False),  # a warp's channels are 8
        (torch.float16, 64, 5, 1, False),  # inputs that are read two at a time
        (torch.float16, 2048, 128, 1, False),  # more than its registers hold
    ):
        assert dynamic_mix.can_take_low(dtype, width, rank, rows) == can


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@cards
def test_wkv4_compiles(capability: int, dtype: torch.dtype) -> None:
    code = nvrtc.compile_source(wkv4.source(), wkv4.defines(dtype), f"sm_{capability}")
    assert b"decode" in code and b"scan" in code


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(("head_size", "dtype"), HEADS, ids=str)
def test_wkv6_compiles_for_hostile_heads(head_size: int, dtype: torch.dtype) -> None:
    place = HEADS.index((head_size, dtype))
    for kind in KINDS if (head_size, dtype) == (64, torch.float16) else (KINDS[0], KINDS[1 + place % 2]):
        given = (*head_defines(head_size, dtype, TILINGS[0][1]), *kind.defines, *low_defines((64,)))
        code = nvrtc.compile_source(head_source("wkv6"), given, "sm_90")
        assert all(name in code for name in (b"decode", b"prepare", b"scan", b"finish"))
        has_low = kind.is_by_token and head_size % 32 == 0 and dtype != torch.float32
        assert (b"decode_low" in code) == has_low


@pytest.mark.slow
@pytest.mark.usefixtures("optimised_little")
@needs_nvrtc
@pytest.mark.parametrize(("capability", "place"), TILINGS_BY_CARD)
def test_every_tiling_of_wkv6_compiles(capability: int, place: int) -> None:
    for kind in KINDS[:2] if capability == 90 else KINDS[:1]:
        given = (*head_defines(64, torch.float16, TILINGS[place][1]), *kind.defines)
        assert nvrtc.compile_source(head_source("wkv6"), given, f"sm_{capability}")


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.usefixtures("optimised_little")
def test_every_float32_layout_compiles() -> None:
    for sizes in FLOAT32_LAYOUTS:
        layout = float32.Plain(*sizes)
        assert b"product_float32" in nvrtc.compile_source(float32.source(), float32.defines(layout), "sm_90"), layout


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_float32_products_compile(capability: int) -> None:
    for sizes in (FLOAT32_LAYOUTS[0], FLOAT32_LAYOUTS[-1]):
        given = float32.defines(float32.Plain(*sizes))
        assert b"product_float32" in nvrtc.compile_source(float32.source(), given, f"sm_{capability}")


def bare(kind: Kind = KINDS[0], dtype: torch.dtype = torch.float16) -> wkv6.Wkv6:
    """What chooses between kernels, without the kernels: those are loaded into a card."""
    made = object.__new__(wkv6.Wkv6)
    made.head_size, made.padded, made.kind, made.dtype, made._vectors = 10, 32, kind, dtype, kind.vectors_per_head
    return made


def test_decoding_makes_the_low_rank_product_itself_where_it_can() -> None:
    made = bare()
    made.head_size = 64
    assert made.can_take_low(64, 1) and made.can_take_low(64, wkv6.LOW_ROWS)
    assert not made.can_take_low(64, wkv6.LOW_ROWS + 1)
    assert not made.can_take_low(1024, 1)  # more than fits on chip
    constant = bare(KINDS[1])
    constant.head_size = 64
    assert not constant.can_take_low(64, 1)  # there is none


def test_constant_decays_are_not_staged_with_every_token() -> None:
    assert [bare(kind).made_values(6) for kind in KINDS] == [6 * 4 * 32, 6 * 3 * 32, 6 * 3 * 32]
    assert [kind.defines for kind in KINDS[:2]] == [("BY_TOKEN=1", "GATED=1"), ("BY_TOKEN=0", "GATED=1")]
