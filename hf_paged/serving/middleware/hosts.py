"""Host names: with `--allowed-hosts`, requests that are addressed to another one are refused."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ApiError
from .asgi import App, Layer, Receive, Scope, Send, header, refuse


class HostMiddleware(Layer):
    """Refuses requests to other host names (421), as a web page sends them whose name is made to point here.

    Args:
        app (`Callable`):
            The next layer.
        hosts (`Sequence[str]`):
            Names without ports; `*.example.org` matches all below it.
    """

    def __init__(self, app: App, hosts: Sequence[str]):
        super().__init__(app)
        self._hosts = [host.lower() for host in hosts]

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._allows(header(scope, b"host") or b""):
            await refuse(
                ApiError(421, "The `Host` header names a host that this server does not answer for.", param="Host"),
                scope,
                receive,
                send,
            )
            return
        await self.app(scope, receive, send)

    def _allows(self, value: bytes) -> bool:
        host = value.decode("latin-1").lower()
        host = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        return any(
            host.endswith(allowed[1:]) if allowed.startswith("*.") else allowed in ("*", host, host.strip("[]"))
            for allowed in self._hosts
        )
