"""Gated additions and RWKV-6's token shift in Triton's interpreter; test_rwkv456_kernels.py runs this in its own process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kittiwake.layers.cuda_linear import Choice, CudaGroup, CudaProduct
from kittiwake.ops.dynamic_mix import cuda as fused
from kittiwake.ops.dynamic_mix import reference
from kittiwake.ops.dynamic_mix.cases import CASES as ALL_CASES
from kittiwake.ops.dynamic_mix.cases import DynamicMixCase
from kittiwake.ops.dynamic_mix.triton import close_mix
from kittiwake.ops.matmul import cuda as narrow
from kittiwake.ops.matmul.cuda import Narrow
from kittiwake.ops.shift_mix.reference import layer_norm
from kittiwake.ops.shift_mix.triton import Added, norm_rows, shift_mix
from tests.emulator import kernels
from tests.emulator.kernels import EmulatedKernel
from tests.ops.bits import same_bits
from tests.ops.interpreted_kernels import _interpretable  # noqa: F401  a fixture
from tests.ops.pieces import cut_in_two

EPS = 1e-5
CASES = tuple(case for case in ALL_CASES if case.shift.packed.rows < 100)
"""The interpreter takes a row at a time: 63 rows show what 127 do."""
Arrays = dict[str, np.ndarray]


def addend(rows: int, width: int, seed: int = 3) -> Added:
    """y in float16, and a gate in columns of wider rows."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.rand((rows, width + 5), generator=generator).half()
    return Added(torch.randn((rows, width), generator=generator).half(), wide[:, 5:], 4.0)


def opened(
    inputs: Arrays, added: Added | None, starts: np.ndarray, slots: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Arrays]:
    """x + added, kept [2, N, C], z [N, C] and the inputs with the shifts after."""
    x = torch.from_numpy(inputs["x"].copy())
    rows, width = x.shape
    x_out, z, kept = (
        torch.full_like(x, np.nan),
        torch.full((1, rows, width), np.nan),
        torch.full((2, rows, width), np.nan),
    )
    norm = torch.from_numpy(np.stack([inputs["weight"], inputs["bias"]]))
    shift, mix_x = torch.from_numpy(inputs["shift"].copy()), torch.from_numpy(inputs["mix_x"])[None]
    last = torch.full((len(slots), width), np.nan)
    meta = (np.repeat(np.arange(len(slots)), np.diff(starts)), starts, slots)
    owners, starts_there, slots_there = (torch.from_numpy(array.astype(np.int32)) for array in meta)
    shift_mix(
        x, added, x_out, norm, EPS, mix_x, shift, owners, starts_there, slots_there, z, last, overlap=False, kept=kept
    )
    shift[torch.from_numpy(slots)] = last
    return x_out, kept, z[0], inputs | {"shift": shift.numpy()}


