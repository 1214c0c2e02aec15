"""Canonical tensors: their names and shapes; and where an HF folder keeps them.

Ours follow what the tensors do, and keep the values that an HF folder stores: norms around zero, value heads beside
their key head, the logarithm of the decay rate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.errors import ModelError
from kittiwake.families.canonical import listed
from kittiwake.families.qwen4exp.geometry import Geometry, Ngram
from kittiwake.families.qwen4exp.places import Place, Shape, plain

Shapes = dict[str, Shape]
PREFIXES = ("model.language_model.", "model.")
"""What the names of a text model begin with: beside a vision model, and alone."""
HEAD = "lm_head.weight"
UNUSED = ("model.visual.", "visual.")
"""Beginnings of names that belong to the part that reads pictures."""
DRAFT = "mtp."
_TABLE = re.compile(r"layers\.(\d{1,6})\.ple\.ple_embedding\.ngram_embedding\.(?:shard_(\d{1,6})(?:\.weight)?|weight)")


def canonical_shapes(g: Geometry) -> Shapes:
    """Every canonical tensor but the tables, products as [N, K]."""
    shapes: Shapes = {"embedding.weight": (g.vocab_size, g.width)}
    for layer in range(g.layers):
        block = _attention(g) if layer in g.attention_layers else _delta(g)
        if any(ngram.layer == layer for ngram in g.ngrams):
            block = _ngram(g) | block
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in (block | _around(g)).items()}
    shapes |= {f"output_mix.{name}": shape for name, shape in _mix(g, has_inject=False).items()}
    shapes["head.weight"] = (g.vocab_size, g.width)
    if g.draft_layers:
        shapes |= {f"draft.{name}": shape for name, shape in _draft(g).items()}
    return shapes


def is_draft(name: str) -> bool:
    """Whether a canonical tensor is one of the layers that draft, which no forward reads."""
    return name.startswith("draft.")


def table_names(ngram: Ngram) -> list[str]:
    """Canonical names of the parts of a table, in order."""
    return [f"layers.{ngram.layer}.ngram.table.{part:05}" for part in range(ngram.parts)]


def _mix(g: Geometry, *, has_inject: bool = True) -> Shapes:
    shapes: Shapes = {"norm": (g.stream_width,), "down": (g.stream_rank, g.stream_width)}
    shapes["up"] = (g.stream_width, g.stream_rank)
    return shapes | ({"inject": (g.streams, g.stream_width)} if has_inject else {})


def _around(g: Geometry) -> Shapes:
    """What every layer has: two mixes of streams and the experts."""
    shapes = {f"{mix}.{name}": shape for mix in ("token_mix", "channel_mix") for name, shape in _mix(g).items()}
    shapes |= {
        "experts.router": (g.experts, g.width),
        "experts.gate_up": (g.experts, 2 * g.expert_width, g.width),
        "experts.down": (g.experts, g.width, g.expert_width),
        "shared.gate": (g.shared_width, g.width),
        "shared.up": (g.shared_width, g.width),
        "shared.down": (g.width, g.shared_width),
        "shared.share": (1, g.width),
    }
    return shapes


def _delta(g: Geometry) -> Shapes:
    shapes: Shapes = {
        "qkv": (g.conv_width, g.width),
        "gate": (g.value_width, g.width),
        "decay": (g.value_heads, g.width),
        "beta": (g.value_heads, g.width),
        "conv": (g.conv_width, g.conv_taps),
        "rate_log": (g.value_heads,),
        "decay_bias": (g.value_heads,),
        "norm": (g.value_size,),
        "output": (g.width, g.value_width),
    }
    return {f"delta.{name}": shape for name, shape in shapes.items()}


def _attention(g: Geometry) -> Shapes:
    shapes: Shapes = {
        "query": (g.heads * 2 * g.head_size, g.width),
        "key": (g.kv_heads * g.head_size, g.width),
        "value": (g.kv_heads * g.head_size, g.width),
        "output": (g.width, g.heads * g.head_size),
        "query_norm": (g.head_size,),
        "key_norm": (g.head_size,),
        "index_query": (g.index_heads * g.index_size, g.width),
        "index_key": (g.index_size, g.width),
        "index_query_norm": (g.index_size,),
        "index_key_norm": (g.index_size,),
    }
    return {f"attention.{name}": shape for name, shape in shapes.items()}


def _ngram(g: Geometry) -> Shapes:
    shapes: Shapes = {
        "key": (g.stream_width, g.ngram_width),
        "value": (g.width, g.ngram_width),
        "conv": (g.stream_width, g.ngram_taps),
    }
    shapes |= {f"{name}_norm": (g.stream_width,) for name in ("key", "query", "conv")}
    return {f"ngram.{name}": shape for name, shape in shapes.items()}


def _draft(g: Geometry) -> Shapes:
    """The multi-token predictor."""
    shapes: Shapes = {
        "embedding": (g.width, g.width),
        "hidden": (g.width, g.width),
        "embedding_norm": (g.width,),
        "hidden_norm": (g.stream_width,),
    }
    shapes |= {f"output_mix.{name}": shape for name, shape in _mix(g, has_inject=False).items()}
    for layer in range(g.draft_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in (_attention(g) | _around(g)).items()}
    return shapes


# HF folders: our name within a layer → theirs

_MIX_NAMES = {
    "norm": "hc_norm.weight",
    "down": "input_mix_weight_down.weight",
    "up": "input_mix_weight_up.weight",
    "inject": "block_inject_weight.weight",
}
_BLOCK_NAMES = {
    **{f"token_mix.{ours}": f"attn_hyper_connection.{theirs}" for ours, theirs in _MIX_NAMES.items()},
    **{f"channel_mix.{ours}": f"mlp_hyper_connection.{theirs}" for ours, theirs in _MIX_NAMES.items()},
    "experts.router": "mlp.gate.weight",
    "experts.gate_up": "mlp.experts.gate_up_proj",
    "experts.down": "mlp.experts.down_proj",
    "shared.gate": "mlp.shared_expert.gate_proj.weight",
    "shared.up": "mlp.shared_expert.up_proj.weight",
    "shared.down": "mlp.shared_expert.down_proj.weight",
    "shared.share": "mlp.shared_expert_gate.weight",
    "delta.qkv": "linear_attn.in_proj_qkv.weight",
    "delta.gate": "linear_attn.in_proj_z.weight",
    "delta.decay": "linear_attn.in_proj_a.weight",
    "delta.beta": "linear_attn.in_proj_b.weight",
    "delta.conv": "linear_attn.conv1d.weight",
    "delta.rate_log": "linear_attn.A_log",
    "delta.decay_bias": "linear_attn.dt_bias",
    "delta.norm": "linear_attn.norm.weight",
    "delta.output": "linear_attn.out_proj.weight",
    "attention.query": "self_attn.q_proj.weight",
    "attention.key": "self_attn.k_proj.weight",
    "attention.value": "self_attn.v_proj.weight",
    "attention.output": "self_attn.o_proj.weight",
    "attention.query_norm": "self_attn.q_norm.weight",
    "attention.key_norm": "self_attn.k_norm.weight",
    "attention.index_query_norm": "self_attn.indexer.q_layernorm.weight",
    "attention.index_key_norm": "self_attn.indexer.k_layernorm.weight",
    "ngram.key": "ple.key_proj.weight",
    "ngram.value": "ple.value_proj.weight",
    "ngram.key_norm": "ple.norm_key.weight",
    "ngram.query_norm": "ple.norm_query.weight",
    "ngram.conv_norm": "ple.norm_conv.weight",
    "ngram.conv": "ple.conv1d.weight",
}
_INDEX = "self_attn.indexer.index_qk_proj.weight"
"""Queries and the key of the block selector in one tensor."""
_DRAFT_NAMES = {
    "embedding": "fc_embedding.weight",
    "hidden": "fc_hidden.weight",
    "embedding_norm": "pre_fc_norm_embedding.weight",
    "hidden_norm": "pre_fc_norm_hidden.weight",
}
_MIXER = "hyper_connection_mixer."
HASH_BUFFERS = {
    "layer_multipliers": "multipliers",
    "ngram_heads_vocab_sizes": "head_sizes",
    "ngram_heads_offsets": "offsets",
}
"""Tensors of whole numbers that repeat what the config tells, and the attribute of ``Ngram`` they repeat."""


def find_prefix(names: Iterable[str]) -> str | None:
    """What the names of an HF folder's text model begin with, or None where they are not this family's."""
    found = set(names)
    for prefix in PREFIXES:
        if f"{prefix}{_MIXER}{_MIX_NAMES['norm']}" in found:
            return prefix
    return None


def stored_tables(names: Iterable[str], prefix: str) -> dict[int, list[str]]:
    """Layer → names of the parts of its table, in order. Raises ModelError where a part is left out."""
    parts: dict[int, dict[int, str]] = {}
    for name in names:
        if name.startswith(prefix) and (match := _TABLE.fullmatch(name.removeprefix(prefix))):
            parts.setdefault(int(match[1]), {})[int(match[2] or 0)] = name
    for layer, numbered in parts.items():
        if missing := sorted(set(range(max(numbered) + 1)) - set(numbered)):
            raise ModelError(f"the n-gram table of layer {layer} lacks its part {missing[0]}")
    return {layer: [numbered[part] for part in sorted(numbered)] for layer, numbered in parts.items()}


def hash_buffers(ngram: Ngram, prefix: str) -> dict[str, tuple[int, ...]]:
    """Names of an n-gram layer's whole numbers, and what they must hold."""
    start = f"{prefix}layers.{ngram.layer}.ple.ple_embedding."
    return {start + name: getattr(ngram, attribute) for name, attribute in HASH_BUFFERS.items()}


