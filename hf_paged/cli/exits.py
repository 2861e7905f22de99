"""The exit codes of `hf-paged`: all of them, for every verb."""

from __future__ import annotations

DONE = 0
FAILED = 1  # it could not be done, or a part of it failed: a line of a file, an answer of several
WRONG_USAGE = 2  # a flag, an argument, a key of a --config file or a variable; nothing was begun
ENGINE_DIED = 3  # `serve`: the engine ended by an error
INTERRUPTED = 130  # Ctrl-C; what was finished before is kept
READER_GONE = 141  # whoever read the output went away, as `head` does
TERMINATED = 143  # SIGTERM (`serve` drains instead, and ends with 0)

MEANINGS = {
    DONE: "done",
    FAILED: "it could not be done, or a part of it failed",
    WRONG_USAGE: "wrong usage; nothing was begun",
    ENGINE_DIED: "`serve`: the engine died",
    INTERRUPTED: "ended by Ctrl-C",
    READER_GONE: "the reader of the output went away",
    TERMINATED: "ended by SIGTERM",
}
