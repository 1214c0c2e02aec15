"""A step that was launched on a device and whose tokens the host has not read yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kittiwake.engine.scheduler import Request


@dataclass
class Flight:
    """A launched step."""

    rows: list[Request]
    """Requests that get logits, in the order of the rows."""
    drawn: list[Request]
    """Those of them that a token is drawn for."""
    must_land: bool
    """Whether the host needs what it gives before it can launch another."""
    logits: Any = None
    tokens: np.ndarray | None = None
    event: Any = None
    """Tensor, what the tokens are copied to, and what tells that they are."""

    def row(self, request: Request) -> np.ndarray:
        """A copy of a request's logits, before the next launch overwrites them."""
        assert self.logits is not None
        values: np.ndarray = self.logits[self.rows.index(request)].cpu().numpy()
        return values
