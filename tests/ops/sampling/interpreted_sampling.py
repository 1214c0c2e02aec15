"""The sampler's kernels in Triton's interpreter; test_triton_sampling.py runs this file in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton import language as tl

from kittiwake.engine.device_steps import DeviceSteps
from kittiwake.engine.flight import Flight
from kittiwake.engine.request import SamplingParams
from kittiwake.errors import KittiwakeError
from kittiwake.ops.sampling import reference, triton_kernels
from kittiwake.ops.sampling.cases import hostile_rows, not_finite_rows, random_rows
from kittiwake.ops.sampling.triton import DeviceSampler, _Pool
from tests.families.recorded_graphs import recorded_graphs
from tests.ops.hazards import watched
from tests.ops.sampling.borders import adjusted, may_come

GREEDY = SamplingParams(temperature=0.0)
KINDS = (
    GREEDY,
    SamplingParams(seed=3),
    SamplingParams(temperature=0.7, top_k=5, seed=2**63 - 1),
    SamplingParams(temperature=1.3, top_p=0.8, seed=5),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.6, seed=6),
    SamplingParams(min_p=0.05, seed=7),
    SamplingParams(temperature=2.0, top_k=30, top_p=0.9, min_p=0.01, sampling_order="rwkv", seed=8),
    SamplingParams(temperature=1e-30, top_p=0.9, seed=9),
    SamplingParams(temperature=1e30, top_k=2, seed=10),
)


@pytest.fixture(autouse=True)
def _watched_with_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels find marks and biases by their addresses."""
    pools: list[_Pool] = []
    make = _Pool.__init__

    def kept(self: _Pool, *given: Any) -> None:
        make(self, *given)
        pools.append(self)

    monkeypatch.setattr(_Pool, "__init__", kept)
    with watched(lambda: [chunk for pool in pools for chunk in pool._chunks]):
        yield


def draw(sampler: DeviceSampler, logits: np.ndarray, slots: list[int], greedy_only: bool = False) -> list[int]:
    """Tokens by slot; what no row names stays at -9."""
    out = torch.full((sampler.slots + 1,), -9, dtype=torch.int64)
    before = logits.copy()
    rows = torch.from_numpy(logits)
    sampler.draw(rows, torch.tensor(slots, dtype=torch.int32), out, greedy_only=greedy_only)
    assert np.array_equal(logits, before, equal_nan=True)
    return out.tolist()


@pytest.mark.parametrize(("vocab", "block", "chunk"), [(1, 16, 16), (2, 16, 16), (65, 32, 32), (1000, 256, 256)])
def test_every_kind_of_row_gives_the_token_of_the_reference(vocab: int, block: int, chunk: int) -> None:
    sampler = DeviceSampler(vocab, len(KINDS), len(KINDS), "cpu", block=block, chunk=chunk)
    rows = random_rows(len(KINDS), vocab)
    for index, params in enumerate(KINDS):
        sampler.set_row(index + 1, params, 40)
    for position in (40, 41) if vocab == 65 else (40,):
        out = draw(sampler, rows, list(range(1, len(KINDS) + 1)))
        for row, params, token in zip(rows, KINDS, out[1:], strict=True):
            assert may_come(row, params, position, token), (params, token)


