"""`ApiError`: what a client is told when something goes wrong, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import (
    DeadlineExceededError,
    EngineClosedError,
    EngineDiedError,
    HfPagedError,
    InvalidRequestError,
    MissingDependencyError,
    NotSupportedError,
    PromptTooLongError,
    QueueFullError,
    RequestAbortedError,
)
from .access_log import note_error

RETRY_AFTER = 1  # seconds; a queue that is full now has room again within a few steps
_LONGEST_MESSAGE = 2000
# First match counts: error, status, type, code.
_KINDS: tuple[tuple[type[BaseException], int, str, str | None], ...] = (
    (QueueFullError, 503, "server_overloaded", "queue_full"),
    (PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidRequestError, 400, "invalid_request_error", None),
    (NotSupportedError, 400, "invalid_request_error", "not_supported"),
    (MissingDependencyError, 400, "invalid_request_error", "not_supported"),
    (DeadlineExceededError, 408, "timeout_error", "deadline_exceeded"),
    (RequestAbortedError, 503, "server_overloaded", "request_aborted"),
    (EngineDiedError, 503, "server_overloaded", "engine_died"),
    (EngineClosedError, 503, "server_overloaded", "shutting_down"),
)


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status (`int`):
            Of HTTP.
        message (`str`):
            Names the field, its value, the limit and the way out.
        type (`str`, defaults to `"invalid_request_error"`):
            OpenAI's kind of error.
        param (`str`, *optional*):
            The field that is wrong.
        code (`str`, *optional*):
            For programs, such as `"model_not_found"`.
        headers (`Mapping[str, str]`, *optional*):
            Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + " ..."
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def overloaded(message: str, code: str = "queue_full", retry_after: int = RETRY_AFTER) -> ApiError:
    """Returns the error for a server that takes no more work now.

    It is 503, which gateways try again soon, and not 429, after which some of them leave a server alone for a minute.

    Args:
        message (`str`):
            What is full, and the limit.
        code (`str`, defaults to `"queue_full"`):
            For programs.
        retry_after (`int`, defaults to 1):
            Seconds after which another try makes sense.
    """
    return ApiError(503, message, type="server_overloaded", code=code, headers={"Retry-After": str(retry_after)})


def to_api_error(error: BaseException) -> ApiError:
    """Returns what a client is told about an exception. What is nobody's mistake but ours is logged.

    Args:
        error (`BaseException`):
            Whatever was raised while a request was served.
    """
    if isinstance(error, ApiError):
        return error
    for kind, status, type_, code in _KINDS:
        if isinstance(error, kind):
            if status == 503:
                return overloaded(str(error), code or "queue_full")
            # A client library would otherwise try 408 again, with the same end.
            headers = {"x-should-retry": "false"} if status == 408 else None
            return ApiError(status, str(error), type=type_, code=code, param=_param(str(error)), headers=headers)
    note_error(error)
    message = (
        str(error) if isinstance(error, HfPagedError) else "Something went wrong in the server; its log says what."
    )
    return ApiError(500, message, type="server_error", code="internal_error")


def _param(message: str) -> str | None:
    """Our messages begin with the argument's name in backticks."""
    name, mark, _ = message.removeprefix("`").partition("`")
    return (
        name.split("[")[0]
        if message.startswith("`") and mark and name.replace("_", "").split("[")[0].isalnum()
        else None
    )
