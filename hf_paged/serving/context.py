"""What a route finds out about a request beside its body: the service, the id, the deadline."""

from __future__ import annotations

from starlette.requests import Request

from .ids import new_id
from .protocol.common import SamplingFields
from .service import RequestContext, Service


def service_of(request: Request) -> Service:
    """Returns what the application's routes work with.

    Args:
        request (`Request`):
            Of the application.
    """
    return request.app.state.service


def request_context(request: Request, body: SamplingFields, prefix: str) -> RequestContext:
    """Returns what a request says about itself; fields of the body count before headers, which gateways drop.

    Args:
        request (`Request`):
            With its headers.
        body (`SamplingFields`):
            The body.
        prefix (`str`):
            Of the answer's id, such as `"chatcmpl-"`.
    """
    service = service_of(request)
    limit = service.settings.request_timeout
    wanted = [seconds for seconds in (limit, body.request_timeout) if seconds is not None]
    given = body.request_id or getattr(request.state, "request_id", None) or new_id()
    return RequestContext(
        request_id=prefix + given,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        deadline=min(wanted, default=None),
        trace=service.observability.extract(request.headers),
    )
