"""``kittiwake inspect``: what is in a checkpoint or bundle, and whether kittiwake runs it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kittiwake.cli.options import json_option, model_argument, tokenizer_option
from kittiwake.cli.output import ProgressBars, emit_json, human_bytes, outline, table
from kittiwake.errors import InputFileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kittiwake.checkpoints.bundle import Bundle
    from kittiwake.checkpoints.reader import TensorInfo, TensorSource
    from kittiwake.families.contract import ModelConfig, Progress

AT_LOAD = (
    "every product weight is turned from the stored [N, K] (N outputs) to [K, N], tensor by tensor, into private "
    "memory; the embedding keeps its rows"
)


@click.command()
@model_argument(required=True)
@click.option("--tensors", is_flag=True, help="list every tensor with its type and shape")
@click.option("--digest/--no-digest", default=True, help="read every byte for the sha-256, and check a bundle's")
@tokenizer_option
@json_option
def inspect(model: Path, tensors: bool, digest: bool, tokenizer: str | None, as_json: bool) -> None:
    """Tell what is in MODEL: format, family, sizes, types, tokenizer, digest, and whether kittiwake runs it.

    Reads headers, and the data only for the digest. Exit code 0 for any readable file, of a known family or not; 3 for
    one that cannot be read.
    """
    with ProgressBars() as progress:
        report = examine(model, tokenizer=tokenizer, digest=digest, tensors=tensors, progress=progress)
    if as_json:
        emit_json(report)
    else:
        click.echo(report_text(report))


def examine(
    path: Path, *, tokenizer: str | None = None, digest: bool = True, tensors: bool = False, progress: Progress
) -> dict[str, Any]:
    """What is in the file or folder, as JSON values. Raises CheckpointError or BundleError for what cannot be read."""
    from kittiwake.checkpoints.bundle import read_bundle
    from kittiwake.checkpoints.manifest import MANIFEST_NAME
    from kittiwake.checkpoints.reader import open_checkpoint

    bundle = None
    if (path / MANIFEST_NAME).is_file():
        bundle = read_bundle(path, verify_digests=digest, progress=progress)
    source = open_checkpoint(path) if bundle is None else bundle.source
    try:
        infos = source.infos()
        report: dict[str, Any] = {"path": str(path), "format": source.format, **_sizes(infos)}
        report["digest"] = source.digest(progress) if digest else None
        report |= _fit(path, source, bundle, tokenizer)
        report["at_load"] = AT_LOAD if report["runs"] else None
        report["bundle"] = None if bundle is None else _describe_bundle(bundle)
        if tensors:
            report["tensor_list"] = [
                {"name": info.name, "dtype": _dtype_name(info), "shape": list(info.shape)} for info in infos
            ]
    finally:
        source.close()
    return report


def _sizes(infos: Sequence[TensorInfo]) -> dict[str, Any]:
    dtypes = Counter(_dtype_name(info) for info in infos)
    return {
        "tensors": len(infos),
        "parameters": sum(info.nbytes // info.dtype.itemsize for info in infos),
        "bytes": sum(info.nbytes for info in infos),
        "dtypes": dict(sorted(dtypes.items())),
    }


def _dtype_name(info: TensorInfo) -> str:
    """torch.bfloat16 → "bf16"."""
    name = str(info.dtype).removeprefix("torch.")
    return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}.get(name, name)


def _fit(path: Path, source: TensorSource, bundle: Bundle | None, tokenizer: str | None) -> dict[str, Any]:
    """Family, config and tokenizer, as far as each can be told, and what keeps kittiwake from running the model."""
    found: dict[str, Any] = {"family": None, "config": None, "tokenizer": None, "runs": False, "why_not": None}
    try:
        name, config = _recognise(source, bundle)
        found["family"] = name
        found["config"] = {
            "layers": config.layers,
            "width": config.width,
            "vocab_size": config.vocab_size,
            **config.extra,
        }
        found["tokenizer"] = _tokenizer(path, config.vocab_size, bundle, tokenizer)
        found["runs"] = True
    except (InputFileError, UsageError) as error:
        found["why_not"] = str(error)
    return found


def _recognise(source: TensorSource, bundle: Bundle | None) -> tuple[str, ModelConfig]:
    """Family name and config, every tensor checked. Raises ModelError or BundleError where no family takes them."""
    from kittiwake.families.registry import recognise
    from kittiwake.load import bundle_family

    if bundle is None:
        family = recognise(source)
        return family.name, family.read_config(source)
    family, config = bundle_family(bundle)
    return family.name, config


def _tokenizer(path: Path, vocab_size: int, bundle: Bundle | None, chosen: str | None) -> dict[str, Any]:
    """The tokenizer that loading would take. Raises TokenizerError where there is none that fits."""
    from kittiwake.load import bundle_tokenizer, tokenizer_for
    from kittiwake.text.tokenizer import check_fits

    if bundle is not None and chosen is None:
        tokenizer = bundle_tokenizer(bundle)
        check_fits(tokenizer, vocab_size)
    else:
        tokenizer = tokenizer_for(path, vocab_size, chosen)
    return {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "eos_ids": list(tokenizer.eos_ids),
        "digest": tokenizer.digest(),
    }


def _describe_bundle(bundle: Bundle) -> dict[str, Any]:
    """What the manifest declares, and what was found beside it."""
    from kittiwake.checkpoints.manifest import FORMAT

    manifest = bundle.manifest
    return {
        "format": FORMAT,
        "builder": manifest.builder,
        "precision": manifest.precision,
        "source": {
            "name": manifest.source.name,
            "format": manifest.source.format,
            "sha256": manifest.source.sha256,
        },
        "files": {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in manifest.files.items()},
        "extra_files": list(bundle.extra_files),
        "goldens": None if bundle.goldens is None else len(bundle.goldens),
        "chat_template": bundle.chat_template is not None,
        "digests_verified": bundle.digests_verified,
    }


def report_text(report: dict[str, Any]) -> str:
    """The report for people; the verdict last."""
    shown = {key: value for key, value in report.items() if key not in ("tensor_list", "runs", "why_not", "at_load")}
    shown["parameters"] = f"{report['parameters']:,}"
    shown["bytes"] = f"{report['bytes']:,} ({human_bytes(report['bytes'])})"
    lines = [outline(shown)]
    if "tensor_list" in report:
        rows = [("tensor", "type", "shape")]
        rows += [(one["name"], one["dtype"], " × ".join(map(str, one["shape"]))) for one in report["tensor_list"]]
        lines.append(table(rows))
    if report["runs"]:
        lines.append(f"kittiwake runs it; at load, {report['at_load']}")
    else:
        lines.append(f"kittiwake does not run it: {report['why_not']}")
    return "\n".join(lines)
