"""The routed experts of a layer on CUDA: their weights, and the way from the router's logits to the weighed sum.

How a product is tiled follows from how many pairs an expert has on average, which changes no bit: at load, every tiling has to
give the bits of the narrow one on this card (:func:`prove_experts`), or the narrow one serves in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
import triton

from kittiwake.errors import DeviceError
from kittiwake.layers.cuda_linear import CANNOT_RUN, padded_depth, padded_row, same_bits
from kittiwake.layers.experts import ExpertWeights
from kittiwake.ops.experts.triton import (
    Grouped,
    Tiling,
    as_they_are,
    down,
    gate_up,
    group_pairs,
    most_tiles,
    route,
    sum_pairs,
)
from kittiwake.ops.matmul.triton import Config
from kittiwake.ops.nvrtc import can_overlap
from kittiwake.progress import Progress

ROWS_AT_ONCE = 4096
"""Rows whose pairs are kept at a time: what is kept for them is the same for prompts of any length."""
DIRECT_ROWS = 4
"""Up to so many rows, few pairs share an expert: bringing them together would cost more than it saves."""
PAIR_LIMITS = (8, 24, 96, 1 << 30)
"""A tiling serves up to so many pairs an expert, on average."""
NARROW_BM = 16
_TILINGS = (
    ((16, 32, 128, 4, 4), (16, 64, 128, 4, 4)),
    ((32, 32, 128, 4, 3), (32, 64, 128, 4, 3)),
    ((64, 64, 64, 4, 3), (64, 128, 64, 4, 3)),
    ((128, 64, 64, 8, 3), (128, 128, 64, 8, 3)),
)
_FLOAT32_TILINGS = (
    ((16, 32, 32, 4, 3), (16, 32, 32, 4, 3)),
    ((32, 32, 32, 4, 3), (32, 32, 32, 4, 3)),
    ((32, 32, 32, 4, 3), (32, 32, 32, 4, 3)),
    ((32, 32, 32, 4, 3), (32, 64, 32, 4, 3)),
)
_PROOF_ROWS = 256


def tilings(width: int, ff: int, element: torch.dtype) -> tuple[Tiling, ...]:
    """One for each of PAIR_LIMITS, the narrow one first; they fit every card."""
    found = _FLOAT32_TILINGS if element == torch.float32 else _TILINGS
    return tuple(Tiling(_fitted(gate_up, width), _fitted(down, ff)) for gate_up, down in found)


def _fitted(sizes: tuple[int, int, int, int, int], depth: int) -> Config:
    bm, bn, bk, warps, stages = sizes
    return Config(bm, bn, min(bk, max(16, triton.next_power_of_2(depth))), warps, stages)


@dataclass(frozen=True)
class ExpertPicks:
    """What serves how many pairs an expert; one tiling for each of PAIR_LIMITS."""

    tilings: tuple[Tiling, ...]
    reason: str = "default"
    replaced: tuple[str, ...] = ()
    """What was to serve and gave other bits, or cannot run on this card."""


@dataclass(frozen=True)
class ExpertRooms:
    """Where up to R = min(rows, ROWS_AT_ONCE) rows are worked on; layers of the same shape share it."""

    chosen: torch.Tensor
    """int32 [R, k]."""
    shares: torch.Tensor
    """float32 [R, k]."""
    pairs: torch.Tensor
    """int32 [R k]."""
    tiles: torch.Tensor
    """int32 [tiles, 3]."""
    hidden: torch.Tensor
    """[R k, ff]."""
    made: torch.Tensor
    """[R k, C]."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(room.nbytes for room in vars(self).values())