def test_the_filters_keep_what_the_reference_keeps_and_nothing_more() -> None:
    """Logits fall with the id, and the noise is close to 1: the last token kept is drawn."""
    row = -0.05 * (np.arange(65, dtype=np.float32) // 2)  # pairs of ties
    position = next(place for place in range(10**6) if reference.uniform(0, place) > 0.9995)
    kinds = [
        SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, sampling_order=order)
        for top_k, top_p, min_p, order in (
            *((top_k, 1.0, 0.0, "standard") for top_k in (1, 3, 64)),
            *((0, top_p, 0.0, "standard") for top_p in (0.031, 0.5)),
            *((top_k, 0.9, 0.0, "standard") for top_k in (4, 10, 12, 14, 22)),
            (20, 0.35, 0.4, "rwkv"),
            (0, 1.0, 0.5, "standard"),
        )
    ]
    sampler = DeviceSampler(65, len(kinds), len(kinds), "cpu", block=64)
    # the first draw must leave nothing behind that the second sees, whose rows lie elsewhere
    for given in (dict(enumerate(kinds, 1)), {1: kinds[10], 2: kinds[4], 3: kinds[0]}):
        for slot, params in given.items():
            sampler.set_row(slot, params, position)
        out = draw(sampler, np.tile(row, (len(given), 1)), list(given))
        for params, token in zip(given.values(), out[1 : len(given) + 1], strict=True):
            first = params.sampling_order == "rwkv"
            kept = reference.kept(row, 1.0, params.top_k, params.top_p, params.min_p, first)
            assert token == np.flatnonzero(kept)[-1], params


@pytest.mark.parametrize("name", [*hostile_rows(), *not_finite_rows()])
def test_hostile_rows(name: str) -> None:
    row = (hostile_rows() | not_finite_rows())[name]
    kinds = (GREEDY, *KINDS[3:5], KINDS[6])
    sampler = DeviceSampler(len(row), 4, 4, "cpu", block=64)
    for slot, params in enumerate(kinds, 1):
        sampler.set_row(slot, params, 2**33)
    out = draw(sampler, np.tile(row, (4, 1)), [1, 2, 3, 4])
    for params, token in zip(kinds, out[1:], strict=True):
        assert may_come(row, params, 2**33, token), (params, token)


def test_penalties_bias_and_bans_over_several_steps() -> None:
    vocab, given = 65, (3, 3, 9, 64)
    kinds = (
        SamplingParams(temperature=0.0, repetition_penalty=1.7, frequency_penalty=0.3, logit_bias={1: 0.1, 7: -100}),
        SamplingParams(temperature=0.0, presence_penalty=1.5, logit_bias={5: 99.9, 6: 99.9}),
        SamplingParams(temperature=0.8, repetition_penalty=0.5, frequency_penalty=-0.7, top_k=9, seed=4),
        SamplingParams(temperature=0.0, logit_bias={2: 100.0}),
    )
    sampler = DeviceSampler(vocab, 4, 9, "cpu", never=(0, 8), block=32)
    slots = [7, 2, 9, 4]
    for slot, params in zip(slots, kinds, strict=True):
        sampler.set_row(slot, params, 4, given, banned=(2, 3) if slot == 4 else ())
    drawn: list[tuple[int, ...]] = [()] * 4
    rows = random_rows(4, vocab, seed=1)
    for step in range(5):
        if step == 3:
            sampler.unban(4, [2])
        out = draw(sampler, rows, slots)
        for index, (slot, params) in enumerate(zip(slots, kinds, strict=True)):
            banned = () if slot != 4 else (2, 3) if step < 3 else (3,)
            row = adjusted(rows[index], params, given, drawn[index], (0, 8, *banned))
            assert may_come(row, params, 4 + step, out[slot]), (params, step)
            drawn[index] += (out[slot],)
    assert drawn[3][:3].count(2) == 0 and drawn[3][3:] == (2, 2)
    assert len(set(drawn[1][:2])) == 2  # a presence penalty turned one of two equal biases


def test_spare_rows_draw_nothing_and_a_row_does_not_see_its_neighbours() -> None:
    rows = random_rows(5, 65, seed=2)
    params = SamplingParams(temperature=1.1, top_k=20, top_p=0.9, seed=1)
    sampler = DeviceSampler(65, 5, 4, "cpu", block=32)

    def fresh() -> None:
        for slot in (1, 2):
            sampler.set_row(slot, params, 11)

    fresh()
    alone = draw(sampler, rows[3:4], [2])[2]
    fresh()
    crowd = draw(sampler, rows, [-1, 1, 0, 2, 4])  # slot 4 has no settings
    assert crowd[2] == alone
    assert [crowd[slot] for slot in (0, 3, 4)] == [-9, -9, -9]
    sampler.clear_row(2)
    assert draw(sampler, rows[3:4], [2])[2] == -9


