"""The CUDA path's kernels without a card: they compile for four kinds of card, and the Triton ones run interpreted.

What one kind of card compiles and another does not is few instructions: what varies otherwise is compiled for one kind.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kittiwake.errors import DeviceError

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from kittiwake.ops import nvrtc
from kittiwake.ops.head_kernels import TILINGS, head_defines, head_source, low_defines
from kittiwake.ops.matmul import cuda as products
from kittiwake.ops.matmul.cuda import Narrow
from kittiwake.ops.wkv7 import cuda as scans
from tests.ops.without_card import (
    DTYPES,
    HEADS,
    MOST_SHARED,
    TILINGS_BY_CARD,
    built,
    cards,
    needs_nvrtc,
    run_interpreted,
)

INTERPRETED = Path(__file__).with_name("interpreted_kernels.py")


@pytest.mark.slow
def test_the_kernels_agree_with_the_references_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


# Triton, ahead of time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        *((90, dtype) for dtype in DTYPES),
        (80, torch.float32),
        (80, torch.bfloat16),
        (100, torch.float16),
        (120, torch.bfloat16),
    ],
    ids=str,
)
def test_products_compile(capability: int, dtype: torch.dtype) -> None:
    from kittiwake.layers.cuda_linear import default_tile
    from kittiwake.ops.matmul.triton import rows_kernel

    types = dict.fromkeys("xwy", DTYPES[dtype])
    types |= {"tiles": "*i64", "activations": "*i32"} | dict.fromkeys(("M", "x_stride", "x_group", "y_stride"), "i32")
    for rows, depth, is_grouped, early in (
        (1, 2048, True, 0), (32, 40, True, 0), (1000, 768, False, 0), (8, 2048, False, 1), (32, 320, False, 2),
    ):  # fmt: skip
        tile = default_tile(depth, dtype, rows, is_grouped)
        fixed = {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "EVEN": depth % tile.bk == 0, "ALIGN": 16, "PADDED": 16}
        overlap = {"launch_pdl": True} if capability >= 90 else {}
        fixed |= {"PRECISION": "ieee", "OVERLAP": bool(overlap), "EARLY": early if overlap else 0}
        kernel = built(rows_kernel, capability, types, fixed, num_warps=tile.warps, num_stages=tile.stages, **overlap)
        assert len(kernel.asm["cubin"]) > 0
        assert kernel.metadata.shared <= MOST_SHARED


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "width"), [(90, 96), (90, 768), (90, 4096), (80, 4096), (100, 768), (120, 96)])
def test_row_kernels_compile_and_contract_nothing(capability: int, width: int) -> None:
    """A multiply-add here and a product with a sum there would round a row's norm in two ways."""
    from kittiwake.ops.shift_mix import triton as rows

    types = dict.fromkeys(
        ("x", "x_out", "norm", "mixes", "shift", "kept", "last", "weight", "bias", "first", "second"), "*fp32"
    )
    types |= dict.fromkeys(("y", "gate", "mixed", "table", "out"), "*fp16")
    types |= {"drawn": "*i64"} | dict.fromkeys(("eps", "scale"), "fp32")
    types |= dict.fromkeys(("ids", "owners", "slots", "starts", "rows"), "*i32")
    types |= dict.fromkeys(("C", "mixed_stride", "gate_stride", "kept_stride", "L", "B", "S"), "i32")
    overlap = capability >= 90
    options = rows._options(1 if width == 768 else 8, width, overlap)  # the next kernel may begin early, or not
    fixed = {name: options.pop(name) for name in ("BLOCK", "OVERLAP", "EARLY")}
    shifts = [{"HAS_Y": has_y, "HAS_GATE": has_gate, "KEEPS": keeps, "MIXES": mixes, "SPLIT": split}
              for has_y, has_gate, keeps, mixes, split in (
                  (False, False, False, 6, True), (True, False, False, 6, False), (True, True, True, 1, True))]  # fmt: skip
    for kernel, more in (
        (rows.embed_kernel, {}),
        *((rows.shift_kernel, given) for given in shifts),
        *((rows.norm_kernel, {"HAS_GATE": has_gate}) for has_gate in (False, True)),
        (rows.commit_kernel, {}),
    ):
        code = built(kernel, capability, types, fixed | more, **options).asm
        assert len(code["cubin"]) > 0
        assert "fma.rn" not in code["ptx"]


# CUDA C++, by NVRTC


def narrow_layouts() -> list[tuple[int, Narrow]]:
    """Every layout that the tuning tries, for every row count it is compiled for."""
    from kittiwake.layers.cuda_probe import _FEW, _NARROW

    found = {(most, Narrow(*layout)) for most, layouts in _NARROW.items() for layout in layouts}
    found |= {(most, config) for most, configs in _FEW.items() for config in configs}
    return sorted({(config.size_for(rows), config) for rows, config in found}, key=str)


@pytest.mark.slow
@needs_nvrtc
@cards
def test_narrow_products_compile(capability: int) -> None:
    arch = f"sm_{capability}"
    layouts = (
        (1, Narrow(), False),
        (8, Narrow(32, 8, 256, 4), True),
        (16, Narrow(32, 16, 128, 3), False),
        (64, Narrow(64, 16, 128, 2), True),
    )
    for dtype in (torch.float16, torch.bfloat16):
        for rows, config, is_wide_out in layouts if capability == 90 else layouts[1:2]:
            given = products.defines(dtype, config, rows, is_wide_out=is_wide_out)
            assert nvrtc.compile_source(products.source(), given, arch)
    given = products.defines(torch.float32, Narrow(), 8, is_wide_out=False)  # the activations alone
    assert nvrtc.compile_source(products.source(), given, arch)


@pytest.mark.slow
@pytest.mark.usefixtures("optimised_little")
@needs_nvrtc
def test_every_layout_that_is_tried_compiles_and_fits_a_card() -> None:
    for rows, config in narrow_layouts():
        given = products.defines(torch.float16, config, rows, is_wide_out=False)
        assert nvrtc.compile_source(products.source(), given, "sm_90"), config
        assert config.shared_bytes(rows) <= 227 * 1024, config


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(("head_size", "dtype"), HEADS, ids=str)
def test_the_scan_compiles_for_hostile_heads(head_size: int, dtype: torch.dtype) -> None:
    lows = low_defines((64, 96, 136 if head_size == 32 else 512, 40))  # weights held in registers, and in shared memory
    given = (*head_defines(head_size, dtype, TILINGS[0][1]), *lows)
    code = nvrtc.compile_source(head_source("wkv7"), given, "sm_90")
    for name in (b"decode", b"prepare", b"scan", b"finish"):
        assert name in code
    has_low = head_size % 32 == 0 and dtype != torch.float32
    assert (b"decode_low" in code) == has_low


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(
    "ranks", [(96, 96, 256, 64), (96, 96, 256, 0), (64, 64, 128, 32)]
)  # of the 1.5B and 0.1B shapes
def test_weights_of_low_rank_products_wait_in_registers(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """And not in memory of a thread, where a compiler puts what it cannot count through: a step took half as long again."""
    import triton

    given = (*head_defines(64, torch.float16, TILINGS[0][1]), *low_defines(ranks))
    (tmp_path / "scan.cubin").write_bytes(nvrtc.compile_source(head_source("wkv7"), given, "sm_90"))
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(tmp_path / "scan.cubin")]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Function decode_low:\s+REG:(\d+) STACK:(\d+) .* LOCAL:(\d+)", told.stdout + told.stderr)
    assert found is not None and found.group(2, 3) == ("0", "0")
    assert int(found.group(1)) > sum(ranks) / 16 * 4  # two registers a tile of 8 outputs, of which a warp has two


@pytest.mark.slow
@pytest.mark.usefixtures("optimised_little")
@needs_nvrtc
@pytest.mark.parametrize(("capability", "place"), TILINGS_BY_CARD)
def test_every_tiling_of_the_scan_compiles(capability: int, place: int) -> None:
    given = head_defines(64, torch.float16, TILINGS[place][1])
    assert nvrtc.compile_source(head_source("wkv7"), given, f"sm_{capability}")


@needs_nvrtc
def test_a_source_that_does_not_compile_is_an_error_in_the_compilers_words() -> None:
    with pytest.raises(DeviceError, match="NVRTC cannot compile a kernel for sm_90") as raised:
        nvrtc.compile_source('extern "C" __global__ void f() { nonsense; }', (), "sm_90")
    assert "nonsense" in (raised.value.hint or "")


@needs_nvrtc
def test_contraction_is_off_and_fused_where_the_source_says_so() -> None:
    """Fused kernels must round as their parts do."""
    source = 'extern "C" __global__ void f(float* x) { x[0] = %s; }'
    plain = nvrtc.compile_source(source % "x[1] * x[2] + x[3]", (), "sm_90")
    fused = nvrtc.compile_source(source % "fmaf(x[1], x[2], x[3])", (), "sm_90")
    assert plain != fused


@needs_nvrtc
def test_compiled_code_is_kept_by_source_defines_and_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITTIWAKE_CACHE", str(tmp_path))
    calls = []
    compile_source = nvrtc.compile_source

    def counted(source: str, defines: Any, arch: str) -> bytes:
        calls.append((source, defines, arch))
        return compile_source(source, defines, arch)

    monkeypatch.setattr(nvrtc, "compile_source", counted)
    source = 'extern "C" __global__ void f(float* x) { x[0] = X; }'
    first = nvrtc._compiled(source, ("X=1.f",), "sm_80")
    assert nvrtc._compiled(source, ("X=1.f",), "sm_80") == first
    assert len(calls) == 1
    assert nvrtc._compiled(source, ("X=2.f",), "sm_80") != first
    nvrtc._compiled(source, ("X=1.f",), "sm_90")
    assert len(calls) == 3
    assert len(list((tmp_path / "cuda").iterdir())) == 3
    monkeypatch.setenv("KITTIWAKE_CACHE", "/proc/nowhere")  # cannot be written: compiled each time, no error
    assert nvrtc._compiled(source, ("X=1.f",), "sm_80") == first


# Sizes


def test_heads_are_padded_to_whole_warps() -> None:
    assert [nvrtc.padded_head(size) for size in (1, 31, 32, 33, 64, 65)] == [32, 32, 32, 64, 64, 96]


def bare_scan(most_low_bytes: int = scans.MOST_LOW_BYTES) -> scans.Wkv7:
    """What chooses between kernels, without the kernels: those are loaded into a card."""
    made = object.__new__(scans.Wkv7)
    made.head_size, made.dtype, made._most_low_bytes = 64, torch.float16, most_low_bytes
    return made


def test_decoding_makes_low_rank_products_itself_as_large_as_the_card_allows() -> None:
    ranks, small_card = (64, 64, 128, 32), bare_scan(99 * 1024 - 32 * 4 * 64)
    assert bare_scan().can_take_low(ranks, 1) and small_card.can_take_low(ranks, 1)
    assert bare_scan().can_take_low((128, 128, 480, 96), 1) and not small_card.can_take_low((128, 128, 480, 96), 1)
    assert not bare_scan().can_take_low((1024, 1024, 1024, 1024), 1)  # more than fits on any chip


def test_products_are_compiled_with_what_they_are_told() -> None:
    assert products.defines(torch.float16, Narrow(32, 8, 128, 3), 16, is_wide_out=True) == (
        "DT=1", "BN=32", "BK=128", "STAGES=3", "WN=8", "ROWS=16", "OUT32=1", "BEGIN_NEXT=1",
    )  # fmt: skip
