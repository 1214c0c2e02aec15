"""Cutting packed sequences in two batches, and running kernels at another number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numba
import numpy as np

from kittiwake.ops.packed import Packed
from tests.ops.bits import Found, all_same_bits

THREADS = (1, 2, 3, 5, 7)
SPARE = 3
"""Rows of a buffer beyond those of the batch."""


def spared(array: np.ndarray) -> np.ndarray:
    """The rows in a buffer that has SPARE more, of NaN: whoever reads or writes them shows."""
    return np.concatenate([array, np.full((SPARE, *array.shape[1:]), np.nan, np.float32)])


def unwritten(rows: int, columns: int) -> np.ndarray:
    """A buffer for so many rows and SPARE more, all NaN."""
    return np.full((rows + SPARE, columns), np.nan, np.float32)


def check_threads(run: Callable[[], Found], expected: Found) -> None:
    """The same bits at any number of threads."""
    for threads in THREADS:
        with numba_threads(threads):
            found = run()
        assert all_same_bits(found, expected), threads


@contextmanager
def numba_threads(count: int) -> Iterator[None]:
    """Run the body with this many threads (tests/conftest.py has Numba start seven)."""
    before = numba.get_num_threads()
    numba.set_num_threads(count)
    try:
        yield
    finally:
        numba.set_num_threads(before)


def cut_in_two(packed: Packed, seed: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(rows of the whole, starts, slots) of two batches that make up the whole; a sequence may lie in one of them only."""
    rng = np.random.default_rng(seed)
    cuts = [int(rng.integers(0, length + 1)) for length in packed.lengths]
    halves = []
    for part in range(2):
        rows: list[int] = []
        starts, slots = [0], []
        for sequence, (start, length, slot) in enumerate(
            zip(packed.starts, packed.lengths, packed.slots, strict=False)
        ):
            first, last = (0, cuts[sequence]) if part == 0 else (cuts[sequence], length)
            if first < last:
                rows.extend(range(int(start) + first, int(start) + last))
                starts.append(len(rows))
                slots.append(int(slot))
        if rows:
            halves.append((np.array(rows), np.array(starts, dtype=np.int64), np.array(slots, dtype=np.int64)))
    return halves
