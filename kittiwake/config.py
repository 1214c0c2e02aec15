"""Options of an engine, each default written once; the comment after a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeGuard

from kittiwake.errors import UsageError

DTYPES = ("auto", "fp32", "fp16", "bf16")
DEVICES = ("auto", "cpu", "cuda")
LOG_FORMATS = ("text", "json")
MAX_ROWS = 2**31 - 1
MAX_BYTES = 1 << 50
_MOST = {
    "threads": 512,
    "slots": 1 << 20,
    "cache_ram_bytes": MAX_BYTES,
    "cache_disk_bytes": MAX_BYTES,
    "growing_bytes": MAX_BYTES,
}
_LEAST = {
    "threads": 0,
    "slots": 1,
    "prefill_chunk": 0,
    "max_rows": 1,
    "max_chunk": 1,
    "cache_ram_bytes": -1,
    "cache_min_tokens": 0,
    "cache_disk_bytes": 1,
    "max_waiting": 0,
    "max_waiting_per_client": 0,
    "growing_bytes": -1,
}


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number, which True and False are not. One that is no number at all, NaN, is in no range."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_epsilon(value: object) -> TypeGuard[int | float]:
    """Whether a value can be the epsilon of a norm."""
    return is_number(value) and 0 < value < 1


@dataclass(frozen=True)
class EngineConfig:
    """How a model is run. None of these changes a bit of any answer, except ``dtype`` where it rounds weights, and
    ``group_norm_eps`` and ``rescale_every``, which make it another model."""

    device: str = "auto"
    """auto (a CUDA card where there is one that serves, else the CPU), cpu or cuda"""
    dtype: str = "auto"
    """how weights are kept: auto (as stored), fp32, bf16 (on the CPU: fp32 arithmetic on widened weights), fp16 (CUDA only)"""
    threads: int = 0
    """CPU threads; 0 takes one a core"""
    slots: int = 64
    """sequences that can be in flight at once; each costs one state"""
    prefill_chunk: int = 0
    """most prompt tokens in a step while others decode; 0 sets no limit"""
    max_rows: int = 2048
    """most rows in one step that several requests share, decode rows and prompt tokens together"""
    max_chunk: int = 4096
    """most tokens of a prompt that is alone in a step (RWKV on a card: as max_rows); with max_rows, bounds the workspace"""
    group_norm_eps: float | None = None
    """epsilon of the group norm, instead of the model's own"""
    cache_ram_bytes: int = 0
    """memory for states of prompts and answers seen, to go on from; 0 keeps none, -1 takes half of what is free"""
    cache_min_tokens: int = 0
    """fewest tokens that a cached state must save over the one before it; 0 takes 32 on the CPU, 512 on a card"""
    cache_disk: str | None = None
    """folder that keeps cached states for the next start too; needs a cache in memory too"""
    cache_disk_bytes: int = 8 << 30
    """most bytes in that folder"""
    max_waiting: int = 0
    """most requests that wait for a slot; 0 sets no limit"""
    max_waiting_per_client: int = 0
    """most requests of one client that wait for a slot; 0 sets no limit"""
    growing_bytes: int = -1
    """memory for states that grow with the length of a text (keys and values); -1 takes half of what is free"""
    rescale_every: int | None = None
    """RWKV-4: norms as in a stream halved every so many layers, as transformers computes; 0 is exact, the default"""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(f"device must be one of {', '.join(DEVICES)}, got {self.device!r}")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name, low in _LEAST.items():
            value = getattr(self, name)
            most = _MOST.get(name, MAX_ROWS)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
                raise UsageError(f"{name} must be a whole number from {low} to {most}, got {value!r}")
        if self.cache_disk is not None and (not isinstance(self.cache_disk, str) or not self.cache_disk):
            raise UsageError(f"cache_disk must be the path of a folder, got {self.cache_disk!r}")
        if self.cache_disk is not None and self.cache_ram_bytes == 0:
            raise UsageError(
                "cache_disk needs memory for the states it holds, and cache_ram_bytes is 0",
                "-1 takes half of what is free",
            )
        eps = self.group_norm_eps
        if eps is not None and not is_epsilon(eps):
            raise UsageError(f"group_norm_eps must be a number above 0 and below 1, got {eps!r}")
        every = self.rescale_every
        if every is not None and (type(every) is not int or not 0 <= every <= MAX_ROWS):
            raise UsageError(f"rescale_every must be a whole number of layers of at least 0, got {every!r}")


SERVING = EngineConfig(prefill_chunk=512, cache_ram_bytes=-1, max_waiting=1024)
"""An engine behind a server, where nothing else is asked for."""


