"""``kittiwake bench``: how fast a model, or a published shape with random weights, runs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kittiwake.cli.options import engine_config, engine_options, json_option, model_argument, seed_option
from kittiwake.cli.output import ProgressBars, emit_json, note, table
from kittiwake.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kittiwake.bench.timing import Figures
    from kittiwake.config import EngineConfig
    from kittiwake.families.contract import Progress
    from kittiwake.load import Loaded

CASES = "1x1,8x1,1x128,1x512"


@click.command()
@model_argument()
@click.option("--cases", metavar="BxT,…", help=f"sequences × tokens of one forward call  [default: {CASES}]")
@click.option("--shape", metavar="NAME", help="random weights of a published shape, such as 0.1b, instead of a model")
@click.option("--prompt", type=click.IntRange(1), help="time a prompt of so many tokens, and decoding after it")
@click.option("--generate", type=click.IntRange(1), help="with --prompt: decode so many tokens  [default: 64]")
@click.option("--depth", type=click.IntRange(0), help="with --prompt: tokens already seen before it  [default: 0]")
@click.option(
    "--repeat", type=click.IntRange(1), help="runs of which the median is told  [default: as many as fit in 2 s]"
)
@seed_option("draws the tokens")
@engine_options
@json_option
def bench(
    model: Path | None,
    cases: str | None,
    shape: str | None,
    prompt: int | None,
    generate: int | None,
    depth: int | None,
    repeat: int | None,
    seed: int,
    device: str,
    dtype: str,
    threads: int,
    as_json: bool,
) -> None:
    """Time forward calls: medians after warming up, tokens per second over all sequences.

    Each case is first checked for exact bits; where that fails no speed is told and the exit code is 1. A case named
    twice is measured twice. Compare figures of one run only: a shared machine changes from minute to minute.
    """
    _check_options(model, cases, shape, prompt, generate, depth)
    config = engine_config(device=device, dtype=dtype, threads=threads)
    with ProgressBars() as progress:
        if prompt is None:
            loaded, figures = time_cases(model, shape, cases or CASES, config, seed, repeat, progress)
            document: object = [one.document() for one in figures]
        else:
            trip = (prompt, 64 if generate is None else generate, depth or 0)
            loaded, (prefill, decode) = time_trip(model, shape, trip, config, seed, repeat, progress)
            figures = [prefill, decode]
            document = {"prefill": prefill.document(), "decode": decode.document()}
    from kittiwake.bench.machine import machine_line

    where = f"{loaded.model.config.family}, {loaded.dtype} · {machine_line(loaded.threads)}"
    if as_json:
        emit_json(document)
        note(where)
    else:
        click.echo(f"{figures_text(figures)}\n{where}")


def _check_options(
    model: Path | None,
    cases: str | None,
    shape: str | None,
    prompt: int | None,
    generate: int | None,
    depth: int | None,
) -> None:
    if model is not None and shape is not None:
        raise UsageError("MODEL and --shape contradict each other", "--shape makes random weights and needs no model")
    if prompt is not None and cases is not None:
        raise UsageError("--prompt and --cases contradict each other", "give one of them")
    if prompt is None and (generate is not None or depth is not None):
        raise UsageError("--generate and --depth need --prompt", "for example --prompt 512 --generate 64")


def load_for_bench(model: Path | None, shape: str | None, config: EngineConfig, progress: Progress) -> Loaded:
    """The model, or random weights of a shape. Raises UsageError for an unknown shape."""
    if shape is None:
        from kittiwake.load import load_model

        return load_model(model, config, progress=progress)
    from kittiwake.bench.random import load_random

    return load_random(shape, config, progress)


def time_cases(
    model: Path | None,
    shape: str | None,
    cases: str,
    config: EngineConfig,
    seed: int,
    repeat: int | None,
    progress: Progress,
) -> tuple[Loaded, list[Figures]]:
    """Load, then measure each case in the order given."""
    from kittiwake.bench.cases import measure_case, parse_cases
    from kittiwake.bench.timing import Effort

    wanted = parse_cases(cases)
    loaded = load_for_bench(model, shape, config, progress)
    effort = Effort() if repeat is None else Effort(least=repeat, most=repeat)
    return loaded, [measure_case(loaded.model, case, seed, effort, progress) for case in wanted]


def time_trip(
    model: Path | None,
    shape: str | None,
    trip: tuple[int, int, int],
    config: EngineConfig,
    seed: int,
    repeat: int | None,
    progress: Progress,
) -> tuple[Loaded, tuple[Figures, Figures]]:
    """Load, then measure (prompt, generate, depth) tokens of one sequence."""
    from kittiwake.bench.cases import Trip, measure_trip

    loaded = load_for_bench(model, shape, config, progress)
    return loaded, measure_trip(loaded.model, Trip(*trip), seed, repeat or 5, config.max_rows, progress)


def figures_text(figures: Sequence[Figures]) -> str:
    """A table for people: one line a case."""
    rows = [("case", "sequences", "tokens each", "median ms", "tokens/s", "runs")]
    rows += [
        (one.case, str(one.batch), str(one.tokens), f"{one.median_ms:.3f}", f"{one.tok_s:,.1f}", str(one.samples))
        for one in figures
    ]
    return table(rows)
