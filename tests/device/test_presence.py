"""Keeps the folder's skip message honest: with an accelerator this runs, without one it is skipped with the reason."""

from __future__ import annotations

import torch


def test_accelerator_multiplies_exactly_representable_numbers() -> None:
    rows = torch.arange(12, dtype=torch.float32, device="cuda").reshape(3, 4)
    assert (rows @ rows.T).cpu().tolist() == [[14.0, 38.0, 62.0], [38.0, 126.0, 214.0], [62.0, 214.0, 366.0]]
