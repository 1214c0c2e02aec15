"""A prompt at some depth and decoding after it, through ``LLM``: scheduler, sampler and host are in the figures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kittiwake.bench.cases import Case, case_work, check_case, check_splits, random_ids
from kittiwake.bench.floors import Ceilings, demand
from kittiwake.bench.gathers import GatherWatch, readers_of
from kittiwake.bench.subject import Subject
from kittiwake.bench.timing import Effort, Figures, measure_ms, median_ms, timed
from kittiwake.config import EngineConfig
from kittiwake.device import available_memory
from kittiwake.engine.engine import Engine
from kittiwake.engine.request import KeptState, SamplingParams
from kittiwake.engine.scoring import Given, prefill_steps
from kittiwake.engine.states import StateTable
from kittiwake.errors import KittiwakeError, PagesError, UsageError
from kittiwake.llm import LLM
from kittiwake.load import Loaded
from kittiwake.progress import Progress

_TOKEN_BYTES = 48
"""What a token takes in a text and in each state kept after it: a number, and where it is."""
_LESS = "take smaller depths, a shorter prompt or fewer requests"
_DEPTH = re.compile(r"([0-9]{1,9})(k?)", re.IGNORECASE)


@dataclass(frozen=True)
class Trip:
    """``requests`` at once: a prompt of ``prompt`` tokens after ``depth`` tokens each, then ``generate`` greedy steps."""

    prompt: int
    generate: int
    depth: int = 0
    requests: int = 1


@dataclass(frozen=True)
class _Place:
    """Where the runs of one depth begin: prompts, the states before them, and the states after them."""

    trip: Trip
    prompts: list[list[int]]
    starts: list[KeptState | None]
    ends: list[KeptState]


@dataclass
class _Runs:
    """Ms of the runs of one depth."""

    watch: GatherWatch | None
    prefill_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)


def parse_depths(text: str) -> list[int]:
    """ "0,4K,32768" → tokens in that order, K being 1,024; one named twice stands twice. Raises UsageError."""
    depths = []
    for part in text.split(","):
        match = _DEPTH.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"a depth is a number of tokens such as 4096 or 4K, got {part.strip()!r}", "separate depths with commas"
            )
        depths.append(int(match[1]) * (1024 if match[2] else 1))
    return depths


def measure_depths(
    loaded: Loaded,
    trip: Trip,
    depths: Sequence[int],
    config: EngineConfig,
    seed: int,
    repeat: int,
    *,
    ceilings: Ceilings | None = None,
    progress: Progress | None = None,
) -> list[tuple[Figures, Figures]]:
    """(prefill, decode) for each depth: medians over ``repeat`` runs, each from the same kept states, depths in turns.

    Prefill: from handing in the requests to the first token of the last of them; of a model that reads n-gram tables in
    turns with look-ahead, which is the figure, and without. Decode: ``generate`` steps of all requests, from the states
    after their prompts; ``step_ms`` is one of them, ``forward_ms`` the bare forward of such a step, and ``host_share``
    what the step takes beyond it. Every depth is really read, the deeper ones from where the one before ended. Raises
    InexactError before timing anything, and PagesError or KittiwakeError, before reading, for what memory cannot hold.
    """
    model = loaded.model
    tell = progress if progress is not None else _silent
    subject = Subject(model, trip.requests)
    check_case(subject, Case(trip.requests, min(trip.prompt, 64)), seed)
    if model.device != "cpu":
        check_splits(subject, seed)
    pages_bytes = _check_room(subject.states, trip, depths, is_host=model.device == "cpu")
    places = _reach(loaded, replace(trip, depth=0), depths, config, seed, tell)
    readers = readers_of(model)
    runs = [_Runs(GatherWatch(readers) if readers else None) for _ in places]
    # half of what is free is less now, with states kept: the engine is told what it needs
    config = replace(config, slots=max(config.slots, trip.requests), growing_bytes=pages_bytes)
    with LLM.from_loaded(loaded, config) as llm:
        for run in range(repeat + 1):  # the first one warms up
            order = range(len(places)) if run % 2 == 0 else range(len(places) - 1, -1, -1)
            for turn, index in enumerate(order):
                tell("timing prompt and decoding", run * len(places) + turn, (repeat + 1) * len(places))
                _run_once(llm.engine, places[index], runs[index], run)
    return [_figures(loaded, subject, one, took, seed, ceilings) for one, took in zip(places, runs, strict=True)]


def _check_room(states: StateTable, trip: Trip, depths: Sequence[int], *, is_host: bool) -> int:
    """Bytes of the pages that the deepest runs need, -1 where nothing grows.

    Raises PagesError where the table has too few, KittiwakeError where the texts up to the depths and the states kept
    there do not fit the memory that is free: reading that far takes long, and would end there.
    """
    spec, ends = states.spec, [depth + trip.prompt for depth in set(depths)]
    longest = max(ends) + max(trip.generate + 1, Effort().most + 1)
    what = f"{trip.requests} {'request' if trip.requests == 1 else 'requests'} at a depth of {max(depths):,} tokens"
    pages = trip.requests * spec.pages_for(longest)
    if spec.growing and (longest > states.most_tokens or pages > states.total_pages):
        raise PagesError(
            f"{what} and what is timed there take {longest:,} tokens each, the memory for growing states holds "
            f"{states.total_pages * spec.page_tokens:,} in all, {states.most_tokens:,} of one",
            _LESS,
        )
    kept = sum(spec.bytes_for(tokens) + _TOKEN_BYTES * tokens for tokens in (*ends, *set(depths)))
    needed = trip.requests * kept + (pages * spec.page_bytes if is_host else 0)
    free = available_memory()
    if free and needed > free:
        raise KittiwakeError(f"{what} need {needed:,} bytes to be kept, {free:,} are free", _LESS)
    return pages * spec.page_bytes if spec.growing else -1


def _reach(
    loaded: Loaded, trip: Trip, depths: Sequence[int], config: EngineConfig, seed: int, tell: Progress
) -> list[_Place]:
    """States at every depth and after the prompt there, in the order asked for; each text is read once up to the deepest."""
    chunk = config.max_chunk if loaded.model.device == "cpu" else min(config.max_chunk, config.max_rows)
    texts = random_ids(loaded.model.config.vocab_size, trip.requests, max(depths) + trip.prompt, seed)
    total = trip.requests * (max(depths) + trip.prompt * len(set(depths)))
    done = 0

    def read(ids: list[int], start: KeptState | None) -> KeptState:
        nonlocal done
        steps = prefill_steps(loaded.model, Given(np.asarray(ids, dtype=np.int64), start), max_rows=chunk)
        for first in itertools.count(0, chunk):
            tell("reading up to the depths", done + min(first, len(ids)), total)
            try:
                next(steps)
            except StopIteration as end:
                done += len(ids)
                kept: KeptState = end.value
                return kept
        raise AssertionError("a prefill ends")

    found: dict[int, _Place] = {}
    reached = 0
    states: list[KeptState | None] = [None] * trip.requests
    for depth in sorted(set(depths)):
        if depth > reached:
            states = [read(text[reached:depth], start) for text, start in zip(texts, states, strict=True)]
            reached = depth
        prompts = [text[depth : depth + trip.prompt] for text in texts]
        ends = [read(prompt, start) for prompt, start in zip(prompts, states, strict=True)]
        found[depth] = _Place(replace(trip, depth=depth), prompts, states, ends)
    return [found[depth] for depth in depths]


def _run_once(engine: Engine, place: _Place, runs: _Runs, run: int) -> None:
    """One run of a prompt and of decoding after it; number 0 warms up and counts for nothing."""

    def prefill() -> float:
        return _prefill_ms(engine, place.prompts, place.starts)

    if runs.watch is None:
        prefill_ms = prefill()
    else:
        took_ms = {
            looks_ahead: runs.watch.run(prefill, looks_ahead=looks_ahead, is_counted=run > 0)
            for looks_ahead in ((True, False) if run % 2 == 0 else (False, True))
        }
        prefill_ms = took_ms[True]
    decode_ms, host_ms = _decode_ms(engine, place.ends, place.trip.generate)
    if run:
        runs.prefill_ms.append(prefill_ms)
        runs.decode_ms.append(decode_ms)
        runs.host_ms += [] if host_ms is None else [host_ms]


def _figures(
    loaded: Loaded, subject: Subject, place: _Place, runs: _Runs, seed: int, ceilings: Ceilings | None
) -> tuple[Figures, Figures]:
    """The figures of one depth; times the bare forward of its steps."""
    trip = place.trip
    for slot, end in zip(subject.slots, place.ends, strict=True):
        subject.states.restore(slot, end.saved)
    step = timed(case_work(subject, Case(trip.requests, 1), seed))
    step()
    forward_ms = median_ms(measure_ms(step, Effort()))
    name = f"{trip.prompt}+{trip.generate} at {trip.depth}"
    prompt_floor, step_floor = _floors(loaded, trip, ceilings)
    step_ms = median_ms(runs.decode_ms) / trip.generate
    extra = {"step_ms": step_ms, "forward_ms": forward_ms, "host_share": max(0.0, 1 - forward_ms / step_ms)}
    if runs.host_ms:
        extra["host_ms_per_step"] = median_ms(runs.host_ms)
    gathers = None if runs.watch is None else runs.watch.figures()
    batch, count = trip.requests, len(runs.prefill_ms)
    prefill_ms, decode_ms = median_ms(runs.prefill_ms), median_ms(runs.decode_ms)
    return (
        Figures(f"prefill {name}", batch, trip.prompt, prefill_ms, count, *prompt_floor, gathers=gathers),
        Figures(f"decode {name}", batch, trip.generate, decode_ms, count, *step_floor, extra=extra),
    )


def _silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def _floors(
    loaded: Loaded, trip: Trip, ceilings: Ceilings | None
) -> tuple[tuple[float | None, str], tuple[float | None, str]]:
    """Floors of the prompt and of all decode steps together, with what each comes from."""
    if ceilings is None:
        return (None, ""), (None, "")
    prompt = demand(loaded.model, loaded.dtype, trip.requests, trip.prompt).floor(ceilings)
    step_ms, step_by = demand(loaded.model, loaded.dtype, trip.requests, 1).floor(ceilings)
    return prompt, (step_ms * trip.generate, step_by)


def _prefill_ms(engine: Engine, prompts: Sequence[Sequence[int]], starts: Sequence[KeptState | None]) -> float:
    def run() -> None:
        requests = [
            engine.add(prompt, _greedy(1), start_from=start) for prompt, start in zip(prompts, starts, strict=True)
        ]
        _drain(engine, requests)

    return timed(run)()


def _decode_ms(engine: Engine, ends: Sequence[KeptState], steps: int) -> tuple[float, float | None]:
    """(ms of ``steps`` steps of all requests, host ms of a step where the engine counts it).

    The first token comes from the logits that the states were kept with: when each request has it, all are in their
    slots, and the clock starts.
    """
    requests = [engine.add([], _greedy(steps + 1), start_from=end) for end in ends]
    waiting = set(requests)
    while waiting:
        waiting -= {request for request in waiting if any(delta.token_ids for delta in engine.collect(request))}
        if waiting:
            _step(engine)
    before = _host_ms(engine)
    took_ms = timed(lambda: _drain(engine, requests))()
    after = _host_ms(engine)
    return took_ms, None if before is None or after is None else (after - before) / steps


def _drain(engine: Engine, requests: Sequence[int]) -> None:
    """Step until every request has ended. Raises what one of them ended with."""
    running = set(requests)
    while running:
        for request in list(running):
            for delta in engine.collect(request):
                if delta.error is not None:
                    raise delta.error
                if delta.finish_reason is not None:
                    running.discard(request)
        if running:
            _step(engine)


def _step(engine: Engine) -> None:
    if not engine.step():
        raise KittiwakeError("the engine has nothing to do, yet requests are running")


def _host_ms(engine: Engine) -> float | None:
    """Ms that the host has spent on steps so far, where the engine counts them."""
    counted = getattr(getattr(engine, "stats", None), "host_ms", None)
    return None if counted is None else float(counted)


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
