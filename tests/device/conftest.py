"""Shared by the tests on a device: models are loaded once, nothing is tuned, and a report is written where asked for.

``KITTIWAKE_DEVICE_REPORT`` names the file of the report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.device.ledger import FOLDER, LEDGER


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what stands in this folder."""
    if f"{FOLDER.name}/" not in report.nodeid:
        return
    if report.when == "call" or report.outcome != "passed":
        LEDGER.tests[report.outcome] += 1
        if report.failed:
            LEDGER.failures.append(report.nodeid)
    LEDGER.seconds[report.nodeid.partition("::")[2]] = (
        LEDGER.seconds.get(report.nodeid.partition("::")[2], 0.0) + report.duration
    )


def pytest_sessionfinish() -> None:
    """Write the report."""
    path = os.environ.get("KITTIWAKE_DEVICE_REPORT")
    if path and LEDGER.tests:
        Path(path).write_text(json.dumps(LEDGER.document(), indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="session", autouse=True)
def _untuned() -> Iterator[None]:
    """Shapes that nothing is known of take each implementation for some row counts, instead of timing them all."""
    if not torch.cuda.is_available():
        yield
        return
    from kittiwake.layers import cuda_probe
    from kittiwake.layers.cuda_linear import ROW_LIMITS, Choice, CudaGroup, Picks, default_tile
    from kittiwake.ops.matmul.cuda import Narrow

    def pick(same: Sequence[CudaGroup], out_dtype: torch.dtype) -> Picks:
        group = same[0]
        choices = []
        for most in ROW_LIMITS:
            choice = Choice("narrow", Narrow()) if most <= 8 else Choice("library")
            if 8 < most <= 64 or not group.can_run(choice, out_dtype):
                choice = Choice("tile", default_tile(group.depth, group.dtype, most, len(group.products) > 1))
            choices.append(choice)
        return Picks(tuple(choices), "not measured")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_probe, "_tune", pick)
        patch.setattr(cuda_probe, "_keep", lambda *_: None)
        yield