@dataclass(frozen=True)
class _Shape:
    """What the rooms, the picks and the kernels depend on."""

    experts: int
    width: int
    ff: int
    top_k: int
    element: torch.dtype

    def __str__(self) -> str:
        return f"{self.top_k} of {self.experts} experts {self.width}x{self.ff}"

    def room_shapes(self, rows: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each of ExpertRooms."""
        rows = min(rows, ROWS_AT_ONCE)
        pairs = rows * self.top_k
        return {
            "chosen": ((rows, self.top_k), torch.int32),
            "shares": ((rows, self.top_k), torch.float32),
            "pairs": ((pairs,), torch.int32),
            "tiles": ((most_tiles(pairs, self.experts, NARROW_BM), 3), torch.int32),
            "hidden": ((pairs, self.ff), self.element),
            "made": ((pairs, self.width), self.element),
        }


class CudaExpertGroup(ExpertWeights):
    """E experts of C channels and ff hidden ones, k for each row; see :mod:`kittiwake.ops.experts`."""

    def __init__(
        self,
        prefix: str,
        experts: int,
        width: int,
        ff: int,
        top_k: int,
        is_renormalised: bool,
        element: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises ModelError when a row would want more experts than there are."""
        super().__init__(prefix, experts, top_k)
        self._is_renormalised, self._device = is_renormalised, device
        self.shape = _Shape(experts, width, ff, top_k, element)
        # rows padded to whole groups of bytes; what pads them is never read
        self._gate_up = torch.zeros((experts, 2 * ff, padded_depth(width)), dtype=element, device=device)
        self._down = torch.zeros((experts, width, padded_depth(ff)), dtype=element, device=device)
        self.picks = ExpertPicks(tilings(width, ff, element))

    def _views(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._gate_up[:, :, : self.shape.width], self._down[:, :, : self.shape.ff]

    def workspace_bytes(self, rows: int) -> int:
        """Bytes of :meth:`make_rooms`, of which a forward of so many rows needs one for all layers of this shape."""
        found = self.shape.room_shapes(rows).values()
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in found)

    def make_rooms(self, rows: int) -> ExpertRooms:
        """Rooms for calls of up to so many rows, and for longer ones when that is ROWS_AT_ONCE or more; never cleared."""
        found = self.shape.room_shapes(rows)
        return ExpertRooms(
            **{name: torch.empty(shape, dtype=dtype, device=self._device) for name, (shape, dtype) in found.items()}
        )

    def __call__(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
        rooms: ExpertRooms,
        y: torch.Tensor,
        *,
        overlap: bool,
        owners: torch.Tensor | None = None,
    ) -> None:
        """x [N, C] and the router's logits [N, E] → y [N, C] (written), with sigmoid(shared_gate) * shared added.

        shared [N, C] and shared_gate [N, 1], a logit, or neither. Rows of all of them may be parts of wider rows. Rows whose
        owner (int32 [N]) is -1 are spare: no expert is read for them, and what y holds there means nothing.
        """
        for first in range(0, x.shape[0], ROWS_AT_ONCE):
            piece = slice(first, first + ROWS_AT_ONCE)
            self._some_rows(
                x[piece],
                logits[piece],
                None if shared is None else shared[piece],
                None if shared_gate is None else shared_gate[piece],
                None if owners is None else owners[piece],
                rooms,
                y[piece],
                overlap=overlap,
            )

    def _some_rows(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
        owners: torch.Tensor | None,
        rooms: ExpertRooms,
        y: torch.Tensor,
        *,
        overlap: bool,
    ) -> None:
        rows = x.shape[0]
        chosen, shares = rooms.chosen[:rows], rooms.shares[:rows]
        route(logits, chosen, shares, self._is_renormalised, overlap=overlap)
        tiling = self.tiling(rows)
        grouped = self.grouped(chosen, owners, rooms, tiling, overlap=overlap)
        made = self.products(x, grouped, rooms, tiling, overlap=overlap)
        sum_pairs(made, shares, shared, shared_gate, y, overlap=overlap)

    def tiling(self, rows: int) -> Tiling:
        """What serves so many rows."""
        pairs = rows * self.shape.top_k
        limits = zip(PAIR_LIMITS, self.picks.tilings, strict=True)
        return next(tiling for most, tiling in limits if pairs <= most * self.shape.experts)

    def grouped(
        self,
        chosen: torch.Tensor,
        owners: torch.Tensor | None,
        rooms: ExpertRooms,
        tiling: Tiling,
        *,
        overlap: bool,
    ) -> Grouped:
        """The pairs of chosen int32 [N, k], brought together where that pays."""
        if chosen.shape[0] <= DIRECT_ROWS:
            return as_they_are(chosen)
        return group_pairs(
            chosen, owners, self.shape.experts, rooms.pairs, rooms.tiles, tiling.bm, overlap=overlap
        )  # fmt: skip

    def products(
        self, x: torch.Tensor, grouped: Grouped, rooms: ExpertRooms, tiling: Tiling, *, overlap: bool
    ) -> torch.Tensor:
        """The outputs [N k, C] of every pair."""
        pairs = grouped.chosen.numel()
        hidden, made = rooms.hidden[:pairs], rooms.made[:pairs]
        gate_up(x, self._gate_up, grouped, hidden, tiling.gate_up, overlap=overlap)
        down(hidden, self._down, grouped, made, tiling.down, overlap=overlap)
        return made

    def describe(self) -> dict[str, Any]:
        """The picks of this shape, as JSON values."""
        served = {str(most): _told(tiling) for most, tiling in zip(PAIR_LIMITS, self.picks.tilings, strict=True)}
        served["more"] = served.pop(str(PAIR_LIMITS[-1]))
        document = {"shape": str(self.shape), "up_to_pairs_an_expert": served, "reason": self.picks.reason}
        return document | {"replaced": list(self.picks.replaced)}


def _told(tiling: Tiling) -> str:
    """In a few characters."""
    return " ".join("x".join(map(str, astuple(config))) for config in (tiling.gate_up, tiling.down))


# -- proof


def prove_experts(groups: Sequence[CudaExpertGroup], progress: Progress | None = None) -> None:
    """Set the picks of every group: its tilings, with those replaced that give other bits than the narrow one.

    Groups of one shape are served alike. Raises what a launch raises when this card cannot run the narrow tiling.
    """
    by_shape: dict[_Shape, list[CudaExpertGroup]] = {}
    for group in groups:
        by_shape.setdefault(group.shape, []).append(group)
    for done, same in enumerate(by_shape.values()):
        picks = _proved(same[0])
        for group in same:
            group.picks = picks
        if progress is not None:
            progress("proving experts", done + 1, len(by_shape))


@dataclass(frozen=True)
class _Trial:
    """Random rows, and experts for them that are liked by very different numbers of rows."""

    group: CudaExpertGroup
    x: torch.Tensor
    chosen: torch.Tensor
    rooms: ExpertRooms = field(repr=False)

    def run(self, tiling: Tiling, rows: slice = slice(None), *, is_grouped: bool = True) -> torch.Tensor:
        """Hidden row and output of every pair of some rows, [pairs, ff + C] by pair, NaN where nothing was written; launched
        as a model's are, so that no kernel is compiled for the proof alone."""
        chosen, rooms, overlap = self.chosen[rows].contiguous(), self.rooms, can_overlap(self.chosen.device)
        rooms.hidden.fill_(torch.nan)
        rooms.made.fill_(torch.nan)
        experts = self.group.shape.experts
        grouped = as_they_are(chosen)
        if is_grouped:
            grouped = group_pairs(chosen, None, experts, rooms.pairs, rooms.tiles, tiling.bm, overlap=overlap)
        made = self.group.products(self.x[rows], grouped, rooms, tiling, overlap=overlap)
        hidden = rooms.hidden[: len(made)]
        if is_grouped:
            hidden = torch.empty_like(hidden).index_copy_(0, rooms.pairs[: len(made)].long(), hidden)
        return torch.cat([hidden, made], dim=1)

    def agrees(self, tiling: Tiling, expected: torch.Tensor) -> bool:
        """Whether a tiling can run, and has these bits for all rows together, and for one with few others."""
        pairs = self.group.shape.top_k
        try:
            few = slice(3, 3 + len(self.x) // 8)
            return same_bits(self.run(tiling), expected) and same_bits(
                self.run(tiling, few), expected[few.start * pairs : few.stop * pairs]
            )
        except torch.OutOfMemoryError:
            raise
        except CANNOT_RUN:
            return False


def _trial(group: CudaExpertGroup) -> _Trial:
    """An expert that every row has, one for half of the pairs that are left, and so on: tiles full and with one row alone."""
    shape, device = group.shape, group._device
    generator = torch.Generator(device).manual_seed(1)
    # rows as far apart as they are served: Triton makes another kernel for other strides
    x = torch.randn((_PROOF_ROWS, padded_row(shape.width)), generator=generator, device=device).to(shape.element)
    x = x[:, : shape.width]
    liked = -0.7 * torch.arange(shape.experts, device=device).clamp(max=40)
    noise = torch.rand((_PROOF_ROWS, shape.experts), generator=generator, device=device)
    keys = liked - torch.log(-torch.log(noise.clamp(1e-6, 1 - 1e-6)))
    chosen = keys.topk(shape.top_k, dim=1).indices.to(torch.int32)
    return _Trial(group, x, chosen, group.make_rooms(_PROOF_ROWS))


def _proved(group: CudaExpertGroup) -> ExpertPicks:
    shape = group.shape
    narrow, *wider = tilings(shape.width, shape.ff, shape.element)
    trial = _trial(group)
    expected = trial.run(narrow)
    for row in (0, 1, _PROOF_ROWS - 1):  # alone, at the first place of a tile
        alone = trial.run(narrow, slice(row, row + 1), is_grouped=False)
        if not same_bits(alone, expected[row * shape.top_k : (row + 1) * shape.top_k]):
            raise DeviceError(
                f"{shape}: this card gives a row of a product other bits beside other rows than alone",
                "please report this card; --device cpu serves the model",
            )
    served, replaced = [narrow], []
    for most, tiling in zip(PAIR_LIMITS[1:], wider, strict=True):
        agrees = trial.agrees(tiling, expected)
        served.append(tiling if agrees else narrow)
        if not agrees:
            where = f"up to {most} pairs an expert" if most < PAIR_LIMITS[-1] else "for more pairs an expert"
            replaced.append(f"{_told(tiling)} {where}")
    return ExpertPicks(tuple(served), "default; bits proved", tuple(replaced))
