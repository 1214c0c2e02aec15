"""Readable reference in numpy: float64 sums over a sorted copy, where the fast one searches a threshold.

The fast one takes exponentials in float32: a number that falls within 5e-6 of a border between two tokens, or a
``top_p`` that falls so close to a step of the mass, may come out on its other side.
"""

from __future__ import annotations

import numpy as np

NOT_FINITE = -1
"""Drawn for a row whose logits hold NaN or plus infinity, or nothing but minus infinity."""
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


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Boolean mask [vocab] of the tokens a draw may give; float64 throughout."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    probs = np.exp(scaled)
    mask = logits > -np.inf
    if 0 < top_k < len(logits):
        mask &= logits >= np.sort(logits)[-top_k]
    if top_p < 1:
        order = np.argsort(-logits, kind="stable")
        order = order[mask[order]]
        mass = np.cumsum(probs[order]) / probs[order].sum()
        border = logits[order[min(int(np.searchsorted(mass, top_p)), len(order) - 1)]]
        mask &= logits >= border
    return mask


def draw(logits: np.ndarray, temperature: float, top_k: int, top_p: float, seed: int, position: int) -> int:
    """One token id, or NOT_FINITE where none can be drawn; logits float32 [vocab]."""
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return NOT_FINITE
    if temperature == 0:
        return int(np.argmax(logits))
    mask = kept(logits, temperature, top_k, top_p)
    probs = np.where(mask, np.exp((logits.astype(np.float64) - logits.max()) / temperature), 0)
    cumulative = np.cumsum(probs)
    return int(np.searchsorted(cumulative, uniform(seed, position) * cumulative[-1], side="right"))
