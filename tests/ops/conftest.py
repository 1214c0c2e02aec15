"""What tests of ops share."""

from __future__ import annotations

import pytest


@pytest.fixture
def optimised_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC says whether a source compiles in a third of the time: for layouts of a source whose code is made elsewhere."""
    from kittiwake.ops import nvrtc

    monkeypatch.setattr(nvrtc, "_FLAGS", (*nvrtc._FLAGS, "--Ofast-compile=max"))
