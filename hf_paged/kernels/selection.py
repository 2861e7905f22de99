"""Which attention backend serves a model: the one asked for by name, or the first that fits."""

from __future__ import annotations

import dataclasses

from ..errors import UnsupportedAttentionError
from . import reference, torch_sdpa, triton  # noqa: F401 - each registers its backend, or why there is none
from .base import BACKENDS, AttentionSpec, PagedAttentionBackend
from .cpu import backend as native_cpu  # noqa: F401 - as the others


@dataclasses.dataclass(frozen=True)
class BackendDescription:
    """Whether a backend can serve a model.

    Args:
        name (`str`):
            The name that users write.
        fits (`bool`):
            Whether it can be chosen by name.
        reason (`str`):
            Why it cannot; or, if it can, why it would not be chosen on its own; or empty.
    """

    name: str
    fits: bool
    reason: str = ""


def select_backend(spec: AttentionSpec, name: str | None = None) -> PagedAttentionBackend:
    """Returns a backend that has everything a model needs.

    Args:
        spec (`AttentionSpec`):
            What the model's layers need.
        name (`str`, *optional*):
            The backend asked for; by default, of those that fit, the one of highest priority.

    Raises:
        UnknownNameError: If no backend has that name; lists those that are available and those that are not.
        UnsupportedAttentionError: If the backend asked for, or every one, lacks something; says what each lacks.
    """
    if name is not None:
        backend = BACKENDS.get(name)
        reason = _why_not(backend, spec)
        if reason is not None:
            raise UnsupportedAttentionError(
                f"attention backend {name!r} cannot serve this model: it {reason}. "
                f"Backends that can: {', '.join(_fitting(spec)) or 'none'}."
            )
        return backend(spec)
    rejected = []
    for candidate, backend in _by_priority():
        reason = _why_not(backend, spec) or _why_not_automatic(backend, spec)
        if reason is None:
            return backend(spec)
        rejected.append(f"{candidate} ({reason})")
    rejected += [f"{other} ({why})" for other, why in BACKENDS.unavailable_items()]
    raise UnsupportedAttentionError(f"no attention backend can serve this model: {'; '.join(rejected)}.")


def describe_backends(spec: AttentionSpec) -> list[BackendDescription]:
    """Returns what `select_backend` thinks of each backend, in the order in which it tries them.

    Args:
        spec (`AttentionSpec`):
            What the model's layers need.
    """
    descriptions = []
    for name, backend in _by_priority():
        reason = _why_not(backend, spec)
        descriptions.append(BackendDescription(name, reason is None, reason or _why_not_automatic(backend, spec) or ""))
    return descriptions + [BackendDescription(name, False, why) for name, why in BACKENDS.unavailable_items()]


def _by_priority() -> list[tuple[str, type[PagedAttentionBackend]]]:
    return sorted(BACKENDS.items(), key=lambda item: -item[1].priority)


def _fitting(spec: AttentionSpec) -> list[str]:
    return [name for name, backend in _by_priority() if _why_not(backend, spec) is None]


def _why_not(backend: type[PagedAttentionBackend], spec: AttentionSpec) -> str | None:
    # In this order: whether a backend is available may take long to find out (the native one is built at first use).
    return backend.capabilities.missing(spec) or backend.unavailable_reason()


def _why_not_automatic(backend: type[PagedAttentionBackend], spec: AttentionSpec) -> str | None:
    if backend.automatic_devices is None or spec.device_type in backend.automatic_devices:
        return None
    return f"is chosen on {spec.device_type} only when asked for by name"
