"""What a card may do with a Triton kernel and the interpreter does not show: its programs and threads run in any order.

The interpreter runs the programs of a launch one after another, and each statement of a program for all lanes before the
next. :func:`watched` notes which addresses programs read and write, and raises :class:`HazardError` where the result of a
launch may hang on that order:

- an address that one program writes is read or written by another, other than by atomic operations on both sides;
- within a program, between two of its barriers (``tl.debug_barrier``): an address is read after it was written, or written
  by another lane than read or wrote it before; a number that all threads read is read by every lane;
- an address lies outside of all tensors of the launch.

Launches with ``launch_pdl`` begin before the one in front has ended. What such a launch reads or writes before
``gdc_wait`` must not be written, or read, by any launch that may still run then (:func:`overlapping` lets kernels be
launched so in the interpreter).
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

CELL = 2
"""Bytes that are told apart; what has elements of single bytes is only read."""
NOBODY, SEVERAL = 0, -1
ANY_LANE = -1
_MACHINERY = ("/triton/runtime/", "/triton/language/", __file__)


class HazardError(AssertionError):
    """The result of a launch may hang on an order that a card does not keep."""


class _Side:
    """Who read cells last, or wrote them."""

    def __init__(self, count: int) -> None:
        self.program = np.zeros(count, np.int32)
        """Counted from 1."""
        self.span = np.zeros(count, np.int32)
        """Between which barriers of that program."""
        self.lane = np.zeros(count, np.int64)
        """Place in the tensor of addresses, and which shape that has."""


class _Cells:
    """What a launch did to the memory of one storage."""

    def __init__(self, base: int, size: int) -> None:
        count = size // CELL + 1
        self.base = base
        self.read, self.written = _Side(count), _Side(count)
        self.is_atomic, self.is_early = np.zeros(count, bool), np.zeros(count, bool)
        """Written by an atomic operation; touched before the launch in front was waited for."""


class _Launch:
    """One launch, and the program of it that is being run."""

    def __init__(self, name: str, tensors: list[torch.Tensor], is_overlapping: bool) -> None:
        self.name, self.is_overlapping = name, is_overlapping
        self.program = self.span = 0
        self.has_waited = self.ever_waited = self.begins_next = False
        self.cells: dict[int, _Cells] = {}
        self._extents = {_extent(tensor) for tensor in tensors if tensor.numel()}
        storages = (tensor.untyped_storage() for tensor in tensors if tensor.numel())
        self._storages = sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages})
        self._bases = [base for base, _ in self._storages]

    def begin_program(self) -> None:
        self.program, self.span = self.program + 1, 1
        self.has_waited = not self.is_overlapping

    def cells_of(self, first: int, last: int) -> _Cells:
        """Those of the storage that holds these bytes. Raises HazardError where they are not of one tensor."""
        if not any(begin <= first and last <= end for begin, end in self._extents):
            raise self.hazard("an address outside of all tensors of the launch", first)
        base, size = self._storages[bisect_right(self._bases, first) - 1]
        if base not in self.cells:
            self.cells[base] = _Cells(base, size)
        return self.cells[base]

    def hazard(self, what: str, address: int) -> HazardError:
        return HazardError(f"{self.name}, program {self.program}, {_line()}: {what} (address {address:#x})")


class Watch:
    """The launches of a part of a test."""

    def __init__(self, reachable: Callable[[], Iterable[torch.Tensor]], shared: Iterable[str]) -> None:
        self._reachable, self._shared = reachable, frozenset(shared)
        self._shapes: dict[tuple[int, ...], int] = {}
        self._in_flight: list[_Launch] = []
        """Launches that may still run when the next one begins."""
        self.launch = _Launch("nothing", [], False)
        self.launches = self.overlapped = 0
        self.is_number = False
        """Whether the access at hand is one of all threads to the same address."""

    def begin(self, name: str, tensors: list[torch.Tensor], is_overlapping: bool) -> None:
        """A launch begins, with these tensors."""
        self.launches += 1
        self.overlapped += is_overlapping
        self.launch = _Launch(name, [*tensors, *self._reachable()], is_overlapping)

    def end(self) -> None:
        """It has ended: check what it did before its wait."""
        launch = self.launch
        if launch.is_overlapping:
            if not launch.ever_waited:
                raise HazardError(f"{launch.name} begins before the launch in front has ended, and never waits for it")
            for other in self._in_flight:
                _check_early(launch, other)
        # a launch whose programs let the next one begin before they wait leaves all that it waits for in flight
        is_chained = launch.is_overlapping and launch.begins_next
        self._in_flight = [*(self._in_flight if is_chained else []), launch]

    def read(self, pointers: np.ndarray, mask: np.ndarray, size: int) -> None:
        """Check and note a load of elements of ``size`` bytes."""
        if not mask.any():
            return
        launch = self.launch
        found, cells, lanes = self._places(pointers, mask, size)
        me, side, writer = launch.program, found.read, found.written.program[cells]
        if writer.any():
            self._refuse(found, cells, (writer != NOBODY) & (writer != me), "read, which another program writes")
            is_fresh = (writer == me) & (found.written.span[cells] == launch.span)
            self._refuse(found, cells, is_fresh, "read after a store without a barrier between")
        before = side.program[cells]
        by_others = (before == me) & (side.span[cells] == launch.span) & (side.lane[cells] != lanes)
        side.program[cells] = np.where((before == NOBODY) | (before == me), me, SEVERAL)
        side.span[cells], side.lane[cells] = launch.span, lanes
        by_others |= side.lane[cells] != lanes  # of this very load
        side.lane[cells[by_others]] = ANY_LANE
        found.is_early[cells] |= not launch.has_waited

    def write(self, pointers: np.ndarray, mask: np.ndarray, size: int, *, is_atomic: bool = False) -> None:
        """Check and note a store or an atomic operation."""
        if not mask.any():
            return
        launch = self.launch
        found, cells, lanes = self._places(pointers, mask, size)
        me, side, writer, reader = (
            launch.program,
            found.written,
            found.written.program[cells],
            found.read.program[cells],
        )
        is_foreign = (writer != NOBODY) & (writer != me) & ~(is_atomic & found.is_atomic[cells])
        self._refuse(found, cells, is_foreign, "written, which another program writes")
        self._refuse(found, cells, (reader != NOBODY) & (reader != me), "written, which another program reads")
        is_elsewhere = (found.read.lane[cells] != lanes) | (lanes == ANY_LANE)
        is_late = (reader == me) & (found.read.span[cells] == launch.span) & is_elsewhere
        self._refuse(found, cells, is_late, "written by another lane than read it, without a barrier between")
        if not is_atomic:
            is_again = (writer == me) & (side.span[cells] == launch.span) & (side.lane[cells] != lanes)
            self._refuse(found, cells, is_again, "written twice by different lanes without a barrier between")
            side.lane[cells] = lanes
            self._refuse(found, cells, side.lane[cells] != lanes, "written by two lanes of one store")
        side.program[cells], side.span[cells], found.is_atomic[cells] = me, launch.span, is_atomic
        found.is_early[cells] |= not launch.has_waited

    def _places(self, pointers: np.ndarray, mask: np.ndarray, size: int) -> tuple[_Cells, np.ndarray, np.ndarray]:
        """The storage, the cells and the lanes of an access."""
        lanes = np.flatnonzero(mask)
        addresses = pointers.reshape(-1)[lanes]
        found = self.launch.cells_of(int(addresses.min()), int(addresses.max()) + size)
        cells = ((addresses - np.uint64(found.base)) // np.uint64(CELL)).astype(np.int64)
        if self.is_number:
            lanes[:] = ANY_LANE
        else:
            lanes += self._shapes.setdefault(pointers.shape, len(self._shapes)) << 32
        parts = max(1, size // CELL)
        return found, (cells[:, None] + np.arange(parts)).reshape(-1), np.repeat(lanes, parts)

    def _refuse(self, found: _Cells, cells: np.ndarray, which: np.ndarray, what: str) -> None:
        if which.any() and self.launch.name not in self._shared:
            raise self.launch.hazard(what, found.base + int(cells[which][0]) * CELL)


def _check_early(launch: _Launch, other: _Launch) -> None:
    """Raise HazardError where a launch does before its wait what another in flight does not allow."""
    for base in launch.cells.keys() & other.cells.keys():
        mine, theirs = launch.cells[base], other.cells[base]
        if (mine.is_early & (theirs.written.program != NOBODY)).any():
            raise HazardError(f"{launch.name} touches before its wait what {other.name} writes")
        is_written = mine.is_early & (mine.written.program != NOBODY)
        if (is_written & (theirs.read.program != NOBODY)).any():
            raise HazardError(f"{launch.name} writes before its wait what {other.name} reads")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor and the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _line() -> str:
    """Where the kernel that is being run stands."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _MACHINERY):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_watch: Watch | None = None


