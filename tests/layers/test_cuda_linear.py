"""The door to products on CUDA, as far as it can be seen without a card: tables, picks, the library's flags."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from kittiwake.layers import cuda_linear
from kittiwake.layers.cuda_linear import (
    ROW_LIMITS,
    Choice,
    CudaGroup,
    CudaProduct,
    Picks,
    default_picks,
    default_tile,
    exact_products,
)
from kittiwake.layers.cuda_probe import known_choices
from kittiwake.ops.matmul.cuda import Narrow
from kittiwake.ops.matmul.triton import TILE, Config

CPU = torch.device("cpu")


def group(*products: CudaProduct, dtype: torch.dtype = torch.float16) -> CudaGroup:
    return CudaGroup(products, dtype, CPU)


# Weights and their table


def test_weights_come_back_as_they_were_given_and_padding_is_zero() -> None:
    made = group(CudaProduct("a", 33, 17), CudaProduct("b", 7, 65, 1, 33), CudaProduct("c", 16, 1, 0))
    generator = torch.Generator().manual_seed(0)
    given = {p.name: torch.randn((p.columns, p.depth), generator=generator).half() for p in made.products}
    for name, weight in given.items():
        made.load(name, weight)
    assert all(torch.equal(made.matrix(name), weight) for name, weight in given.items())
    assert int(made.weight.count_nonzero()) == sum(int(weight.count_nonzero()) for weight in given.values())
    assert made.columns == 17 + 65 + 1 and made.depth == 33
    assert made.nbytes == 2 * (32 * 48 + 96 * 16 + 32 * 16)


def test_the_table_has_a_line_for_each_tile_of_columns() -> None:
    made = group(CudaProduct("a", 33, 17), CudaProduct("b", 7, 65, 1, 33, "tanh"))
    # input, first column of x, first element of w, depth, first column of y, columns left
    assert made.lines.tolist() == [
        [0, 0, 0, 33, 0, 17],
        [1, 33, 32 * 48, 7, 17, 65],
        [1, 33, 32 * 48 + 32 * 16, 7, 17 + 32, 33],
        [1, 33, 32 * 48 + 64 * 16, 7, 17 + 64, 1],
    ]
    assert made._codes.tolist() == [0, 1, 1, 1]


def test_a_lone_product_has_room_for_tiles_of_twice_the_columns() -> None:
    made = group(CudaProduct("a", 16, 33))
    assert made.lines[:, 5].tolist() == [33, 1] and len(made.weight) == 64 * 16
    assert group(CudaProduct("a", 16, 65)).lines[:, 5].tolist() == [65, 33, 1, 0]


def test_keys_tell_shapes_apart() -> None:
    assert group(CudaProduct("a", 16, 33)).key == "33x16"
    assert group(CudaProduct("a", 16, 32), CudaProduct("b", 8, 1)).key == "33x16/2"


# Picks


@pytest.mark.parametrize(
    ("rows", "place"), [(1, 0), (2, 1), (8, 1), (9, 2), (16, 2), (17, 3), (512, 7), (513, 8), (1 << 20, 8)]
)
def test_a_pick_serves_up_to_its_limit(rows: int, place: int) -> None:
    choices = tuple(Choice("tile", Config(16, 16, 16 * (index + 1), 1, 1)) for index in range(len(ROW_LIMITS)))
    assert Picks(choices).choice(rows) is choices[place]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("depth", "grouped"), [(1, True), (40, True), (768, False), (16384, False)])
def test_defaults_are_tiles_that_fit_any_card(dtype: torch.dtype, depth: int, grouped: bool) -> None:
    picks = default_picks(depth, dtype, grouped)
    assert len(picks.choices) == len(ROW_LIMITS)
    for choice in picks.choices:
        assert choice.kind == "tile" and isinstance(choice.layout, Config)
        assert min(choice.layout.bm, choice.layout.bn, choice.layout.bk) >= 16
        assert choice.layout.bn <= (TILE if grouped else 2 * TILE)
        staged = (choice.layout.bm + choice.layout.bn) * choice.layout.bk * choice.layout.stages * dtype.itemsize
        assert staged <= 99 * 1024


def test_what_does_not_fit_a_group_is_not_run() -> None:
    narrow, wide = Choice("narrow", Narrow(32, 8, 256, 4)), Choice("narrow", Narrow(64, 16, 128, 4))
    even, pair = group(CudaProduct("a", 64, 64)), group(CudaProduct("a", 64, 32), CudaProduct("b", 64, 32))
    assert even.can_run(narrow, torch.float16) and even.can_run(wide, torch.float16)
    assert pair.can_run(narrow, torch.float16) and not pair.can_run(wide, torch.float16)
    # copies of 16 bytes: no depth, and no first column, that is not a multiple of 8
    assert not group(CudaProduct("a", 60, 64)).can_run(narrow, torch.float16)
    assert not group(CudaProduct("a", 64, 64, 0, 4)).can_run(narrow, torch.float16)
    assert not group(CudaProduct("a", 64, 64), dtype=torch.float32).can_run(narrow, torch.float32)
    assert even.can_run(Choice("library"), torch.float16) and not even.can_run(Choice("library"), torch.float32)
    assert not pair.can_run(Choice("tile", Config(64, 64, 64, 4, 3)), torch.float16)


def test_the_choice_of_the_row_count_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = group(CudaProduct("a", 16, 64))
    choices = list(made.picks.choices)
    choices[0], choices[-1] = Choice("narrow", Narrow()), Choice("library")
    made.picks = Picks(tuple(choices), library_rows={640: frozenset({0})})
    ran: list[str] = []
    monkeypatch.setattr(cuda_linear, "narrow_product", lambda *_, **__: ran.append("narrow"))
    monkeypatch.setattr(CudaGroup, "library", lambda *_: ran.append("library"))
    monkeypatch.setattr(CudaGroup, "tiled", lambda *_, **__: ran.append("tile"))
    for rows in (1, 2, 512, 640, 641):
        made(torch.zeros(rows, 16), torch.zeros(rows, 64), overlap=False)
    assert ran == ["narrow", "tile", "tile", "library", "tile"]  # where the library is not proved it does not serve


def test_picks_are_told_shape_by_shape() -> None:
    made = group(CudaProduct("a", 16, 64))
    choices = (Choice("narrow", Narrow(16, 8, 256, 3)), *made.picks.choices[1:-1], Choice("library"))
    made.picks = Picks(choices, "measured on this card; bits proved", ("library up to 8 rows",))
    told = made.describe()
    assert told["shape"] == "64x16" and told["reason"] == "measured on this card; bits proved"
    assert told["replaced"] == ["library up to 8 rows"]
    assert told["up_to_rows"]["1"] == "narrow 16x8x256x3x64x1" and told["up_to_rows"]["more"] == "library"
    assert list(told["up_to_rows"]) == [*map(str, ROW_LIMITS[:-1]), "more"]


def test_a_pick_may_depend_on_the_op_in_front() -> None:
    product = CudaProduct("a", 16, 64)
    plain, behind = group(product), CudaGroup([product], torch.float16, torch.device("cpu"), behind="wkv6")
    assert (plain.key, behind.key, behind.shape) == ("64x16", "64x16 behind wkv6", "64x16")
    one, other = plain.picks.choices, (Choice("library"), *plain.picks.choices[1:])
    assert known_choices(plain, {"64x16": one}) == known_choices(behind, {"64x16": one}) == one
    assert known_choices(behind, {"64x16": one, "64x16 behind wkv6": other}) == other
    assert known_choices(plain, {"64x16 behind wkv6": other}) is None


def test_tiles_of_a_depth_below_them_do_not_read_past_it() -> None:
    assert [default_tile(depth, torch.float16, 1, False).bk for depth in (1, 16, 17, 64, 4096)] == [16, 16, 32, 64, 64]


# The library's flags


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for torch's process-wide settings, which builds without CUDA do not let anyone set."""
    made = SimpleNamespace(
        library="cublas",
        allow_fp16_accumulation=True,
        allow_fp16_reduced_precision_reduction=True,
        allow_fp16_reduced_precision_reduction_split_k=True,
        allow_bf16_reduced_precision_reduction=True,
        allow_bf16_reduced_precision_reduction_split_k=False,
    )

    def preferred(library: str | None = None) -> str:
        made.library = library or made.library
        return str(made.library)

    monkeypatch.setattr(torch.backends.cuda, "matmul", made)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    return made


def test_inside_nothing_splits_a_sum_and_afterwards_all_is_as_it_was(flags: SimpleNamespace) -> None:
    with exact_products():
        assert flags.library == "cublaslt"
        assert flags.allow_fp16_reduced_precision_reduction == (False, False)
        assert flags.allow_bf16_reduced_precision_reduction == (False, False)
        assert not flags.allow_fp16_accumulation
    assert flags.library == "cublas" and flags.allow_fp16_accumulation
    assert flags.allow_fp16_reduced_precision_reduction == (True, True)
    assert flags.allow_bf16_reduced_precision_reduction == (True, False)


def test_an_error_inside_leaves_no_flag_behind(flags: SimpleNamespace) -> None:
    with pytest.raises(ZeroDivisionError), exact_products():
        raise ZeroDivisionError
    assert flags.library == "cublas" and flags.allow_fp16_accumulation
    assert flags.allow_bf16_reduced_precision_reduction == (True, False)
