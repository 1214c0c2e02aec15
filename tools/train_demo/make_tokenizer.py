"""Train the byte-level BPE tokenizer of the demo model.

The vocabulary is small (6,144 by default): token 0 is the end-of-text token, the 256 byte symbols follow, the rest are
merges learnt from a subset of the books. Any text round-trips, because every byte is in the alphabet.

    python make_tokenizer.py --books books/train-*.jsonl.xz --out tokenizer.json
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"


def read_books(paths: list[str], every: int = 1) -> Iterator[str]:
    """Yield the text of every `every`-th book of the xz-compressed JSON-lines files."""
    number = 0
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                if number % every == 0:
                    yield json.loads(line)["text"]
                number += 1


def train(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer with `vocabulary` entries, id 0 being the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check(tokenizer: Tokenizer, vocabulary: int) -> None:
    """Fail loudly unless ids, alphabet and round trip are as promised."""
    assert tokenizer.get_vocab_size() == vocabulary, tokenizer.get_vocab_size()
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert all(tokenizer.token_to_id(symbol) is not None for symbol in pre_tokenizers.ByteLevel.alphabet())
    for text in (
        "Hello, world!",
        "  two  spaces\n\n\ttab",
        "naïve café — “quoted”",
        "日本語 🙂 \x00\x7f",
        "'tis don't I'll",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text, text


def main() -> None:
    """Parse the command line, train, check and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", nargs="+", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--vocabulary", type=int, default=6144)
    parser.add_argument("--every", type=int, default=4, help="use every n-th book")
    arguments = parser.parse_args()
    tokenizer = train(read_books(arguments.books, arguments.every), arguments.vocabulary)
    check(tokenizer, arguments.vocabulary)
    tokenizer.save(arguments.out)
    sample = next(read_books(arguments.books))
    print(f"bytes a token: {len(sample.encode()) / len(tokenizer.encode(sample).ids):.3f}")


if __name__ == "__main__":
    main()