def hf_places(g: Geometry, prefix: str, is_tied: bool) -> dict[str, Place]:
    """Our name → place in an HF folder, for every canonical tensor but the tables."""
    shapes = canonical_shapes(g)
    embedding = f"{prefix}embed_tokens.weight"
    named = {"embedding.weight": embedding, "head.weight": embedding if is_tied else HEAD}
    named |= {f"output_mix.{ours}": f"{prefix}{_MIXER}{theirs}" for ours, theirs in _MIX_NAMES.items()}
    named |= {f"draft.output_mix.{ours}": f"{DRAFT}{_MIXER}{theirs}" for ours, theirs in _MIX_NAMES.items()}
    named |= {f"draft.{ours}": f"{DRAFT}{theirs}" for ours, theirs in _DRAFT_NAMES.items()}
    blocks = {f"layers.{layer}.": f"{prefix}layers.{layer}." for layer in range(g.layers)}
    blocks |= {f"draft.layers.{layer}.": f"{DRAFT}layers.{layer}." for layer in range(g.draft_layers)}
    places: dict[str, Place] = {}
    for ours, theirs in blocks.items():
        named |= {ours + inner: theirs + name for inner, name in _BLOCK_NAMES.items()}
        if f"{ours}attention.index_query" in shapes:
            places |= _index_places(g, ours, theirs)
    return {ours: places.get(ours) or plain(named[ours], shape) for ours, shape in shapes.items()}


def _index_places(g: Geometry, ours: str, theirs: str) -> dict[str, Place]:
    """Queries come first in the tensor that holds both."""
    queries, shape = g.index_heads * g.index_size, ((g.index_heads + 1) * g.index_size, g.width)
    name = theirs + _INDEX
    return {
        f"{ours}attention.index_query": plain(name, shape, lambda tensor: tensor[:queries]),
        f"{ours}attention.index_key": plain(name, shape, lambda tensor: tensor[queries:]),
    }


def check_names(source: TensorSource, places: Mapping[str, Place], others: Iterable[str]) -> None:
    """Raise ModelError for a tensor that no place and none of ``others`` names, and for what a place lacks."""
    infos = {info.name: info for info in source.infos()}
    expected = {name for place in places.values() for name in place.names} | set(others)
    unknown = sorted(name for name in infos.keys() - expected if not name.startswith(UNUSED))
    if unknown:
        raise ModelError(f"{source.path} holds tensors this family does not have: {listed(unknown)}")
    for place in places.values():
        place.check(infos, source)
