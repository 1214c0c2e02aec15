"""Planted faults that the interpreter computes rightly and a card need not; test_hazards.py runs this in a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
from triton import language as tl
from triton.runtime.errors import InterpreterError

from tests.ops.hazards import HazardError, launch_dependents, wait, watched

gdc_wait, gdc_launch_dependents = wait, launch_dependents
SIZE = 8


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with watched():
        yield


def room(rows: int = 4) -> torch.Tensor:
    return torch.arange(rows * SIZE, dtype=torch.float32).view(rows, SIZE)


@triton.jit
def reverse_kernel(x, HAS_BARRIER: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row turned around in place."""
    at = x + tl.program_id(0) * SIZE
    lanes = tl.arange(0, SIZE)
    row = tl.load(at + lanes)
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.store(at + SIZE - 1 - lanes, row)


def test_a_lane_writes_what_another_may_not_have_read() -> None:
    x = room()
    reverse_kernel[(4,)](x, True, SIZE)
    assert torch.equal(x, room().flip(1))
    with pytest.raises(HazardError, match=r"reverse_kernel, program 1, .*written by another lane than read it"):
        reverse_kernel[(4,)](x, False, SIZE)


@triton.jit
def through_memory_kernel(x, out, HAS_BARRIER: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, SIZE)
    tl.store(out + lanes, tl.load(x + lanes) * 2)
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.store(x + lanes, tl.load(out + SIZE - 1 - lanes))


def test_what_a_program_has_written_is_read_behind_a_barrier() -> None:
    through_memory_kernel[(1,)](room(1), room(1), True, SIZE)
    with pytest.raises(HazardError, match="read after a store without a barrier between"):
        through_memory_kernel[(1,)](room(1), room(1), False, SIZE)


@triton.jit
def shift_kernel(x, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0)
    lanes = tl.arange(0, SIZE)
    above = tl.load(x + tl.maximum(n - 1, 0) * SIZE + lanes)
    tl.store(out + n * SIZE + lanes, above)


def test_a_program_writes_what_another_reads_before_or_after() -> None:
    x = room()
    shift_kernel[(4,)](x, room(), SIZE)
    with pytest.raises(HazardError, match=r"program 2, .*read, which another program writes"):
        shift_kernel[(4,)](x, x, SIZE)
    with pytest.raises(HazardError, match=r"program 2, .*written, which another program reads"):
        down_kernel[(3,)](room(), SIZE)


@triton.jit
def down_kernel(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row 3 - n moves down a place, but for that of the first program: all is well while they run in order."""
    n = tl.program_id(0)
    lanes = tl.arange(0, SIZE)
    row = tl.load(x + (3 - n) * SIZE + lanes)
    if n > 0:
        tl.store(x + (4 - n) * SIZE + lanes, row)


@triton.jit
def total_kernel(x, total, IS_ATOMIC: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(x + tl.program_id(0))
    if IS_ATOMIC:
        tl.atomic_add(total, value)
    else:
        tl.store(total, value)


def test_programs_may_share_what_is_atomic() -> None:
    x, total = room(1)[0], torch.zeros(1)
    total_kernel[(SIZE,)](x, total, True)
    assert total.item() == x.sum().item()
    with pytest.raises(HazardError, match="written, which another program writes"):
        total_kernel[(SIZE,)](x, total, False)


@triton.jit
def count_kernel(counter, out, HAS_BARRIER: tl.constexpr):  # type: ignore[no-untyped-def]
    before = tl.load(counter)
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.atomic_add(counter, 1)
    tl.store(out, before)


def test_a_number_is_read_by_all_threads() -> None:
    count_kernel[(1,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), True)
    with pytest.raises(HazardError, match="written by another lane than read it"):
        count_kernel[(1,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), False)


@triton.jit
def scatter_kernel(places, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, SIZE)
    tl.store(out + tl.load(places + lanes), lanes)


def test_two_lanes_write_one_place() -> None:
    out = torch.zeros(SIZE, dtype=torch.int32)
    scatter_kernel[(1,)](torch.arange(SIZE, dtype=torch.int32), out, SIZE)
    with pytest.raises(HazardError, match="written by two lanes of one store"):
        scatter_kernel[(1,)](torch.arange(SIZE, dtype=torch.int32) // 2, out, SIZE)


def test_what_lies_outside_of_a_tensor_is_not_touched() -> None:
    """Within its storage, too."""
    out = torch.zeros(2 * SIZE, dtype=torch.int32)
    places = torch.arange(SIZE, dtype=torch.int32)
    with pytest.raises(HazardError, match="an address outside of all tensors of the launch"):
        scatter_kernel[(1,)](places + 1, out[:SIZE], SIZE)
    with pytest.raises(HazardError, match="an address outside of all tensors of the launch"):
        scatter_kernel[(1,)](places + 2**30, out, SIZE)
    with watched(reachable=lambda: [out]):
        scatter_kernel[(1,)](places + 1, out[:SIZE], SIZE)


@triton.jit
def power_kernel(x, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The fourth power of a number, and of each of a row."""
    lanes = tl.arange(0, SIZE)
    number, row = tl.load(x), tl.load(x + lanes)
    tl.store(out, number * number * number * number)
    tl.debug_barrier()
    tl.store(out + lanes, row * row * row * row)


def test_whole_numbers_do_not_overflow() -> None:
    out = torch.zeros(SIZE, dtype=torch.int32)
    whole = torch.tensor([-215, 215, 3, 0, 0, 0, 0, 1], dtype=torch.int32)
    power_kernel[(1,)](whole, out, SIZE)
    assert out.tolist() == [215**4, 215**4, 81, 0, 0, 0, 0, 1]
    for place in (0, 5):
        with pytest.raises(InterpreterError, match="int32 overflow detected for operation mul"):
            power_kernel[(1,)](whole.index_fill(0, torch.tensor(place), 216), out, SIZE)


# Launches that begin early


@triton.jit
def copy_kernel(x, out, EARLY: tl.constexpr, WAITS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, SIZE)
    if EARLY:
        row = tl.load(x + lanes)
    gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    if not EARLY:
        row = tl.load(x + lanes)
    tl.store(out + lanes, row)


def copy(x: torch.Tensor, out: torch.Tensor, early: bool = False, waits: bool = True, overlap: bool = True) -> None:
    copy_kernel[(1,)](x, out, early, waits, SIZE, **({"launch_pdl": True} if overlap else {}))


def test_a_launch_reads_only_after_its_wait_what_those_in_front_write() -> None:
    a, b, c, d = (room(1) for _ in range(4))
    copy(a, b, overlap=False)
    copy(b, c)
    copy(c, d)
    copy(a, d, early=True)  # which nobody writes
    with pytest.raises(HazardError, match="copy_kernel touches before its wait what copy_kernel writes"):
        copy(b, d, early=True)  # the first launch has ended, but may not be seen yet


def test_a_launch_that_waits_for_all_ends_what_may_be_in_flight() -> None:
    a, b, c = (room(1) for _ in range(3))
    copy(a, b)
    copy(a, c, overlap=False)
    copy(b, a, early=True)


def test_a_launch_waits() -> None:
    with pytest.raises(HazardError, match="never waits for it"):
        copy(room(1), room(1), waits=False)
