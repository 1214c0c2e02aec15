"""Proof and memory of picks on CUDA, with products that stand in for a card's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from triton.runtime.errors import OutOfResources, PTXASError

from kittiwake.errors import DeviceError
from kittiwake.layers import cuda_probe
from kittiwake.layers.cuda_linear import LIBRARY_ROWS, ROW_LIMITS, Choice, CudaGroup, CudaProduct, Picks, same_bits
from kittiwake.ops.matmul.cuda import Narrow
from kittiwake.ops.matmul.float32 import Plain
from kittiwake.ops.matmul.triton import Config

CPU = torch.device("cpu")
LIBRARY, NARROW = Choice("library"), Choice("narrow", Narrow())


class FakeGroup(CudaGroup):
    """Products, rounded once; ``faults`` maps a kind to what it does wrong."""

    def __init__(self, faults: dict[str, Any] | None = None, columns: int = 64) -> None:
        super().__init__([CudaProduct("a", 16, columns)], torch.float16, CPU)
        self.load("a", torch.randn((columns, 16), generator=torch.Generator().manual_seed(1)))
        self.faults = faults or {}
        self.told: list[torch.Tensor] = []
        self.ran: list[tuple[str, int]] = []

    def run(self, choice: Choice, x: torch.Tensor, out: torch.Tensor, *, overlap: bool) -> None:
        self.ran.append((choice.kind, len(out)))
        self.told.append(x)
        sums = x.double() @ self.matrix("a").double().t()
        out.copy_(sums.half().float() + 0)  # rounded so that the order of a sum does not show, and one kind of zero
        fault = self.faults.get(choice.kind)
        if fault is not None:
            fault(out)

    def library(self, x: torch.Tensor, out: torch.Tensor, places: Iterable[int] | None = None) -> None:
        self.run(LIBRARY, x, out, overlap=False)


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KITTIWAKE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA Fake 1000 (PCIe)")
    monkeypatch.setattr(cuda_probe, "exact_products", nullcontext)


def picks(*choices: Choice) -> Picks:
    """These choices over and over."""
    return Picks(tuple(choices[index % len(choices)] for index in range(len(ROW_LIMITS))), "measured")


def library_above(most: int) -> Picks:
    """The narrow kernel up to so many rows, the library for more."""
    return Picks(tuple(NARROW if limit <= most else LIBRARY for limit in ROW_LIMITS), "measured")


def one_bit(out: torch.Tensor) -> None:
    """The last bit of one output."""
    out.view(torch.int16)[-1, -1] ^= 1


def test_what_agrees_is_kept_with_its_proof() -> None:
    given = library_above(8)
    found = cuda_probe._proved(FakeGroup(), given, torch.float16, 8192)
    assert found.choices == given.choices and found.replaced == ()
    assert found.reason == "measured; bits proved"
    assert found.library_rows == dict.fromkeys(LIBRARY_ROWS, frozenset({0}))


def test_one_bit_of_one_output_is_enough_to_be_replaced() -> None:
    found = cuda_probe._proved(FakeGroup({"library": one_bit}), library_above(32), torch.float16)
    assert {choice.kind for choice in found.choices} == {"narrow", "tile"}
    assert found.replaced == (*(f"library up to {most} rows" for most in (64, 128, 256, 512)), "library for more rows")
    assert not found.library_rows


def test_rows_on_both_sides_of_every_border_are_proved() -> None:
    group = FakeGroup()
    cuda_probe._proved(group, picks(NARROW), torch.float16)
    proved = {rows for kind, rows in group.ran if kind == "narrow"}
    assert {1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 127, 129, 256, 257, 513, 1000} <= proved
    lower = 0
    for most in ROW_LIMITS:
        assert any(lower < rows <= most for rows in proved)
        lower = most


def test_the_library_is_proved_at_every_count_of_rows_that_it_serves() -> None:
    group = FakeGroup()
    found = cuda_probe._proved(group, library_above(32), torch.float16, 4096)
    proved = {rows for kind, rows in group.ran if kind == "library"}
    assert proved == set(found.library_rows) == {rows for rows in LIBRARY_ROWS if 32 < rows <= 4096}


def test_the_library_does_not_serve_a_count_at_which_it_takes_another_way() -> None:
    group = FakeGroup({"library": lambda out: one_bit(out) if len(out) in (48, 64, 4096) else None})
    group.picks = found = cuda_probe._proved(group, library_above(32), torch.float16, 8192)
    assert found.replaced == ("library up to 64 rows", "library for more rows: 1 products of 12 row counts")
    assert set(found.library_rows) == {rows for rows in LIBRARY_ROWS if rows > 64 and rows != 4096}
    for rows, kind in {
        1: "narrow",
        48: "tile",
        96: "library",
        97: "tile",
        4095: "tile",
        4096: "tile",
        8192: "library",
    }.items():
        x, out = cuda_probe._trial(group, torch.float16, rows)
        group(x, out, overlap=False)
        assert group.ran[-1] == (kind, rows)


def test_products_that_the_library_adds_in_another_way_go_to_the_kernel_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products of few columns are what it splits; the wide one beside them need not become slow."""
    group = CudaGroup([CudaProduct("wide", 32, 64), CudaProduct("gate", 32, 3)], torch.float16, CPU)
    ran: list[tuple[str, int]] = []

    def some(kind: str, x: torch.Tensor, out: torch.Tensor, place: int) -> None:
        ran.append((kind, place))
        name, columns = group.products[place].name, group.columns_of(place)
        out[:, columns] = (x[:, :32].double() @ group.matrix(name).double().t()).half() + (kind == "library" and place)

    def library(self: CudaGroup, x: torch.Tensor, out: torch.Tensor, places: Iterable[int] = (0, 1)) -> None:
        for place in places:
            some("library", x, out, place)

    def tiled(
        self: CudaGroup, x: torch.Tensor, out: torch.Tensor, *_: Any, product: int | None = None, **__: Any
    ) -> None:
        for place in (0, 1) if product is None else (product,):
            some("tile", x, out, place)

    monkeypatch.setattr(CudaGroup, "library", library)
    monkeypatch.setattr(CudaGroup, "tiled", tiled)
    monkeypatch.setattr(CudaGroup, "can_run", lambda *_: True)
    group.picks = cuda_probe._proved(group, Picks((LIBRARY,) * len(ROW_LIMITS), "measured"), torch.float16)
    assert group.picks.library_rows == {rows: frozenset({0}) for rows in LIBRARY_ROWS if rows <= 1000}
    assert group.picks.replaced[-1] == "library for more rows: 2 products of 2 row counts"
    x, out = cuda_probe._trial(group, torch.float16, 640)
    ran.clear()
    group(x, out, overlap=False)
    assert ran == [("library", 0), ("tile", 1)] and out.isfinite().all()


