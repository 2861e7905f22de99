"""Has grammars compiled in another process first, which may crash, hang or run out of memory."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ...child_process import ChildProcess
from ...errors import EngineError, InvalidRequestError
from . import grammar_process
from .params import GrammarSource

COMPILE_SECONDS = 2.0  # in the other process; this one then takes about as long
START_SECONDS = 120.0  # for Python to start, and for a tokenizer to be taken in: on a busy machine, too
MEMORY_BYTES = 2**30  # for the other process, beyond what it has when it is ready
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


class GrammarProcess(ChildProcess):
    """Compiles grammars in another process."""

    def __init__(self) -> None:
        environment = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"}  # so that what a grammar holds can be counted
        super().__init__(grammar_process.__file__, environment, new_session=True)
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
            self.make_ready(tokenizer, definition)
            try:
                answer = self.ask(message, COMPILE_SECONDS)
                break
            except TimeoutError:
                raise refusal(source, f"compiling it takes longer than {COMPILE_SECONDS:g} seconds") from None
            except EOFError:
                continue
        else:
            raise refusal(source, "compiling it takes too much memory, or it is nested too deeply")
        if "error" in answer:
            raise refusal(source, answer["error"])
        proof = Proof(answer["grammar"], answer["num_bytes"])
        if proof.num_bytes > MAX_GRAMMAR_BYTES:
            raise refusal(source, f"it holds {proof.num_bytes >> 20} MiB when compiled, of at most 256")
        return proof

    def make_ready(self, tokenizer: str, definition: dict[str, Any]) -> None:
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
        try:
            if self.start():
                self._known = []
        except OSError as error:
            raise EngineError(f"The process that compiles grammars cannot be started: {error}") from error
        if tokenizer in self._known:
            return
        try:
            answer = self.ask({"tokenizer": tokenizer, "definition": definition}, START_SECONDS)
        except (TimeoutError, EOFError):
            raise EngineError(
                "The process that compiles grammars did not start, or ended; see its Python with -v."
            ) from None
        if "error" in answer:
            raise InvalidRequestError(f"Structured output cannot use this tokenizer: {answer['error']}")
        self.limit_memory(MEMORY_BYTES)
        self._known = [*self._known, tokenizer][-grammar_process.MAX_TOKENIZERS :]


def refusal(source: GrammarSource, reason: Any) -> InvalidRequestError:
    """Returns what the caller of a grammar that does not compile is told.

    Args:
        source (`GrammarSource`):
            The grammar.
        reason (`Any`):
            Why.
    """
    text = source.text if len(source.text) <= 80 else source.text[:80] + "..."
    reason = str(reason)
    if source.kind == "regex":  # in a line of a grammar that the caller has not written
        reason = re.sub(r"^at \d+\(\d+\): ", "", reason)
    return InvalidRequestError(f"`structured_outputs.{source.kind}` {text!r} is refused: {reason}.")
