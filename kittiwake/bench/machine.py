"""What a figure was measured on, and what ``doctor`` looks at: processor, memory, versions, settings.

Reads /proc and /sys where Linux has them and leaves out what it cannot find. Versions come from the installed packages'
metadata; only what tells of a card imports torch.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kittiwake import __version__
from kittiwake.device import cache_dir, driver_version, find_card, processor_name, usable_cores, why_no_cuda

TESTED = {
    "torch": ("2.11", "2.15"),
    "numpy": ("2.1", "2.5"),
    "numba": ("0.61", "0.69"),
    "safetensors": ("0.6", "0.9"),
    "gguf": ("0.19", "0.20"),
    "tokenizers": ("0.22", "0.24"),
    "pyrwkv-tokenizer": ("0.9.1", "0.10"),
    "click": ("8.2", "9"),
    "rich": ("14", "16"),
    "jinja2": ("3.1.6", "4"),
}
"""Versions that the tests run with, from the first up to but not with the second: the ranges of pyproject.toml."""
TESTED_PYTHON = ("3.11", "3.14")
PACKAGES = (
    "torch", "numpy", "numba", "llvmlite", "safetensors", "gguf", "tokenizers", "pyrwkv-tokenizer", "click", "rich", "jinja2",
    "triton", "tilelang", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc",
)  # fmt: skip
CARD_LIBRARIES = ("torch", "triton", "tilelang")
# Features that decide which of our kernels and of the library's are used.
FEATURES = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_bf16", "avx_vnni", "asimd",
)  # fmt: skip
SETTINGS = (
    "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "NUMBA_NUM_THREADS",
    "NUMBA_THREADING_LAYER", "KMP_BLOCKTIME", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "KITTIWAKE_CACHE",
)  # fmt: skip
_CPU = Path("/sys/devices/system/cpu/cpu0/cache")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def describe_machine() -> dict[str, Any]:
    """JSON values about this machine and process; sizes in bytes."""
    return {
        "kittiwake": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": package_versions(),
        "processor": processor_name(),
        "features": processor_features(),
        "usable_cores": usable_cores(),
        "cpu_quota_cores": cpu_quota_cores(),
        "caches": processor_caches(),
        "memory_bytes": memory_bytes("MemTotal"),
        "memory_available_bytes": memory_bytes("MemAvailable"),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "cache_folder": str(cache_dir()),
    }


def machine_line(threads: int, device: str = "cpu") -> str:
    """The one line that stands beside every figure; of a model on a card it names the card."""
    versions = package_versions()
    if device != "cpu" and (card := find_card().card) is not None:
        libraries = ", ".join(f"{name} {versions[name]}" for name in CARD_LIBRARIES if name in versions)
        return f"{card.line}, Python {platform.python_version()}, {libraries}, kittiwake {__version__}"
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "numba") if name in versions)
    return (
        f"{processor_name()}, {threads} of {usable_cores()} threads, "
        f"Python {platform.python_version()}, {libraries}, kittiwake {__version__}"
    )


def package_versions() -> dict[str, str]:
    """Installed versions of what kittiwake computes with; absent packages are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_card() -> dict[str, Any]:
    """The card, whether models run on it, and if not, why; sizes in bytes. Imports torch."""
    found, reason = find_card(), why_no_cuda()
    document = {} if found.card is None else found.card.document()
    return {"usable": not reason, "reason": reason, "driver": driver_version(), **document}


def kernel_languages() -> list[dict[str, Any]]:
    """What kernels for a card are written in: installed version, whether it can be used, and what to know of it."""
    has_compiler = any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))
    return [
        _language("Triton", "triton", "triton", "" if has_compiler else "needs a C compiler (cc) for its launchers"),
        _language("CUDA C++ (NVRTC)", "cuda-bindings", "cuda.bindings.nvrtc", ""),
        _language("TileLang", "tilelang", "tilelang", ""),
    ]


def _language(name: str, package: str, module: str, shortcoming: str) -> dict[str, Any]:
    try:
        installed = version(package)
    except PackageNotFoundError:
        return {"name": name, "installed": None, "ok": False, "note": f"{package} is not installed"}
    try:
        importlib.import_module(module)
    except Exception as err:  # a library that is missing or of another version, told in its own words
        return {"name": name, "installed": installed, "ok": False, "note": f"cannot be imported: {err}"}
    return {"name": name, "installed": installed, "ok": not shortcoming, "note": shortcoming}


def checked_versions() -> list[dict[str, Any]]:
    """Python and every package with a tested range: what is installed, the range, and whether the one is in the other."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    installed = package_versions()
    found |= {name: installed.get(name) for name in TESTED}
    rows = []
    for name, number in found.items():
        low, high = TESTED_PYTHON if name == "Python" else TESTED[name]
        is_tested = number is not None and _numbers(low) <= _numbers(number) < _numbers(high)
        rows.append({"name": name, "installed": number, "tested": f">={low},<{high}", "ok": is_tested})
    return rows


def _numbers(text: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" → (2, 13, 0)."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = re.match(r"\d+", part)
        if digits is None:
            break
        numbers.append(int(digits[0]))
    return tuple(numbers)


def processor_features() -> list[str]:
    """Those of FEATURES that the processor has."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            flags = set(value.split())
            return [feature for feature in FEATURES if feature in flags]
    return []


def processor_caches() -> dict[str, str]:
    """Cache sizes as the first core sees them: {"L1d": "32K", "L2": …, "L3": …}."""
    caches = {}
    for index in sorted(_CPU.glob("index*")):
        kind = {"Data": "d", "Instruction": "i"}.get(_read(index / "type").strip(), "")
        size = _read(index / "size").strip()
        if size:
            caches[f"L{_read(index / 'level').strip()}{kind}"] = size
    return caches


def cpu_quota_cores() -> float | None:
    """Cores' worth of time a container may use, where a quota is set; may be less than the cores it sees."""
    quota, _, period = _read(_QUOTA).strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return int(quota) / int(period)
    return None


def memory_bytes(field: str) -> int | None:
    """A field of /proc/meminfo in bytes, such as MemAvailable; None where it cannot be read."""
    for line in _read(Path("/proc/meminfo")).splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
