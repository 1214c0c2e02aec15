"""Imports point one way (docs/way.md): what a room may import is written here, and nothing else is allowed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kittiwake"

GROUND = {"errors", "device", "config", "progress", "stdout"}
MATHS = GROUND | {"ops", "layers"}
# The contract lets the engine and the families meet: each knows these modules of the other, and no more.
CONTRACT = {"families.contract", "engine.batch", "engine.states", "engine.cuda_states"}
# A saved state is a safetensors file: read as strictly, and written as safely, as a checkpoint.
STATE_FILES = {"checkpoints.files", "checkpoints.safetensors", "checkpoints.strict_json"}
CORE = MATHS | {"engine", "families", "text", "checkpoints"}
EDGES = CORE | {"load", "build", "llm"}

# room → what it may import beside itself: whole rooms ("text") or single modules ("engine.batch").
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "device": {"errors"},
    "config": {"errors"},
    "progress": set(),
    "stdout": set(),
    "ops": {"errors", "device"},
    "layers": {"errors", "device", "progress", "ops"},
    "checkpoints": {"errors", "device", "progress"},
    "text": {"errors", "device"},
    "engine": MATHS | {"text"} | CONTRACT | STATE_FILES,
    "families": MATHS | {"checkpoints.reader", "checkpoints.row_table"} | CONTRACT,
    "load": CORE,
    "chat": CORE,
    "receipt": CORE | {"load"},
    "llm": CORE | {"load", "chat", "receipt"},
    "params": CORE,
    "session": EDGES | {"chat", "params"},
    "async_llm": EDGES | {"chat"},
    "batch_file": EDGES | {"chat", "params"},
    "build": CORE | {"load", "llm"},
    "export": EDGES,
    "verify": EDGES,
    "bench": EDGES,
    "evals": EDGES,
    "cli": EDGES | {"export", "verify", "bench", "evals", "chat", "params", "session", "batch_file", "server"},
    "server": EDGES,
    "__main__": {"cli"},
    "demo": set(),
}
HEAVY = {"torch", "numpy", "numba", "tokenizers", "safetensors", "rich"}


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _dotted(path: Path) -> str:
    """kittiwake/engine/batch.py → "engine.batch", kittiwake/ops/wkv7/__init__.py → "ops.wkv7"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module of kittiwake) for every import of the package in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "kittiwake":
                    yield node.lineno, alias.name.partition(".")[2]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute in this package"
            top, _, below = (node.module or "").partition(".")
            if top == "kittiwake":
                for alias in node.names:
                    # "from kittiwake.engine import batch" names a module, "from kittiwake.errors import X" does not.
                    named = f"{below}.{alias.name}" if below else alias.name
                    yield node.lineno, named if _is_module(named) else below


def _is_module(dotted: str) -> bool:
    target = PACKAGE.joinpath(*dotted.split("."))
    return target.with_suffix(".py").exists() or (target / "__init__.py").exists()


def _is_allowed(importer: str, imported: str) -> bool:
    room, other = importer.split(".")[0], imported.split(".")[0]
    if imported == "" or room == other:  # kittiwake/__init__.py itself holds only the version and lazy names
        return True
    return any(imported == one or imported.startswith(one + ".") for one in MAY_IMPORT[room])


@pytest.mark.parametrize("path", _modules(), ids=_dotted)
def test_imports_point_one_way(path: Path) -> None:
    importer = _dotted(path)
    assert importer.split(".")[0] in MAY_IMPORT, f"{importer} is in no room this test knows: say what it may import"
    wrong = [
        f"{path.name}:{line} imports kittiwake.{name}"
        for line, name in _imported(path)
        if not _is_allowed(importer, name)
    ]
    assert not wrong


def test_the_rules_tell_right_from_wrong() -> None:
    assert _is_allowed("engine.engine", "families.contract")
    assert not _is_allowed("engine.engine", "families.registry")
    assert _is_allowed("families.rwkv7", "engine.states")
    assert not _is_allowed("families.rwkv7", "engine.engine")
    assert not _is_allowed("text.world", "families.contract")
    assert not _is_allowed("checkpoints.pth", "families.registry")
    assert not _is_allowed("ops.wkv7", "layers.linear")
    assert not _is_allowed("llm", "cli.main")
    assert _is_allowed("cli.run", "llm")


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import kittiwake", HEAVY),
        ("from kittiwake import KittiwakeError", HEAVY),
        ("from kittiwake.cli import main", HEAVY - {"numpy"}),  # which the state table's module brings in
    ],
)
def test_importing_the_package_loads_nothing_heavy(statement: str, heavy: set[str]) -> None:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert heavy & set(loaded) == set()


def test_public_names() -> None:
    import kittiwake

    assert dir(kittiwake) == ["AsyncLLM", "KittiwakeError", "LLM", "SamplingParams", "__version__"]
    assert kittiwake.SamplingParams().max_tokens > 0
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kittiwake.nonsense