def test_faults_leave_the_position_and_their_neighbours_alone() -> None:
    rows = random_rows(3, 37)
    rows[0, 5], rows[1] = np.nan, -np.inf
    params = SamplingParams(top_p=0.9, seed=2, frequency_penalty=0.5)
    sampler = DeviceSampler(37, 3, 3, "cpu", block=16)
    for slot in (1, 2, 3):
        sampler.set_row(slot, params, 6)
    out = draw(sampler, rows, [1, 2, 3])
    assert out[1:3] == [reference.NOT_FINITE, reference.NOTHING_LEFT]
    assert may_come(rows[2], params, 6, out[3])
    again = random_rows(3, 37, seed=3)
    assert may_come(again[0], params, 6, draw(sampler, again[:1], [1])[1])


def test_everything_banned_is_nothing_left_and_a_banned_infinity_does_not_count() -> None:
    sampler = DeviceSampler(3, 1, 1, "cpu", never=(0,), block=16)
    row = np.array([[np.inf, 1.0, 2.0]], dtype=np.float32)
    for params in (GREEDY, SamplingParams(top_k=1)):
        sampler.set_row(1, params, 0, banned=(1, 2))
        assert draw(sampler, row, [1])[1] == reference.NOTHING_LEFT
        sampler.unban(1, [2])
        assert draw(sampler, row, [1])[1] == 2


def test_greedy_alone_is_greedy_in_a_mixed_batch() -> None:
    rows = random_rows(2, 257)
    rows[0, [9, 200]] = 50.0
    tokens = []
    for greedy_only in (True, False):
        sampler = DeviceSampler(257, 2, 2, "cpu", block=64)
        for slot in (1, 2):
            sampler.set_row(slot, GREEDY, 0)
        tokens.append(draw(sampler, rows, [1, 2], greedy_only))
    assert tokens[0] == tokens[1] == [-9, 9, int(rows[1].argmax())]


def test_masses_of_another_draw_lead_to_no_token_outside_the_vocabulary() -> None:
    """A sampled row where only greedy ones were promised: nothing weighs it, and it counts no token of another's memory."""
    params = SamplingParams(frequency_penalty=0.5, seed=1)
    position = next(place for place in range(100) if reference.uniform(1, place) > 0.9)
    sampler = DeviceSampler(65, 1, 2, "cpu", block=32)
    sampler.set_row(2, SamplingParams(seed=5), 0)
    draw(sampler, np.zeros((1, 65), dtype=np.float32), [2])  # leaves 65 equal masses behind
    sampler.set_row(1, params, position)
    peaked = np.full((1, 65), -90.0, dtype=np.float32)
    peaked[0, 7] = 90.0
    assert draw(sampler, peaked, [1], greedy_only=True)[1] == reference.NOTHING_LEFT
    assert int(sampler._marks_of[1].abs().sum()) == 0
    assert int(sampler._records[1, int(triton_kernels.POSITION.value)]) == position
    assert draw(sampler, peaked, [1])[1] == 7


class _Asked:
    """A request, as far as the steps look at it."""

    def __init__(self, slot: int, params: SamplingParams) -> None:
        self.slot, self.answer = slot, SimpleNamespace(params=params)


