"""PEFT adapters inside a model: which of their weights take part in a forward now, and that something was switched.

PEFT switches and merges adapters by methods of its layers, and merging writes weights in a way that no version counter
of torch shows. So these methods, and the few others that write like this, are made to count their calls.
"""

from __future__ import annotations

import collections
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_SWITCHES = {"set_adapter", "enable_adapters", "delete_adapter", "set_scale", "scale_layer", "unscale_layer"}
_WRITES = {"merge", "unmerge"}  # and the initialisations that take their part out of the model's weights: `*_init`


class ChangeCounter:
    """How often adapters were switched in this process, and how often PEFT wrote weights without leaving a trace."""

    def __init__(self) -> None:
        self.num_switches = 0
        self.num_writes = 0
        self._is_installed = False
        self._lock = threading.Lock()

    def install(self) -> None:
        """Makes PEFT's layers count, as soon as somebody has imported PEFT. What was before counts as a change."""
        layers, others = sys.modules.get("peft.tuners.tuners_utils"), sys.modules.get("peft.utils.other")
        classes = [getattr(layers, "BaseTunerLayer", None), getattr(others, "AuxiliaryTrainingWrapper", None)]
        if self._is_installed or None in classes:
            return
        with self._lock:
            if self._is_installed:
                return
            for cls in classes:
                self._watch_all(cls)
            self._watch_hotswap()
            self._is_installed = True
            self.num_switches += 1
            self.num_writes += 1

    def _watch_all(self, root: Any) -> None:
        counter, classes = self, [root]
        while classes:
            cls = classes.pop()
            classes += cls.__subclasses__()
            self._watch(cls)

        def init_subclass(cls: Any, **kwargs: Any) -> None:  # layers for other quantizations are imported when needed
            super(root, cls).__init_subclass__(**kwargs)
            counter._watch(cls)

        root.__init_subclass__ = classmethod(init_subclass)

    def _watch(self, cls: type) -> None:
        for name, method in list(vars(cls).items()):
            is_write = name in _WRITES or name.endswith("_init")
            if (is_write or name in _SWITCHES) and inspect.isfunction(method):
                setattr(cls, name, self._counting(method, is_write))

    def _watch_hotswap(self) -> None:
        from peft.utils import hotswap

        hotswap.hotswap_adapter_from_state_dict = self._counting(hotswap.hotswap_adapter_from_state_dict, True)

    def _counting(self, function: Callable, is_write: bool) -> Callable:
        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            # Before and after: who looks in between sees a change, and who looks later sees another one.
            self._count(is_write)
            try:
                return function(*args, **kwargs)
            finally:
                self._count(is_write)

        return counting

    def _count(self, is_write: bool) -> None:
        with self._lock:
            self.num_switches += 1
            self.num_writes += is_write


CHANGES = ChangeCounter()


def is_adapter_layer(module: torch.nn.Module) -> bool:
    """Returns whether a module is a layer of PEFT that holds adapters.

    Args:
        module (`torch.nn.Module`):
            Any module.
    """
    return "_active_adapter" in module.__dict__


def adapter_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the layers of PEFT that hold adapters.

    Args:
        model (`torch.nn.Module`):
            The model.
    """
    layers, modules = [], [model]  # `model.modules()` takes several times as long, and every call asks
    while modules:
        module = modules.pop()
        modules += [child for child in module._modules.values() if child is not None]
        if is_adapter_layer(module):
            layers.append(module)
    return layers


def layer_state(layer: Any) -> tuple:
    """Returns the settings of an adapter layer: active adapters, whether disabled, merged adapters, and all scales.

    Args:
        layer (`torch.nn.Module`):
            An adapter layer.
    """
    active, scaling = layer._active_adapter, getattr(layer, "scaling", None)
    return (
        (active,) if isinstance(active, str) else tuple(active),
        layer._disable_adapters,
        tuple(getattr(layer, "merged_adapters", ())),
        tuple((name, _scale(value)) for name, value in scaling.items()) if isinstance(scaling, dict) else (),
    )


def _scale(value: Any) -> Any:
    return (value.data_ptr(), value._version) if isinstance(value, torch.Tensor) else value


def taking_part(state: tuple) -> tuple[tuple[str, Any], ...]:
    """Returns the adapters of a layer that take part in its forward, in order, with their scales.

    Args:
        state (`tuple`):
            What `layer_state` returned.
    """
    active, is_disabled, merged, scales = state
    if is_disabled or merged:  # merged ones are in the model's own weights
        return ()
    return tuple((name, dict(scales).get(name)) for name in active)


def own_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns a module's own parameters and lasting buffers, by name.

    Args:
        module (`torch.nn.Module`):
            The module.
    """
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            yield name, parameter
    yield from lasting_buffers(module)


def lasting_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the buffers of a module that are saved with it, and the frequencies of rotary embeddings, by name.

    Others are scratch space, and so are the frequencies where Transformers itself writes them anew at some lengths.

    Args:
        module (`torch.nn.Module`):
            The module.
    """
    transient = module._non_persistent_buffers_set
    return [
        (name, buffer)
        for name, buffer in list(module._buffers.items())
        if buffer is not None and (name not in transient or (name.endswith("inv_freq") and _is_static(module)))
    ]


def _is_static(module: torch.nn.Module) -> bool:
    kinds = str(module.__dict__.get("rope_type"))  # of the layer types
    return "dynamic" not in kinds and "longrope" not in kinds


def weights_by_adapter(model: torch.nn.Module) -> dict[str | None, list[torch.Tensor]]:
    """Returns the weights of a model by the adapter that they belong to; the model's own under `None`.

        q_proj (lora.Linear)    base_layer.weight              None
                                lora_A["french"].weight        "french"
                                lora_B["french"].weight        "french"

    Args:
        model (`torch.nn.Module`):
            The model.
    """
    weights: dict[str | None, list[torch.Tensor]] = collections.defaultdict(list)
    todo: list[tuple[torch.nn.Module, str | None, bool]] = [(model, None, False)]
    while todo:
        module, owner, is_by_adapter = todo.pop()
        for name, tensor in own_weights(module):
            weights[name if is_by_adapter else owner].append(tensor)
        is_layer = is_adapter_layer(module)
        for name, child in list(module._modules.items()):
            if child is not None:
                # The containers in an adapter layer (`lora_A`, `modules_to_save`, ...) are keyed by adapter.
                todo.append((child, name if is_by_adapter else owner, is_layer and hasattr(type(child), "keys")))
    return weights


def replaced_by_adapter(model: Any) -> str | None:
    """Returns what PEFT does during a call of `generate` that the engine would not see, or `None`.

    Args:
        model (`PreTrainedModel`):
            The model.
    """
    prepare = model.prepare_inputs_for_generation
    if getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        return "the model's inputs are prepared by an adapter (soft prompts)"
    if any(module._forward_pre_hooks for module in adapter_layers(model)):
        return "the adapter layers have hooks (an adapter for each row)"
    return None
