"""Attention over K/V blocks: one interface, one file or folder per backend.

Importing this package registers every backend that can run here; it imports torch, and no optional package.
"""

from .base import BACKENDS, AttentionSpec, Capabilities, PagedAttentionBackend
from .metadata import PagedAttentionMetadata
from .selection import BackendDescription, describe_backends, select_backend

__all__ = [
    "BACKENDS",
    "AttentionSpec",
    "BackendDescription",
    "Capabilities",
    "PagedAttentionBackend",
    "PagedAttentionMetadata",
    "describe_backends",
    "select_backend",
]
