"""State as a table of slots, and its verbs: allocate, clear, save, restore, free.

A family declares its state as a :class:`StateSpec`; nobody outside the family knows what is in it. Recurrent state
cannot be rewound: it may be continued only by tokens that extend exactly what it has seen.

Parts that grow with the length lie in *pages* of a pool that all slots share: a page holds the rows of so many tokens
of every growing part, and ``pages`` tells which pages a slot has. A full page changes no more until its slot goes back
or begins anew; until then, states that are saved of the slot share one copy of it (:mod:`kittiwake.engine.saved_pages`).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kittiwake.device import available_memory, device_memory_for
from kittiwake.engine.saved_pages import PagedParts, SavedPage
from kittiwake.errors import PagesError, StateError, UsageError

if TYPE_CHECKING:
    import torch

    from kittiwake.engine.device_steps import DrawableModel
    from kittiwake.families.contract import Model

NO_PAGE = -1
"""Stands in a slot's list of pages where it has none."""
MOST_TOKENS = 1 << 20
"""Longest sequence that pages are kept for unless a budget asks for more."""
SCRATCH_SLOT = 0
"""The slot that belongs to nobody: spare rows of a graph bucket write there, no request ever gets it."""


class PartKind(Enum):
    """How a part of a state depends on the length of what it has seen."""

    FIXED = "fixed"
    """One array of constant size: a recurrent state, a token shift."""
    OPEN_ROWS = "open_rows"
    """Raw rows since the last block border, at most ``shape[0]``; the count is ``position % shape[0]``."""
    GROWING = "growing"
    """One row every so many tokens (keys, values), kept in pages under a budget."""


