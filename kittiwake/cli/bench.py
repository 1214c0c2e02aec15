"""``kittiwake bench``: how fast a model, or a published shape with random weights, runs on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kittiwake.cli.options import (
    FILE,
    chunk_option,
    engine_config,
    engine_options,
    json_option,
    model_argument,
    seed_option,
)
from kittiwake.cli.output import ProgressBars, emit_json, note
from kittiwake.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from kittiwake.bench.floors import Ceilings
    from kittiwake.bench.timing import Figures, PeerFigures
    from kittiwake.config import EngineConfig
    from kittiwake.load import Loaded
    from kittiwake.progress import Progress

_GATHER_CELLS = ("gather_ms", "waited_ms", "hidden_share")
"""Of what is known of a prompt's gathers, what stands in the table."""
_PLAIN_WIDTH = 200
"""Columns of a table that goes to a file or a pipe."""


@dataclass(frozen=True)
class Wanted:
    """What to measure; None where the option was left out."""

    model: Path | None
    shape: str | None
    cases: str | None
    prompt: int | None
    generate: int | None
    depth: str | None
    requests: int | None
    repeat: int | None
    against: str | None
    plot: Path | None
    seed: int


@click.command()
@model_argument()
@click.option(
    "--cases",
    metavar="BxT,…",
    help="sequences × tokens of one forward call  [default: 1x1,8x1,1x128,1x512, and more of them on a card]",
)
@click.option("--shape", metavar="NAME", help="random weights of a published shape, such as 0.1b, instead of a model")
@click.option("--prompt", type=click.IntRange(1), help="time a prompt of so many tokens, and decoding after it")
@click.option("--generate", type=click.IntRange(1), help="with --prompt: decode so many tokens  [default: 64]")
@click.option(
    "--depth",
    metavar="D,…",
    help="with --prompt: tokens already seen before it, such as 4096 or 0,4K,32K; several are measured in turns  [default: 0]",
)
@click.option("--requests", type=click.IntRange(1, 1024), help="with --prompt: requests at once  [default: 1]")
@click.option(
    "--repeat", type=click.IntRange(1), help="runs of which the median is told  [default: as many as fit in 2 s]"
)
@click.option(
    "--against",
    metavar="NAME,…",
    help="with --shape: time other programs at the same cases, in turns: torch, rwkv, fla, transformers",
)
@click.option("--plot", type=FILE, help="draw the cases into a .png, .svg or .pdf; an existing one is replaced")
@seed_option("draws the tokens")
@chunk_option
@engine_options
@json_option
def bench(
    model: Path | None,
    cases: str | None,
    shape: str | None,
    prompt: int | None,
    generate: int | None,
    depth: str | None,
    requests: int | None,
    repeat: int | None,
    against: str | None,
    plot: Path | None,
    seed: int,
    device: str,
    dtype: str,
    threads: int,
    as_json: bool,
) -> None:
    """Time forward calls: medians after warming up, tokens per second over all sequences.

    Each case is first checked for exact bits; where that fails no speed is told and the exit code is 1. A case named
    twice is measured twice. On a card its measured rates put a floor beside each figure. Compare figures of one run
    only: a shared machine changes from minute to minute.
    """
    wanted = Wanted(model, shape, cases, prompt, generate, depth, requests, repeat, against, plot, seed)
    _check_options(wanted)
    config = engine_config(device=device, dtype=dtype, threads=threads)
    with ProgressBars() as progress:
        run = time_cases if prompt is None else time_trip
        loaded, ceilings, figures = run(wanted, config, progress)
    from kittiwake.bench.machine import machine_line

    where = f"{loaded.path}, {loaded.dtype} · {machine_line(loaded.threads, loaded.model.device)}"
    lines = [where] if ceilings is None else [where, f"ceilings measured now: {ceilings.line}"]
    lines += [*peer_notes(figures), *gather_notes(figures)]
    if plot is not None:
        from kittiwake.bench.plots import draw_plot

        draw_plot(figures, where, plot)
    if as_json:
        emit_json([one.document() for one in figures] if prompt is None else trips_document(wanted, figures))
        note("\n".join(lines))
    else:
        _print_table(figures_table(figures))
        click.echo("\n".join(lines))


