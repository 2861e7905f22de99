"""How the server is: for people, probes and the routers of vLLM and SGLang."""

from __future__ import annotations

import datetime
import platform
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from .. import __version__
from .context import service_of
from .service import Service

router = APIRouter()


def trouble(service: Service) -> str | None:
    """Returns what is wrong with the engine, or `None`.

    Args:
        service (`Service`):
            Whose engine.
    """
    engine, limit = service.engine, service.settings.stall_timeout
    if not engine.is_alive:
        cause = engine.cause
        return f"The engine has ended: {type(cause).__name__}." if cause is not None else "The engine was closed."
    if engine.seconds_since_step > limit:
        return f"The engine's step takes longer than {limit:g} s."
    return None


@router.post("/ping", include_in_schema=False)  # what SageMaker and its like ask for
@router.get("/ping", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/health", tags=["status"])
async def health(request: Request) -> JSONResponse:
    """Says whether the engine runs: 200 or 503.

    Args:
        request (`Request`):
            The request.
    """
    problem = trouble(service_of(request))
    if problem is not None:
        return JSONResponse({"status": "error", "message": problem}, 503)
    return JSONResponse({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", tags=["status"])
async def ready(request: Request) -> JSONResponse:
    """Says whether new requests are taken: 200, or 503 also while the server is stopping.

    Args:
        request (`Request`):
            The request.
    """
    service = service_of(request)
    problem = "The server is shutting down." if service.draining else trouble(service)
    if problem is not None:
        return JSONResponse({"status": "error", "message": problem}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/version", tags=["status"])
async def version() -> dict[str, str]:
    """Names the version."""
    return {"version": __version__}


@router.get("/load", tags=["status"])
async def load(request: Request) -> dict[str, int]:
    """Counts the requests that are being answered, as vLLM does.

    Args:
        request (`Request`):
            The request.
    """
    return {"server_load": request.app.state.work.num_running}


@router.get("/get_load", tags=["status"])
async def get_load(request: Request) -> dict[str, int]:
    """Counts what runs and waits, as vllm-router reads it.

    Args:
        request (`Request`):
            The request.
    """
    figures = _figures(service_of(request))
    total, waiting = figures["num_total_reqs"], figures["num_waiting_reqs"]
    return {"load": total, "num_reqs": total, "num_waiting_reqs": waiting, "num_tokens": figures["num_used_tokens"]}


@router.get("/v1/loads", tags=["status"])
@router.get("/loads", tags=["status"], include_in_schema=False)
async def loads(request: Request) -> dict[str, Any]:
    """Counts what runs and waits, as SGLang does.

    Args:
        request (`Request`):
            The request.
    """
    service = service_of(request)
    return {
        "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
        "version": __version__,
        "accelerator": service.engine.engine.plan.device,
        "num_accelerators": 1,
        "dp_rank_count": 1,
        "loads": [{"dp_rank": 0, **_figures(service)}],
    }


@router.get("/server_info", tags=["status"])
async def server_info(request: Request) -> dict[str, Any]:
    """Tells what the server was started with (no keys) and what the engine made of it.

    Args:
        request (`Request`):
            The request.
    """
    service = service_of(request)
    settings, plan = service.settings, service.engine.engine.plan
    return {
        "version": __version__,
        "model_path": settings.model,
        "served_model_name": service.model_names[0],
        "max_model_len": plan.max_model_len,
        "max_total_num_tokens": plan.pool_tokens,
        "max_running_requests": plan.max_num_seqs,
        "tp_size": 1,
        "dp_size": 1,
        "settings": settings.to_dict(),
        "plan": plan.to_dict(),
        "system": {"python": platform.python_version(), "platform": platform.platform()},
    }


def _figures(service: Service) -> dict[str, Any]:
    engine, plan = service.engine, service.engine.engine.plan
    usage = service.metrics.kv_cache_usage
    running, waiting = engine.num_running, engine.num_waiting
    return {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_waiting_uncached_tokens": engine.num_waiting_tokens,
        "num_used_tokens": round(usage * plan.pool_tokens),
        "max_total_num_tokens": plan.pool_tokens,
        "token_usage": round(usage, 4),
        "max_running_requests": plan.max_num_seqs,
    }
