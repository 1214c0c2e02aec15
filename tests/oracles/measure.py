"""What the comparisons with the oracles share."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class HasVocabulary(Protocol):
    """The shape of any family."""

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""


def relative_error(found: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """Return the root mean square of the difference over that of the expected values."""
    found, expected = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def random_ids(shape: HasVocabulary, count: int) -> list[int]:
    """Return `count` token ids within the vocabulary, the same ones every time."""
    return [int(token) for token in np.random.default_rng(count).integers(0, shape.vocab, count)]
