"""The peers by name: one line each."""

from __future__ import annotations

from collections.abc import Mapping

from kittiwake.bench.peers import eager_torch, flash_linear_attention, rwkv_package, transformers_model
from kittiwake.bench.peers.contract import OpenPeer
from kittiwake.bench.peers.flags import OwnFlags
from kittiwake.errors import UsageError

PEERS: Mapping[str, OpenPeer] = {
    "torch": eager_torch.open_peer,
    "rwkv": rwkv_package.open_peer,
    "fla": flash_linear_attention.open_peer,
    "transformers": transformers_model.open_peer,
}


def parse_peers(text: str) -> list[str]:
    """ "torch,fla" → names in that order. Raises UsageError for one that is not known or stands twice."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in PEERS:
            raise UsageError(f"there is no peer {name!r}", f"known peers: {', '.join(PEERS)}")
        if names.count(name) > 1:
            raise UsageError(f"the peer {name!r} is named twice")
    return names


def flags_of(name: str, device: str) -> OwnFlags:
    """The settings a peer starts with."""
    return OwnFlags(rwkv_package.environment(device) if name == "rwkv" else None)
