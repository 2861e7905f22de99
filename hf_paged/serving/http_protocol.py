"""HTTP on a socket: uvicorn's httptools protocol with the limits that it does not have.

headers    at most 64 KiB and 100 of them, counted as they come in: 431
time       a client has so long for its headers, and so long and a second per 16 KiB for its body: 408
end        a refused request is read on for a moment, so that its client sees the answer and not a reset
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .errors import ApiError, overloaded
from .middleware.asgi import error_response

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 100
BODY_BYTES_PER_SECOND = 16 << 10
_OFFER = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_BODY_HEADERS = (b"content-length", b"transfer-encoding")
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 << 20


def make_protocol(read_timeout: float, max_body_bytes: int) -> type[HttpToolsProtocol]:
    """Returns the protocol class for uvicorn, which makes an object of it for each connection.

    Args:
        read_timeout (`float`):
            Seconds for a request's headers, and again for its body.
        max_body_bytes (`int`):
            Bytes of a body at most. Larger ones are refused by the layers above; here it ends what nobody reads.
    """
    limits = {"read_timeout": read_timeout, "max_body_bytes": max_body_bytes}
    return type("LimitedProtocol", (_LimitedProtocol,), limits)


class _ResponseTransport:
    """What a response writes to: the connection, which is closed only when the request has been read."""

    __slots__ = ("_protocol", "is_closing", "write")

    def __init__(self, protocol: _LimitedProtocol):
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.close_gently()


class _LimitedProtocol(HttpToolsProtocol):
    read_timeout: float
    max_body_bytes: int

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._header_bytes = 0  # that arrived before the headers were complete
        self._exact_bytes = 0  # of the headers themselves
        self._body_bytes = 0
        self._void_bytes = 0  # that arrived since, and are not part of the body
        self._lingered: int | None = None  # bytes read since the request was refused
        self._deadline: asyncio.TimerHandle | None = None
        self._started = time.monotonic()
        self._cycles: list[RequestResponseCycle] = []  # the request that is being answered, and those behind it

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._tell_that_client_left()  # uvicorn tells the last request only
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_headers and self._deadline is None:
            self._arm()  # also for line ends between requests, which begin none
        while data and self._lingered is None and not self.transport.is_closing():
            if self._in_headers:
                # What the parser has not seen the end of, it keeps: it gets no more at a time than there may be.
                room = MAX_HEADER_BYTES + 1 - self._header_bytes
                piece, data = data[:room], data[room:]
                self._header_bytes += len(piece)
                super().data_received(_without_offer(piece))
                if self._in_headers and self._header_bytes > MAX_HEADER_BYTES:
                    self._refuse_headers()
            else:
                self._receive_body(data)
                return
        if self._lingered is not None:
            self._lingered += len(data)
            if self._lingered > _LINGER_BYTES:
                self.transport.abort()

    def _receive_body(self, data: bytes) -> None:
        before = self._body_bytes
        super().data_received(data)
        self._void_bytes = 0 if self._body_bytes > before else self._void_bytes + len(data)
        if (
            self._void_bytes > MAX_HEADER_BYTES and not self._in_headers
        ):  # what comes behind a body, or names its chunks
            self._refuse_headers()
        elif self._body_bytes > self.max_body_bytes and self.cycle is not None and self.cycle.response_complete:
            self.linger()  # nobody wants it

    # ------------------------------------------------------------------ what the parser finds

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._exact_bytes, self._body_bytes, self._void_bytes = True, 0, 0, 0
        self._arm()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._exact_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # not behind a body, where one would still get among those that have been looked at
            super().on_header(name, value)
            self._exact_bytes += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        self._in_headers, self._header_bytes = False, 0
        if self._lingered is not None:
            return
        if len(self.headers) > MAX_HEADERS or self._exact_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()
            return
        if self.parser.should_upgrade() and any(name in _BODY_HEADERS for name, _ in self.headers):
            self._refuse(ApiError(400, "A request with a body cannot ask for another protocol.", code="invalid_http"))
            return
        self._arm()
        super().on_headers_complete()
        self.cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]
        self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._lingered is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm()
        self._header_bytes, self._in_headers = 0, True
        if self._lingered is None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._lingered is None:
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()

    def _unsupported_upgrade_warning(self) -> None:
        pass  # clients ask for HTTP/2 or WebSockets all the time, and get HTTP/1.1

    # ------------------------------------------------------------------ time

    def _arm(self) -> None:
        self._disarm()
        self._started = time.monotonic()
        self._deadline = self.loop.call_later(self.read_timeout, self._late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        allowed = self.read_timeout + self._body_bytes / BODY_BYTES_PER_SECOND
        left = self._started + allowed - time.monotonic()
        if left > 0.01:
            self._deadline = self.loop.call_later(left, self._late)
            return
        if self._in_headers and self._header_bytes == 0:  # nothing has been asked: nothing to answer
            self.transport.close()
            return
        what = "headers" if self._in_headers else "body"
        self._refuse(ApiError(408, f"The request's {what} took longer than {allowed:.0f} s to arrive.", code="timeout"))

    # ------------------------------------------------------------------ refusals

    def send_400_response(self, msg: str) -> None:
        """See uvicorn: answers what is no HTTP."""
        self._refuse(ApiError(400, "The request is no valid HTTP.", code="invalid_http"))

    def _refuse_headers(self) -> None:
        message = f"The request has more than {MAX_HEADERS} headers, or more than {MAX_HEADER_BYTES} bytes of them."
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def _refuse(self, error: ApiError) -> None:
        """Answers without the application; one that waits for the body is told that the client has left."""
        if self._lingered is not None:
            return
        unanswered = not any(cycle.response_started and not cycle.response_complete for cycle in self._cycles)
        self._tell_that_client_left()
        if unanswered:
            self.transport.write(_as_bytes(error_response(error, getattr(self, "url", b"").decode("latin-1"))))
        self.linger()

    def _tell_that_client_left(self) -> None:
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def shutdown(self) -> None:
        """See uvicorn: the server ends. It does not wait for the rest of a request."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
            self._refuse(overloaded("The server is shutting down.", "shutting_down"))
        else:
            super().shutdown()

    def close_gently(self) -> None:
        """Closes the connection, but reads a request first whose answer was sent before all of it was there."""
        if self.cycle is not None and self.cycle.more_body and not self.transport.is_closing():
            self.linger()
        else:
            self.transport.close()

    def linger(self) -> None:
        """Says that nothing more will come, reads on for a moment for nothing, and closes."""
        if self._lingered is None and not self.transport.is_closing():
            self._disarm()
            self._unset_keepalive_if_required()
            self._lingered = 0
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.flow.resume_reading()
            self._deadline = self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def _without_offer(data: bytes) -> bytes:
    """Headers without the offer to go on in another protocol, such as HTTP/2, which Java's clients make.

    It is not taken, but the parser would read no body behind it: it would read the body as the next request.
    """
    if _OFFER.search(data) is None:
        return data
    headers, end, rest = data.partition(b"\r\n\r\n")
    return _OFFER.sub(b"\r\nx-upgrade:", headers) + end + rest


def _as_bytes(response: Response) -> bytes:
    headers = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
    return STATUS_LINE[response.status_code] + headers + b"connection: close\r\n\r\n" + bytes(response.body)