@dataclass(frozen=True)
class StatePart:
    """One array a sequence carries in some layers. ``shape`` is per layer and slot, without the length of growing parts."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    kind: PartKind = PartKind.FIXED
    fill: float = 0.0
    """What every value is at the start of a sequence; growing parts have none then."""
    layers: int | None = None
    """In how many layers it is; None is all. Which ones, the family knows."""
    every: int = 1
    """A growing part has a row for each so many tokens, from when all of them were seen."""
    on_host: bool = False
    """Whether it lies in host memory on every device, because the host itself reads it before a forward."""

    @property
    def nbytes(self) -> int:
        """Bytes a layer and slot (for a growing part: a row and layer)."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class StateSpec:
    """What one sequence carries: parts times layers, and its absolute position (tokens seen so far)."""

    layers: int
    parts: tuple[StatePart, ...]
    page_tokens: int = 256
    """Tokens whose rows of growing parts lie in one page; changes no bit."""

    def __post_init__(self) -> None:
        for part in self.growing:
            if self.page_tokens < 1 or self.page_tokens % part.every:
                raise StateError(
                    f"pages of {self.page_tokens} tokens do not hold whole rows of part {part.name!r}, which has one "
                    f"every {part.every} tokens"
                )

    @property
    def growing(self) -> tuple[StatePart, ...]:
        """The parts that grow with the length."""
        return tuple(part for part in self.parts if part.kind is PartKind.GROWING)

    def part_layers(self, part: StatePart) -> int:
        """In how many layers a part is."""
        return self.layers if part.layers is None else part.layers

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, growing parts left out."""
        return sum(self.part_layers(part) * part.nbytes for part in self.parts if part.kind is not PartKind.GROWING)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page; 0 where nothing grows."""
        return sum(self.part_layers(part) * (self.page_tokens // part.every) * part.nbytes for part in self.growing)

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of so many tokens needs."""
        return -(-tokens // self.page_tokens) if self.growing else 0

    def bytes_for(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens takes in a table."""
        return self.slot_bytes + self.pages_for(tokens) * self.page_bytes

    def saved_kinds(self, position: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype by part name of a state that has seen ``position`` tokens, as :class:`SavedState` holds it."""
        return {part.name: (self._saved_shape(part, position), part.dtype) for part in self.parts}

    def _saved_shape(self, part: StatePart, position: int) -> tuple[int, ...]:
        if part.kind is PartKind.GROWING:
            return (self.part_layers(part), position // part.every, *part.shape)
        return (self.part_layers(part), *part.shape)

    def in_pages(self, saved: SavedState) -> SavedState:
        """A state of this spec that has whole arrays, copied so that later states can share its full pages."""
        whole, full = saved.parts, saved.position // self.page_tokens
        if not self.growing or not full or saved.pages:
            return saved
        per_page = {part.name: self.page_tokens // part.every for part in self.growing}
        pages = tuple(
            SavedPage({name: whole[name][:, index * n : (index + 1) * n].copy() for name, n in per_page.items()})
            for index in range(full)
        )
        own = {
            name: (array[:, full * per_page[name] :] if name in per_page else array).copy()
            for name, array in whole.items()
        }
        return SavedState(saved.position, PagedParts(own, pages, self.page_tokens))


@dataclass(frozen=True)
class SavedState:
    """A copy of one slot: position and arrays by part name, [L, *shape], of growing parts [L, rows, *shape]. Immutable by
    agreement. The rows of full pages may be shared with other states; ``parts`` joins them at every look-up."""

    position: int
    parts: Mapping[str, np.ndarray]

    @property
    def paged(self) -> PagedParts:
        """The parts as what may be shared and what is the state's own."""
        return self.parts if isinstance(self.parts, PagedParts) else PagedParts(self.parts)

    @property
    def pages(self) -> tuple[SavedPage, ...]:
        """The full pages that other states may share; none where the arrays are whole."""
        return self.paged.pages

    @property
    def own_nbytes(self) -> int:
        """Bytes outside ``pages``."""
        return self.paged.own_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, pages that other states share among them."""
        return self.own_nbytes + sum(page.nbytes for page in self.pages)

    def kinds(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype by part name."""
        return {name: self.paged.kind(name) for name in self.parts}

    @cached_property
    def digest(self) -> str:
        """sha-256 (hex) over the names and values of the parts: what a sequence that began from it is told by."""
        digest = hashlib.sha256()
        for name, (shape, dtype) in sorted(self.kinds().items()):
            digest.update(f"{name} {dtype} {shape}\n".encode())
            for piece in self.paged.pieces(name):
                digest.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


class StateTable:
    """``slots`` usable places and the scratch slot, in host memory, with ``pages`` pages for what grows.

    ``part(name)`` is array [L, S, *shape] where S = slots + 1; the family's forward reads and writes it in place. Of a
    growing part it is [L, pages, page_tokens // every, *shape]: what token t of a slot adds lies in page
    ``pages[slot, t // page_tokens]``, row ``t % page_tokens // every``. ``positions`` is int64 [S]: tokens each slot has
    seen.
    """

    def __init__(self, spec: StateSpec, slots: int, pages: int | None = None) -> None:
        """``pages`` left out: as many as fit half of the memory that is free."""
        if slots < 1:
            raise StateError(f"a state table needs at least one slot, asked for {slots}")
        if pages is None:
            pages = growing_budget(spec, slots, -1) // max(1, spec.page_bytes)
        if spec.growing and pages < 1:
            raise StateError(
                f"a state table needs at least one page of {spec.page_bytes:,} bytes, asked for {pages}",
                "give more memory to what grows",
            )
        self.spec = spec
        self.slots = slots
        self.positions = np.zeros(slots + 1, dtype=np.int64)
        self.total_pages = pages if spec.growing else 0
        self._arrays = {part.name: self._make(part, self._shape(part)) for part in spec.parts}
        for part in spec.parts:
            if part.fill and part.kind is not PartKind.GROWING:  # zeros take no memory before they are written to
                self._arrays[part.name][...] = part.fill
        self._free = list(range(slots, SCRATCH_SLOT, -1))
        longest = min(self.total_pages, spec.pages_for(MOST_TOKENS))
        self.pages = np.full((slots + 1, longest), NO_PAGE, dtype=np.int32)
        """int32 [S, P]: the pages of each slot in order, then NO_PAGE."""
        self._held = [0] * (slots + 1)
        self._free_pages: list[int] = []  # used before: they have memory behind them, so they go first
        self._fresh_page = 0
        self._saved_pages: list[list[weakref.ref[SavedPage]]] = [[] for _ in range(slots + 1)]
        """Saved pages that have the very rows of each slot's first pages, as long as a saved state holds them."""

    def _shape(self, part: StatePart) -> tuple[int, ...]:
        layers = self.spec.part_layers(part)
        if part.kind is PartKind.GROWING:
            return (layers, self.total_pages, self.spec.page_tokens // part.every, *part.shape)
        return (layers, self.slots + 1, *part.shape)

    def _make(self, part: StatePart, shape: tuple[int, ...]) -> Any:
        """An array of zeros where the part lives."""
        return np.zeros(shape, dtype=part.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table, pages that nobody has used yet among them."""
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def free_slots(self) -> int:
        """Slots that allocate() can still give."""
        return len(self._free)

    @property
    def most_tokens(self) -> int:
        """The longest sequence that this table could hold if it held no other; MOST_TOKENS where nothing grows."""
        return min(self.pages.shape[1] * self.spec.page_tokens, MOST_TOKENS) if self.spec.growing else MOST_TOKENS

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._free_pages) + self.total_pages - self._fresh_page

    def part(self, name: str) -> Any:
        """The array of one part; writes go to the table."""
        return self._arrays[name]

    def allocate(self, tokens: int = 0) -> int:
        """Take a cleared slot, with pages for so many tokens. Raises StateError, with nothing taken, where there is no
        slot or there are too few pages."""
        if not self._free:
            raise StateError(f"all {self.slots} state slots are taken", "free one or open the engine with more slots")
        self._check_pages(self.spec.pages_for(tokens), tokens)
        slot = self._free.pop()
        self.clear(slot)
        self._take_pages(slot, self.spec.pages_for(tokens))
        return slot

    def can_hold(self, tokens: int) -> bool:
        """Whether :meth:`allocate` would give a slot for so many tokens."""
        return bool(self._free) and self.spec.pages_for(tokens) <= self.free_pages

    def reserve(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Have pages for ``counts[b]`` tokens more in ``slots[b]``, each int64 [B]; to be called before rows are run.

        Raises StateError, with nothing changed, where there are too few pages.
        """
        if not self.spec.growing:
            return
        ends = [int(self.positions[slot]) + int(count) for slot, count in zip(slots, counts, strict=True)]
        missing = [self.spec.pages_for(end) - self._held[slot] for slot, end in zip(slots, ends, strict=True)]
        self._check_pages(sum(more for more in missing if more > 0), max(ends, default=0))
        for slot, more in zip(slots, missing, strict=True):
            self._take_pages(int(slot), more)

    def _check_pages(self, wanted: int, tokens: int) -> None:
        """Raise PagesError where so many pages more, for a sequence of so many tokens, are not to be had."""
        if self.spec.growing and tokens > self.most_tokens:
            raise PagesError(
                f"a sequence of {tokens} tokens is longer than the {self.most_tokens} that this table holds",
                "shorten it, or give more memory to what grows",
            )
        if wanted > self.free_pages:
            raise PagesError(
                f"a sequence of {tokens} tokens needs {wanted} pages more of {self.spec.page_tokens} tokens, and "
                f"{self.free_pages} of {self.total_pages} are free",
                "shorten it, let others end first, or give more memory to what grows",
            )

    def _take_pages(self, slot: int, count: int) -> None:
        """Give a slot so many pages more, which there are."""
        held = self._held[slot]
        for index in range(held, held + count):
            if not self._free_pages:
                self._free_pages.append(self._fresh_page)
                self._fresh_page += 1
            self.pages[slot, index] = self._free_pages.pop()
        self._held[slot] += max(0, count)

    def _give_pages(self, slot: int) -> None:
        held = self._held[slot]
        self._free_pages.extend(self.pages[slot, :held].tolist()[::-1])
        self.pages[slot, :held] = NO_PAGE
        self._held[slot] = 0

    def _keep_saved_pages(self, slot: int, position: int) -> None:
        """Forget the saved pages of a slot that goes back to ``position``: rows from there on will be others."""
        del self._saved_pages[slot][position // self.spec.page_tokens :]

    def free(self, slot: int) -> None:
        """Give a slot and its pages back. Raises StateError for a slot that is not taken."""
        self._check(slot)
        self._give_pages(slot)
        self._free.append(slot)

    def clear(self, slot: int) -> None:
        """Bring a slot back to the start of a sequence: what each part begins with, position 0. It keeps its pages."""
        for part in self.spec.parts:
            if part.kind is not PartKind.GROWING:
                self._arrays[part.name][:, slot] = part.fill
        self.positions[slot] = 0
        self._keep_saved_pages(slot, 0)

    def save(self, slot: int, *, whole: bool = False) -> SavedState:
        """What the slot holds now: a copy of its open page, of what does not grow, and of full pages that no saved state
        holds yet. ``whole`` copies every row from the table, for those who prove what is in it."""
        self._check(slot)
        position = int(self.positions[slot])
        pages = () if whole or not self.spec.growing else self._save_pages(slot, position)
        own = {part.name: self._copy(part, slot, position, len(pages)) for part in self.spec.parts}
        return SavedState(position, PagedParts(own, pages, self.spec.page_tokens) if pages else own)

    def _save_pages(self, slot: int, position: int) -> tuple[SavedPage, ...]:
        """The full pages of a slot, those copied that no saved state holds."""
        self._keep_saved_pages(slot, position)
        full, known = position // self.spec.page_tokens, [saved() for saved in self._saved_pages[slot]]
        known += [None] * (full - len(known))
        pages = tuple(page or self._copy_page(slot, index) for index, page in enumerate(known))
        self._saved_pages[slot] = [weakref.ref(page) for page in pages]
        return pages

    def _copy_page(self, slot: int, index: int) -> SavedPage:
        end = (index + 1) * self.spec.page_tokens
        return SavedPage({part.name: self._copy(part, slot, end, index) for part in self.spec.growing})

    def _copy(self, part: StatePart, slot: int, position: int, first: int = 0) -> np.ndarray:
        """A part of a slot as a saved state holds it, of a growing one the rows from the slot's page ``first`` on."""
        array = self._arrays[part.name]
        if part.kind is not PartKind.GROWING:
            copied: np.ndarray = array[:, slot].copy()
            return copied
        saved = self._room_for_rows(part, position, first)
        for page, rows in self._page_rows(part, slot, position, first):
            saved[:, rows] = array[:, page, : rows.stop - rows.start]
        return saved

    def _room_for_rows(self, part: StatePart, position: int, first: int) -> np.ndarray:
        """Room for the rows of a growing part that has seen ``position`` tokens, from page ``first`` on."""
        rows = position // part.every - first * (self.spec.page_tokens // part.every)
        return np.empty((self.spec.part_layers(part), rows, *part.shape), dtype=part.dtype)

    def _page_rows(self, part: StatePart, slot: int, position: int, first: int = 0) -> Iterator[tuple[int, slice]]:
        """(page, rows that lie in it, counted from page ``first`` on) of a growing part that has seen ``position``
        tokens."""
        per_page = self.spec.page_tokens // part.every
        total = position // part.every - first * per_page
        for index, begin in enumerate(range(0, total, per_page), first):
            yield int(self.pages[slot, index]), slice(begin, min(begin + per_page, total))

    def restore(self, slot: int, saved: SavedState) -> None:
        """Write a saved state into a slot. Raises StateError, with nothing changed, when its parts are not this table's
        or there are too few pages."""
        self._check(slot)
        self.check_saved(saved)
        more = self.spec.pages_for(saved.position) - self._held[slot]
        self._check_pages(more, saved.position)
        self._take_pages(slot, more)
        self._keep_saved_pages(slot, 0)
        paged, page_tokens = saved.paged, self.spec.page_tokens
        if paged.page_tokens != page_tokens:
            paged = PagedParts(saved.parts)
        for index, page in enumerate(paged.pages):
            for part in self.spec.growing:
                self._write(part, slot, page.rows[part.name], (index + 1) * page_tokens, index)
        for part in self.spec.parts:
            self._write(part, slot, paged.own[part.name], saved.position, len(paged.pages))
        self.positions[slot] = saved.position
        self._saved_pages[slot] = [weakref.ref(page) for page in paged.pages]

    def _write(self, part: StatePart, slot: int, values: np.ndarray, position: int, first: int = 0) -> None:
        """Write a part, as :meth:`_copy` gives it, into a slot that has the pages."""
        array = self._arrays[part.name]
        if part.kind is not PartKind.GROWING:
            array[:, slot] = values
            return
        for page, rows in self._page_rows(part, slot, position, first):
            array[:, page, : rows.stop - rows.start] = values[:, rows]

    def snapshot(self, slot: int) -> SavedState:
        """What :meth:`rewind` needs to bring this slot back here: the parts that do not grow.

        Rows of those that do stay where they are, whatever comes after them, so a snapshot costs the same at any length.
        """
        self._check(slot)
        position = int(self.positions[slot])
        parts = (part for part in self.spec.parts if part.kind is not PartKind.GROWING)
        return SavedState(position, {part.name: self._copy(part, slot, position) for part in parts})

    def rewind(self, slot: int, snapshot: SavedState) -> None:
        """Bring a slot back to a snapshot that was taken of it since it was cleared or restored last.

        Raises StateError for one that the slot has not come to yet.
        """
        self._check(slot)
        if snapshot.position > self.positions[slot]:
            raise StateError(f"slot {slot} is at {self.positions[slot]}, its snapshot at {snapshot.position}")
        self._keep_saved_pages(slot, snapshot.position)
        for part in self.spec.parts:
            if part.kind is not PartKind.GROWING:
                self._write(part, slot, snapshot.parts[part.name], snapshot.position)
        self.positions[slot] = snapshot.position

    def check_saved(self, saved: SavedState) -> None:
        """Raise StateError when the parts of a saved state are not this table's."""
        kinds, found = self.spec.saved_kinds(saved.position), saved.kinds()
        if found.keys() != kinds.keys():
            raise StateError(f"saved state has parts {sorted(found)}, this model has {sorted(kinds)}")
        for name, (shape, dtype) in kinds.items():
            if found[name] != (shape, dtype):
                has = f"{found[name][1]} {found[name][0]}"
                raise StateError(f"saved state part {name!r} is {has}, this model has {dtype} {shape}")

    def _check(self, slot: int) -> None:
        if not SCRATCH_SLOT < slot <= self.slots or slot in self._free:
            raise StateError(f"slot {slot} is not a taken slot of this table (1 to {self.slots})")


def growing_budget(spec: StateSpec, slots: int, wanted_bytes: int, free_bytes: int | None = None) -> int:
    """Bytes for the pages of a table: as wanted, or for -1 half of the memory that is free now (``free_bytes`` of a card),
    but no more than ``slots`` sequences of MOST_TOKENS take, and at least one page; 0 where nothing grows."""
    if not spec.growing or wanted_bytes >= 0:
        return wanted_bytes if spec.growing else 0
    most = slots * spec.pages_for(MOST_TOKENS) * spec.page_bytes
    free = available_memory() if free_bytes is None else free_bytes
    return max(spec.page_bytes, min(free // 2, most))


def _free_on_card(place: torch.device) -> int:
    """Bytes of the card that nobody uses, those among them that torch keeps from tables of before."""
    import torch

    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(place)[0])


def new_states(model: Model, slots: int, growing_bytes: int = -1) -> StateTable:
    """A state table for a model, where the model lives. ``growing_bytes`` is the budget of what grows with the length, -1
    half of the memory that is free.

    Raises DeviceError where a card has no room for it, UsageError for a budget that is too small, or for one where
    nothing grows.
    """
    spec = model.state_spec
    if growing_bytes >= 0 and not spec.growing:
        raise UsageError(
            f"the state of this model does not grow, so growing_bytes cannot be {growing_bytes}", "leave it out"
        )
    if 0 <= growing_bytes < spec.page_bytes:
        raise UsageError(
            f"growing_bytes is {growing_bytes:,}, and {spec.page_tokens} tokens of one sequence take {spec.page_bytes:,}",
            "give at least that, or -1 for half of the memory that is free",
        )
    if model.device == "cpu":
        budget = growing_budget(spec, slots, growing_bytes)
        try:
            return StateTable(spec, slots, budget // max(1, spec.page_bytes))
        except MemoryError:
            raise PagesError(
                f"the system refuses {budget:,} bytes for what grows and {slots} slots of {spec.slot_bytes:,}",
                "give growing_bytes less, or take fewer slots",
            ) from None
    from kittiwake.engine.cuda_states import CudaStateTable

    place = cast("DrawableModel", model).place
    each, free = spec.slot_bytes, _free_on_card(place) if spec.growing else 0
    budget = growing_budget(spec, slots, growing_bytes, free)
    what = f"{slots} slots of {each:,} bytes each" + (f" and {budget:,} bytes of pages" if budget else "")
    with device_memory_for(f"{what} beside the model", "take fewer slots"):
        return CudaStateTable(spec, slots, place, budget // max(1, spec.page_bytes))
