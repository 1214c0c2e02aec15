"""``kittiwake build``: a checkpoint becomes a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from kittiwake.cli.options import FILE, constant_options, engine_config, tokenizer_option
from kittiwake.cli.output import ProgressBars, note

PRECISIONS = ("fp32", "fp16", "bf16")


@click.command()
@click.argument("checkpoint", type=FILE)
@click.option("--out", "-o", type=FILE, required=True, help="the folder to write; it must not exist")
@click.option("--precision", type=click.Choice(PRECISIONS), default="bf16", help="how product weights are stored")
@tokenizer_option
@click.option("--chat-template", type=FILE, help="a Jinja file, instead of the one of CHECKPOINT")
@click.option("--goldens", type=click.IntRange(0), default=8, help="greedy answers to record, for verify to replay")
@constant_options
@click.option("--max-shard-mb", type=click.IntRange(1), help="most MB (10^6 bytes) of a weight file  [default: 2 GiB]")
def build(
    checkpoint: Path,
    out: Path,
    precision: str,
    tokenizer: str | None,
    chat_template: Path | None,
    goldens: int,
    max_shard_mb: int | None,
) -> None:
    """Turn CHECKPOINT (.pth, safetensors, GGUF, or a folder of them) into a bundle.

    Weights, tokenizer, chat template and goldens go into one folder with digests of every file. It is written beside
    OUT under a hidden name and renamed when whole, so that OUT is never half a bundle.
    """
    from kittiwake.build import build_bundle
    from kittiwake.checkpoints.bundle import DEFAULT_SHARD_BYTES
    from kittiwake.evals.documents import read_plain_text

    constants = engine_config()
    with ProgressBars() as progress:
        path = build_bundle(
            checkpoint,
            out,
            precision=precision,
            tokenizer=tokenizer,
            chat_template=None if chat_template is None else read_plain_text(chat_template),
            goldens=goldens,
            max_shard_bytes=DEFAULT_SHARD_BYTES if max_shard_mb is None else max_shard_mb * 1_000_000,
            group_norm_eps=constants.group_norm_eps,
            rescale_every=constants.rescale_every,
            progress=progress,
        )
    note(f"wrote {path}")
