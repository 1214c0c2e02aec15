"""Hugging Face ``tokenizer.json`` through the ``tokenizers`` package, with exact bytes for every token.

Only tokenizers that lose nothing are taken: those whose tokens are bytes in GPT-2's printable alphabet (ByteLevel) and
those that fall back to ``<0x0A>``-like byte tokens. Text from outside never becomes a control token unless asked.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from kittiwake.errors import TokenizerError
from kittiwake.text.table import MAX_FILE_BYTES, TOKENIZER_FILE, TokenTable, utf8

MAX_IDS = 1 << 22

# Added tokens that end a text or a turn wherever they appear. Others (such as "<|end|>") need an explicit eos_ids.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")

# An added token that looks like markup is a control token even when the file does not mark it special, as with
# "<think>" and "<tool_call>": a user who writes about it must not be taken for the template.
_MARKUP = re.compile(r"<.*>|\[.*\]", re.DOTALL)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# The bytes that occur in UTF-8 at all; the others need no token.
_UTF8_BYTES = [value for value in range(256) if value not in (0xC0, 0xC1) and value < 0xF5]
_SPACE_MARK = "\u2581"
# Encoded once at load: what a lossy pipeline would drop, fold or rewrite shows here.
_PROBE = (
    "A probe:  it's\n\n\t 12345 (x_y) <a> [b]\r\n \x00\x7f \u00a0"
    "\u00c4\u00e9e\u0301 \u4f60\u597d \ub155 \U0001f642\u200d."
)

PIECE_CHARS = 1 << 14
"""Longer texts are encoded in pieces of about this size: the library needs some 500 bytes a token while it works."""
# A space between two ASCII letters: GPT-2's pattern always ends a word before it, whatever stands further off.
_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")


class HFTokenizer(TokenTable):
    """A ``tokenizer.json``.

    The bytes of encode(text), laid end to end, are the UTF-8 of the text after the file's own normaliser (NFC for
    GPT-NeoX's); tokenizers with a word-start mark may put one space in front. Tokens the file marks special, and end of
    text, have no bytes. Nothing is added at the start or end, and truncation and padding set in the file are not done.
    """

    kind = "hf"

    def __init__(self, raw: bytes, name: str = TOKENIZER_FILE, eos_ids: Sequence[int] | None = None) -> None:
        """Raises TokenizerError, naming ``name``, for a file that is damaged, too large, or that would lose text.

        ``eos_ids`` replaces the end-of-text ids found among the added tokens (see END_TOKENS).
        """
        spec = _parse(raw, name)
        self._raw = raw
        self._name = name
        self._plain = _backend(raw, name)
        added = self._plain.get_added_tokens_decoder()
        _check_added_ids(spec, self._plain, name)
        vocabulary = self._plain.get_vocab(with_added_tokens=True)
        self._token_of_byte, self._read_token = _byte_form(spec, vocabulary, name)
        table = _byte_table(vocabulary, added, self._read_token, name)
        ends = _end_ids(added, eos_ids, table, name)
        for token_id in ends:
            table[token_id] = b""
        super().__init__(table, ends)
        self._controls = {token_id for token_id, token in added.items() if _is_control(token)} | set(ends)
        _make_special(self._plain, [added[token_id] for token_id in sorted(self._controls) if token_id in added])
        self.control_texts = tuple(added[token_id].content for token_id in sorted(self._controls) if token_id in added)
        self._control_pattern = _spelling([added[token_id] for token_id in self._controls if token_id in added])
        self._may_cut = _splits_at_words(spec, list(added.values()))
        self._check_lossless()

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of ``text``, with nothing added around them.

        Text that spells a control token (``<|endoftext|>``, ``<think>``) stays text unless ``allow_special``, which is
        for template text written by the caller. Raises RequestError for text without a UTF-8 form.
        """
        utf8(text)
        if allow_special:
            return self._ids(self._with_specials, text)
        ids = self._ids(self._plain, text)
        if self._controls.isdisjoint(ids):
            return ids
        return [part for token_id in ids for part in self._spelled_out(token_id)]

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """(first, end) of each control token that ``text`` spells: leftmost first, the longest of those, spaces included
        that the token swallows."""
        return [match.span() for match in self._control_pattern.finditer(text)]

    def files(self) -> dict[str, bytes]:
        """The file as it was read."""
        return {TOKENIZER_FILE: self._raw}

    def digest(self) -> str:
        """Hex SHA-256 of the file as it was read."""
        return hashlib.sha256(self._raw).hexdigest()

    @functools.cached_property
    def _with_specials(self) -> Backend:
        """A second copy, made when first wanted: switching one copy back and forth would not be safe in threads."""
        return _backend(self._raw, self._name)

    def last_cut(self, text: str) -> int:
        """The last place where this text may be cut, more text to come, without changing a token; 0 where there is none."""
        if not self._may_cut:
            return 0
        return max((match.start() for match in _BETWEEN_WORDS.finditer(text)), default=0)

    def _ids(self, backend: Backend, text: str) -> list[int]:
        with _as_tokenizer_errors(self._name, "encode this text"):
            pieces = _pieces(text) if self._may_cut and len(text) > PIECE_CHARS else (text,)
            return [token for piece in pieces for token in backend.encode(piece, add_special_tokens=False).ids]

    def _spelled_out(self, token_id: int) -> list[int]:
        """A control token that the model itself matched (Unigram, ``ignore_merges``), as the bytes it is spelled with.

        Only the search for added tokens can be told to leave control tokens alone, so this is what is left.
        """
        token = self._plain.id_to_token(token_id) if token_id in self._controls else None
        return [token_id] if token is None else [self._token_of_byte[value] for value in self._read_token(token)]

    def _check_lossless(self) -> None:
        normalizer = self._plain.normalizer
        text = normalizer.normalize_str(_PROBE) if normalizer is not None else _PROBE
        expected = text.replace(_SPACE_MARK, " ").encode("utf-8")
        found = b"".join(self._table[token_id] or b"" for token_id in self.encode(_PROBE))
        if found not in (expected, b" " + expected):
            raise TokenizerError(
                f"{self._name} does not keep its text: {expected!r} comes back as {found!r}",
                "kittiwake serves tokenizers whose tokens are the bytes of the text",
            )