def test_sums_of_the_proof_show_nothing_but_how_they_were_made() -> None:
    """Of every other row; in float32 in three ways: in order, in two halves, and backwards."""
    group = CudaGroup([CudaProduct("a", 250, 40, input_column=6), CudaProduct("b", 33, 8, 1, 3)], torch.float16, CPU)
    own = group.weight
    with cuda_probe._telling_weights(group):
        given, _ = cuda_probe._trial(group, torch.float16, 12)
        cuda_probe._make_telling(group, given)
        x, w = given[0, ::2, 6:256].float(), group.matrix("a").float()
        assert ((x.double() @ w.double().t()) == 0).all() and x.abs().mean() > 1000
        terms = x[:, None, :] * w
        in_order, backwards = torch.zeros(6, 40), torch.zeros(6, 40)
        for k in range(250):
            in_order, backwards = in_order + terms[..., k], backwards + terms[..., 249 - k]
        halves = terms[..., :125].sum(-1) + terms[..., 125:].sum(-1)
        assert (in_order.half() != 0).float().mean() > 0.9
        for other in (halves, backwards):
            assert (in_order.half() != other.half()).float().mean() > 0.9
        assert given.isfinite().all() and given[0, 1::2, 6:256].abs().max() < 10
    assert group.weight is own


