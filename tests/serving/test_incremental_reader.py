from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from hf_paged.serving.incremental_reader import IncrementalReader, Markers

from .parsing import PLACES, cut

MARKER_TEXTS = st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=4, unique=True)


def _split(markers: Markers, pieces: list[str]) -> list[str]:
    """Text and markers in turn."""
    reader = IncrementalReader()
    parts: list[str] = []

    def read():
        while True:
            text: list[str] = []
            marker = yield from reader.until(markers, text.append)
            parts.extend(["".join(text), marker])
            if not marker:
                return

    reading = read()
    for piece in pieces:
        reader.push(piece)
        next(reading, None)
    reader.close()
    assert next(reading, "ended") == "ended"
    return parts


@given(texts=MARKER_TEXTS, text=st.text("ab<>", max_size=30), places=PLACES)
def test_markers_are_found_as_a_regular_expression_finds_them(texts, text, places):
    pattern = "|".join(re.escape(marker) for marker in sorted(texts, key=len, reverse=True))
    expected = re.split(f"({pattern})", text) + [""]
    markers = Markers(texts)
    assert _split(markers, [text]) == expected
    assert _split(markers, list(text)) == expected
    assert _split(markers, cut(text, places)) == expected


def test_without_markers_all_is_text():
    assert _split(Markers([]), ["a", "b"]) == ["ab", ""]


def test_what_was_read_can_be_given_back():
    reader = IncrementalReader()
    reader.push("  word!")
    reader.record("<")

    def read():
        yield from reader.run(re.compile(r"\s*"))
        assert (yield from reader.word(re.compile(r"\w*"))) == "word"
        assert not (yield from reader.accept("?"))
        assert (yield from reader.peek()) == "!"

    assert next(read(), "ended") == "ended"
    assert reader.recorded() == "<  word"
    assert reader.recorded() == ""
