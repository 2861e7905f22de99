"""A Python file that runs in a process of its own, which may crash, hang or run out of memory.

Messages are JSON, one a line, on standard input and output. The file answers each, and ends when there are no more: so
it also ends with its parent. It imports nothing of hf_paged, which might not be found from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import IO, Any

import psutil


class ChildProcess:
    """One process. Started at the first use, and again after it was ended; for one thread at a time.

    Args:
        file (`str`):
            What it runs.
        environment (`Mapping[str, str]`, *optional*):
            Variables beside this process's own.
        new_session (`bool`, defaults to `False`):
            Whether what a terminal sends, as for Ctrl-C, is not for it.
    """

    def __init__(self, file: str, environment: Mapping[str, str] | None = None, *, new_session: bool = False):
        self._file = file
        self._environment = environment or {}
        self._new_session = new_session
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Starts the process, unless it runs.

        Returns:
            `bool`: Whether it was started, and so knows nothing of what it was told before.

        Raises:
            OSError: If it cannot be started.
        """
        if self._process is not None and self._process.poll() is None:
            return False
        self.end()
        self._process = subprocess.Popen(
            [sys.executable, "-P", self._file],  # without the modules of its folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # nothing that a forked process could write again
            env={**os.environ, **self._environment},
            start_new_session=self._new_session,
        )
        return True

    def ask(self, message: Any, seconds: float) -> Any:
        """Returns the answer to a message. Without one the process is ended.

        Args:
            message (`Any`):
                Of JSON values.
            seconds (`float`):
                How long it may take.

        Raises:
            TimeoutError: If it takes longer.
            EOFError: If the process ends instead.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, "it was started"
        line = json.dumps(message).encode() + b"\n"
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            _write(process.stdin, line)
            return _read(process.stdout)
        except (EOFError, OSError, ValueError):  # it has ended, in the middle of a line perhaps
            self.end()
            raise (TimeoutError if late.is_set() else EOFError) from None
        finally:
            timer.cancel()

    def limit_memory(self, num_bytes: int) -> None:
        """Limits what the process may take beyond what it has now, on systems with such limits.

        Args:
            num_bytes (`int`):
                Of its address space.
        """
        assert self._process is not None, "it was started"
        with contextlib.suppress(AttributeError, OSError, ValueError, psutil.Error):
            child = psutil.Process(self._process.pid)
            hard = child.rlimit(psutil.RLIMIT_AS)[1]
            limit = child.memory_info().vms + num_bytes
            child.rlimit(psutil.RLIMIT_AS, (limit if hard == psutil.RLIM_INFINITY else min(limit, hard), hard))

    def disown(self) -> subprocess.Popen[bytes] | None:
        """Lets go of the process without ending it: in a forked process, where it is the parent's.

        Returns:
            `subprocess.Popen`, *optional*: The process, without its pipes.
        """
        process, self._process = self._process, None
        for pipe in () if process is None else (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process

    def end(self) -> None:
        """Ends the process, if it runs. Any thread may."""
        process = self.disown()
        if process is not None:
            process.kill()
            process.wait()


def _write(pipe: IO[bytes], line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[pipe.write(left) :]  # perhaps not all


def _read(pipe: IO[bytes]) -> Any:
    line = bytearray()
    while not line.endswith(b"\n"):
        part = pipe.read(2**16)  # what there is
        if not part:
            raise EOFError
        line += part
    return json.loads(line)
