"""A ``config.json`` → a geometry: every key is used, checked, or known to change nothing; any other is refused by name.

The keys are those of transformers, models/qwen4_exp/configuration_qwen4_exp.py, and so are the values of keys left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kittiwake.errors import ModelError
from kittiwake.families.qwen4exp.geometry import Geometry
from kittiwake.families.qwen4exp.hashing import derive_head_sizes, derive_multipliers, padded_rows
from kittiwake.families.rwkv_settings import HARMLESS_CONFIG, Settings, is_same, shown

OUTER_TYPE, TEXT_TYPE = "qwen4_exp", "qwen4_exp_text"
ARCHITECTURES = ("Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM")
LINEAR, FULL, INDEXED = "linear_attention", "full_attention", "indexed_attention"
HARMLESS_TEXT = HARMLESS_CONFIG | frozenset(
    # training, and how another program runs the model
    "attention_dropout output_router_logits router_aux_loss_coef router_jitter_noise mlp_only_layers "
    "number_of_conv_states pruned_heads tie_encoder_decoder cross_attention_hidden_size add_cross_attention "
    "is_composition remove_invalid_values use_bfloat16 base_model_tp_plan "
    # how the tables are cut into tensors: the tensors tell
    "split_ngram_parts".split()
)
"""Keys that change nothing in what this family computes."""
HARMLESS_OUTER = HARMLESS_CONFIG | frozenset(
    "vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id audio_token_id "
    "language_model_only".split()
)
"""Keys of the outer object that speak of pictures, which are not read, or change nothing."""


class TextSettings(Settings):
    """The keys of a text model's config, taken one by one."""

    def count(self, key: str, default: int | None = None, low: int = 1) -> int:
        """A whole number of at least ``low``; ``default`` (None: the key must be there) where it is left out or null."""
        self.seen.add(key)
        value = self.found.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelError(f"{self.where} lacks the key {self.prefix}{key}", "it is needed to know the model's sizes")
        if type(value) is not int or value < low:
            raise self.fail(key, f"a whole number of at least {low}")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number above 0."""
        self.seen.add(key)
        value = self.found.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.fail(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        self.seen.add(key)
        value = self.found.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def choice(self, key: str, supported: tuple[str, ...], default: str) -> str:
        """One of a few words."""
        self.seen.add(key)
        value = self.found.get(key)
        if value is None:
            return default
        if value not in supported or not isinstance(value, str):
            raise self.fail(key, " or ".join(map(repr, supported)))
        return value


def text_config(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The text model's part of a config.json: nested in ``text_config``, or the whole; None where it is another's."""
    if config is None:
        return None
    kind, nested = config.get("model_type"), config.get("text_config")
    if kind == OUTER_TYPE and isinstance(nested, dict):
        return nested
    return config if kind == TEXT_TYPE else None


def read_geometry(
    config: Mapping[str, Any], path: Path, table_parts: Mapping[int, int], has_draft: bool
) -> tuple[Geometry, bool]:
    """The geometry, and whether the embedding is the head as well.

    ``table_parts`` says in how many tensors the table of each n-gram layer is stored, ``has_draft`` whether tensors of
    the multi-token predictor are there: transformers leaves them out when it saves a model. Raises ModelError naming a
    key, what was found and what is supported.
    """
    where = f"config.json of {path}"
    text = text_config(config)
    if text is None:
        raise ModelError(f"{where} has the model_type {shown(config.get('model_type'))}; supported: {OUTER_TYPE}")
    is_tied = _is_tied(config, text, where)
    settings = TextSettings(text, where, "" if text is config else "text_config.")
    settings.expect_one_of("model_type", (TEXT_TYPE,))
    _check_architectures(settings)
    settings.expect_one_of("hidden_act", ("silu",))
    settings.expect_one_of("attention_bias", (False,))
    settings.expect_one_of("quantization_config", (None,))
    settings.expect_one_of("mamba_ssm_dtype", ("float32", None))
    settings.expect_one_of("tie_word_embeddings", (True, False))
    settings.seen |= HARMLESS_TEXT
    layers = settings.count("num_hidden_layers", 40)
    values = _sizes(settings, layers) | _index_sizes(settings) | _rope(settings) | _ngram_sizes(settings, table_parts)
    drafts = _draft_layers(settings)
    values["draft_layers"] = drafts if has_draft else 0
    settings.refuse_others()
    try:
        return Geometry.from_values(values), is_tied
    except ModelError as error:
        raise ModelError(f"{where}: {error.message}", error.hint) from error


