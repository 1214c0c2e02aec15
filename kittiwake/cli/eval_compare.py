"""``kittiwake eval compare``: whether a faster path or a narrower precision answers as well as what it replaces."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kittiwake.cli.eval_lambada import REFERENCE_NAMES
from kittiwake.cli.options import FILE, engine_config, engine_options, json_option, tokenizer_option
from kittiwake.cli.output import emit_json, note, percent, table
from kittiwake.config import DEVICES, DTYPES
from kittiwake.errors import KittiwakeError, UsageError

if TYPE_CHECKING:
    from kittiwake.evals.runs import Run

CONSTANTS = ("group_norm_eps", "rescale_every")
SHOWN = 20
"""Discordant passages told to people; the JSON has all."""


@dataclass(frozen=True)
class Side:
    """One side that is still to be run: a model with its options, or a reference implementation."""

    model: Path | None
    device: str
    dtype: str
    reference: str | None = None
    constants: tuple[tuple[str, float], ...] = ()
    """Options that make it another model, by their names in EngineConfig."""

    def arguments(self) -> list[str]:
        """Of ``kittiwake eval lambada``."""
        found = [] if self.model is None else [str(self.model.absolute())]
        found += ["--device", self.device, "--dtype", self.dtype]
        if self.reference is not None:
            found += ["--reference", self.reference]
        for name, value in self.constants:
            found += [_flag(name), repr(value)]
        return found


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@click.command()
@click.argument("a", required=False, type=FILE)
@click.argument("b", required=False, type=FILE)
@click.option("--data", type=FILE, help='JSON lines with "text", one passage a line; needed where a model is named')
@click.option("--limit", type=click.IntRange(1), help="only the first so many passages")
@click.option("--bos/--no-bos", default=None, help="put the model's end-of-text token before each passage")
@click.option("--reference", type=click.Choice(REFERENCE_NAMES), help="B is run by this library instead of kittiwake")
@click.option("--dtype-b", type=click.Choice(DTYPES), help="--dtype of B, where it is another")
@click.option("--device-b", type=click.Choice(DEVICES), help="--device of B, where it is another")
@click.option(
    "--margin",
    type=click.FloatRange(0, 100, min_open=True, max_open=True),
    default=0.5,
    help="points of accuracy that A may be below B",
)
@click.option(
    "--alpha",
    type=click.FloatRange(0, 0.5, min_open=True, max_open=True),
    default=0.05,
    help="chance of a wrong verdict where the true difference is just the margin",
)
@tokenizer_option
@engine_options
@json_option
@click.pass_context
def compare(
    context: click.Context,
    a: Path | None,
    b: Path | None,
    data: Path | None,
    limit: int | None,
    bos: bool | None,
    reference: str | None,
    dtype_b: str | None,
    device_b: str | None,
    margin: float,
    alpha: float,
    tokenizer: str | None,
    device: str,
    dtype: str,
    threads: int,
    as_json: bool,
) -> None:
    """Tell whether A answers LAMBADA as well as B, within a margin. Exit code 0 if so, 1 if that is not shown.

    A is the candidate and B what it is measured against. Each is a run that `kittiwake eval lambada --save` kept (a
    .json file) or a model, which is run on --data: one after the other, each in a process of its own, one passage at a
    time. A left out is the packaged model, B left out is A's model again: with --reference in that library, or with
    --dtype-b or --device-b.

    Passages that only one side got right decide, by Tango's score at the margin. Where neither verdict is sure, nothing
    is shown, and more passages are needed.
    """
    config = engine_config(device=device, dtype=dtype, threads=threads)
    constants = tuple((name, getattr(config, name)) for name in CONSTANTS if getattr(config, name) is not None)
    side = Side(a, device, dtype, constants=constants)
    given = _given(context)
    sides = (_kept(a) or side, _kept(b) or _side_b(side, b, reference, dtype_b, device_b))
    _check_reach(sides, given)
    task = _task_arguments(data, limit, bos, tokenizer, threads) if any(isinstance(one, Side) for one in sides) else []
    from kittiwake.evals.compare import check_gate, compare_runs
    from kittiwake.evals.runs import load_run

    check_gate(margin / 100, alpha)
    kept = {name: load_run(one) for name, one in zip("AB", sides, strict=True) if isinstance(one, Path)}
    made = {name: _run(one, name, task) for name, one in zip("AB", sides, strict=True) if isinstance(one, Side)}
    runs = kept | made
    document = compare_runs(runs["A"], runs["B"], margin=margin / 100, alpha=alpha).document()
    if as_json:
        emit_json(document)
    else:
        click.echo(comparison_text(document))
    if document["verdict"] != "non-inferior":
        context.exit(1)


def _kept(path: Path | None) -> Path | None:
    """The path, where it names a saved run."""
    return path if path is not None and path.suffix == ".json" else None


def _given(context: click.Context) -> set[str]:
    """Names of the parameters that stand on the command line."""
    source = click.core.ParameterSource.COMMANDLINE
    return {
        param.name
        for param in context.command.params
        if param.name and context.get_parameter_source(param.name) is source
    }


def _side_b(a: Side, model: Path | None, reference: str | None, dtype: str | None, device: str | None) -> Side:
    """What is run as B."""
    if model is None and _kept(a.model):
        raise UsageError("A is a saved run: name B, another one or a model")
    if (model, reference, dtype, device) == (None, None, None, None):
        raise UsageError("A would be compared with itself", "name B, or give --reference, --dtype-b or --device-b")
    b = replace(a, model=model or a.model, reference=reference, dtype=dtype or a.dtype, device=device or a.device)
    if reference is None or _kept(a.model):
        return b
    # the weights as they are, in the arithmetic that rounds least, whatever A rounds them to
    return replace(b, dtype=dtype or "auto", constants=())


def _check_reach(sides: tuple[Path | Side, Path | Side], given: set[str]) -> None:
    """Raise UsageError for an option that would reach no side."""
    a, b = sides
    if isinstance(b, Path):
        lost = given & {"reference", "dtype_b", "device_b"}
        if isinstance(a, Path):
            lost |= given & {"data", "limit", "bos", "tokenizer", "threads", "device", "dtype", *CONSTANTS}
        where = "B is a saved run" if isinstance(a, Side) else "A and B are saved runs"
    else:
        lost = {name for name in ("device", "dtype") if isinstance(a, Path) and {name, f"{name}_b"} <= given}
        where = "A is a saved run"
    if lost:
        raise UsageError(f"{where}: {_flag(min(lost))} does not reach it", "leave it away")


def _task_arguments(
    data: Path | None, limit: int | None, bos: bool | None, tokenizer: str | None, threads: int
) -> list[str]:
    """What runs have in common, as arguments of ``kittiwake eval lambada``."""
    if data is None:
        raise UsageError("a model is to be run, and --data is missing", "give the passages: --data lambada_test.jsonl")
    found = ["--data", str(data.absolute()), "--threads", str(threads)]
    found += [] if limit is None else ["--limit", str(limit)]
    found += ["--bos"] if bos else []
    return [*found, *([] if tokenizer is None else ["--tokenizer", tokenizer])]


def _run(side: Side, name: str, task: list[str]) -> Run:
    """Run a side in a process that has the machine to itself and leaves nothing behind."""
    note(f"running {name}: {side.reference or 'kittiwake'}, {side.model or 'the packaged model'}")
    # not -m: a folder named kittiwake where one stands would take the place of this package
    start = f"import sys; sys.path[:] = {sys.path!r}; from kittiwake.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, f"{name}.json")
        command = [sys.executable, "-c", start, "eval", "lambada", *side.arguments(), *task, "--save", str(target)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        _check_ended(done.returncode, name)
        from kittiwake.evals.runs import load_run

        return load_run(target)


def _check_ended(code: int, name: str) -> None:
    """Pass on the exit code of a side that failed."""
    if code < 0:
        raise KittiwakeError(
            f"the process that ran {name} was ended by signal {-code}", "it may have run out of memory"
        )
    if code:
        raise click.exceptions.Exit(code)  # the child has said why


def comparison_text(document: dict[str, Any]) -> str:
    """The result for people."""
    low, high = document["interval_points"]
    rows = [("", "right", "accuracy", "last-word perplexity", "p50 ms", "what")]
    for name in ("a", "b"):
        one = document[name]
        what = f"{one['version']}, {one['family']} {one['dtype']}, {one['device']}, {one['model']}"
        perplexity = "not finite" if one["perplexity"] is None else str(one["perplexity"])
        figures = (percent(one["accuracy"]), perplexity, f"{one['p50_ms']:.2f}")
        rows.append(
            (name.upper(), f"{one['correct']} of {document['total']}", *figures, f"{one['implementation']} {what}")
        )
    lines = [table(rows), _discordant_text(document)]
    lines.append(
        f"A - B: {document['difference_points']:+.3f} points, interval {low:+.3f} to {high:+.3f}, "
        f"margin {document['margin_points']:g}; score {document['score']:.3f}, critical {document['critical']:.3f}"
    )
    if document["p50_ratio"] is not None:
        lines.append(f"p50 of A / p50 of B: {document['p50_ratio']}")
    else:
        lines.append(f"times do not compare: {document['times_differ'] or 'B took none'}")
    busy = " and ".join(name.upper() for name in ("a", "b") if document[name]["busy"])
    if busy:
        lines.append(f"others kept the machine busy while {busy} ran: times are too long, and their ratio says little")
    return "\n".join([*lines, _verdict_text(document)])


def _discordant_text(document: dict[str, Any]) -> str:
    same = f"{document['same_tokens']} of {document['total']} passages with the same tokens"
    discordant = [("only A right", one) for one in document["only_a"]]
    discordant += [("only B right", one) for one in document["only_b"]]
    if not discordant:
        return f"{same}; none that only one side got right"
    rows = [("", "passage", "last word", "A", "B")]
    rows += [(who, str(one["index"]), one["target"], one["a"], one["b"]) for who, one in discordant[:SHOWN]]
    more = len(discordant) - SHOWN
    return f"{same}\n{table(rows)}" + (f"\n… and {more} more (all of them with --json)" if more > 0 else "")


def _verdict_text(document: dict[str, Any]) -> str:
    margin, total, needed = document["margin_points"], document["total"], document["passages_needed"]
    if document["verdict"] == "non-inferior":
        return f"non-inferior: A is not {margin:g} points below B"
    if document["verdict"] == "inferior":
        return f"INFERIOR: A is more than {margin:g} points below B"
    few = f"; {total} passages are too few, even equal answers show it from about {needed} on" if total < needed else ""
    return f"not shown: A may be {margin:g} points below B, and may not{few}"
