"""The soak of tools/soak.py, short; KITTIWAKE_SOAK_MINUTES=60 makes it an hour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .live import write_tiny_model

SCRIPT = Path(__file__).parents[2] / "tools" / "soak.py"
MINUTES = float(os.environ.get("KITTIWAKE_SOAK_MINUTES", "0.15"))


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * MINUTES)
def test_mixed_load_leaves_a_server_as_it_was(tmp_path: Path) -> None:
    line = [sys.executable, str(SCRIPT), str(write_tiny_model(tmp_path)), "--minutes", str(MINUTES)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["wrong"] == []
    assert done.returncode == 0, done.stderr
    assert sum(report["done"].values()) > 50
