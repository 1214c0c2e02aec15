"""Embedding, norms and token shift on a card against the reference, and the same bits however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kittiwake.ops.packed import LENGTHS, Packed
from kittiwake.ops.shift_mix import reference
from kittiwake.ops.shift_mix.cases import CASES, ShiftMixCase
from tests.device.ledger import LEDGER
from tests.ops.bits import same_bits
from tests.ops.pieces import cut_in_two

# Without a device these tests are skipped, but their module is imported: on machines that have no Triton too.
if torch.cuda.is_available():
    from kittiwake.layers.cuda_linear import CudaGroup, CudaProduct
    from kittiwake.layers.cuda_linear import same_bits as same_bits_there
    from kittiwake.ops.dynamic_mix.cuda import LOW_ROWS, can_take_low, close_mix_low
    from kittiwake.ops.dynamic_mix.triton import close_mix
    from kittiwake.ops.shift_mix import triton as row_kernels
    from tests.ops.cuda_pieces import EPS, check_shift, shift_mix

pytestmark = pytest.mark.device
GROUPED_BY = ("dtype",)
WIDE = tuple(ShiftMixCase(Packed(lengths), 768 + index, 6, index % 2 == 0) for index, lengths in enumerate(LENGTHS))
cases = pytest.mark.parametrize("case", [*CASES, *WIDE], ids=str)


def sent(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


@cases
def test_a_shift_agrees_with_the_reference(case: ShiftMixCase) -> None:
    check_shift(case, 3e-6, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@cases
def test_cuts_change_no_bit_of_a_shift(case: ShiftMixCase, dtype: torch.dtype) -> None:
    """Both layouts are among the launches: one program a mix for few rows, one program a row for many."""
    inputs = case.make()
    inputs["y"] = torch.from_numpy(inputs["y"]).to(dtype).float().numpy()
    expected = shift_mix(inputs, case.packed.starts, case.packed.slots, device="cuda", dtype=dtype)
    same = True
    for rows, starts, slots in cut_in_two(case.packed, 1):
        part = inputs | {"x": inputs["x"][rows], "y": inputs["y"][rows] if case.adds else inputs["y"]}
        found = shift_mix(part, starts, slots, spare=len(rows) % 40, device="cuda", dtype=dtype, overlap=True)
        same &= same_bits(found["out"], expected["out"][rows]) and same_bits(found["x"], expected["x"][rows])
        inputs["shift"] = found["shift"]
    LEDGER.case("token shift: cuts", same and same_bits(inputs["shift"], expected["shift"]))
    assert LEDGER.holds("token shift: cuts")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "rank"), [(2048, 32), (768, 8), (2560, 64), (40, 24)])
def test_a_mix_with_its_products_inside_has_the_bits_of_two_launches(width: int, rank: int, dtype: torch.dtype) -> None:
    """RWKV-6's; the products apart are the in-order kernel's."""
    place, generator = torch.device("cuda"), torch.Generator("cuda").manual_seed(rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=place)

    up = CudaGroup([CudaProduct(f"{m}", rank, width, 0, m * rank) for m in range(5)], dtype, place)
    for m in range(5):
        up.load(f"{m}", draw(width, rank))
    mixes = draw(5, width)
    for rows in (1, 2, 7, 8, 9, 16, 17, 33, LOW_ROWS, LOW_ROWS + 300):
        assert can_take_low(dtype, width, rank, min(rows, LOW_ROWS))
        kept, down = draw(2, rows, width), draw(rows, 5 * rank + 16).tanh().to(dtype)[:, : 5 * rank]
        low = torch.full((rows, 5 * width), torch.nan, dtype=dtype, device=place)
        apart, inside = torch.full((2, 5, rows, width), torch.nan, dtype=dtype, device=place)
        up(down, low, overlap=False)
        close_mix(kept, low, mixes, apart, overlap=False)
        close_mix_low(kept, down, up.weight, mixes, inside, overlap=True)
        LEDGER.case("mix: products inside = apart", same_bits_there(inside, apart))
    assert LEDGER.holds("mix: products inside = apart")


@pytest.mark.parametrize("width", [1, 65, 768, 2560])
def test_embedded_rows_are_gathered_and_normed_or_those_drawn_last(width: int) -> None:
    rng = np.random.default_rng(width)
    table = sent(rng.standard_normal((11, width)).astype(np.float32)).half()
    norm = sent(rng.standard_normal((2, width)).astype(np.float32))
    meta = [sent(np.array(values, np.int32)) for values in ([10, 0, -1, 3, -1], [0, 1, 2, 3, 4], [4, 1, 3, 2, 0])]
    drawn = torch.tensor([-7, 9, 9, 5, 9], device="cuda")  # a fault of the sampler stands below 0: no row outside
    x = torch.full((5, width), torch.nan, device="cuda")
    row_kernels.embed_rows(*meta, drawn, table, norm, EPS, x, overlap=False)
    rows = table.float().cpu().numpy()[[10, 0, 5, 3, 0]]
    expected = reference.layer_norm(rows, norm[0].cpu().numpy(), norm[1].cpu().numpy(), EPS)
    np.testing.assert_allclose(x.cpu().numpy(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("width", [1, 65, 768, 2560])
def test_wanted_rows_are_added_up_and_normed(width: int) -> None:
    case = ShiftMixCase(Packed((65,)), width, 1, True)
    inputs = case.make()
    norm = sent(np.stack([inputs["weight"], inputs["bias"]]))
    out = torch.full((4, width), torch.nan, device="cuda")
    want = sent(np.array([64, 0, 33, 33], np.int32))
    row_kernels.norm_rows(sent(inputs["x"]), sent(inputs["y"]), want, norm, EPS, out, overlap=True)
    rows = (inputs["x"] + inputs["y"])[[64, 0, 33, 33]]
    expected = reference.layer_norm(rows, inputs["weight"], inputs["bias"], EPS)
    np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=0, atol=3e-6 * np.abs(expected).max())
    assert torch.equal(out[2], out[3])
