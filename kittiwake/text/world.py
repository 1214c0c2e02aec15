"""The RWKV World tokenizer: greedy longest match over UTF-8 bytes, 65,529 tokens.

The vocabulary comes from the text file inside the ``pyrwkv-tokenizer`` package, and long texts are encoded by that
package. Decoding, streaming and grammar masks use the bytes of the file: 486 of the tokens are no valid UTF-8 alone,
so a table of strings would fold them onto one another.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.resources
import re
from collections.abc import Sequence
from importlib.resources.abc import Traversable
from typing import Any

from kittiwake.errors import TokenizerError
from kittiwake.text.table import TokenTable, utf8

WORLD_ROWS = 65_536
WORLD_VOCABULARY_FILE = "rwkv_vocab_v20230424.txt"
# SHA-256 of the vocabulary file with LF line ends (a copy with CRLF is in circulation too).
WORLD_VOCABULARY_SHA256 = "e6dee3d4e31b4d5c40ac99508ac6c701ceef4bed681bf2167ce9a908552bca89"

END_OF_TEXT = "<|rwkv_tokenizer_end_of_text|>"
"""How Hugging Face copies of World models, and their chat templates, spell id 0; no text from outside means it."""

_PACKAGE = "pyrwkv_tokenizer"
_LAST_TOKEN_ID = 65_529
# Building the package's trie takes some 0.2 to 0.4 s; below this size the dictionary encoder is done in about 2 ms.
_NATIVE_FROM_BYTES = 4_096


class WorldTokenizer(TokenTable):
    """Ids 1 … 65,529 are byte strings, 0 is end of text (never encoded, decodes to nothing), the rest is padding.

    Text is only ever text: the characters ``<|endoftext|>`` encode like any others. No byte is lost or normalised.
    Encoding is greedy over the whole text, so encode(a) + encode(b) need not be encode(a + b).
    """

    kind = "world"
    control_texts: tuple[str, ...] = (END_OF_TEXT,)

    def __init__(self) -> None:
        super().__init__(_shipped_vocabulary(), eos_ids=(0,))

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of ``text``. With ``allow_special``, END_OF_TEXT is id 0; otherwise no text means a special token.

        Raises RequestError for text without a UTF-8 form.
        """
        if allow_special and END_OF_TEXT in text:
            parts = [self.encode(part) for part in text.split(END_OF_TEXT)]
            return parts[0] + [token for part in parts[1:] for token in (0, *part)]
        data = utf8(text)
        if len(data) < _NATIVE_FROM_BYTES:
            return _greedy_encoder().encode(data)
        ids: list[int] = _native_encoder().encode(text)
        return ids

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """Where ``text`` spells END_OF_TEXT."""
        return [match.span() for match in re.finditer(re.escape(END_OF_TEXT), text)]

    def files(self) -> dict[str, bytes]:
        """Nothing: the kind alone rebuilds this tokenizer, whose vocabulary file is fixed by its digest."""
        return {}

    def digest(self) -> str:
        """Hex SHA-256 of the vocabulary file (LF line ends)."""
        return WORLD_VOCABULARY_SHA256


class GreedyEncoder:
    """Greedy longest match over bytes, the definition that the native encoder is tested against.

    ``table[id]`` holds the bytes of token ``id``; empty and None entries are not tokens. Every single byte must be one,
    which is why encoding cannot fail. For each pair of first bytes the lengths of the tokens that begin so are kept,
    longest first, so a position costs as many dictionary look-ups as there are such lengths.
    """

    def __init__(self, table: Sequence[bytes | None]) -> None:
        self._ids = {token: token_id for token_id, token in enumerate(table) if token}
        lengths: dict[bytes, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: tuple(sorted(found, reverse=True)) for start, found in lengths.items()}

    def encode(self, data: bytes) -> list[int]:
        """Token ids of ``data``."""
        ids: list[int] = []
        position = 0
        while position < len(data):
            for length in self._lengths.get(data[position : position + 2], ()):
                token_id = self._ids.get(data[position : position + length])
                if token_id is not None:
                    break
            else:
                # No token of two bytes or more fits here. A lone last byte is found by the loop above.
                length = 1
                token_id = self._ids[data[position : position + 1]]
            ids.append(token_id)
            position += length
        return ids


def parse_vocabulary(raw: bytes, name: str) -> list[bytes | None]:
    """Read a World vocabulary file: one ``id literal length`` a line, LF or CRLF, ids 1 … 65,529 in any order.

    Returns 65,536 entries: ``b""`` for id 0, None for padding. Raises TokenizerError naming ``name`` and the line.
    """
    table: list[bytes | None] = [None] * WORLD_ROWS
    table[0] = b""
    escaped: list[tuple[int, str, int, int]] = []
    for number, line in enumerate(_lines(raw, name), start=1):
        if not line:
            continue
        token_id, literal, length = _split_line(line, number, name)
        if table[token_id] is not None:
            raise TokenizerError(f"{name} line {number}: id {token_id} appears twice")
        # Nearly every literal is a plain quoted string, which stands for itself; the others are evaluated together,
        # since a call of literal_eval for each line would take most of the time of loading.
        body = literal[1:-1]
        if literal in (f"'{body}'", f'"{body}"') and body.isprintable() and "\\" not in body and literal[0] not in body:
            table[token_id] = _checked(body.encode("utf-8"), length, number, name)
        else:
            table[token_id] = b""
            escaped.append((token_id, literal, length, number))
    for (token_id, _, length, number), value in zip(escaped, _evaluate(escaped, name), strict=True):
        table[token_id] = _checked(value.encode("utf-8") if isinstance(value, str) else value, length, number, name)
    missing = next((token_id for token_id in range(1, _LAST_TOKEN_ID + 1) if table[token_id] is None), None)
    if missing is not None:
        raise TokenizerError(f"{name} has no token with id {missing}; a World vocabulary has ids 1 to {_LAST_TOKEN_ID}")
    return table


def _lines(raw: bytes, name: str) -> list[str]:
    """Lines of the file. Only LF ends a line: literals may hold characters that str.splitlines() would split at."""
    try:
        return raw.replace(b"\r\n", b"\n").decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{name} is not UTF-8 text (byte {error.start})") from None


def _split_line(line: str, number: int, name: str) -> tuple[int, str, int]:
    """(id, literal, length in bytes) of one line, cut at its first and last space: literals hold spaces too."""
    first, _, rest = line.partition(" ")
    literal, _, last = rest.rpartition(" ")
    # isdecimal alone would let other scripts' digits through; int() of an endless digit string would be slow.
    if not (first.isascii() and first.isdecimal() and last.isascii() and last.isdecimal() and len(literal) >= 2):
        raise TokenizerError(f"{name} line {number}: expected 'id literal length', found {line[:80]!r}")
    if len(first) > 5 or not 1 <= int(first) <= _LAST_TOKEN_ID:
        raise TokenizerError(f"{name} line {number}: id {first[:20]} is outside 1 to {_LAST_TOKEN_ID}")
    return int(first), literal, int(last[:9])


def _evaluate(escaped: list[tuple[int, str, int, int]], name: str) -> list[str | bytes]:
    """The values of Python string and bytes literals; literal_eval builds constants only and runs nothing."""
    values: list[str | bytes] = []
    try:
        values = ast.literal_eval("[" + ",\n".join(literal for _, literal, _, _ in escaped) + "]")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    if len(values) != len(escaped) or not all(isinstance(value, str | bytes) for value in values):
        raise TokenizerError(f"{name} holds a token that is no Python string or bytes literal")
    return values


def _checked(token: bytes, length: int, number: int, name: str) -> bytes:
    if len(token) != length or not token:
        raise TokenizerError(f"{name} line {number}: the token has {len(token)} bytes, the line says {length}")
    return token


@functools.cache
def _shipped_vocabulary() -> tuple[bytes | None, ...]:
    """The table of the file inside pyrwkv-tokenizer, read once a process."""
    raw = _vocabulary_resource().read_bytes()
    found = hashlib.sha256(raw.replace(b"\r\n", b"\n")).hexdigest()
    if found != WORLD_VOCABULARY_SHA256:
        raise TokenizerError(
            f"{WORLD_VOCABULARY_FILE} of the installed pyrwkv-tokenizer has SHA-256 {found}, "
            f"expected {WORLD_VOCABULARY_SHA256}",
            "reinstall pyrwkv-tokenizer",
        )
    return tuple(parse_vocabulary(raw, WORLD_VOCABULARY_FILE))


@functools.cache
def _greedy_encoder() -> GreedyEncoder:
    return GreedyEncoder(_shipped_vocabulary())


@functools.cache
def _native_encoder() -> Any:
    with importlib.resources.as_file(_vocabulary_resource()) as path:
        return importlib.import_module(_PACKAGE).WorldTokenizer(str(path))


def _vocabulary_resource() -> Traversable:
    """Where the vocabulary file lies inside the installed package; TokenizerError when it is not there."""
    try:
        resource = importlib.resources.files(_PACKAGE) / WORLD_VOCABULARY_FILE
    except ImportError as error:
        raise TokenizerError(
            f"the World tokenizer needs the package pyrwkv-tokenizer: {error}", "pip install pyrwkv-tokenizer"
        ) from None
    if not resource.is_file():
        raise TokenizerError(f"the installed pyrwkv-tokenizer lacks {WORLD_VOCABULARY_FILE}", "reinstall it")
    return resource
