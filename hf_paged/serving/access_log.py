"""Logs of a server: one line for each HTTP request, one about the engine while it is busy. No prompt, answer or key.

    2026-01-01 12:00:01 INFO hf_paged.access: POST /v1/chat/completions 200 id=chatcmpl-1 prompt=12 generated=5 ...
    {"time": "...", "level": "info", "logger": "hf_paged.access", "message": "...", "id": "chatcmpl-1", ...}

Whatever is logged, control characters are escaped: nobody can write a line of their own into a log.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

from ..generation.sampling.params import SamplingParams

if TYPE_CHECKING:
    from .metrics import Metrics
    from .observability import FinishedRequest

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("hf_paged.access")
request_logger = logging.getLogger("hf_paged.requests")
stats_logger = logging.getLogger("hf_paged.stats")

QUIET_ROUTES = frozenset({"/health", "/ping", "/ready", "/metrics", "/load", "/get_load", "/loads", "/v1/loads"})
CLIENT_LEFT = 499  # nginx's status for a request whose client did not wait for the answer
_LINES_PER_SECOND = 20  # of refused requests; more of them are counted
_LONGEST_VALUE = 200
_PLAIN = re.compile(r"[\w.:/@+-]+")
_FIELD = re.compile(r"[a-z_]{1,40}(\[\d+\])?(\.[a-z_]{1,40}(\[\d+\])?){0,3}")
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_current: contextvars.ContextVar[HttpRecord | None] = contextvars.ContextVar("hf_paged_http_record", default=None)


# ---------------------------------------------------------------------- how lines look


def escaped(text: str) -> str:
    """Returns a text in which everything that is not printable is escaped: line ends, terminal codes, surrogates.

    Args:
        text (`str`):
            Anything.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')} {record.levelname} {record.name}: {record.getMessage()}"
        fields = [f"{name}={_shown(value)}" for name, value in getattr(record, "fields", {}).items()]
        lines = [escaped(" ".join([head, *fields]))]
        if record.exc_info:  # not what another handler's formatter may have left in the record
            lines += ["    " + escaped(line) for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escaped(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")


class _Handler(logging.StreamHandler):
    """A type of its own, to be found again when logging is configured anew."""


def configure_logging(
    log_format: Literal["text", "json"] = "text", level: str = "INFO", stream: TextIO | None = None
) -> None:
    """Sends all logs of the process to one place, in one form. uvicorn is to be started with `log_config=None`.

    Args:
        log_format (`str`, defaults to `"text"`):
            `"text"` or `"json"`: one object a line.
        level (`str`, defaults to `"INFO"`):
            Of our own and uvicorn's messages; of all others warnings are shown.
        stream (`TextIO`, *optional*):
            Where to; stderr by default.
    """
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers = [*(h for h in root.handlers if not isinstance(h, _Handler)), handler]
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.get_logger().handlers.clear()  # it comes with the import, and would show each line once more
    for name in ("hf_paged", "uvicorn", "uvicorn.error"):
        ours = logging.getLogger(name)
        ours.handlers.clear()
        ours.propagate = True
        ours.setLevel(level.upper())
    logging.getLogger("uvicorn.access").disabled = True  # its lines hold query strings, and what secrets those hold


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."


# ---------------------------------------------------------------------- one HTTP request


class HttpRecord:
    """What is logged of an HTTP request, once it has been answered and the engine has ended what it asked for.

    Args:
        scope (`MutableMapping[str, Any]`):
            Of ASGI.
        emit (`Callable[[HttpRecord], None]`):
            Called when all is known.
    """

    def __init__(self, scope: MutableMapping[str, Any], emit: Callable[[HttpRecord], None]):
        self.scope = scope
        self.started = time.perf_counter()
        self.seconds: float | None = None  # until the answer's end
        self.status = CLIENT_LEFT
        self.error: BaseException | None = None
        self.refused: tuple[str | None, str | None] = (None, None)  # the error's code, and the field that is wrong
        self.request_id: str | None = None  # of the engine's first request: the answer's id and some digits
        self.num_pending = 0  # requests of the engine that have not ended
        self.tokens = Counter[str]()
        self.first_token: float | None = None
        self.finish_reasons: list[str] = []
        self._emit = emit

    @property
    def route(self) -> str | None:
        """Returns the path as the server declares it; `None` if it declares none for what was asked."""
        return getattr(self.scope.get("route"), "path", None)

    def request_began(self, request_id: str) -> None:
        """The engine has taken a request that belongs to this one.

        Args:
            request_id (`str`):
                Its id.
        """
        self.request_id = self.request_id or request_id
        self.num_pending += 1

    def request_finished(self, request: FinishedRequest) -> None:
        """The engine has ended a request that belongs to this one.

        Args:
            request (`FinishedRequest`):
                What became of it.
        """
        times = request.times
        self.tokens.update(
            prompt=request.num_prompt_tokens, cached=times.num_cached_tokens, generated=request.num_generated_tokens
        )
        if times.first_token_time is not None:
            first = times.first_token_time - self.started
            self.first_token = first if self.first_token is None else min(self.first_token, first)
        self.finish_reasons = list(dict.fromkeys([*self.finish_reasons, *request.finish_reasons]))
        self.num_pending -= 1
        self._look()

    def answered(self) -> None:
        """The answer has been sent to its end, or nobody is there to take it."""
        self.seconds = time.perf_counter() - self.started
        self._look()

    def _look(self) -> None:
        if self.seconds is not None and self.num_pending == 0:
            self._emit(self)

    def fields(self) -> dict[str, Any]:
        """Returns what the line says beside method, route and status."""
        scope = self.scope
        client = scope.get("client")
        values = {
            "id": self.request_id or (scope.get("state") or {}).get("request_id"),
            "client": client[0] if client else None,
            **(self.tokens if self.finish_reasons else {}),
            "ttft": self.first_token,
            "e2e": self.seconds,
            "finish": ",".join(self.finish_reasons) or None,
            "code": self.refused[0],
            "param": self.refused[1],
            "error": f"{type(self.error).__name__}: {self.error}" if self.error is not None else None,
        }
        return {
            name: escaped(_short(value)) if isinstance(value, str) else value
            for name, value in values.items()
            if value is not None
        }


def current_record() -> HttpRecord | None:
    """Returns what is logged of the HTTP request that is being answered here, if one is."""
    return _current.get()


def note_error(error: BaseException) -> None:
    """Something that is our own mistake ended a request: the line about it will be an error, with its traceback.

    Args:
        error (`BaseException`):
            What was raised.
    """
    record = _current.get()
    if record is None:
        logger.error("a request failed", exc_info=error)
    else:
        record.error = error


def note_refusal(code: str | None, param: str | None) -> None:
    """A client is told of an error: the line about its request says which, without what the client had sent.

    Args:
        code (`str`, *optional*):
            Of the error.
        param (`str`, *optional*):
            The field that is wrong; only shown if it looks like one, since names may be the client's own words.
    """
    record = _current.get()
    if record is not None:
        record.refused = (code, param if param and _FIELD.fullmatch(param) else None)


class AccessLogMiddleware:
    """Logs and counts HTTP requests. The outermost layer, so that it sees what other layers refuse.

    Args:
        app (`Callable`):
            The ASGI application.
        metrics (`Metrics`, *optional*):
            Counts them.
        lines (`bool`, defaults to `True`):
            Whether they are logged; errors are in any case.
        quiet_routes (`Collection[str]`, *optional*):
            Routes that probes ask for all the time: logged from DEBUG on only, unless they fail.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        metrics: Metrics | None = None,
        *,
        lines: bool = True,
        quiet_routes: Collection[str] = QUIET_ROUTES,
    ):
        self.app = app
        self._metrics = metrics
        self._lines = lines
        self._quiet_routes = frozenset(quiet_routes)
        self._refusals, self._failures = _Flood(logging.INFO), _Flood(logging.ERROR)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: _Send) -> None:
        """Answers one request, or whatever else ASGI has.

        Args:
            scope (`MutableMapping[str, Any]`):
                What it is.
            receive (`Callable`):
                Gives its body.
            send (`Callable`):
                Takes the answer.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = HttpRecord(scope, self._emit)

        async def send_noting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        token = _current.set(record)
        try:
            await self.app(scope, receive, send_noting)
        except Exception as error:
            record.error, record.status = error, 500
            raise
        finally:
            _current.reset(token)
            if self._metrics is not None:
                self._metrics.http_answered(record.route, record.status, time.perf_counter() - record.started)
            record.answered()

    def _emit(self, record: HttpRecord) -> None:
        error = record.error
        route = record.route
        if error is not None or (record.status >= 500 and record.status != 503):
            level = logging.ERROR
        elif not self._lines or (route in self._quiet_routes and record.status < 400):
            level = logging.DEBUG
        else:
            level = logging.INFO
        # Refusals that anybody may cause by the thousand do not hide what is our own mistake.
        flood = self._failures if level == logging.ERROR else self._refusals
        if not access_logger.isEnabledFor(level) or (record.status >= 400 and not flood.admits(record.status)):
            return
        method, path = record.scope.get("method", ""), route or record.scope.get("path", "")
        access_logger.log(
            level,
            "%s %s %d",
            _short(method),
            _short(path),
            record.status,
            exc_info=error,
            extra={"fields": record.fields()},
        )


class _Flood:
    """Lets so many lines of a level about refused requests through in a second, and says how many more there were."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._window = 0.0
        self._num_lines = 0
        self._held_back = Counter[int]()

    def admits(self, status: int) -> bool:
        now = time.monotonic()
        if now - self._window >= 1:
            self._window, self._num_lines = now, 0
        self._num_lines += 1
        if self._num_lines <= _LINES_PER_SECOND:
            return True
        if not self._held_back:
            asyncio.get_running_loop().call_later(1, self._tell)
        self._held_back[status] += 1
        return False

    def _tell(self) -> None:
        held_back, self._held_back = self._held_back, Counter()
        access_logger.log(
            self._level,
            "%d more requests were refused within a second: %s",
            held_back.total(),
            ", ".join(f"{count} x {status}" for status, count in sorted(held_back.items())),
        )


# ---------------------------------------------------------------------- one request of the engine


class RequestLog:
    """Logs requests as they come: what they ask for, and how long their prompts are.

    Args:
        prompts (`bool`, defaults to `False`):
            Whether the prompts' texts are logged, too.
        max_log_len (`int`, *optional*):
            Characters of a prompt at most.
    """

    def __init__(self, *, prompts: bool = False, max_log_len: int | None = None):
        self._prompts = prompts
        self._max_log_len = max_log_len

    def arrived(self, request_id: str, params: SamplingParams, num_prompt_tokens: int, prompt: str | None) -> None:
        """Logs a request that the engine has taken.

        Args:
            request_id (`str`):
                Its id.
            params (`SamplingParams`):
                What it asks for.
            num_prompt_tokens (`int`):
                Of its prompt.
            prompt (`str`, *optional*):
                The prompt's text.
        """
        fields = {"id": escaped(request_id), "prompt": num_prompt_tokens, "params": escaped(_given(params))}
        if self._prompts and prompt is not None:
            fields["text"] = escaped(prompt[: self._max_log_len])
        request_logger.info("request", extra={"fields": fields})


def _given(params: SamplingParams) -> str:
    """The parameters that are not at their defaults; of long ones only the beginning."""
    plain = SamplingParams()
    given = []
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.repr and value != getattr(plain, field.name):
            given.append(f"{field.name}={_short(repr(value))}")
    return ", ".join(given)


# ---------------------------------------------------------------------- the engine


async def log_stats(metrics: Metrics, interval: float = 10.0) -> None:
    """Logs what the engine does, in one line, every few seconds while it does something. Ends by being cancelled.

    Args:
        metrics (`Metrics`):
            What it does.
        interval (`float`, defaults to 10):
            Seconds between two lines.
    """
    before, was_busy, looked = (0, 0), False, time.monotonic()
    while True:
        await asyncio.sleep(interval)
        now, tokens = time.monotonic(), (metrics.num_prompt_tokens, metrics.num_generation_tokens)
        running, waiting = metrics.load
        is_busy = bool(running or waiting or tokens != before)
        if is_busy or was_busy:
            seconds = now - looked
            queried, hits = metrics.prefix
            stats_logger.info(
                "running: %d, waiting: %d, prompts: %.1f tokens/s, answers: %.1f tokens/s, K/V cache usage: %.1f %%, "
                "prefix cache hit rate: %.1f %%",
                running,
                waiting,
                (tokens[0] - before[0]) / seconds,
                (tokens[1] - before[1]) / seconds,
                100 * metrics.kv_cache_usage,
                100 * hits / queried if queried else 0.0,
            )
        before, was_busy, looked = tokens, is_busy, now
