"""Which rows of its table an n-gram layer reads for a token, and the history that a sequence carries for it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np

from kittiwake.engine.batch import Batch
from kittiwake.errors import ModelError
from kittiwake.families.qwen4exp.hashing import derive_head_sizes, derive_multipliers, padded_rows
from kittiwake.ops.ngram_hash.cpu import ngram_hash

_MAX_HEADS = 1 << 12
_MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class NgramHash:
    """Which rows of its table each token of an n-gram layer reads; see :mod:`kittiwake.ops.ngram_hash`."""

    multipliers: tuple[int, ...]  # [ngram size]
    head_sizes: tuple[int, ...]  # [H], a prime each
    offsets: tuple[int, ...]  # [H], the first row of each head
    eos: int

    @classmethod
    def derive(
        cls,
        vocab_size: int,
        ngram_size: int,
        heads_per_ngram: int,
        base: int,
        layer_rank: int,
        seed: int,
        eos: int,
    ) -> Self:
        """The constants of the ``layer_rank``-th n-gram layer (counted from 0). Raises ModelError for sizes no model has."""
        heads = (ngram_size - 1) * heads_per_ngram
        for name, value, least, most in (
            ("vocab_size", vocab_size, 1, 1 << 31),
            ("ngram_size", ngram_size, 2, 64),
            ("heads_per_ngram", heads_per_ngram, 1, _MAX_HEADS // (ngram_size - 1) if ngram_size > 1 else _MAX_HEADS),
            ("ngram_vocab_size_base", base, 1, 1 << 40),
            ("the rank of the n-gram layer", layer_rank, 0, _MAX_HEADS),
            ("seed", seed, 0, _MAX_SEED),
            ("the end token of the n-gram hash", eos, 0, vocab_size - 1),
        ):
            if not least <= value <= most:
                raise ModelError(f"{name} is {value}, expected {least} to {most}")
        sizes = derive_head_sizes(base, heads, layer_rank)
        offsets = tuple(accumulate(sizes, initial=0))[:-1]
        return cls(derive_multipliers(vocab_size, ngram_size, layer_rank, seed), sizes, offsets, eos)

    @property
    def heads(self) -> int:
        """H: rows of the table that a token reads."""
        return len(self.head_sizes)

    def total_rows(self, divisor: int = 1) -> int:
        """Rows of the table, padded up to a multiple of ``divisor``."""
        return padded_rows(sum(self.head_sizes), divisor)

    def rows(self, token_ids: np.ndarray, starts: np.ndarray, history: np.ndarray) -> np.ndarray:
        """int64 [N, H] for packed tokens; history int64 [B, n - 1] are the ids before, newest first, -1 for none."""
        rows = np.empty((len(token_ids), self.heads), dtype=np.int64)
        multipliers, head_sizes, offsets = map(np.array, (self.multipliers, self.head_sizes, self.offsets))
        before, starts = _int64(history), _int64(starts)
        ngram_hash(_int64(token_ids), starts, before, self.eos, multipliers, head_sizes, offsets, rows)
        return rows


def _int64(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.int64)


def next_history(token_ids: np.ndarray, starts: np.ndarray, history: np.ndarray) -> np.ndarray:
    """The history [B, n - 1] of what follows these tokens: newest first, -1 for none. End tokens stay what they are."""
    carried = history.shape[1]
    after = np.empty_like(history)
    for b in range(len(starts) - 1):
        newest = token_ids[max(starts[b], starts[b + 1] - carried) : starts[b + 1]][::-1]
        after[b, : len(newest)] = newest
        after[b, len(newest) :] = history[b, : carried - len(newest)]
    return after


def move_histories(histories: np.ndarray, batch: Batch) -> None:
    """Bring the histories [S, n - 1] of the slots of a batch behind its tokens, in place."""
    histories[batch.slots] = next_history(batch.token_ids, batch.starts, histories[batch.slots])
