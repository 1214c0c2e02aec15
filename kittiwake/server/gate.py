"""What stands before every endpoint: an id for the request, the API key, and a look at who is spoken to."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kittiwake.config import ServerConfig
from kittiwake.server.api_errors import ApiError

logger = logging.getLogger("kittiwake.server")

OPEN_PATHS = frozenset({"/health"})
"""What needs no API key."""
# Asked by machines that like to add something, so that no cache answers for us.
_ANY_QUERY = OPEN_PATHS | {"/ready", "/metrics", "/docs", "/openapi.json"}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine alone."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Gate:
    """Gives each request an id (a client's own ``x-request-id`` where it sends a sane one), told in the answer's header,
    and lets it in or not. ``scope["state"]`` then has ``request_id``, and ``client``: whose the request is.

    Where an API key is set, every path but those of OPEN_PATHS wants it as a bearer token. Where none is and the server
    listens to this machine alone, it is asked by a name of this machine: a page in a browser that had its own name
    pointed here is turned away.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in config.api_keys]
        self._is_private = not config.api_keys and is_loopback(config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        wanted = headers.get("x-request-id", "")
        request_id = wanted if _REQUEST_ID.fullmatch(wanted) else f"req_{uuid.uuid4().hex}"
        is_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            client = self._client(scope, headers)
            _check_query(scope)
            scope.setdefault("state", {}).update(request_id=request_id, client=client)
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
        except Exception:
            logger.exception("a request failed", extra={"request_id": request_id})
            if is_begun:
                raise
            await ApiError(500, "the server has failed; its log says more").response()(scope, receive, send_with_id)

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Whose a request is. Raises ApiError for one that is not let in."""
        peer = scope["client"][0] if scope.get("client") else ""
        host = headers.get("host")  # HTTP/1.0 needs none; a browser always sends one
        if self._is_private and host is not None and not is_loopback(_host_of(host)):
            raise ApiError(
                403,
                f"this server is asked as {host[:80]!r}, which is not its own machine "
                "(call it 127.0.0.1 or localhost, or start it with an API key)",
                code="wrong_host",
            )
        if not self._keys or scope["path"] in OPEN_PATHS:
            return f"@{peer}"
        return f"{self._key_number(headers)}@{peer}"

    def _key_number(self, headers: Headers) -> int:
        """Which key a request brings. All of them are compared, in a time that does not tell how well they fit."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        fits = [hmac.compare_digest(digest, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(fits):
            found = "a wrong API key" if given else "no API key"
            raise ApiError(
                401, f"{found} was given; send it as: Authorization: Bearer KEY", headers={"www-authenticate": "Bearer"}
            )
        return fits.index(True)


def _check_query(scope: Scope) -> None:
    """Raise ApiError (400) for a value in the address that no endpoint would read."""
    if not scope["query_string"] or scope["path"] in _ANY_QUERY:
        return
    known = {"transpose"} if scope["method"] == "PUT" else set()
    for name in QueryParams(scope["query_string"]):
        if name not in known:
            message = f"{name[:80]!r} in the address is nothing that is read here"
            raise ApiError(400, message, param=name[:80], code="unsupported_parameter")


def _host_of(header: str) -> str:
    """The host of a Host header, without its port."""
    if header.startswith("["):
        return header.partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header
