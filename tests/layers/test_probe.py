"""The load-time probe: what it proves, what it does with a library that disagrees, and what it remembers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kittiwake.layers import probe
from kittiwake.layers.linear import WIDE_ROWS, LinearGroup, Pick, Product
from kittiwake.layers.probe import PROBE_ROWS, pick_products, probe_shape
from kittiwake.ops.matmul import reference
from tests.layers.groups import expected_rows, make_group, make_rows, outputs
from tests.ops.bits import same_bits

SHAPE = (200, 24)
Multiply = Callable[[np.ndarray, np.ndarray], np.ndarray]


def library(monkeypatch: pytest.MonkeyPatch, multiply: Multiply) -> None:
    """Put another product in the place of torch's."""

    def mm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(torch.from_numpy(multiply(x.numpy(), weight.numpy())))

    monkeypatch.setattr(torch, "mm", mm)


def in_blocks(k_block: int) -> Multiply:
    """A library that sums in these blocks, at every row count."""
    return lambda x, weight: reference.product(x, weight, k_block)


# What is proved


@pytest.mark.parametrize("k_block", [192, 96, 128, 100, 67, 50, 200])
def test_the_block_of_the_library_is_found(monkeypatch: pytest.MonkeyPatch, k_block: int) -> None:
    library(monkeypatch, in_blocks(k_block))
    pick = probe_shape(SHAPE, 2)
    assert pick.k_block == k_block and pick.wide_from > 0