def closed(inputs: Arrays, kept: torch.Tensor) -> np.ndarray:
    """The mixed rows [M, N, C]."""
    _, rows, width = kept.shape
    mixes = torch.from_numpy(inputs["mix"])
    mixed = torch.full((len(mixes), rows, width), np.nan)
    close_mix(kept, torch.from_numpy(inputs["low"]), mixes, mixed, overlap=False)
    return mixed.numpy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_halves_of_the_mix_agree_with_the_reference(case: DynamicMixCase) -> None:
    inputs, packed = case.make(), case.shift.packed
    rows, width = inputs["x"].shape
    added = addend(rows, width)
    x, kept, z, after = opened(inputs, added, packed.starts, packed.slots)
    assert added.gate is not None
    summed = torch.from_numpy(inputs["x"]) + added.y.float() * 4 * added.gate.float()
    assert same_bits(x.numpy(), summed.numpy()) and same_bits(
        added.to(torch.from_numpy(inputs["x"])).numpy(), x.numpy()
    )
    shift = inputs["shift"].copy()
    normed, difference, opening = reference.open_mix(
        x.numpy(), inputs["weight"], inputs["bias"], EPS, packed.starts, packed.slots, shift, inputs["mix_x"]
    )
    for found, expected in ((kept[0], normed), (kept[1], difference), (z, opening), (after["shift"], shift)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6 * np.abs(expected).max())
    mixed = reference.close_mix(normed, difference, inputs["low"], inputs["mix"]).reshape(rows, -1, width)
    found = closed(inputs, kept)
    np.testing.assert_allclose(found.transpose(1, 0, 2), mixed, rtol=0, atol=3e-6 * np.abs(mixed).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuts_change_no_bit_of_the_mix(case: DynamicMixCase) -> None:
    """The row before is added up and normed once more where it is not in the batch's state."""
    inputs, packed = case.make(), case.shift.packed
    added = addend(*inputs["x"].shape)
    x, kept, z, whole = opened(inputs, added, packed.starts, packed.slots)
    expected = closed(inputs, kept)
    for rows, starts, slots in cut_in_two(packed, 2):
        assert added.gate is not None
        part = Added(added.y[rows], added.gate[rows], added.scale)
        mine = inputs | {"x": inputs["x"][rows], "low": inputs["low"][rows]}
        x_part, kept_part, z_part, mine = opened(mine, part, starts, slots)
        inputs["shift"] = mine["shift"]
        assert same_bits(x_part.numpy(), x.numpy()[rows]) and same_bits(z_part.numpy(), z.numpy()[rows])
        assert same_bits(closed(mine, kept_part), expected[:, rows])
    assert same_bits(inputs["shift"], whole["shift"])


@pytest.mark.skipif(not kernels.IS_AVAILABLE, reason="g++ is not installed: it compiles kernels for the host")
@pytest.mark.parametrize(
    ("dtype", "width", "rank", "rows"),
    [
        (torch.float16, 40, 32, 1),
        (torch.bfloat16, 16, 8, 5),
        (torch.float16, 24, 64, 9),
        (torch.bfloat16, 48, 24, 35),
    ],
)
def test_a_mix_with_its_products_inside_has_the_bits_of_two_launches(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, rank: int, rows: int
) -> None:
    for module in (narrow, fused):
        monkeypatch.setattr(module, "CudaKernel", EmulatedKernel)
    monkeypatch.setattr(fused, "_MOST_TILES", 2)  # 35 rows are more than the blocks walk at once
    narrow._product.cache_clear()
    fused._close_low.cache_clear()
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    up = CudaGroup([CudaProduct(f"{m}", rank, width, 0, m * rank) for m in range(5)], dtype, torch.device("cpu"))
    for m in range(5):
        up.load(f"{m}", draw(width, rank))
    # what stands beside the rows, and beyond them, is nothing to reckon with
    wide = torch.full((rows + 1, 5 * rank + 16), torch.nan, dtype=dtype)
    wide[:rows, : 5 * rank] = draw(rows, 5 * rank).to(dtype).tanh()
    down, kept, mixes = wide[:rows, : 5 * rank], draw(2, rows + 3, width)[:, :rows], draw(5, width)
    apart = torch.full((5, rows, width), torch.nan)  # rounded below: the interpreter cuts bfloat16 off
    room = torch.full((5, rows + 2, width), torch.nan, dtype=dtype)
    inside = room[:, :rows]
    low = torch.full((rows, 5 * width), torch.nan, dtype=dtype)
    up.run(Choice("narrow", Narrow(16, 8, 128, 3)), down, low, overlap=False)
    close_mix(kept, low, mixes, apart, overlap=False)
    fused.close_mix_low(kept, down, up.weight, mixes, inside, overlap=True)
    assert bool(torch.isfinite(inside).all()) and bool(torch.isnan(room[:, rows:]).all())
    assert same_bits(inside.float().numpy(), apart.to(dtype).float().numpy())


def test_the_last_norm_adds_what_a_gate_lets_through() -> None:
    rows, width = 5, 33
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((rows, width)).astype(np.float32))
    norm = torch.from_numpy(rng.standard_normal((2, width)).astype(np.float32))
    added = addend(rows, width)
    out = torch.empty((3, width))
    want = torch.tensor([4, 0, 4], dtype=torch.int32)
    norm_rows(x, added, want, norm, EPS, out, overlap=False)
    expected = layer_norm(added.to(x)[want.long()].numpy(), norm[0].numpy(), norm[1].numpy(), EPS)
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=3e-6 * np.abs(expected).max())
