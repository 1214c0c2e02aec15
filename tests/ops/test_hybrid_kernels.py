"""Hyper-connections, short convolutions and the gated delta rule without a card: compiled for four kinds, and interpreted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from kittiwake.ops.gated_delta import triton as delta
from kittiwake.ops.hyper_mix import triton as mix
from kittiwake.ops.short_conv import triton as conv
from kittiwake.ops.triton_launch import piece_options, row_options
from tests.ops.without_card import DTYPES, MOST_SHARED, built, cards, cards_and_dtypes, run_interpreted

INTERPRETED = Path(__file__).with_name("interpreted_hybrid.py")


@pytest.mark.slow
def test_the_hybrids_kernels_agree_with_the_references_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


def compiled(kernel: Any, capability: int, dtype: torch.dtype, fixed: dict[str, Any], **options: Any) -> Any:
    """A kernel with what its module's names of arguments mean."""
    types = dict.fromkeys(
        ("y", "inject", "normed", "embedding", "low", "gate", "mixed", "qkv", "a", "b", "z", "out"), DTYPES[dtype]
    )
    types |= dict.fromkeys(("weight", "state", "made", "rates", "bias", "norm"), "*fp32")
    types |= dict.fromkeys(("token_ids", "owners", "starts", "slots", "want"), "*i32") | {"drawn": "*i64"}
    types |= dict.fromkeys(("eps", "key_eps", "scale"), "fp32")
    types |= {"x": DTYPES[dtype] if kernel in (conv.rows_kernel, conv.keep_kernel, conv.sequences_kernel) else "*fp32"}
    types |= {name: "i32" for name in kernel.arg_names if name in "NCR" or name.endswith("stride")}
    is_overlapped = capability >= 90
    options |= {"launch_pdl": True} if is_overlapped else {}
    made = built(kernel, capability, types, fixed | {"OVERLAP": is_overlapped}, **options)
    assert len(made.asm["cubin"]) > 0
    assert made.metadata.shared <= MOST_SHARED
    return made


def contracts_nothing(made: Any) -> bool:
    """Whether no product was fused with a sum."""
    return "fma.rn" not in made.asm["ptx"]


def trees(made: Any) -> list[str]:
    """How the values of every sum over channels lie on the threads, which is what orders it."""
    code = made.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", code, re.MULTILINE))
    return [layouts[name] for name in re.findall(r"\(tensor<\d+xf32, (#\w+)>\) -> f32", code)]


@pytest.mark.slow
@cards_and_dtypes
def test_a_stream_is_normed_by_one_tree_whatever_was_added_and_whichever_rows_are_wanted(
    capability: int, dtype: torch.dtype
) -> None:
    launched = {"num_warps": 8, "enable_fp_fusion": False}
    sums = [
        trees(compiled(kernel, capability, dtype, {"BLOCK": 4096} | fixed, **launched))
        for kernel, fixed in (
            (mix.combine_kernel, {"STREAMS": 4, "ADDS": True, "NORMS": True}),
            (mix.combine_kernel, {"STREAMS": 4, "ADDS": False, "NORMS": True}),
            (mix.norm_kernel, {}),
        )
    ]
    assert len(sums[0]) == 1 and sums == [sums[0]] * 3


@pytest.mark.slow
@cards_and_dtypes
def test_hyper_connections_compile_and_contract_nothing(capability: int, dtype: torch.dtype) -> None:
    rows, parts = (
        {name: value for name, value in options.items() if name != "OVERLAP"}
        for options in (row_options(2560, False), piece_options(2560, mix.BLOCK, False))
    )
    for kernel, fixed, options in (
        (mix.open_kernel, {"STREAMS": 4}, parts),
        (mix.combine_kernel, {"STREAMS": 4, "ADDS": True, "NORMS": True}, rows),
        (mix.combine_kernel, {"STREAMS": 4, "ADDS": False, "NORMS": True}, rows),
        (mix.combine_kernel, {"STREAMS": 4, "ADDS": True, "NORMS": False}, rows),
        (mix.norm_kernel, {}, rows),
        (mix.low_kernel, {"STREAMS": 4}, parts),
        (mix.mix_kernel, {"STREAMS": 4, "GATED": True}, parts),
        (mix.mix_kernel, {"STREAMS": 3, "GATED": False}, parts),
    ):
        fixed = fixed | {"BLOCK": options["BLOCK"]}
        launched = {name: value for name, value in options.items() if name != "BLOCK"}
        assert contracts_nothing(compiled(kernel, capability, dtype, fixed, **launched))


