"""The sampler on a real device, 65,536 logits a row. ``python -m tests.device.test_device_sampling`` prints its times."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch

from kittiwake.engine.request import SamplingParams
from kittiwake.engine.sampler import Draw, adjustments_for, sample
from kittiwake.ops.sampling import reference
from kittiwake.ops.sampling.cases import hostile_rows, not_finite_rows, random_rows
from tests.ops.sampling.borders import adjusted, may_come

# Without a device these tests are skipped, but their module is imported: on machines that have no Triton too.
if torch.cuda.is_available():
    from kittiwake.ops.sampling.triton import DeviceSampler

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels run in Triton's interpreter"),
]
VOCAB = 65_536
NEVER = (0, 65_530)
GIVEN = (11, 11, 500, 65_535)
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2),
    SamplingParams(temperature=1.2, top_k=50, seed=3),
    SamplingParams(temperature=0.9, top_k=2000, top_p=0.7, min_p=0.02, seed=2**63 - 1),
    SamplingParams(temperature=1.5, top_k=40_000, top_p=0.95, sampling_order="rwkv", seed=5),
    SamplingParams(min_p=0.1, seed=6),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={7: 3.7, 9: -100}),
    SamplingParams(top_p=0.8, presence_penalty=0.7, frequency_penalty=0.2, logit_bias={3: 9.1}, seed=8),
    SamplingParams(temperature=0.5, top_p=0.9999, repetition_penalty=0.8, seed=9),
)


@cache
def logits_rows(count: int, seed: int = 0) -> np.ndarray:
    rows = random_rows(count, VOCAB, seed)
    rows.setflags(write=False)
    return rows


def made(rows: int, kinds: Sequence[SamplingParams] = KINDS, position: int = 9) -> DeviceSampler:
    """A sampler whose slot i + 1 has the settings of kind i, over and over."""
    sampler = DeviceSampler(VOCAB, rows, rows, "cuda", never=NEVER)
    for index in range(rows):
        sampler.set_row(index + 1, kinds[index % len(kinds)], position, GIVEN)
    return sampler


def drawn(sampler: DeviceSampler, logits: torch.Tensor, slots: Sequence[int], steps: int = 1) -> list[list[int]]:
    """Tokens by row, one list a step."""
    out = torch.full((sampler.slots + 1,), -9, dtype=torch.int64, device="cuda")
    named = torch.tensor(slots, dtype=torch.int32, device="cuda")
    found = []
    for _ in range(steps):
        sampler.draw(logits, named, out)
        found.append(out[named.long()].tolist())
    return found


def test_every_kind_of_row_gives_the_token_of_the_reference_and_of_the_cpu() -> None:
    count, differing = 4 * len(KINDS), 0
    rows = logits_rows(count)
    steps = drawn(made(count), torch.from_numpy(rows.copy()).cuda(), range(1, count + 1), 3)
    for index in range(count):
        params, before = KINDS[index % len(KINDS)], ()
        for step, tokens in enumerate(steps):
            row = adjusted(rows[index], params, GIVEN, before, NEVER)
            assert may_come(row, params, 9 + step, tokens[index]), (index, step)
            before += (tokens[index],)
    draws = [
        Draw(params, 9, NEVER, adjustments_for(params, GIVEN, VOCAB))
        for params in (KINDS[index % len(KINDS)] for index in range(count))
    ]
    for one, token in zip(sample(rows.copy(), draws), steps[0], strict=True):
        differing += one.token != token
    assert differing <= 1  # rounding may move a draw across a border; that it moves two of forty is one in thousands


def test_a_row_gives_the_same_tokens_alone_and_in_any_crowd() -> None:
    rows = torch.from_numpy(logits_rows(40).copy()).cuda()
    crowd = drawn(made(40), rows, range(1, 41), 4)
    for size in (1, 3, 17):
        sampler = made(40)
        for first in range(0, 40, size):
            slots = list(range(first + 1, min(first + size, 40) + 1))
            part = drawn(sampler, rows[first : first + size].contiguous(), slots, 4)
            assert part == [step[first : first + size] for step in crowd]
    spread = torch.zeros((132, VOCAB), device="cuda")
    places = torch.arange(0, 120, 3, device="cuda")
    spread[places] = rows
    slots = [0] * 132
    for slot, place in enumerate(places.tolist(), 1):
        slots[place] = slot
    wide = DeviceSampler(VOCAB, 132, 40, "cuda", never=NEVER)
    for index in range(40):
        wide.set_row(index + 1, KINDS[index % len(KINDS)], 9, GIVEN)
    found = drawn(wide, spread, slots, 4)
    assert [[step[place] for place in places.tolist()] for step in found] == crowd


def test_a_replayed_graph_draws_what_eager_calls_draw() -> None:
    rows = torch.from_numpy(logits_rows(30).copy()).cuda()
    expected = drawn(made(30), rows, range(1, 31), 6)  # compiles the kernels, too
    sampler = made(30)
    out = torch.zeros(31, dtype=torch.int64, device="cuda")
    slots = torch.arange(1, 31, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.draw(rows, slots, out)
    held = torch.cuda.memory_allocated()
    for tokens in expected:
        graph.replay()
        assert out[1:].tolist() == tokens
    assert torch.cuda.memory_allocated() == held
    # Settings changed after the capture, rows of bias and counts made after it too.
    fresh = SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias={77: 90.0})
    sampler.set_row(4, fresh, 0, (), banned=(5,))
    graph.replay()
    assert out[4].item() == 77
    sampler.set_row(4, fresh, 0, (), banned=(77,))
    graph.replay()
    assert out[4].item() != 77


def test_hostile_rows_and_faults() -> None:
    for row in (*hostile_rows().values(), *not_finite_rows().values()):
        kinds = [params for params in KINDS if not params.logit_bias]
        sampler = DeviceSampler(len(row), len(kinds), len(kinds), "cuda")
        for slot, params in enumerate(kinds, 1):
            sampler.set_row(slot, params, 5)
        logits = torch.from_numpy(np.tile(row, (len(kinds), 1))).cuda()
        before = logits.clone()
        tokens = drawn(sampler, logits, range(1, len(kinds) + 1))[0]
        assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
        for params, token in zip(kinds, tokens, strict=True):
            assert may_come(adjusted(row, params), params, 5, token), (params, token)


def test_flat_rows_and_ties_across_parts() -> None:
    """The searches take their slow ways here: lists longer than one chunk, brackets across zero."""
    rng = np.random.default_rng(1)
    rows = np.stack(
        [
            np.zeros(VOCAB),
            rng.standard_normal(VOCAB) * 1e-3,
            rng.integers(0, 3, VOCAB) - 1.0,
            rng.standard_normal(VOCAB) * 0.1 - 50,
            np.where(rng.random(VOCAB) < 0.5, -np.inf, 1.0),
        ]
    ).astype(np.float32)
    for params in KINDS[1:7]:
        tokens = drawn(made(5, (params,)), torch.from_numpy(rows).cuda(), range(1, 6))[0]
        for row, token in zip(rows, tokens, strict=True):
            assert may_come(adjusted(row, params, banned=NEVER), params, 9, token), params


def test_an_all_greedy_draw_is_the_largest_logit() -> None:
    rows = logits_rows(8, 3)
    sampler = DeviceSampler(VOCAB, 8, 8, "cuda")
    for slot in range(1, 9):
        sampler.set_row(slot, KINDS[0], 0)
    out = torch.zeros(9, dtype=torch.int64, device="cuda")
    slots = torch.arange(1, 9, dtype=torch.int32, device="cuda")
    sampler.draw(torch.from_numpy(rows.copy()).cuda(), slots, out, greedy_only=True)
    assert out[1:].tolist() == rows.argmax(1).tolist()


def test_noise_over_many_positions_is_the_distribution() -> None:
    """Chi-squared over 4,096 positions of one slot with four possible tokens."""
    logits = torch.full((1, VOCAB), -torch.inf, device="cuda")
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    logits[0, [5, 4095, 4096, 65_000]] = torch.from_numpy(np.log(shares).astype(np.float32)).cuda()
    params = SamplingParams(seed=77)
    sampler = made(1, (params,), 0)
    out = torch.zeros(2, dtype=torch.int64, device="cuda")
    kept = torch.zeros(4096, dtype=torch.int64, device="cuda")
    slots = torch.ones(1, dtype=torch.int32, device="cuda")
    for position in range(4096):
        sampler.draw(logits, slots, out)
        kept[position] = out[1]
    u = np.array([reference.uniform(77, position) for position in range(4096)])
    expected = np.array([5, 4095, 4096, 65_000])[np.searchsorted(np.cumsum(shares)[:-1], u, side="right")]
    assert (kept.cpu().numpy() == expected).mean() > 0.999


def median_us(work: Callable[[], None], draws: int) -> float:
    """Median time of one of the draws in a captured graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(draws):
            work()
    times = []
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / draws)
    return float(np.median(times))