@dataclass(frozen=True)
class ServerConfig:
    """How a model is served. None of these changes a bit of any answer."""

    host: str = "127.0.0.1"
    """address to listen on; one that others can reach needs an API key"""
    port: int = 8000
    """port to listen on; 0 takes any that is free"""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """keys that clients may use, any of them; none lets everyone in"""
    allow_anonymous: bool = False
    """listen without an API key on an address that others can reach"""
    http_workers: int = 1
    """processes that speak HTTP; one carries some ten thousand tokens a second"""
    served_model_name: str = ""
    """name of the model in requests and answers; left out, that of its file or folder"""
    request_timeout_s: float = 0.0
    """most seconds from a request to the end of its answer; 0 sets no limit"""
    states_dir: str | None = None
    """folder where named states outlive the server; left out, none do"""
    states_bytes: int = 4 << 30
    """most bytes of all named states together"""
    max_body_bytes: int = 16 << 20
    """largest body of a request"""
    max_state_bytes: int = 1 << 30
    """largest upload of a state"""
    max_prompts: int = 256
    """most prompts of one request for completions, and most answers of one request"""
    default_max_tokens: int = 4096
    """tokens a chat answer may have whose request does not say"""
    max_answer_tokens: int = 0
    """most tokens an answer may have, and requests that want more are refused; 0 sets no limit"""
    comment_s: float = 10.0
    """seconds of silence after which a stream gets a comment, so that nobody takes it for dead"""
    max_header_bytes: int = 32 << 10
    """largest head of a request: its first line and headers"""
    max_connections: int = 4096
    """connections that may be open at once, over all HTTP workers; those beyond are closed"""
    header_timeout_s: float = 10.0
    """seconds a client may take over the head of a request, and over each next part of its body"""
    keep_alive_s: float = 75.0
    """seconds an idle connection is kept open"""
    write_timeout_s: float = 30.0
    """seconds a client may take nothing of what is sent to it"""
    max_buffered_bytes: int = 1 << 20
    """most bytes of an answer that wait for a slow reader, who is dropped beyond"""
    cors_origins: tuple[str, ...] = ()
    """web pages that may call the server from a browser, as https://example.org; "*" is any page"""
    log_format: str = "text"
    """how log lines are written to stderr: text or json"""
    log_prompts: bool = False
    """write prompts and answers to the log, which otherwise holds none of their text"""
    drain_s: float = 30.0
    """seconds that running answers get to end when the server is told to stop"""
    stall_timeout_s: float = 600.0
    """seconds a step of the engine may take before it counts as hung and is ended; 0 sets no limit"""
    restart_engine: bool = False
    """start the engine again when it dies, instead of ending with exit code 1"""

    def __post_init__(self) -> None:
        for name, (low, high) in _WHOLE.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise UsageError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
        for name, least in _SECONDS.items():
            value = getattr(self, name)
            if not is_number(value) or not least <= value <= MAX_SECONDS:
                raise UsageError(f"{name} must be a number of seconds from {least:g} to {MAX_SECONDS:g}, got {value!r}")
        if self.log_format not in LOG_FORMATS:
            raise UsageError(f"log_format must be one of {', '.join(LOG_FORMATS)}, got {self.log_format!r}")
        if not self.host:
            raise UsageError("host is empty", "127.0.0.1 is this machine alone, 0.0.0.0 every address it has")
        for key in self.api_keys:
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError(
                    f"an API key must have at least {MIN_KEY_CHARS} printable ASCII characters and no space"
                )
        for origin in self.cors_origins:
            scheme, _, host = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not host or "/" in host):
                raise UsageError(f"a CORS origin is as https://example.org, without a path, or *; got {origin!r}")


MAX_SECONDS = 1e6
MIN_KEY_CHARS = 8
_WHOLE = {
    "port": (0, 65535),
    "http_workers": (1, 256),
    "states_bytes": (0, MAX_BYTES),
    "max_body_bytes": (1 << 10, 1 << 32),
    "max_state_bytes": (0, MAX_BYTES),
    "max_prompts": (1, 1 << 16),
    "default_max_tokens": (1, 1 << 31),
    "max_answer_tokens": (0, 1 << 31),
    "max_header_bytes": (1 << 10, 1 << 20),
    "max_connections": (1, 1 << 20),
    "max_buffered_bytes": (1 << 12, 1 << 32),
}
_SECONDS = {
    "comment_s": 0.05,
    "request_timeout_s": 0.0,
    "header_timeout_s": 0.1,
    "keep_alive_s": 0.1,
    "write_timeout_s": 0.1,
    "drain_s": 0.0,
    "stall_timeout_s": 0.0,
}
