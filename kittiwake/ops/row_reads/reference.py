"""Readable reference: one read a row, decoded by numpy."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
"""The sixteen values of IQ4_NL. Source: ggml, ggml-common.h, ``kvalues_iq4nl``."""


def decode(packed: bytes, kind: str) -> np.ndarray:
    """One row as float32; ``kind`` as in :data:`kittiwake.ops.row_reads.layout.KINDS`."""
    if kind == "F32":
        return np.frombuffer(packed, dtype="<f4").copy()
    if kind == "F16":
        return np.frombuffer(packed, dtype="<f2").astype(np.float32)
    if kind == "BF16":
        return (np.frombuffer(packed, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    blocks = np.frombuffer(packed, dtype=np.uint8).reshape(-1, {"Q8_0": 34, "IQ4_NL": 18}[kind])
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == "Q8_0":
        return (blocks[:, 2:].view(np.int8) * scale).reshape(-1)
    low, high = _IQ4_NL[blocks[:, 2:] & 15], _IQ4_NL[blocks[:, 2:] >> 4]
    return (np.concatenate([low, high], axis=1) * scale).reshape(-1)


def gather_rows(
    descriptors: Sequence[int],
    begins: Sequence[int],
    first_rows: Sequence[int],
    row_bytes: int,
    kind: str,
    ids: np.ndarray,
) -> np.ndarray:
    """ids [M] → float32 [M, row values]; part p holds rows ``first_rows[p]`` on, from byte ``begins[p]`` of its file on."""
    rows = []
    for row in ids:
        part = int(np.searchsorted(first_rows, row, side="right")) - 1
        offset = begins[part] + (int(row) - first_rows[part]) * row_bytes
        rows.append(decode(os.pread(descriptors[part], row_bytes, offset), kind))
    return np.stack(rows)
