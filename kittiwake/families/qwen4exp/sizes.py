"""Sizes that follow from the geometry, whatever a layer runs on: columns of products, and the shape of an attention."""

from __future__ import annotations

from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.ops.block_attention import AttentionShape


def delta_sizes(g: Geometry) -> dict[str, int]:
    """Columns of each product that reads a DeltaNet's input, in order."""
    return {"qkv": g.conv_width, "gate": g.value_width, "decay": g.value_heads, "beta": g.value_heads}


def attention_sizes(g: Geometry) -> dict[str, int]:
    """Columns of each product that reads an attention's input, in order."""
    kv = g.kv_heads * g.head_size
    return {
        "query": 2 * g.heads * g.head_size,
        "key": kv,
        "value": kv,
        "index_query": g.index_heads * g.index_size,
        "index_key": g.index_size,
    }


def expert_sizes(g: Geometry) -> dict[str, int]:
    """Columns of each product that reads the experts' input, in order."""
    return {"experts.router": g.experts, "shared.gate": g.shared_width, "shared.up": g.shared_width, "shared.share": 1}


def attention_shape(g: Geometry) -> AttentionShape:
    """The sizes of every attention layer."""
    return AttentionShape(
        g.heads, g.kv_heads, g.head_size, g.rotary_size, g.index_heads, g.index_size, g.index_ratio, g.index_budget
    )
