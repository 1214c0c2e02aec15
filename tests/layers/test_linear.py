"""The only door to products: the same bits through it at every row count, number of threads and way inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kittiwake.errors import ModelError
from kittiwake.layers.linear import (
    WIDENED,
    LinearGroup,
    Pick,
    Product,
    Workspace,
    padded,
    threads_in_force,
    tile_values,
)
from kittiwake.layers.probe import pick_products
from tests.layers.groups import (
    GROUPS,
    depths,
    expected_rows,
    make_group,
    make_rows,
    outputs,
    same_picks,
)
from tests.ops.bits import same_bits

ROWS = (*range(1, 71), 97, 128, 131, 255, 257, 511, 512, 513, 600, 1029)
every_group = pytest.mark.parametrize("products", GROUPS.values(), ids=GROUPS.keys())


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """What is picked for two threads holds at two threads."""
    with threads_in_force(2):
        yield


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's product may not be called."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("torch.mm was called")

    monkeypatch.setattr(torch, "mm", refuse)


# Bits


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@every_group
def test_narrow_and_wide_have_the_same_bits_at_every_row_count(products: tuple[Product, ...], dtype: str) -> None:
    group = make_group(products, pick_products(depths(products), 2), dtype)
    x = make_rows(products, max(ROWS))
    expected = outputs(group, max(ROWS))
    group.run_narrow(x, max(ROWS), expected)
    for rows in ROWS:
        part = x[: padded(rows)].copy()
        part[rows:] = 0
        for run in (group.run_narrow, group.run_wide, group):
            found = outputs(group, rows)
            run(part, rows, found)
            assert same_bits(found[:rows], expected[:rows]), (rows, run)
            spare = found[rows:]
            assert (np.isnan(spare) | (spare == 0)).all(), "spare rows hold zeros or are left alone"


def test_a_product_wider_than_what_is_probed_has_the_same_bits() -> None:
    products = [Product("head", 24, 40_003, 0)]
    group = make_group(products, pick_products(depths(products), 2), "bf16")
    for rows in (1, 6, 33, 130):
        x, narrow, wide = make_rows(products, rows), outputs(group, rows), outputs(group, rows)
        group.run_narrow(x, rows, narrow)
        group.run_wide(x, rows, wide)
        assert same_bits(narrow[:rows], wide[:rows]), rows


@every_group
def test_the_bits_are_those_of_the_definition(products: tuple[Product, ...]) -> None:
    picks = pick_products(depths(products), 2)
    group = make_group(products, picks)
    x = make_rows(products, 7)
    found = group(x, 7, outputs(group, 7))
    assert same_bits(found[:7], expected_rows(products, picks, x[:7]))


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5, 6, 7])
@every_group
def test_threads_change_no_bit(products: tuple[Product, ...], threads: int) -> None:
    picks = same_picks(products, 64, 0)
    x = make_rows(products, 5)
    with threads_in_force(threads):
        group = make_group(products, picks, threads=threads)
        for rows in (1, 2, 5):
            found = outputs(group, rows)
            group.run_narrow(np.ascontiguousarray(x[: padded(rows)]), rows, found)
            assert same_bits(found[:rows], expected_rows(products, picks, x[:rows]))


@pytest.mark.parametrize("threads", [1, 3, 5, 7])
@pytest.mark.parametrize("name", ["odd places", "several blocks and tiles"])
def test_narrow_and_wide_agree_at_other_numbers_of_threads(name: str, threads: int) -> None:
    products = GROUPS[name]
    group = make_group(products, pick_products(depths(products), threads), threads=threads)
    with threads_in_force(threads):
        for rows in (1, 4, 9, 30, 65, 127, 515):
            x, narrow, wide = make_rows(products, rows), outputs(group, rows), outputs(group, rows)
            group.run_narrow(x, rows, narrow)
            group.run_wide(x, rows, wide)
            assert same_bits(narrow[:rows], wide[:rows]), rows


@every_group
def test_weights_in_bfloat16_have_the_bits_of_the_same_weights_in_float32(products: tuple[Product, ...]) -> None:
    picks = pick_products(depths(products), 2)
    narrow, wide = (make_group(products, picks, dtype) for dtype in ("bf16", "fp32"))
    assert narrow.nbytes * 2 == wide.nbytes == 4 * sum(p.depth * p.columns for p in products)
    for rows in (1, 6, 300):
        x = make_rows(products, rows)
        assert same_bits(narrow(x, rows, outputs(narrow, rows))[:rows], wide(x, rows, outputs(wide, rows))[:rows])


def test_weights_are_widened_in_the_workspace_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    products = GROUPS["several blocks and tiles"]
    group = make_group(products, pick_products(depths(products), 2), "bf16")
    x = make_rows(products, 300)
    expected, found, workspace = outputs(group, 300), outputs(group, 300), Workspace()
    group.run_wide(x, 300, expected)
    most = max(tile_values(p.depth, p.columns, 2) for p in products)
    workspace.reserve(WIDENED, most)
    monkeypatch.setattr(np, "empty", None)  # nothing more is asked for
    group.run_wide(x, 300, found, workspace)
    monkeypatch.undo()
    assert same_bits(found[:300], expected[:300]) and workspace.nbytes == 4 * most


# Which way inside


def test_the_largest_product_switches_the_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    products = (Product("small", 8, 4, 0), Product("large", 16, 20, 8), Product("middle", 16, 10, 24))
    picks = {(8, 4): Pick(8, 2), (16, 20): Pick(16, 6), (16, 10): Pick(16, 50)}
    group = make_group(products, picks)
    ways: list[str] = []
    monkeypatch.setattr(group, "run_wide", lambda x, rows, y, _: ways.append(f"wide {rows}"))
    monkeypatch.setattr(group, "run_narrow", lambda x, rows, y: ways.append(f"narrow {rows}"))
    for rows in (1, 5, 6, 7, 400):
        group(make_rows(products, rows), rows, outputs(group, rows))
    assert group.wide_from == 6
    assert ways == ["narrow 1", "narrow 5", "wide 6", "wide 7", "wide 400"]


def test_a_product_that_is_not_proved_never_meets_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    products = GROUPS["odd places"]
    picks = pick_products(depths(products), 2) | {(33, 130): Pick(8, 0), (7, 1): Pick(3, 0)}
    group = make_group(products, picks)
    shapes: list[tuple[int, int]] = []
    mm = torch.mm

    def record(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        shapes.append((weight.shape[0], weight.shape[1]))
        return mm(x, weight, out=out)

    monkeypatch.setattr(torch, "mm", record)
    x, found = make_rows(products, 9), outputs(group, 9)
    group.run_wide(x, 9, found)
    assert same_bits(found[:9], expected_rows(products, picks, x[:9]))
    assert not {(33, 130), (7, 1)} & set(shapes)


@pytest.mark.usefixtures("no_torch")
def test_an_unproved_largest_product_keeps_all_from_torch() -> None:
    products = GROUPS["odd places"]
    picks = same_picks(products, 192, 4) | {(200, 64): Pick(192, 0)}
    group = make_group(products, picks)
    assert group.wide_from == 0
    x = make_rows(products, 40)
    assert same_bits(group(x, 40, outputs(group, 40))[:40], expected_rows(products, picks, x[:40]))


def test_torch_is_given_whole_fours_of_rows_and_no_more_than_512(monkeypatch: pytest.MonkeyPatch) -> None:
    products = GROUPS["one number"]
    group = make_group(products, same_picks(products, 1, 1))
    given: list[int] = []
    monkeypatch.setattr(torch, "mm", lambda x, weight, *, out: given.append(x.shape[0]))
    for rows in (1, 4, 513, 1030):
        group.run_wide(make_rows(products, rows), rows, outputs(group, rows))
    assert given == [4, 4, 512, 4, 512, 512, 8]


def test_what_was_picked_is_described() -> None:
    products = GROUPS["odd places"]
    picks = same_picks(products, 24, 16) | {(7, 1): Pick(192, 0)}
    assert make_group(products, picks).describe() == [
        {"depth": 33, "columns": 17, "k_block": 24, "wide_from": 16},
        {"depth": 33, "columns": 130, "k_block": 24, "wide_from": 16},
        {"depth": 7, "columns": 1, "k_block": 192, "wide_from": 0},
        {"depth": 200, "columns": 64, "k_block": 24, "wide_from": 16},
    ]


# How work is shared out


sizes = st.tuples(st.integers(1, 300), st.integers(1, 1500))


@settings(max_examples=80, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=5), st.integers(1, 7), st.integers(0, 31))
def test_shares_cover_every_column_exactly_once(shapes: list[tuple[int, int]], threads: int, unproved: int) -> None:
    products = [Product(str(i), depth, columns, 0) for i, (depth, columns) in enumerate(shapes)]
    picks = {shape: Pick(192, 0 if unproved >> i & 1 else 8) for i, shape in enumerate(shapes)}
    group = LinearGroup(products, picks, "bf16", threads)
    owners = np.repeat([picks[shape].wide_from for shape in shapes], [columns for _, columns in shapes])
    for shares, wanted in ((group._shares, owners >= 0), (group._unproved_shares, owners == 0)):
        covered = np.zeros(group.columns, dtype=int)
        for _, piece, first, last in shares if shares is not None else ():
            assert 0 <= first < last <= group._table[piece, 2]
            covered[group._table[piece, 4] + first : group._table[piece, 4] + last] += 1
        assert np.array_equal(covered, wanted)
        if shares is not None:
            assert (np.diff(shares[:, 0]) >= 0).all() and shares[0, 0] >= 0 and shares[-1, 0] < threads
    weights = sorted((row[3], row[3] + row[1] * row[2]) for row in group._table.tolist())
    assert [first for first, _ in weights] == [0, *(last for _, last in weights[:-1])]
    assert weights[-1][1] * 2 == group.nbytes


@pytest.mark.parametrize("threads", [2, 3, 5, 7])
def test_threads_have_about_as_much_to_do(threads: int) -> None:
    """Bytes are most of it; beginning a tile costs something too, so they need not be quite even."""
    products = [
        Product("a", 768, 768, 0),
        Product("b", 768, 96, 0),
        Product("c", 3072, 768, 0),
        Product("d", 64, 33, 0),
    ]
    group = LinearGroup(products, same_picks(products, 192, 8), "bf16", threads)
    read = np.zeros(threads)
    for thread, piece, first, last in group._shares:
        read[thread] += group._table[piece, 1] * (last - first)
    assert read.max() < 1.2 * read.mean()


# Loading


def test_weights_of_the_wrong_shape_or_name_are_refused() -> None:
    product = Product("layers.0.key", 6, 4, 0)
    group = LinearGroup([product], same_picks([product], 192, 0), "fp32", 1)
    for shape in ((6, 4), (4, 5), (4, 6, 1), (24,)):
        with pytest.raises(ModelError, match=r"layers\.0\.key has shape .* expected \(4, 6\)"):
            group.load("layers.0.key", torch.zeros(shape))
    with pytest.raises(ModelError, match=r"layers\.0\.value is not a weight of this group: \['layers\.0\.key'\]"):
        group.load("layers.0.value", torch.zeros(4, 6))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_any_stored_dtype_and_layout_is_taken(stored: torch.dtype, dtype: str) -> None:
    product = Product("w", 5, 3, 0)
    weight = torch.randn(3, 5).to(stored)
    results = []
    for tensor in (weight, weight.t().contiguous().t(), torch.stack([weight, weight], dim=2)[:, :, 1]):
        group = LinearGroup([product], same_picks([product], 192, 0), dtype, 1)
        group.load("w", tensor)
        x = np.eye(5, dtype=np.float32)
        results.append(group(np.concatenate([x, np.zeros((3, 5), np.float32)]), 5, outputs(group, 5))[:5])
    kept = weight.to(torch.bfloat16).float() if dtype == "bf16" else weight.float()
    assert all(np.array_equal(found, kept.t().numpy()) for found in results)


# Buffers and threads


def test_buffers_have_whole_fours_of_rows_and_zeros_below() -> None:
    workspace = Workspace()
    first = workspace.get("x", 5, 3)
    assert first.shape == (8, 3) and first.dtype == np.float32 and not first[5:].any()
    first[:] = 7
    second = workspace.get("x", 6, 3)
    assert (second[:6] == 7).all() and not second[6:].any()
    assert workspace.get("x", 0, 3).shape == (0, 3)


def test_buffers_grow_to_the_largest_batch_and_are_used_again() -> None:
    workspace = Workspace()
    for rows in (1, 100, 7):
        workspace.get("x", rows, 10)
    workspace.get("y", 2, 2)
    assert workspace.nbytes == (100 * 10 + 4 * 2) * 4
    assert np.shares_memory(workspace.get("x", 3, 10), workspace.get("x", 100, 10))
    assert not np.shares_memory(workspace.get("x", 3, 10), workspace.get("y", 3, 10))


def test_a_buffer_handed_out_again_is_clean_below_its_rows() -> None:
    """The same name at other sizes in between: what they left must not stand where zeros are expected."""
    workspace = Workspace()
    for rows, columns in ((5, 4), (8, 4), (5, 4), (6, 4), (5, 3), (5, 4), (13, 4), (5, 4)):
        view = workspace.get("x", rows, columns)
        assert view.shape == (padded(rows), columns) and not view[rows:].any()
        view[:rows] = np.nan


@pytest.mark.parametrize(("rows", "expected"), [(0, 0), (1, 4), (4, 4), (5, 8), (511, 512), (513, 516)])
def test_padded(rows: int, expected: int) -> None:
    assert padded(rows) == expected


def test_threads_are_in_force_inside_and_as_before_after() -> None:
    before = torch.get_num_threads(), numba.get_num_threads()
    for threads in (1, 3, before[0]):
        with threads_in_force(threads):
            assert (torch.get_num_threads(), numba.get_num_threads()) == (threads, threads)
        assert (torch.get_num_threads(), numba.get_num_threads()) == before
    with pytest.raises(ValueError, match="inside"), threads_in_force(5):
        raise ValueError("inside")
    assert (torch.get_num_threads(), numba.get_num_threads()) == before


def test_a_vector_of_any_type_is_a_view_of_the_same_room() -> None:
    workspace = Workspace()
    workspace.reserve("rows", 20)
    first = workspace.vector("rows", 10, "int64")
    first[:] = 7
    assert first.dtype == np.int64 and workspace.vector("rows", 5, "int64").tolist() == [7] * 5
    assert workspace.nbytes == 80 and workspace.vector("rows", 20, "int32").base is first.base
    assert len(workspace.vector("rows", 30, "int32")) == 30 and workspace.nbytes == 120


def test_room_that_is_refused_is_gone_and_can_be_had_later(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace()
    workspace.get("x", 4, 8)

    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    with pytest.raises(MemoryError):
        workspace.reserve("x", 1000)
    assert workspace.nbytes == 0
    monkeypatch.undo()
    assert workspace.get("x", 4, 8).shape == (4, 8) and workspace.nbytes == 128
