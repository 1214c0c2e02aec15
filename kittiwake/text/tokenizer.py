"""What a tokenizer is to the rest of kittiwake, how one is made, and whether it fits a model."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kittiwake.errors import TokenizerError, UsageError
from kittiwake.text.bytes_level import BytesTokenizer
from kittiwake.text.table import MAX_FILE_BYTES, TOKENIZER_FILE
from kittiwake.text.world import WORLD_ROWS, WORLD_VOCABULARY_SHA256, WorldTokenizer

Prompt = str | Sequence[int]
"""Text, or token ids as they are."""

KINDS = ("world", "gpt-neox", "hf", "bytes")

_GPT_NEOX_ROWS = 50_277
_BYTES_ROWS = 256


class Tokenizer(Protocol):
    """Text ↔ token ids, and the exact bytes of each token."""

    kind: str
    """One of KINDS: with files(), enough to rebuild it."""
    vocab_size: int
    """Ids run from 0 to vocab_size - 1; some may be unused."""
    eos_ids: tuple[int, ...]
    """Ids that end a text; may be empty. They decode to nothing and never come from encode(text)."""
    control_texts: tuple[str, ...]
    """Spellings that encode(…, allow_special=True) turns into control tokens."""

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of ``text`` and nothing around them.

        Text that spells a control token stays text unless ``allow_special``. Raises RequestError for what is no text.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, U+FFFD for invalid UTF-8. Raises RequestError for an id out of range."""

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """(first, end) of each control token that ``text`` spells, with the spaces it swallows; they do not overlap."""

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of a token, ``b""`` for control tokens and unused ids. Raises RequestError as decode()."""

    def is_valid(self, token_id: int) -> bool:
        """Whether a sampler may produce this id: False for padding, holes and ids beyond the vocabulary."""

    def files(self) -> dict[str, bytes]:
        """File name → contents that load_tokenizer(kind, files) needs; empty when the kind says it all."""

    def digest(self) -> str:
        """Hex SHA-256 of what fixes the mapping of ids to bytes."""


def load_tokenizer(
    kind_or_path: str | Path, files: Mapping[str, bytes] | None = None, eos_ids: Sequence[int] | None = None
) -> Tokenizer:
    """A tokenizer from its kind (with its files, as a bundle has them) or from a path.

    ``"world"``, ``"gpt-neox"`` and ``"bytes"`` need no files, ``"hf"`` needs ``tokenizer.json`` in ``files``. Anything
    else, and any ``Path``, is a ``tokenizer.json``, a folder that holds one, or a copy of the World vocabulary.
    ``eos_ids`` overrides the end-of-text ids of a ``tokenizer.json``.

    Raises TokenizerError for a file that is missing, damaged or left over, UsageError for eos_ids of another kind.
    """
    if isinstance(kind_or_path, str) and kind_or_path in KINDS:
        return _load_kind(kind_or_path, files or {}, eos_ids)
    if files is not None:
        raise TokenizerError(f"unknown tokenizer kind {str(kind_or_path)!r}; known are {', '.join(KINDS)}")
    path = Path(kind_or_path)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    raw = _read(path)
    if path.suffix == ".txt":
        _check_world_copy(raw, path)
        return _load_kind("world", {}, eos_ids)
    return _load_hf(raw, str(path), eos_ids)


def default_tokenizer(vocab_size: int) -> Tokenizer:
    """The tokenizer that a model with ``vocab_size`` rows is made for, where the number alone tells.

    Raises TokenizerError otherwise.
    """
    if vocab_size == _BYTES_ROWS:
        return load_tokenizer("bytes")
    if vocab_size == WORLD_ROWS:
        return load_tokenizer("world")
    if vocab_size == _GPT_NEOX_ROWS:
        return load_tokenizer("gpt-neox")
    raise TokenizerError(
        f"a vocabulary of {vocab_size} rows does not tell its tokenizer "
        f"({_BYTES_ROWS} is bytes, {_GPT_NEOX_ROWS} GPT-NeoX, {WORLD_ROWS} RWKV World)",
        "pass the tokenizer.json that belongs to the model",
    )


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise TokenizerError when ``tokenizer`` cannot be, or is plainly not, that of a model with ``vocab_size`` rows.

    A model may have spare rows (vocabularies are padded to round sizes, up to about 2.5 % in published models), so
    up to 1,024 of them, or 1 in 32, are let through. World models always have 65,536 rows, of which 65,530 are used.
    """
    if tokenizer.vocab_size > vocab_size:
        reason = f"has ids up to {tokenizer.vocab_size - 1}, but the model has {vocab_size} rows"
    elif tokenizer.kind == "world" and vocab_size != WORLD_ROWS:
        reason = f"goes with {WORLD_ROWS} rows, but the model has {vocab_size}"
    elif vocab_size - tokenizer.vocab_size > max(1_024, vocab_size // 32):
        reason = f"has {tokenizer.vocab_size} ids, but the model has {vocab_size} rows: too many to be padding"
    else:
        return
    hints = {WORLD_ROWS: "RWKV World models need tokenizer 'world'", _BYTES_ROWS: "256 rows need tokenizer 'bytes'"}
    hints[_GPT_NEOX_ROWS] = "50277 rows need tokenizer 'gpt-neox'"
    raise TokenizerError(
        f"the tokenizer '{tokenizer.kind}' {reason}",
        hints.get(vocab_size, "pass the tokenizer.json that belongs to the model"),
    )


def with_ends(tokenizer: Tokenizer, end_ids: Iterable[int]) -> Tokenizer:
    """The same tokenizer, these ids ending a text as well as its own, which stay the first; texts encode as before."""
    more = [token for token in end_ids if token not in tokenizer.eos_ids]
    if not more:
        return tokenizer
    tokenizer = copy.copy(tokenizer)
    tokenizer.eos_ids = (*tokenizer.eos_ids, *more)
    return tokenizer


def _load_kind(kind: str, files: Mapping[str, bytes], eos_ids: Sequence[int] | None) -> Tokenizer:
    expected = {TOKENIZER_FILE} if kind == "hf" else set()
    if set(files) != expected:
        found = ", ".join(sorted(files)) or "none"
        raise TokenizerError(f"tokenizer '{kind}' has the files: {found}; expected: {', '.join(expected) or 'none'}")
    if kind == "hf":
        return _load_hf(files[TOKENIZER_FILE], TOKENIZER_FILE, eos_ids)
    if eos_ids is not None:
        raise UsageError(f"the end-of-text ids of tokenizer '{kind}' are fixed")
    if kind == "gpt-neox":
        from kittiwake.text.gpt_neox import GptNeoxTokenizer

        return GptNeoxTokenizer()
    return WorldTokenizer() if kind == "world" else BytesTokenizer()


def _load_hf(raw: bytes, name: str, eos_ids: Sequence[int] | None) -> Tokenizer:
    # Imported when wanted: it brings a package that the other kinds have no use for.
    from kittiwake.text.bpe import HFTokenizer

    return HFTokenizer(raw, name, eos_ids)


def _read(path: Path) -> bytes:
    """The file's contents, its size checked before it is read."""
    try:
        if not path.is_file():
            raise TokenizerError(
                f"there is no tokenizer file {path}", f"give a {TOKENIZER_FILE}, a folder with one, or {KINDS}"
            )
        size_bytes = path.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise TokenizerError(f"{path} has {size_bytes} bytes, at most {MAX_FILE_BYTES} are read")
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    if raw.startswith(b"version https://git-lfs"):
        raise TokenizerError(f"{path} is a Git LFS pointer, not the file itself", "run: git lfs pull")
    return raw


def _check_world_copy(raw: bytes, path: Path) -> None:
    found = hashlib.sha256(raw.replace(b"\r\n", b"\n")).hexdigest()
    if found != WORLD_VOCABULARY_SHA256:
        raise TokenizerError(
            f"{path} is not the RWKV World vocabulary: SHA-256 {found}, expected {WORLD_VOCABULARY_SHA256}",
            "a vocabulary in text form is taken only if it is rwkv_vocab_v20230424.txt",
        )
