"""Lines of prompts: what each is, and what is told of those that are none."""

from __future__ import annotations

import json

import pytest

from hf_paged.tools.terminal.prompt_lines import PromptLine, parse_lines


def parse(*lines: bytes, form=None) -> list[PromptLine]:
    return list(parse_lines([line + b"\n" for line in lines], form))


def test_lines_of_text_are_prompts_as_they_stand():
    found = parse(b"\xef\xbb\xbfOne, two,", b"", b"  ", '  "Größe" '.encode(), b"{not json")
    assert [(line.id, line.prompt) for line in found] == [(1, "One, two,"), (4, '  "Größe" '), (5, "{not json")]
    assert all(line.error is None for line in found)


def test_lines_of_json_have_prompts_or_messages_and_parameters():
    messages = [{"role": "user", "content": "Hi"}]
    lines = [{"prompt": "a"}, {"custom_id": "x", "prompt": [1, 2]}, {"id": 7, "messages": messages, "temperature": 0}]
    found = parse(*(json.dumps(line).encode() for line in lines))
    assert [line.id for line in found] == [1, "x", 7]
    assert [line.prompt for line in found] == ["a", [1, 2], None]
    assert found[2].messages == messages and found[2].sampling == {"temperature": 0}


def test_what_the_first_line_is_decides_unless_it_is_said():
    text = b'{"prompt": "a"}'
    assert parse(text)[0].prompt == "a"
    assert parse(text, form="text")[0].prompt == text.decode()
    assert parse(b"once", text)[1].prompt == text.decode()
    assert parse(b"once", form="jsonl")[0].error is not None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "a JSON object, not list"),
        (b"\xff\xfe", "UTF-8"),
        (b"{}", "either `prompt`"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "either `prompt`"),
        (b'{"prompt": 3}', "`prompt` must be"),
        (b'{"prompt": [1, true]}', "`prompt` must be"),
        (b'{"messages": []}', "`messages` must be"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "`messages` must be"),
        (b'{"prompt": "a", "temprature": 1}', "unknown field `temprature`; did you mean `temperature`?"),
        (b'{"prompt": "a", "n": 2}', "unknown field `n`"),
        (b'{"prompt": "\\ud800"}', "half of a character"),
    ],
)
def test_a_line_that_is_none_says_so_in_its_place(line, message):
    first, bad, last = parse(b'{"prompt": "a"}', line, b'{"prompt": "b"}')
    assert (first.prompt, last.prompt) == ("a", "b")
    assert bad.id == 2 and bad.error.startswith("Line 2: ") and message in bad.error


def test_a_bad_line_keeps_its_id():
    assert parse(b'{"id": "mine", "prompt": 3}')[0].id == "mine"
