"""Sampling on CUDA: settings live in a table by state slot, and a draw is a fixed row of launches that a graph can hold.

A draw reads and writes nothing but tensors made when the sampler was made (and rows of a pool, by address), waits for
nothing and asks for no memory. It leaves the logits as they are. A row's token depends on its own logits and slot alone:
the kernels (``triton_kernels.py``) sum whole numbers, which no split or order changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import triton

from kittiwake.errors import KittiwakeError
from kittiwake.ops.sampling import triton_kernels as kernels
from kittiwake.ops.sampling.reference import NOT_FINITE, NOTHING_LEFT

__all__ = ["BANNED_BIAS", "NOTHING_LEFT", "NOT_FINITE", "DeviceSampler", "Settings"]

BANNED_BIAS = -100.0
"""A ``logit_bias`` that bans its token."""
_MAX_VOCAB = 2**18  # sums of so many times 2**44 stay below 2**63
_BLOCK = 4096  # 16 parts of 65,536 logits; 32 a thread
_CHUNK = 8192  # keys that a bisection holds in registers
_POOL_ROWS = 8
_LARGEST = np.float32(3.4028235e38)


class Settings(Protocol):
    """What a slot is sampled with; :class:`kittiwake.engine.request.SamplingParams` says what each means."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def sampling_order(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...


