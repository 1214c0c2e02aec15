"""``kittiwake eval bits``: bits per byte of text, the measure that compares models with different tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kittiwake.cli.options import FILE, engine_config, engine_options, json_option, tokenizer_option
from kittiwake.cli.output import ProgressBars, emit_json, table


@click.command()
@click.argument("file", type=FILE)
@click.argument("model", required=False, type=FILE)
@click.option("--limit", type=click.IntRange(1), help="only the first so many documents")
@click.option("--bos/--no-bos", default=False, help="put the model's end-of-text token before each document")
@tokenizer_option
@engine_options
@json_option
def bits(
    file: Path,
    model: Path | None,
    limit: int | None,
    bos: bool,
    tokenizer: str | None,
    device: str,
    dtype: str,
    threads: int,
    as_json: bool,
) -> None:
    """Bits per byte of FILE: minus the sum of log2 p over all tokens, divided by the UTF-8 bytes of the text.

    Beside it the perplexity: 2 to the bits a token.

    FILE is plain text (one document), or .jsonl or .jsonl.xz with "text" on each line. Every document is scored whole,
    from an empty state. Its first token is paid for too: with --bos at what the model gives it after its end-of-text
    token, without at log2 of the vocabulary, as nothing stands before it that the model could go by.
    """
    config = engine_config(device=device, dtype=dtype, threads=threads, slots=1)
    from kittiwake.evals.bits import is_long, read_documents, score_documents, score_long_file, totals
    from kittiwake.llm import LLM

    documents = [] if is_long(file) else read_documents(file, limit)
    with ProgressBars() as progress, LLM(model, tokenizer=tokenizer, config=config, progress=progress) as llm:
        if documents:
            scored = score_documents(llm, documents, bos=bos, progress=progress)
        else:
            scored = [score_long_file(llm, file, bos=bos, progress=progress)]
    result = {**totals(scored), "bos": bos, "documents": [one.document() for one in scored]}
    if as_json:
        emit_json(result)
    else:
        click.echo(result_text(result))


def result_text(result: dict[str, Any]) -> str:
    """The result for people: a line for each document, then the total."""
    rows = [("document", "bytes", "tokens", "bits per byte", "perplexity")]
    for one in [*result["documents"], {**result, "title": "total"}]:
        figures = (f"{one['bits_per_byte']:.4f}", f"{one['perplexity']:.6g}")
        rows.append((one["title"], str(one["bytes"]), str(one["tokens"]), *figures))
    first = "after the end-of-text token" if result["bos"] else "at log2 of the vocabulary"
    return f"{table(rows)}\nbos {'on' if result['bos'] else 'off'}: first token of a document counted {first}"
