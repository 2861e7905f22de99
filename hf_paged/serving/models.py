"""`/v1/models`: what is served here, in OpenAI's form with vLLM's fields."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .context import service_of
from .service import Service
from .streaming import JSONAnswer

router = APIRouter()


@router.get("/v1/models", response_model=None)
async def list_models(request: Request) -> Response:
    """Lists the names of the model.

    Args:
        request (`Request`):
            The HTTP request.
    """
    service = service_of(request)
    return JSONAnswer({"object": "list", "data": [_model(service, name) for name in service.model_names]})


@router.get("/v1/models/{name:path}", response_model=None)
async def show_model(name: str, request: Request) -> Response:
    """Describes one of them.

    Args:
        name (`str`):
            Its name, in which there may be slashes.
        request (`Request`):
            The HTTP request.
    """
    service = service_of(request)
    return JSONAnswer(_model(service, service.check_model(name)))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "hf_paged",
        "root": service.model_names[0],
        "parent": None,
        "max_model_len": service.max_model_len,
    }
