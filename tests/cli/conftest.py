"""A tiny checkpoint for what only needs something that runs."""

from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401
