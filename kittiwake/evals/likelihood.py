"""How likely a model finds a continuation after a context, for tasks that choose among answers.

A pair of texts is tokenized as one text, the way the model would read it. Where a token spans the border, all of it
belongs to the continuation: the tokens scored always spell the whole pair, and nothing is scored twice or left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kittiwake.engine.request import KeptState
from kittiwake.llm import LLM

SHARED_FROM = 8
"""Tokens a context must have for its state to be kept for several continuations; shorter ones are run again."""


@dataclass(frozen=True)
class Pair:
    """Tokens of a context and of what follows it. An empty context means: nothing stands before, not even a begin token."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Likelihood:
    """Natural log of the probability of a continuation, and whether greedy decoding would give it."""

    log_prob: float
    is_greedy: bool


def split_pair(encode: Callable[[str], list[int]], context: str, continuation: str, begin: int | None) -> Pair:
    """Tokens of two texts that belong together.

    Spaces at the end of the context go with the continuation, as tokenizers join them to the word that follows.
    ``begin`` stands before everything where it is not None.
    """
    kept = context.rstrip()
    whole, alone = encode(context + continuation), encode(kept)
    same = next((i for i, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), min(len(whole), len(alone)))
    prefix = () if begin is None else (begin,)
    return Pair((*prefix, *whole[:same]), tuple(whole[same:]))


def likelihoods(llm: LLM, pairs: Sequence[Pair], *, batch: int = 64) -> list[Likelihood]:
    """Score pairs, ``batch`` side by side; those with the same context share its state. Neither changes a bit.

    A token that nothing stands before costs the logarithm of the vocabulary and is never greedy.
    """
    shared = {
        context
        for context, count in Counter(p.context for p in pairs).items()
        if count > 1 and len(context) >= SHARED_FROM
    }
    order = sorted((i for i, pair in enumerate(pairs) if pair.continuation), key=lambda i: pairs[i].context)
    found = [Likelihood(0.0, True)] * len(pairs)
    states: dict[tuple[int, ...], KeptState] = {}
    for first in range(0, len(order), batch):
        group = order[first : first + batch]
        contexts = {pairs[i].context for i in group} & shared
        states = {context: states.get(context) or llm.prefill(context) for context in contexts}
        starts = [states.get(pairs[i].context) for i in group]
        texts = [
            pairs[i].continuation if start is not None else pairs[i].context + pairs[i].continuation
            for i, start in zip(group, starts, strict=True)
        ]
        scored = llm.score_all(texts, top=1, start_from=starts)
        for i, one in zip(group, scored, strict=True):
            count = len(pairs[i].continuation)
            tail = one.last(count)
            log_prob, is_greedy = tail.total, tail.is_greedy
            if len(tail.token_ids) < count:
                log_prob, is_greedy = log_prob - math.log(llm.vocab_size), False
            found[i] = Likelihood(log_prob, is_greedy)
    return found
