"""``kittiwake export``: logits or hidden rows of a text, into a file that other tools read."""

from __future__ import annotations

from pathlib import Path

import click

from kittiwake.cli.options import (
    FILE,
    engine_config,
    engine_options,
    json_option,
    model_argument,
    tokenizer_option,
)
from kittiwake.cli.output import ProgressBars, emit_json
from kittiwake.cli.run import read_prompt
from kittiwake.errors import UsageError

WHAT = ("logits", "hidden")
FORMATS = ("npz", "safetensors")


@click.command()
@model_argument()
@click.option("--prompt", "-p", help="the text; left out, it is read from stdin")
@click.option("--prompt-file", type=FILE, help="a UTF-8 file with the text; one newline at its end is dropped")
@click.option("--out", "-o", type=FILE, required=True, help="the new file to write")
@click.option(
    "--what", type=click.Choice(WHAT), default="logits", help="what follows each token, or the residual stream"
)
@click.option(
    "--format", "layout", type=click.Choice(FORMATS), help="left out, the ending of the new file's name tells"
)
@click.option(
    "--layer",
    "layers",
    multiple=True,
    type=click.IntRange(0),
    help="with --what hidden: what enters this layer, or leaves the last one; may be given again; left out, all",
)
@click.option("--last", type=click.IntRange(1), help="only the last so many tokens")
@tokenizer_option
@engine_options
@json_option
def export(
    model: Path | None,
    prompt: str | None,
    prompt_file: Path | None,
    out: Path,
    what: str,
    layout: str | None,
    layers: tuple[int, ...],
    last: int | None,
    tokenizer: str | None,
    device: str,
    dtype: str,
    threads: int,
    as_json: bool,
) -> None:
    """Write logits or hidden rows of every token of a text to a file, in bounded memory.

    The file holds token_ids [T], and logits [T, vocab] or hidden [T, layers, width] with the numbers of its layers, all
    float32. Asking for them changes no bit of the model's answers.
    """
    layout = layout or format_of(out)
    if layers and what != "hidden":
        raise UsageError("--layer needs --what hidden")
    from kittiwake.checkpoints.files import check_new_file

    check_new_file(out)
    text = read_prompt(prompt, prompt_file)
    config = engine_config(device=device, dtype=dtype, threads=threads, slots=1)
    from kittiwake.export import export_rows
    from kittiwake.llm import LLM

    with ProgressBars() as progress, LLM(model, tokenizer=tokenizer, config=config, progress=progress) as llm:
        ids = llm.tokenizer.encode(text)
        report = export_rows(
            llm, ids, out, what=what, layout=layout, layers=layers or None, last=last, progress=progress
        )
    if as_json:
        emit_json(report)
    else:
        click.echo(f"{out}: {what} {' × '.join(map(str, report['shape']))} of {report['tokens']} tokens")


def format_of(out: Path) -> str:
    """The format that a file's name ends in. Raises UsageError for another ending."""
    suffix = out.suffix.removeprefix(".")
    if suffix not in FORMATS:
        raise UsageError(f"{out} does not tell its format", "end its name in .npz or .safetensors, or give --format")
    return suffix