def trips_document(wanted: Wanted, figures: Sequence[Figures]) -> dict[str, Any]:
    """The JSON contract of a prompt and decoding after it: ``prefill`` and ``decode``; of several depths a list of such."""
    trips = [
        {"prefill": prefill.document(), "decode": decode.document()}
        for prefill, decode in zip(figures[::2], figures[1::2], strict=True)
    ]
    depths = _depths(wanted)
    if len(depths) == 1:
        return trips[0]
    return {"depths": [{"depth": depth, **trip} for depth, trip in zip(depths, trips, strict=True)]}


def _check_options(wanted: Wanted) -> None:
    """Raise UsageError for options that contradict each other or name what is not there, before anything is loaded."""
    if wanted.model is not None and wanted.shape is not None:
        raise UsageError("MODEL and --shape contradict each other", "--shape makes random weights and needs no model")
    if wanted.prompt is not None:
        for name in ("cases", "against", "plot"):
            if getattr(wanted, name) is not None:
                raise UsageError(f"--prompt and --{name} contradict each other", "give one of them")
    elif any(value is not None for value in (wanted.generate, wanted.depth, wanted.requests)):
        raise UsageError("--generate, --depth and --requests need --prompt", "for example --prompt 512 --generate 64")
    _depths(wanted)
    if wanted.against is not None:
        from kittiwake.bench.peers.registry import parse_peers

        parse_peers(wanted.against)
        if wanted.shape is None:
            raise UsageError("--against needs --shape", "every side is given the same random weights")
    if wanted.plot is not None:
        from kittiwake.bench.plots import check_plot

        check_plot(wanted.plot)


def _depths(wanted: Wanted) -> list[int]:
    """The depths asked for, in that order. Raises UsageError."""
    if wanted.depth is None:
        return [0]
    from kittiwake.bench.trip import parse_depths

    return parse_depths(wanted.depth)


def load_for_bench(wanted: Wanted, config: EngineConfig, progress: Progress) -> Loaded:
    """The model, or random weights of a shape. Raises UsageError for an unknown shape."""
    if wanted.shape is None:
        from kittiwake.load import load_model

        return load_model(wanted.model, config, progress=progress)
    from kittiwake.bench.random import load_random

    return load_random(wanted.shape, config, progress)


def time_cases(
    wanted: Wanted, config: EngineConfig, progress: Progress
) -> tuple[Loaded, Ceilings | None, list[Figures]]:
    """Load, measure all cases in turns, and the peers with them."""
    from kittiwake.bench.cases import CARD_CASES, CPU_CASES, measure_cases, parse_cases
    from kittiwake.bench.subject import Subject
    from kittiwake.bench.timing import Effort

    named = None if wanted.cases is None else parse_cases(wanted.cases)
    loaded = load_for_bench(wanted, config, progress)
    cases = named or parse_cases(CPU_CASES if loaded.model.device == "cpu" else CARD_CASES)
    ceilings = _ceilings(loaded, progress)
    subject = Subject(loaded.model, max(case.batch for case in cases))
    repeated = None if wanted.repeat is None else Effort(least=wanted.repeat, most=wanted.repeat)
    figures = measure_cases(
        subject, cases, wanted.seed, repeated or Effort(), ceilings=ceilings, dtype=loaded.dtype, progress=progress
    )
    if wanted.against is not None and wanted.shape is not None:
        from kittiwake.bench.against import PEER_EFFORT, compare
        from kittiwake.bench.floors import TORCH_DTYPES
        from kittiwake.bench.peers.contract import PeerTask
        from kittiwake.bench.peers.registry import parse_peers
        from kittiwake.bench.random import random_weights

        weights = random_weights(wanted.shape, config)
        task = PeerTask(weights, weights.shape, loaded.model.device, TORCH_DTYPES[loaded.dtype])
        figures = compare(
            subject,
            figures,
            parse_peers(wanted.against),
            task,
            wanted.seed,
            effort=repeated or PEER_EFFORT,
            progress=progress,
        )
    return loaded, ceilings, figures


