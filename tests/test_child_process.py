"""A process that may be ended at any time: its limits, and that nothing is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from hf_paged.child_process import ChildProcess

ECHO = """
import json, os, sys, time

def answer(message):
    if message == "hang":
        time.sleep(60)
    if message == "break off":
        os.write(1, b'{"half": ')
        os._exit(3)
    if message == "variable":
        return os.environ.get("OWN")
    if message == "path":
        return sys.path
    if isinstance(message, int):
        try:
            return len(bytearray(message))
        except MemoryError:
            return "too much"
    return message

for line in sys.stdin.buffer:
    print(json.dumps(answer(json.loads(line))), flush=True)
"""


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "echo.py"
    file.write_text(ECHO, encoding="utf-8")
    return str(file)


@pytest.fixture
def child(file):
    child = ChildProcess(file, {"OWN": "value"})
    assert child.start()
    yield child
    child.end()


def test_messages_arrive_whole(child):
    for message in (None, {}, {"a": [1.5, True, "\n\u2028\ud800"]}, {"large": "ä\n" * 500_000}):
        assert child.ask(message, 30) == message
    assert not child.start(), "one process for all"


def test_what_takes_too_long_is_ended(child):
    process = child._process
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        child.ask("hang", 0.2)
    assert time.monotonic() - started < 20 and process.returncode is not None
    assert child.start() and child.ask("again", 30) == "again"


def test_a_message_that_nobody_reads_is_late_too(tmp_path):
    (tmp_path / "deaf.py").write_text("import time\ntime.sleep(60)", encoding="utf-8")
    child = ChildProcess(str(tmp_path / "deaf.py"))
    child.start()
    with pytest.raises(TimeoutError):
        child.ask("x" * 2**20, 0.2)


def test_a_process_that_breaks_off_is_started_anew(child):
    with pytest.raises(EOFError):
        child.ask("break off", 30)
    assert child.start() and child.ask("again", 30) == "again"


def test_a_process_that_was_killed_while_it_was_idle_is_started_anew(child):
    child._process.kill()
    child._process.wait()
    assert child.start() and child.ask("again", 30) == "again"


def test_what_is_no_json_leaves_the_process_as_it_is(child):
    with pytest.raises(TypeError):
        child.ask({1, 2}, 30)
    assert child.ask("fine", 30) == "fine"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_memory_is_limited_beyond_what_the_process_has(child):
    assert child.ask(2**27, 30) == 2**27
    child.limit_memory(2**26)
    assert child.ask(2**27, 30) == "too much"
    assert child.ask(2**20, 30) == 2**20
    child.limit_memory(2**28)
    assert child.ask(2**27, 30) == 2**27, "the limit may be raised"


def test_it_has_its_own_variables_and_no_modules_of_its_folder(child, tmp_path):
    assert child.ask("variable", 30) == "value" and "OWN" not in os.environ
    assert str(tmp_path) not in child.ask("path", 30)


def test_an_ended_process_is_gone(child):
    pid = child._process.pid
    for _ in range(2):
        child.end()
    assert not psutil.pid_exists(pid)
    assert child.start() and child.ask("again", 30) == "again"


def test_another_thread_may_end_it(child):
    timer = threading.Timer(0.2, child.end)
    timer.start()
    with pytest.raises(EOFError):
        child.ask("hang", 30)
    timer.join()


def test_a_disowned_process_is_not_killed(child):
    process = child.disown()
    assert process.wait(30) == 0, "it ends when there are no more messages"
    assert child.start()


def test_it_ends_with_its_parent(file):
    code = f"""
import os
from hf_paged.child_process import ChildProcess
child = ChildProcess({file!r}, new_session=True)
child.start()
child.ask("ready", 30)
print(child._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid, deadline = int(done.stdout), time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
