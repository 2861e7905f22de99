"""A gateway's process: when it is ready, and that nothing of it outlives it."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from benchmarks.serving.servers import Command
from examples.gateways.common import servers
from examples.gateways.common.servers import gateway_process, without_ours

# Answers /ready on the port of its variable; may start a child that ignores signals to its parent's session.
PROGRAM = """
import http.server, os, subprocess, sys
if {with_child}:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("child", child.pid, flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(os.environ["WHERE"])), Handler).serve_forever()
"""


def command(with_child: bool) -> Command:
    words = (sys.executable, "-c", PROGRAM.format(with_child=with_child))
    return Command("A gateway", words, without_ours(), ready="/ready", port_variable="WHERE")


def test_a_gateway_ends_with_its_block_whatever_happens_there(tmp_path):
    with pytest.raises(KeyboardInterrupt), gateway_process(command(False), tmp_path) as running:
        assert running.get("/ready")[0] == 200
        raise KeyboardInterrupt
    assert running.process.poll() is not None


def test_a_process_that_a_gateway_leaves_behind_is_ended_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "END_SECONDS", 0.2)
    with (
        pytest.raises(RuntimeError, match="A gateway left 1 processes running"),
        gateway_process(command(True), tmp_path),
    ):
        child = int((tmp_path / "gateway.log").read_text().split()[1])
        assert psutil.pid_exists(child)
    psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=30)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_gateway_that_does_not_start_says_why(tmp_path):
    broken = Command("A gateway", (sys.executable, "-c", "raise SystemExit('no such option')"), dict(os.environ))
    ended = pytest.raises(RuntimeError, match=r"A gateway ended with status 1.*no such option")
    with ended, gateway_process(broken, tmp_path):
        pytest.fail("it is not ready")


def test_a_gateway_gets_none_of_our_own_variables(monkeypatch):
    monkeypatch.setenv("HF_PAGED_API_KEY", "sesame")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    variables = without_ours(MORE="1")
    assert variables["MORE"] == "1" and variables["PATH"] == os.environ["PATH"]
    assert not {"HF_PAGED_API_KEY", "PYTHONPATH"} & set(variables)
