"""Steps on a CUDA device: forward and draw are enqueued, tokens feed back on the device, the host reads them a step later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kittiwake.device import captured, on_its_card
from kittiwake.engine.batch import Batch
from kittiwake.engine.cuda_states import CudaStateTable, sent
from kittiwake.engine.flight import Flight
from kittiwake.engine.request import SamplingParams
from kittiwake.ops.sampling.triton import DeviceSampler

_RING = 4


class DrawableModel(Protocol):
    """What the steps need of a model on CUDA."""

    place: torch.device
    """The card that it is on."""

    def draw_rows(self, slots: int) -> int:
        """Most rows of logits that :meth:`forward_to_draw` gives for so many slots."""

    def forward_to_draw(self, batch: Batch, states: CudaStateTable) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [W, vocab] of the wanted rows, and their slots int32 [W] where both always stand at these addresses."""

    def capture_decoding(self, states: CudaStateTable) -> None:
        """Capture the launches of every count of decoding sequences."""


class DeviceSteps:
    """Launches steps of one model on one state table."""

    def __init__(self, model: DrawableModel, states: CudaStateTable, vocab_size: int, never: Sequence[int]) -> None:
        self.place = model.place
        """The card that model and states are on."""
        self._model, self._states = model, states
        self._make(vocab_size, never)

    @on_its_card
    def _make(self, vocab_size: int, never: Sequence[int]) -> None:
        """The sampler with its kernels, and where tokens come back to."""
        model, states = self._model, self._states
        self.sampler = DeviceSampler(vocab_size, model.draw_rows(states.slots), states.slots, states.device, never)
        nobody = torch.zeros(1, dtype=torch.int32, device=states.device)
        for greedy in (True, False):  # compiles the kernels
            flat = torch.zeros((1, vocab_size), dtype=torch.float32, device=states.device)
            self.sampler.draw(flat, nobody, states.drawn, greedy_only=greedy)
        pinned = [torch.zeros_like(states.drawn, device="cpu").pin_memory() for _ in range(_RING)]
        self._ring = [(tensor, tensor.numpy(), torch.cuda.Event()) for tensor in pinned]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._graphs: dict[tuple[int, int, int, bool], Any] = {}
        self._is_greedy: dict[int, bool] = {}
        """Of each slot that draws, as long as it does."""

    def begin(
        self, slot: int, params: SamplingParams, position: int, given: Sequence[int], ends: Sequence[int]
    ) -> None:
        """A slot will draw its first token: how, where, after what, and which ids not yet."""
        self.sampler.set_row(slot, params, position, given, ends)
        self._is_greedy[slot] = params.temperature == 0.0

    def let_end(self, slot: int, ends: Sequence[int]) -> None:
        """From the next draw on these ids may come."""
        self.sampler.unban(slot, ends)

    def end(self, slot: int) -> None:
        """A slot draws no more."""
        if self._is_greedy.pop(slot, None) is not None:
            self.sampler.clear_row(slot)

    @on_its_card
    def launch(self, batch: Batch, flight: Flight) -> Flight:
        """Enqueue a forward and the draw of ``flight.drawn``."""
        logits, slots = self._model.forward_to_draw(batch, self._states)
        return self._draw(logits, slots, flight)

    @on_its_card
    def launch_known(self, rows: np.ndarray, flight: Flight) -> Flight:
        """Enqueue a draw from logits [W, vocab] that the host has."""
        return self._draw(sent(rows, self._states.device), None, flight)

    def _draw(self, logits: torch.Tensor, slots: torch.Tensor | None, flight: Flight) -> Flight:
        # a captured draw is one of every slot that has settings, be it among those to be drawn or not
        greedy = all(self._is_greedy.get(request.slot, True) for request in flight.rows)
        if flight.drawn:
            if slots is not None:
                self._graph(logits, slots, greedy).replay()
            else:
                drawn = set(map(id, flight.drawn))
                places = [request.slot if id(request) in drawn else 0 for request in flight.rows]
                slots = sent(np.array(places, dtype=np.int32), self._states.device)
                for first in range(0, len(places), self.sampler.max_rows):
                    part = slice(first, first + self.sampler.max_rows)
                    self.sampler.draw(logits[part], slots[part], self._states.drawn, greedy_only=greedy)
        tensor, flight.tokens, flight.event = self._ring[self._turn]
        self._turn = (self._turn + 1) % _RING
        tensor.copy_(self._states.drawn, non_blocking=True)
        flight.event.record()
        flight.logits = logits
        return flight

    def _graph(self, logits: torch.Tensor, slots: torch.Tensor, greedy: bool) -> Any:
        """The captured draw from these addresses."""
        key = (logits.data_ptr(), slots.data_ptr(), len(slots), greedy)
        if key not in self._graphs:
            torch.cuda.synchronize()
            self._graphs[key] = captured(
                lambda: self.sampler.draw(logits, slots, self._states.drawn, greedy_only=greedy)
            )
        return self._graphs[key]

    def land(self, flight: Flight) -> list[int]:
        """Wait for a flight; by slot the token it drew, if it did, negative where none could be drawn."""
        flight.event.synchronize()
        assert flight.tokens is not None
        tokens: list[int] = flight.tokens.tolist()
        return tokens
