"""The files of `hf-paged generate`: prompts in, answers out, of any length. Nothing here needs a model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ...errors import ConfigurationError, InvalidRequestError
from .prompt_lines import Format, PromptLine, parse_line, parse_lines
from .texts import to_json

_PIECE = 1 << 16
_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text"}
Lines = Iterable[PromptLine] | AsyncIterator[PromptLine]


# ---------------------------------------------------------------------- input


@contextlib.contextmanager
def opened_lines(source: str, form: Format | None) -> Iterator[Lines]:
    """Opens a file of prompts, or the standard input.

    Args:
        source (`str`):
            A file; `"-"` is the standard input.
        form (`str`, *optional*):
            `"text"` or `"jsonl"`; by default what the file's name says, or else its first line.

    Raises:
        ConfigurationError: If it cannot be read.
    """
    if source == "-":
        yield _from_descriptor(sys.stdin.fileno(), form)
        return
    with _readable(source) as file:
        yield parse_lines(file, form or _FORMATS.get(Path(source).suffix.lower()))


def check_source(source: str) -> None:
    """Refuses a file of prompts that cannot be read.

    Args:
        source (`str`):
            A file; `"-"` is the standard input.

    Raises:
        ConfigurationError: Says why.
    """
    if source != "-":
        _readable(source).close()


def count_lines(source: str) -> int | None:
    """Returns how many prompts a file holds, or `None` if only reading them tells.

    Args:
        source (`str`):
            A file; `"-"` is the standard input.

    Raises:
        ConfigurationError: If it cannot be read.
    """
    if source == "-":
        return None
    with _readable(source) as file:
        return sum(1 for line in file if line.strip()) if Path(source).is_file() else None


def _readable(source: str) -> IO[bytes]:
    try:
        return open(source, "rb")
    except OSError as error:
        raise ConfigurationError(f"`--input` {source!r} cannot be read: {error.strerror or error}.") from None


async def _from_descriptor(descriptor: int, form: Format | None) -> AsyncIterator[PromptLine]:
    """Lines of a pipe, which may come slowly: a thread waits for them, and answers are written meanwhile.

    The thread holds nothing that the process needs at its end, which does not wait for it.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[bytes | OSError | None]()
    room = threading.Semaphore(64)

    def put(thing: bytes | OSError | None) -> bool:
        room.acquire()
        try:
            loop.call_soon_threadsafe(arrived.put_nowait, thing)
        except RuntimeError:  # the loop is closed: nobody reads any more
            return False
        return True

    def read() -> None:
        try:
            for line in _lines_of(descriptor):
                if not put(line):
                    return
            put(None)
        except OSError as error:
            put(error)

    threading.Thread(target=read, daemon=True, name="hf_paged-input").start()
    number = 0
    while (thing := await arrived.get()) is not None:
        room.release()
        if isinstance(thing, OSError):
            raise InvalidRequestError(f"The standard input cannot be read further: {thing.strerror}.") from thing
        number += 1
        found = parse_line(number, thing, form)
        if found is not None:
            form, parsed = found
            yield parsed


def _lines_of(descriptor: int) -> Iterator[bytes]:
    rest: list[bytes] = []
    while piece := os.read(descriptor, _PIECE):
        first, *further = piece.split(b"\n")
        rest.append(first)
        for line in further:
            yield b"".join(rest)
            rest = [line]
    if any(rest):
        yield b"".join(rest)


# ---------------------------------------------------------------------- output


def check_output(target: str, source: str | None, overwrite: bool) -> None:
    """Refuses an output file that cannot be used, before a model is loaded.

    Args:
        target (`str`):
            A file; `"-"` is the standard output.
        source (`str`, *optional*):
            The input.
        overwrite (`bool`):
            Whether a file that is there may be replaced.

    Raises:
        ConfigurationError: Says why, and what to do.
    """
    if target == "-":
        return
    path = Path(target)
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(f"`--output` {target!r} is in no folder that exists.")
    if not path.exists():
        return
    if source not in (None, "-") and path.samefile(str(source)):
        raise ConfigurationError(f"`--output` is the input, {source!r}; name another file.")
    if path.is_file() and path.stat().st_size and not overwrite:
        raise ConfigurationError(f"`--output` {target!r} exists; name another, or give `--overwrite`.")


@contextlib.contextmanager
def opened_output(target: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Opens a file of entries: an object a line, each written whole and at once, whatever ends the process.

    Args:
        target (`str`):
            A file; `"-"` is the standard output.

    Raises:
        ConfigurationError: If it cannot be written.
    """
    if target == "-":
        yield lambda entry: write_out(to_json(entry) + "\n")
        return
    try:
        file = open(target, "wb", buffering=0)  # noqa: SIM115 - entered below
    except OSError as error:
        raise ConfigurationError(f"`--output` {target!r} cannot be written: {error.strerror or error}.") from None
    with file:
        yield lambda entry: _write_all(file, target, to_json(entry).encode() + b"\n")


def write_out(text: str) -> None:
    """Writes to the standard output at once.

    Args:
        text (`str`):
            What.

    Raises:
        ConfigurationError: If there is no room.
        BrokenPipeError: If its reader has gone.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _no_room("The standard output", error) from None


def _write_all(file: IO[bytes], target: str, data: bytes) -> None:
    try:
        while data:
            data = data[file.write(data) or 0 :]
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _no_room(f"`--output` {target!r}", error) from None


def _no_room(what: str, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"{what} cannot be written further: {error.strerror or error}; make room, or name another file."
    )
