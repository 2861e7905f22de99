"""A model's decoder layers, called one after the other on many texts, with only one layer's inputs in memory.

one dense forward      shows with which arguments each layer is called (masks and rotary angles may differ between
                       layers), and that a layer's output is the next one's input
first layer's inputs   of all texts, by forwards that end there
layer by layer         states = layer(states, the layer's own arguments)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import NotSupportedError
from ...modeling.patterns.observation import first_tensor

States = list[torch.Tensor]


_SHORT = 8  # tokens


class _Reached(Exception):
    """The forward has come to the layer that it was for."""


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """How the model calls a layer.

    Args:
        args (`tuple`):
            Positional arguments; the one at `place` is put in anew.
        kwargs (`dict[str, Any]`):
            Keyword arguments likewise.
        place (`int` or `str`):
            Where the states are among them.
    """

    args: tuple
    kwargs: dict[str, Any]
    place: int | str

    def run(self, layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """Calls a layer.

        Args:
            layer (`torch.nn.Module`):
                The layer.
            states (`torch.Tensor`):
                `[1, tokens, hidden_size]`.

        Returns:
            `torch.Tensor`: The next layer's states.
        """
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(self.place, int):
            args[self.place] = states
        else:
            kwargs[self.place] = states
        output = layer(*args, **kwargs)
        return output if isinstance(output, torch.Tensor) else output[0]


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Returns a model's decoder layers and their name.

    Args:
        model (`PreTrainedModel`):
            The model.

    Raises:
        NotSupportedError: If it has no list of as many modules as its configuration says there are layers.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers  # type: ignore[union-attr,operator]
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise NotSupportedError(
        f"{type(model).__name__} has no list of {count} layers, which calibration takes one after the other; `rtn` "
        "needs none."
    )


def observe_calls(model: nn.Module, layers: nn.ModuleList, windows: Sequence[torch.Tensor]) -> list[LayerCall]:
    """Returns how the model calls its layers.

    Args:
        model (`PreTrainedModel`):
            The model.
        layers (`torch.nn.ModuleList`):
            Its layers.
        windows (`Sequence[torch.Tensor]`):
            Token ids, `[1, tokens]` each, all of one length.

    Raises:
        NotSupportedError: If something happens between layers, or a layer is told more of a text than its states.
    """
    short = windows[0][:, :_SHORT]
    one, other = (_calls_of(model, layers, window) for window in (short, short.flip(1)))
    for index, calls in enumerate(zip(one, other, strict=True)):
        if not _equal(*((call.args, call.kwargs) for call in calls)):
            raise NotSupportedError(
                f"Layer {index} of {type(model).__name__} is told more of a text than the states of the layer before, "
                "so that layers cannot be called one after the other; `rtn` needs no calibration."
            )
    return _calls_of(model, layers, windows[0])


def _calls_of(model: nn.Module, layers: nn.ModuleList, window: torch.Tensor) -> list[LayerCall]:
    calls: list[LayerCall] = []
    outputs: States = []

    def before(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            place: int | str = 0 if args else "hidden_states"
            states = args[0] if args else kwargs["hidden_states"]
            if len(calls) != index or (index and states.data_ptr() != outputs[-1].data_ptr()):
                raise NotSupportedError(
                    f"{type(model).__name__} does something else before its layer {index}, so that layers cannot be "
                    "called one after the other; `rtn` needs no calibration."
                )
            rest = (None, *args[1:]) if args else ()
            calls.append(LayerCall(rest, {key: value for key, value in kwargs.items() if key != place}, place))
            if index == len(layers) - 1:
                raise _Reached

        return hook

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        states = first_tensor(output)
        outputs.append(states if states is not None else output[0])

    with contextlib.ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.callback(layer.register_forward_pre_hook(before(index), with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(after).remove)
        with contextlib.suppress(_Reached):
            model(window, use_cache=False)
    return calls


def first_states(model: nn.Module, layers: nn.ModuleList, windows: Sequence[torch.Tensor]) -> States:
    """Returns what the first layer is given, in float32.

    Args:
        model (`PreTrainedModel`):
            The model.
        layers (`torch.nn.ModuleList`):
            Its layers.
        windows (`Sequence[torch.Tensor]`):
            Token ids, `[1, tokens]` each.
    """
    states: States = []

    def stop(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        states.append((args[0] if args else kwargs["hidden_states"]).float())
        raise _Reached

    hook = layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        for window in windows:
            with contextlib.suppress(_Reached):
                model(window, use_cache=False)
    finally:
        hook.remove()
    return states


@contextlib.contextmanager
def in_float32(layer: nn.Module) -> Iterator[dict[str, torch.dtype]]:
    """Computes with a layer in float32; what was of another dtype before is again afterwards.

    Args:
        layer (`torch.nn.Module`):
            The layer.

    Yields:
        `dict[str, torch.dtype]`: The dtypes of its tensors before, by their names.
    """
    before = {name: tensor.dtype for name, tensor in _tensors(layer).items()}
    layer.float()
    try:
        yield before
    finally:
        for name, tensor in _tensors(layer).items():
            tensor.data = tensor.data.to(before.get(name, tensor.dtype))


def call_in_float32(call: LayerCall) -> LayerCall:
    """Returns a call with all its tensors of floating point in float32.

    Args:
        call (`LayerCall`):
            As the model makes it.
    """
    return dataclasses.replace(call, args=_mapped(call.args), kwargs=_mapped(call.kwargs))


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _mapped(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_mapped(part) for part in value)
    if type(value) is dict:
        return {key: _mapped(part) for key, part in value.items()}
    return value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)
    if type(one) in (tuple, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (int, float, str)):
        return one == other
    return one is other or type(one) is type(other)
