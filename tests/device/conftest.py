"""Shared by the tests on a device: models are loaded once a process, nothing is tuned, a report is written where asked for.

``KITTIWAKE_DEVICE_REPORT`` names the file of the report. With pytest-xdist's ``-n`` several processes share the card, for
most of the time goes into compiling kernels: tests of one model are then run by one process, with ``--dist loadgroup``.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from tests.device.ledger import LEDGER, PROPERTY, Summary

MOST_GROWING_BYTES = 2 << 30
"""Of a state table whose budget is left open: half of a card would be filled with zeros hundreds of times, and the other
processes would find it taken."""


def pytest_configure(config: pytest.Config) -> None:
    """One process gathers what all tell."""
    config.addinivalue_line("markers", "xdist_group(name): tests of a group are run by one process of pytest-xdist")
    if not hasattr(config, "workerinput"):
        path = os.environ.get("KITTIWAKE_DEVICE_REPORT")
        config.pluginmanager.register(_Gatherer(Summary(Path(path) if path else None)))


class _Gatherer:
    """Counts what stands in this folder."""

    def __init__(self, summary: Summary) -> None:
        self._summary = summary

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a report in."""
        if f"{Path(__file__).parent.name}/" in report.nodeid:
            self._summary.add(report)

    def pytest_sessionfinish(self) -> None:
        """Write the last version."""
        self._summary.write(is_complete=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with the same values of the parameters that their module names in GROUPED_BY go to one process."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            module = item.getparent(pytest.Module)
            given = getattr(item, "callspec", None)
            names = getattr(module.obj, "GROUPED_BY", ()) if module is not None else ()
            values = [str(given.params[name]) for name in names if given is not None and name in given.params]
            item.add_marker(pytest.mark.xdist_group(" ".join([item.path.stem, *values])))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A report carries what its test kept."""
    report = yield
    if report.when == "call":
        report.user_properties.append((PROPERTY, LEDGER.take()))
    return report


@pytest.fixture(scope="session", autouse=True)
def _untuned() -> Iterator[None]:
    """Shapes that nothing is known of take each implementation for some row counts, instead of timing them all."""
    if not torch.cuda.is_available():
        yield
        return
    from kittiwake.engine import states
    from kittiwake.families.qwen4exp import cuda_model
    from kittiwake.layers import cuda_probe
    from tests.device.untuned import untuned

    free = states._free_on_card
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_probe, "_tune", untuned)
        patch.setattr(cuda_probe, "_keep", lambda *_: None)
        patch.setattr(cuda_model, "WARMING", (1, 3, 16, 64))  # the rest is compiled where a test needs it
        patch.setattr(states, "_free_on_card", lambda place: min(free(place), 2 * MOST_GROWING_BYTES))
        yield
