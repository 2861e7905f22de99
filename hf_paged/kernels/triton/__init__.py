"""Attention in Triton, for GPUs; registered only where the optional package is installed."""

import importlib.util

from ..base import BACKENDS

if importlib.util.find_spec("triton") is None:
    BACKENDS.unavailable("triton", "the triton package is not installed; pip install 'hf-paged[triton]'")
else:
    from . import backend  # noqa: F401 - registers the backend; it imports triton at its first launch
