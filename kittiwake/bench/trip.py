"""A prompt at some depth and decoding after it, through ``LLM``: scheduler, sampler and host are in the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kittiwake.bench.cases import Case, case_work, check_case, check_splits, fill_states, random_ids
from kittiwake.bench.floors import Ceilings, demand
from kittiwake.bench.subject import Subject
from kittiwake.bench.timing import Effort, Figures, measure_ms, median_ms, timed
from kittiwake.config import EngineConfig
from kittiwake.engine.engine import Engine
from kittiwake.engine.request import KeptState, SamplingParams
from kittiwake.errors import KittiwakeError
from kittiwake.families.contract import Progress
from kittiwake.llm import LLM
from kittiwake.load import Loaded


@dataclass(frozen=True)
class Trip:
    """``requests`` at once: a prompt of ``prompt`` tokens after ``depth`` tokens each, then ``generate`` greedy steps."""

    prompt: int
    generate: int
    depth: int = 0
    requests: int = 1


def measure_trip(
    loaded: Loaded,
    trip: Trip,
    config: EngineConfig,
    seed: int,
    repeat: int,
    *,
    ceilings: Ceilings | None = None,
    progress: Progress | None = None,
) -> tuple[Figures, Figures]:
    """(prefill, decode): medians over ``repeat`` runs, each from the same kept states.

    Prefill: from handing in the requests to the first token of the last of them. Decode: ``generate`` steps of all
    requests, from the states after their prompts; ``step_ms`` is one of them, ``forward_ms`` the bare forward of such a
    step, and ``host_share`` what the step takes beyond it. Raises InexactError before timing anything.
    """
    model = loaded.model
    subject = Subject(model, trip.requests)
    check_case(subject, Case(trip.requests, min(trip.prompt, 64)), seed)
    if model.device != "cpu":
        check_splits(subject, seed)
    rows = random_ids(model.config.vocab_size, trip.requests, trip.depth + trip.prompt, seed)
    prompts = [row[trip.depth :] for row in rows]
    slots = max(config.slots, trip.requests)
    prefill_ms, decode_ms, host_ms = [], [], []
    with LLM.from_loaded(loaded, replace(config, slots=slots)) as llm:
        starts = [llm.prefill(row[: trip.depth]) if trip.depth else None for row in rows]
        ends = [llm.prefill(prompt, start_from=start) for prompt, start in zip(prompts, starts, strict=True)]
        for run in range(repeat + 1):  # the first one warms up
            if progress is not None:
                progress("timing prompt and decoding", run, repeat + 1)
            prefill = _prefill_ms(llm.engine, prompts, starts)
            decode, host = _decode_ms(llm.engine, ends, trip.generate)
            if run:
                prefill_ms.append(prefill)
                decode_ms.append(decode)
                host_ms += [] if host is None else [host]
    fill_states(subject, seed)
    step = timed(case_work(subject, Case(trip.requests, 1), seed))
    step()
    forward_ms = median_ms(measure_ms(step, Effort()))
    name = f"{trip.prompt}+{trip.generate} at {trip.depth}"
    prompt_floor, step_floor = _floors(loaded, trip, ceilings)
    step_ms = median_ms(decode_ms) / trip.generate
    extra = {"step_ms": step_ms, "forward_ms": forward_ms, "host_share": max(0.0, 1 - forward_ms / step_ms)}
    if host_ms:
        extra["host_ms_per_step"] = median_ms(host_ms)
    return (
        Figures(f"prefill {name}", trip.requests, trip.prompt, median_ms(prefill_ms), repeat, *prompt_floor),
        Figures(f"decode {name}", trip.requests, trip.generate, median_ms(decode_ms), repeat, *step_floor, extra=extra),
    )


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
