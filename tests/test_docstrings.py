"""Everything public says what it is, and names its arguments as the signature does."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import hf_paged

_OPTIONAL_PACKAGES = {"triton"}
_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Example|Examples|Note):$")
_ARGUMENT = re.compile(r"^(\w+) \((.+)\):$")


def _modules() -> list[str]:
    found = [info.name for info in pkgutil.walk_packages(hf_paged.__path__, "hf_paged.")]
    return ["hf_paged", *(name for name in found if not name.endswith(".__main__"))]


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name in _OPTIONAL_PACKAGES:
            pytest.skip(f"{error.name} is not installed")
        raise


def _documented_arguments(doc: str) -> list[str] | None:
    """Names under `Args:` in their order, or `None` without such a section. Complains about lines of another form."""
    lines = inspect.cleandoc(doc).splitlines()
    if "Args:" not in lines:
        return None
    names = []
    for line in lines[lines.index("Args:") + 1 :]:
        if _SECTION.match(line) or (line and not line.startswith(" ")):
            break
        if line.startswith("    ") and not line.startswith("     "):
            found = _ARGUMENT.match(line.strip())
            names.append(found.group(1) if found else f"<not of the form 'name (`type`):'> {line.strip()}")
    return names


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _method_parameters(method: Any) -> list[str]:
    names = _parameters(getattr(method, "__func__", method))
    return names if isinstance(method, staticmethod) else names[1:]  # without self or cls


def _generated_fields(cls: type) -> list[str] | None:
    """The arguments of an `__init__` that nobody wrote, or `None` if somebody did or it is inherited."""
    if dataclasses.is_dataclass(cls) and "__dataclass_fields__" in vars(cls) and "__init__" in vars(cls):
        return [field.name for field in dataclasses.fields(cls) if field.init and not field.name.startswith("_")]
    return list(cls._fields) if issubclass(cls, tuple) and hasattr(cls, "_fields") else None


def _constructor_arguments(cls: type) -> list[str] | None:
    """What the docstring of a class must name; `None` if its constructor is inherited."""
    generated = _generated_fields(cls)
    if generated is not None or "__init__" not in vars(cls) or getattr(cls, "_is_protocol", False):
        return generated
    return _method_parameters(vars(cls)["__init__"])


def _is_command(function: Any) -> bool:
    """Whether the command line shows the docstring as help, and documents each argument beside its annotation."""
    return function.__module__.startswith("hf_paged.cli.") and "Args:" not in (function.__doc__ or "")


def _complaints_about(name: str, doc: str | None, expected: list[str] | None, inherited: bool = False) -> Iterator[str]:
    """What is wrong with one docstring.

    `expected` are the arguments it has to name, `None` if it need not name any. `inherited`: a base class documents
    the same method, so that this docstring may be short, or missing.
    """
    if not doc or not doc.strip():
        if not inherited:
            yield f"{name} has no docstring"
        return
    documented = _documented_arguments(doc)
    if documented is None:
        if expected and not inherited:
            yield f"{name} does not document its arguments {expected}"
    elif documented != (expected or []):
        yield f"{name} documents {documented}, its signature has {expected or []}"


def _documented_by_a_base(cls: type, name: str) -> bool:
    return any(getattr(vars(base)[name], "__doc__", None) for base in cls.__mro__[1:-1] if name in vars(base))


def _complaints_about_class(cls: type) -> Iterator[str]:
    where = f"{cls.__module__}.{cls.__qualname__}"
    yield from _complaints_about(where, vars(cls).get("__doc__"), _constructor_arguments(cls))
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        inherited = _documented_by_a_base(cls, name)
        if isinstance(member, (property, functools.cached_property)):
            yield from _complaints_about(f"{where}.{name}", member.__doc__, None, inherited)
            continue
        function = inspect.unwrap(getattr(member, "__func__", member))
        if inspect.isfunction(function):
            yield from _complaints_about(f"{where}.{name}", function.__doc__, _method_parameters(member), inherited)


def _complaints(module: ModuleType) -> Iterator[str]:
    yield from _complaints_about(module.__name__, module.__doc__, None)
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(thing):
            yield from _complaints_about_class(thing)
        elif callable(thing) and inspect.isfunction(function := inspect.unwrap(thing)):
            expected = None if _is_command(function) else _parameters(function)
            yield from _complaints_about(f"{module.__name__}.{name}", function.__doc__, expected)


@pytest.mark.parametrize("name", _modules())
def test_everything_public_is_documented_and_arguments_are_named_as_in_the_signature(name):
    complaints = list(_complaints(_load(name)))
    assert not complaints, "\n".join(complaints)


class _Documented:
    """A class.

    Args:
        first (`int`):
            One.
    """

    def __init__(self, first: int):
        self.first = first

    def renamed(self, new: int) -> None:
        """Does something.

        Args:
            old (`int`):
                The name that it had.
        """

    def silent(self, value: int) -> None:
        """Does something else."""

    def bare(self) -> None:
        pass


class _Overriding(_Documented):
    """A subclass."""

    def silent(self, value: int) -> None:
        """See `_Documented.silent`."""


def test_wrong_missing_and_absent_arguments_are_noticed():
    complaints = "\n".join(_complaints_about_class(_Documented))
    assert "renamed documents ['old'], its signature has ['new']" in complaints
    assert "silent does not document its arguments ['value']" in complaints
    assert "bare has no docstring" in complaints
    assert len(complaints.splitlines()) == 3


def test_an_override_may_leave_the_arguments_to_its_base():
    assert not list(_complaints_about_class(_Overriding))
