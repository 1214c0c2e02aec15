"""Bits per byte: what a model would need to write a text down, divided by the text's size.

-Σ log2 p over the tokens of a document, over its UTF-8 bytes. Bytes and not tokens are counted, so models with
different tokenizers compare. Every document starts from an empty state and every token of it is paid for, so that the
figure is a complete code length: without a begin token the first one costs log2 of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kittiwake.errors import InputFileError
from kittiwake.evals.documents import is_json_lines, read_blocks, read_plain_text, read_text_lines
from kittiwake.evals.subject import Subject, begin_token
from kittiwake.progress import Progress
from kittiwake.text.long_text import encode_blocks

LONG_BYTES = 4 << 20
BLOCK_CHARS = 1 << 18


@dataclass(frozen=True)
class Document:
    """A text and what to call it."""

    title: str
    text: str


@dataclass(frozen=True)
class DocumentBits:
    """One document scored: sizes in UTF-8 bytes and tokens, its cost in bits."""

    title: str
    utf8_bytes: int
    tokens: int
    bits: float

    def document(self) -> dict[str, Any]:
        """The entry of the JSON result."""
        return {
            "title": self.title,
            "bytes": self.utf8_bytes,
            "tokens": self.tokens,
            "bits": round(self.bits, 3),
            "bits_per_byte": round(self.bits / self.utf8_bytes, 6),
            "perplexity": perplexity(self.bits, self.tokens),
        }


def read_documents(path: Path, limit: int | None = None) -> list[Document]:
    """Documents of a .jsonl or .jsonl.xz file, or a plain text as one. Empty ones are left out.

    Raises InputFileError, also when nothing is left to score.
    """
    if is_json_lines(path):
        documents = [Document(title, text) for title, text in read_text_lines(path, limit) if text]
    else:
        text = read_plain_text(path)
        documents = [Document(path.name, text)] if text else []
    if not documents:
        raise InputFileError(f"{path} holds no text")
    return documents


def score_documents(
    llm: Subject, documents: Sequence[Document], *, bos: bool = False, progress: Progress | None = None
) -> list[DocumentBits]:
    """Score each document from an empty state. Progress counts UTF-8 bytes."""
    begin = begin_token(llm.tokenizer) if bos else None
    total = sum(len(document.text.encode()) for document in documents)
    scored: list[DocumentBits] = []
    done = 0
    for document in documents:
        if progress is not None:
            progress("scoring", done, total)
        one = score_document(llm, document, begin)
        scored.append(one)
        done += one.utf8_bytes
    if progress is not None:
        progress("scoring", total, total)
    return scored


def score_document(llm: Subject, document: Document, begin: int | None) -> DocumentBits:
    """Bits of one document: after ``begin``, or with the first token at log2 of the vocabulary."""
    ids = llm.tokenizer.encode(document.text)
    if begin is not None:
        bits = _bits(llm, [begin, *ids])
    else:
        bits = math.log2(llm.vocab_size) + (_bits(llm, ids) if len(ids) > 1 else 0.0)
    return DocumentBits(document.title, len(document.text.encode()), len(ids), bits)


def is_long(path: Path) -> bool:
    """Whether a plain text is so long that it is read, encoded and scored block by block."""
    return not is_json_lines(path) and path.is_file() and path.stat().st_size > LONG_BYTES


def score_long_file(llm: Subject, path: Path, *, bos: bool = False, progress: Progress | None = None) -> DocumentBits:
    """As :func:`score_document` for a plain text of any size, in constant memory. Progress counts UTF-8 bytes."""
    total, size, tokens = path.stat().st_size, 0, 0

    def blocks() -> Iterator[str]:
        nonlocal size
        for block in read_blocks(path, BLOCK_CHARS):
            size += len(block.encode())
            yield block
            if progress is not None:
                progress("scoring", size, total)

    def pieces() -> Iterator[Sequence[int]]:
        nonlocal tokens
        if bos:
            yield [begin_token(llm.tokenizer)]
        for ids in encode_blocks(llm.tokenizer, blocks()):
            tokens += len(ids)
            yield ids

    sums = (math.fsum(found.tolist()) for found in llm.score_stream(pieces()))
    bits = (0.0 if bos else math.log2(llm.vocab_size)) - math.fsum(sums) / math.log(2)
    return DocumentBits(path.name, size, tokens, bits)


def _bits(llm: Subject, ids: Sequence[int]) -> float:
    """-Σ log2 p of ids[1:], summed without rounding error so that the order of tokens cannot show."""
    return -math.fsum(llm.score(ids).tolist()) / math.log(2)


def totals(scored: Sequence[DocumentBits]) -> dict[str, Any]:
    """Sums over all documents and their bits per byte: long documents weigh more."""
    size = sum(one.utf8_bytes for one in scored)
    bits = math.fsum(one.bits for one in scored)
    tokens = sum(one.tokens for one in scored)
    return {
        "bits_per_byte": round(bits / size, 6),
        "bits": round(bits, 3),
        "bytes": size,
        "tokens": tokens,
        "perplexity": perplexity(bits, tokens),
    }


def perplexity(bits: float, tokens: int) -> float:
    """Of a token, all of them paid for; compares models with one tokenizer only."""
    return float(f"{2 ** min(bits / tokens, 1023.0):.6g}")
