"""The kernels of RWKV-4, 5 and 6 without a card: they compile for four kinds of card, and the Triton ones run interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from kittiwake.layers.cuda_probe import _PLAIN
from kittiwake.ops import nvrtc
from kittiwake.ops.matmul import float32
from kittiwake.ops.wkv4 import cuda as wkv4
from kittiwake.ops.wkv6 import cuda as wkv6
from kittiwake.ops.wkv6.cuda import Kind
from tests.ops.test_cuda_kernels import CARDS, DTYPES, ROOT, built

INTERPRETED = Path(__file__).with_name("interpreted_mixes.py")
KINDS = (Kind(True, True), Kind(False, True), Kind(False, False))
"""RWKV-6, RWKV-5.1 and 5.2, RWKV-5.0."""
cards = pytest.mark.parametrize("capability", CARDS)
needs_nvrtc = pytest.mark.skipif(
    not nvrtc.is_available(), reason="cuda-bindings with NVRTC is not installed (the extra 'cuda')"
)


@pytest.mark.slow
def test_the_mixes_agree_with_the_references_in_the_interpreter() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    options = ["-q", "-W", "ignore::RuntimeWarning", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(INTERPRETED), *options],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@cards
def test_wkv4_compiles(capability: int, dtype: torch.dtype) -> None:
    code = nvrtc.compile_source(wkv4.source(), wkv4.defines(dtype), f"sm_{capability}")
    assert b"decode" in code and b"scan" in code


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [1, 7, 10, 32, 64])
def test_wkv6_compiles_for_hostile_heads(head_size: int, dtype: torch.dtype) -> None:
    for kind in KINDS:
        given = wkv6.defines(head_size, dtype, kind, wkv6.TILINGS[0][1])
        code = nvrtc.compile_source(wkv6.source(), given, "sm_90")
        assert all(name in code for name in (b"decode", b"prepare", b"scan", b"finish"))
        has_low = kind.is_by_token and head_size % 32 == 0 and dtype != torch.float32
        assert (b"decode_low" in code) == has_low


@pytest.mark.slow
@needs_nvrtc
@cards
def test_every_tiling_of_wkv6_compiles_and_fits_a_card(capability: int) -> None:
    for _, tiling in wkv6.TILINGS:
        for kind in KINDS[:2]:
            given = wkv6.defines(64, torch.float16, kind, tiling)
            assert nvrtc.compile_source(wkv6.source(), given, f"sm_{capability}")
            assert tiling.ring_values(64, kind) * 4 <= 99 * 1024
        assert tiling.columns_per_block % tiling.columns_per_thread == 0
        # every lane of a warp takes part in the exchanges
        assert 8 * tiling.columns_per_block // tiling.columns_per_thread % 32 == 0


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_every_float32_layout_compiles(capability: int) -> None:
    for layout in {float32.Plain(*sizes) for layouts in _PLAIN.values() for sizes in layouts}:
        code = nvrtc.compile_source(float32.source(), float32.defines(layout), f"sm_{capability}")
        assert b"product_float32" in code, layout


def bare(head_size: int, dtype: torch.dtype, kind: Kind = KINDS[0]) -> wkv6.Wkv6:
    """What chooses between kernels, without the kernels: those are loaded into a card."""
    made = object.__new__(wkv6.Wkv6)
    made.head_size, made.padded, made.kind = head_size, wkv6.padded_head(head_size), kind
    made._tilings, made._dtype = wkv6.TILINGS, dtype
    return made


def test_decoding_makes_the_low_rank_product_itself_where_it_can() -> None:
    assert bare(64, torch.float16).can_take_low(64, 1)
    assert bare(32, torch.bfloat16).can_take_low(128, wkv6.LOW_ROWS)
    assert not bare(64, torch.float16).can_take_low(64, wkv6.LOW_ROWS + 1)
    assert not bare(64, torch.float32).can_take_low(64, 1)  # there is no such product in float32
    assert not bare(48, torch.float16).can_take_low(64, 1)
    assert not bare(64, torch.float16).can_take_low(12, 1)  # not whole groups of 16 bytes
    assert not bare(64, torch.float16).can_take_low(1024, 1)  # more than fits on chip
    assert not bare(64, torch.float16, KINDS[1]).can_take_low(64, 1)  # there is none


def test_constant_decays_are_not_staged_with_every_token() -> None:
    tiling = wkv6.Tiling(4, 32, 8, 3)
    assert [tiling.ring_values(64, kind) for kind in KINDS] == [3 * 8 * 4 * 64, 3 * 8 * 3 * 64, 3 * 8 * 3 * 64]
    assert bare(10, torch.float32).made_values(6) == 6 * 4 * 32
    assert wkv6.defines(40, torch.bfloat16, KINDS[1], tiling) == (
        "D=40", "DP=64", "DT=2", "BY_TOKEN=0", "GATED=1", "R=4", "ROWS=32", "STEPS=8", "STAGES=3",
    )  # fmt: skip


@pytest.mark.parametrize(("states", "place"), [(1, 0), (16, 0), (17, 1), (49, 2), (97, 3), (1 << 31, 3)])
def test_the_tiling_of_a_scan_follows_the_number_of_states(states: int, place: int) -> None:
    assert bare(64, torch.float16).tiling(states) == wkv6.TILINGS[place][1]
