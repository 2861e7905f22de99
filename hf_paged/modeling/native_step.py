"""Puts other forwards into modules for the length of one model call, seen by the thread of that call alone.

    module.__dict__["forward"]      while a call runs: a `Substitute`; else nothing
    Module.__call__                 takes the instance's forward before the class's

Other threads that meet a substitute get the class's forward, and so do copies and pickles that they make meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def plain_forward(module: torch.nn.Module) -> Any:
    """Returns the forward that a module has by its class.

    Args:
        module (`torch.nn.Module`):
            Any module.
    """
    return types.MethodType(type(module).forward, module)


def has_own_forward(module: torch.nn.Module) -> bool:
    """Returns whether somebody has set another forward on a module than its class has.

    Args:
        module (`torch.nn.Module`):
            Any module.
    """
    forward = module.__dict__.get("forward")
    return forward is not None and not is_plain_forward(module, forward)


def is_plain_forward(module: torch.nn.Module, forward: Any) -> bool:
    """Returns whether a forward that lies on a module is that of its class, as in a copy made during a step.

    Args:
        module (`torch.nn.Module`):
            The module.
        forward (`Any`):
            What lies there.
    """
    return getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module


class Substitute:
    """Stands in for the forward of one module.

    Args:
        module (`torch.nn.Module`):
            The module.
        run (`Callable[[torch.nn.Module, tuple, dict], Any]`):
            Gets the module and the arguments of a call.
    """

    __slots__ = ("module", "run", "thread")

    def __init__(self, module: torch.nn.Module, run: Callable[[torch.nn.Module, tuple, dict], Any]):
        self.module = module
        self.run = run
        self.thread = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == self.thread:
            return self.run(self.module, args, kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return plain_forward(memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple:
        return plain_forward, (self.module,)


@contextlib.contextmanager
def substituted(substitutes: Sequence[Substitute]) -> Iterator[None]:
    """Calls of this thread meet substitutes while the context lasts.

    Args:
        substitutes (`Sequence[Substitute]`):
            At most one for each module; none of them is in use.
    """
    thread = threading.get_ident()
    placed = 0
    try:
        for substitute in substitutes:
            substitute.thread = thread
            placed += 1
            substitute.module.__dict__["forward"] = substitute
        yield
    finally:
        for substitute in substitutes[:placed]:
            substitute.thread = 0
            if substitute.module.__dict__.get("forward") is substitute:  # else somebody else's by now
                del substitute.module.__dict__["forward"]
