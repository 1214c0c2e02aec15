from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import time
from kittiwake.server.watchdog import Watchdog
dog = Watchdog(2.0)
for _ in range(8):
    dog.feed()
    time.sleep(0.3)
{rest}
print("still here", flush=True)
time.sleep({hang})
print("at the end", flush=True)
"""


@pytest.mark.parametrize(("rest", "ends"), [("", False), ("dog.rest()", True)])
def test_a_process_that_hangs_is_ended_and_one_that_rests_is_not(rest: str, ends: bool) -> None:
    code = CODE.format(rest=rest, hang=3.0 if ends else 100.0)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    assert "still here" in done.stdout
    assert ("at the end" in done.stdout) == ends
    assert done.returncode == (0 if ends else 1)
    assert ("Timeout" in done.stderr) == (not ends)
