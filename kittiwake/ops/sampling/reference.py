"""Readable reference in numpy: float64 sums over a sorted copy, where the fast one searches a threshold.

The fast one takes exponentials in float32: a number that falls within 5e-6 of a border between two tokens, or a
``top_p`` that falls so close to a step of the mass, may come out on its other side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

NOT_FINITE = -1
"""Drawn for a row whose logits hold NaN or plus infinity."""
NOTHING_LEFT = -2
"""Drawn for a row whose logits are all minus infinity."""
_MASK = 0xFFFFFFFF


def philox(seed: int, position: int) -> tuple[int, int]:
    """First two 32-bit words of Philox4x32-10 with 64-bit key ``seed`` and 64-bit counter ``position``."""
    c0, c1, c2, c3 = position & _MASK, position >> 32, 0, 0
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    high, low = philox(seed, position)
    return ((high >> 5) * 67108864 + (low >> 6)) / 9007199254740992


def derived_seed(seed: int, index: int) -> int:
    """The seed of sample ``index`` of a request: its own seed for sample 0, then 63 bits of Philox.

    Counted down from 2**64, where no position of a token ever comes.
    """
    if index == 0:
        return seed
    high, low = philox(seed, 2**64 - index)
    return (high << 32 | low) >> 1


def adjusted(
    logits: np.ndarray,
    bias: Mapping[int, float],
    given: Sequence[int],
    drawn: Sequence[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> np.ndarray:
    """Logits after bias and penalties, float32 as they came; ``given`` stood before the first of the ``drawn`` tokens."""
    wide = logits.astype(np.float64)
    for token, value in bias.items():
        wide[token] += value
    for token in set(given) | set(drawn):
        wide[token] = wide[token] / repetition if wide[token] > 0 else wide[token] * repetition
    for token, count in Counter(drawn).items():
        wide[token] -= presence + frequency * count
    return wide.astype(np.float32)


def kept(
    logits: np.ndarray,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
    filters_first: bool = False,
) -> np.ndarray:
    """Boolean mask [vocab] of the tokens a draw may give; float64 throughout."""
    scale = 1.0 if filters_first else 1.0 / temperature
    gaps = (logits.astype(np.float64) - logits.max()) * scale
    probs = np.exp(gaps)
    possible = logits > -np.inf
    mask = possible.copy()
    if 0 < top_k < len(logits):
        mask &= logits >= np.sort(logits)[-top_k]
    if top_p < 1:
        among = possible if filters_first else mask
        order = np.argsort(-logits, kind="stable")
        order = order[among[order]]
        mass = np.cumsum(probs[order]) / probs[order].sum()
        border = logits[order[min(int(np.searchsorted(mass, top_p)), len(order) - 1)]]
        mask &= logits >= border
    if min_p > 0:
        mask &= gaps >= np.log(min_p)
    return mask


def draw(
    logits: np.ndarray,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int,
    min_p: float = 0.0,
    filters_first: bool = False,
) -> int:
    """One token id, or NOT_FINITE or NOTHING_LEFT where none can be drawn; logits float32 [vocab]."""
    if not (logits < np.inf).all():
        return NOT_FINITE
    if logits.max() == -np.inf:
        return NOTHING_LEFT
    if temperature == 0:
        return int(np.argmax(logits))
    mask = kept(logits, temperature, top_k, top_p, min_p, filters_first)
    probs = np.where(mask, np.exp((logits.astype(np.float64) - logits.max()) / temperature), 0)
    cumulative = np.cumsum(probs)
    return int(np.searchsorted(cumulative, uniform(seed, position) * cumulative[-1], side="right"))
