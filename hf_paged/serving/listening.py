"""The socket, which is bound before a model is loaded: a port that is taken is noticed at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from ..errors import ConfigurationError
from .settings import ServerSettings


def bind(settings: ServerSettings) -> socket.socket:
    """Returns a socket that is bound; connections are taken once a server listens on it.

    Args:
        settings (`ServerSettings`):
            Where.

    Raises:
        ConfigurationError: If the address is in use, or is not one of this machine.
    """
    if settings.uds is not None:
        return _bind_unix(settings.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigurationError(f"`--host` {settings.host!r} is no address: {error}.") from None
    bound = socket.socket(family, kind, protocol)
    try:
        _bind_alone(bound, address)
    except (OSError, OverflowError) as error:
        bound.close()
        where = f"{settings.host}:{settings.port}"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ConfigurationError(f"{where} is in use; give another `--port`, or 0 for a free one.") from None
        raise ConfigurationError(f"{where} cannot be listened on: {error}.") from None
    _watch_for_dead_peers(bound)
    return bound


def _watch_for_dead_peers(bound: socket.socket) -> None:
    """A client that vanishes without a word while it waits for an answer is noticed after two minutes."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}.items():
        if hasattr(socket, name):
            bound.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _bind_alone(bound: socket.socket, address: tuple) -> None:
    """Binds to an address that nobody else is bound to, not even one that does not listen yet, as we while loading.

    `SO_REUSEADDR` lets two have an address until one listens, but is needed while connections of a server that was
    here before us are dying out.
    """
    try:
        bound.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def allow_successors(bound: socket.socket) -> None:
    """Makes sure that our own connections, when they are dying out, keep nobody from the address. Before listening.

    Args:
        bound (`socket.socket`):
            The socket.
    """
    if bound.family != getattr(socket, "AF_UNIX", None):
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _bind_unix(path: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise ConfigurationError(f"`--uds` {path!r} cannot be listened on: {error.strerror or error}.") from None
    return bound


def _remove_stale(path: str) -> None:
    """Removes the socket of a server that is no more."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def url(settings: ServerSettings, bound: socket.socket) -> str:
    """Returns where clients reach the server.

    Args:
        settings (`ServerSettings`):
            Whether TLS is used.
        bound (`socket.socket`):
            The socket.
    """
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"
