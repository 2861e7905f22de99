"""Where the manager's results go: to the handler of their request, or to a queue."""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
from collections.abc import Callable

from .outputs import GenerationOutput

logger = logging.getLogger(__name__)

Handler = Callable[[GenerationOutput], object]


class ResultRouter:
    """Results that nobody has taken yet: those of a request in order, requests in turn. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, collections.deque[GenerationOutput]] = {}
        self._handlers: dict[str, tuple[Handler, asyncio.AbstractEventLoop | None]] = {}

    def deliver(self, output: GenerationOutput) -> None:
        """Hands a result to its request's handler, or keeps it until somebody asks.

        Args:
            output (`GenerationOutput`):
                The result.
        """
        with self._changed:
            entry = self._handlers.get(output.request_id)
            if entry is None:
                self._waiting.setdefault(output.request_id, collections.deque()).append(output)
                self._changed.notify_all()
            elif output.is_finished():
                del self._handlers[output.request_id]
        if entry is not None:
            _call(*entry, output)

    def handle(self, request_id: str, handler: Handler, loop: asyncio.AbstractEventLoop | None) -> None:
        """Sends a request's results, those that are here already included, to a handler until it has ended.

        Args:
            request_id (`str`):
                Which request.
            handler (`Callable[[GenerationOutput], object]`):
                Called with each result.
            loop (`asyncio.AbstractEventLoop`, *optional*):
                Where it is called; by default in the thread that runs the engine.
        """
        with self._changed:
            earlier = list(self._waiting.pop(request_id, ()))
            if not any(output.is_finished() for output in earlier):
                self._handlers[request_id] = handler, loop
            for output in earlier:  # under the lock: nothing newer overtakes them
                _call(handler, loop, output)

    def take(
        self, request_id: str | None, timeout: float | None, expected: Callable[[], bool]
    ) -> GenerationOutput | None:
        """Returns the next result, or `None` if there is none in time.

        Args:
            request_id (`str`, *optional*):
                Of which request; by default of any.
            timeout (`float`, *optional*):
                Seconds to wait at most.
            expected (`Callable[[], bool]`):
                Whether a result can still come.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                output = self._pop(request_id)
                left = None if until is None else until - time.monotonic()
                if output is not None or (left is not None and left <= 0) or not expected():
                    return output
                self._changed.wait(left)

    def wake(self) -> None:
        """Makes all who wait look again at whether a result can still come."""
        with self._changed:
            self._changed.notify_all()

    def _pop(self, request_id: str | None) -> GenerationOutput | None:
        if request_id is None:
            request_id = next(iter(self._waiting), "")
        outputs = self._waiting.pop(request_id, None)
        if outputs is None:
            return None
        output = outputs.popleft()
        if outputs:
            self._waiting[request_id] = outputs  # behind the others: all requests get their turn
        return output


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Returns the event loop that runs in the calling thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _call(handler: Handler, loop: asyncio.AbstractEventLoop | None, output: GenerationOutput) -> None:
    """Calls a handler. One that raises, or whose loop is gone, must not touch the engine."""
    try:
        if loop is None:
            handler(output)
        else:
            loop.call_soon_threadsafe(handler, output)
    except KeyboardInterrupt:
        raise
    except BaseException:  # `sys.exit()` in a handler is no wish of the thread that happens to run the step
        logger.exception("the result handler of request %r failed", output.request_id)