def _check_architectures(settings: Settings) -> None:
    settings.seen.add("architectures")
    names = settings.found.get("architectures")
    if names is not None and (not isinstance(names, list) or not all(name in ARCHITECTURES for name in names)):
        raise settings.fail("architectures", " or ".join(ARCHITECTURES))


def _is_tied(config: Mapping[str, Any], text: Mapping[str, Any], where: str) -> bool:
    """Checks the outer object where there is one; whether embedding and head are one tensor."""
    if text is config:
        return text.get("tie_word_embeddings") is True
    outer = Settings(config, where)
    _check_architectures(outer)
    outer.expect_one_of("tie_word_embeddings", (True, False))
    outer.expect_one_of("quantization_config", (None,))
    outer.seen |= HARMLESS_OUTER | {"model_type", "text_config"}
    outer.refuse_others()
    return config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is True


def _sizes(settings: TextSettings, layers: int) -> dict[str, Any]:
    """Widths, heads and experts; the defaults are transformers'."""
    settings.seen.add("rms_norm_eps")
    eps, _ = settings.take_epsilon(("rms_norm_eps",), 1e-6, "config.json")
    gate_default = settings.choice("hidden_act", ("silu",), "silu")
    return {
        "layers": layers,
        "width": settings.count("hidden_size", 2048),
        "vocab_size": settings.count("vocab_size", 248320),
        "attention_layers": _attention_layers(settings, layers),
        "heads": settings.count("num_attention_heads", 16),
        "kv_heads": settings.count("num_key_value_heads", 2),
        "head_size": settings.count("head_dim", 256),
        "key_heads": settings.count("linear_num_key_heads", 16),
        "value_heads": settings.count("linear_num_value_heads", 32),
        "key_size": settings.count("linear_key_head_dim", 128),
        "value_size": settings.count("linear_value_head_dim", 128),
        "conv_taps": settings.count("linear_conv_kernel_dim", 4),
        "gate": settings.choice("output_gate_type", ("sigmoid", "silu"), gate_default),
        "streams": settings.count("hc_count", 4, low=2),
        "stream_rank": settings.count("hc_lowrank", 320),
        "experts": settings.count("num_experts", 512),
        "experts_used": settings.count("num_experts_per_tok", 10),
        "expert_width": settings.count("moe_intermediate_size", 512),
        "shared_width": settings.count("shared_expert_intermediate_size", 512),
        "renormalises": settings.flag("norm_topk_prob", True),
        "norm_eps": eps,
    }


def _attention_layers(settings: TextSettings, layers: int) -> list[int]:
    """Indexes of the layers that attend: as listed, or every ``full_attention_interval``-th."""
    interval = settings.count("full_attention_interval", 4)
    settings.seen.add("layer_types")
    kinds = settings.found.get("layer_types")
    if kinds is None:
        return [layer for layer in range(layers) if (layer + 1) % interval == 0]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise settings.fail("layer_types", f"one entry for each of the {layers} layers")
    if unknown := [kind for kind in kinds if kind not in (LINEAR, FULL, INDEXED)]:
        raise ModelError(
            f"{settings.where}: {settings.prefix}layer_types holds {shown(unknown[0])}; "
            f"supported: {LINEAR}, {FULL} and {INDEXED}"
        )
    return [layer for layer, kind in enumerate(kinds) if kind != LINEAR]


def _index_sizes(settings: TextSettings) -> dict[str, Any]:
    """The block selector's sizes; a model without attention layers need not state them."""
    keys = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    names = ("index_heads", "index_size", "index_budget", "index_ratio")
    settings.expect_one_of("indexer_kv_heads", (1, None))
    values = {name: settings.count(key, 0) for name, key in zip(names, keys, strict=True)}
    stated = [name for name, value in values.items() if value]
    if stated and len(stated) != len(names):
        missing = next(key for key, name in zip(keys, names, strict=True) if not values[name])
        raise ModelError(f"{settings.where} lacks the key {settings.prefix}{missing}", "the block selector needs it")
    return values


