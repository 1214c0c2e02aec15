"""GGUF files of the architecture "qwen4exp": metadata → geometry, and where each tensor lies.

A converter writes norms as they are multiplied (1 + w), value heads in tiles, the decay rate as -exp(A), experts in
three tensors, and one table of n-grams. Keys and names are those of llama.cpp's converter for the architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kittiwake.checkpoints.reader import TensorInfo, TensorSource
from kittiwake.errors import ModelError
from kittiwake.families.qwen4exp.config import TextSettings
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.families.qwen4exp.names import canonical_shapes
from kittiwake.families.qwen4exp.places import (
    Place,
    grouped_heads,
    less_one,
    log_of_negative,
    plain,
)

ARCHITECTURE = "qwen4exp"
TABLE = "per_layer_token_embd.weight"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_MAX_LAYERS = 1 << 12
_HARMLESS = frozenset(
    # what the file says of itself, and the lengths of keys and values that the tensors tell
    "context_length feed_forward_length rope.dimension_sections ple.image_token_id full_attention_interval".split()
)


def is_ours(source: TensorSource) -> bool:
    """Whether a GGUF file is of this architecture."""
    return source.format == "gguf" and (source.config or {}).get("general.architecture") == ARCHITECTURE


def read_geometry(source: TensorSource) -> tuple[Geometry, bool]:
    """The geometry, and whether the embedding is the head as well. Raises ModelError naming key and values."""
    metadata, infos = source.config or {}, {info.name: info for info in source.infos()}
    prefix = f"{ARCHITECTURE}."
    found = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    settings = TextSettings(found, f"metadata of {source.path}", prefix)
    drafts = settings.count("nextn_predict_layers", 0, low=0)
    layers = settings.count("block_count") - drafts
    if not 0 < layers <= _MAX_LAYERS:
        raise settings.fail("block_count", f"more than the {drafts} of nextn_predict_layers, and up to {_MAX_LAYERS}")
    width, vocab = settings.count("embedding_length"), _rows(infos, EMBEDDING, source.path)
    settings.expect("vocab_size", vocab)
    attending = _attention_layers(settings, layers, drafts, infos)
    values = _sizes(settings) | _attention(settings, attending) | _delta(settings) | _ngrams(settings, infos)
    values |= {"layers": layers, "width": width, "vocab_size": vocab, "attention_layers": attending}
    values["draft_layers"] = drafts if any(name.startswith(f"blk.{layers}.") for name in infos) else 0
    values["shared_width"] = settings.count("expert_shared_feed_forward_length")
    settings.seen |= _HARMLESS
    settings.expect_one_of("rope.scaling.type", ("none", None))
    settings.refuse_others()
    try:
        return Geometry.from_values(values), HEAD not in infos
    except ModelError as error:
        raise ModelError(f"{settings.where}: {error.message}", error.hint) from error


def _rows(infos: Mapping[str, TensorInfo], name: str, path: Path) -> int:
    if name not in infos or len(infos[name].shape) != 2:
        raise ModelError(f"{path} lacks the matrix {name}, which the vocabulary is sized by")
    return infos[name].shape[0]


def _attention_layers(settings: TextSettings, layers: int, drafts: int, infos: Mapping[str, TensorInfo]) -> list[int]:
    """The layers with queries; where the metadata tells them as well it must agree."""
    attending = [layer for layer in range(layers) if f"blk.{layer}.attn_q.weight" in infos]
    settings.seen |= {"attention.recurrent_layers", "attention.compress_ratios"}
    if (interval := settings.found.get("full_attention_interval")) is not None:
        stated = [layer for layer in range(layers) if type(interval) is int and (layer + 1) % max(interval, 1) == 0]
        if stated != attending:
            raise settings.fail("full_attention_interval", f"one that gives the layers that attend, {attending}")
    recurrent = settings.found.get("attention.recurrent_layers")
    if recurrent is not None and [bool(one) for one in _listed(recurrent)][:layers] != [
        layer not in attending for layer in range(layers)
    ]:
        raise settings.fail("attention.recurrent_layers", f"true but for the layers that attend, {attending}")
    ratios = _listed(settings.found.get("attention.compress_ratios"))
    if len(ratios) not in (layers, layers + drafts):
        raise settings.fail("attention.compress_ratios", f"one number for each of the {layers + drafts} blocks")
    if any(bool(ratio) != (layer in attending) for layer, ratio in enumerate(ratios[:layers])):
        raise settings.fail("attention.compress_ratios", "one above 0 for each layer that attends, 0 for the others")
    return attending


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _sizes(settings: TextSettings) -> dict[str, Any]:
    eps, _ = settings.take_epsilon(("attention.layer_norm_rms_epsilon",), 1e-6, "metadata")
    settings.expect_one_of("expert_weights_norm", (True, None))
    return {
        "streams": settings.count("hyper_connection.count", low=2),
        "stream_rank": settings.count("hyper_connection.low_rank"),
        "experts": settings.count("expert_count"),
        "experts_used": settings.count("expert_used_count"),
        "expert_width": settings.count("expert_feed_forward_length"),
        "renormalises": True,
        "norm_eps": eps,
    }


def _attention(settings: TextSettings, attending: list[int]) -> dict[str, Any]:
    size = settings.count("attention.key_length")
    settings.expect("attention.value_length", size)
    ratios = sorted({ratio for ratio in _listed(settings.found.get("attention.compress_ratios")) if ratio})
    if len(ratios) > 1 or any(type(ratio) is not int for ratio in ratios):
        raise settings.fail("attention.compress_ratios", "one ratio in all layers that attend")
    low = 1 if attending else 0
    return {
        "heads": settings.count("attention.head_count"),
        "kv_heads": settings.count("attention.head_count_kv"),
        "head_size": size,
        "rotary_size": settings.count("rope.dimension_count", size),
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        "index_heads": settings.count("attention.indexer.head_count", 0 if not low else None, low),
        "index_size": settings.count("attention.indexer.key_length", 0 if not low else None, low),
        "index_budget": settings.count("attention.indexer.top_k", 0 if not low else None, low),
        "index_ratio": ratios[0] if ratios else 0,
    }


def _delta(settings: TextSettings) -> dict[str, Any]:
    value_heads, inner = settings.count("ssm.time_step_rank"), settings.count("ssm.inner_size")
    if inner % value_heads:
        raise settings.fail("ssm.inner_size", f"a multiple of the {value_heads} of ssm.time_step_rank")
    return {
        "key_heads": settings.count("ssm.group_count"),
        "value_heads": value_heads,
        "key_size": settings.count("ssm.state_size"),
        "value_size": inner // value_heads,
        "conv_taps": settings.count("ssm.conv_kernel"),
        "gate": "sigmoid",
    }


def _ngrams(settings: TextSettings, infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The n-gram layer: its hash stands in the file, and is used as it stands."""
    layers = _listed(settings.found.get("ple.layers"))
    settings.seen |= {"ple.layers", "ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes"}
    if not layers:
        settings.seen |= {key for key in settings.found if key.startswith("ple.")} | {
            "embedding_length_per_layer_input"
        }
        none = dict.fromkeys(("ngram_size", "ngram_heads", "ngram_row", "ngram_taps", "ngram_end"), 0)
        return none | {"ngrams": ()}
    if len(layers) > 1:
        raise settings.fail("ple.layers", f"one layer: {TABLE} is the table of one")
    ngram = {
        "layer": layers[0],
        "multipliers": _listed(settings.found.get("ple.layer_multipliers")),
        "head_sizes": _listed(settings.found.get("ple.head_vocab_sizes")),
        "rows": _rows(infos, TABLE, Path(settings.where)),
        "parts": 1,
    }
    offsets = [sum(ngram["head_sizes"][:head]) for head in range(len(ngram["head_sizes"]))]
    settings.expect("ple.head_offsets", offsets)
    return {
        "ngram_size": settings.count("ple.ngram_size", low=2),
        "ngram_heads": settings.count("ple.heads_per_ngram"),
        "ngram_row": settings.count("embedding_length_per_layer_input"),
        "ngram_taps": settings.count("ple.conv_kernel"),
        "ngram_end": settings.count("ple.eos_token_id", low=0),
        "ngrams": [ngram],
    }


