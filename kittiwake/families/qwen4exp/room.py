"""The room that one forward works in: known before it begins, and had before any state moves."""

from __future__ import annotations

from collections.abc import Sequence

from kittiwake.families.qwen4exp.blocks import all_buffers
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.families.qwen4exp.names import canonical_shapes, is_draft
from kittiwake.families.qwen4exp.row_pool import PLANNING_BYTES, gather_bytes
from kittiwake.families.qwen4exp.sizes import attention_shape
from kittiwake.layers.experts import ROWS_AT_ONCE
from kittiwake.layers.linear import WIDENED, float32_words, padded, tile_values
from kittiwake.ops.block_attention.cpu import room_sizes

KEYS_AT_ONCE = 4096
"""The room for scores grows by the blocks of so many tokens, so that decoding seldom asks for more."""
ROUTED = ("experts.gate_up", "experts.down")
"""Ends of the names of weights that no group of products holds: the experts' kernel has them."""


def product_shapes(g: Geometry) -> set[tuple[int, int]]:
    """(K, N) of every product that goes through a group: not the experts', which have a kernel of their own."""
    no_product = ("conv", "embedding.weight", *ROUTED)
    return {
        (shape[1], shape[0])
        for name, shape in canonical_shapes(g).items()
        if len(shape) == 2 and not is_draft(name) and not name.endswith(no_product)
    }


def workspace_words(g: Geometry, rows: int, keys: int, wanted: int, threads: int, dtype: str) -> dict[str, int]:
    """float32 values by the name of the buffer that has room for them.

    ``keys`` is how much of a text the last row sees, ``wanted`` how many rows have logits; those themselves are left
    out. Weights kept as other than float32 are widened a tile at a time.
    """
    words = {name: padded(rows) * columns for name, columns in all_buffers(g).items()}
    words |= dict.fromkeys(("wanted", "wanted_normed"), padded(wanted) * g.stream_width)
    words["low_alone"] = padded(wanted) * g.stream_rank
    pairs = padded(min(rows, ROWS_AT_ONCE) * g.experts_used)
    words |= {"experts_hidden": pairs * g.expert_width, "experts_out": pairs * g.width}
    if g.has_attention:
        words["rotary"] = 4 * rows * (g.rotary_size // 2)
        sizes = room_sizes(attention_shape(g), rows, -(-keys // KEYS_AT_ONCE) * KEYS_AT_ONCE, threads)
        words |= {name: float32_words(count, kind) for name, (count, kind) in sizes.items()}
    if dtype != "fp32":
        words[WIDENED] = max(tile_values(*shape, threads) for shape in product_shapes(g))
    return words


def workspace_bytes(
    g: Geometry, rows: int, keys: int, threads: int, dtype: str, row_bytes: Sequence[int] | None = None
) -> int:
    """Bytes that a forward of so many rows of one sequence works in, n-gram rows included, logits left out.

    ``keys`` is how much of the text the last of them sees, ``row_bytes`` what a row of each n-gram layer's table takes in
    its file, bfloat16 where it is left out.
    """
    words = sum(workspace_words(g, rows, keys, 1, threads, dtype).values())
    gathers, planning = 0, 0
    for ngram, size in zip(g.ngrams, row_bytes or [2 * g.ngram_row] * len(g.ngrams), strict=True):
        heads = len(ngram.head_sizes)
        gathers += 2 * gather_bytes(rows * heads, padded(rows) * heads, size, g.ngram_row)
        planning = max(planning, PLANNING_BYTES * rows * heads)  # one after another
    return 4 * words + gathers + planning
