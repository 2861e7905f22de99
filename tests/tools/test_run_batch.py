"""`hf-paged run-batch`: every line gets an entry, in order, whatever happens to the others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from hf_paged.cli.app import app
from hf_paged.tools.batch_lines import Batch

URL = "/v1/completions"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


def line(custom_id: Any = "a", url: Any = URL, method: Any = "POST", **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body}).encode() + b"\n"


async def answer(url: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    """Waits as long as the body says, and answers."""
    await asyncio.sleep(body.get("seconds", 0))
    if "status" in body:
        return body["status"], "r", {"error": {"message": "no", "code": "bad", "type": "t"}}
    return 200, "r", {"usage": USAGE, "said": body.get("say")}


def run(lines: Any, answer: Any = answer, max_in_flight: int = 4) -> tuple[list[dict[str, Any]], Any]:
    written: list[bytes] = []
    batch = Batch(answer, max_in_flight)
    asyncio.run(batch.run(lines, written.append))
    assert all(entry.endswith(b"\n") and entry.count(b"\n") == 1 for entry in written)
    return [json.loads(entry) for entry in written], batch.summary


def test_answers_come_in_the_order_of_the_lines():
    entries, summary = run([line(str(i), say=i, seconds=0.01 * (i % 3)) for i in range(40)])
    assert [entry["custom_id"] for entry in entries] == [str(i) for i in range(40)]
    assert [entry["response"]["body"]["said"] for entry in entries] == list(range(40))
    assert len({entry["id"] for entry in entries}) == 40
    assert (summary.total, summary.succeeded, summary.failed) == (40, 40, 0)
    assert (summary.prompt_tokens, summary.completion_tokens) == (120, 80)


def test_a_slow_line_does_not_keep_the_next_ones_waiting():
    begun: list[int] = []
    last_has_begun = asyncio.Event()

    async def slow_first(url: str, body: dict[str, Any]) -> tuple[int, str, Any]:
        begun.append(body["say"])
        if body["say"] == 19:
            last_has_begun.set()
        if body["say"] == 0:
            await last_has_begun.wait()
        return 200, "r", {}

    entries, _ = run([line(str(i), say=i) for i in range(20)], slow_first)
    assert len(entries) == 20 and begun[-1] == 19


def test_no_more_lines_are_in_flight_or_read_than_were_allowed():
    running = peak = num_read = num_done = 0
    furthest = 0

    def lines() -> Iterator[bytes]:
        nonlocal num_read, furthest
        for i in range(500):
            num_read += 1
            furthest = max(furthest, num_read - num_done)
            yield line(str(i))

    async def counting(url: str, body: dict[str, Any]) -> tuple[int, str, Any]:
        nonlocal running, peak, num_done
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)
        running -= 1
        num_done += 1
        return 200, "r", {}

    run(lines(), counting, max_in_flight=4)
    assert peak == 4
    assert furthest <= 4 * 10


@pytest.mark.parametrize(
    ("bad", "code", "message"),
    [
        (b"{oops\n", "invalid_json", "Line 2 is not JSON"),
        (line("b", x=json.loads("[" * 300 + "]" * 300)), "invalid_json", "Line 2: `body` is nested too deep"),
        (b"\xff\xfe\n", "invalid_json", "Line 2 is not JSON"),
        (b"[]\n", "invalid_line", "JSON object"),
        (b'"text"\n', "invalid_line", "JSON object"),
        (line(None), "invalid_line", "`custom_id`"),
        (line(""), "invalid_line", "`custom_id`"),
        (line("x", method="GET"), "invalid_line", "`method` must be 'POST', got 'GET'"),
        (line("x", url="/v1/embeddings"), "invalid_line", "`url` must be '/v1/chat/completions'"),
        (b'{"custom_id": "x", "method": "POST", "url": "/v1/completions"}\n', "invalid_line", "`body` is missing"),
        (line("x", stream=True), "invalid_line", "`body.stream`"),
        (line("first"), "duplicate_custom_id", "'first' is that of an earlier line"),
        (line("x", status=400), "bad", "no"),
        (line("x", status=503), "bad", "no"),
    ],
)
def test_a_bad_line_gets_an_entry_and_the_others_are_answered(bad, code, message):
    entries, summary = run([line("first"), bad, line("last")])
    assert [entry["error"] is None for entry in entries] == [True, False, True]
    assert entries[1]["error"]["code"] == code
    assert message in entries[1]["error"]["message"]
    assert (summary.succeeded, summary.failed) == (2, 1)


def test_the_summary_says_what_failed():
    lines = [line("a", status=404), line("b"), b"{oops\n", line("c", status=404)]
    _, summary = run(lines)
    assert summary.errors["bad"] == {"count": 2, "message": "no"} and summary.errors["invalid_json"]["count"] == 1
    first, *kinds = summary.describe().splitlines()
    assert "1 answered, 3 failed" in first
    assert kinds[0] == "failed: 2 x bad, first: no" and kinds[1].startswith("failed: 1 x invalid_json, first: Line 3")
    assert "\n" not in run([line("a")])[1].describe()


def test_an_entry_of_a_bad_line_carries_its_id_if_it_has_one():
    entries, _ = run([line("x", method="GET"), line("y", status=404)])
    assert [entry["custom_id"] for entry in entries] == ["x", "y"]
    assert entries[0]["response"] is None
    assert entries[1]["response"]["status_code"] == 404


def test_blank_lines_and_a_byte_order_mark_are_no_requests():
    entries, _ = run([b"\xef\xbb\xbf" + line("a"), b"\n", b"  \r\n", line("b").rstrip(b"\n")])
    assert [(entry["custom_id"], entry["error"]) for entry in entries] == [("a", None), ("b", None)]


def test_an_empty_file_has_no_answers():
    assert run([])[0] == []


def test_tokens_of_all_apis_are_counted():
    usages = iter(
        [
            {"prompt_tokens": 3, "completion_tokens": 2},
            {"input_tokens": 3, "input_tokens_details": {"cached_tokens": 1}, "output_tokens": 2, "total_tokens": 5},
            {"input_tokens": 2, "cache_read_input_tokens": 1, "output_tokens": 2},
        ]
    )

    async def of_each(url: str, body: dict[str, Any]) -> tuple[int, str, Any]:
        return 200, "r", {"usage": next(usages)}

    summary = run([line(str(i)) for i in range(3)], of_each)[1]
    assert (summary.prompt_tokens, summary.completion_tokens) == (9, 6)


def test_an_engine_that_dies_ends_the_batch_after_what_was_answered():
    async def dying(url: str, body: dict[str, Any]) -> tuple[int, str, Any]:
        if body["say"] >= 5:
            raise RuntimeError("dead")
        return 200, "r", {}

    written: list[bytes] = []
    with pytest.raises(RuntimeError, match="dead"):
        asyncio.run(Batch(dying, 4).run([line(str(i), say=i) for i in range(100)], written.append))
    assert [json.loads(entry)["custom_id"] for entry in written] == ["0", "1", "2", "3", "4"]


def test_input_that_cannot_be_read_further_is_an_error_after_what_was_answered():
    def broken() -> Iterator[bytes]:
        yield line("a")
        raise OSError("the disk is gone")

    written: list[bytes] = []
    with pytest.raises(OSError, match="the disk is gone"):
        asyncio.run(Batch(answer, 4).run(broken(), written.append))
    assert len(written) == 1


def test_when_it_is_cancelled_answers_that_are_there_are_written_and_nothing_is_left_running():
    written: list[bytes] = []

    async def cancelled() -> None:
        lines = [line("slow", seconds=60), *(line(str(i)) for i in range(6)), line("slower", seconds=60)]
        task = asyncio.create_task(Batch(answer, 4).run(lines, written.append))
        await asyncio.sleep(0.1)
        assert not written  # all wait for the first
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(cancelled())
    assert [json.loads(entry)["custom_id"] for entry in written] == [str(i) for i in range(6)]


# ------------------------------------------------------------------ the command

FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--num-blocks", "256", "--max-num-seqs", "8")


def bodies(number: int) -> dict[str, Any]:
    return [
        {"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}},
        {"url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 4}},
        {"url": "/v1/responses", "body": {"input": "hi", "max_output_tokens": 4}},
        {"url": "/v1/messages", "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}},
    ][number % 4]


def write_lines(path: Path, count: int, **further: Any) -> Path:
    with path.open("w") as file:
        for i in range(count):
            request = {"custom_id": str(i), "method": "POST", **bodies(i)}
            request["body"] |= {"model": "tiny", "ignore_eos": True, **further}
            file.write(json.dumps(request) + "\n")
    return path


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["run-batch", *map(str, arguments)])


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(entry) for entry in path.read_text().splitlines()]


def test_the_command_answers_all_apis_and_tells_what_came_of_it(tiny_checkpoint, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", 12)
    source.write_text(
        source.read_text() + '{"custom_id": "bad", "method": "POST", "url": "/v1/responses", "body": {}}\n'
    )
    target = tmp_path / "out.jsonl"
    done = command("-i", source, "-o", target, "--json", tiny_checkpoint, *FLAGS)
    assert done.exit_code == 1, done.output  # of one line
    entries = read_lines(target)
    assert [entry["custom_id"] for entry in entries] == [*map(str, range(12)), "bad"]
    assert [entry["response"]["status_code"] for entry in entries] == [200] * 12 + [400]
    kinds = [entry["response"]["body"].get("object") or "message" for entry in entries[:4]]
    assert kinds == ["chat.completion", "text_completion", "response", "message"]
    assert entries[-1]["error"]["message"] == "`input` is missing."
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["total"], summary["succeeded"], summary["failed"]) == (13, 12, 1)
    assert summary["completion_tokens"] == 48


def test_a_batch_of_which_nothing_was_answered_is_a_failure_of_the_command(tiny_checkpoint, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", 2, model="another")
    done = command("-i", source, "-o", tmp_path / "out.jsonl", tiny_checkpoint, *FLAGS)
    assert done.exit_code == 1
    assert "failed: 2 x model_not_found, first: " in done.stdout and "'another'" in done.stdout


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("missing.jsonl", "out.jsonl", "cannot be read"),
        ("in.jsonl", "in.jsonl", "is the input"),
        ("in.jsonl", "full.jsonl", "--overwrite"),
        ("in.jsonl", "nowhere/out.jsonl", "no folder"),
        ("https://example.org/in.jsonl", "out.jsonl", "not URLs"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_a_model_is_loaded(tmp_path, source, target, message):
    for name in ("in.jsonl", "full.jsonl"):
        write_lines(tmp_path / name, 1)
    where = source if "://" in source else tmp_path / source
    done = command("-i", where, "-o", tmp_path / target, "no-such-model")
    assert done.exit_code != 0
    assert message in str(done.exception)
    assert len(read_lines(tmp_path / "full.jsonl")) == 1


@pytest.mark.parametrize(("arguments", "message"), [([], "MODEL"), (["m", "--no-such-flag"], "--no-such-flag")])
def test_wrong_usage_is_told(tmp_path, arguments, message):
    done = command("-i", write_lines(tmp_path / "in.jsonl", 1), "-o", tmp_path / "out.jsonl", *arguments)
    assert done.exit_code == 2
    assert message in done.output


def start(tmp_path: Path, tiny_checkpoint: Path, source: Path, target: str, *flags: str) -> subprocess.Popen:
    arguments = ["run-batch", "-i", str(source), "-o", target, str(tiny_checkpoint), *FLAGS, *flags]
    return subprocess.Popen(
        [sys.executable, "-m", "hf_paged.cli", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background jobs, the tests perhaps among them, are started with Ctrl-C ignored, and hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_whole_lines(tiny_checkpoint, tmp_path, number):
    source = write_lines(tmp_path / "in.jsonl", 400, max_tokens=400)
    target = tmp_path / "out.jsonl"
    process = start(tmp_path, tiny_checkpoint, source, str(target))
    try:
        deadline = time.monotonic() + 120
        while not (target.exists() and target.read_bytes().count(b"\n") >= 3):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert b"Traceback" not in errors and b"interrupted" in errors
    assert target.read_bytes().endswith(b"\n")
    assert 3 <= len(read_lines(target)) < 400


@pytest.mark.slow
def test_a_thousand_lines_stream_through_standard_output_with_flat_memory(tiny_checkpoint, tmp_path):
    padding = "x" * 20_000  # 20 MB in all
    source = write_lines(tmp_path / "in.jsonl", 1000, user=padding)
    process = start(tmp_path, tiny_checkpoint, source, "-")
    memory: list[int] = []
    entries = []
    try:
        assert process.stdout is not None
        watched = psutil.Process(process.pid)
        for entry in process.stdout:
            entries.append(json.loads(entry))
            memory.append(watched.memory_info().rss)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert [entry["custom_id"] for entry in entries] == [str(i) for i in range(1000)]
    assert all(entry["error"] is None for entry in entries)
    assert max(memory[300:]) - memory[300] < 20 << 20
