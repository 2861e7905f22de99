"""Watches one model call: which modules are called with what, and what attention is asked for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..native_step import Substitute, has_own_forward, substituted
from .plain import NotRecognizedError


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a module.

    Args:
        module (`torch.nn.Module`):
            The module.
        args (`tuple`):
            Its positional arguments.
        kwargs (`dict[str, Any]`):
            Its keyword arguments.
        parents (`tuple[Call, ...]`):
            The calls that it was made in, the innermost last.
        output (`Any`):
            What it returned.
    """

    module: torch.nn.Module
    args: tuple
    kwargs: dict[str, Any]
    parents: tuple[Call, ...]
    output: Any = None

    @property
    def tensor_output(self) -> torch.Tensor | None:
        """Returns the output, or its first part if it has several and the others are `None`."""
        return first_tensor(self.output)

    @property
    def input(self) -> torch.Tensor | None:
        """Returns the first tensor among the arguments."""
        return next((a for a in (*self.args, *self.kwargs.values()) if isinstance(a, torch.Tensor)), None)

    def is_within(self, other: Call) -> bool:
        """Returns whether this call was made in another one.

        Args:
            other (`Call`):
                The other call.
        """
        return any(parent is other for parent in self.parents)


@dataclasses.dataclass(eq=False)
class AttentionCall:
    """One call of attention over the paged cache.

    Args:
        parents (`tuple[Call, ...]`):
            The module calls that it was made in, the innermost, an attention module, last.
        layer_idx (`int`):
            The layer of the cache.
        query (`torch.Tensor`):
            `[tokens, num_query_heads, Dk]`.
        key (`torch.Tensor`):
            `[tokens, num_kv_heads, Dk]`.
        value (`torch.Tensor`):
            `[tokens, num_kv_heads, Dv]`.
        output (`torch.Tensor`):
            `[tokens, num_query_heads, Dv]`.
        request (`Any`):
            `scale`, `window`, `softcap` and `sinks`.
    """

    parents: tuple[Call, ...]
    layer_idx: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    request: Any


