"""GET /health, /ready and /metrics"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from kittiwake.server.api_errors import ApiError, JsonResponse
from kittiwake.server.openapi import answers_in
from kittiwake.server.service import Service

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def health_router(service: Service) -> APIRouter:
    """The endpoints over a service."""
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Whether the server lives; needs no API key", responses=answers_in("status", 503))
    async def health() -> Response:
        if not service.client.is_alive:
            raise ApiError(503, "the engine is gone", code="engine_gone")
        return JsonResponse({"status": "ok"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", summary="Whether requests are taken", responses=answers_in("status", 503))
    async def ready() -> Response:
        if not service.client.is_ready:
            raise ApiError(503, "the engine is loading, stopping, or gone", headers={"retry-after": "1"})
        return JsonResponse({"status": "ready", "model": service.served().name})

    @router.api_route(
        "/metrics",
        methods=["GET"],
        summary="Figures for Prometheus",
        responses=answers_in("metrics", 503),
        name="metrics",
    )
    async def metrics() -> Response:
        return Response(await service.client.metrics_text(), headers={"content-type": METRICS_TYPE})

    @router.head("/metrics", include_in_schema=False)
    async def metrics_head() -> Response:
        return Response(headers={"content-type": METRICS_TYPE})

    return router
