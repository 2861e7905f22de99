"""Chat templates that came with requests, rendered in a process of their own, where limits of time and memory hold.

A template is a program. Jinja's sandbox keeps it from touching anything, not from running forever or from filling the
memory, and a thread cannot be ended from outside. So one process serves all such templates, one at a time; it is
started when the first comes, and killed and started anew when one takes too long.

    parent -> child   8 bytes of length, then JSON: the arguments of `render_jinja_template`
    child -> parent   8 bytes of length, then JSON: {"text": ...} or {"error": ...}

This file is also what the other process runs; it imports nothing of hf_paged.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

_HEADER = 8
_MEMORY = 512 << 20  # bytes that templates may use beside what the process has at its start
_START_SECONDS = 60.0  # importing Transformers; not the template's fault


class TemplateTimeout(Exception):
    """A template took too long."""


class TemplateProcess:
    """Renders templates in another process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "hf_paged-templates")

    async def render(self, arguments: Mapping[str, Any], seconds: float) -> str:
        """Returns a rendered template.

        Args:
            arguments (`Mapping[str, Any]`):
                Of Transformers' `render_jinja_template`; plain JSON.
            seconds (`float`):
                How long it may take.

        Raises:
            TemplateTimeout: If it took longer.
            ValueError: If the template is wrong, refuses the messages, or needs too much memory.
        """
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._thread, self._render, arguments, seconds)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]

    def _render(self, arguments: Mapping[str, Any], seconds: float) -> dict[str, str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            _ask(self._process, {"chat_template": "", "conversations": [[]]}, _START_SECONDS)
        return _ask(self._process, arguments, seconds)

    def close(self) -> None:
        """Ends the process; the next template starts another."""
        if self._process is not None:
            _end(self._process)


def _ask(process: subprocess.Popen[bytes], arguments: Mapping[str, Any], seconds: float) -> dict[str, str]:
    assert process.stdin is not None and process.stdout is not None, "the process was started with pipes"
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        _write(process.stdin, arguments)
        answer = _read(process.stdout)
    except OSError:
        answer = None
    finally:
        timer.cancel()
    if answer is not None:
        return answer
    _end(process)
    if expired.is_set():
        raise TemplateTimeout
    raise ValueError("it needed too much memory, or its process was ended")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, "the process was started with pipes"
        with contextlib.suppress(OSError):
            pipe.close()


def _write(pipe: IO[bytes], value: Any) -> None:
    data = json.dumps(value).encode()
    pipe.write(len(data).to_bytes(_HEADER, "big") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> dict[str, Any] | None:
    header = pipe.read(_HEADER)
    data = pipe.read(int.from_bytes(header, "big")) if len(header) == _HEADER else b""
    return json.loads(data) if data else None


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # systems without such limits
        import resource

        import psutil

        limit = psutil.Process().memory_info().vms + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """The other process: answers until its parent is gone."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    while (arguments := _read(requests)) is not None:
        try:
            answer = {"text": render_jinja_template(**arguments)[0][0]}
        except MemoryError:
            answer = {"error": "it needs too much memory"}
        except Exception as error:  # whatever a template does
            answer = {"error": str(error)[:2000] or type(error).__name__}
        _write(answers, answer)


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
