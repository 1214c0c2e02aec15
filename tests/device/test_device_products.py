"""Products on a card: every implementation and layout gives a row the same bits, whatever stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from tests.device.ledger import LEDGER

# Without a device these tests are skipped, but their module is imported: on machines that have no Triton too.
if torch.cuda.is_available():
    from kittiwake.layers import cuda_probe
    from kittiwake.layers.cuda_linear import (
        LIBRARY_ROWS,
        ROW_LIMITS,
        Choice,
        CudaGroup,
        CudaProduct,
        Picks,
        exact_products,
    )
    from kittiwake.ops.matmul.cuda import Narrow
    from kittiwake.ops.matmul.triton import Config

pytestmark = pytest.mark.device
GROUPED_BY = ("name", "activation")
ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 33, 63, 64, 65, 127, 257, 513)
MOST = 600
HALVES = (torch.float16, torch.bfloat16)
# (depth, columns, input, first column of the input, activation) of each product of a group
GROUPS = {
    "0.1b square": ((768, 768, 0, 0, "none"),),
    "1.5b key": ((2048, 8192, 0, 0, "relu2"),),
    "1.5b value": ((8192, 2048, 0, 0, "none"),),
    "low rank": (
        (64, 768, 0, 0, "none"),
        (64, 768, 0, 64, "none"),
        (128, 768, 0, 128, "none"),
        (32, 768, 0, 256, "none"),
    ),
    "projections": ((768, 768, 0, 0, "none"), (768, 64, 1, 0, "tanh"), (768, 128, 2, 0, "sigmoid")),
    "narrow inside": ((8, 33, 0, 8, "none"), (40, 1, 1, 0, "tanh")),
    "odd": ((33, 17, 0, 0, "relu2"), (7, 65, 1, 5, "none")),
    "one": ((1, 1, 0, 0, "none"),),
}


@cache
def made_group(name: str, dtype: torch.dtype) -> CudaGroup:
    """Random weights, drawn the same every time."""
    products = [CudaProduct(f"{i}", d, c, x, at, act) for i, (d, c, x, at, act) in enumerate(GROUPS[name])]
    group = CudaGroup(products, dtype, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(3)
    for product in products:
        weight = torch.randn((product.columns, product.depth), generator=generator, device="cuda")
        group.load(product.name, weight / product.depth**0.5)
    return group


def layouts(rows: int) -> Sequence[Narrow]:
    """Layouts of the narrow kernel for so many rows: few, for each is compiled."""
    if rows == 1:
        return Narrow(16, 8, 256, 3, begin_next=3), Narrow(8, 8, 256, 6), Narrow(64, 16, 128, 4, begin_next=2)
    return (Narrow(16, 8, 256, 3), Narrow(32, 8, 128, 3)) if rows <= 8 else (Narrow(32, 8, 128, 3),)


def choices(group: CudaGroup, rows: int) -> list[Choice]:
    """What is compared at a row count."""
    found = [Choice("narrow", layout) for layout in layouts(rows)]
    found += [
        group.in_order(rows),
        Choice("tile", Config(128, 32, 64, 4, 4)),
        Choice("tile", Config(16, 16, 32, 1, 3)),
    ]
    return [choice for choice in found if group.can_run(choice, group.dtype)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_rows_have_the_same_bits_in_every_implementation(name: str, dtype: torch.dtype) -> None:
    group, law = made_group(name, dtype), f"narrow = tile = library, {str(dtype).removeprefix('torch.')}"
    with exact_products():
        given, expected = cuda_probe._trial(group, dtype, MOST)
        group.run(group.in_order(MOST), given, expected, overlap=False)
        assert torch.isfinite(expected).all()
        failed = []
        for rows in ROWS:
            for choice in choices(group, rows):
                same = cuda_probe._agrees(group, choice, given, expected, rows)
                LEDGER.case(law, same)
                failed += [] if same else [f"{choice} at {rows} rows"]
        # the library is what a proof makes of it: where it has other bits it does not serve
        group.picks = proved = cuda_probe._proved(group, Picks((Choice("library"),) * len(ROW_LIMITS)), dtype)
        for rows in (*ROWS, *(rows for rows in LIBRARY_ROWS if rows <= MOST)):
            out = torch.empty_strided((rows, group.columns), expected.stride(), dtype=dtype, device="cuda")
            group(given[..., :rows, :], out.fill_(torch.nan), overlap=True)
            same = torch.equal(out, expected[:rows])
            LEDGER.case(law, same)
            failed += [] if same else [f"picks at {rows} rows"]
    served = len(proved.library_rows)
    LEDGER.figure(f"row counts the library serves, {name}, {str(dtype).removeprefix('torch.')}", served)
    assert not failed


@pytest.mark.parametrize("name", ["0.1b square", "1.5b key", "1.5b value"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_library_serves_the_wide_batches_of_real_shapes(name: str, dtype: torch.dtype) -> None:
    """Else prompts are slow, though exact."""
    group = made_group(name, dtype)
    with exact_products():
        given, expected = cuda_probe._trial(group, dtype, MOST)
        group.run(group.in_order(MOST), given, expected, overlap=False)
        assert all(cuda_probe._agrees(group, Choice("library"), given, expected, rows) for rows in (65, 129, 257, 600))


@pytest.mark.parametrize("name", ["0.1b square", "low rank", "odd", "one"])
def test_float32_rows_keep_their_bits_and_are_as_right_as_float32_can_be(name: str) -> None:
    group = made_group(name, torch.float32)
    given, expected = cuda_probe._trial(group, torch.float32, MOST)
    group(given, expected, overlap=False)
    for rows in ROWS:
        out = torch.full_like(expected[:rows], torch.nan)
        group(given[..., :rows, :], out, overlap=True)
        LEDGER.case("narrow = tile = library, float32", torch.equal(out, expected[:rows]))
    assert LEDGER.holds("narrow = tile = library, float32")
    first = 0
    for product in group.products:
        x = given[product.input] if given.dim() == 3 else given
        x = x[:, product.input_column : product.input_column + product.depth].double()
        truth = x @ group.matrix(product.name).double().t()
        if product.activation == "relu2":
            truth = truth.relu() ** 2
        found = expected[:, first : first + product.columns].double()
        error = float((found - truth).norm() / truth.norm())
        assert LEDGER.figure("products in float32: relative error", error) < 5e-6
        first += product.columns


# Activations


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Every value of 16 bits, NaN and infinities too."""
    return torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.uint16).view(dtype)