class Observer:
    """Collects the calls of modules, in the order in which they begin."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.attentions: list[AttentionCall] = []
        self._stack: tuple[Call, ...] = ()

    @contextlib.contextmanager
    def watching(self, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Sees calls by this thread while the context lasts. Modules whose forward somebody has set are left alone.

        Args:
            modules (`Iterable[torch.nn.Module]`):
                Which modules.
        """
        with substituted([Substitute(module, self._call) for module in modules if not has_own_forward(module)]):
            yield

    def attended(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        request: Any,
        output: torch.Tensor,
    ) -> None:
        """Takes note of an attention call.

        Args:
            layer_idx (`int`):
                The layer of the cache.
            query (`torch.Tensor`):
                `[tokens, num_query_heads, Dk]`.
            key (`torch.Tensor`):
                `[tokens, num_kv_heads, Dk]`.
            value (`torch.Tensor`):
                `[tokens, num_kv_heads, Dv]`.
            request (`Any`):
                What else was asked for.
            output (`torch.Tensor`):
                `[tokens, num_query_heads, Dv]`.
        """
        self.attentions.append(AttentionCall(self._stack, layer_idx, query, key, value, output, request))

    def _call(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        call = Call(module, args, kwargs, self._stack)
        self.calls.append(call)
        self._stack = (*self._stack, call)
        try:
            call.output = type(module).forward(module, *args, **kwargs)
        finally:
            self._stack = self._stack[:-1]
        return call.output


def first_tensor(output: Any) -> torch.Tensor | None:
    """Returns a module's output, or its first part if it has several and the others are `None`; else `None`.

    Args:
        output (`Any`):
            What a module returned.
    """
    if isinstance(output, torch.Tensor):
        return output
    if type(output) in (tuple, list) and output and isinstance(output[0], torch.Tensor):
        return output[0] if all(part is None for part in output[1:]) else None
    return None


def returning(output: Any) -> Callable[[torch.Tensor], Any]:
    """Returns a function that brings another tensor into the form of a module's output.

    Args:
        output (`Any`):
            What the module returned; `first_tensor` finds a tensor in it.
    """
    if isinstance(output, torch.Tensor):
        return lambda tensor: tensor
    kind, rest = type(output), output[1:]
    return lambda tensor: kind((tensor, *rest))


def same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Returns whether two tensors hold the same numbers, whatever their shapes.

    Args:
        first (`torch.Tensor`, *optional*):
            One.
        second (`torch.Tensor`, *optional*):
            The other.
    """
    if first is None or second is None:
        return False
    if first is second:
        return True
    return (
        first.numel() == second.numel()
        and first.dtype == second.dtype
        and first.device == second.device
        and torch.equal(first.reshape(-1), second.reshape(-1))
    )


def check_telling(*observed: Any) -> None:
    """Checks that tensors are not all zero, as with weights that will be loaded later: zeros fit every hypothesis.

    Args:
        observed (`Any`):
            Tensors.

    Raises:
        NotRecognizedError: If one is.
    """
    if not all(isinstance(tensor, torch.Tensor) and bool(tensor.any()) for tensor in observed):
        raise NotRecognizedError("what it computes is all zero, which tells nothing")


def first_with(
    calls: Iterable[Call], states: torch.Tensor | None, of: Callable[[Call], torch.Tensor | None]
) -> Iterator[Call]:
    """Yields the calls that have a tensor, first those that have its memory, then those that have its numbers.

    Args:
        calls (`Iterable[Call]`):
            The calls.
        states (`torch.Tensor`, *optional*):
            The tensor.
        of (`Callable[[Call], torch.Tensor | None]`):
            Which tensor of a call: its input, its output.
    """
    if states is None:
        return
    fitting = [call for call in calls if same(of(call), states)]
    yield from sorted(fitting, key=lambda call: of(call).data_ptr() != states.data_ptr())  # type: ignore[union-attr]


def input_of(call: Call) -> torch.Tensor | None:
    """Returns what a call was given.

    Args:
        call (`Call`):
            The call.
    """
    return call.input


def output_of(call: Call) -> torch.Tensor | None:
    """Returns what a call returned.

    Args:
        call (`Call`):
            The call.
    """
    return call.tensor_output


_TOLERANCE = {torch.float32: 1e-4}
_TOLERANCE_HALF = 3e-2


def tolerance(dtype: torch.dtype) -> float:
    """Returns the relative error, in the Frobenius norm, up to which two ways to compute something are the same.

    Args:
        dtype (`torch.dtype`):
            Of the model.
    """
    return _TOLERANCE.get(dtype, _TOLERANCE_HALF)


def relative_error(result: torch.Tensor, expected: torch.Tensor, base: torch.Tensor | None = None) -> float:
    """Returns the relative error of a tensor in the Frobenius norm; infinite where the shapes differ.

    Args:
        result (`torch.Tensor`):
            What was computed.
        expected (`torch.Tensor`):
            What is right.
        base (`torch.Tensor`, *optional*):
            What both were added to: the error is then relative to what was added. What rounding the sum to its dtype
            may make is no error, since a few numbers of a residual are often a thousand times as large as the rest.
    """
    if result.numel() != expected.numel():
        return float("inf")
    right = expected.double().reshape(-1)
    difference, size = result.double().reshape(-1) - right, right
    if base is not None:
        size = right - base.double().reshape(-1)
        difference = (difference.abs() - torch.finfo(expected.dtype).eps * right.abs()).clamp_min(0)
    error = float(difference.norm() / size.norm()) if size.norm() > 0 else float(difference.norm())
    return error if error == error else float("inf")


def close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns whether two tensors are the same up to the tolerance of their dtype.

    Args:
        result (`torch.Tensor`):
            What was computed.
        expected (`torch.Tensor`):
            What is right.
    """
    return relative_error(result, expected) <= tolerance(expected.dtype)
