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
    from collections.abc import Sequence

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
    from kittiwake.bench.machine import checked_versions, describe_card, describe_machine, kernel_languages
    from kittiwake.load import load_model

    machine, card = describe_machine(), describe_card()
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
    described = None if loaded is None else describe_loaded(loaded)
    versions = checked_versions()
    warnings += version_advice(versions) + card_advice(card) + advice(machine, runtime)
    if described is not None:
        warnings += model_advice(described, machine, card)
    return {
        "machine": machine,
        "card": card,
        "kernel_languages": kernel_languages(),
        "versions": versions,
        "runtime": runtime,
        "model": described,
        "warnings": warnings,
    }


def describe_loaded(loaded: Loaded) -> dict[str, Any]:
    """What came out of loading: sizes in bytes, times in ms, and the model's own account of what was picked and proved."""
    config = loaded.model.config
    picked = loaded.model.describe()
    return {
        "path": str(loaded.path),
        "format": loaded.format,
        "family": config.family,
        "layers": config.layers,
        "width": config.width,
        "vocab_size": config.vocab_size,
        "device": loaded.model.device,
        "dtype": loaded.dtype,
        "weight_bytes_per_step": loaded.model.weight_bytes,
        "state_bytes_per_sequence": loaded.model.state_spec.slot_bytes,
        "load_ms": round(loaded.load_ms, 1),
        "picked": picked,
        "proved": describe_proof(picked),
    }


def describe_proof(picked: dict[str, Any]) -> dict[str, Any]:
    """How many shapes of products the load-time probe found equal bit for bit in all that was to run them, and which not.

    A model on the CPU tells them as ``products``: torch and our kernel. One on a card tells them as ``picks`` and
    ``experts``, what was replaced by the in-order kernel, or the narrow tiling, among them.
    """
    products, picks = picked.get("products", ()), (*picked.get("picks", ()), *picked.get("experts", ()))
    unproved: list[Any] = [[row["depth"], row["columns"]] for row in products if not row["wide_from"]]
    unproved += [row["shape"] for row in picks if row["replaced"]]
    shapes = len(products) + len(picks)
    return {"shapes": shapes, "equal_bits": shapes - len(unproved), "own_kernel_only": unproved}


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


def card_advice(card: dict[str, Any]) -> list[str]:
    """A sentence where a card or its driver is there, and models do not run on it all the same."""
    if card["usable"] or not (card.get("name") or card["driver"]):
        return []
    what = card.get("name") or f"a card with the NVIDIA driver {card['driver']}"
    return [f"{what} is here, but models run on the CPU: {card['reason']}"]