def time_trip(
    wanted: Wanted, config: EngineConfig, progress: Progress
) -> tuple[Loaded, Ceilings | None, list[Figures]]:
    """Load, then measure a prompt and decoding after it at every depth: two figures a depth."""
    from kittiwake.bench.trip import Trip, measure_depths

    loaded = load_for_bench(wanted, config, progress)
    trip = Trip(wanted.prompt or 1, wanted.generate or 64, requests=wanted.requests or 1)
    ceilings = _ceilings(loaded, progress)
    repeat, depths = wanted.repeat or 5, _depths(wanted)
    pairs = measure_depths(
        loaded, trip, depths, config, wanted.seed, repeat, ceilings=ceilings, progress=progress
    )  # fmt: skip
    return loaded, ceilings, [one for pair in pairs for one in pair]


def _ceilings(loaded: Loaded, progress: Progress) -> Ceilings | None:
    """The rates of a card, measured; a processor is shared with others, its rates would tell little."""
    from kittiwake.bench.floors import measure_ceilings

    device = loaded.model.device
    if device == "cpu":
        return None
    progress("measuring the card", 0, 1)
    return measure_ceilings(device, loaded.dtype)


def figures_table(figures: Sequence[Figures]) -> Table:
    """A table for people: one line a case, one column a peer."""
    from rich.table import Table

    has_floors = any(one.floor_ms is not None for one in figures)
    extra = list(dict.fromkeys(key for one in figures for key in one.extra))
    peers = list(dict.fromkeys(peer.name for one in figures for peer in one.peers))
    gathers = [key for key in _GATHER_CELLS if any(one.gathers is not None for one in figures)]
    headings = ["case", "median ms", "tokens/s", *(["floor ms", "by", "reached"] if has_floors else [])]
    headings += [key.replace("_", " ") for key in [*gathers, *extra]] + [f"against {name}" for name in peers] + ["runs"]
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("case", "by") else "right", no_wrap=True)
    for one in figures:
        cells = [one.case, f"{one.median_ms:.3f}", f"{one.tok_s:,.1f}"]
        if has_floors:
            cells += [f"{one.floor_ms:.3f}", one.floor_by, f"{100 * (one.floor_share or 0.0):.0f} %"]
        cells += ["" if one.gathers is None else f"{one.gathers.document()[key]:.3f}" for key in gathers]
        cells += [f"{one.extra[key]:.3f}" if key in one.extra else "" for key in extra]
        found = {peer.name: peer for peer in one.peers}
        cells += [_peer_cell(found[name]) for name in peers]
        table.add_row(*cells, str(one.samples))
    return table


def _peer_cell(peer: PeerFigures) -> str:
    """ "12.3 × (8.21 ms)": how many times faster we are, and the peer's time."""
    if peer.reason:
        return "–"
    return f"{peer.speed:.2f} × ({peer.median_ms:.3g} ms){'' if peer.is_batched else ' *'}"


def gather_notes(figures: Sequence[Figures]) -> list[str]:
    """How the n-gram rows of each prompt were read, and what the look-ahead saved; a line a prompt."""
    lines = []
    for one in figures:
        if one.gathers is not None:
            ahead, alone = one.gathers.ahead, one.gathers.alone
            lines.append(
                f"{one.case}: page cache {one.gathers.page_cache}, {ahead.median('reads'):,.0f} reads at "
                f"{ahead.reads_per_s:,.0f} a second; without look-ahead {alone.median('prefill_ms'):.3f} ms, "
                f"{100 * alone.hidden_share:.0f} % hidden"
            )
    return lines


def peer_notes(figures: Sequence[Figures]) -> list[str]:
    """What each peer was, and why one has no figure; a line for each different thing to say."""
    lines: dict[str, None] = {}
    for one in figures:
        for peer in one.peers:
            if peer.reason:
                same = all(peer in other.peers for other in figures)
                lines[f"{peer.name}{'' if same else f' at {one.case}'}: no figure: {peer.reason}"] = None
            else:
                single = "" if peer.is_batched else "; * it runs one sequence after another"
                lines[f"{peer.name}: {peer.version}{single}"] = None
    if any(not peer.reason for one in figures for peer in one.peers):
        lines["×: how many times as fast kittiwake was, by medians of turns with that peer alone"] = None
    return list(lines)


def _print_table(table: Table) -> None:
    from rich.console import Console

    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=_PLAIN_WIDTH)
    console.print(table)
