"""A checkpoint → a bundle: kittiwake's names, one layout, goldens that verify replays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from kittiwake import __version__
from kittiwake.checkpoints.bundle import DEFAULT_SHARD_BYTES, Golden, write_bundle
from kittiwake.checkpoints.files import quoted
from kittiwake.checkpoints.manifest import SourceRecord
from kittiwake.checkpoints.reader import TensorSource, open_checkpoint
from kittiwake.config import EngineConfig
from kittiwake.device import resolve_threads
from kittiwake.engine.request import SamplingParams
from kittiwake.errors import CheckpointError, OutputError
from kittiwake.families.contract import Family, ModelConfig
from kittiwake.families.registry import recognise
from kittiwake.llm import LLM
from kittiwake.load import Loaded, find_tokenizer, own_template
from kittiwake.progress import Progress
from kittiwake.text.templates import template_for_bundle
from kittiwake.text.tokenizer import Tokenizer

GOLDEN_PROMPTS = (
    "It was a dark night, and",
    "The old man looked at the sea and said:",
    '"I do not know," she answered,',
    "In the morning the children",
    "Chapter I",
    "There was once a king who",
    "1, 2, 3, 4,",
    "He opened the letter. It read:\n\n",
)
"""What goldens are made of; more than these are asked for by going round again with the answers as prompts."""
GOLDEN_TOKENS = 32


def build_bundle(
    checkpoint: Path,
    out: Path,
    *,
    precision: str = "bf16",
    tokenizer: str | Path | None = None,
    chat_template: str | None = None,
    goldens: int = len(GOLDEN_PROMPTS),
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    group_norm_eps: float | None = None,
    rescale_every: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the checkpoint as a bundle to the new folder ``out``; returns it. ``group_norm_eps`` and
    ``rescale_every`` override the model's own (see EngineConfig).

    ``chat_template`` left out is the one in a GGUF file, or beside the checkpoint, if there is one.

    Raises CheckpointError, ModelError, TokenizerError for what is read, OutputError for what is written.
    """
    if out.exists() or out.is_symlink():
        raise OutputError(f"{quoted(str(out))} exists already", "give a path that does not exist, or remove it first")
    source = open_checkpoint(checkpoint, progress=progress)
    try:
        if source.format == "bundle":
            raise CheckpointError(
                f"{quoted(str(checkpoint))} is a bundle already", "build from the checkpoint it came from"
            )
        family = recognise(source)
        config = family.read_config(source).with_constants(group_norm_eps, rescale_every)
        text = find_tokenizer(checkpoint, config.vocab_size, tokenizer, source).tokenizer
        if chat_template is None:
            inside = own_template(source)
            chat_template = template_for_bundle(checkpoint, text) if inside is None else inside

        def make_goldens(written: TensorSource) -> Sequence[Golden]:
            return _goldens(family, config, written, precision, text, goldens, progress)

        write_bundle(
            out,
            family=family.name,
            model=manifest_model(config),
            precision=precision,
            tensors=chain(family.canonical(source, config), family.table_parts(source, config)),
            tokenizer=(text.kind, text.files()),
            source=SourceRecord.of(source, progress),
            builder=__version__,
            chat_template=chat_template,
            goldens=make_goldens if goldens else None,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
            total_bytes=sum(info.nbytes for info in source.infos()),
        )
    finally:
        source.close()
    return out


def manifest_model(config: ModelConfig) -> dict[str, Any]:
    """The ``model`` section of a manifest."""
    return {"layers": config.layers, "width": config.width, "vocab_size": config.vocab_size, **config.extra}


def _goldens(
    family: Family,
    config: ModelConfig,
    written: TensorSource,
    precision: str,
    tokenizer: Tokenizer,
    count: int,
    progress: Progress | None,
) -> list[Golden]:
    """Greedy answers of the weights just written."""
    threads = resolve_threads(0)
    dtype = "bf16" if precision == "bf16" else "fp32"
    tensors, tables = family.canonical(written, config), family.open_tables(written, config)
    model = family.build(config, tensors, device="cpu", dtype=dtype, threads=threads, tables=tables, progress=progress)
    loaded = Loaded(written.path, "bundle", model, tokenizer, dtype, threads, 0.0, None, None)
    llm = LLM.from_loaded(loaded, EngineConfig(slots=8))
    params = SamplingParams(max_tokens=GOLDEN_TOKENS, temperature=0.0, ignore_eos=True)
    goldens: list[Golden] = []
    prompts = list(GOLDEN_PROMPTS)
    while len(goldens) < count:
        batch = prompts[: count - len(goldens)]
        answers = llm.generate(batch, params)
        for prompt, answer in zip(batch, answers, strict=True):
            goldens.append(Golden(prompt, tuple(tokenizer.encode(prompt)), answer.token_ids))
        prompts = [prompt + answer.text for prompt, answer in zip(batch, answers, strict=True)]
    return goldens
