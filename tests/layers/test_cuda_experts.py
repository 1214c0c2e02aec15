"""Experts on CUDA as far as no launch is needed: what is loaded where, what serves how many rows, how much memory it takes."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from kittiwake.layers import cuda_experts
from kittiwake.layers.cuda_experts import PAIR_LIMITS, ROWS_AT_ONCE, CudaExpertGroup, tilings
from kittiwake.ops.experts.triton import most_tiles

CPU = torch.device("cpu")
PREFIX = "layers.0.experts."
EXPERTS, WIDTH, FF, TOP_K = 6, 20, 9, 2
GATE_UP = torch.randn((EXPERTS, 2 * FF, WIDTH), generator=torch.Generator().manual_seed(1))
DOWN = torch.randn((EXPERTS, WIDTH, FF), generator=torch.Generator().manual_seed(2))
ELEMENTS = (torch.float32, torch.float16, torch.bfloat16)


def empty_group(element: torch.dtype = torch.bfloat16) -> CudaExpertGroup:
    return CudaExpertGroup(PREFIX, EXPERTS, WIDTH, FF, TOP_K, True, element, CPU)


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_weights_are_rounded_into_rows_that_begin_at_multiples_of_16_elements(element: torch.dtype) -> None:
    group = empty_group(element)
    group.load(f"{PREFIX}gate_up", GATE_UP)
    group.load(f"{PREFIX}down", DOWN)
    assert group._gate_up.shape == (EXPERTS, 2 * FF, 32) and group._down.shape == (EXPERTS, WIDTH, 16)
    assert torch.equal(group._gate_up[:, :, :WIDTH], GATE_UP.to(element))
    assert torch.equal(group._down[:, :, :FF], DOWN.to(element))


def test_no_second_copy_of_all_experts_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert is copied at a time."""
    copied: list[tuple[int, ...]] = []
    right = torch.Tensor.copy_

    def copy(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        copied.append(tuple(other.shape))
        return right(self, other)

    group = empty_group()
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    group.load(f"{PREFIX}gate_up", GATE_UP)
    assert copied == [(2 * FF, WIDTH)] * EXPERTS


def test_bytes_of_all_experts_and_of_those_a_row_reads() -> None:
    group = empty_group()
    assert group.nbytes == EXPERTS * (2 * FF * 32 + WIDTH * 16) * 2
    assert group.active_nbytes == group.nbytes * TOP_K // EXPERTS


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("depth", [1, 17, 640, 2560])
def test_tilings_are_ones_the_kernels_can_run(depth: int, element: torch.dtype) -> None:
    found = tilings(depth, depth, element)
    assert len(found) == len(PAIR_LIMITS) and found[0].bm == cuda_experts.NARROW_BM
    for tiling in found:
        assert tiling.gate_up.bm == tiling.down.bm == tiling.bm >= cuda_experts.NARROW_BM
        for config in (tiling.gate_up, tiling.down):
            assert all(size >= 16 and size & (size - 1) == 0 for size in (config.bm, config.bn, config.bk))


def test_the_tiling_follows_the_pairs_that_an_expert_has_on_average() -> None:
    group = CudaExpertGroup(PREFIX, 512, 16, 16, 10, True, torch.bfloat16, CPU)
    heights = {rows: group.tiling(rows).bm for rows in (1, 64, 409, 410, 1228, 1229, 4096, 4915, 4916, 8192)}
    assert heights == {
        1: 16, 64: 16, 409: 16, 410: 32, 1228: 32, 1229: 64, 4096: 64, 4915: 64, 4916: 128, 8192: 128,
    }  # fmt: skip


def test_rooms_are_as_large_as_was_said_and_no_larger_for_longer_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    group = empty_group()
    for rows in (1, 5, 100):
        assert group.make_rooms(rows).nbytes == group.workspace_bytes(rows)
    monkeypatch.setattr(cuda_experts, "ROWS_AT_ONCE", 64)
    assert group.make_rooms(1000).hidden.shape == (64 * TOP_K, FF)
    assert group.workspace_bytes(1000) == group.workspace_bytes(64) > group.workspace_bytes(63)
    released = CudaExpertGroup(PREFIX, 512, 2560, 640, 10, True, torch.bfloat16, torch.device("meta"))
    monkeypatch.undo()
    assert released.workspace_bytes(1 << 20) == released.workspace_bytes(ROWS_AT_ONCE) < 1 << 28


def test_no_distribution_of_pairs_needs_more_tiles() -> None:
    for pairs, experts, bm in itertools.product(range(1, 9), range(1, 4), (1, 2, 3)):
        worst = max(
            sum(-(-count // bm) for count in counts)
            for counts in itertools.product(range(pairs + 1), repeat=experts)
            if sum(counts) == pairs
        )
        assert worst <= most_tiles(pairs, experts, bm)


def test_rooms_for_the_narrow_tiling_hold_the_tiles_of_every_other() -> None:
    for rows, bm in itertools.product((1, 7, 100, 4096), (16, 32, 64, 128)):
        assert most_tiles(rows * 10, 512, bm) <= most_tiles(ROWS_AT_ONCE * 10, 512, cuda_experts.NARROW_BM)
        assert most_tiles(rows * 10, 512, bm) <= most_tiles(rows * 10, 512, cuda_experts.NARROW_BM)


def test_the_description_is_json_values() -> None:
    document = empty_group().describe()
    assert document["shape"] == "2 of 6 experts 20x9"
    assert list(document["up_to_pairs_an_expert"]) == ["8", "24", "96", "more"]
    assert document["reason"] == "default" and document["replaced"] == []