def version_advice(versions: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each package that is missing or of a version no test has run with."""
    found = []
    for row in versions:
        if row["installed"] is None:
            found.append(f"{row['name']} is not installed; kittiwake needs {row['tested']}")
        elif not row["ok"]:
            found.append(
                f"{row['name']} {row['installed']} was never tested with kittiwake ({row['tested']} was): "
                "run kittiwake verify before trusting it"
            )
    return found


def model_advice(model: dict[str, Any], machine: dict[str, Any], card: dict[str, Any]) -> list[str]:
    """Sentences about what would make this model faster here."""
    return _cpu_model_advice(model, machine) if model["device"] == "cpu" else _card_model_advice(model, card)


def _card_model_advice(model: dict[str, Any], card: dict[str, Any]) -> list[str]:
    found = []
    proof, picked = model["proved"], model["picked"]
    if model["dtype"] == "fp32":
        found.append("weights are kept as float32: --dtype bf16 or fp16 is several times faster, and rounds them")
    elif proof["own_kernel_only"]:
        found.append(
            f"{len(proof['own_kernel_only'])} of {proof['shapes']} shapes of products had picks that give other bits on this "
            "card or cannot run on it; the in-order kernel serves them, slower and exact"
        )
    used = picked.get("weight_bytes", 0) + picked.get("workspace_bytes", 0) + picked.get("graphs", {}).get("bytes", 0)
    slots = (card["memory_bytes"] - used) // max(1, model["state_bytes_per_sequence"])
    if slots < 64:
        found.append(
            f"weights, workspace and graphs take {human_bytes(used)} of the card's {human_bytes(card['memory_bytes'])}: "
            f"room for {max(0, slots)} states, fewer than the 64 slots of an engine by default"
        )
    return found


def _cpu_model_advice(model: dict[str, Any], machine: dict[str, Any]) -> list[str]:
    found = []
    proof = model["proved"]
    if proof["own_kernel_only"]:
        found.append(
            f"{len(proof['own_kernel_only'])} of {proof['shapes']} shapes of products have other bits in torch than in "
            "our kernel, which serves every row count of them: long prompts are slower; another build of torch may agree"
        )
    if model["dtype"] == "fp32":
        found.append(
            "weights are kept as float32: --dtype bf16 halves the bytes read for a token, and rounds what is not bfloat16"
        )
    threads = model["picked"].get("threads", machine["usable_cores"])
    if threads < machine["usable_cores"]:
        found.append(f"{threads} of {machine['usable_cores']} usable cores are used: see --threads")
    available = machine["memory_available_bytes"]
    if available is not None and model["weight_bytes_per_step"] > available:
        found.append(
            f"the weights take {human_bytes(model['weight_bytes_per_step'])}, of memory {human_bytes(available)} are free"
        )
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
    ranged = {row["name"] for row in report["versions"]}
    machine["other_packages"] = {name: one for name, one in machine.pop("packages").items() if name not in ranged}
    versions = [
        {
            "package": row["name"],
            "installed": row["installed"] or "–",
            "tested": row["tested"],
            "": "" if row["ok"] else "never tested",
        }
        for row in report["versions"]
    ]
    languages = [
        {
            "language": row["name"],
            "installed": row["installed"] or "–",
            "usable": row["ok"],
            "": row["note"],
        }
        for row in report["kernel_languages"]
    ]
    sections: dict[str, Any] = {"machine": machine, "card": _readable(report["card"]), "kernel languages": languages}
    sections |= {"versions": versions, "runtime": report["runtime"]}
    if report["model"] is not None:
        model = _readable(report["model"])
        if "products" in model["picked"]:
            model["picked"]["products"] = [_product_row(row) for row in model["picked"]["products"]]
        for kind in ("picks", "experts"):
            if kind in model["picked"]:
                model["picked"][kind] = [_pick_row(row) for row in model["picked"][kind]]
        sections["model"] = model
    lines = [outline(sections)]
    lines += [f"advice: {sentence}" for sentence in report["warnings"]] or ["nothing to advise"]
    return "\n".join(lines)


def _pick_row(row: dict[str, Any]) -> dict[str, Any]:
    """One shape on a card: what runs it up to how many rows (experts: up to how many pairs of a row and an expert, for
    each expert), choices that follow each other and are equal told once."""
    told: list[tuple[str, str]] = []
    for rows, choice in (row.get("up_to_rows") or row["up_to_pairs_an_expert"]).items():
        if told and told[-1][1] == choice:
            told.pop()
        told.append((rows, choice))
    found = {
        "shape": row["shape"],
        "picks": ", ".join(f"{rows}: {choice}" for rows, choice in told),
        "reason": row["reason"],
    }
    return found | ({"replaced": ", ".join(row["replaced"])} if row["replaced"] else {})


def _readable(values: dict[str, Any]) -> dict[str, Any]:
    """The same with sizes in bytes made readable, in objects within it too; empty texts are left out."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        is_size = isinstance(value, int) and not isinstance(value, bool)
        if is_size and (key == "bytes" or "_bytes" in key):
            found[key.replace("_bytes", "")] = human_bytes(value)
        elif isinstance(value, dict):
            found[key] = _readable(value)
        elif value != "":
            found[key] = value
    return found


def _product_row(row: dict[str, Any]) -> dict[str, Any]:
    """One shape of products for people: [K, N], how K is summed, and what serves it."""
    proved = (
        f"torch from {row['wide_from']} rows, bits equal"
        if row["wide_from"]
        else "our kernel alone: torch's bits differ"
    )
    return {"K": row["depth"], "N": row["columns"], "sum in blocks of": row["k_block"], "picked and proved": proved}
