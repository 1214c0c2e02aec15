"""What one sequence carries."""

from __future__ import annotations

from kittiwake.engine.states import PartKind, StatePart, StateSpec
from kittiwake.families.qwen4exp.geometry import Geometry

PAGE_TOKENS = 256
"""About so many tokens are kept in one page of what grows: a whole number of blocks."""


def state_spec(g: Geometry) -> StateSpec:
    """What one sequence carries: fixed parts of the delta rule and the n-grams, keys and values that grow."""
    delta, attention, ngrams = len(g.delta_layers), len(g.attention_layers), len(g.ngrams)
    parts = []
    if delta:
        parts += [
            StatePart("conv", (g.conv_taps - 1, g.conv_width), layers=delta),
            StatePart("delta", (g.value_heads, g.key_size, g.value_size), layers=delta),
        ]
    if ngrams:
        carried = (g.ngram_taps - 1) * g.ngram_size
        parts += [
            StatePart("ngram_conv", (carried, g.stream_width), layers=ngrams),
            # the host hashes them to rows of the table, while the device is still at work
            StatePart("ngram_ids", (g.ngram_size - 1,), "int64", fill=-1, layers=1, on_host=True),
        ]
    if attention:
        kv = (g.kv_heads, g.head_size)
        parts += [
            StatePart("keys", kv, kind=PartKind.GROWING, layers=attention),
            StatePart("values", kv, kind=PartKind.GROWING, layers=attention),
            StatePart("index_blocks", (g.index_size,), kind=PartKind.GROWING, layers=attention, every=g.index_ratio),
            StatePart("index_rows", (g.index_ratio, g.index_size), kind=PartKind.OPEN_ROWS, layers=attention),
        ]
    page = PAGE_TOKENS if not attention else -(-PAGE_TOKENS // g.index_ratio) * g.index_ratio
    return StateSpec(g.layers, tuple(parts), page_tokens=page)
