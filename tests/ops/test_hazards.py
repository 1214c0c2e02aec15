"""What watches launches in the interpreter for races (hazards.py) finds planted ones."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (the extra 'cuda')")

from tests.ops.without_card import run_interpreted

INTERPRETED = Path(__file__).with_name("interpreted_hazards.py")


@pytest.mark.slow
def test_planted_races_are_found_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED)
