"""The vocabulary inside a GGUF file → the ``tokenizer.json`` that a converter took it from, and the chat template there.

A file keeps tokens, their types, merges, a few ids and the name of a pre-tokenizer. What that name stands for (the
normaliser and the pattern that splits a text) is written here, after the published tokenizers. Keys, types and names of
pre-tokenizers are those of llama.cpp's converter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kittiwake.errors import CheckpointError, TokenizerError
from kittiwake.text.table import MAX_FILE_BYTES
from kittiwake.text.templates import MAX_TEMPLATE_BYTES, standing_alone

MODEL = "tokenizer.ggml.model"
PRE = "tokenizer.ggml.pre"
TOKENS = "tokenizer.ggml.tokens"
TYPES = "tokenizer.ggml.token_type"
MERGES = "tokenizer.ggml.merges"
TEMPLATE = "tokenizer.chat_template"
PASS_ONE = "pass the tokenizer.json that belongs to the model (--tokenizer)"

Values = Callable[[str, int], Sequence[Any]]
"""``values(key, most_bytes)``: an array of the metadata. Raises CheckpointError."""


def _pattern(letters: str) -> str:
    """What a text is split by before its bytes are merged: English contractions, words with the one character before
    them, single digits, runs of other signs, line ends, spaces but for the last before a word."""
    return "|".join(
        [
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+",
            r"\p{N}",
            rf" ?[^\s{letters}\p{{N}}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )


PATTERNS: Mapping[str, str] = {"qwen2": _pattern(r"\p{L}"), "qwen35": _pattern(r"\p{L}\p{M}")}
"""Pre-tokenizers that are read: of Qwen 2 and 3, and of Qwen 3.5 to 3.8, where a mark belongs to its letter. Both come
after NFC. Source: the models' tokenizer.json, and Qwen2Tokenizer and Qwen3_5Tokenizer of transformers."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_KNOWN = frozenset(
    # scores and the count of types mean nothing to a model with merges
    {MODEL, PRE, TOKENS, TYPES, MERGES, "tokenizer.ggml.scores", "tokenizer.ggml.token_type_count"}
)
_SWITCHES = frozenset(
    f"tokenizer.ggml.{name}"
    for name in ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces")
)
"""What a file may ask to be done to each text: nothing of it is done, so it must not be asked for."""
_PREFIX, _ID = "tokenizer.ggml.", "_token_id"
_TEMPLATE_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the files
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens by id, their types, and merges ("a b") in the order of their rank."""

    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]

    def to_json(self, pattern: str) -> bytes:
        """The ``tokenizer.json``. Ids that no token has are left out."""
        kinds = list(zip(self.tokens, self.types, strict=True))
        added = [
            {"id": token_id, "content": token, "special": kind != _USER_DEFINED}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for token_id, (token, kind) in enumerate(kinds)
            if kind in _ADDED
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        spec = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                # added tokens too, so that they keep their ids whatever lies between them
                "vocab": {token: token_id for token_id, (token, kind) in enumerate(kinds) if kind != _UNUSED},
                "merges": self.merges,
            },
        }
        return json.dumps(spec, ensure_ascii=False, separators=(",", ":")).encode()


def read_tokenizer_json(metadata: Mapping[str, Any], values: Values, name: str, vocab_size: int) -> bytes:
    """The ``tokenizer.json`` of the byte-level vocabulary ("gpt2") in a file called ``name``.

    Types: control and user-defined tokens become added tokens, unused ids mean nothing. Raises TokenizerError for a
    pre-tokenizer or setting that is not read, CheckpointError naming key and value for what does not fit together or
    is not of ``vocab_size`` tokens.
    """
    pre = metadata.get(PRE)
    if not isinstance(pre, str) or pre not in PATTERNS:
        raise TokenizerError(
            f"{name}: {PRE} is {_short(pre)}; of vocabularies with merges those of {', '.join(PATTERNS)} are read",
            PASS_ONE,
        )
    _check_settings(metadata, name, vocab_size)
    for key in (TOKENS, TYPES, MERGES):
        if key not in metadata:
            raise CheckpointError(f"{name} lacks the key {key}", PASS_ONE)
    tokens = _texts(values, TOKENS, name)
    if len(tokens) != vocab_size:
        raise CheckpointError(f"{name}: {TOKENS} holds {len(tokens):,} tokens, the model has {vocab_size:,} rows")
    types = _types(values, tokens, name)
    _check_tokens(tokens, types, name)
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    merges = _texts(values, MERGES, name)
    _check_merges(merges, normal, name)
    return _Vocabulary(tokens, types, merges).to_json(PATTERNS[pre])


def read_template(metadata: Mapping[str, Any], values: Values, name: str) -> str | None:
    """The chat template of a file, with the special tokens that it may name set in it; None where there is none.

    That of a World vocabulary is left: converters give every such file the same one. Raises CheckpointError for a
    template that is no Jinja text or of more than ``MAX_TEMPLATE_BYTES``, and for ids that are no token's.
    """
    text = metadata.get(TEMPLATE)
    if text is None or metadata.get(MODEL) == "rwkv":
        return None
    if not isinstance(text, str):
        raise CheckpointError(f"{name}: {TEMPLATE} is {_short(text)}, expected a text")
    if "messages" not in text:  # llama.cpp knows some by name
        raise CheckpointError(
            f"{name}: {TEMPLATE} is {_short(text)}, which reads no messages; expected a template in Jinja",
            "give the file one, or none: gguf-new-metadata of the gguf package",
        )
    ids = {token: metadata[_PREFIX + key] for token, key in _TEMPLATE_NAMES.items() if _PREFIX + key in metadata}
    if ids and TOKENS in metadata:
        tokens = _texts(values, TOKENS, name)
        for token, value in ids.items():
            _check_id(_PREFIX + _TEMPLATE_NAMES[token], value, len(tokens), name)
        text = standing_alone(text, {token: tokens[token_id] for token, token_id in ids.items()})
    if (size := len(text.encode())) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{name}: {TEMPLATE} takes {size:,} bytes, at most {MAX_TEMPLATE_BYTES:,} are read")
    return text


def _check_settings(metadata: Mapping[str, Any], name: str, vocab_size: int) -> None:
    """Every key about the vocabulary is known, no switch is on, and ids are those of tokens."""
    for key, value in metadata.items():
        if not key.startswith(_PREFIX) or key in _KNOWN:
            continue
        if key.endswith(_ID):
            _check_id(key, value, vocab_size, name)
        elif key not in _SWITCHES:
            raise TokenizerError(f"{name} has the unknown key {key} = {_short(value)}", PASS_ONE)
        elif value is not False:
            raise TokenizerError(
                f"{name}: {key} is {_short(value)}, expected false: texts are encoded as they are", PASS_ONE
            )


def _check_id(key: str, value: object, vocab_size: int, name: str) -> None:
    if type(value) is not int or not 0 <= value < vocab_size:
        raise CheckpointError(f"{name}: {key} is {_short(value)}, expected the id of a token, 0 to {vocab_size - 1}")


def _texts(values: Values, key: str, name: str) -> Sequence[str]:
    found = values(key, MAX_FILE_BYTES)
    for number, value in enumerate(found):
        if not isinstance(value, str):
            raise CheckpointError(f"{name}: {key} holds {_short(value)} at {number}, expected strings")
    return found


def _types(values: Values, tokens: Sequence[str], name: str) -> list[int]:
    """The type of each token; ids that a converter filled up with ``[PAD7]`` and the like are unused whatever it says."""
    found = values(TYPES, 8 * len(tokens))
    if len(found) != len(tokens):
        raise CheckpointError(f"{name}: {TYPES} holds {len(found):,} values, {TOKENS} {len(tokens):,}")
    types = []
    for token_id, kind in enumerate(found):
        if type(kind) is not int or not _NORMAL <= kind <= _UNUSED:
            raise CheckpointError(
                f"{name}: {TYPES} holds {_short(kind)} for token {token_id}, {_short(tokens[token_id])}; expected "
                f"{_NORMAL} (normal) to {_UNUSED} (unused)"
            )
        is_filler = kind == _USER_DEFINED and tokens[token_id] == f"[PAD{token_id}]"
        types.append(_UNUSED if is_filler else kind)
    return types


def _check_tokens(tokens: Sequence[str], types: Sequence[int], name: str) -> None:
    seen: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _UNUSED:
            continue
        if not token:
            raise CheckpointError(f"{name}: {TOKENS} holds an empty token at {token_id}")
        if token in seen:
            raise CheckpointError(f"{name}: {TOKENS} holds {_short(token)} at {seen[token]} and again at {token_id}")
        seen[token] = token_id


def _check_merges(merges: Sequence[str], normal: set[str], name: str) -> None:
    """Raise CheckpointError unless each is a pair of tokens that make a token, and none comes twice."""
    seen: set[str] = set()
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if {left, right, left + right} <= normal and " " not in right and merge not in seen:
            seen.add(merge)
            continue
        if merge in seen:
            reason = f"as at {merges.index(merge)}"
        elif not left or not right or " " in right:
            reason = "expected two tokens with a space between them"
        else:
            unknown = next(part for part in (left, right, left + right) if part not in normal)
            reason = f"and {_short(unknown)} is no token of {TOKENS} that text can be merged to"
        raise CheckpointError(f"{name}: {MERGES} holds {_short(merge)} at {number}, {reason}")


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    return text if len(text) <= 120 else text[:116] + " ..."
