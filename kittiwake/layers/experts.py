"""The routed experts of a layer: their weights, and the way from the router's logits to the weighed sum."""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from kittiwake.errors import ModelError
from kittiwake.layers.linear import STORED, Workspace, huge_empty
from kittiwake.ops.experts.cpu import mix_experts, route, tile_columns

ROWS_AT_ONCE = 512
"""Rows whose pairs are kept at a time: beyond that, the buffers of a long prompt outgrow what reading weights saves."""
PARTS = ("gate_up", "down")
"""What a tensor may hold, after the prefix; the rows of the gate stand before those of up."""


class ExpertWeights:
    """What E experts, k for each row, are loaded into; the class of a device says where it lies."""

    _gate_up: torch.Tensor
    _down: torch.Tensor

    def __init__(self, prefix: str, experts: int, top_k: int) -> None:
        """Raises ModelError when a row would want more experts than there are."""
        if not 1 <= top_k <= experts:
            raise ModelError(f"{top_k} experts a row were asked for, expected 1 to {experts}, the number there is")
        self._prefix, self._experts, self._top_k = prefix, experts, top_k

    def _views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both weights as [E, outputs, inputs], in the order of PARTS; the outputs in one axis or in two."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return self._gate_up.nbytes + self._down.nbytes

    @property
    def active_nbytes(self) -> int:
        """Bytes that one row reads."""
        return self.nbytes * self._top_k // self._experts

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the weights of all experts, [E, outputs, inputs] as stored, to their place, rounded, an expert at a time.

        ``name`` is the prefix and one of PARTS. Raises ModelError for another name or shape.
        """
        part = name.removeprefix(self._prefix)
        if not name.startswith(self._prefix) or part not in PARTS:
            raise ModelError(f"{name} is not a weight of these experts, expected {self._prefix} and one of {PARTS}")
        into = self._views()[PARTS.index(part)]
        expected = (self._experts, prod(into.shape[1:-1]), into.shape[-1])
        if tuple(tensor.shape) != expected:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
        for kept, stored in zip(into, tensor, strict=True):
            kept.copy_(stored.view(kept.shape))


class ExpertGroup(ExpertWeights):
    """E experts of C channels and ff hidden ones, k for each row, in float32 or bfloat16; see :mod:`kittiwake.ops.experts`."""

    def __init__(
        self, prefix: str, experts: int, width: int, ff: int, top_k: int, is_renormalised: bool, dtype: str
    ) -> None:
        """Raises ModelError when a row would want more experts than there are."""
        super().__init__(prefix, experts, top_k)
        self._width, self._ff, self._is_renormalised = width, ff, is_renormalised
        self._gate_up = _tiles(experts, width, ff, dtype, copies=2)
        self._down = _tiles(experts, ff, width, dtype)
        self._stored_gate_up, self._stored_down = _as_stored(self._gate_up), _as_stored(self._down)

    def _views(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gate_up.transpose(2, 3), self._down.transpose(2, 3)

    def __call__(
        self, x: np.ndarray, rows: int, logits: np.ndarray, logits_column: int, workspace: Workspace, y: np.ndarray
    ) -> np.ndarray:
        """x float32 [≥ N, ≥ C] and the router's logits [≥ N, ≥ logits_column + E] → y [≥ N, ≥ C] (written and returned)."""
        for first in range(0, rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, rows - first)
            piece = slice(first, first + count)
            chosen = np.empty((count, self._top_k), np.int64)
            shares = np.empty((count, self._top_k), np.float32)
            route(logits[piece], logits_column, count, self._experts, self._is_renormalised, chosen, shares)
            h = workspace.get("experts_hidden", count * self._top_k, self._ff)
            d = workspace.get("experts_out", count * self._top_k, self._width)
            mix_experts(
                x[piece], count, chosen, shares, self._stored_gate_up, self._stored_down, h, d, y[piece]
            )  # fmt: skip
        return y


def _tiles(experts: int, depth: int, columns: int, dtype: str, copies: int = 1) -> torch.Tensor:
    """Uninitialised weights [E, copies * tiles, K, n] of ``copies`` products [K, columns] an expert."""
    tile = tile_columns(columns)
    shape = (experts, copies * columns // tile, depth, tile)
    return huge_empty(prod(shape), STORED[dtype]).view(shape)


def _as_stored(weights: torch.Tensor) -> np.ndarray:
    """The same memory as the kernels read it: float32, or the bits of bfloat16."""
    return (weights.view(torch.uint16) if weights.dtype == torch.bfloat16 else weights).numpy()
