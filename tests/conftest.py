"""Settings every test shares; set before anything imports torch or numba, which read them once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# Waiting threads sleep, so that torch's pool and numba's do not spin against each other on few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The law is tested at up to 7 threads, on machines with fewer cores too.
os.environ.setdefault("NUMBA_NUM_THREADS", str(max(7, os.cpu_count() or 1)))

IN_PROCESSES_OF_THEIR_OWN = "_in_the_interpreter"
"""In the names of the longest tests, which share nothing with others of their file: any worker may take one, and first."""
DEVICE_FOLDER = Path(__file__).parent / "device"


def _why_no_device() -> str | None:
    """The reason why tests that need an accelerator cannot run here, or None."""
    import torch

    return None if torch.cuda.is_available() else "no accelerator that torch can use on this machine"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest first; skip, and say so, what stands in tests/device/ or is marked ``device`` where there is none."""
    items.sort(key=lambda item: IN_PROCESSES_OF_THEIR_OWN not in item.name)
    needing = [item for item in items if DEVICE_FOLDER in item.path.parents or item.get_closest_marker("device")]
    if not needing:
        return
    why_not = _why_no_device()
    for item in needing:
        item.add_marker(pytest.mark.device)
        if why_not is not None:
            item.add_marker(pytest.mark.skip(reason=why_not))


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files are what workers take (``--dist loadfile``), but for tests that take longer than most files."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LongTestsApart(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if IN_PROCESSES_OF_THEIR_OWN in nodeid else str(super()._split_scope(nodeid))

    return LongTestsApart(config, log)