def canonical(values: torch.Tensor) -> torch.Tensor:
    """Bits, all NaN being one."""
    return torch.where(values.isnan(), torch.full_like(values, torch.nan), values).view(torch.int16)


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu2"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_activations_agree_on_all_65536_values(dtype: torch.dtype, activation: str) -> None:
    """A product whose sum is one value: the first column of the weights is 1, all other weights and inputs are 0."""
    group = CudaGroup([CudaProduct("a", 16, 32, activation=activation)], dtype, torch.device("cuda"))
    group.matrix("a")[:, 0] = 1
    values = all_values(dtype)
    x = torch.zeros((65536, 16), dtype=dtype, device="cuda")
    x[:, 0] = values
    outs = {}
    with exact_products():
        for choice in (
            Choice("narrow", Narrow(32, 8, 128, 3)),
            group.in_order(MOST),
            Choice("library"),
        ):
            out = torch.full((65536, 32), 7, dtype=dtype, device="cuda")
            group.run(choice, x, out, overlap=False)
            assert all(torch.equal(canonical(out[:, n]), canonical(out[:, 0])) for n in (1, 7, 8, 31))
            outs[choice.kind] = canonical(out[:, 0].contiguous())
    for kind in ("tile", "library"):
        differing = int((outs[kind] != outs["narrow"]).sum())
        name = str(dtype).removeprefix("torch.")
        LEDGER.case("activations agree on every value of 16 bits", differing == 0)
        LEDGER.figure(f"values on which {activation} of {kind} and narrow differ, {name}", differing)
        assert differing == 0
    check_activation(activation, values, outs["narrow"].view(dtype))


def check_activation(activation: str, values: torch.Tensor, found: torch.Tensor) -> None:
    """Right to the last place of 16 bits; NaN stays NaN, and squares saturate in float16."""
    exact = values.double()
    truth = {"tanh": torch.tanh(exact), "sigmoid": torch.sigmoid(exact), "relu2": exact.relu() ** 2}[activation]
    largest = torch.finfo(found.dtype).max
    if found.dtype == torch.float16:
        truth = truth.clamp(max=largest)
    assert torch.equal(found.isnan(), values.isnan())
    rounded = truth.to(found.dtype)
    usual = rounded.isfinite() & found.isfinite()
    assert torch.equal(rounded.isinf(), found.isinf())
    places = [(some[usual] + 0).view(torch.int16).int() for some in (found, rounded)]  # + 0: there is one zero
    steps = (places[0] - places[1]).abs()
    is_normal = truth[usual].abs() >= torch.finfo(torch.float32).tiny  # an exponential beyond float32 leaves zero
    assert (
        int(steps[is_normal].max()) <= 1 and (found[usual][~is_normal].abs() <= torch.finfo(torch.float32).tiny).all()
    )
    if found.dtype == torch.float16:
        assert torch.isfinite(found[~values.isnan()]).all()


def test_flags_of_others_do_not_move_a_bit() -> None:
    """A caller that lets the library reduce in 16 bits, or take TF32, gets the same rows."""
    group = made_group("0.1b square", torch.float16)
    with exact_products():
        given, expected = cuda_probe._trial(group, torch.float16, 257)
        group.run(Choice("library"), given, expected, overlap=False)
    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32
    settings.allow_tf32 = True
    try:
        with exact_products():
            out = torch.full_like(expected, torch.nan)
            group.run(Choice("library"), given, out, overlap=False)
        assert settings.allow_tf32
    finally:
        settings.allow_tf32 = before
    assert torch.equal(out, expected)


def test_a_launch_with_odd_strides_reads_and_writes_only_its_own() -> None:
    """Columns of a wider buffer, as a layer's outputs lie; what is beside them stays."""
    group = made_group("low rank", torch.float16)
    generator = torch.Generator("cuda").manual_seed(1)
    wide = torch.randn((70, 1024 + 24), generator=generator, device="cuda").half()
    room = torch.full((70, group.columns + 8), torch.nan, dtype=torch.float16, device="cuda")
    outs = []
    with exact_products():
        for choice in (
            Choice("narrow", Narrow(32, 8, 128, 3)),
            Choice("tile", Config(16, 16, 32, 1, 3)),
            Choice("library"),
        ):
            room.fill_(torch.nan)
            group.run(choice, wide[:65, 8:], room[:65, : group.columns], overlap=False)
            assert torch.isnan(room[65:]).all() and torch.isnan(room[:, group.columns :]).all()
            outs.append(room[:65, : group.columns].cpu().numpy())
    assert all(np.array_equal(out.view(np.uint16), outs[0].view(np.uint16)) for out in outs[:2])
    assert np.allclose(outs[2], outs[0], atol=0.1)