def _current() -> Watch:
    assert _watch is not None
    return _watch


@contextmanager
def watched(reachable: Callable[[], Iterable[torch.Tensor]] = tuple, shared: Iterable[str] = ()) -> Iterator[Watch]:
    """Every launch in the body is watched, by the innermost of these.

    ``reachable`` gives tensors that kernels find by addresses in other tensors; ``shared`` names kernels that are meant to
    have addresses in common.
    """
    global _watch
    before, _watch = _watch, Watch(reachable, shared)
    with pytest.MonkeyPatch.context() as patch:
        if before is None:
            _watch_programs(patch)
            _watch_accesses(patch)
        try:
            yield _watch
        finally:
            _watch = before


def _watch_programs(patch: pytest.MonkeyPatch) -> None:
    """Let the watch know of launches, programs and barriers."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    place, barrier, run = builder.set_grid_idx, builder.create_barrier, executor.__call__

    def set_grid_idx(self: Any, *index: int) -> None:
        _current().launch.begin_program()
        place(self, *index)

    def create_barrier(self: Any) -> Any:
        _current().launch.span += 1
        return barrier(self)

    def call(self: Any, *args: Any, **options: Any) -> None:
        tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
        _current().begin(self.fn.__name__, tensors, bool(options.get("launch_pdl")))
        try:
            run(self, *args, **options)
        except interpreter.InterpreterError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, HazardError):
                cause = cause.__cause__  # one error for each function that called another
            raise (cause or error) from None
        _current().end()

    patch.setattr(builder, "set_grid_idx", set_grid_idx)
    patch.setattr(builder, "create_barrier", create_barrier)
    patch.setattr(executor, "__call__", call)


def _watch_accesses(patch: pytest.MonkeyPatch) -> None:
    """Let the watch know of loads, stores and atomic operations before they are made."""
    builder, semantic = interpreter.InterpreterBuilder, interpreter.TritonSemantic
    load, store = builder.create_masked_load, builder.create_masked_store
    update, swap = builder.create_atomic_rmw, builder.create_atomic_cas

    def size(pointers: Any) -> int:
        bits: int = pointers.get_element_ty().primitive_bitwidth
        return max(1, bits // 8)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        _current().read(ptrs.data, mask.data, size(ptrs))
        return load(self, ptrs, mask, *rest, **more)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _current().write(ptrs.data, mask.data, size(ptrs))
        return store(self, ptrs, value, mask, *rest)

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        _current().write(ptr.data, mask.data, size(ptr), is_atomic=True)
        return update(self, op, ptr, val, mask, *rest)

    def create_atomic_cas(self: Any, ptr: Any, *rest: Any) -> Any:
        _current().write(ptr.data, np.ones_like(ptr.data, bool), size(ptr), is_atomic=True)
        return swap(self, ptr, *rest)

    def telling_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
        def access(self: Any, ptr: Any, *rest: Any, **more: Any) -> Any:
            _current().is_number = not ptr.type.is_block()
            return function(self, ptr, *rest, **more)

        return access

    for made in (create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas):
        patch.setattr(builder, made.__name__, made)
    for name in ("load", "store", *(name for name in vars(semantic) if name.startswith("atomic_"))):
        patch.setattr(semantic, name, telling_numbers(vars(semantic)[name]))


@contextmanager
def overlapping(modules: Iterable[Any]) -> Iterator[None]:
    """The kernels of these modules may be launched with ``overlap=True``, which the interpreter knows nothing of."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "gdc_wait", wait)
            patch.setattr(module, "gdc_launch_dependents", launch_dependents)
        yield


def wait() -> None:
    """Stands for ``gdc_wait``."""
    launch = _current().launch
    launch.has_waited = launch.ever_waited = True


def launch_dependents() -> None:
    """Stands for ``gdc_launch_dependents``."""
    launch = _current().launch
    launch.begins_next |= not launch.has_waited


@contextmanager
def poisoned_rooms() -> Iterator[None]:
    """What ``torch.empty`` gives is NaN or the largest whole number, so that a read of it shows, or is out of bounds."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        room = empty(*size, **options)
        return room.fill_(torch.nan if room.is_floating_point() else torch.iinfo(room.dtype).max)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield
