"""``kittiwake eval lambada``: last words guessed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kittiwake.cli.options import FILE, engine_config, engine_options, json_option, model_argument, tokenizer_option
from kittiwake.cli.output import ProgressBars, emit_json, percent
from kittiwake.device import is_busy
from kittiwake.errors import OutputError, UsageError
from kittiwake.stdout import stdout_on_stderr

if TYPE_CHECKING:
    from kittiwake.config import EngineConfig
    from kittiwake.evals.lambada import Answer, Passage
    from kittiwake.evals.references import Reference
    from kittiwake.evals.runs import Run
    from kittiwake.llm import LLM

REFERENCE_NAMES = ("transformers", "rwkv")


@click.command()
@model_argument()
@click.option("--data", type=FILE, required=True, help='JSON lines with "text", one passage a line')
@click.option("--limit", type=click.IntRange(1), help="only the first so many passages")
@click.option("--bos/--no-bos", default=False, help="put the model's end-of-text token before each passage")
@click.option(
    "--batch", type=click.IntRange(1), default=1, help="passages answered at once; changes times, never answers"
)
@click.option("--out", type=FILE, help="write a JSON line for each passage to this file; it must not exist")
@click.option("--save", type=FILE, help="keep the whole run in this new .json, for `kittiwake eval compare`")
@click.option(
    "--reference",
    type=click.Choice(REFERENCE_NAMES),
    help="answer with this library instead of kittiwake: what a run is compared with",
)
@tokenizer_option
@engine_options
@json_option
def lambada(
    model: Path | None,
    data: Path,
    limit: int | None,
    bos: bool,
    batch: int,
    out: Path | None,
    save: Path | None,
    reference: str | None,
    tokenizer: str | None,
    device: str,
    dtype: str,
    threads: int,
    as_json: bool,
) -> None:
    """Guess the last word of each passage, greedily.

    The prompt is the passage up to its last space. Eight tokens are drawn; their first word, less closing punctuation,
    must equal the passage's last word exactly. p50 and p99 are wall times of the calls that answered (batch 1: of one
    passage each).

    --save also scores the last word of each passage, and tells their perplexity.
    """
    config = engine_config(device=device, dtype=dtype, threads=threads, slots=batch)
    from kittiwake.evals.lambada import answer_passages, read_passages, summarize
    from kittiwake.evals.runs import check_run_file, save_run

    passages = read_passages(data, limit)
    if out is not None and out.exists():
        raise OutputError(f"{out} exists", "choose another --out or move it away")
    if save is not None:
        check_run_file(save)
    if reference is not None and batch > 1:
        raise UsageError(f"--batch {batch} with --reference: a reference answers one passage at a time")
    with stdout_on_stderr(), ProgressBars() as progress, _open(model, tokenizer, config, reference, progress) as llm:
        busy = is_busy()
        answers = _collect(answer_passages(llm, passages, batch=batch, bos=bos, progress=progress), out)
        run = None if save is None else _run(llm, model, passages, answers, bos, batch, busy or is_busy(), progress)
    figures: dict[str, Any] = {**summarize(answers), "bos": bos, "batch": batch}
    if save is not None and run is not None:
        save_run(save, run)
        figures["perplexity"] = run.perplexity
    if as_json:
        emit_json(figures)
    else:
        click.echo(figures_text(figures))


def _open(
    model: Path | None, tokenizer: str | None, config: EngineConfig, reference: str | None, progress: ProgressBars
) -> LLM | Reference:
    if reference is not None:
        from kittiwake.evals.references import open_reference

        return open_reference(reference, model, config, tokenizer=tokenizer, progress=progress)
    from kittiwake.llm import LLM

    return LLM(model, tokenizer=tokenizer, config=config, progress=progress)


def _collect(stream: Iterator[Answer], out: Path | None) -> list[Answer]:
    """All answers; each is written to ``out`` as it comes."""
    if out is None:
        return list(stream)
    answers = []
    try:
        with out.open("x", encoding="utf-8") as file:
            for answer in stream:
                file.write(json.dumps(answer.document(), ensure_ascii=False) + "\n")
                answers.append(answer)
    except OSError as error:
        raise OutputError(f"{out}: {error.strerror}") from error
    return answers


def _run(
    llm: LLM | Reference,
    model: Path | None,
    passages: list[Passage],
    answers: list[Answer],
    bos: bool,
    batch: int,
    busy: bool,
    progress: ProgressBars,
) -> Run:
    from kittiwake.evals.references import Reference
    from kittiwake.evals.runs import answerer_of, make_run

    answerer = llm.answerer if isinstance(llm, Reference) else answerer_of(llm, model, progress)
    return make_run(llm, answerer, passages, answers, bos=bos, batch=batch, busy=busy, progress=progress)


def figures_text(figures: dict[str, Any]) -> str:
    """The result for people."""
    return (
        f"LAMBADA: {figures['correct']} of {figures['total']} last words, {percent(figures['accuracy'])}\n"
        f"bos {'on' if figures['bos'] else 'off'}, batch {figures['batch']}: "
        f"p50 {figures['p50_ms']:.1f} ms, p99 {figures['p99_ms']:.1f} ms a call"
        + (f"\nperplexity of the last word {figures['perplexity']}" if figures.get("perplexity") is not None else "")
    )
