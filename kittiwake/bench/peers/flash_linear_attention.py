"""flash-linear-attention's RWKV-7: Triton kernels, a chunked scan for 64 tokens and more, a recurrent one below."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from kittiwake.bench.peers import hf_model
from kittiwake.bench.peers.contract import Peer, PeerError, PeerTask


def open_peer(task: PeerTask) -> Peer:
    """Its ``RWKV7ForCausalLM`` with these weights. Raises PeerError."""
    if importlib.util.find_spec("fla") is None:
        raise PeerError("the package flash-linear-attention is not installed")
    try:
        package = importlib.import_module("fla.models.rwkv7")
    except ImportError as err:
        raise PeerError(f"flash-linear-attention cannot be imported: {err}") from err
    if task.device == "cpu":
        raise PeerError("its kernels need a card")
    config = package.RWKV7Config(fuse_cross_entropy=False, **hf_model.config_values(task))
    with _without_first_values():
        return hf_model.build(task, lambda: package.RWKV7ForCausalLM(config), f"flash-linear-attention {_version()}")


@contextmanager
def _without_first_values() -> Iterator[None]:
    """Its modules draw first values channel by channel in Python unless ``transformers`` says not to."""
    library, name = importlib.import_module("transformers.modeling_utils"), "_init_weights"
    missing = object()
    before = getattr(library, name, missing)
    setattr(library, name, False)
    try:
        yield
    finally:
        if before is missing:
            delattr(library, name)
        else:
            setattr(library, name, before)


def _version() -> str:
    try:
        return version("flash-linear-attention")
    except PackageNotFoundError:
        return "of unknown version"
