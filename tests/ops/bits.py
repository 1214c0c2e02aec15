"""Comparing float32 arrays bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import starmap

import numpy as np


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal shapes, and every float32 the same 32 bits: tells -0.0 from 0.0, takes a NaN for itself."""
    assert found.dtype == expected.dtype == np.float32
    if found.shape != expected.shape:
        return False
    left, right = (np.ascontiguousarray(array).view(np.uint32) for array in (found, expected))
    return bool(np.array_equal(left, right))


Found = np.ndarray | Sequence[np.ndarray] | Mapping[str, np.ndarray]
"""What a kernel gives: one array, several, or several with names."""


def all_same_bits(found: Found, expected: Found) -> bool:
    """Whether every array has the same bits."""
    return all(starmap(same_bits, zip(_arrays(found), _arrays(expected), strict=True)))


def _arrays(found: Found) -> Sequence[np.ndarray]:
    if isinstance(found, np.ndarray):
        return [found]
    return [found[name] for name in sorted(found)] if isinstance(found, Mapping) else found


def ulps_off(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance of float32 results from float64 truth, in units of the last place of the truth rounded to float32."""
    unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return np.abs(found.astype(np.float64) - exact) / unit
