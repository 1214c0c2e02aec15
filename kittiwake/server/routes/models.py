"""GET /v1/models"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from kittiwake.server.api_errors import ApiError, JsonResponse
from kittiwake.server.openapi import answers_in
from kittiwake.server.service import Served, Service


def models_router(service: Service) -> APIRouter:
    """The endpoints over a service."""
    router = APIRouter()

    @router.get("/v1/models", summary="The model that is served", responses=answers_in("list"))
    async def list_models() -> Response:
        return JsonResponse({"object": "list", "data": [_shown(service.served())]})

    @router.get("/v1/models/{model:path}", summary="The same by its name", responses=answers_in("model", 404))
    async def retrieve_model(model: str) -> Response:
        if not model:
            raise ApiError(404, "no model is named", param="model", code="model_not_found")
        return JsonResponse(_shown(service.model(model)))

    return router


def _shown(served: Served) -> dict[str, Any]:
    info = served.info
    return {
        "id": served.name,
        "object": "model",
        "created": info.created_s,
        "owned_by": "kittiwake",
        "root": served.name,
        "system_fingerprint": served.fingerprint,
        "kittiwake": {
            "family": info.family,
            "digest": info.digest,
            "dtype": info.dtype,
            "vocab_size": info.vocab_size,
            "layers": info.layers,
            "width": info.width,
            "receipt": info.receipt_digest,
            "chat_template": served.template.name if served.template is not None else None,
        },
    }