def _parse(raw: bytes, name: str) -> dict[str, Any]:
    if len(raw) > MAX_FILE_BYTES:
        raise TokenizerError(f"{name} has {len(raw)} bytes, at most {MAX_FILE_BYTES} are read")
    try:
        spec = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{name} is not JSON: {error}") from None
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise TokenizerError(f"{name} is JSON, but no tokenizer: it has no 'model'")
    if spec["model"].get("dropout"):
        raise TokenizerError(
            f"{name} has model.dropout {spec['model']['dropout']!r}: the same text would encode differently each time",
            "set it to null",
        )
    return spec


@contextlib.contextmanager
def _as_tokenizer_errors(name: str, verb: str) -> Iterator[None]:
    """Errors and panics of ``tokenizers`` become TokenizerError: it raises bare Exception for all it finds wrong."""
    try:
        yield
    except Exception as error:
        raise TokenizerError(f"{name} cannot {verb}: {error}") from None
    except BaseException as error:
        # A panic of the Rust library is no Exception; its class cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{name} cannot {verb}: {error}") from None


def _backend(raw: bytes, name: str) -> Backend:
    with _as_tokenizer_errors(name, "be read"):
        backend = Backend.from_str(raw.decode("utf-8"))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _splits_at_words(spec: dict[str, Any], added: list[AddedToken]) -> bool:
    """Whether cutting a text at :data:`_BETWEEN_WORDS` cannot change its tokens: GPT-2's pattern splits it there first,
    the normaliser (NFC or none) does not reach across, nor does any added token."""
    normalizer, splitter = spec.get("normalizer"), spec.get("pre_tokenizer") or {}
    model = spec.get("model") or {}
    return (
        (normalizer is None or normalizer.get("type") == "NFC")
        and splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex", True) is True
        and splitter.get("add_prefix_space") is False
        and model.get("type") == "BPE"
        and model.get("dropout") is None
        and not any(t.lstrip or t.rstrip or t.single_word or _BETWEEN_WORDS.search(t.content) for t in added)
    )


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces of at least PIECE_CHARS, cut between words."""
    first = 0
    while cut := _BETWEEN_WORDS.search(text, first + PIECE_CHARS):
        yield text[first : cut.start()]
        first = cut.start()
    yield text[first:]


def _check_added_ids(spec: dict[str, Any], backend: Backend, name: str) -> None:
    """``tokenizers`` numbers added tokens anew when their ids do not follow on; the model would then be misread."""
    for token in spec.get("added_tokens") or []:
        loaded = backend.token_to_id(token["content"])
        if loaded != token["id"]:
            raise TokenizerError(
                f"{name}: the added token {token['content']!r} has id {token['id']}, but loads with id {loaded}"
            )


def _is_control(token: AddedToken) -> bool:
    """Whether text from outside must not become this token: special, markup, or one that swallows spaces around it."""
    return bool(token.special or token.lstrip or token.rstrip or _MARKUP.fullmatch(token.content))


def _spelling(controls: list[AddedToken]) -> re.Pattern[str]:
    """What spells one of these tokens; nothing does where there are none."""
    longest_first = sorted(controls, key=lambda token: (-len(token.content), token.content))
    spaced = [
        (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
        for token in longest_first
    ]
    return re.compile("|".join(spaced) or r"(?!)")


def _make_special(backend: Backend, controls: list[AddedToken]) -> None:
    """Tell ``backend`` to read the spelling of ``controls`` as text."""
    backend.add_special_tokens(
        [AddedToken(token.content, normalized=token.normalized, special=True) for token in controls]
    )
    backend.encode_special_tokens = True


def _byte_table(
    vocabulary: Mapping[str, int], added: Mapping[int, AddedToken], read_token: Callable[[str], bytes], name: str
) -> list[bytes | None]:
    """Bytes of every id: of added tokens their own text (none for special ones), of the others as the model spells."""
    if not vocabulary or max(vocabulary.values()) >= MAX_IDS:
        raise TokenizerError(f"{name} has {len(vocabulary)} tokens; expected ids from 0 to at most {MAX_IDS - 1}")
    table: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        if table[token_id] is not None:
            raise TokenizerError(f"{name} gives id {token_id} to {token!r} and to another token")
        if token_id in added:
            table[token_id] = b"" if added[token_id].special else added[token_id].content.encode("utf-8")
        else:
            table[token_id] = read_token(token)
    return table


def _end_ids(
    added: Mapping[int, AddedToken], wanted: Sequence[int] | None, table: list[bytes | None], name: str
) -> tuple[int, ...]:
    if wanted is None:
        return tuple(sorted(token_id for token_id, token in added.items() if token.content in END_TOKENS))
    for token_id in wanted:
        if not isinstance(token_id, int) or not 0 <= token_id < len(table) or table[token_id] is None:
            raise TokenizerError(f"end-of-text id {token_id!r} is no token of {name} (ids 0 to {len(table) - 1})")
    return tuple(wanted)


def _byte_form(
    spec: dict[str, Any], vocabulary: Mapping[str, int], name: str
) -> tuple[list[int], Callable[[str], bytes]]:
    """How this file writes bytes: the token id of each byte (-1 for those UTF-8 never has) and a reader of tokens.

    The decoder named in the file decides. Raises TokenizerError for any decoder but the two kinds served, and for a
    vocabulary without a token for some byte, since text with that byte would be dropped or become "unknown".
    """
    kinds = _decoder_kinds(spec.get("decoder"), name)
    spell: Callable[[int], str]
    read: Callable[[str], bytes]
    if kinds == {"ByteLevel"}:
        spell, read = byte_alphabet().__getitem__, _read_byte_level
    elif "ByteFallback" in kinds and kinds <= {"ByteFallback", "Replace", "Fuse", "Strip", "Metaspace"}:
        if not spec["model"].get("byte_fallback"):
            raise TokenizerError(f"{name} has a ByteFallback decoder, but its model does not fall back to bytes")
        spell, read = "<0x{:02X}>".format, _read_byte_fallback
    else:
        named = " + ".join(sorted(kinds)) or "none"
        raise TokenizerError(f"{name} has the decoder {named}; served are ByteLevel, and Metaspace with ByteFallback")
    missing = [value for value in _UTF8_BYTES if spell(value) not in vocabulary]
    if missing:
        raise TokenizerError(
            f"{name} has no token for {len(missing)} of the bytes of UTF-8, the first 0x{missing[0]:02X}: "
            "text with them would be lost"
        )
    return [vocabulary.get(spell(value), -1) for value in range(256)], read


def _decoder_kinds(decoder: dict[str, Any] | None, name: str) -> set[str]:
    """The decoder's type, or those of its sequence, after checking that replacing and stripping are about spaces."""
    if decoder is None:
        return set()
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {str(part.get("type")) for part in parts}
    for part in parts:
        match part.get("type"):
            case "Replace":
                is_served = (part.get("pattern"), part.get("content")) == ({"String": _SPACE_MARK}, " ")
            case "Strip":
                is_served = (part.get("content"), part.get("stop")) == (" ", 0)
            case "Metaspace":
                is_served = part.get("replacement") == _SPACE_MARK
            case _:
                is_served = True
        if not is_served:
            raise TokenizerError(f"{name} has a decoder that kittiwake does not serve: {json.dumps(part)[:200]}")
    return kinds


@functools.cache
def byte_alphabet() -> tuple[str, ...]:
    """The character by which ByteLevel writes each byte.

    Bytes that are printable in Latin-1 stand for themselves; the others take U+0100, U+0101 … in order. Source: the
    byte encoder of GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(value) if value in printable else chr(next(others)) for value in range(256))


@functools.cache
def _byte_of_char() -> dict[str, int]:
    return {char: value for value, char in enumerate(byte_alphabet())}


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes(map(_byte_of_char().__getitem__, token))
    except KeyError:
        # Not written in the alphabet: the token stands for its own text.
        return token.encode("utf-8")


def _read_byte_fallback(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE_MARK, " ").encode("utf-8")