def test_rows_are_proved_as_far_apart_as_they_are_served() -> None:
    """What the library runs can follow from how rows are aligned."""
    strides = set()
    group = FakeGroup({"library": lambda out: strides.add(out.stride(0))}, columns=67)
    cuda_probe._proved(group, library_above(32), torch.float16)
    assert strides == {80}


def test_a_zero_of_the_other_sign_is_another_bit() -> None:
    group = FakeGroup({"library": lambda out: out[:, 3].neg_()})
    group.matrix("a")[3] = 0
    assert len(cuda_probe._proved(group, picks(LIBRARY), torch.float16).replaced) == len(ROW_LIMITS)


def test_bits_are_compared_as_bits() -> None:
    one = torch.tensor([0.0, torch.nan, 2.0])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert same_bits(one.to(dtype), one.to(dtype).clone())
        assert not same_bits(one.to(dtype), one.to(dtype) * torch.tensor([-1, 1, 1], dtype=dtype))


def test_a_proof_that_runs_out_of_memory_blames_no_kernel() -> None:
    def refuse(out: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        cuda_probe._proved(FakeGroup({"narrow": refuse}), picks(NARROW), torch.float16)


def test_an_output_left_unwritten_is_not_taken_for_one_that_agrees() -> None:
    def forget(out: torch.Tensor) -> None:
        out[0] = torch.nan

    assert cuda_probe._proved(FakeGroup({"narrow": forget}), picks(NARROW), torch.float16).replaced


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of shared memory"),
        DeviceError("a CUDA call failed"),
        OutOfResources(300_000, 232_448, "shared memory"),
        PTXASError("too much shared data"),
    ],
)
def test_what_cannot_run_on_this_card_is_replaced(error: Exception) -> None:
    def refuse(out: torch.Tensor) -> None:
        raise error

    found = cuda_probe._proved(FakeGroup({"narrow": refuse}), picks(NARROW), torch.float16)
    assert {choice.kind for choice in found.choices} == {"tile"} and len(found.replaced) == len(ROW_LIMITS)


def test_what_does_not_fit_the_group_is_not_tried() -> None:
    group = FakeGroup()
    found = cuda_probe._proved(group, picks(LIBRARY), torch.float32)  # the library cannot widen its outputs
    assert {kind for kind, _ in group.ran} == {"tile"} and found.replaced[-1] == "library for more rows"


def test_the_fastest_of_those_that_run_is_picked_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def time(groups: Any, choice: Choice, given: torch.Tensor, out: torch.Tensor) -> float:
        if choice.kind == "narrow" and len(out) == 1:
            raise DeviceError("a CUDA call failed")
        return {"library": 1.0, "narrow": 2.0, "tile": 3.0}[choice.kind]

    monkeypatch.setattr(cuda_probe, "_time_us", time)
    monkeypatch.setattr(cuda_probe, "_compile", lambda *_: None)  # ahead of the timing, on a card
    first, second, told = FakeGroup(), FakeGroup(), []
    cuda_probe.pick_products([first, second], {}, lambda *what: told.append(what))
    kinds = [choice.kind for choice in first.picks.choices]
    assert kinds == ["tile", "narrow", *["library"] * 7]
    assert first.picks == second.picks and first.picks.reason == "measured on this card; bits proved"
    assert told == [("measuring products", 0, 1), ("proving products", 1, 1)]
    monkeypatch.setattr(cuda_probe, "_time_us", None)  # another load measures nothing, and proves again
    later = FakeGroup({"library": one_bit})
    cuda_probe.pick_products([later], {})
    assert [choice.kind for choice in later.picks.choices] == ["tile", "narrow", *["tile"] * 7]
    assert later.picks.choices[0] == first.picks.choices[0]
    other = FakeGroup(columns=40)
    monkeypatch.setattr(cuda_probe, "_time_us", time)
    cuda_probe.pick_products([other], {})
    assert set(cuda_probe._found(torch.float16)) == {"64x16", "40x16"}


