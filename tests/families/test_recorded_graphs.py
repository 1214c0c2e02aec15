"""A capture that does more than launch is told, without a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from tests.families.recorded_graphs import OnlyLaunches

X, INDEX = torch.arange(12.0).view(3, 4), torch.tensor([1, 0])
REFUSED: dict[str, Callable[[], Any]] = {
    "a value for the host": lambda: X[0, 0].item(),
    "values for the host": lambda: X.tolist(),
    "a copy for the host": lambda: X.cpu(),
    "an array": lambda: X.numpy(),
    "a condition": lambda: bool(X[0, 0]),
    "a number": lambda: int(X[0, 0]),
    "memory": lambda: torch.empty(3),
    "memory alike": lambda: torch.empty_like(X),
    "another type": lambda: X.half(),
    "a list": lambda: torch.tensor([1.0]),
    "an array sent": lambda: torch.from_numpy(np.zeros(3)).to(X.device),
    "a mask": lambda: X[torch.ones(3, dtype=torch.bool)],
    "an index": lambda: X[INDEX],
    "a copy": lambda: X.contiguous(),
    "another's kernel": lambda: X.add_(1),
    "places of ones": lambda: X.nonzero(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_launch_is_refused(name: str) -> None:
    with OnlyLaunches(), pytest.raises(AssertionError, match="in a capture"):
        REFUSED[name]()


def test_views_and_what_the_host_knows_are_free() -> None:
    with OnlyLaunches():
        first, rest = X.tensor_split((1,), dim=1)
        assert X[1:, :2].shape == (2, 2) and X[0].stride(0) == 1 and X.view(4, 3).dtype == torch.float32
        assert len(first) == 3 and rest[None].dim() == 3 and X[0].numel() == 4
