"""The MLP: two or three linears around an activation, gated or not, gate and up in one linear or in two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .observation import Call, check_telling, close, same
from .plain import NotRecognizedError
from .recipe import Activation, Rows, TensorSource, View
from .reference import ACTIVATIONS

# Tried where no activation is held, as it stands in the forward itself; rounding hides no other one behind these.
_UNMISTAKABLE = [Activation.SILU, Activation.RELU, Activation.RELU2]


@dataclasses.dataclass(frozen=True)
class MLP:
    """What an MLP is made of.

    Args:
        sources (`dict[str, TensorSource]`):
            Where its tensors are.
        activation (`Activation`):
            Its activation.
        input (`torch.Tensor`):
            What it was given in the observed call.
        output (`torch.Tensor`):
            What it returned.
    """

    sources: dict[str, TensorSource]
    activation: Activation
    input: torch.Tensor
    output: torch.Tensor


def find_mlp(linears: Sequence[Call], holders: Sequence[torch.nn.Module]) -> MLP:
    """Finds the MLP that some linears make up.

    Args:
        linears (`Sequence[Call]`):
            The observed calls of all linears that may belong to it.
        holders (`Sequence[torch.nn.Module]`):
            The modules that may hold its activation.

    Raises:
        NotRecognizedError: If they make up something else.
    """
    if len(linears) not in (2, 3):
        raise NotRecognizedError(f"{len(linears)} linears instead of 2 or 3 outside of attention")
    *firsts, down = linears
    if not all(same(first.input, firsts[0].input) for first in firsts):
        raise NotRecognizedError("the first linears of the MLP are given different tensors")
    activations = [kind for holder in holders for kind in activations_of(holder)] or _UNMISTAKABLE
    check_telling(firsts[0].input, down.input, down.output)
    middle = down.input
    for activation in dict.fromkeys(activations):
        for states, sources in _hypotheses(firsts, ACTIVATIONS[activation]):
            if middle is not None and states.numel() == middle.numel() and close(states, middle):
                sources |= linear_sources(down.module, "down")
                return MLP(sources, activation, firsts[0].input, down.output)  # type: ignore[arg-type]
    raise NotRecognizedError("the linears of the MLP are not joined by a known act(gate) * up or act(up)")


def _hypotheses(
    firsts: Sequence[Call], activation: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[tuple[torch.Tensor, dict[str, TensorSource]]]:
    """What the last linear would be given, and where gate and up would lie."""
    if len(firsts) == 2:
        if firsts[0].output.shape != firsts[1].output.shape:
            return
        for gate, up in (firsts, firsts[::-1]):
            yield (
                activation(gate.output) * up.output,
                linear_sources(gate.module, "gate") | linear_sources(up.module, "up"),
            )
        return
    (first,) = firsts
    yield activation(first.output), linear_sources(first.module, "up")
    width = first.output.shape[-1]
    if width % 2 == 0:
        parts = first.output.chunk(2, dim=-1)
        halves = list(zip(parts, (Rows(0, width // 2), Rows(width // 2, width)), strict=True))
        for (gate, gate_rows), (up, up_rows) in (halves, halves[::-1]):
            sources = linear_sources(first.module, "gate", gate_rows) | linear_sources(first.module, "up", up_rows)
            yield activation(gate) * up, sources


def linear_sources(linear: Any, name: str, view: View | None = None) -> dict[str, TensorSource]:
    """Returns where the tensors of a linear layer, or of a part of one, are.

    Args:
        linear (`torch.nn.Linear`):
            The layer.
        name (`str`):
            Its role, such as `"down"`.
        view (`View`, *optional*):
            Takes the part.
    """
    parameters = linear._parameters
    return {
        f"{name}_{part}": TensorSource(parameters, part, view)
        for part in ("weight", "bias")
        if parameters.get(part) is not None
    }


def activations_of(holder: torch.nn.Module) -> list[Activation]:
    """Returns the activations that a module holds, found by what they compute.

    Args:
        holder (`torch.nn.Module`):
            An MLP, or a layer that holds the parts of one.
    """
    held = [value for name, value in vars(holder).items() if callable(value) and not name.startswith("_")]
    held += [
        child for child in holder._modules.values() if child is not None and next(child.parameters(), None) is None
    ]
    return [kind for kind in map(activation_kind, held) if kind is not None]


def activation_kind(function: Any) -> Activation | None:
    """Returns which activation a function is, or `None` if it is none that is known.

    Args:
        function (`Any`):
            A function or module of one tensor.
    """
    kind_of_x: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    outer = torch.tensor([-1e4, -100.0, -20.0, 20.0, 100.0, 1e4], **kind_of_x)  # clamps show
    x = torch.cat([torch.linspace(-9, 9, 361, **kind_of_x), outer])
    try:
        result = function(x)
    except Exception:
        return None
    if not isinstance(result, torch.Tensor) or result.shape != x.shape:
        return None
    for kind, known in ACTIVATIONS.items():
        if kind != Activation.IDENTITY and torch.allclose(result, known(x), rtol=1e-5, atol=1e-6):
            return kind
    return None
