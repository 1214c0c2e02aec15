"""``kittiwake batch``: a file of requests, a file of answers."""

from __future__ import annotations

import time
from pathlib import Path

import click

from kittiwake.cli.options import FILE, engine_config, engine_options, model_argument, tokenizer_option
from kittiwake.cli.output import ProgressBars, note
from kittiwake.errors import UsageError

CONCURRENCY = 16


@click.command()
@click.argument("requests", type=FILE, metavar="IN.jsonl")
@click.argument("answers", type=FILE, metavar="OUT.jsonl")
@model_argument()
@click.option("--concurrency", type=click.IntRange(1), default=CONCURRENCY, help="requests answered side by side")
@click.option("--template", metavar="NAME|FILE", help="chat template of requests with messages, instead of the model's")
@tokenizer_option
@engine_options
@click.pass_context
def batch(
    context: click.Context,
    requests: Path,
    answers: Path,
    model: Path | None,
    concurrency: int,
    template: str | None,
    tokenizer: str | None,
    device: str,
    dtype: str,
    threads: int,
) -> None:
    """Answer every request of IN.jsonl into OUT.jsonl, and go on where it was if it was stopped or killed.

    A line of IN: {"id": …, "prompt": … or "messages": […], and any sampling parameter}. All are checked before any is
    answered. Answers are appended as they are finished. Exit code 1 when any of them is an error.
    """
    config = engine_config(device=device, dtype=dtype, threads=threads, slots=concurrency)
    if answers.exists() and requests.exists() and answers.samefile(requests):
        raise UsageError("IN.jsonl and OUT.jsonl are the same file")
    from kittiwake.batch_file import AnswerFile, BatchFile, answer_all
    from kittiwake.llm import LLM

    asked = BatchFile(requests, template)
    with AnswerFile(answers, {item.id: item for item in asked.items}) as file, ProgressBars() as progress:
        before = len(file.done)
        if before == len(asked.items):
            note(f"[all {before} answers are there already]")
        else:
            with LLM(model, tokenizer=tokenizer, config=config, progress=progress) as llm:
                started = time.perf_counter()
                try:
                    tokens = answer_all(llm, asked, file, concurrency, progress)
                except KeyboardInterrupt:
                    progress.close()
                    note(f"{len(file.done)} of {len(asked.items)} are answered; the same command goes on from there")
                    raise
                seconds = time.perf_counter() - started
            progress.close()
            resumed = f"{before} from before · " if before else ""
            note(f"[{resumed}{len(file.done) - before} answers · {tokens} tokens · {tokens / seconds:.0f} tokens/s]")
        if file.errors:
            note(f"{file.errors} of the answers are errors")
            context.exit(1)
