"""`/engine/events`: the engine as it changes, a few times a second, for whoever watches.

One look serves all watchers, and nobody looks while there is none. A watcher is told what has changed since what it was
told last: one that reads slowly gets fewer, larger differences, and nothing waits for it in a queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .context import service_of
from .engine_view import EngineView, Picture, difference
from .errors import overloaded
from .service import Service
from .streaming import EventStream

logger = logging.getLogger(__name__)

MAX_WATCHERS = 16
RETRY_AFTER = 5
_INTERVAL = 0.25
_LOOKING_SHARE = 0.01  # of the time, at most
_SILENCE = 2.0  # seconds after which a watcher is told that nothing is new

router = APIRouter()


@router.get("/engine/events", response_model=None, include_in_schema=False)
async def engine_events(request: Request) -> Response:
    """Streams what changes in the engine, as server-sent events; `engine_view.difference` says what is in them.

    Args:
        request (`Request`):
            The HTTP request.
    """
    watcher = request.app.state.watchers.join()
    return EventStream(watcher.events(), watcher.leave, service_of(request).settings.sse_keep_alive_interval)


class Watchers:
    """Everybody who watches the engine.

    Args:
        look (`Callable[[], Picture]`):
            Looks at it.
        is_over (`Callable[[], bool]`):
            Whether the server stops, which ends all streams.
        limit (`int`, defaults to 16):
            Watchers at most.
    """

    def __init__(self, look: Callable[[], Picture], is_over: Callable[[], bool], limit: int = MAX_WATCHERS):
        self.picture: Picture | None = None
        self.error: Exception | None = None
        self.is_over = is_over
        self._look = look
        self._limit = limit
        self._present: set[Watcher] = set()
        self._differences: dict[int, tuple[bytes, bool]] = {}  # to the picture of now, by what was seen before
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many watch."""
        return len(self._present)

    def join(self) -> Watcher:
        """Returns a new watcher, to be called in the event loop; it stays until it leaves.

        Raises:
            ApiError: 503, if there are too many, or the server stops.
        """
        if self.is_over():
            raise overloaded("The server is shutting down.", "shutting_down", RETRY_AFTER)
        if len(self._present) >= self._limit:
            raise overloaded(
                f"{self._limit} pages watch the engine already, which is the limit; close one, or try again later.",
                "too_many_watchers",
                RETRY_AFTER,
            )
        watcher = Watcher(self)
        self._present.add(watcher)
        if self._task is None or self._task.done():
            self.error = None
            self._task = asyncio.create_task(self._look_on())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Forgets a watcher, and the picture with the last one.

        Args:
            watcher (`Watcher`):
                One that may have left before.
        """
        self._present.discard(watcher)
        if not self._present:
            self.picture = self.error = None
            self._differences.clear()

    def news_since(self, seen: Picture | None) -> tuple[bytes, bool]:
        """Returns the event that tells of what is new, and whether more is new than the time. There is a picture.

        Args:
            seen (`Picture`, *optional*):
                What the watcher was told last.
        """
        found = self._differences.get(id(seen))  # watchers keep alive what they have seen
        if found is None:
            assert self.picture is not None, "whoever waits for news is woken by a picture"
            told = difference(seen, self.picture)
            event = b"data: " + orjson.dumps(told) + b"\n\n"
            found = self._differences[id(seen)] = (event, _is_news(seen, self.picture, told))
        return found

    async def _look_on(self) -> None:
        """Looks as long as somebody watches and the server goes on."""
        pause = 0.0
        while self._present:
            try:
                started = time.thread_time()
                self.picture = self._look()
                self._differences.clear()
                pause = min(max(_INTERVAL, (time.thread_time() - started) / _LOOKING_SHARE), _SILENCE)
            except Exception as error:  # the engine is none the worse
                logger.exception("could not look at the engine")
                self.error = error
            over = self.error is not None or self.is_over()
            for watcher in self._present:
                watcher.wake()
            if over:
                return
            await asyncio.sleep(pause)


class Watcher:
    """Somebody who watches.

    Args:
        watchers (`Watchers`):
            It and the others.
    """

    def __init__(self, watchers: Watchers):
        self._watchers = watchers
        self._news = asyncio.Event()
        self._gone = False
        self._seen: Picture | None = None

    def wake(self) -> None:
        """There may be something new."""
        self._news.set()

    def leave(self) -> None:
        """Ends the stream. Safe to call twice."""
        self._gone = True
        self._seen = None
        self._watchers.leave(self)
        self.wake()

    async def events(self) -> AsyncIterator[bytes]:
        """Yields what is new, until the watcher leaves or the server stops."""
        told = 0.0
        while True:
            await self._news.wait()
            self._news.clear()
            if self._watchers.error is not None:
                raise self._watchers.error
            picture = self._watchers.picture
            if self._gone or picture is None:
                return
            event, is_news = self._watchers.news_since(self._seen)
            if is_news or time.monotonic() - told >= _SILENCE:
                self._seen, told = picture, time.monotonic()
                yield event
            if self._watchers.is_over():
                return


def _is_news(old: Picture | None, new: Picture, told: dict[str, object]) -> bool:
    """Whether more has changed than the time."""
    if old is None or len(told) > 1:
        return True
    return any(value != old.figures[name] for name, value in new.figures.items() if name not in ("now", "slot"))


def watchers_of(service: Service) -> Watchers:
    """Returns the watchers of a server; none yet.

    Args:
        service (`Service`):
            The server.
    """
    return Watchers(EngineView(service).look, lambda: service.draining)
