"""The error tables of docs/exactness.md: logits and states against float64, ours and the ``rwkv`` package's.

    python lab/errors.py

Relative RMS error over all positions; greedy tokens are compared at every position.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

from kittiwake.bench.shapes import Rwkv7Shape, random_rwkv7, small
from kittiwake.checkpoints.bundle import read_bundle
from kittiwake.config import EngineConfig
from kittiwake.engine.batch import Batch
from kittiwake.engine.states import StateTable
from kittiwake.families.rwkv7_names import BLINKDL
from kittiwake.load import load_tensors, packaged_model
from kittiwake.text.tokenizer import load_tokenizer
from tests.oracles import rwkv7_float64, rwkv_package
from tests.oracles.measure import relative_error

TOKENS = 200
SHAPES: dict[str, Rwkv7Shape] = {
    "3 × 128, heads of 64": small(3, 128, 64),
    "3 × 96, heads of 32": small(3, 96, 32),
    "3 × 64, heads of 16": small(3, 64, 16),
    "8 × 512, heads of 64": small(8, 512, 64),
}


def packaged_tensors() -> dict[str, torch.Tensor]:
    """The packaged model's weights under BlinkDL's names and in their layout."""
    bundle = read_bundle(packaged_model())
    heads = bundle.manifest.model["heads"]
    tensors = {}
    for ours, place in BLINKDL.places(bundle.manifest.model["layers"]).items():
        tensor = bundle.source.read(ours)
        if place.is_transposed:
            tensor = tensor.t().contiguous()
        elif ours.endswith("r_k"):
            tensor = tensor.view(heads, -1)
        tensors[place.name] = tensor.clone()
    return tensors


def row(name: str, tensors: dict[str, torch.Tensor], ids: list[int]) -> str:
    """One line of the table."""
    expected, state = rwkv7_float64.run(tensors, ids)
    vocab = tensors["emb.weight"].shape[0]
    tokenizer = None if vocab in (256, 65536) else load_tokenizer(packaged_model() / "tokenizer.json")
    loaded = load_tensors(tensors, EngineConfig(), tokenizer=tokenizer)
    table = StateTable(loaded.model.state_spec, 1)
    slot = table.allocate()
    found = loaded.model.forward(Batch.pack([(slot, ids)], [list(range(len(ids)))]), table)
    wkv = table.save(slot).parts["wkv"].swapaxes(-1, -2)
    same = int((found.argmax(-1) == expected.argmax(-1)).sum())
    theirs = rwkv_package.run(tensors, ids) if rwkv_package.is_available() else None
    other = f"{relative_error(theirs.logits, expected):.1e}" if theirs is not None else "–"
    return (
        f"| {name} | {relative_error(found, expected):.1e} | {relative_error(wkv, state['wkv']):.1e} "
        f"| {same} of {len(ids)} | {other} |"
    )


def main() -> None:
    """Print the table."""
    lines = ["| weights | logits | WKV state | greedy tokens equal | `rwkv` package, logits |", "|---|---|---|---|---|"]
    draw = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        lines.append(row(f"random, {name}", random_rwkv7(shape, 0), draw.integers(0, shape.vocab, TOKENS).tolist()))
    tokenizer = load_tokenizer(packaged_model() / "tokenizer.json")
    text = "The old man looked at the sea. " * 40
    lines.append(row("the packaged model", packaged_tensors(), tokenizer.encode(text)[:TOKENS]))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
