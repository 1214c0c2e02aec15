"""Calls of the CUDA path's kernels with numpy arrays, for the interpreter and for cards alike."""

from __future__ import annotations

import numpy as np
import torch

from kittiwake.ops.shift_mix import reference
from kittiwake.ops.shift_mix import triton as row_kernels
from kittiwake.ops.shift_mix.cases import ShiftMixCase
from tests.ops.bits import same_bits

EPS = 1e-5
Arrays = dict[str, np.ndarray]


def shift_mix(
    inputs: Arrays,
    starts: np.ndarray,
    slots: np.ndarray,
    *,
    spare: int = 2,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    overlap: bool = False,
) -> Arrays:
    """One shift of packed rows and spare ones, then the states written: x, out [N, M, C] and shift after it.

    ``inputs`` as :class:`kittiwake.ops.shift_mix.cases.ShiftMixCase` makes them; ``dtype`` is that of y and of the mixes.
    """
    rows, width = inputs["x"].shape
    count, sequences = len(inputs["mix"]), len(slots)
    padded = rows + spare

    def sent(array: np.ndarray, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, kind)

    def buffer(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, torch.nan, device=device, dtype=kind)

    x, y = torch.zeros((padded, width), device=device), torch.zeros((padded, width), device=device, dtype=dtype)
    x[:rows] = sent(inputs["x"])
    has_y = len(inputs["y"]) > 0
    if has_y:
        y[:rows] = sent(inputs["y"], dtype)
    x_out, last = buffer(padded, width), buffer(2, 1, sequences, width)
    mixed = buffer(count, padded, width, kind=dtype)
    owners = np.concatenate([np.repeat(np.arange(sequences), np.diff(starts)), np.full(spare, -1)])
    meta = [sent(array, torch.int32) for array in (owners, starts, slots)]
    norm = sent(np.stack([inputs["weight"], inputs["bias"]]))
    shift, other = sent(inputs["shift"])[None].clone(), sent(inputs["shift"])[None].clone()
    row_kernels.shift_mix(
        x, y if has_y else None, x_out, norm, EPS, sent(inputs["mix"]), shift[0], *meta, mixed, last[0, 0],
        overlap=overlap,
    )  # fmt: skip
    last[1] = last[0] * 2
    row_kernels.commit_shifts(last, shift, other, meta[2], overlap=overlap)
    named = meta[2].long()
    assert torch.equal(other[0, named], shift[0, named] * 2)
    out = mixed[:, :rows].permute(1, 0, 2).float().contiguous().cpu().numpy()
    return {"x": x_out[:rows].cpu().numpy(), "out": out, "shift": shift[0].cpu().numpy()}


def check_shift(case: ShiftMixCase, tolerance: float, *, device: str = "cpu") -> None:
    """A shift agrees with the reference, relative to the largest value, and touches no other state."""
    inputs, packed = case.make(), case.packed
    x = inputs["x"] + inputs["y"] if case.adds else inputs["x"]
    shift = inputs["shift"].copy()
    expected = reference.shift_mix(
        x, inputs["weight"], inputs["bias"], EPS, packed.starts, packed.slots, shift, inputs["mix"]
    )
    found = shift_mix(inputs, packed.starts, packed.slots, device=device)
    assert same_bits(found["x"], x)
    bound = tolerance * np.abs(expected).max()
    np.testing.assert_allclose(found["out"], expected, rtol=0, atol=bound)
    np.testing.assert_allclose(found["shift"], shift, rtol=0, atol=bound)
    others = np.setdiff1d(np.arange(packed.table_slots), packed.slots)
    assert same_bits(found["shift"][others], inputs["shift"][others])
