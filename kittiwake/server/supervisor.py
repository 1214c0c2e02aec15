"""The parent of a server: starts the engine and the HTTP workers, sees each of them end, and ends them all.

It loads no model and speaks no HTTP. Children are fresh interpreters (never forks of this one) that die with it, even
when it is killed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from kittiwake.config import EngineConfig, ServerConfig
from kittiwake.errors import KittiwakeError, UsageError
from kittiwake.server.child import EngineJob, WorkerJob, encode_job
from kittiwake.server.connections import bind_listeners
from kittiwake.server.figure_files import FOLDER_VARIABLE, give_back
from kittiwake.server.logs import set_up_logs
from kittiwake.server.transport import private_folder

logger = logging.getLogger("kittiwake.server")

LAST_WORDS_S = 2.0
"""After the engine has died: how long workers still answer 503 before the server ends."""
ENGINE_STOP_S = 30.0
"""How long the engine may take to write down what it keeps."""
_STEADY_S = 10.0
"""A child that lived for so long did not die of how it was started."""
_MAX_QUICK_DEATHS = 5
_RESTART_DELAY_S = 0.2


class ServerDiedError(KittiwakeError):
    """A process of the server died, and the server with it."""


class _Child:
    """A child process and its two pipes."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.process = name, process
        self.started_s = asyncio.get_running_loop().time()
        self.ready = asyncio.create_task(self._read_status())
        self.ended = asyncio.create_task(process.wait())

    @classmethod
    async def start(cls, name: str, module: str, job: EngineJob | WorkerJob, environment: dict[str, str]) -> _Child:
        """Start ``module`` with its job, in a process group of its own: a terminal's Ctrl-C is for the parent alone."""
        listener = (job.listener,) if isinstance(job, WorkerJob) else ()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=listener,
            env=environment,
            process_group=0,
        )
        child = cls(name, process)
        child.tell(encode_job(job))
        return child

    def tell(self, line: bytes) -> None:
        """Say a line to it; one that is dead hears nothing."""
        if self.process.stdin is not None and not self.process.stdin.is_closing():
            with suppress(ConnectionError):
                self.process.stdin.write(line)

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            self.process.kill()

    @property
    def age_s(self) -> float:
        """How long it has been alive."""
        return asyncio.get_running_loop().time() - self.started_s

    async def _read_status(self) -> bool:
        """True once it does its job; False where it ended before. Raises KittiwakeError where it told why it cannot."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line.endswith(b"\n"):
            return False
        status = json.loads(line)
        if status.get("ready"):
            return True
        error = KittiwakeError(status["message"], status["hint"])
        error.exit_code = status["exit_code"]
        raise error


class Supervisor:
    """One server from start to end."""

    def __init__(
        self,
        model: str | None,
        engine: EngineConfig,
        server: ServerConfig,
        *,
        tokenizer: str | None = None,
        template: str | None = None,
        ready_file: Path | None = None,
    ) -> None:
        self._model, self._tokenizer, self._template = model, tokenizer, template
        self._engine_config, self._config = engine, server
        self._ready_file = ready_file
        self._workers: dict[int, _Child] = {}
        self._generation = 0
        self._quick_deaths = 0

    def run(self) -> int:
        """Serve until told to stop; the exit code. Raises KittiwakeError where that cannot be, or a process died."""
        set_up_logs(self._config.log_format, "server")
        _check_reach(self._config)
        _allow_connections(self._config)
        listeners = _listen(self._config)
        with private_folder() as folder:
            self._folder = folder
            figures = folder / "metrics"
            figures.mkdir()
            self._environment = {**os.environ, FOLDER_VARIABLE: str(figures)}
            try:
                return asyncio.run(self._run(listeners))
            finally:
                for listener in listeners:
                    listener.close()
                if self._ready_file is not None:
                    with suppress(OSError):  # gone already, or its disk takes no change any more
                        self._ready_file.unlink()

    async def _run(self, listeners: list[socket.socket]) -> int:
        self._listeners = listeners
        self._stop = asyncio.Event()
        self._now = asyncio.Event()
        with _signals(self._signalled):
            self._engine = await self._start_engine()
            try:
                for index in range(len(listeners)):
                    await self._start_worker(index)
                return await self._watch()
            finally:
                await self._kill_all()

    def _signalled(self) -> None:
        """The first signal ends the server in good order, a second one at once."""
        (self._now if self._stop.is_set() else self._stop).set()

    async def _watch(self) -> int:
        """Look after the children until the end."""
        stop = asyncio.create_task(self._stop.wait())
        starting = asyncio.create_task(self._become_ready())
        try:
            while True:
                tasks = {stop, self._engine.ended, *(worker.ended for worker in self._workers.values())}
                await asyncio.wait(
                    {*tasks, starting} if not starting.done() else tasks, return_when=asyncio.FIRST_COMPLETED
                )
                if starting.done():
                    starting.result()
                if self._stop.is_set():
                    return await self._shut_down()
                if self._engine.ended.done():
                    await self._engine_died(has_started=starting.done())
                for index, worker in list(self._workers.items()):
                    if worker.ended.done():
                        await self._worker_died(index, worker)
        finally:
            stop.cancel()
            starting.cancel()

    async def _become_ready(self) -> None:
        """Wait until all children do their job, and say so."""
        for child in (self._engine, *self._workers.values()):
            if not await child.ready:
                await child.ended
                raise ServerDiedError(f"the process {child.name} ended while it was starting: {_how(child)}")
        host, port = self._listeners[0].getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if self._ready_file is not None:
            partial = self._ready_file.with_name(self._ready_file.name + ".new")
            partial.write_text(json.dumps({"url": url, "host": host, "port": port, "pid": os.getpid()}) + "\n")
            partial.replace(self._ready_file)
        logger.info("serving", extra={"url": url, "workers": len(self._workers)})

    async def _start_engine(self) -> _Child:
        job = EngineJob(
            parent=os.getpid(),
            folder=str(self._folder),
            model=self._model,
            tokenizer=self._tokenizer,
            template=self._template,
            engine=self._engine_config,
            server=self._config,
        )
        return await _Child.start("engine", "kittiwake.server.engine_process", job, self._environment)

    async def _start_worker(self, index: int) -> None:
        name = f"http{index}" if self._generation < len(self._listeners) else f"http{index}.{self._generation}"
        self._generation += 1
        listener = self._listeners[index].fileno()
        job = WorkerJob(os.getpid(), str(self._folder), name, listener, self._config)
        self._workers[index] = await _Child.start(name, "kittiwake.server.worker", job, self._environment)

    async def _engine_died(self, *, has_started: bool) -> None:
        """Start it again where that was asked for and may help; else let the workers say it, and end."""
        engine = self._engine
        with suppress(asyncio.CancelledError):
            await engine.ready  # raises what it told, if it could not start
        self._forget(engine)
        logger.error("the engine has died", extra={"how": _how(engine), "age_s": engine.age_s})
        if self._config.restart_engine and has_started:
            self._count_death(engine)
            self._engine = await self._start_engine()
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._now.wait(), LAST_WORDS_S)
        await self._end_workers(drain_s=0.0)
        raise ServerDiedError(
            f"the engine has died ({_how(engine)})", "the lines above may tell why; see --restart-engine"
        )

    async def _worker_died(self, index: int, worker: _Child) -> None:
        """Have the engine end what it began, and start another in its place."""
        self._forget(worker)
        logger.error(
            "an HTTP worker has died", extra={"worker": worker.name, "how": _how(worker), "age_s": worker.age_s}
        )
        self._engine.tell(f"gone {worker.name}\n".encode())
        self._count_death(worker)
        await asyncio.sleep(_RESTART_DELAY_S)
        await self._start_worker(index)

    def _count_death(self, child: _Child) -> None:
        """Raise ServerDiedError when children die as soon as they are started."""
        self._quick_deaths = self._quick_deaths + 1 if child.age_s < _STEADY_S else 1
        if self._quick_deaths >= _MAX_QUICK_DEATHS:
            raise ServerDiedError(
                f"{child.name} died {self._quick_deaths} times in a row soon after its start: {_how(child)}"
            )

    async def _shut_down(self) -> int:
        """Let running answers end, then the workers, then the engine. 130 when a second signal cut it short."""
        logger.info("stopping", extra={"drain_s": self._config.drain_s})
        hurry = asyncio.create_task(self._now.wait())
        ending = asyncio.create_task(self._end_in_order())
        await asyncio.wait((hurry, ending), return_when=asyncio.FIRST_COMPLETED)
        is_clean = ending.done()
        for task in (hurry, ending):
            task.cancel()
        logger.info("stopped" if is_clean else "stopped at once")
        return 0 if is_clean else 130

    async def _end_in_order(self) -> None:
        await self._end_workers(drain_s=self._config.drain_s)
        if self._engine.ready.done() and not self._engine.ready.exception():
            self._engine.tell(b"stop\n")
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._engine.ended), ENGINE_STOP_S)

    async def _end_workers(self, *, drain_s: float) -> None:
        for listener in self._listeners:
            listener.close()  # once the workers' ends are closed too, new clients are refused and do not wait
        for worker in self._workers.values():
            worker.tell(f"drain {drain_s}\n".encode())
        ended = [worker.ended for worker in self._workers.values()]
        await asyncio.wait(ended, timeout=drain_s + 5.0)

    async def _kill_all(self) -> None:
        children = [self._engine, *self._workers.values()]
        for child in children:
            child.kill()
            child.ready.cancel()
        await asyncio.gather(*(child.ended for child in children))
        await asyncio.gather(*(child.ready for child in children), return_exceptions=True)

    def _forget(self, child: _Child) -> None:
        """Its gauges are no longer true; what it counted stays."""
        folder = self._environment[FOLDER_VARIABLE]
        mark_process_dead(child.process.pid, folder)  # type: ignore[no-untyped-call]
        give_back(folder, child.process.pid)


def _how(child: _Child) -> str:
    """How a process ended."""
    code = child.process.returncode
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


@contextmanager
def _signals(handler: object) -> Iterator[None]:
    """SIGINT and SIGTERM call the handler."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _check_reach(config: ServerConfig) -> None:
    """Raise UsageError for an address that others can reach, without a key."""
    if config.api_keys or ipaddress.ip_address(_resolve(config.host)).is_loopback:
        return
    if not config.allow_anonymous:
        raise UsageError(
            f"{config.host} can be reached from other machines, and no API key is set",
            "set --api-key-file FILE; or, where something else keeps strangers out, --allow-anonymous",
        )
    logger.warning("whoever can reach this server may use it: no API key is set", extra={"host": config.host})


def _resolve(host: str) -> str:
    """The address that a host name stands for. Raises UsageError where there is none."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"the host {host!r} cannot be resolved: {reason}") from None
    return str(address).partition("%")[0]


_OTHER_FILES = 256
"""Open files of a process beside its connections."""


def _allow_connections(config: ServerConfig) -> None:
    """Let a process of the server have a file open for each of its connections; says so where the system forbids it."""
    wanted = -(-config.max_connections // config.http_workers) + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            logger.warning("fewer files may be open than --max-connections needs", extra={"open_files": allowed})


def _listen(config: ServerConfig) -> list[socket.socket]:
    """The bound sockets. Raises UsageError naming what is wrong with the address."""
    _resolve(config.host)
    try:
        return bind_listeners(config.host, config.port, config.http_workers)
    except PermissionError:
        raise UsageError(f"port {config.port} needs rights that this user lacks", "take a port above 1023") from None
    except OSError as error:
        hint = "another server may be running there; --port 0 takes any that is free"
        raise UsageError(f"{config.host} port {config.port} cannot be listened on: {error.strerror}", hint) from None
