"""``kittiwake eval lambada``: last words guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kittiwake.cli.options import FILE, engine_config, engine_options, json_option, model_argument, tokenizer_option
from kittiwake.cli.output import ProgressBars, emit_json, percent
from kittiwake.errors import OutputError

if TYPE_CHECKING:
    from kittiwake.config import EngineConfig
    from kittiwake.evals.lambada import Answer, Passage


@click.command()
@model_argument()
@click.option("--data", type=FILE, required=True, help='JSON lines with "text", one passage a line')
@click.option("--limit", type=click.IntRange(1), help="only the first so many passages")
@click.option("--bos/--no-bos", default=False, help="put the model's end-of-text token before each passage")
@click.option(
    "--batch", type=click.IntRange(1), default=1, help="passages answered at once; changes times, never answers"
)
@click.option("--out", type=FILE, help="write a JSON line for each passage to this file; it must not exist")
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
    """
    config = engine_config(device=device, dtype=dtype, threads=threads, slots=batch)
    from kittiwake.evals.lambada import read_passages, summarize

    passages = read_passages(data, limit)
    if out is not None and out.exists():
        raise OutputError(f"{out} exists", "choose another --out or move it away")
    answers = _answer_all(model, tokenizer, config, passages, batch, bos, out)
    figures = {**summarize(answers), "bos": bos, "batch": batch}
    if as_json:
        emit_json(figures)
    else:
        click.echo(figures_text(figures))


def _answer_all(
    model: Path | None,
    tokenizer: str | None,
    config: EngineConfig,
    passages: list[Passage],
    batch: int,
    bos: bool,
    out: Path | None,
) -> list[Answer]:
    from kittiwake.evals.lambada import answer_passages
    from kittiwake.llm import LLM

    with ProgressBars() as progress, LLM(model, tokenizer=tokenizer, config=config, progress=progress) as llm:
        stream = answer_passages(llm, passages, batch=batch, bos=bos, progress=progress)
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


def figures_text(figures: dict[str, Any]) -> str:
    """The result for people."""
    return (
        f"LAMBADA: {figures['correct']} of {figures['total']} last words, {percent(figures['accuracy'])}\n"
        f"bos {'on' if figures['bos'] else 'off'}, batch {figures['batch']}: "
        f"p50 {figures['p50_ms']:.1f} ms, p99 {figures['p99_ms']:.1f} ms a call"
    )
