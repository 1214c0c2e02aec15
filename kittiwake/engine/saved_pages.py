"""Full pages of states that grow, as values that all saved states of one sequence share.

A page that is full never changes while its sequence goes on, so states saved further on need no copy of their own. What
is shared follows from where a state came from, never from tokens that are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class SavedPage:
    """The rows of one full page, by name of the growing part, [L, rows, *shape]. Immutable by agreement; each equals only
    itself."""

    rows: Mapping[str, np.ndarray] = field(repr=False)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(array.nbytes for array in self.rows.values())


class PagedParts(Mapping[str, np.ndarray]):
    """The parts of a saved state whose full pages are shared: ``pages`` in order, and in ``own`` what is the state's alone,
    the rows of its open page and the parts that do not grow.

    Looking a growing part up joins its rows in a new array, [L, rows, *shape]; ``pieces`` has them without a copy.
    """

    def __init__(self, own: Mapping[str, np.ndarray], pages: tuple[SavedPage, ...] = (), page_tokens: int = 0) -> None:
        self.own, self.pages, self.page_tokens = own, pages, page_tokens
        self._growing = pages[0].rows.keys() if pages else frozenset[str]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._growing:
            return self.own[name]
        return np.concatenate([*(page.rows[name] for page in self.pages), self.own[name]], axis=1)

    def kind(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of a part."""
        own = self.own[name]
        if name not in self._growing:
            return own.shape, own.dtype.name
        rows = own.shape[1] + sum(page.rows[name].shape[1] for page in self.pages)
        return (own.shape[0], rows, *own.shape[2:]), own.dtype.name

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """The values of a part, in the order of its whole array."""
        if name not in self._growing:
            yield self.own[name]
            return
        for layer, last in enumerate(self.own[name]):
            yield from (page.rows[name][layer] for page in self.pages)
            yield last

    @property
    def own_nbytes(self) -> int:
        """Bytes that no other state has."""
        return sum(array.nbytes for array in self.own.values())


class PageHolders:
    """Counts who holds which pages, so that the bytes of each count once."""

    def __init__(self) -> None:
        self._holders: Counter[SavedPage] = Counter()

    def add(self, pages: Iterable[SavedPage]) -> int:
        """Enter a holder of these pages; the bytes of those that nobody held before."""
        added = 0
        for page in pages:
            added += 0 if page in self._holders else page.nbytes
            self._holders[page] += 1
        return added

    def remove(self, pages: Iterable[SavedPage]) -> int:
        """Take a holder of these pages out; the bytes of those that nobody holds any more."""
        removed = 0
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                removed += page.nbytes
        return removed
