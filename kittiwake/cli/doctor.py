"""``kittiwake doctor``: what this machine has, what was picked for it, and what could be better."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kittiwake.cli.options import engine_config, engine_options, json_option, model_argument
from kittiwake.cli.output import ProgressBars, emit_json, human_bytes, outline
from kittiwake.device import SPIN_COUNT
from kittiwake.errors import KittiwakeError

if TYPE_CHECKING:
    from kittiwake.config import EngineConfig
    from kittiwake.load import Loaded


@click.command()
@model_argument()
@engine_options
@json_option
@click.pass_context
def doctor(context: click.Context, model: Path | None, device: str, dtype: str, threads: int, as_json: bool) -> None:
    """Tell what this machine has, what was picked and proved for MODEL, and what could be better.

    Exit code 0 whatever the advice; 1 where even the packaged model cannot be loaded.
    """
    config = engine_config(device=device, dtype=dtype, threads=threads)
    report = examine(model, config)
    if as_json:
        emit_json(report)
    else:
        click.echo(report_text(report))
    if report["model"] is None:
        context.exit(1)


def examine(model: Path | None, config: EngineConfig) -> dict[str, Any]:
    """Everything doctor knows, as JSON values. Errors of a model that was named are raised; the packaged one's are told."""
    from kittiwake.bench.machine import describe_machine
    from kittiwake.load import load_model

    machine = describe_machine()
    warnings: list[str] = []
    loaded: Loaded | None = None
    try:
        with ProgressBars() as progress:
            loaded = load_model(model, config, progress=progress)
    except KittiwakeError as error:
        if model is not None:
            raise
        warnings.append(f"the packaged model cannot be loaded: {error}")
    runtime = describe_runtime(loaded.threads if loaded else config.threads)
    warnings += advice(machine, runtime)
    return {
        "machine": machine,
        "runtime": runtime,
        "model": None if loaded is None else describe_loaded(loaded),
        "warnings": warnings,
    }


def describe_loaded(loaded: Loaded) -> dict[str, Any]:
    """What came out of loading: sizes in bytes, times in ms, and the model's own account of what was picked and proved."""
    config = loaded.model.config
    return {
        "path": str(loaded.path),
        "format": loaded.format,
        "family": config.family,
        "layers": config.layers,
        "width": config.width,
        "vocab_size": config.vocab_size,
        "dtype": loaded.dtype,
        "weight_bytes_per_step": loaded.model.weight_bytes,
        "state_bytes_per_sequence": loaded.model.state_spec.slot_bytes,
        "load_ms": round(loaded.load_ms, 1),
        "picked": loaded.model.describe(),
    }


def describe_runtime(threads: int) -> dict[str, Any]:
    """What torch and numba say of themselves in this process."""
    import numba
    import torch

    return {
        "threads": threads,
        "torch_threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_mkl": bool(torch.backends.mkl.is_available()),  # type: ignore[no-untyped-call]
        "numba_threads": numba.get_num_threads(),
        "numba_threads_limit": numba.config.NUMBA_NUM_THREADS,
        "numba_threading_layer": _threading_layer(),
        "cuda_available": bool(torch.cuda.is_available()),
    }


def _threading_layer() -> str:
    """The layer in use, or the one configured where no parallel kernel has run yet."""
    import numba

    try:
        return str(numba.threading_layer())
    except ValueError:
        return f"none yet (configured: {numba.config.THREADING_LAYER})"


def advice(machine: dict[str, Any], runtime: dict[str, Any]) -> list[str]:
    """Sentences about what slows this machine down or was never tested on it."""
    found = []
    features = machine["features"]
    if features and "asimd" not in features and not {"avx2", "fma"} <= set(features):
        found.append("the processor lacks AVX2 or FMA: answers stay exact, but much slower than told in the docs")
    if not runtime["torch_mkl"]:
        found.append("this torch comes without MKL: the load-time probe decides which products may be used")
    settings = machine["settings"]
    if settings.get("OMP_WAIT_POLICY", "").lower() == "active" or not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(
        settings
    ):
        found.append(
            "idle threads spin without end (GOMP_SPINCOUNT unset, or OMP_WAIT_POLICY active): torch's and numba's take "
            f"cores from each other; set GOMP_SPINCOUNT={SPIN_COUNT} before starting"
        )
    quota = machine["cpu_quota_cores"]
    if quota is not None and runtime["threads"] > quota:
        found.append(
            f"{runtime['threads']} threads share a quota of {quota:g} cores: --threads {max(1, int(quota))} is faster"
        )
    if runtime["threads"] > machine["usable_cores"]:
        found.append(f"{runtime['threads']} threads on {machine['usable_cores']} usable cores take turns")
    if not is_writable(Path(machine["cache_folder"])):
        found.append(
            f"{machine['cache_folder']} cannot be written: kernels are compiled anew in every process; "
            "set KITTIWAKE_CACHE to a folder that can"
        )
    available = machine["memory_available_bytes"]
    if available is not None and available < 1 << 30:
        found.append(f"only {human_bytes(available)} of memory are available")
    return found


def is_writable(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, can be written to."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)


def report_text(report: dict[str, Any]) -> str:
    """The report for people; sizes made readable."""
    machine = dict(report["machine"])
    for field in ("memory_bytes", "memory_available_bytes"):
        if machine[field] is not None:
            machine[field.removesuffix("_bytes")] = human_bytes(machine.pop(field))
    sections: dict[str, Any] = {"machine": machine, "runtime": report["runtime"]}
    if report["model"] is not None:
        model = dict(report["model"])
        for field in ("weight_bytes_per_step", "state_bytes_per_sequence"):
            model[field.replace("_bytes", "")] = human_bytes(model.pop(field))
        sections["model"] = model
    lines = [outline(sections)]
    lines += [f"advice: {sentence}" for sentence in report["warnings"]] or ["nothing to advise"]
    return "\n".join(lines)
