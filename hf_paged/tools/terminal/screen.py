"""What a person sees and types: plain text when piped, a little help for the eye on a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .files import write_out
from .texts import printable

_MOST_LINES = 1000  # of the history
_BLOCK = '"""'


class Screen:
    """Standard input, output and error of a program that people talk with.

    `interactive` is set where both input and output are terminals; then there are prompts, a history and notes.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._out_is_terminal = sys.stdout.isatty()
        self._at_line_start = True
        self._block: list[str] | None = None

    # ------------------------------------------------------------------ output

    def write(self, text: str) -> None:
        """Writes a piece of an answer at once.

        Args:
            text (`str`):
                The piece.
        """
        if self._out_is_terminal:
            text = printable(text)
        write_out(text)
        self._at_line_start = text.endswith("\n")

    def end_answer(self) -> None:
        """Ends the line, unless it has ended."""
        if not self._at_line_start:
            self.write("\n")

    def note(self, text: str) -> None:
        """Shows something about the program, dim; nothing where nobody sits before a terminal.

        Args:
            text (`str`):
                A line, or several.
        """
        if self.interactive:
            self._say(text, "dim")

    def tell(self, text: str) -> None:
        """Shows something that was asked for, on stderr.

        Args:
            text (`str`):
                A line, or several.
        """
        self._say(text, "dim" if self.interactive else "")

    def complain(self, text: str) -> None:
        """Shows what went wrong, on stderr.

        Args:
            text (`str`):
                A sentence.
        """
        self._say(text if self.interactive else f"hf-paged: {text}", "red" if self.interactive else "")

    def _say(self, text: str, style: str) -> None:
        from rich.console import Console

        text = printable(text)  # names, messages and errors of a server or a file, too
        self.end_answer()
        if not sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)
            return
        Console(stderr=True).print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    # ------------------------------------------------------------------ input

    def read(self) -> str | None:
        """Returns what is said next, or `None` at the end of the input.

        On a terminal, a line that ends with a backslash goes on in the next one, and lines between two `\"\"\"` belong
        together. When piped, each line is a message as it stands.

        Raises:
            KeyboardInterrupt: On Ctrl-C before anything was typed; what was typed is dropped by the first one.
        """
        if not self.interactive:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        while True:
            try:
                return self._typed()
            except KeyboardInterrupt:
                print(file=sys.stderr)
                if self._block is None and not _half_typed():
                    raise
                self._block = None

    def _typed(self) -> str | None:
        self._block = None
        line = self._line("> ")
        if line is None:
            return None
        if line.lstrip().startswith(_BLOCK):
            return self._until_block_ends(line.lstrip().removeprefix(_BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            self._block = lines
            lines[-1] = lines[-1][:-1]
            further = self._line(". ")
            if further is None:
                break
            lines.append(further)
        return "\n".join(lines)

    def _until_block_ends(self, line: str) -> str:
        lines = [] if not line else [line]
        self._block = lines
        while not (lines and lines[-1].rstrip().endswith(_BLOCK)):
            further = self._line(". ")
            if further is None:
                return "\n".join(lines)
            lines.append(further)
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        try:
            return input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return None


def _half_typed() -> bool:
    """Whether something stood in the line when Ctrl-C came."""
    readline = sys.modules.get("readline")
    return bool(readline and readline.get_line_buffer())


@contextlib.contextmanager
def remembered_lines(words: Sequence[str]) -> Iterator[str | None]:
    """Gives `input` a history that outlives the process, and completes words that begin a line with Tab.

    Args:
        words (`Sequence[str]`):
            What Tab completes.

    Yields:
        `str`, *optional*: Why the history is not kept, if it is not.
    """
    try:
        import readline
    except ImportError:
        yield "this Python has no readline"
        return
    path, problem = state_folder() / "chat_history", None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    except OSError as error:
        problem = f"{path}: {error.strerror or error}"
    readline.set_history_length(_MOST_LINES)
    readline.set_completer_delims("")
    readline.set_completer(_completer(words))
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    known = readline.get_current_history_length()
    try:
        yield problem
    finally:
        if problem is None:
            with contextlib.suppress(OSError):
                _keep(readline, path, readline.get_current_history_length() - known)


def _keep(readline: Any, path: Path, count: int) -> None:
    """Appends, so that two chats at the same time keep the lines of both."""
    if hasattr(readline, "append_history_file"):
        readline.append_history_file(max(0, count), path)
    else:
        readline.write_history_file(path)


def _completer(words: Sequence[str]) -> Any:
    def complete(text: str, state: int) -> str | None:
        found = [word for word in words if text and word.startswith(text)]
        return found[state] if state < len(found) else None

    return complete


def state_folder() -> Path:
    """Returns where what people typed is remembered: `$XDG_STATE_HOME/hf_paged`, or `~/.local/state/hf_paged`."""
    xdg = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says that relative paths are to be ignored.
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".local" / "state") / "hf_paged"