def _rope(settings: TextSettings) -> dict[str, Any]:
    """Rotation: the plain kind, of the first part of each head."""
    settings.seen |= {"rope_parameters", "rope_theta", "partial_rotary_factor", "rope_scaling"}
    stated = settings.found.get("rope_parameters")
    if stated is not None and not isinstance(stated, dict):
        raise settings.fail("rope_parameters", "an object")
    rope = TextSettings(stated or {}, settings.where, f"{settings.prefix}rope_parameters.")
    rope.expect_one_of("rope_type", ("default", None))
    rope.expect_one_of("type", ("default", None))
    # sections share the pairs out over time, height and width of a picture; of a text all three are its position
    rope.expect_one_of("mrope_interleaved", (True, False, None))
    rope.seen.add("mrope_section")
    theta = rope.number("rope_theta", settings.number("rope_theta", 10000.0))
    factor = rope.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0))
    rope.refuse_others()
    settings.expect_one_of("rope_scaling", (None, stated))
    if factor > 1:
        raise ModelError(f"{rope.where}: {rope.prefix}partial_rotary_factor is {factor:g}; supported: at most 1")
    return {"rope_theta": theta, "rotary_size": int(settings.count("head_dim", 256) * factor)}


def _ngram_sizes(settings: TextSettings, table_parts: Mapping[int, int]) -> dict[str, Any]:
    """The n-gram layers, their hashes derived."""
    settings.seen |= {"ple_layer_ids", "eos_token_id"}
    layers = settings.found.get("ple_layer_ids") or []
    if not isinstance(layers, list) or not all(type(layer) is int and layer >= 1 for layer in layers):
        raise settings.fail("ple_layer_ids", "a list of layers, the first being 1")
    size, heads = settings.count("ngram_size", 3, low=2), settings.count("heads_per_ngram", 8)
    width = settings.count("ple_embed_dim", settings.count("hidden_size", 2048))
    base = settings.count("ngram_vocab_size_base", 20_000_000)
    divisor = settings.count("make_ngram_vocab_size_divisible_by", 128)
    seed, taps = settings.count("seed", 1234, low=0), settings.count("ple_conv_kernel_size", 4)
    if not layers:
        none = dict.fromkeys(("ngram_size", "ngram_heads", "ngram_row", "ngram_taps", "ngram_end"), 0)
        return none | {"ngrams": ()}
    every = (size - 1) * heads
    if width % every:
        raise ModelError(
            f"{settings.where}: {settings.prefix}ple_embed_dim is {width}; supported: a multiple of the "
            f"{every} rows that a token reads"
        )
    vocab = settings.count("vocab_size", 248320)
    ngrams = []
    for rank, layer in enumerate(sorted(set(layers))):
        sizes = derive_head_sizes(base, every, rank)
        ngrams.append(
            {
                "layer": layer - 1,
                "multipliers": derive_multipliers(vocab, size, rank, seed),
                "head_sizes": sizes,
                "rows": padded_rows(sum(sizes), divisor),
                "parts": table_parts.get(layer - 1, 1),
            }
        )
    return {
        "ngram_size": size,
        "ngram_heads": heads,
        "ngram_row": width // every,
        "ngram_taps": taps,
        "ngram_end": _ngram_end(settings),
        "ngrams": ngrams,
    }


def _ngram_end(settings: TextSettings) -> int:
    """The token that n-grams do not reach across: the first of ``eos_token_id``."""
    value = settings.found.get("eos_token_id")
    if value is None:
        raise ModelError(f"{settings.where} lacks the key {settings.prefix}eos_token_id", "n-grams end there")
    first = value[0] if isinstance(value, list) and value else value
    if type(first) is not int:
        raise settings.fail("eos_token_id", "a token id, or a list that begins with one")
    return first


def _draft_layers(settings: TextSettings) -> int:
    """How many layers the multi-token predictor has; its own keys must say what the code would name."""
    settings.expect_one_of("mtp_use_dedicated_embeddings", (False, None))
    count = settings.count("mtp_num_hidden_layers", 0, low=0)
    settings.seen.add("mtp")
    stated = settings.found.get("mtp")
    if stated is None:
        return count
    if not isinstance(stated, dict):
        raise settings.fail("mtp", "an object")
    inner = TextSettings(stated, settings.where, f"{settings.prefix}mtp.")
    inner.expect_one_of("layer_types", ([FULL] * count, None))
    inner.expect_one_of("num_hidden_layers", (count, None))
    inner.expect_one_of("hybrid", (True, False, None))
    inner.number("rope_theta", 10000.0)
    inner.refuse_others()
    return count


def end_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that the config says end a text: all of ``eos_token_id``."""
    text = text_config(config) or {}
    value = text.get("eos_token_id", config.get("eos_token_id"))
    found = value if isinstance(value, list) else [value]
    return tuple(one for one in found if type(one) is int and not is_same(one, -1))
