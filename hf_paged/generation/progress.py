"""A progress bar, or nothing at all: a tqdm bar that is switched off still starts a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm


@contextlib.contextmanager
def progress(show: bool, total: int, description: str, unit: str) -> Iterator[Callable[[], object]]:
    """Shows a progress bar meanwhile.

    Args:
        show (`bool`):
            Whether to show one.
        total (`int`):
            How many things there are to do.
        description (`str`):
            What is being done.
        unit (`str`):
            What is counted.

    Yields:
        `Callable[[], object]`: To be called after each thing that was done.
    """
    if not show:
        yield lambda: None
        return
    with tqdm(total=total, desc=description, unit=unit) as bar:
        yield bar.update
