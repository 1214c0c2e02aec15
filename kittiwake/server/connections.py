"""How long and how much a connection may hold on to: uvicorn's protocol with limits on heads, silence and full pipes.

uvicorn itself limits the size of a head and the time between requests. Here are added the time a head, and each next part
of a body, may take; the time a client may take nothing of what is sent to it; and the number of connections.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kittiwake.config import ServerConfig

logger = logging.getLogger("kittiwake.connections")


def _error(message: str, code: str) -> bytes:
    """What is told where no endpoint is reached, in the shape of all errors."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return json.dumps({"error": error}, separators=(",", ":")).encode()


_NOT_HTTP = _error("this is not HTTP, or its head is too large", "invalid_http")
_LATE = _error("the request was not complete in time", "timeout")
_LATE_REPLY = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_LATE), _LATE)
)


class LimitedProtocol(H11Protocol):
    """One connection. The limits are class attributes, set by :func:`limited_protocol`: uvicorn makes the instances."""

    header_timeout_s: float
    write_timeout_s: float
    max_connections: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or close it at once when there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            logger.warning("too many connections: one was closed", extra={"limit": self.max_connections})
            transport.abort()
            return
        self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the timers with the connection."""
        _cancel(self._request_timer)
        _cancel(self._write_timer)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Take what came, now or while another request was answered; while a request is incomplete, its next part has to
        come in time."""
        had_head = self.cycle is not None and not self.cycle.response_complete
        super().handle_events()
        if self._is_complete:
            _cancel(self._request_timer)
            self._request_timer = None
        elif self._request_timer is None or had_head:
            self._watch_request()

    @property
    def _is_complete(self) -> bool:
        """Whether the client owes us nothing: its request is here whole, or none has begun since the last answer."""
        if self.conn.their_state is h11.IDLE:
            return self.timeout_keep_alive_task is not None and not self.conn.trailing_data[0]
        return self.conn.their_state is not h11.SEND_BODY

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, where no answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = [
                ("content-type", "application/json"),
                ("content-length", str(len(_NOT_HTTP))),
                ("connection", "close"),
            ]
            reply = h11.Response(status_code=400, headers=head, reason=b"Bad Request")
            for event in (reply, h11.Data(data=_NOT_HTTP), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _watch_request(self) -> None:
        _cancel(self._request_timer)
        self._request_timer = self.loop.call_later(self.header_timeout_s, self._request_is_late)

    def _request_is_late(self) -> None:
        self._request_timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is we who do not read on
            self._watch_request()
            return
        logger.info("a request was not complete in time", extra={"client": self.client and self.client[0]})
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(_LATE_REPLY)
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not take what is sent: it gets some time to."""
        super().pause_writing()
        if self._write_timer is None:
            self._watch_writing()

    def _watch_writing(self) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._writing_is_late)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        _cancel(self._write_timer)
        self._write_timer = None

    def _writing_is_late(self) -> None:
        self._write_timer = None
        if (
            self.transport.get_write_buffer_size() < self._unsent_bytes
        ):  # it reads, if slowly: a long answer takes longer
            self._watch_writing()
            return
        logger.warning("a client that does not read was dropped", extra={"client": self.client and self.client[0]})
        self.transport.abort()  # not close(): that would wait for it to read


def limited_protocol(config: ServerConfig) -> type[LimitedProtocol]:
    """The protocol with the limits of a server; connections are shared out over its HTTP workers."""

    class Protocol(LimitedProtocol):
        header_timeout_s = config.header_timeout_s
        write_timeout_s = config.write_timeout_s
        max_connections = -(-config.max_connections // config.http_workers)

    return Protocol


def bind_listeners(host: str, port: int, count: int) -> list[socket.socket]:
    """``count`` bound sockets for one address, connections shared out between them by the kernel. Raises OSError.

    A socket of its own for each worker, all held by the parent: a worker that is started again takes the same one, with
    what waits in it.
    """
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG * (host == "localhost")
    )[0]
    # Without SO_REUSEPORT first: with it, a second server of the same user could take half of the first one's clients.
    first = _bind(socket.socket(family, kind, proto), address)
    if count == 1:
        return [first]
    address = first.getsockname()
    first.close()
    return [_bind(socket.socket(family, kind, proto), address, shared=True) for _ in range(count)]


_SEND_BUFFER_BYTES = 256 << 10


def _bind(listener: socket.socket, address: Any, *, shared: bool = False) -> socket.socket:
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Else the kernel takes megabytes for a client that reads nothing; accepted sockets have that of the listener.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
