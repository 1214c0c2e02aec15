"""An engine loop in a thread of the test's process, with a client for it: all of the serving but HTTP."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from kittiwake.engine.named_states import NamedStates
from kittiwake.llm import LLM
from kittiwake.server.engine_host import EngineHost
from kittiwake.server.engine_process import EngineLoop
from kittiwake.server.remote_engine import RemoteEngine
from kittiwake.server.transport import EngineSocket
from tests.models import tiny_llm


class PipeParent:
    """A parent that speaks over a pipe within the process."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self.is_gone = False

    def fileno(self) -> int:
        return self._reader

    def tell(self, line: str) -> None:
        os.write(self._writer, line.encode() + b"\n")

    def words(self) -> list[str]:
        return os.read(self._reader, 1 << 16).decode().splitlines()

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class RunningEngine:
    """What a test may look at."""

    def __init__(self, llm: LLM, host: EngineHost, loop: EngineLoop, parent: PipeParent) -> None:
        self.llm, self.host, self.loop, self.parent = llm, host, loop, parent

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of any request: no slot, no queue, nothing remembered."""
        engine = self.llm.engine
        return engine.free_slots == engine.stats().slots and not engine.has_work and self.host.running == 0


@contextmanager
def running_engine(
    folder: Path,
    *,
    llm: LLM | None = None,
    backlog_bytes: int = 64 << 20,
    log_prompts: bool = False,
    **options: Any,
) -> Iterator[RunningEngine]:
    """The loop over the tiny model, until the block ends."""
    llm = llm or tiny_llm(**options)
    states = NamedStates(llm.state_owner(), budget_bytes=1 << 30)
    host = EngineHost(llm, states, name="tiny", template="g1", log_prompts=log_prompts)
    socket, parent = EngineSocket(folder, backlog_bytes=backlog_bytes), PipeParent()
    loop = EngineLoop(host, socket, parent)  # type: ignore[arg-type]
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        yield RunningEngine(llm, host, loop, parent)
    finally:
        parent.tell("stop")
        thread.join(60)
        socket.close()
        parent.close()
        assert not thread.is_alive()


@asynccontextmanager
async def client_of(folder: Path, name: str = "http0", **options: Any) -> AsyncIterator[RemoteEngine]:
    """A client that has been welcomed."""
    async with RemoteEngine(folder, name, **options) as client:
        await asyncio.wait_for(client.wait_ready(), 60)
        yield client


async def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for something to become true; as long as it may take on a busy machine."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"it did not happen within {seconds} s")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine, with an end to it."""
    return asyncio.run(asyncio.wait_for(work, 120))
