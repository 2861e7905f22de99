"""An answer in pieces, as what stands on chats is told of it, and the tool that it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from hf_paged.serving.errors import ApiError
from hf_paged.serving.events import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart, Usage
from hf_paged.serving.protocol.common import invalid_body

USAGE = Usage(prompt_tokens=5, completion_tokens=6, cached_tokens=2, reasoning_tokens=1)
PAINT = {"name": "paint", "description": "Paints a wall."}
COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}},
    "required": ["color"],
    "additionalProperties": False,
}
PIECES = (  # without its end; the second call has no arguments yet
    ReasoningDelta(0, "Let me "),
    ReasoningDelta(0, "see."),
    ContentDelta(0, "\n"),
    ContentDelta(0, "Both "),
    ContentDelta(0, "walls."),
    ToolCallStart(0, 0, "call_a", "paint"),
    ToolCallArguments(0, 0, '{"color": '),
    ToolCallArguments(0, 0, '"red"}'),
    ContentDelta(0, "\n"),
    ToolCallStart(0, 1, "call_b", "paint"),
)


def refusal_of(request: Callable[..., Any], fields: dict[str, Any]) -> ApiError:
    """What a client is told of a body that cannot be answered."""
    with pytest.raises(ValidationError) as raised:
        request(**fields)
    return invalid_body(raised.value.errors())
