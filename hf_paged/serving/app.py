"""The application: all routes behind all layers. `middleware/__init__.py` draws the layers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from ..errors import HfPagedError
from . import chat, completions, engine_events, messages, metrics, models, page, responses, status, tokenization
from .access_log import QUIET_ROUTES, AccessLogMiddleware
from .background import run_in_background
from .errors import ApiError, to_api_error
from .middleware.asgi import error_response
from .middleware.bodies import BodyMiddleware
from .middleware.draining import DrainingMiddleware, Work
from .middleware.errors import ErrorMiddleware
from .middleware.hosts import HostMiddleware
from .middleware.keys import OPEN_PATHS, KeyMiddleware
from .middleware.request_id import RequestIdMiddleware
from .protocol.common import invalid_body
from .service import Service
from .settings import ServerSettings

_ROUTERS = (status, models, tokenization, chat, completions, responses, messages, metrics)
_LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_ANSWERED_HEADERS = ("X-Request-Id", "request-id", "Retry-After")


def make_app(service: Service) -> FastAPI:
    """Returns the ASGI application; `app.state.service` is what its routes work with.

    Args:
        service (`Service`):
            The engine, the tokenizer, the settings.
    """
    settings = service.settings
    work = Work(lambda: service.draining, service.metrics.rejected)
    hidden: dict[str, Any] = {"openapi_url": None} if settings.disable_fastapi_docs else {}
    app = FastAPI(
        title="hf_paged",
        summary="Language models behind OpenAI's API.",
        version=__version__,
        redirect_slashes=False,
        middleware=_layers(settings, service, work),
        lifespan=_lifespan,
        exception_handlers={
            ApiError: _answer_error,
            HfPagedError: _answer_error,
            HTTPException: _answer_http_error,
            RequestValidationError: _answer_invalid_body,
        },
        **hidden,
    )
    app.root_path = settings.root_path  # paths may have it or not, as the proxy in front strips it or not
    app.state.service = service
    app.state.work = work
    for module in _ROUTERS:
        app.include_router(module.router)
    if settings.page:
        app.state.watchers = engine_events.watchers_of(service)
        for path in page.paths_of(settings.root_path):
            app.router.add_api_route(
                path, page.show_page, methods=["GET", "HEAD"], response_model=None, include_in_schema=False
            )
        app.include_router(engine_events.router)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _layers(settings: ServerSettings, service: Service, work: Work) -> list[Middleware]:
    quiet = settings.disable_access_log_for_endpoints
    layers = [
        Middleware(
            AccessLogMiddleware,
            metrics=service.metrics,
            lines=not settings.disable_uvicorn_access_log,
            quiet_routes=QUIET_ROUTES.union(quiet or ()),
        ),
        Middleware(RequestIdMiddleware, answer=settings.enable_request_id_headers),
        Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins or (),
            allow_origin_regex=_LOCAL_PAGES if settings.allowed_origins is None else None,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=_ANSWERED_HEADERS,
        ),
    ]
    if settings.allowed_hosts is not None:
        layers.append(Middleware(HostMiddleware, hosts=settings.allowed_hosts))
    if settings.api_key:
        # The page holds nothing but a place to type a key in.
        opened = OPEN_PATHS | page.paths_of(settings.root_path) if settings.page else OPEN_PATHS
        layers.append(Middleware(KeyMiddleware, keys=settings.api_key, root_path=settings.root_path, open_paths=opened))
    return [
        *layers,
        Middleware(DrainingMiddleware, work=work),
        Middleware(BodyMiddleware, limit=settings.max_body_bytes),
        Middleware(ErrorMiddleware),
    ]


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with run_in_background(app.state.service):
        yield


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(to_api_error(error), request.url.path)


async def _answer_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "what the handler is registered for"
    return error_response(invalid_body(error.errors()), request.url.path)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "what the handler is registered for"
    where = f"{request.method} {request.scope['path'][:200]}"
    code = None
    message = f"{where}: {error.detail}"
    if error.status_code == 404:
        code, message = "not_found", f"There is no `{where}` here."
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        code, message = "method_not_allowed", f"`{where}` is not possible; this path takes {allowed}."
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    return error_response(
        ApiError(error.status_code, message, type=kind, code=code, headers=error.headers), request.url.path
    )


_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "Names the field, its value and the limit."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    "400": "Something is wrong with the request.",
    "401": "No key, or a wrong one (only with `--api-key`).",
    "413": "The body is too large.",
    "415": "The body is not `application/json`.",
    "503": "Overloaded or shutting down; `Retry-After` says when to try again.",
}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's schema, with the errors that there really are."""
    if app.openapi_schema is None:
        schema = FastAPI.openapi(app)
        schema.setdefault("components", {}).setdefault("schemas", {})["Error"] = _ERROR_SCHEMA
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for methods in schema["paths"].values():
            for method, operation in methods.items():
                responses = operation["responses"]
                responses.pop("422", None)
                for status, text in _ERRORS.items():
                    if method == "post" or status in ("401", "503"):
                        responses.setdefault(status, {"description": text, "content": content})
    return app.openapi_schema or {}
