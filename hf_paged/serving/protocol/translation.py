"""From the bodies of other APIs to chats."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from ..errors import ApiError
from .common import invalid_body
from .openai import ChatCompletionRequest

T = TypeVar("T")

_OF_TOOL = re.compile(r"\b(tools\[\d+\])\.function\.(\w+)")  # which the other APIs have in the tool itself


@contextlib.contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Within it, errors about a chat's fields become errors about the fields that the client knows.

    Args:
        names (`Mapping[str, str]`):
            The client's name for each that is another in chats.
    """

    def of_tool(found: re.Match[str]) -> str:
        return f"{found[1]}.{names.get(found[2], found[2])}"

    try:
        yield
    except ApiError as error:
        for name, told in names.items():
            error.message = error.message.replace(f"`{name}`", f"`{told}`")
        error.message = _OF_TOOL.sub(of_tool, error.message)
        if error.param is not None:
            error.param = _OF_TOOL.sub(of_tool, names.get(error.param, error.param))
        raise


def as_chat(body: T, chat_fields: Callable[[T], dict[str, Any]], **further: Any) -> ChatCompletionRequest:
    """Returns the chat that a request of another API is.

    Args:
        body (`T`):
            The request.
        chat_fields (`Callable[[T], dict[str, Any]]`):
            Returns the fields of the chat.
        further (`Any`):
            Fields that count before those.

    Raises:
        ApiError: 400, if the request makes no sense as a chat.
    """
    try:
        return ChatCompletionRequest.model_validate(chat_fields(body) | further)
    except ValidationError as error:
        raise invalid_body(error.errors()) from None
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_value") from None
