"""An HTTP/1.1 client for streams of many small pieces.

The client shares processors with the server that it measures. httpx wakes a task for each piece of a stream: with
uvloop, and 64 streams of 50 pieces per second, a piece took 102 to 117 us of a core. Here it takes 24 to 31 us: bytes
go to a function as they arrive, httptools (which uvicorn brings) parses them, and a task wakes when all has come.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from ...errors import ConfigurationError, MissingDependencyError

try:
    import httptools
except ImportError as _error:
    raise MissingDependencyError(
        "`hf-paged bench serve` needs httptools, which parses answers; install it with pip install 'hf-paged[serve]'."
    ) from _error


class ConnectionLostError(ConnectionError):
    """The server closed the connection before its answer was complete.

    Args:
        message (`str`):
            What is known.
        answered (`bool`):
            Whether anything of the answer had come.
    """

    def __init__(self, message: str, answered: bool):
        super().__init__(message)
        self.answered = answered


@dataclasses.dataclass
class HttpAnswer:
    """A finished answer.

    Args:
        status (`int`):
            Its status.
        headers (`dict[str, str]`):
            Its headers, names in lower case.
        body (`bytes`):
            What was not handed on piece by piece.
    """

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""


class Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.arrival = 0.0
        self._done: asyncio.Future[HttpAnswer] | None = None
        self._answer = HttpAnswer()
        self._on_body: Callable[[bytes, float], None] | None = None
        self._pieces: list[bytes] = []
        self._heard = False
        self._parser = httptools.HttpResponseParser(self)

    @property
    def is_usable(self) -> bool:
        """Returns whether another request can be sent."""
        return self.transport is not None and not self.transport.is_closing() and self._done is None

    async def exchange(self, request: bytes, on_body: Callable[[bytes, float], None] | None = None) -> HttpAnswer:
        """Sends a request and returns its answer.

        Args:
            request (`bytes`):
                Head and body.
            on_body (`Callable[[bytes, float], None]`, *optional*):
                Gets each piece of the body of an answer of status 200, and when it arrived.

        Raises:
            ConnectionLostError: If the connection ended first.
        """
        if self.transport is None or not self.is_usable:
            raise ConnectionLostError("the connection is closed", False)
        self._done = asyncio.get_running_loop().create_future()
        self._answer, self._on_body, self._heard, self._pieces = HttpAnswer(), on_body, False, []
        self.transport.write(request)
        try:
            return await self._done
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        finally:
            self._done = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio.

        Args:
            transport (`asyncio.BaseTransport`):
                The open connection.
        """
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

    def data_received(self, data: bytes) -> None:
        """Called by asyncio.

        Args:
            data (`bytes`):
                What arrived.
        """
        self.arrival = time.perf_counter()
        self._heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # What a callback raised comes wrapped.
            self._fail(error.__context__ or ConnectionLostError(f"the answer is not HTTP: {error}", True))

    def connection_lost(self, error: Exception | None) -> None:
        """Called by asyncio.

        Args:
            error (`Exception`, *optional*):
                Why, if not in peace.
        """
        if self._done is None or self._done.done():
            return
        if self._answer.status and not {"content-length", "transfer-encoding"} & self._answer.headers.keys():
            self.on_message_complete()  # such a body ends with its connection
        else:
            self._fail(ConnectionLostError(str(error or "the server closed the connection"), self._heard))

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        if self.transport is not None:
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools.

        Args:
            name (`bytes`):
                Of a header.
            value (`bytes`):
                Of the same.
        """
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by httptools."""
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Called by httptools.

        Args:
            body (`bytes`):
                A piece of the body.
        """
        if self._on_body is not None and self._answer.status == 200:
            self._on_body(body, self.arrival)
        else:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        """Called by httptools."""
        self._answer.body = b"".join(self._pieces)
        keep_alive = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)
        if not keep_alive and self.transport is not None:
            self.transport.close()


class HttpClient:
    """Connections to one server, used again when they are free.

    Args:
        url (`str`):
            The server's URL; its path comes before those of requests.
        headers (`dict[str, str]`, *optional*):
            Sent with each request.
        insecure (`bool`, defaults to `False`):
            Do not verify the server's certificate.

    Raises:
        ConfigurationError: If the URL or a header cannot be sent.
    """

    def __init__(self, url: str, headers: dict[str, str] | None = None, *, insecure: bool = False):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"`url` must be an http or https URL, got {url!r}.")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            if insecure:
                self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._headers = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        if any(set("\r\n\0") & set(name + value) for name, value in self._headers.items()):
            raise ConfigurationError("A header holds a line break.")
        self._free: list[Connection] = []

    async def connect(self) -> Connection:
        """Returns a new connection.

        Raises:
            OSError: If there is none.
        """
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        return connection

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        """Returns the bytes of a request.

        Args:
            method (`str`):
                GET, POST, ...
            path (`str`):
                Where to.
            body (`bytes`, *optional*):
                JSON.
            headers (`dict[str, str]`, *optional*):
                For this request alone.
        """
        sent = self._headers | (headers or {})
        if body is not None:
            sent |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        on_body: Callable[[bytes, float], None] | None = None,
        headers: dict[str, str] | None = None,
    ) -> HttpAnswer:
        """Sends a request and returns its answer. Cancelling it closes the connection.

        Args:
            method (`str`):
                GET, POST, ...
            path (`str`):
                Where to.
            body (`bytes`, *optional*):
                JSON.
            on_body (`Callable[[bytes, float], None]`, *optional*):
                Gets each piece of the body of an answer of status 200, and when it arrived.
            headers (`dict[str, str]`, *optional*):
                For this request alone.

        Raises:
            ConnectionLostError: If the connection ended before the answer.
            OSError: If there is no connection.
        """
        words = self.request(method, path, body, headers)
        while True:
            connection, is_new = self._take(), False
            if connection is None:
                connection, is_new = await self.connect(), True
            try:
                answer = await connection.exchange(words, on_body)
            except ConnectionLostError as error:
                # A server may close a connection that was idle just as a request is on its way.
                if is_new or error.answered:
                    raise
                continue
            if connection.is_usable:
                self._free.append(connection)
            return answer

    def _take(self) -> Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.is_usable:
                return connection
        return None

    def close(self) -> None:
        """Closes what is not in use."""
        for connection in self._free:
            if connection.transport is not None:
                connection.transport.close()
        self._free.clear()
