"""The ASGI application: an engine client and a configuration in, OpenAI's API out."""

from __future__ import annotations

from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from kittiwake import __version__
from kittiwake.config import ServerConfig
from kittiwake.errors import KittiwakeError
from kittiwake.server.api_errors import ApiError, JsonResponse
from kittiwake.server.body import BODIES_AT_ONCE, BodyRoom
from kittiwake.server.engine_client import EngineClient
from kittiwake.server.gate import Gate
from kittiwake.server.openapi import docs_page
from kittiwake.server.routes.chat import chat_router
from kittiwake.server.routes.completions import completions_router
from kittiwake.server.routes.health import health_router
from kittiwake.server.routes.models import models_router
from kittiwake.server.routes.states import states_router
from kittiwake.server.routes.tokenize import tokenize_router
from kittiwake.server.service import Service

_ABOUT = (
    "OpenAI's API over a recurrent language model. A field that is not listed is refused by its name; null is the same as "
    "leaving a field out."
)
_EXPOSED = ["x-request-id", "x-seed", "retry-after"]


def create_app(client: EngineClient, config: ServerConfig) -> FastAPI:
    """An application over one engine. It owns neither: whoever made the client closes it."""
    app = FastAPI(
        title="kittiwake",
        version=__version__,
        description=_ABOUT,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # the address to go to would be made of what the client says the host is
    )
    service = Service(client, config)
    routes: list[Route] = []
    for make_router in (chat_router, completions_router, models_router, tokenize_router, states_router, health_router):
        router = make_router(service)
        routes += [route for route in router.routes if isinstance(route, Route)]
        app.include_router(router)
    app.state.routes, app.state.bodies = routes, BodyRoom(BODIES_AT_ONCE * config.max_body_bytes)
    _add_documents(app, config)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(KittiwakeError, _kittiwake_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_middleware(Gate, config=config)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    return app


def _add_documents(app: FastAPI, config: ServerConfig) -> None:
    document: dict[str, Any] = {}

    def describe() -> dict[str, Any]:
        if not document:
            document.update(app.openapi())
            # What FastAPI says about its own refusals is not how they look here.
            for path in document["paths"].values():
                for operation in path.values():
                    if "HTTPValidationError" in str(operation["responses"].get("422", "")):
                        del operation["responses"]["422"]
            document.pop("components", None)
            if config.api_keys:
                document["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
                document["security"] = [{"key": []}]
                document["paths"]["/health"]["get"]["security"] = []
        return document

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JsonResponse(describe())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        policy = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return Response(docs_page(describe()), media_type="text/html", headers=policy)


async def _api_error(request: Request, error: Exception) -> Response:
    return cast(ApiError, error).response()


async def _kittiwake_error(request: Request, error: Exception) -> Response:
    return ApiError.of(cast(KittiwakeError, error)).response()


async def _http_error(request: Request, error: Exception) -> Response:
    found = cast(HTTPException, error)
    message = found.detail
    if found.status_code == 404:
        message = f"there is nothing at {request.url.path[:200]}"
    elif found.status_code == 405:
        taken = sorted({method for route in _routes_at(request) for method in route.methods or ()})
        message = f"{request.method} is not what {request.url.path[:200]} takes, it is {' and '.join(taken)}"
        return ApiError(405, message, headers={"allow": ", ".join(taken)}).response()
    return ApiError(found.status_code, message, headers=found.headers).response()


def _routes_at(request: Request) -> list[Route]:
    """All endpoints at a request's path, whatever their methods."""
    return [route for route in request.app.state.routes if route.path_regex.match(request.url.path)]


async def _validation_error(request: Request, error: Exception) -> Response:
    first = cast(RequestValidationError, error).errors()[0]
    name = str(first["loc"][-1])
    return ApiError(400, f"{name}: {first['msg']}", param=name, code="invalid_value").response()