def accurate(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Rounded once at the end: closer to the truth than any order of a sum, and of other bits."""
    return (x.astype(np.float64) @ weight.astype(np.float64)).astype(np.float32)


def other_at(rows: int) -> Multiply:
    """A library that takes another kernel at one row count."""
    return lambda x, weight: reference.product(x, weight, 192 if len(x) != rows else 96)


def one_bit(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """A library that is off by one bit in the last number of a batch of 100."""
    y = reference.product(x, weight, 192)
    if len(x) == 100:
        y[-1, -1] = np.nextafter(y[-1, -1], np.float32(0))
    return y


@pytest.mark.parametrize(
    "multiply", [accurate, other_at(4), other_at(52), other_at(512), one_bit], ids="accurate 4 52 512 one-bit".split()
)
def test_a_library_that_disagrees_serves_no_row(monkeypatch: pytest.MonkeyPatch, multiply: Multiply) -> None:
    library(monkeypatch, multiply)
    picks = {SHAPE: probe_shape(SHAPE, 2)}
    assert picks[SHAPE].wide_from == 0
    products = [Product("w", *SHAPE, 0)]
    group = make_group(products, picks)
    assert group.wide_from == 0
    for rows in (1, 52, 100, 516):
        x = make_rows(products, rows)
        for run in (group, group.run_wide):
            found = outputs(group, rows)
            run(x, rows, found)
            assert same_bits(found[:rows], expected_rows(products, picks, x[:rows]))


def test_row_counts_that_are_probed_include_odd_ones_and_both_sides_of_the_largest_block() -> None:
    assert {rows % 4 for rows in PROBE_ROWS} >= {0, 1, 3}
    assert min(PROBE_ROWS) <= 4 and WIDE_ROWS in PROBE_ROWS and max(PROBE_ROWS) > WIDE_ROWS


def test_wide_batches_are_given_to_torch_from_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, in_blocks(192))
    seconds = {"narrow": lambda rows: rows, "wide": lambda rows: 20 + rows / 2}
    monkeypatch.setattr(probe, "_best_seconds", lambda run: run())
    monkeypatch.setattr(probe, "_same_bits", lambda *arguments: True)
    monkeypatch.setattr(LinearGroup, "run_narrow", lambda group, x, rows, y: seconds["narrow"](rows))
    monkeypatch.setattr(LinearGroup, "run_wide", lambda group, x, rows, y: seconds["wide"](rows))
    assert probe_shape(SHAPE, 2).wide_from == 64  # even at 40
    seconds["wide"] = lambda rows: rows / 2
    assert probe_shape(SHAPE, 2).wide_from == 8
    seconds["wide"] = lambda rows: 2 * rows
    assert probe_shape(SHAPE, 2).wide_from == 512  # beyond what is timed torch is taken anyway


@pytest.mark.parametrize("depth", [1, 2, 7, 64, 191, 192, 193, 768, 3000])
def test_blocks_to_try_are_distinct_and_within_the_sum(depth: int) -> None:
    blocks = probe._candidate_blocks(depth)
    assert (len(set(blocks)) == len(blocks) and min(blocks) >= 1 and max(blocks) == depth) or depth > 1024
    assert all(block <= depth for block in blocks)
    assert depth in blocks


def test_a_very_wide_product_is_probed_on_some_of_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[tuple[int, int]] = []
    group = probe._group

    def record(weight: torch.Tensor, k_block: int, threads: int) -> LinearGroup:
        probed.append((weight.shape[0], weight.shape[1]))
        return group(weight, k_block, threads)

    monkeypatch.setattr(probe, "_group", record)
    probe_shape((3, 65_536), 1)
    assert {columns for columns, _ in probed} == {16_384}


# What is remembered


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("KITTIWAKE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "probe"


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, int], int]]:
    """What was probed, in order; each shape is given a pick of its own."""
    asked: list[tuple[tuple[int, int], int]] = []

    def fake(shape: tuple[int, int], threads: int) -> Pick:
        asked.append((shape, threads))
        return Pick(shape[0], 10 * threads)

    monkeypatch.setattr(probe, "probe_shape", fake)
    return asked


def test_a_shape_is_probed_once_and_remembered(cache: Path, probed: list[Any]) -> None:
    expected = {(7, 5): Pick(7, 20), (3, 4): Pick(3, 20)}
    assert pick_products([(7, 5), (3, 4), (7, 5)], 2) == expected
    assert probed == [((3, 4), 2), ((7, 5), 2)]
    assert pick_products([(7, 5), (3, 4)], 2) == expected
    assert len(probed) == 2
    assert pick_products([(9, 9), (3, 4)], 2) == {(9, 9): Pick(9, 20), (3, 4): Pick(3, 20)}
    assert probed[2:] == [((9, 9), 2)]
    assert set(pick_products([(7, 5), (3, 4), (9, 9)], 2)) == {(7, 5), (3, 4), (9, 9)} and len(probed) == 3
    assert len(list(cache.iterdir())) == 1


def test_every_number_of_threads_is_probed_by_itself(cache: Path, probed: list[Any]) -> None:
    for threads in (1, 2, 1):
        assert pick_products([(3, 4)], threads) == {(3, 4): Pick(3, 10 * threads)}
    assert probed == [((3, 4), 1), ((3, 4), 2)]
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kittiwake.layers.probe.processor_name", lambda: "another processor"),
        ("kittiwake.layers.probe.kernels_digest", lambda: "other kernels"),
        ("torch.__version__", "9.9"),
        ("numpy.__version__", "9.9"),
    ],
)
def test_another_machine_version_or_kernel_is_probed_anew(
    cache: Path, probed: list[Any], monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    pick_products([(3, 4)], 2)
    monkeypatch.setattr(name, value)
    pick_products([(3, 4)], 2)
    assert len(probed) == 2


def test_settings_that_choose_the_librarys_kernels_are_probed_anew(
    cache: Path, probed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL_CBWR=COMPATIBLE gives MKL's products other bits than the same machine has without it."""
    pick_products([(3, 4)], 2)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    pick_products([(3, 4)], 2)
    assert len(probed) == 2


GOOD = {"depth": 3, "columns": 4, "k_block": 3, "wide_from": 20}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "null",
        "5",
        "{}",
        '["a"]',
        "[[[[" * 50_000,
        json.dumps([{**GOOD, "k_block": 0}]),
        json.dumps([{**GOOD, "k_block": -192}]),
        json.dumps([{**GOOD, "k_block": 3.0}]),
        json.dumps([{**GOOD, "k_block": "3"}]),
        json.dumps([{**GOOD, "wide_from": -1}]),
        json.dumps([{**GOOD, "wide_from": None}]),
        json.dumps([{**GOOD, "wide_from": True}]),
        json.dumps([{**GOOD, "depth": [3]}]),
        json.dumps([{"depth": 3, "columns": 4}]),
        '[{"depth": 3, "columns": 4, "k_block": Infinity, "wide_from": 20}]',
        b"\xff\xfe\x00",
    ],
    ids=range(18),
)
def test_a_cache_that_makes_no_sense_is_no_cache(cache: Path, probed: list[Any], content: str | bytes) -> None:
    pick_products([(3, 4)], 2)
    (path,) = cache.iterdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert pick_products([(3, 4)], 2) == {(3, 4): Pick(3, 20)}
    assert len(probed) == 2
    assert json.loads(path.read_text()) == [GOOD]


def test_a_cache_that_cannot_be_written_or_read_costs_a_probe_and_no_more(
    probed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KITTIWAKE_CACHE", "/dev/null/nowhere")
    for _ in range(2):
        assert pick_products([(3, 4)], 2) == {(3, 4): Pick(3, 20)}
    assert len(probed) == 2


def test_a_cache_of_zeros_means_never_torch(cache: Path, probed: list[Any]) -> None:
    pick_products([(3, 4)], 2)
    (path,) = cache.iterdir()
    path.write_text(json.dumps([{**GOOD, "wide_from": 0}]))
    assert pick_products([(3, 4)], 2) == {(3, 4): Pick(3, 0)}
    assert len(probed) == 1


def test_nothing_is_left_beside_the_cache(cache: Path, probed: list[Any]) -> None:
    pick_products([(3, 4)], 2)
    pick_products([(5, 4)], 2)
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_progress_is_told_shape_by_shape(cache: Path, probed: list[Any]) -> None:
    told: list[tuple[str, int, int]] = []
    pick_products([(3, 4), (5, 4)], 2, lambda *step: told.append(step))
    assert told == [("probing products", done, 2) for done in range(3)]


def test_no_shapes_need_no_probe(cache: Path, probed: list[Any]) -> None:
    assert pick_products([], 2) == {} and not cache.exists()
