"""What a checkpoint's ``config.json`` or GGUF metadata says beside its tensors: checked key by key, epsilons taken.

Sizes are read from the tensors; a key that states one must agree. A key that changes the maths must have the one value
the code implements. Keys that only concern training, other programs or texts are listed. Any other key is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kittiwake.config import is_number
from kittiwake.families.rwkv7_names import Layout, Sizes
from kittiwake.families.rwkv_settings import (
    GROUP_NORM_EPS,
    HARMLESS_CONFIG,
    HARMLESS_GGUF,
    NORM_EPS,
    Epsilons,
    Settings,
)

_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("rwkv7", "rwkv7_fla"),
    "hidden_act": ("sqrelu",),
    "norm_first": (True,),
    "norm_bias": (True,),
    "elementwise_affine": (True,),
    "attn": (None,),
    "tie_word_embeddings": (False,),
    "embedding_layer_norm_fused": (False,),
    "wkv_state_dtype": ("float32",),
    "wkv_version": (7,),
    "wkv_has_gate": (True,),
    "rescale_every": (None, 0),
    "quantization_config": (None,),
}
_HARMLESS = HARMLESS_CONFIG | frozenset(
    "attn_mode fuse_norm fuse_cross_entropy fuse_linear_cross_entropy fuse_linear_cross_entropy_loss wkv_implementation "
    "rwkv7_hf_adapter_layout rwkv7_hf_runtime_version rwkv_source_sha256 use_l2warp".split()
)
_RANK_KEYS = {
    "decay_low_rank_dim": "decay",
    "a_low_rank_dim": "iclr",
    "v_low_rank_dim": "value_residual",
    "gate_low_rank_dim": "gate",
}
_NORM_KEYS = ("norm_eps", "layer_norm_epsilon", "layer_norm_eps")

_GGUF_RANKS = {"decay": "decay", "iclr": "iclr", "value_residual": "value_residual_mix", "gate": "gate"}


def read_epsilons(layout: Layout, sizes: Sizes, config: Mapping[str, Any] | None, path: Path) -> Epsilons:
    """Check the settings that came with the tensors and take the epsilons. Raises ModelError naming key and values."""
    if layout.key == "gguf":
        return _read_metadata(sizes, config or {}, path)
    return _read_config(layout, sizes, config, path)


def _read_config(layout: Layout, sizes: Sizes, config: Mapping[str, Any] | None, path: Path) -> Epsilons:
    """The keys of a Hugging Face folder's config.json."""
    found = dict(config or {})
    settings = Settings(found, f"config.json of {path}")
    settings.check_architectures("RWKV7ForCausalLM")
    for key, supported in _SUPPORTED.items():
        settings.expect_one_of(key, supported)
    for key, size in _config_sizes(sizes, found).items():
        settings.expect(key, size)
    _check_feed_forward(settings, sizes)
    settings.seen |= _HARMLESS | {"num_heads", "num_attention_heads"}
    norm, origin = settings.take_epsilon(_NORM_KEYS, NORM_EPS, "config.json")
    group = (GROUP_NORM_EPS, f"constant of {layout.key} files")
    if layout.is_head_eps_scaled:
        group = (sizes.head_size * norm, f"head size {sizes.head_size} × {origin}")
    group = settings.take_epsilon(("group_norm_epsilon", "group_norm_eps"), group[0], "config.json", group[1])
    settings.refuse_others()
    return Epsilons(norm, group[0], origin, group[1])


def _config_sizes(sizes: Sizes, found: Mapping[str, Any]) -> dict[str, Any]:
    """Key → the value that agrees with the tensors."""
    wanted: dict[str, Any] = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.width,
        "attention_hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "head_dim": sizes.head_size,
        "head_size": sizes.head_size,
    }
    if found.get("head_dim") is None and found.get("head_size") is None:  # else other programs do not look at these
        wanted |= {"num_heads": sizes.heads, "num_attention_heads": sizes.heads}
    for key, rank in _RANK_KEYS.items():
        if rank != "value_residual" or sizes.layers > 1:
            wanted[key] = getattr(sizes, f"{rank}_rank")
        else:
            wanted[key] = found.get(key)
    is_list = isinstance(found.get("value_dim"), list)
    wanted["value_dim"] = [sizes.width] * sizes.layers if is_list else sizes.width
    return wanted


def _check_feed_forward(settings: Settings, sizes: Sizes) -> None:
    """``intermediate_size``, or without it ``hidden_ratio`` rounded up to a multiple of 32."""
    settings.expect("intermediate_size", sizes.ffn)
    settings.seen.add("hidden_ratio")
    ratio = settings.found.get("hidden_ratio")
    if ratio is None or settings.found.get("intermediate_size") is not None:
        return
    if not is_number(ratio) or not 0 < ratio < 1 << 16 or -(-int(sizes.width * ratio) // 32) * 32 != sizes.ffn:
        raise settings.fail("hidden_ratio", f"one that gives a channel mix of {sizes.ffn}, as the tensors have it")


def _read_metadata(sizes: Sizes, metadata: Mapping[str, Any], path: Path) -> Epsilons:
    """The ``rwkv7.`` keys of a GGUF file. Others speak of the file, its makers or the tokenizer."""
    found = {key.removeprefix("rwkv7."): value for key, value in metadata.items() if key.startswith("rwkv7.")}
    settings = Settings(found, f"metadata of {path}", "rwkv7.")
    wanted: dict[str, Any] = {
        "vocab_size": sizes.vocab,
        "embedding_length": sizes.width,
        "block_count": sizes.layers,
        "feed_forward_length": sizes.ffn,
        "wkv.head_size": sizes.head_size,
        "token_shift_count": 2,
        "rescale_every_n_layers": 0,
    }
    for rank, name in _GGUF_RANKS.items():
        key = f"attention.{name}_lora_rank"
        is_told = rank != "value_residual" or sizes.layers > 1
        wanted[key] = getattr(sizes, f"{rank}_rank") if is_told else found.get(key)
    for key, value in wanted.items():
        settings.expect(key, value)
    settings.seen |= HARMLESS_GGUF
    norm, origin = settings.take_epsilon(("attention.layer_norm_epsilon",), NORM_EPS, "metadata")
    group = settings.take_epsilon(
        ("attention.group_norm_epsilon",), GROUP_NORM_EPS, "metadata", "constant of llama.cpp's rwkv7"
    )
    settings.refuse_others()
    return Epsilons(norm, group[0], origin, group[1])
