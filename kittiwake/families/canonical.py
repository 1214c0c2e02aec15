"""What families of every kind do alike with canonical tensors: check a bundle's, and load a model with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import torch

from kittiwake.checkpoints.reader import TensorInfo, TensorSource
from kittiwake.errors import BundleError, ModelError
from kittiwake.progress import Progress

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types that are read."""
SIZES = ("layers", "width", "vocab_size")
"""Keys of a manifest's model section that every family has."""


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


def check_manifest_keys(model: Mapping[str, Any], family: str, extra: Iterable[str]) -> None:
    """Raise BundleError unless the model section has exactly these keys beside SIZES."""
    keys = {*SIZES, *extra}
    if set(model) != keys:
        raise BundleError(f"manifest model section has keys {sorted(model)}, {family} needs {sorted(keys)}")


def check_bundle_names(source: TensorSource, expected: Collection[str]) -> None:
    """Raise BundleError unless a bundle's source holds exactly these tensors."""
    found = {info.name for info in source.infos()}
    unknown, missing = sorted(found - set(expected)), sorted(set(expected) - found)
    if unknown or missing:
        raise BundleError(
            f"{source.path} does not hold the tensors its manifest asks for: "
            f"unknown {listed(unknown)}; missing {listed(missing)}"
        )


def check_tensor(info: TensorInfo, shape: tuple[int, ...], source: TensorSource) -> None:
    """Raise ModelError for another shape ([1, 1, C] passes for [C]) or a type that is not read."""
    if info.shape != shape and _without_ones(info.shape) != shape:
        raise ModelError(f"{info.name} in {source.path} has shape {info.shape}, expected {shape}")
    check_type(info, source)


def check_type(info: TensorInfo, source: TensorSource) -> None:
    """Raise ModelError for a type that is not read."""
    if info.unreadable:
        raise ModelError(f"{info.name} in {source.path} {info.unreadable}")
    if info.dtype not in FLOATS:
        raise ModelError(f"{info.name} in {source.path} is {info.dtype}, expected float32, bfloat16 or float16")


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise ModelError for NaN and infinite weights."""
    # the ends tell of NaN too, in one pass and without a second tensor beside the first
    if not all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor)):
        raise ModelError(f"{name} holds values that are not finite", "the checkpoint is damaged or badly trained")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[1, 1, C] → [C], [6, 1, 1, C] → [6, C]; matrices as they are."""
    if len(shape) == 3 and shape[:2] == (1, 1):
        return shape[2:]
    return (shape[0], shape[3]) if len(shape) == 4 and shape[1:3] == (1, 1) else shape


def listed(names: list[str]) -> str:
    """The first six names, and how many more there are."""
    rest = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return (", ".join(names[:6]) or "none") + rest
