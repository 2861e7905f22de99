"""Requests of other APIs as chats, and mistakes that are told in the words of the API they were made in."""

from __future__ import annotations

import pytest

from hf_paged.serving.errors import ApiError
from hf_paged.serving.protocol.responses import ResponsesRequest, chat_fields
from hf_paged.serving.protocol.translation import as_chat, told_as
from hf_paged.serving.tool_choice import plan_tools

TOOL = {"type": "function", "name": "paint", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("function", "where"),
    [
        ({"name": "no spaces"}, "tools[0].name"),
        ({"name": "f", "parameters": {"type": "array"}}, "tools[0].schema.type"),
    ],
)
def test_mistakes_in_tools_are_told_where_the_client_made_them(function, where):
    with pytest.raises(ApiError) as caught, told_as({"parameters": "schema"}):
        plan_tools([{"type": "function", "function": function}], "required")
    assert caught.value.param == where and caught.value.message.startswith(f"`{where}`")


def test_an_allowed_tool_that_there_is_not_is_refused():
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "scrape"}]}
    with pytest.raises(ApiError) as caught:
        as_chat(ResponsesRequest(input="x", tools=[TOOL], tool_choice=choice), chat_fields)
    assert caught.value.status == 400 and "`tool_choice.tools`" in caught.value.message
    assert "'scrape'" in caught.value.message


def test_thoughts_in_a_row_are_kept_all():
    thoughts = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in ("One. ", "Two.")
    ]
    said = [{"role": "user", "content": "x"}, *thoughts, {"role": "assistant", "content": "y"}]
    chat = as_chat(ResponsesRequest(input=[*said, {"role": "user", "content": "z"}]), chat_fields)
    assert chat.messages[1].reasoning_content == "One. Two." and chat.messages[1].content == "y"
