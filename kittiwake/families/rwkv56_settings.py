"""What comes beside the tensors of an RWKV-5 or 6 in a ``config.json`` or GGUF metadata: checked key by key, epsilons taken.

Sizes are read from the tensors; a key that states one must agree. Any key that is not known is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kittiwake.config import is_number
from kittiwake.families.rwkv_names import MatrixSizes
from kittiwake.families.rwkv_settings import (
    GROUP_NORM_EPS,
    HARMLESS_CONFIG,
    HARMLESS_GGUF,
    NORM_EPS,
    Epsilons,
    Settings,
)

DIVIDED_EPS = 1e-5
"""The epsilon of the group norm of outputs that are divided by ``head_size_divisor`` first."""
MAX_HALVINGS = 64
_NORM_KEYS = ("layer_norm_epsilon", "layer_norm_eps", "norm_eps")
_GROUP_NORM_KEYS = ("group_norm_epsilon", "group_norm_eps")


def read_config(
    version: str, sizes: MatrixSizes, layout: str, config: Mapping[str, Any] | None, path: Path
) -> Epsilons:
    """Check the keys of a folder's config.json and take the epsilons; ``version`` is "5.0", "5.1", "5.2" or "6.0".

    Raises ModelError naming key and values.
    """
    found = dict(config or {})
    settings = Settings(found, f"config.json of {path}")
    number = version[0]
    settings.check_architectures(f"Rwkv{number}ForCausalLM")
    settings.expect_one_of("model_type", (f"rwkv{number}",))
    settings.expect_one_of("model_version", (version.replace(".", "_"), None))
    settings.expect_one_of("tie_word_embeddings", (False,))
    settings.expect_one_of("quantization_config", (None,))
    expected: dict[str, Any] = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.width,
        "attention_hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "head_size": sizes.head_size,
        "intermediate_size": sizes.ffn,
    }
    if found.get("head_size") is None:  # else nobody looks at it, and published folders give the head size there
        expected["num_attention_heads"] = sizes.heads
    for key, size in expected.items():
        settings.expect(key, size)
    # transformers halves the stream when it runs the model, the stored weights are whole: see rwkv_rescale.py
    _expect_layers(settings, "rescale_every", sizes.layers)
    settings.seen |= HARMLESS_CONFIG | {"num_attention_heads"}
    norm, origin = settings.take_epsilon(_NORM_KEYS, NORM_EPS, "config.json")
    group, group_origin = GROUP_NORM_EPS, f"constant of {layout} files"
    if (divisor := _divisor(settings)) is not None:
        group, group_origin = DIVIDED_EPS * divisor**2, f"config.json: {DIVIDED_EPS} × head_size_divisor²"
    group, group_origin = settings.take_epsilon(_GROUP_NORM_KEYS, group, "config.json", group_origin)
    settings.refuse_others()
    return Epsilons(norm, group, origin, group_origin)


def _expect_layers(settings: Settings, key: str, layers: int) -> None:
    """After how many layers the stream is halved: a whole number, and not so few that the scale leaves float32."""
    settings.seen.add(key)
    every = settings.found.get(key)
    if every is None:
        return
    is_count = isinstance(every, int) and not isinstance(every, bool) and every >= 0
    if not is_count or (every and layers // every > MAX_HALVINGS):
        raise settings.fail(key, "a whole number of layers, or 0")


def _divisor(settings: Settings) -> float | None:
    """``head_size_divisor``, by which the code of the folders divides what goes into the group norm."""
    key = "head_size_divisor"
    settings.seen.add(key)
    value = settings.found.get(key)
    if value is None:
        return None
    if not is_number(value) or not 0 < value <= 256:
        raise settings.fail(key, "a number above 0 and up to 256")
    return float(value)


def read_metadata(sizes: MatrixSizes, ranks: Mapping[str, int], metadata: Mapping[str, Any], path: Path) -> Epsilons:
    """Check the ``rwkv6.`` keys of a GGUF file; others speak of the file, its makers or the tokenizer.

    ``ranks`` are the low-rank pairs' by key. Raises ModelError naming key and values.
    """
    prefix = "rwkv6."
    found = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    settings = Settings(found, f"metadata of {path}", prefix)
    expected: dict[str, Any] = {
        "vocab_size": sizes.vocab,
        "embedding_length": sizes.width,
        "block_count": sizes.layers,
        "feed_forward_length": sizes.ffn,
        "wkv.head_size": sizes.head_size,
        "token_shift_count": 2,
        **ranks,
    }
    for key, value in expected.items():
        settings.expect(key, value)
    _expect_layers(settings, "rescale_every_n_layers", sizes.layers)
    settings.seen |= HARMLESS_GGUF
    norm, origin = settings.take_epsilon(("attention.layer_norm_epsilon",), NORM_EPS, "metadata")
    group, group_origin = settings.take_epsilon(
        ("attention.group_norm_epsilon",), GROUP_NORM_EPS, "metadata", "constant of llama.cpp's rwkv6"
    )
    settings.refuse_others()
    return Epsilons(norm, group, origin, group_origin)
