"""What a checkpoint's ``config.json`` says beside an RWKV-4's tensors: checked key by key.

Source: transformers, models/rwkv/configuration_rwkv.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kittiwake.families.rwkv4_names import Sizes
from kittiwake.families.rwkv_settings import HARMLESS_CONFIG, NORM_EPS, Settings

_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("rwkv",),
    "tie_word_embeddings": (False, True),
    "quantization_config": (None,),
}
_HARMLESS = HARMLESS_CONFIG - {"bos_token_id", "eos_token_id", "pad_token_id"}
_NORM_KEYS = ("layer_norm_epsilon", "layer_norm_eps", "norm_eps")


@dataclass(frozen=True)
class Read:
    """What the settings said."""

    norm_eps: float = NORM_EPS
    norm_origin: str = "default: the file says nothing"
    rescale_every: int = 0
    """After how many layers another program halves the residual stream; 0 never."""
    is_tied: bool = False
    """The head is the embedding."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a text."""


def read_settings(sizes: Sizes, config: Mapping[str, Any] | None, path: Path) -> Read:
    """Check the keys of a config.json. Raises ModelError naming key, value and what is supported."""
    if config is None:
        return Read()
    settings = Settings(config, f"config.json of {path}")
    settings.check_architectures("RwkvForCausalLM")
    for key, supported in _SUPPORTED.items():
        settings.expect_one_of(key, supported)
    wanted = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "attention_hidden_size": sizes.attention,
        "intermediate_size": sizes.ffn,
    }
    for key, size in wanted.items():
        settings.expect(key, size)
    settings.seen |= _HARMLESS
    norm_eps, origin = settings.take_epsilon(_NORM_KEYS, NORM_EPS, "config.json")
    for key in ("bos_token_id", "pad_token_id"):
        _take_ids(settings, key, sizes.vocab)
    read = Read(
        norm_eps,
        origin,
        rescale_every=_take_rescale(settings),
        is_tied=settings.found.get("tie_word_embeddings") is True,
        end_ids=_take_ids(settings, "eos_token_id", sizes.vocab),
    )
    settings.refuse_others()
    return read


def _take_rescale(settings: Settings) -> int:
    """0 and null: never."""
    settings.seen.add("rescale_every")
    value = settings.found.get("rescale_every")
    if value is not None and (type(value) is not int or value < 0):
        raise settings.fail("rescale_every", "a whole number of at least 0, or null")
    return value or 0


def _take_ids(settings: Settings, key: str, vocab: int) -> tuple[int, ...]:
    """One token id, several, or null; an id of 0 is an id."""
    settings.seen.add(key)
    value = settings.found.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocab for token in ids):
        raise settings.fail(key, f"a token id from 0 to {vocab - 1}, a list of such, or null")
    return tuple(dict.fromkeys(ids))
