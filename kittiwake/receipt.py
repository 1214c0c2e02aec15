"""A receipt: what the bits of an answer depend on beside the tokens before it and the sampling parameters.

Where two receipts have the same ``digest``, the same request must get the same bits from both; where they differ, it may
not.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from kittiwake import __version__
from kittiwake.device import find_card, processor_name
from kittiwake.load import Loaded
from kittiwake.progress import Progress

FORMAT = 1
# Environment variables that choose other machine code, with other bits.
LIBRARY_SETTINGS = ("MKL_", "ATEN_", "DNNL_", "ONEDNN_", "OPENBLAS_", "NUMBA_CPU_", "NUMBA_OPT", "NUMBA_DISABLE_JIT")
# Told, but chosen by a stopwatch among ways that were proved to have equal bits: no part of the digest.
_TIMED = "wide_from"


def make_receipt(loaded: Loaded, progress: Progress | None = None) -> dict[str, Any]:
    """JSON values; docs/receipt.md says what each is.

    The model's digest of a bundle is known; of another checkpoint the first call reads every byte of its files. Raises
    CheckpointError when those changed since they were loaded.
    """
    import torch

    picked = loaded.model.describe()
    on_card = picked["device"] != "cpu"
    versions = {"kittiwake": __version__, "torch": str(torch.__version__)}
    receipt = {
        "format": FORMAT,
        "model": {
            "digest": loaded.digest(progress),
            "family": loaded.model.config.family,
            "dtype": loaded.dtype,
            "tokenizer": loaded.tokenizer.digest(),
        },
        **(_of_card(loaded, versions) if on_card else _of_processor(loaded, picked, versions)),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(LIBRARY_SETTINGS)},
    }
    return {**receipt, "digest": receipt_digest(receipt)}


def _of_processor(loaded: Loaded, picked: dict[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    import llvmlite
    import numba
    import numpy as np
    import torch

    from kittiwake.ops.jit import kernels_digest

    return {
        "device": {
            "kind": "cpu",
            "processor": processor_name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": loaded.threads,
        },
        "products": picked["products"],
        "kernels": kernels_digest(),
        "versions": versions | {"numpy": np.__version__, "numba": numba.__version__, "llvmlite": llvmlite.__version__},
    }


def _of_card(loaded: Loaded, versions: dict[str, str]) -> dict[str, Any]:
    """What runs a product on a card is no part of it: it is used only where its bits are those of the in-order sum.

    The tokens of a model that cannot run ahead of the host are drawn by the host: its kernels count as well.
    """
    import triton

    from kittiwake.ops.jit import card_kernels_digest, kernels_digest

    draws_here = not loaded.model.can_run_ahead
    card = find_card().card
    assert card is not None
    processor = f"{card.name} with {processor_name()}" if draws_here else card.name
    return {
        "device": {"kind": "cuda", "processor": processor, "capability": card.capability, "threads": 0},
        "products": [],
        "kernels": card_kernels_digest() + (f" {kernels_digest()}" if draws_here else ""),
        "versions": versions | {"triton": triton.__version__, "cuda": card.torch_cuda},
    }


def receipt_digest(receipt: dict[str, Any]) -> str:
    """sha-256 (hex) over what bits depend on: the receipt without ``digest`` and ``wide_from``, as compact JSON with
    sorted keys and products."""
    products = [{key: value for key, value in row.items() if key != _TIMED} for row in receipt["products"]]
    products.sort(key=lambda row: sorted(row.items()))
    content = {key: value for key, value in receipt.items() if key != "digest"} | {"products": products}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
