"""What a checkpoint's ``config.json`` or GGUF metadata says beside its tensors: checked key by key, epsilons taken.

Sizes are read from the tensors; a key that states one must agree. A key that changes the maths must have the one value
the code implements. Keys that only concern training, other programs or texts are listed. Any other key is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kittiwake.errors import ModelError
from kittiwake.families.rwkv7_names import Layout, Sizes

NORM_EPS = 1e-5
GROUP_NORM_EPS = 64e-5
"""A constant of BlinkDL's files, whatever the head size (rwkv_v7_numpy.py); llama.cpp's too (its rwkv7 graph)."""

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
_HARMLESS = frozenset(
    # how another program computes, saves or was told to load the model
    "attn_mode fuse_norm fuse_cross_entropy fuse_linear_cross_entropy fuse_linear_cross_entropy_loss wkv_implementation "
    "use_cache auto_map _name_or_path name_or_path transformers_version torch_dtype dtype _attn_implementation "
    "_attn_implementation_autoset attn_implementation rwkv7_hf_adapter_layout rwkv7_hf_runtime_version rwkv_source_sha256 "
    "output_attentions output_hidden_states return_dict torchscript is_decoder is_encoder_decoder "
    "chunk_size_feed_forward problem_type id2label label2id task_specific_params tokenizer_class "
    # training
    "initializer_range use_l2warp gradient_checkpointing max_position_embeddings context_length "
    # texts: a tokenizer tells its own ends
    "bos_token_id eos_token_id pad_token_id".split()
)
_RANK_KEYS = {
    "decay_low_rank_dim": "decay",
    "a_low_rank_dim": "iclr",
    "v_low_rank_dim": "value_residual",
    "gate_low_rank_dim": "gate",
}
_NORM_KEYS = ("norm_eps", "layer_norm_epsilon", "layer_norm_eps")

_GGUF_HARMLESS = frozenset(
    {"context_length", "attention.head_count", "attention.head_count_kv", "rope.dimension_count"}
)
_GGUF_RANKS = {"decay": "decay", "iclr": "iclr", "value_residual": "value_residual_mix", "gate": "gate"}


@dataclass(frozen=True)
class Epsilons:
    """The two epsilons and, for each, where it comes from."""

    norm: float
    group_norm: float
    norm_origin: str
    group_norm_origin: str


def read_epsilons(layout: Layout, sizes: Sizes, config: Mapping[str, Any] | None, path: Path) -> Epsilons:
    """Check the settings that came with the tensors and take the epsilons. Raises ModelError naming key and values."""
    if layout.key == "gguf":
        return _read_metadata(sizes, config or {}, path)
    return _read_config(layout, sizes, config, path)


def _read_config(layout: Layout, sizes: Sizes, config: Mapping[str, Any] | None, path: Path) -> Epsilons:
    """The keys of a Hugging Face folder's config.json."""
    found = dict(config or {})
    settings = _Settings(found, f"config.json of {path}")
    settings.check_architectures()
    for key, supported in _SUPPORTED.items():
        settings.expect_one_of(key, supported)
    for key, size in _config_sizes(sizes, found).items():
        settings.expect(key, size)
    settings.check_feed_forward(sizes)
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


def _read_metadata(sizes: Sizes, metadata: Mapping[str, Any], path: Path) -> Epsilons:
    """The ``rwkv7.`` keys of a GGUF file. Others speak of the file, its makers or the tokenizer."""
    found = {key.removeprefix("rwkv7."): value for key, value in metadata.items() if key.startswith("rwkv7.")}
    settings = _Settings(found, f"metadata of {path}", "rwkv7.")
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
    settings.seen |= _GGUF_HARMLESS
    norm, origin = settings.take_epsilon(("attention.layer_norm_epsilon",), NORM_EPS, "metadata")
    group = settings.take_epsilon(
        ("attention.group_norm_epsilon",), GROUP_NORM_EPS, "metadata", "constant of llama.cpp's rwkv7"
    )
    settings.refuse_others()
    return Epsilons(norm, group[0], origin, group[1])


class _Settings:
    """One set of keys and values, ticked off as they are looked at."""

    def __init__(self, found: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.found, self.where, self.prefix = found, where, prefix
        self.seen: set[str] = set()

    def fail(self, key: str, supported: str) -> ModelError:
        """The error for a value that is not implemented or does not agree."""
        return ModelError(f"{self.where}: {self.prefix}{key} is {_shown(self.found[key])}; supported: {supported}")

    def expect_one_of(self, key: str, supported: tuple[Any, ...]) -> None:
        """A value that is absent means what the code does."""
        self.seen.add(key)
        if key in self.found and not any(_is_same(self.found[key], value) for value in supported):
            raise self.fail(key, " or ".join(map(repr, supported)))

    def expect(self, key: str, value: Any) -> None:
        """A stated size must be the tensors'; null states nothing."""
        self.seen.add(key)
        if self.found.get(key) is not None and not _is_same(self.found[key], value):
            raise self.fail(key, f"{_shown(value)}, as the tensors have it")

    def check_architectures(self) -> None:
        """Another head than a language model's on the same tensors is another model."""
        self.seen.add("architectures")
        names = self.found.get("architectures")
        if names is None:
            return
        if not isinstance(names, list) or not all(
            isinstance(n, str) and n.lower() == "rwkv7forcausallm" for n in names
        ):
            raise self.fail("architectures", "['RWKV7ForCausalLM']")

    def check_feed_forward(self, sizes: Sizes) -> None:
        """``intermediate_size``, or without it ``hidden_ratio`` rounded up to a multiple of 32."""
        self.expect("intermediate_size", sizes.ffn)
        self.seen.add("hidden_ratio")
        ratio = self.found.get("hidden_ratio")
        if ratio is None or self.found.get("intermediate_size") is not None:
            return
        is_number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool) and 0 < ratio < 1 << 16
        if not is_number or -(-int(sizes.width * ratio) // 32) * 32 != sizes.ffn:
            raise self.fail("hidden_ratio", f"one that gives a channel mix of {sizes.ffn}, as the tensors have it")

    def take_epsilon(
        self, keys: tuple[str, ...], default: float, place: str, default_origin: str = "default: the file says nothing"
    ) -> tuple[float, str]:
        """(value, origin) of the first key that is there; two that differ are refused."""
        self.seen |= set(keys)
        stated = [key for key in keys if self.found.get(key) is not None]
        for key in stated:
            if not is_epsilon(self.found[key]):
                raise self.fail(key, "a number above 0 and below 1")
            if self.found[key] != self.found[stated[0]]:
                raise self.fail(key, f"{self.found[stated[0]]}, as {self.prefix}{stated[0]} says")
        if not stated:
            return default, default_origin
        return float(self.found[stated[0]]), f"{place}: {self.prefix}{stated[0]}"

    def refuse_others(self) -> None:
        """Whatever was not looked at may change the maths."""
        if unknown := sorted(self.found.keys() - self.seen):
            key = unknown[0]
            raise ModelError(
                f"{self.where} has the unknown key {self.prefix}{key[:100]} = {_shown(self.found[key])}",
                "if it does not change what the model computes, remove it",
            )


def is_epsilon(value: Any) -> bool:
    """Whether a value can be the epsilon of a norm."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 < value < 1


def _is_same(left: Any, right: Any) -> bool:
    """Equal, and True is not 1."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + " ..."
