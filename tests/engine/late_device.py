"""A device without a card: steps run on the CPU, tokens feed back by slot, the host learns them when it lands a flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kittiwake.engine.batch import Batch
from kittiwake.engine.flight import Flight
from kittiwake.engine.request import SamplingParams
from kittiwake.engine.runner import Runner
from kittiwake.engine.sampler import Adjustments, Draw, adjustments_for, sample


@dataclass
class _Row:
    params: SamplingParams
    position: int
    banned: set[int]
    adjustments: Adjustments | None


class LateDevice:
    """What the engine asks of ``DeviceSteps``, over a model on the CPU."""

    def __init__(self, runner: Runner, never: Sequence[int]) -> None:
        self._runner, self._never = runner, tuple(never)
        self._drawn = np.full(runner.states.slots + 1, -7, dtype=np.int64)
        self._rows: dict[int, _Row] = {}
        self._last: torch.Tensor | None = None
        self.launches = 0
        self.ran_ahead = 0
        """Rows that were fed with a token that the host had not read."""
        self.settled_beside_a_draw = 0
        """Rows of which no token was drawn while one was of others."""

    def begin(
        self, slot: int, params: SamplingParams, position: int, given: Sequence[int], ends: Sequence[int]
    ) -> None:
        adjustments = adjustments_for(params, given, self._runner.model.config.vocab_size)
        self._rows[slot] = _Row(params, position, set(ends), adjustments)

    def let_end(self, slot: int, ends: Sequence[int]) -> None:
        self._rows[slot].banned -= set(ends)

    def end(self, slot: int) -> None:
        self._rows.pop(slot, None)

    def launch(self, batch: Batch, flight: Flight) -> Flight:
        owner = np.repeat(np.arange(len(batch.slots)), np.diff(batch.starts))
        unknown = batch.token_ids < 0
        self.ran_ahead += int(unknown.sum())
        ids = np.where(unknown, self._drawn[batch.slots[owner]], batch.token_ids)
        return self._draw(self._runner.run(replace(batch, token_ids=ids)), flight)

    def launch_known(self, rows: np.ndarray, flight: Flight) -> Flight:
        return self._draw(rows, flight)

    def _draw(self, logits: np.ndarray, flight: Flight) -> Flight:
        self.launches += 1
        drawn = {request.slot for request in flight.drawn}
        settled = {request.slot for request in flight.rows} & set(self._rows) - drawn
        assert not settled, f"a card would draw for slots {settled}: they have settings, and nobody waits for a token"
        self.settled_beside_a_draw += len(flight.rows) - len(flight.drawn) if flight.drawn else 0
        if self._last is not None:
            self._last.fill_(torch.nan)  # as the next launch of a card overwrites them
        self._last = torch.from_numpy(np.array(logits, dtype=np.float32))
        for request in flight.drawn:
            row = self._rows[request.slot]
            own = logits[flight.rows.index(request)][None].copy()
            draw = Draw(row.params, row.position, (*self._never, *sorted(row.banned)), row.adjustments)
            token = sample(own, [replace(draw, params=replace(row.params, logprobs=False, top_logprobs=0))])[0].token
            self._drawn[request.slot] = -1 if token is None else token
            if token is not None:
                row.position += 1
                if row.adjustments is not None:
                    row.adjustments.push(token)
        flight.logits, flight.tokens = self._last, self._drawn.copy()
        return flight

    def land(self, flight: Flight) -> list[int]:
        assert flight.tokens is not None
        tokens: list[int] = flight.tokens.tolist()
        return tokens


def use_late_device(monkeypatch: pytest.MonkeyPatch) -> list[LateDevice]:
    """From now on every engine of this test runs on one; they are collected in the list."""
    made: list[LateDevice] = []

    def device_steps(self: Runner, never: Sequence[int]) -> LateDevice:
        made.append(LateDevice(self, never))
        return made[-1]

    monkeypatch.setattr(Runner, "device_steps", device_steps)
    return made
