"""Files of prompts and answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading

import pytest

from hf_paged.errors import ConfigurationError
from hf_paged.tools.terminal.files import (
    _from_descriptor,
    _lines_of,
    check_output,
    check_source,
    count_lines,
    opened_lines,
    opened_output,
)


def test_the_name_of_a_file_says_what_it_holds(tmp_path):
    for name, prompts in [("a.txt", ['{"prompt": "x"}']), ("a.jsonl", ["x"]), ("a.NDJSON", ["x"]), ("a", ["x"])]:
        (tmp_path / name).write_text('{"prompt": "x"}\n')
        with opened_lines(str(tmp_path / name), None) as lines:
            assert [line.prompt for line in lines] == prompts


def test_lines_of_a_pipe_are_whole_whatever_pieces_they_come_in():
    reader, writer = os.pipe()
    for piece in (b"on", b"e\n", b"two\nthr", b"ee\n\nlast"):
        os.write(writer, piece)
    os.close(writer)
    assert list(_lines_of(reader)) == [b"one", b"two", b"three", b"", b"last"]
    os.close(reader)


def test_a_slow_pipe_does_not_keep_the_event_loop():
    reader, writer = os.pipe()

    async def read() -> list:
        lines = _from_descriptor(reader, None)
        os.write(writer, b"one\n")
        found = [(await anext(lines)).prompt]
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        threading.Thread(target=lambda: (os.write(writer, b"two"), os.close(writer))).start()
        found.append((await waiting).prompt)
        return found + [line async for line in lines]

    assert asyncio.run(read()) == ["one", "two"]
    os.close(reader)


def test_an_entry_is_written_whole_and_at_once(tmp_path):
    path = tmp_path / "out.jsonl"
    with opened_output(str(path)) as write:
        write({"text": "Größe\n"})
        assert path.read_text(encoding="utf-8") == '{"text": "Größe\\n"}\n'


@pytest.mark.parametrize(
    ("target", "message"), [("in", "is the input"), ("full", "--overwrite"), ("nowhere/out", "no folder")]
)
def test_an_output_that_cannot_be_used_is_refused(tmp_path, target, message):
    for name in ("in", "full"):
        (tmp_path / name).write_text("x\n")
    with pytest.raises(ConfigurationError, match=message):
        check_output(str(tmp_path / target), str(tmp_path / "in"), False)
    check_output(str(tmp_path / "full"), str(tmp_path / "in"), True)
    check_output(str(tmp_path / "new"), "-", False)


@pytest.mark.parametrize("target", ["-", "/dev/full"])
def test_a_full_disk_is_told_with_what_was_written(target, monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115 - what it could not write would be written once more at its end
    monkeypatch.setattr(sys, "stdout", full)
    what = "The standard output" if target == "-" else "`--output` '/dev/full'"
    with (
        pytest.raises(ConfigurationError, match=f"^{what} cannot be written further: No space left .*; make room"),
        opened_output(target) as write,
    ):
        write({"text": "a"})
    with contextlib.suppress(OSError):
        full.close()


def test_an_input_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        check_source(str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match="directory"):
        check_source(str(tmp_path))


def test_prompts_are_counted_where_that_is_possible(tmp_path):
    (tmp_path / "in").write_text("a\n\nb")
    assert count_lines(str(tmp_path / "in")) == 2
    assert count_lines("-") is None