TIMED = {
    "greedy, by promise": (KINDS[0],),
    "greedy": (KINDS[0],),
    "temperature": (KINDS[1],),
    "top_p 0.9": (SamplingParams(top_p=0.9),),
    "top_k 50, top_p 0.9": (SamplingParams(top_k=50, top_p=0.9),),
    "top_p 0.9, penalties": (SamplingParams(top_p=0.9, presence_penalty=0.5, repetition_penalty=1.1),),
    "a quarter sampled": (KINDS[0], KINDS[0], KINDS[0], SamplingParams(top_p=0.9)),
}


def main() -> None:
    """µs of a draw in a graph, by kind and rows, on bell-shaped logits of deviation 1 and 4; one JSON line at the end."""
    found: dict[str, dict[str, float]] = {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, vocabulary {VOCAB}")
    for deviation in (1.0, 4.0):
        for name, kinds in TIMED.items():
            line = found[f"{name}, deviation {deviation:g}"] = {}
            for rows in (1, 8, 32, 128, 384):
                sampler = made(rows, kinds)
                logits = torch.randn((rows, VOCAB), device="cuda") * deviation
                slots = torch.arange(1, rows + 1, dtype=torch.int32, device="cuda")
                out = torch.zeros(rows + 1, dtype=torch.int64, device="cuda")
                by_promise = name.endswith("promise")
                line[str(rows)] = median_us(
                    lambda s=sampler, x=logits, i=slots, o=out, g=by_promise: s.draw(x, i, o, greedy_only=g), 10
                )
            print(f"{name:24} deviation {deviation:g}:", "  ".join(f"{rows} {us:.1f}" for rows, us in line.items()))
    print(json.dumps({"draw_us": found}))


if __name__ == "__main__":
    main()
