"""Helpers for tests of parsers: feed a text in pieces, and join what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from hf_paged.serving.tool_parsers import ParsedArguments, ParsedCallStart, ParsedText


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in pieces."""
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def parse(parser: Any, pieces: Sequence[str]) -> list[Any]:
    """All events, neighbours of one kind joined; none of them may be empty."""
    joined: list[Any] = []
    for events in [*map(parser.feed, pieces), parser.finish()]:
        for event in events:
            assert event[-1], event
            if joined and not isinstance(event, ParsedCallStart) and _same_kind(joined[-1], event):
                joined[-1] = type(event)(*event[:-1], joined[-1][-1] + event[-1])
            else:
                joined.append(event)
    return joined


def _same_kind(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left[:-1] == right[:-1]


def text_of(events: Sequence[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, ParsedText))


def calls_of(events: Sequence[Any]) -> list[tuple[str, str]]:
    """Name and arguments of each call; checks that indexes count up and that no call is without a start."""
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, ParsedCallStart):
            assert event.call_index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, ParsedArguments):
            assert event.call_index == len(calls) - 1
            calls[-1][1] += event.text
    return [(name, arguments) for name, arguments in calls]


def assert_cuts_do_not_matter(make: Callable[[], Any], text: str, places: Sequence[int]) -> list[Any]:
    """Returns the events of the text as a whole, after comparing them with those of its pieces."""
    whole = parse(make(), [text])
    assert parse(make(), cut(text, places)) == whole
    assert parse(make(), list(text)) == whole
    return whole


PLACES = st.lists(st.integers(0, 10_000), max_size=12)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,11}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20) | st.text("<>{}[]()'\"\\\n,=/|:a", max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
