"""``kittiwake inspect``: what is in a checkpoint or bundle, and whether kittiwake runs it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kittiwake.cli.options import (
    chunk_option,
    constant_options,
    engine_config,
    json_option,
    model_argument,
    tokenizer_option,
)
from kittiwake.cli.output import ProgressBars, emit_json, human_bytes, outline, table
from kittiwake.config import EngineConfig
from kittiwake.device import resolve_threads
from kittiwake.errors import InputFileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kittiwake.checkpoints.bundle import Bundle
    from kittiwake.checkpoints.reader import TensorInfo, TensorSource
    from kittiwake.families.contract import Family, ModelConfig
    from kittiwake.progress import Progress

LONG_TEXT = 200
AT_LOAD = (
    "every product weight is turned from the stored [N, K] (N outputs) to [K, N], tensor by tensor, into private "
    "memory; the embedding keeps its rows"
)


@click.command()
@model_argument(required=True)
@click.option("--tensors", is_flag=True, help="list every tensor with its type and shape")
@click.option("--digest/--no-digest", default=True, help="read every byte for the sha-256, and check a bundle's")
@tokenizer_option
@chunk_option
@constant_options
@json_option
def inspect(model: Path, tensors: bool, digest: bool, tokenizer: str | None, as_json: bool) -> None:
    """Tell what is in MODEL: format, family, sizes, types, tokenizer, digest, and whether kittiwake runs it.

    Where it does not run, the exact reason is told. Reads headers, and the data only for the digest. Exit code 0 for
    any readable file, of a known family or not; 3 for one that cannot be read.
    """
    constants = engine_config()
    with ProgressBars() as progress:
        report = examine(
            model, tokenizer=tokenizer, digest=digest, tensors=tensors, constants=constants, progress=progress
        )
    if as_json:
        emit_json(report)
    else:
        click.echo(report_text(report))


def examine(
    path: Path,
    *,
    tokenizer: str | None = None,
    digest: bool = True,
    tensors: bool = False,
    constants: EngineConfig | None = None,
    progress: Progress,
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
        report: dict[str, Any] = {
            "path": str(path),
            "format": source.format,
            "architecture": _architecture(source, bundle),
            **_sizes(infos),
        }
        report["files_sha256"] = source.digest(progress) if digest else None  # the model's own digest: `run --receipt`
        report |= _fit(path, source, bundle, tokenizer, constants or EngineConfig())
        report["at_load"] = AT_LOAD if report["runs"] else None
        report["bundle"] = None if bundle is None else _describe_bundle(bundle)
        report["metadata"] = _metadata(source)
        if tensors:
            report["tensor_list"] = [
                {"name": info.name, "dtype": _dtype_name(info), "shape": list(info.shape)} for info in infos
            ]
    finally:
        source.close()
    return report


def _architecture(source: TensorSource, bundle: Bundle | None) -> str | None:
    """What the file calls itself, as far as it says anything."""
    if bundle is not None:
        return bundle.manifest.family
    config = source.config or {}
    named = config.get("general.architecture") or config.get("architectures") or config.get("model_type")
    if isinstance(named, list) and named:
        named = named[0]
    return named if isinstance(named, str) else None


def _metadata(source: TensorSource) -> dict[str, Any] | None:
    """Settings that came with the tensors; long texts and arrays cut short."""
    if source.config is None:
        return None
    return {key: _plain(value) for key, value in source.config.items()}


def _plain(value: Any) -> Any:
    """A setting as a JSON value for people: floats that JSON cannot say and what is long as text."""
    if isinstance(value, str) and len(value) > LONG_TEXT:
        return f"{value[:LONG_TEXT]} ... ({len(value):,} characters)"
    if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


def _sizes(infos: Sequence[TensorInfo]) -> dict[str, Any]:
    """Counts and bytes as stored, in all and by type."""
    dtypes: Counter[str] = Counter()
    dtype_bytes: Counter[str] = Counter()
    for info in infos:
        dtypes[_dtype_name(info)] += 1
        dtype_bytes[_dtype_name(info)] += info.stored_bytes
    return {
        "tensors": len(infos),
        "parameters": sum(math.prod(info.shape) for info in infos),
        "bytes": dtype_bytes.total(),
        "dtypes": dict(sorted(dtypes.items())),
        "dtype_bytes": dict(sorted(dtype_bytes.items())),
    }


def _dtype_name(info: TensorInfo) -> str:
    """torch.bfloat16 → "bf16"; a packed type as its format calls it."""
    name = str(info.dtype).removeprefix("torch.")
    return info.packing or {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}.get(name, name)


def _fit(
    path: Path, source: TensorSource, bundle: Bundle | None, tokenizer: str | None, constants: EngineConfig
) -> dict[str, Any]:
    """Family, config and tokenizer, as far as each can be told, and what keeps kittiwake from running the model."""
    from kittiwake.load import own_template

    found: dict[str, Any] = dict.fromkeys(("family", "layout", "config", "origins", "memory", "tokenizer", "why_not"))
    found["runs"] = False
    try:
        family = _family(source, bundle)
        found["family"] = family.name
        config = _config(family, source, bundle).with_constants(constants.group_norm_eps, constants.rescale_every)
        origins = dict(config.origins)
        found["layout"] = origins.pop("layout", None)
        found["config"] = {
            "layers": config.layers,
            "width": config.width,
            "vocab_size": config.vocab_size,
            **config.extra,
        }
        found["origins"] = origins
        memory = family.footprint(config)
        room = family.workspace_bytes(config, constants.max_chunk, resolve_threads(constants.threads))
        if room > 0:
            memory["workspace"] = room
        found["memory"] = {f"{name}_bytes": count for name, count in memory.items()}
        found["tokenizer"] = _tokenizer(path, config, source, bundle, tokenizer)
        own_template(source)  # raises for one that loading would refuse
        found["runs"] = True
    except (InputFileError, UsageError) as error:
        found["why_not"] = str(error)
    return found


def _family(source: TensorSource, bundle: Bundle | None) -> Family:
    """Raises ModelError or BundleError where no family takes the tensors; says then what they seem to be."""
    from kittiwake.families.registry import family_named, recognise

    return recognise(source) if bundle is None else family_named(bundle.manifest.family)


def _config(family: Family, source: TensorSource, bundle: Bundle | None) -> ModelConfig:
    """Sizes and constants, every tensor checked. Raises ModelError or BundleError."""
    from kittiwake.load import bundle_family

    return family.read_config(source) if bundle is None else bundle_family(bundle)[1]


def _tokenizer(
    path: Path, config: ModelConfig, source: TensorSource, bundle: Bundle | None, chosen: str | None
) -> dict[str, Any]:
    """The tokenizer that loading would take. Raises TokenizerError where there is none that fits."""
    from kittiwake.load import bundle_tokenizer, find_tokenizer
    from kittiwake.text.tokenizer import check_fits, with_ends

    if bundle is not None and chosen is None:
        tokenizer, origin = bundle_tokenizer(bundle), "manifest"
        check_fits(tokenizer, config.vocab_size)
    else:
        found = find_tokenizer(path, config.vocab_size, chosen, source)
        tokenizer, origin = found.tokenizer, found.origin
    tokenizer = with_ends(tokenizer, config.end_ids)
    return {
        "kind": tokenizer.kind,
        "found_by": origin,
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


_MORE_MEMORY = {
    "state_per_token_bytes": "and of each of its tokens",
    "workspace_bytes": "to work in, for max_chunk rows",
    "card_workspace_bytes": "to work in on a card",
    "table_bytes": "table that stays on disk",
}
"""What a family whose states grow, or that reads a table, says beside the rest."""


def report_text(report: dict[str, Any]) -> str:
    """The report for people; the verdict last."""
    shown = {key: value for key, value in report.items() if key not in ("tensor_list", "runs", "why_not", "at_load")}
    shown["parameters"] = f"{report['parameters']:,}"
    shown["bytes"] = f"{report['bytes']:,} ({human_bytes(report['bytes'])})"
    shown["dtypes"] = [
        {"type": name, "tensors": count, "size": human_bytes(shown["dtype_bytes"][name])}
        for name, count in report["dtypes"].items()
    ]
    del shown["dtype_bytes"]
    if report["memory"] is not None:
        shown["memory"] = {
            "weights as fp32": human_bytes(report["memory"]["fp32_bytes"]),
            "weights as bf16": human_bytes(report["memory"]["bf16_bytes"]),
            "state of a sequence": human_bytes(report["memory"]["state_bytes"]),
        }
        for key, text in _MORE_MEMORY.items():
            if key in report["memory"]:
                shown["memory"][text] = human_bytes(report["memory"][key])
    lines = [outline({key: value for key, value in shown.items() if value is not None})]
    if "tensor_list" in report:
        rows = [("tensor", "type", "shape")]
        rows += [(one["name"], one["dtype"], " × ".join(map(str, one["shape"]))) for one in report["tensor_list"]]
        lines.append(table(rows))
    if report["runs"]:
        lines.append(f"kittiwake runs it; at load, {report['at_load']}")
    else:
        lines.append(f"kittiwake does not run it: {report['why_not']}")
    return "\n".join(lines)
