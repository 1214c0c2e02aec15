"""Models and texts whose logits transformers gave, kept in tests/fixtures/qwen4exp_transformers.npz.

The seeds are ones without ties: where scores are equal, transformers chooses blocks in no stated order.
"""

from __future__ import annotations

import numpy as np

from kittiwake.bench.qwen4exp_shapes import Qwen4ExpShape

TOKENS = 72
CASES: dict[str, tuple[Qwen4ExpShape, int]] = {
    "one n-gram layer": (Qwen4ExpShape(), 1),
    "two n-gram layers": (Qwen4ExpShape(ngram_layers=(0, 2), gate="silu", kv_heads=1), 2),
    "attention twice": (
        Qwen4ExpShape(layers=3, attention_layers=(0, 2), ngram_layers=(1,), ngram_size=2, budget=12, ratio=3, streams=3,
                      value_heads=2, rotary_size=8),
        3,
    ),
}  # fmt: skip


def ids_of(shape: Qwen4ExpShape, seed: int) -> list[int]:
    """A text with ends in it: alone, one after another, and two tokens apart."""
    ids = np.random.default_rng(seed).integers(0, shape.vocab, TOKENS)
    ids[[5, 6, 17, 19, 40]] = shape.end_token
    return [int(token) for token in ids]
