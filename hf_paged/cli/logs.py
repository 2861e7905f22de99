"""Where logs go: answers belong on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

# What takes long, once, is told even where only answers are wanted: a download, a conversion, a compilation.
_WORTH_TELLING = ("hf_paged.tools.packaged_model", "hf_paged.kernels.cpu.library_cache")
_PATIENCE = 2.0  # seconds until somebody is told what is being waited for


class _Stderr(logging.StreamHandler):
    """Writes to what stderr is at that moment: a spinner takes its place meanwhile."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        pass


def send_logs_to_stderr() -> None:
    """Shows hf_paged's own messages from INFO up on stderr."""
    logger = logging.getLogger("hf_paged")
    if not logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def only_warnings() -> None:
    """Leaves of hf_paged's messages the warnings, and what takes long."""
    logging.getLogger("hf_paged").setLevel(logging.WARNING)
    for name in _WORTH_TELLING:
        logging.getLogger(name).setLevel(logging.INFO)


def quiet_transformers() -> None:
    """Hides Transformers' progress bars where stderr is not a terminal."""
    if not sys.stderr.isatty():
        hide_bars()


def hide_bars() -> None:
    """Hides Transformers' progress bars."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Shows, after two seconds and on a terminal, what is being waited for.

    Args:
        what (`str`):
            Such as "Loading SmolLM2".
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=4) as progress:
        task = progress.add_task(what, total=None, visible=False)
        timer = threading.Timer(_PATIENCE, progress.update, (task,), {"visible": True})
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
