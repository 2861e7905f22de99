"""Has grammars compiled in another process first, which may crash, hang or run out of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
from typing import Any

from ...errors import EngineError, InvalidRequestError
from . import grammar_process
from .params import GrammarSource

COMPILE_SECONDS = 2.0  # in the other process; this one then takes about as long
START_SECONDS = 120.0  # for Python to start, and for a tokenizer to be taken in: on a busy machine, too
MAX_GRAMMAR_BYTES = 2**28  # that a compiled grammar may hold


@dataclasses.dataclass(frozen=True)
class Proof:
    """What the other process says of a grammar that it compiled.

    Args:
        grammar (`str`):
            To be compiled in this process.
        num_bytes (`int`):
            What it holds when compiled.
    """

    grammar: str
    num_bytes: int


class GrammarProcess:
    """One process. Started at the first use, and again after it was ended; for one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._known: list[str] = []  # its tokenizers, the oldest first

    def prove(self, source: GrammarSource, tokenizer: str, definition: dict[str, Any]) -> Proof:
        """Compiles a grammar there.

        Args:
            source (`GrammarSource`):
                The grammar.
            tokenizer (`str`):
                A name for the tokenizer.
            definition (`dict[str, Any]`):
                The tokenizer.

        Raises:
            InvalidRequestError: If it does not compile, in time and memory.
            EngineError: If the process cannot be started.
        """
        message = {"kind": source.kind, "text": source.text, "options": dict(source.options), "tokenizer": tokenizer}
        for _ in range(2):  # something else may have ended the process while it was idle
            self.start(tokenizer, definition)
            answer, in_time = self._ask(message, COMPILE_SECONDS)
            if answer is not None or not in_time:
                break
        if not in_time:
            raise refusal(source, f"compiling it takes longer than {COMPILE_SECONDS:g} seconds")
        if answer is None:
            raise refusal(source, "compiling it takes too much memory, or it is nested too deeply")
        if "error" in answer:
            raise refusal(source, answer["error"])
        proof = Proof(answer["grammar"], answer["num_bytes"])
        if proof.num_bytes > MAX_GRAMMAR_BYTES:
            raise refusal(source, f"it holds {proof.num_bytes >> 20} MiB when compiled, of at most 256")
        return proof

    def start(self, tokenizer: str, definition: dict[str, Any]) -> None:
        """Starts the process if it does not run, and gives it a tokenizer that it does not know.

        Args:
            tokenizer (`str`):
                A name for the tokenizer.
            definition (`dict[str, Any]`):
                The tokenizer.

        Raises:
            EngineError: If that does not work.
            InvalidRequestError: If the grammar library cannot use the tokenizer.
        """
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._process = _start()
        if tokenizer in self._known:
            return
        answer, _ = self._ask({"tokenizer": tokenizer, "definition": definition}, START_SECONDS)
        if answer is None:
            raise EngineError("The process that compiles grammars did not start, or ended; see its Python with -v.")
        if "error" in answer:
            raise InvalidRequestError(f"Structured output cannot use this tokenizer: {answer['error']}")
        self._known = [*self._known, tokenizer][-grammar_process.MAX_TOKENIZERS :]

    def _ask(self, message: dict[str, Any], seconds: float) -> tuple[Any, bool]:
        """Returns the answer, `None` if the process ended instead, and whether it was not this that ended it."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, "it was started"
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        answer = None
        try:
            grammar_process.write_message(process.stdin, message)
            answer = grammar_process.read_message(process.stdout)
        except (OSError, ValueError):  # it has ended, in the middle of a message perhaps
            pass
        finally:
            timer.cancel()
        if answer is None:
            self.end()
        return answer, not late.is_set() or answer is not None

    def disown(self) -> None:
        """Lets go of the process without ending it: in a forked process, where it is the parent's."""
        process, self._process, self._known = self._process, None, []
        for pipe in () if process is None else (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def end(self) -> None:
        """Ends the process, if it runs."""
        process, self._process, self._known = self._process, None, []
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what was not sent
                if pipe is not None:
                    pipe.close()
        process.wait()


def _start() -> subprocess.Popen[bytes]:
    # One arena, so that what a grammar holds can be counted. `-P`: this folder's modules are nobody's.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-P", grammar_process.__file__]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
            start_new_session=True,  # Ctrl-C is the parent's
        )
    except OSError as error:
        raise EngineError(f"The process that compiles grammars cannot be started: {error}") from error


def refusal(source: GrammarSource, reason: Any) -> InvalidRequestError:
    """Returns what the caller of a grammar that does not compile is told.

    Args:
        source (`GrammarSource`):
            The grammar.
        reason (`Any`):
            Why.
    """
    text = source.text if len(source.text) <= 80 else source.text[:80] + "..."
    return InvalidRequestError(f"`structured_outputs.{source.kind}` {text!r} is refused: {reason}.")
