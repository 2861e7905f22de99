"""The object that `/v1/responses` answers with, as it is before there is any output."""

from __future__ import annotations

from typing import Any

from .responses import AllowedTools, FunctionChoice, FunctionTool, ResponsesRequest, TextFormat, TextOptions


def new_response(request: ResponsesRequest, response_id: str, model: str, created_at: int) -> dict[str, Any]:
    """Returns a response object without output.

    Args:
        request (`ResponsesRequest`):
            The body.
        response_id (`str`):
            The response's id.
        model (`str`):
            What the client called the model.
        created_at (`int`):
            Seconds since 1970.
    """
    reasoning = {"effort": None, "summary": None} | (request.reasoning.model_dump() if request.reasoning else {})
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": reasoning,
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": request.temperature,
        "text": _shown_text(request),
        "tool_choice": _shown_choice(request),
        "tools": [_shown_tool(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def _shown_text(request: ResponsesRequest) -> dict[str, Any]:
    text = request.text or TextOptions()
    shown = (text.format or TextFormat()).model_dump(by_alias=True, exclude_none=True)
    if shown["type"] == "json_schema":
        shown.setdefault("name", "output")  # clients look for one
    return {"format": shown, "verbosity": text.verbosity}


def _shown_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice
    return choice.model_dump() if isinstance(choice, (AllowedTools, FunctionChoice)) else choice or "auto"


def _shown_tool(tool: FunctionTool) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None} | tool.model_dump(exclude_none=True)
