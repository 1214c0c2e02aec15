"""What families of every kind do alike with canonical tensors: check a bundle's, and load a model with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import torch

from kittiwake.errors import ModelError
from kittiwake.families.rwkv_names import listed
from kittiwake.progress import Progress


class Loadable(Protocol):
    """A model that waits for its tensors."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Take one canonical tensor. Raises ModelError for values that it cannot keep."""

    def warm_up(self, progress: Progress | None = None) -> None:
        """Get ready to run."""


def fill(
    model: Loadable,
    tensors: Iterable[tuple[str, torch.Tensor]],
    names: Collection[str],
    progress: Progress | None,
) -> None:
    """Load a model with the tensors of these names, one at a time, and warm it up. Raises ModelError where one never came."""
    missing = set(names)
    for done, (name, tensor) in enumerate(tensors):
        model.load(name, tensor)
        missing.discard(name)
        if progress is not None:
            progress("loading tensors", done + 1, len(names))
    if missing:
        raise ModelError(f"tensors missing: {listed(sorted(missing))}")
    model.warm_up(progress)