_MIX_NAMES = ("norm", "down", "up", "inject")
_BLOCK_NAMES = {
    **{f"token_mix.{name}": f"hc_attn_{name}.weight" for name in _MIX_NAMES},
    **{f"channel_mix.{name}": f"hc_ffn_{name}.weight" for name in _MIX_NAMES},
    "experts.router": "ffn_gate_inp.weight",
    "experts.down": "ffn_down_exps.weight",
    "shared.gate": "ffn_gate_shexp.weight",
    "shared.up": "ffn_up_shexp.weight",
    "shared.down": "ffn_down_shexp.weight",
    "shared.share": "ffn_gate_inp_shexp.weight",
    "delta.qkv": "attn_qkv.weight",
    "delta.gate": "attn_gate.weight",
    "delta.decay": "ssm_alpha.weight",
    "delta.beta": "ssm_beta.weight",
    "delta.conv": "ssm_conv1d.weight",
    "delta.rate_log": "ssm_a",
    "delta.decay_bias": "ssm_dt.bias",
    "delta.norm": "ssm_norm.weight",
    "delta.output": "ssm_out.weight",
    "attention.query": "attn_q.weight",
    "attention.key": "attn_k.weight",
    "attention.value": "attn_v.weight",
    "attention.output": "attn_output.weight",
    "attention.query_norm": "attn_q_norm.weight",
    "attention.key_norm": "attn_k_norm.weight",
    "attention.index_query": "indexer.q_proj.weight",
    "attention.index_key": "indexer.k_proj.weight",
    "attention.index_query_norm": "indexer.q_norm.weight",
    "attention.index_key_norm": "indexer.k_norm.weight",
    "ngram.key": "ple_key.weight",
    "ngram.value": "ple_value.weight",
    "ngram.key_norm": "ple_norm_key.weight",
    "ngram.query_norm": "ple_norm_query.weight",
    "ngram.conv_norm": "ple_norm_conv.weight",
    "ngram.conv": "ple_conv1d.weight",
}
_GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_DRAFT_NAMES = {
    "embedding_norm": "nextn.enorm.weight",
    "hidden_norm": "nextn.hnorm.weight",
    **{f"output_mix.{name}": f"nextn.hc_head_{name}.weight" for name in _MIX_NAMES[:3]},
}
_DRAFT_PAIR = "nextn.eh_proj.weight"
"""[embedding half | hidden half] along its columns."""
_PLAIN_NORM = "delta.norm"
"""The one norm that is not kept around zero."""