def test_float32_takes_kernels_that_walk_k_in_order_never_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's switches against splitting a sum are for 16 bits only."""
    monkeypatch.setattr(cuda_probe, "_time_us", lambda groups, choice, *_: {"plain": 1.0, "tile": 2.0}[choice.kind])
    monkeypatch.setattr(cuda_probe, "_compile", lambda *_: None)
    group = FakeGroup({"plain": lambda out: one_bit(out) if len(out) == 31 else None})
    group.dtype = torch.float32
    group.weight = group.weight.float()
    cuda_probe.pick_products([group], {})
    assert [choice.kind for choice in group.picks.choices] == [*["plain"] * 3, "tile", *["plain"] * 5]
    assert not group.can_run(LIBRARY, torch.float32)


@pytest.mark.parametrize("layouts", cuda_probe._PLAIN.values())
def test_every_float32_layout_fills_whole_warps_and_fits_a_card(layouts: tuple[tuple[int, ...], ...]) -> None:
    for layout in (Plain(*sizes) for sizes in layouts):
        assert layout.bm % layout.tm == layout.bn % layout.tn == 0
        assert layout.bm // layout.tm % 4 == 0 and layout.bn // layout.tn % 8 == 0
        assert 32 <= layout.threads <= 256 and layout.shared_bytes <= 99 * 1024
        pieces = layout.bk // 4
        assert layout.threads % pieces == 0 or pieces % layout.threads == 0
        assert 192 % layout.bn == 0
    assert any(32 % sizes[1] == 0 for sizes in layouts)  # what fits groups of any columns


def test_choices_survive_a_trip_through_json() -> None:
    for choice in (LIBRARY, NARROW, Choice("plain", Plain()), Choice("tile", Config(32, 16, 128, 2, 5))):
        assert cuda_probe._choice(json.loads(json.dumps(cuda_probe._document(choice)))) == choice


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        '{"picks": 3}',
        '{"picks": {"64x16": [["tile", 16, 16, 16, 1, 1]]}}',
        json.dumps({"picks": {"64x16": [["cutlass", 1]] * len(ROW_LIMITS)}}),
        json.dumps({"picks": {"64x16": [["tile", 16]] * len(ROW_LIMITS)}}),
        json.dumps({"picks": {"64x16": [["tile", "x", 1, 1, 1, 1]] * len(ROW_LIMITS)}}),
        json.dumps({"picks": {"64x16": [[]] * len(ROW_LIMITS)}}),
        json.dumps({"picks": {"64x16": None}}),
    ],
)
def test_a_file_of_picks_that_cannot_be_understood_is_as_good_as_none(text: str) -> None:
    path = cuda_probe._cache_file(torch.float16)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert cuda_probe._found(torch.float16) == {}


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITTIWAKE_CACHE", "/proc/nowhere")
    cuda_probe._keep(torch.float16, {"64x16": picks(LIBRARY).choices})
    assert cuda_probe._found(torch.float16) == {}


def test_files_are_told_apart_by_card_and_dtype() -> None:
    assert cuda_probe._slug(torch.bfloat16) == "nvidia-fake-1000-pcie-bfloat16"
    assert cuda_probe._cache_file(torch.float16) != cuda_probe._cache_file(torch.bfloat16)


def test_every_shipped_file_of_picks_is_understood() -> None:
    from importlib.resources import files

    folder = files("kittiwake.layers").joinpath("cuda_picks")
    for file in folder.iterdir() if folder.is_dir() else ():
        text = file.read_text(encoding="utf-8")
        assert len(cuda_probe._choices(text)) == len(json.loads(text)["picks"]) > 0, file.name