@pytest.mark.slow
@cards_and_dtypes
def test_convolutions_compile_and_contract_nothing(capability: int, dtype: torch.dtype) -> None:
    """Rows go through one kernel in a prompt and through another in decoding: they must round alike."""
    launched = {"num_warps": 4, "enable_fp_fusion": False}
    for taps, dilation, is_silu, carried, padded in ((4, 1, True, 3, 4), (4, 3, False, 9, 16), (1, 1, True, 0, 1)):
        taken = {"TAPS": taps, "DILATION": dilation, "IS_SILU": is_silu, "BLOCK": conv.BLOCK}
        kept = {"CARRIED": carried, "PADDED": padded, "BLOCK": conv.BLOCK}
        for kernel, fixed in (
            (conv.rows_kernel, taken | {"ROWS": conv.ROWS}),
            (conv.keep_kernel, kept),
            (conv.sequences_kernel, taken | kept),
        ):
            assert contracts_nothing(compiled(kernel, capability, dtype, fixed, **launched))


RELEASED = {"K": 128, "V": 128, "KEY_HEADS": 16, "VALUE_HEADS": 48, "COPIES": delta.COPIES}


@pytest.mark.slow
@cards_and_dtypes
def test_what_stands_around_the_scan_compiles_and_contracts_nothing(capability: int, dtype: torch.dtype) -> None:
    launched = {"num_warps": 4, "enable_fp_fusion": False}
    before = {"KEYS": 128, "HEADS": 8, "GATES": 64, "BLOCK": 1024}
    after = {"BEFORE": 4096, "V": 128, "VALUE_HEADS": 48, "VALUES": 128, "HEADS": 8, "IS_SILU": False}
    assert contracts_nothing(compiled(delta.prepare_kernel, capability, dtype, RELEASED | before, **launched))
    assert contracts_nothing(compiled(delta.finish_kernel, capability, dtype, after, **launched))


def scanned(capability: int, sizes: dict[str, int]) -> Any:
    fixed = sizes | delta.tile(sizes["K"], sizes["V"]) | {"STAGES": delta.STAGES}
    return compiled(delta.scan_kernel, capability, torch.float32, fixed, num_warps=1)


@pytest.mark.slow
@cards
def test_the_loop_of_the_scan_stands_in_the_code_once(capability: int) -> None:
    """Else a row's products might be fused with its sums in two ways, one for where the compiler unrolled the loop and one
    for what it left over. Which of them are fused is the compiler's choice, the same for every row of the one loop."""
    made = scanned(capability, RELEASED)
    found = re.findall(r"\b(?:fma\.rn|mul)\.f32(x2)?\b", made.asm["ptx"])
    products = sum(2 if is_double else 1 for is_double in found)
    held, columns = 128 * delta.COLUMNS // 32, delta.COPIES  # state values, and columns, of a thread
    # what the key recalls and what the query reads; the state's decay and its update; four products of a column
    assert products == 2 * held + 2 * held + 4 * columns
    assert made.asm["ptx"].count("shfl.sync") == 2 * 3 * columns  # eight threads have keys of a column


@pytest.mark.slow
@cards
def test_the_rows_to_come_are_on_their_way_while_one_is_scanned(capability: int) -> None:
    """Queries, keys, values, gates and products, for each row before the last of those on their way, and in the loop."""
    code = scanned(capability, RELEASED).asm["ttgir"]
    assert code.count("ttg.async_copy_global_to_local") == 6 * delta.STAGES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "values", "key_heads", "value_heads"),
    [(1, 1, 1, 1), (7, 5, 2, 6), (65, 63, 3, 9), (5, 64, 3, 3), (256, 40, 1, 2), (1024, 3, 1, 1)],
)
def test_the_scan_compiles_for_hostile_heads(keys: int, values: int, key_heads: int, value_heads: int) -> None:
    sizes = {"K": keys, "V": values, "KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "COPIES": delta.COPIES}
    scanned(90, sizes)


@pytest.mark.parametrize(
    ("keys", "values", "expected"),
    [(128, 128, (128, 16)), (7, 5, (8, 8)), (65, 1, (128, 1)), (512, 512, (512, 8)), (8192, 64, (8192, 1))],
)
def test_a_tile_of_the_scan_holds_all_keys_and_follows_from_the_head_alone(
    keys: int, values: int, expected: tuple[int, int]
) -> None:
    assert tuple(delta.tile(keys, values).values()) == expected