class _Pool:
    """Rows [vocab] that stay where they are: chunks are added and never moved, since graphs hold their addresses."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._vocab_size, self._dtype, self._device = vocab_size, dtype, device
        self._chunks: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """A row of zeros; what the stream was told before may still read what the row held."""
        if not self._free:
            chunk = torch.empty((_POOL_ROWS, self._vocab_size), dtype=self._dtype, device=self._device)
            self._chunks.append(chunk)
            self._free.extend(chunk)
        return self._free.pop().zero_()

    def give(self, row: torch.Tensor) -> None:
        self._free.append(row)

    @property
    def bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)


class DeviceSampler:
    """Draws tokens for rows of logits on one device, each with the settings of its state slot.

    Slots are 1 to ``slots``; 0 and below stand for spare rows, which draw nothing. ``never`` are ids that no row may give.
    Calls are work for the current stream and return before it is done; use one stream. Raises KittiwakeError for a
    vocabulary of more than 262,144 tokens, and for slots, ids and tensors that are not what is described here.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        slots: int,
        device: torch.device | str,
        never: Sequence[int] = (),
        block: int = _BLOCK,
        chunk: int = _CHUNK,
    ) -> None:
        if not 0 < vocab_size <= _MAX_VOCAB:
            raise KittiwakeError(
                f"sampling on the device takes 1 to {_MAX_VOCAB:,} tokens, the vocabulary has {vocab_size:,}",
                "sample on the CPU",
            )
        self.vocab_size, self.max_rows, self.slots = vocab_size, max_rows, slots
        self.device = torch.device(device)
        self._parts = triton.cdiv(vocab_size, block)
        wide = triton.next_power_of_2(self._parts)
        self._chunk = chunk
        self._shape: dict[str, Any] = {"BLOCK": block, "PARTS": wide, "num_warps": 8, "enable_fp_fusion": False}
        levels = int(kernels.LEVELS.value)
        self._records = self._zeros(torch.int64, slots + 1, int(kernels.FIELDS.value))
        self._never = self._zeros(torch.uint8, vocab_size)
        self._adjusted = self._zeros(torch.float32, max_rows, vocab_size)
        self._lists = self._zeros(torch.int32, max_rows, vocab_size)
        self._list_sizes = self._zeros(torch.int32, max_rows, 2)
        self._part_tops = self._zeros(torch.float32, max_rows, wide)
        self._part_ids = self._zeros(torch.int32, max_rows, wide)
        self._part_moments = self._zeros(torch.float32, max_rows, wide, 3)
        self._part_counts = self._zeros(torch.int64, max_rows, wide, levels)
        self._part_masses = self._zeros(torch.int64, max_rows, wide, levels)
        self._part_kept = self._zeros(torch.int64, max_rows, wide)
        self._levels = self._zeros(torch.float32, max_rows, levels)
        self._floors = self._zeros(torch.int32, max_rows)
        self._totals = self._zeros(torch.int64, max_rows)
        self._marks = _Pool(vocab_size, torch.int32, self.device)
        self._biases = _Pool(vocab_size, torch.float64, self.device)
        self._marks_of: dict[int, torch.Tensor] = {}
        self._bias_of: dict[int, torch.Tensor] = {}
        if never:
            self._never.index_fill_(0, self._ids(never), 1)

    @property
    def workspace_bytes(self) -> int:
        """Device memory held, rows of bias and penalties included."""
        fixed = sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))
        return fixed + self._marks.bytes + self._biases.bytes

    def set_row(
        self,
        slot: int,
        params: Settings,
        position: int,
        given_tokens: Sequence[int] = (),
        banned: Sequence[int] = (),
    ) -> None:
        """What ``slot`` is sampled with from now on.

        ``position`` is the absolute position of the token to be drawn next; each draw moves it on. ``given_tokens`` are
        those before it, which only the repetition penalty reads; ``banned`` may not be drawn until :meth:`unban`.
        """
        self._check_slot(slot)
        self._give_rows(slot)
        has_penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
        if has_penalties or len(banned) > 0:
            marks = self._marks_of[slot] = self._marks.take()
            if params.repetition_penalty != 1.0 and len(given_tokens) > 0:
                marks.index_fill_(0, self._ids(given_tokens), 2)
            self._mark(marks, banned, True)
        if params.logit_bias:
            values = [-np.inf if bias == BANNED_BIAS else bias for bias in params.logit_bias.values()]
            self._bias_of[slot] = self._biases.take()
            at = self._ids(params.logit_bias, unique=False)
            self._bias_of[slot].index_copy_(0, at, self._sent(np.array(values, dtype=np.float64)))
        self._records[slot].copy_(self._staged(self._record(slot, params, position)), non_blocking=True)

    def clear_row(self, slot: int) -> None:
        """``slot`` draws nothing from now on."""
        self._check_slot(slot)
        self._give_rows(slot)
        self._records[slot].zero_()

    def unban(self, slot: int, ids: Sequence[int]) -> None:
        """Undo the bans of :meth:`set_row` for these ids."""
        self._check_slot(slot)
        if slot in self._marks_of:
            self._mark(self._marks_of[slot], ids, False)

    def draw(
        self, logits: torch.Tensor, slots: torch.Tensor, tokens_out: torch.Tensor, *, greedy_only: bool = False
    ) -> None:
        """One token a row: float32 logits [W, vocab], int32 slots [W] → int64 ``tokens_out`` [slots + 1], by slot.

        NOT_FINITE or NOTHING_LEFT where none can be drawn; that slot's position and counts then stay as they are. Both
        are negative: whoever feeds tokens back must not look them up. A slot may stand in one row only. ``greedy_only``
        promises that every row is greedy, and saves the launches that the others need; the tokens are the same.
        """
        self._check_tensors(logits, slots, tokens_out)
        rows = logits.shape[0]
        split, whole = (rows, self._parts), (rows,)
        of_row = (slots, self._records)
        best = (self._part_tops, self._part_ids)
        kernels.adjust[split](
            logits, logits.stride(0), *of_row, self._never, self._adjusted, *best, self._part_moments, self.vocab_size,
            **self._shape,
        )  # fmt: skip
        if not greedy_only:
            self._filter(split, whole, of_row, best)
        kernels.pick[whole](
            *of_row, self._adjusted, *best, self._floors, self._part_kept, tokens_out, self.vocab_size,
            **self._shape,
        )  # fmt: skip

    def _filter(
        self, split: tuple[int, int], whole: tuple[int], of_row: tuple[Any, ...], best: tuple[Any, ...]
    ) -> None:
        """Find what the sampled rows may give, and how much of it lies in each part."""
        options, settling = self._shape, {**self._shape, "CHUNK": self._chunk, "num_warps": 16}
        vocab, sums = self.vocab_size, (self._part_counts, self._part_masses)
        kernels.measure_levels[split](
            *of_row, self._adjusted, *best, self._part_moments, self._levels, *sums, vocab, **options
        )
        for by_mass in (False, True):
            kernels.collect[split](
                *of_row, self._adjusted, *best, self._levels, sums[by_mass], self._totals, self._lists,
                self._list_sizes, vocab, BY_MASS=by_mass, **options,
            )  # fmt: skip
            kernels.settle[whole](
                *of_row, *best, self._levels, *sums, self._floors, self._totals, self._lists, self._list_sizes,
                vocab, BY_MASS=by_mass, **settling,
            )  # fmt: skip
        kernels.weigh[split](
            *of_row, self._adjusted, *best, self._floors, self._part_kept, self._list_sizes, vocab, **options
        )

    def _record(self, slot: int, params: Settings, position: int) -> np.ndarray:
        """int64 [FIELDS], as the kernels read it."""
        is_sampled, first = params.temperature != 0.0, params.sampling_order == "rwkv"
        record = np.zeros(int(kernels.FIELDS.value), dtype=np.int64)
        numbers = record.view(np.float64)
        flags = int(kernels.ACTIVE.value)
        flags |= int(kernels.SAMPLED.value) if is_sampled else 0
        flags |= int(kernels.FILTERS_FIRST.value) if first else 0
        flags |= int(kernels.HAS_MIN_P.value) if params.min_p > 0.0 else 0
        record[kernels.FLAGS.value] = flags
        record[kernels.SEED.value], record[kernels.POSITION.value] = params.seed, position
        record[kernels.TOP_K.value] = params.top_k if params.top_k < self.vocab_size else 0
        record[kernels.MARKS.value] = self._marks_of[slot].data_ptr() if slot in self._marks_of else 0
        record[kernels.BIAS.value] = self._bias_of[slot].data_ptr() if slot in self._bias_of else 0
        numbers[kernels.TOP_P.value] = params.top_p
        numbers[kernels.REACH.value] = (
            float(np.log(params.min_p)) * (1.0 if first else params.temperature) if params.min_p > 0.0 else 0.0
        )
        numbers[kernels.REPETITION.value] = params.repetition_penalty
        numbers[kernels.PRESENCE.value] = params.presence_penalty
        numbers[kernels.FREQUENCY.value] = params.frequency_penalty
        if is_sampled:
            with np.errstate(over="ignore", under="ignore", divide="ignore"):
                numbers[kernels.SCALE.value] = min(np.float32(1) / np.float32(params.temperature), _LARGEST)
        return record

    def _mark(self, marks: torch.Tensor, ids: Sequence[int], is_banned: bool) -> None:
        """Set or clear the lowest bit of these ids' marks."""
        if len(ids) > 0:
            at = self._ids(ids)
            old = marks.index_select(0, at)
            marks.index_copy_(0, at, old | 1 if is_banned else old & ~1)

    def _give_rows(self, slot: int) -> None:
        if slot in self._marks_of:
            self._marks.give(self._marks_of.pop(slot))
        if slot in self._bias_of:
            self._biases.give(self._bias_of.pop(slot))

    def _ids(self, ids: Iterable[int], unique: bool = True) -> torch.Tensor:
        """Token ids on the device, checked; each once and in order, or as they came."""
        found = np.fromiter(ids, dtype=np.int64)
        wrong = found[(found < 0) | (found >= self.vocab_size)]
        if len(wrong) > 0:
            raise KittiwakeError(f"token id {wrong[0]} is outside the vocabulary of {self.vocab_size}")
        return self._sent(np.unique(found) if unique else found)

    def _sent(self, values: np.ndarray) -> torch.Tensor:
        return self._staged(values).to(self.device, non_blocking=True)

    def _staged(self, values: np.ndarray) -> torch.Tensor:
        """In memory that a copy can read while the host goes on; torch keeps it until the copy is done."""
        staged = torch.from_numpy(values)
        return staged.pin_memory() if self.device.type == "cuda" else staged

    def _zeros(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _check_slot(self, slot: int) -> None:
        if not 0 < slot <= self.slots:
            raise KittiwakeError(f"slot {slot} cannot be sampled for: slots are 1 to {self.slots}")

    def _check_tensors(self, logits: torch.Tensor, slots: torch.Tensor, tokens_out: torch.Tensor) -> None:
        rows = logits.shape[0] if logits.dim() == 2 else -1
        for name, tensor, dtype, shape in (
            ("logits", logits, torch.float32, (rows, self.vocab_size)),
            ("slots", slots, torch.int32, (rows,)),
            ("tokens_out", tokens_out, torch.int64, (self.slots + 1,)),
        ):
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.stride(-1) != 1:
                raise KittiwakeError(
                    f"{name} must be a contiguous {dtype} tensor {list(shape)}, "
                    f"got {tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}"
                )
            if tensor.device.type != self.device.type:
                raise KittiwakeError(f"{name} must be on {self.device}, got {tensor.device}")
        if not 0 < rows <= self.max_rows:
            raise KittiwakeError(f"a draw takes 1 to {self.max_rows} rows, got {rows}")
