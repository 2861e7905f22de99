from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.serving.reasoning_parsers import (
    detect_reasoning_parser,
    get_reasoning_parser,
    reasoning_parsers,
)

from ..parsing import PLACES, cut

THINK, R1, MISTRAL = (get_reasoning_parser(name) for name in ("qwen3", "deepseek_r1", "mistral"))
TAGS_AND_TEXT = ["<think>", "</think>", "[THINK]", "[/THINK]", "\n", " ", "a", "<", "/", "think>"]


def _read(parser, pieces) -> tuple[str, str]:
    """Reasoning and content."""
    read = {"reasoning": "", "content": ""}
    for events in [*map(parser.feed, pieces), parser.finish()]:
        for kind, text in events:
            assert text and not (kind == "reasoning" and read["content"])
            read[kind] += text
    return read["reasoning"], read["content"]


@pytest.mark.parametrize(
    ("make", "prompt", "text", "reasoning", "content"),
    [
        (THINK, "", "<think>\nhm\n\nso\n</think>\n\nYes.", "hm\n\nso", "Yes."),
        (THINK, "", "\n<think>hm</think>Yes.\n", "hm", "Yes.\n"),
        (THINK, "", "Yes, <think> is a tag.", "", "Yes, <think> is a tag."),
        (THINK, "", "\n Yes.", "", "\n Yes."),
        (THINK, "a: <think>\n", "hm\n</think>\n\nYes.", "hm", "Yes."),
        (THINK, "a: <think>\n\n</think>\n\n", "Yes.</think>", "", "Yes.</think>"),
        (THINK, "", "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (THINK, "", "<think>hm</think>a<think>b</think>", "hm", "a<think>b</think>"),
        (THINK, "", "<think>hm</thin", "hm</thin", ""),
        (THINK, "", "<think>hm\n\n", "hm\n\n", ""),
        (THINK, "", "<think>hm</think>\n\n", "hm", ""),
        (THINK, "", "<thin", "", "<thin"),
        (THINK, "", "", "", ""),
        (R1, "", "hm</think>\n\nYes.", "hm", "Yes."),
        (R1, "", "<think>\nhm</think>Yes.", "hm", "Yes."),
        (R1, "a: <think>\n", "hm</think>Yes.", "hm", "Yes."),
        (R1, "a: <think>\n\n</think>", "Yes.", "", "Yes."),
        (R1, "", "hm, so", "hm, so", ""),
        (MISTRAL, "", "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
    ],
)
def test_reasoning_is_separated(make, prompt, text, reasoning, content):
    assert _read(make(prompt), [text]) == (reasoning, content)
    assert _read(make(prompt), list(text)) == (reasoning, content)


@pytest.mark.parametrize(
    ("make", "continued", "begins"),
    [
        (THINK, "<think>\nhm", "inside"),
        (THINK, "<think>hm</think>So", "outside"),
        (THINK, "So", "undecided"),
        (R1, "hm</think>So", "outside"),
        (R1, "hm", "inside"),
    ],
)
def test_an_answer_that_is_continued_tells_where_it_is(make, continued, begins):
    assert make("a: " + continued, continued).begins == begins


@pytest.mark.parametrize("name", reasoning_parsers)
@settings(max_examples=50)
@given(
    pieces=st.lists(
        st.sampled_from(["<think>", "</think>", "[THINK]", "\n", " ", "a", "<", "/", "think>"]), max_size=12
    ),
    places=PLACES,
    prompt=st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]),
)
def test_how_the_text_is_cut_does_not_matter_and_nothing_but_tags_and_line_breaks_is_lost(name, pieces, places, prompt):
    make, text = get_reasoning_parser(name), "".join(pieces)
    whole = _read(make(prompt), [text])
    assert _read(make(prompt), list(text)) == whole
    assert _read(make(prompt), cut(text, places)) == whole
    lost = len("".join(text.split())) - len("".join("".join(whole).split()))
    assert lost in (0, len(make.open), len(make.close), len(make.open + make.close))


def test_text_is_held_back_only_while_it_may_become_a_tag():
    parser, read = THINK(), ""
    for character in "<think>a < b </ c":
        read += "".join(text for _, text in parser.feed(character))
    assert read == "a < b </ c"


@pytest.mark.parametrize("text", ["\n", "</thin", "<think>", "x", " "])
def test_hostile_answers_take_linear_time(text):
    parser = R1()
    started = time.process_time()
    for character in text * (100_000 // len(text)):
        parser.feed(character)
    parser.finish()
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("template", "name"),
    [("<think>", "think"), ("[THINK]", "mistral"), ("x.split('</think>')", "deepseek_r1"), ("", None), (None, None)],
)
def test_templates_tell_their_tags(template, name):
    assert detect_reasoning_parser(template) == name