def gguf_places(g: Geometry, is_tied: bool) -> dict[str, Place]:
    """Our name → place, for every canonical tensor but the table."""
    named = {"embedding.weight": EMBEDDING, "head.weight": EMBEDDING if is_tied else HEAD}
    named |= {f"output_mix.{name}": f"output_hc_{name}.weight" for name in _MIX_NAMES}
    blocks = {f"layers.{layer}.": f"blk.{layer}." for layer in range(g.layers)}
    blocks |= {f"draft.layers.{layer}.": f"blk.{g.layers + layer}." for layer in range(g.draft_layers)}
    for ours, theirs in blocks.items():
        named |= {ours + inner: theirs + name for inner, name in _BLOCK_NAMES.items()}
    named |= {f"draft.{ours}": f"blk.{g.layers}.{theirs}" for ours, theirs in _DRAFT_NAMES.items()}
    places = _joined_places(g, blocks)
    return {
        ours: places.get(ours) or _with_change(g, ours, plain(named[ours], shape))
        for ours, shape in canonical_shapes(g).items()
    }


def _joined_places(g: Geometry, blocks: Mapping[str, str]) -> dict[str, Place]:
    """Ours that are two of theirs, or half of one."""
    halves = ((g.experts, g.expert_width, g.width),) * 2
    places = {
        f"{ours}experts.gate_up": Place((theirs + _GATE_UP[0], theirs + _GATE_UP[1]), halves, axis=1)
        for ours, theirs in blocks.items()
    }
    name, shape, width = f"blk.{g.layers}.{_DRAFT_PAIR}", (g.width, 2 * g.width), g.width
    places["draft.embedding"] = plain(name, shape, lambda tensor: tensor[:, :width])
    places["draft.hidden"] = plain(name, shape, lambda tensor: tensor[:, width:])
    return places


def _with_change(g: Geometry, ours: str, place: Place) -> Place:
    """The place with what has to be undone of the converter's work."""
    inner = ours.split(".", 2)[2] if ours.startswith("layers.") else ours
    if inner in ("delta.qkv", "delta.conv"):
        change = grouped_heads(g.key_heads, g.value_heads, g.value_size, before=2 * g.key_heads * g.key_size)
    elif inner == "delta.gate":
        change = grouped_heads(g.key_heads, g.value_heads, g.value_size)
    elif inner == "delta.output":
        change = grouped_heads(g.key_heads, g.value_heads, g.value_size, axis=1)
    elif inner in ("delta.decay", "delta.beta", "delta.decay_bias"):
        change = grouped_heads(g.key_heads, g.value_heads, 1)
    elif inner == "delta.rate_log":
        regroup = grouped_heads(g.key_heads, g.value_heads, 1)
        return Place(place.names, place.shapes, lambda tensor: regroup(log_of_negative(tensor)))
    elif inner.endswith("norm") and inner != _PLAIN_NORM:
        change = less_one
    else:
        return place
    return Place(place.names, place.shapes, change)
