"""What machine this is: cores, processor, the folder for caches."""

from __future__ import annotations

import importlib
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from kittiwake.errors import DeviceError, UsageError

if TYPE_CHECKING:
    import torch

_LOOKS = 6
SPIN_COUNT = 5000
"""Turns an idle thread spins before it sleeps: some 100 µs, the gap between two kernels of a step."""


def cache_dir() -> Path:
    """Where compiled kernels and probe results are kept; KITTIWAKE_CACHE overrides it. Not created here."""
    chosen = os.environ.get("KITTIWAKE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kittiwake"


def usable_cores() -> int:
    """Logical processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def waiting_environment() -> dict[str, str]:
    """Environment variables that say how GNU OpenMP threads wait for work; empty where the user chose already.

    They spin shortly, which doubles the speed of small models on a machine with idle cores. Where others keep the cores
    busy they sleep at once: a spinning thread would hold up the very thread it waits for.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return {}
    if is_busy():
        return {"OMP_WAIT_POLICY": "passive"}
    return {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


def is_busy(load_file: Path = Path("/proc/loadavg")) -> bool:
    """Whether others have lasting work for more cores than this process leaves them (Linux; elsewhere: no)."""
    left = (os.cpu_count() or 1) - usable_cores()
    for _ in range(_LOOKS):
        try:
            # "0.30 0.25 0.20 2/157 4242": two runnable threads now, this one among them
            running = int(load_file.read_text(encoding="ascii").split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            return False
        if running - 1 <= left:
            return False  # what runs for a moment only is no load
        time.sleep(0.001)
    return True


@lru_cache
def processor_name() -> str:
    """Model name of the processor, with its family and stepping where Linux tells them."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
            if not line and fields:
                break
    except OSError:
        return platform.processor() or platform.machine()
    name = fields.get("model name") or platform.machine()
    detail = " ".join(f"{key} {fields[key]}" for key in ("cpu family", "model", "stepping") if key in fields)
    return f"{name} ({detail})" if detail else name


def resolve_threads(threads: int) -> int:
    """The thread count to use: the one asked for, or one a usable core. Raises UsageError when Numba cannot run as many."""
    if threads == 0:
        return _thread_limit(usable_cores())
    limit = _thread_limit(threads)
    if threads > limit:
        raise UsageError(
            f"threads {threads} is more than the {limit} this process can run",
            f"set NUMBA_NUM_THREADS={threads} before starting, or ask for at most {limit}",
        )
    return threads


def _thread_limit(wanted: int) -> int:
    import numba

    return min(wanted, int(numba.config.NUMBA_NUM_THREADS))


_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Card:
    """A CUDA card, as torch and the driver tell of it."""

    name: str
    capability: str
    """Compute capability, such as "9.0"."""
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    driver: str | None
    """Version of the driver, such as "580.159.03"; None where the system does not tell."""
    driver_cuda: str | None
    """The newest CUDA that the driver runs."""
    torch_cuda: str
    """The CUDA that torch was built with."""

    def document(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @property
    def line(self) -> str:
        """The card in a few words, to stand beside a figure."""
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.name} (compute {self.capability}, {self.multiprocessors} SMs){driver}, CUDA {self.torch_cuda}"


@dataclass(frozen=True)
class FoundCard:
    """A card, or why there is none that torch can use."""

    card: Card | None
    reason: str = ""


def find_card(index: int = 0) -> FoundCard:
    """The CUDA card of this index. Never raises: what is wrong with torch or the driver is the reason."""
    import torch

    if torch.version.cuda is None:
        build = f"for ROCm {torch.version.hip}" if torch.version.hip else "for the CPU only"
        return FoundCard(None, f"torch {torch.__version__} is built {build}; a build for CUDA is needed")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
        if index >= count:
            return FoundCard(None, f"there is no card {index}: torch sees {count}{_hidden()}")
        found = torch.cuda.get_device_properties(index)
    except Exception as err:  # torch's own words tell a missing driver from one that is too old
        return FoundCard(None, f"torch cannot use a card: {' '.join(str(err).split())}{_hidden()}")
    return FoundCard(
        Card(
            name=found.name,
            capability=f"{found.major}.{found.minor}",
            multiprocessors=found.multi_processor_count,
            memory_bytes=found.total_memory,
            l2_bytes=int(getattr(found, "L2_cache_size", 0)),
            driver=driver_version(),
            driver_cuda=_driver_cuda(),
            torch_cuda=torch.version.cuda,
        )
    )


def driver_version(file: Path = _DRIVER_FILE) -> str | None:
    """Version of the NVIDIA driver that is loaded, where /proc tells it."""
    try:
        match = re.search(
            r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text(encoding="ascii", errors="replace")
        )
    except OSError:
        return None
    return match[1] if match else None


def _driver_cuda() -> str | None:
    """13000 → "13.0"."""
    import torch

    number = int(getattr(torch._C, "_cuda_getDriverVersion", int)())  # not in builds without CUDA
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _hidden() -> str:
    """A word on CUDA_VISIBLE_DEVICES where it is set: it hides cards."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"


def why_no_cuda() -> str:
    """Why no model can run on CUDA here; empty where one can."""
    found = find_card()
    if found.card is None:
        return found.reason
    if float(found.card.capability) < 8.0:
        return f"{found.card.name} has compute capability {found.card.capability}; 8.0 or later is needed"
    for module in ("triton", "cuda.bindings.nvrtc"):
        try:
            importlib.import_module(module)
        except ImportError as err:
            return f"{module} cannot be imported ({err}): pip install 'kittiwake[cuda]'"
    return ""


def available_memory(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may still take: what the machine has free, within the limit of its control group.

    0 where the system does not tell (Linux does).
    """
    free = 0
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int((group / "memory.current").read_text(encoding="ascii"))
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError, IndexError):
        pass
    return free


_ENDED = re.compile(
    r"Tried to allocate (?P<asked>[\d.]+ \w+)\."
    r" GPU \d+ has a total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free\."
    r"(?:.*?(?P<allowed>[\d.]+ \w+) allowed;)?",
    re.DOTALL,
)


def _asked_and_free(said: str) -> str:
    """How much was asked for and is there, of what torch says of memory that ended; it goes on to list every process."""
    found = _ENDED.search(said)
    if found is None:
        return said.partition("\n")[0]
    allowed = f", this process may have {found['allowed']}" if found["allowed"] else ""
    return f"{found['asked']} were asked for, {found['free']} of {found['total']} are free{allowed}"


@contextmanager
def device_memory_for(what: str, hint: str) -> Iterator[None]:
    """Around what takes memory of a card: where it ends, raises DeviceError that names ``what`` has no room."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as err:
        raise DeviceError(f"the card has no room for {what}: {_asked_and_free(str(err))}", hint) from err


class OnDevice(Protocol):
    """What lies on one device."""

    @property
    def place(self) -> torch.device:
        """Where."""


Owner = TypeVar("Owner", bound=OnDevice)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def on_its_card(
    method: Callable[Concatenate[Owner, Parameters], Result],
) -> Callable[Concatenate[Owner, Parameters], Result]:
    """Decorator: within the method, the card of its owner is the current one.

    Launches, streams and events are the current card's, and which one that is, every thread knows for itself: a thread
    begins with the first.
    """

    @wraps(method)
    def on_card(owner: Owner, /, *given: Parameters.args, **named: Parameters.kwargs) -> Result:
        if owner.place.type != "cuda":
            return method(owner, *given, **named)
        import torch

        if owner.place.index == torch.cuda.current_device():  # as it nearly always is; entering costs some µs of a step
            return method(owner, *given, **named)
        with torch.cuda.device(owner.place):
            return method(owner, *given, **named)

    return on_card


@lru_cache
def _capture_stream(card: int) -> torch.cuda.Stream:
    """The stream of a card that captures run on: one, since the library keeps room to work in for every stream."""
    import torch

    return torch.cuda.Stream(card)  # type: ignore[no-untyped-call]


_capturing = threading.Lock()
"""PyTorch captures one graph at a time in a process."""


def captured(work: Callable[[], Any], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what ``work`` launches on the current card; memory it asks for is the pool's, or the graph's own.

    ``work`` has run before, so that nothing is compiled or loaded now. What other threads do on the card is none of the
    capture's business, and does not end it.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(torch.cuda.current_device())
    with _capturing, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph
