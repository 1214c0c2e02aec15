"""Gated additions and RWKV-6's token shift in Triton's interpreter; test_rwkv456_kernels.py runs this in its own process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kittiwake.ops.dynamic_mix import reference
from kittiwake.ops.dynamic_mix.cases import CASES as ALL_CASES
from kittiwake.ops.dynamic_mix.cases import DynamicMixCase
from kittiwake.ops.dynamic_mix.triton import close_mix
from kittiwake.ops.shift_mix.reference import layer_norm
from kittiwake.ops.shift_mix.triton import Added, norm_rows, shift_mix
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
