"""A tokenizer as a converter writes it into a GGUF file."""

from __future__ import annotations

import json
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def vocabulary(backend: Tokenizer, rows: int, pre: str = "qwen35", **more: Any) -> dict[str, Any]:
    """The keys about the vocabulary; ``more`` adds some, or takes them away (None), by their name in tokenizer.ggml."""
    model, added = json.loads(backend.to_str())["model"], backend.get_added_tokens_decoder()
    names = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    types = [NORMAL if token_id in names else UNUSED for token_id in range(rows)]
    for token_id, token in added.items():
        looks_special = token.content.startswith("<|") and token.content.endswith("|>")
        types[token_id] = CONTROL if token.special or looks_special else USER_DEFINED
    found = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [names.get(token_id, f"[PAD{token_id}]") for token_id in range(rows)],
        "token_type": types,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "eos_token_id": backend.token_to_id("<|im_end|>"),
        "padding_token_id": backend.token_to_id("<|endoftext|>"),
        "add_bos_token": False,
    } | more
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def add_keys(writer: GGUFWriter, keys: dict[str, Any]) -> None:
    """Write keys of any kind."""
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)
