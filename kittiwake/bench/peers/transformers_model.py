"""RWKV-7 for the library ``transformers``, which has none of its own: the package ``rwkv7-hf`` adds it."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import version

from kittiwake.bench.peers import hf_model
from kittiwake.bench.peers.contract import Peer, PeerError, PeerTask


def open_peer(task: PeerTask) -> Peer:
    """The package's ``RWKV7ForCausalLM`` with these weights. Raises PeerError."""
    if importlib.util.find_spec("transformers") is None:
        raise PeerError("the package transformers is not installed")
    library = f"transformers {version('transformers')}"
    if importlib.util.find_spec("rwkv7_hf") is None:
        raise PeerError(
            f"{library} has no RWKV-7 of its own, and the package rwkv7-hf, which adds it, is not installed"
        )
    package = importlib.import_module("rwkv7_hf")
    config = package.RWKV7Config(**hf_model.config_values(task))
    return hf_model.build(task, lambda: package.RWKV7ForCausalLM(config), f"rwkv7-hf {version('rwkv7-hf')}, {library}")
