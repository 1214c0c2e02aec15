"""Compiling kernels: what the cache is keyed by, and that nobody depends on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kittiwake.ops import jit

EXP = """
import json, numpy as np
from kittiwake.ops.cpu_math import exp32
print(json.dumps(float(exp32(np.float32(1)))))
"""


@pytest.fixture
def digest_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """The digest of a folder of ops that holds these files."""

    def digest(**files: str) -> str:
        folder = tmp_path / "ops"
        for name, text in files.items():
            path = folder / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(jit, "__file__", str(folder / "jit.py"))
        jit.kernels_digest.cache_clear()
        return jit.kernels_digest()

    yield digest
    jit.kernels_digest.cache_clear()


def test_a_changed_helper_in_another_file_changes_the_digest(digest_of: Callable[..., str]) -> None:
    first = digest_of(cpu_math="one", matmul__cpu="two")
    assert digest_of(cpu_math="one", matmul__cpu="two") == first
    assert digest_of(matmul__cpu="three") != first
    assert digest_of(matmul__cpu="two") == first
    assert digest_of(cpu_math="four") != first


def test_another_version_of_the_compiler_changes_the_digest(
    digest_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = digest_of(cpu_math="one")
    monkeypatch.setattr(jit, "llvmlite", SimpleNamespace(__version__="0"))
    assert digest_of(cpu_math="one") != first


def test_every_kernel_of_a_card_is_in_the_digest_of_cards() -> None:
    """And in no other: a file whose name is not known would count as a kernel of the CPU."""
    folder = Path(jit.__file__).parent
    found = {path.name for path in folder.rglob("*.py") if "import triton" in path.read_text(encoding="utf-8")}
    assert found and found <= set(jit._OF_CARDS)


def compute_exp(cache: str) -> float:
    environment = {**os.environ, "KITTIWAKE_CACHE": cache}
    done = subprocess.run([sys.executable, "-c", EXP], env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout))


def test_kernels_are_kept_in_the_cache_and_work_without_one(tmp_path: Path) -> None:
    kept = compute_exp(str(tmp_path))
    names = [path.name for path in (tmp_path / "kernels").rglob("*.nbi")]
    assert any(name.startswith("cpu_math.exp32") for name in names)
    assert compute_exp("/dev/null/nowhere") == kept == pytest.approx(2.7182817, abs=3e-7)
