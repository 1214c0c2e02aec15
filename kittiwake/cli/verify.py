"""``kittiwake verify``: proves the law of exactness on the model at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kittiwake.cli.options import (
    engine_config,
    engine_options,
    json_option,
    model_argument,
    seed_option,
    tokenizer_option,
)
from kittiwake.cli.output import ProgressBars, emit_json, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kittiwake.verify.laws import LawResult


@click.command()
@model_argument()
@seed_option("draws the tokens, the splits and the crowds")
@tokenizer_option
@engine_options
@json_option
@click.pass_context
def verify(
    context: click.Context,
    model: Path | None,
    seed: int,
    tokenizer: str | None,
    device: str,
    dtype: str,
    threads: int,
    as_json: bool,
) -> None:
    """Prove that the bits of a token depend only on the tokens before it.

    Runs the model in many ways that must not matter (split prompts, neighbours, other slots, other orders) and compares
    logits and states bit for bit; on the CPU a bundle's goldens are replayed too. Exit code 1 when anything differs.
    """
    config = engine_config(device=device, dtype=dtype, threads=threads)
    from kittiwake.load import load_model
    from kittiwake.verify.laws import verify as verify_laws

    with ProgressBars() as progress:
        loaded = load_model(model, config, tokenizer=tokenizer, progress=progress)
        results = verify_laws(loaded, config, seed, progress)
    document = verdict(results)
    if as_json:
        emit_json(document)
    else:
        click.echo(verdict_text(document))
    if not document["ok"]:
        context.exit(1)


def verdict(results: Sequence[LawResult]) -> dict[str, Any]:
    """The JSON contract: ok only if something was checked, every law had cases, and none differed."""
    laws = [{"name": law.name, "cases": law.cases, "differing": law.differing} for law in results]
    ok = bool(laws) and all(law.cases > 0 and law.differing == 0 for law in results)
    return {"ok": ok, "laws": laws}


def verdict_text(document: dict[str, Any]) -> str:
    """The same for people: a table, and one sentence below it."""
    laws = document["laws"]
    rows = [("law", "cases", "differing")]
    rows += [(str(law["name"]), str(law["cases"]), str(law["differing"])) for law in laws]
    cases = sum(law["cases"] for law in laws)
    differing = sum(law["differing"] for law in laws)
    empty = [law["name"] for law in laws if not law["cases"]]
    if document["ok"]:
        sentence = f"exact: {cases} cases, every bit equal"
    elif differing:
        sentence = f"NOT exact: {differing} of {cases} cases differ"
    else:
        sentence = f"nothing proved: no cases for {', '.join(empty) or 'any law'}"
    return f"{table(rows)}\n{sentence}"
