"""What may come of a draw, by the reference: rounding in float32 may move a border between two tokens by so much."""

from __future__ import annotations

import numpy as np

from kittiwake.engine.request import MAX_BIAS, SamplingParams
from kittiwake.ops.sampling import reference

SLACK = 5e-6
"""Share of the probability, as the reference says."""


def adjusted(
    logits: np.ndarray,
    params: SamplingParams,
    given: tuple[int, ...] = (),
    drawn: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
) -> np.ndarray:
    """The logits a token is drawn from: bias, penalties and bans by the reference."""
    bias = {token: -np.inf if value == -MAX_BIAS else value for token, value in params.logit_bias.items()}
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    with np.errstate(all="ignore"):
        row = reference.adjusted(logits, bias, given, drawn, *penalties)
    row[list(banned)] = -np.inf
    return row


def may_come(row: np.ndarray, params: SamplingParams, position: int, token: int) -> bool:
    """Whether ``token`` is what the reference draws from adjusted logits, or rounding may have led to it."""
    first = params.sampling_order == "rwkv"
    settings = (params.temperature, params.top_k, params.top_p)
    with np.errstate(all="ignore"):
        if token == reference.draw(row, *settings, params.seed, position, params.min_p, first):
            return True
        if params.temperature == 0 or token < 0 or not row[token] > -np.inf or not (row < np.inf).all():
            return False
        u = reference.uniform(params.seed, position)
        probs = np.exp((row.astype(np.float64) - row.max()) / params.temperature)
        for moved in (-SLACK, 0.0, SLACK):
            top_p = min(max(params.top_p + moved, 1e-12), 1.0) if params.top_p < 1 else 1.0
            mask = reference.kept(row, params.temperature, params.top_k, top_p, params.min_p * (1 + moved), first)
            steps = np.concatenate([[0.0], np.cumsum(np.where(mask, probs, 0))])
            if mask[token] and steps[token] / steps[-1] - SLACK <= u <= steps[token + 1] / steps[-1] + SLACK:
                return True
    return False