class _Logits:
    """A model that gives the same logits at every step, of decoding sequences in slots 1, 2, …"""

    def __init__(self, rows: np.ndarray) -> None:
        self.place = torch.device("cpu")
        self._logits = torch.from_numpy(rows)
        self._slots = torch.arange(1, len(rows) + 1, dtype=torch.int32)

    def draw_rows(self, slots: int) -> int:
        return slots

    def forward_to_draw(self, batch: Any, states: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._logits, self._slots


def test_a_step_draws_of_every_slot_that_has_settings_what_it_draws_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a captured draw is one of greedy rows alone follows from the slots that it finds settings of."""
    penalised = SamplingParams(temperature=0.9, repetition_penalty=1.2, seed=6)
    rows = random_rows(2, 65, seed=4)
    alone = DeviceSampler(65, 1, 1, "cpu")
    alone.set_row(1, penalised, 9, (3, 4))
    expected = draw(alone, rows[1:], [1])[1]
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=int, synchronize=int))
    with recorded_graphs():
        states = SimpleNamespace(slots=2, device="cpu", drawn=torch.zeros(3, dtype=torch.int64))
        steps = DeviceSteps(_Logits(rows), states, 65, ())  # type: ignore[arg-type]
        steps.begin(1, GREEDY, 9, (), ())
        steps.begin(2, penalised, 9, (3, 4), ())
        first, second = _Asked(1, GREEDY), _Asked(2, penalised)
        flight = Flight([first, second], [first], must_land=True)  # type: ignore[list-item]
        tokens = steps.land(steps.launch(None, flight))  # type: ignore[arg-type]
        assert tokens[1:] == [int(rows[0].argmax()), expected]
        steps.end(2)
        assert steps.land(steps.launch(None, flight))[1:] == [tokens[1], expected]  # type: ignore[arg-type]
        assert [greedy for *_, greedy in steps._graphs] == [False, True]  # greedy rows alone have a shorter draw again


def test_a_slot_used_again_remembers_nothing() -> None:
    row = random_rows(1, 33)
    sampler = DeviceSampler(33, 1, 1, "cpu", block=16)
    sampler.set_row(1, SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias={4: 100.0}), 0, banned=(5,))
    for _ in range(2):
        draw(sampler, row, [1])
    sampler.set_row(1, SamplingParams(temperature=0.0, presence_penalty=2.0), 0)
    assert draw(sampler, row, [1])[1] == int(row.argmax())
    held = sampler.workspace_bytes
    for _ in range(30):
        sampler.set_row(1, SamplingParams(presence_penalty=1.0, logit_bias={3: 1.0}), 0)
    assert sampler.workspace_bytes == held


@triton.jit
def _uniform_kernel(seeds, positions, out):  # type: ignore[no-untyped-def]
    at = tl.program_id(0)
    tl.store(out + at, triton_kernels.uniform(tl.load(seeds + at), tl.load(positions + at)))


def test_noise_is_that_of_the_reference() -> None:
    keys = [(a, b) for a in (0, 1, 2**32 - 1, 2**32, 2**63 - 1) for b in (0, 7, 2**32 - 1, 2**32, 2**63 - 1)]
    seeds, positions = (torch.tensor(values) for values in zip(*keys, strict=True))
    out = torch.zeros(len(keys), dtype=torch.float64)
    _uniform_kernel[(len(keys),)](seeds, positions, out)
    assert out.tolist() == [reference.uniform(seed, position) for seed, position in keys]


def test_bad_arguments_are_named() -> None:
    sampler = DeviceSampler(5, 2, 2, "cpu", block=16)
    good = np.zeros((1, 5), dtype=np.float32)
    with pytest.raises(KittiwakeError, match="slot 3 cannot"):
        sampler.set_row(3, GREEDY, 0)
    with pytest.raises(KittiwakeError, match="token id 5 is outside"):
        sampler.set_row(1, GREEDY, 0, banned=(5,))
    with pytest.raises(KittiwakeError, match="1 to 2 rows, got 3"):
        draw(sampler, np.zeros((3, 5), dtype=np.float32), [1, 2, 0])
    with pytest.raises(KittiwakeError, match="logits must be"):
        draw(sampler, good.astype(np.float64), [1])
    with pytest.raises(KittiwakeError, match="slots must be"):
        draw(sampler, good, [1, 2])
    with pytest.raises(KittiwakeError, match="262,144"):
        DeviceSampler(2**18 + 1, 1, 1, "cpu")
