"""The constants of the n-gram hash, derived from a config as transformers does.

Source: transformers, models/qwen4_exp/modeling_qwen4_exp.py (Qwen4ExpTextNGramEmbedding). Splitmix64: Steele, Lea and
Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import count, islice
from math import isqrt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_SEEDS_APART = 10007
_MAX_INT64 = (1 << 63) - 1


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_multipliers(vocab_size: int, ngram_size: int, rank: int, seed: int) -> tuple[int, ...]:
    """Odd multipliers of the tokens of an n-gram, newest first, for the n-gram layer of this rank (the first has 0)."""
    half = max(1, _MAX_INT64 // vocab_size // 2)
    first = seed + _SEEDS_APART * rank
    return tuple(2 * (_splitmix64((first + _GAMMA * (index + 1)) & _MASK) % half) + 1 for index in range(ngram_size))


def derive_head_sizes(base: int, heads: int, rank: int) -> tuple[int, ...]:
    """The prime number of rows of each head: the first n-gram layer has the first ``heads`` primes from ``base`` on."""
    return tuple(islice(_primes(base), rank * heads, (rank + 1) * heads))


def padded_rows(rows: int, divisor: int) -> int:
    """Rows of a table: a multiple of ``divisor``."""
    return -(-rows // divisor) * divisor


def _primes(start: int) -> Iterator[int]:
    return (number for number in count(max(start, 2)) if _is_prime(number))


@lru_cache(maxsize=4096)
def _is_prime(number: int) -> bool:
    if number % 2 == 0:
        return number == 2
    return all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))
