"""WKV-7 as recorded from flash-linear-attention's naive recurrence; see tests/fixtures/README.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

FOLDER = Path(__file__).parent.parent / "fixtures"
NAMES = ("fla_wkv7_square", "fla_wkv7_narrow_key", "fla_wkv7_narrow_value")


@dataclass(frozen=True)
class Wkv7Fixture:
    """Inputs and answers of one recorded scan, float32.

    r, log_decay, k, a and b are [B, T, H, K]; v and y are [B, T, H, V]; both states are [B, H, V, K],
    transposed here from the recorded project's [B, H, K, V]. The answers carry float32 rounding.
    """

    r: Array
    log_decay: Array
    k: Array
    v: Array
    a: Array
    b: Array
    initial_state: Array
    y: Array
    final_state: Array


def load(name: str) -> Wkv7Fixture:
    """Return the fixture of that name (one of NAMES)."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        rows = {key: file[key] for key in ("r", "log_decay", "k", "v", "a", "b", "y")}
        states = {key: file[f"{key}_kv"].swapaxes(-1, -2).copy() for key in ("initial_state", "final_state")}
    return Wkv7Fixture(**rows, **states)
