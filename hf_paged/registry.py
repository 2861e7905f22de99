"""A small named registry: one obvious place for every addition, and errors that list the choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from .errors import ConfigurationError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one kind of thing (attention backends, scheduling policies, ...).

    Args:
        kind (`str`):
            What the entries are, in the singular, used in messages ("attention backend").
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._unavailable: dict[str, str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Returns a decorator that registers its argument under a name.

        Args:
            name (`str`):
                The name that users write.

        Raises:
            ConfigurationError: If the name is taken.
        """

        def decorator(entry: T) -> T:
            if name in self._entries:
                raise ConfigurationError(f"{self.kind} {name!r} is registered twice; choose another name.")
            self._entries[name] = entry
            self._unavailable.pop(name, None)
            return entry

        return decorator

    def unavailable(self, name: str, why: str) -> None:
        """Records that an entry exists but cannot be used here, so that errors can say why.

        Args:
            name (`str`):
                The name that users write.
            why (`str`):
                The reason, in a few words.
        """
        self._unavailable[name] = why

    def get(self, name: str) -> T:
        """Returns the entry of that name.

        Args:
            name (`str`):
                The name that users write.

        Raises:
            UnknownNameError: If there is none; lists the available and the unavailable names.
        """
        if name in self._entries:
            return self._entries[name]
        missing = ", ".join(f"{n} ({why})" for n, why in self._unavailable.items())
        raise UnknownNameError(
            f"Unknown {self.kind} {name!r}; available: {', '.join(self._entries) or 'none'}"
            + (f"; unavailable: {missing}." if missing else ".")
        )

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def items(self):
        """Returns the (name, entry) pairs in the order of their registration."""
        return self._entries.items()

    def unavailable_items(self):
        """Returns the (name, reason) pairs of the entries that cannot be used here."""
        return self._unavailable.items()
