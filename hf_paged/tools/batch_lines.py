"""Files of requests in OpenAI's batch format: a request a line in, an answer a line out, without a server.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., "messages": [...]}}
    {"id": ..., "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}}, "error": null}

Answers come in the order of the requests, each as soon as it and those before it are there. Lines are read as they are
needed: memory does not grow with the file. A line that cannot be answered gets an entry that says why; its `error` is
set whenever there is no answer, whatever `response` holds.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, StringConstraints, ValidationError

from ..serving.errors import ApiError
from ..serving.protocol.common import shortened
from .in_order import InOrder

_MAX_MESSAGE = 300  # characters of an error in the summary

# Takes a URL and a body; gives a status, the request's id and a body.
AnswerLine = Callable[[str, dict[str, Any]], Awaitable[tuple[int, str, Any]]]


class BatchLine(BaseModel):
    """A line of the input."""

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
    body: dict[str, Any]


@dataclasses.dataclass
class BatchSummary:
    """What came of a batch.

    Args:
        total (`int`, defaults to 0):
            Lines, blank ones not counted.
        succeeded (`int`, defaults to 0):
            Lines that were answered.
        failed (`int`, defaults to 0):
            Lines that were not.
        prompt_tokens (`int`, defaults to 0):
            Of the answered lines.
        completion_tokens (`int`, defaults to 0):
            Of the answered lines.
        seconds (`float`, defaults to 0.0):
            From the first line to the last answer.
        errors (`dict[str, dict[str, Any]]`, defaults to `{}`):
            Why lines failed: by the error's code, the `count` and the first `message`.
    """

    total: int = 0
    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    errors: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def count(self, entry: dict[str, Any]) -> None:
        """Counts an answer.

        Args:
            entry (`dict[str, Any]`):
                A line of the output.
        """
        self.total += 1
        if entry["error"] is not None:
            self.failed += 1
            message = str(entry["error"]["message"])
            error = self.errors.setdefault(
                entry["error"]["code"] or "unknown", {"count": 0, "message": message[:_MAX_MESSAGE]}
            )
            error["count"] += 1
            return
        self.succeeded += 1
        usage = entry["response"]["body"].get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens", 0) or _all_input_tokens(usage)
        self.completion_tokens += usage.get("completion_tokens", 0) or usage.get("output_tokens", 0)

    def describe(self) -> str:
        """Returns the summary in a line, and one for each kind of error."""
        speed = f", {self.completion_tokens / self.seconds:.0f} tokens/s" if self.seconds else ""
        errors = sorted(self.errors.items(), key=lambda item: -item[1]["count"])
        return "\n".join(
            [
                f"{self.total} requests in {self.seconds:.1f} s: {self.succeeded} answered, {self.failed} failed; "
                f"{self.prompt_tokens} prompt tokens, {self.completion_tokens} generated{speed}",
                *(f"failed: {error['count']} x {code}, first: {error['message']}" for code, error in errors),
            ]
        )


def _all_input_tokens(usage: dict[str, Any]) -> int:
    """Anthropic's messages count what was cached beside the input tokens, OpenAI's responses among them."""
    return (usage.get("input_tokens") or 0) + (usage.get("cache_read_input_tokens") or 0)


class Batch:
    """Answers the lines of a file.

    Args:
        answer (`AnswerLine`):
            Answers one. What it raises ends the batch.
        max_in_flight (`int`):
            Lines that are being answered at the same time.
    """

    def __init__(self, answer: AnswerLine, max_in_flight: int):
        self.summary = BatchSummary()
        self._answer = answer
        self._lines: InOrder[tuple[int, bytes], dict[str, Any]] = InOrder(self._entry, max_in_flight)
        self._seen: set[str] = set()

    async def run(self, lines: Iterable[bytes], write: Callable[[bytes], Any]) -> None:
        """Answers all lines. If it is cancelled, answers that are there are still written.

        Args:
            lines (`Iterable[bytes]`):
                The input.
            write (`Callable[[bytes], Any]`):
                Takes a line of output.
        """
        start = time.perf_counter()
        try:
            await self._lines.run(_requests(lines), lambda entry: self._write(entry, write))
        finally:
            self.summary.seconds = time.perf_counter() - start

    def _write(self, entry: dict[str, Any], write: Callable[[bytes], Any]) -> None:
        self.summary.count(entry)
        write(orjson.dumps(entry) + b"\n")

    async def _entry(self, numbered: tuple[int, bytes]) -> dict[str, Any]:
        number, line = numbered
        entry: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": None, "response": None}
        try:
            fields = _parse(number, line)
            if isinstance(fields, dict) and isinstance(fields.get("custom_id"), str):
                entry["custom_id"] = fields["custom_id"]
            request = self._check(number, fields)
        except ApiError as error:
            return entry | {"error": {"code": error.code, "message": error.message}}
        status, request_id, body = await self._answer(request.url, request.body)
        entry["response"] = {"status_code": status, "request_id": request_id, "body": body}
        return entry | {"error": None if status < 400 else _error_of(body)}

    def _check(self, number: int, fields: Any) -> BatchLine:
        try:
            line = BatchLine.model_validate(fields)
        except ValidationError as error:
            raise ApiError(400, f"Line {number}: {_problem(error)}", code="invalid_line") from None
        if line.custom_id in self._seen:
            message = (
                f"Line {number}: `custom_id` {line.custom_id!r} is that of an earlier line; answers are told by it."
            )
            raise ApiError(400, message, code="duplicate_custom_id")
        self._seen.add(line.custom_id)
        if line.body.get("stream"):
            message = f"Line {number}: `body.stream` is not possible in a batch; leave it out."
            raise ApiError(400, message, code="invalid_line")
        try:
            orjson.dumps(line.body)
        except TypeError:  # not all that can be read can be written
            raise ApiError(400, f"Line {number}: `body` is nested too deep.", code="invalid_json") from None
        return line


def _requests(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers. Blank ones are no requests; the three bytes are a BOM."""
    for number, line in enumerate(lines, 1):
        if line.strip(b" \t\r\n\xef\xbb\xbf"):
            yield number, line.removeprefix(b"\xef\xbb\xbf")


def _parse(number: int, line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"Line {number} is not JSON: {error}.", code="invalid_json") from None


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if not field:
        return f"a request is a JSON object, not {shortened(first['input'])}."
    if first["type"] == "missing":
        return f"`{field}` is missing."
    problem = first["msg"].replace("Input should", "must").replace("String should", "must")
    return f"`{field}` {problem}, got {shortened(first['input'])}."


def _error_of(body: Any) -> dict[str, Any]:
    """What went wrong, of an error in OpenAI's form or in Anthropic's."""
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    return {"code": error.get("code") or error.get("type"), "message": error.get("message")}
