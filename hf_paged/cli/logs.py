"""Where logs go: answers belong on stdout, everything else on stderr."""

from __future__ import annotations

import logging
import sys


def send_logs_to_stderr() -> None:
    """Shows hf_paged's own messages from INFO up on stderr."""
    logger = logging.getLogger("hf_paged")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def quiet_transformers() -> None:
    """Hides Transformers' progress bars where stderr is not a terminal."""
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
