"""What bench knows of a peer, and what a peer is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kittiwake.bench.shapes import Rwkv7Shape
from kittiwake.errors import KittiwakeError

NORM_EPS = 1e-5
GROUP_NORM_EPS = 64e-5


class PeerError(KittiwakeError):
    """A peer that is not installed, or that cannot run this model here. The message is the reason."""


@dataclass(frozen=True)
class PeerTask:
    """What every peer is given: the same weights in BlinkDL's names, a device ("cpu", "cuda") and a type for them."""

    weights: Mapping[str, torch.Tensor]
    shape: Rwkv7Shape
    device: str
    dtype: torch.dtype

    def weight(self, name: str) -> torch.Tensor:
        """One tensor, on the device and in the type."""
        return self.weights[name].to(self.device, self.dtype)


class Peer(Protocol):
    """A peer's model, loaded. Called inside its own flags only (:class:`kittiwake.bench.peers.flags.OwnFlags`)."""

    version: str
    """Of the package, with what it was told to use."""
    is_batched: bool
    """False: it runs sequences one after another."""

    def start(self, batch: int) -> None:
        """Begin ``batch`` sequences anew."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed int64 ids [B, T] (on the device) to the sequences; logits [B, vocab] after the last token of each."""


OpenPeer = Callable[[PeerTask], Peer]
"""Builds a peer's model. Raises PeerError with the reason where that cannot be done."""
