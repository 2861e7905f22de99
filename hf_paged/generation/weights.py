"""Notices that a model computes other K/V than before: its weights were written or replaced, or an adapter switched."""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .adapters import CHANGES, is_adapter_layer, layer_state, taking_part, weights_by_adapter

if TYPE_CHECKING:
    from ..cache.block_manager import BlockManager

_epochs = itertools.count(1)
_version = operator.attrgetter("_version")
_optimizer_steps: dict[int, int] = {}  # by the address of a parameter


def _count_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Fused optimizers, such as the default one of Transformers' Trainer, write without counting versions up."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            address = _address(parameter)
            _optimizer_steps[address] = _optimizer_steps.get(address, 0) + 1


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_count_step)


class _Seen:
    """What some weights were at one moment. Keeps neither them nor their memory.

    Args:
        tensors (`Sequence[torch.Tensor]`):
            The weights.
    """

    def __init__(self, tensors: Sequence[torch.Tensor] = ()):
        self._signs = _signs(tensors)
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if _has_storage(tensor)]
        self._handles = [storage.cdata for storage in self._storages]

    def are_still(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether weights are these, and nobody has written to them.

        Objects and addresses come back when memory is used again, so the storages have to be there still.

        Args:
            tensors (`Sequence[torch.Tensor]`):
                The weights of now.
        """
        return self._signs == _signs(tensors) and not any(map(torch.UntypedStorage._expired, self._handles))


def _signs(tensors: Sequence[torch.Tensor]) -> list[list]:
    """The objects, addresses and versions of weights, and how often optimizers wrote to them."""
    try:
        objects, addresses, versions = (list(map(sign, tensors)) for sign in (id, torch.Tensor.data_ptr, _version))
    except RuntimeError:  # some quantized weights have no address, inference tensors no version
        objects, addresses, versions = (list(map(sign, tensors)) for sign in (id, _address, _version_of))
    return [objects, addresses, versions, list(map(_optimizer_steps.get, addresses)) if _optimizer_steps else []]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage() is not None
    except (NotImplementedError, RuntimeError):
        return False


class WeightWatch:
    """Compares a model's weights with what it saw last.

    A weight is known by its object, its memory, its version, which torch counts up at every write in place
    (`load_state_dict`, `copy_`), and the number of optimizer steps that it took part in. A change of the model's own
    weights makes all cached K/V worthless. Adapters come and go instead: the K/V under each state of them are kept
    apart by a key, and found again when that state comes back. The key stands for the weights that take part and their
    scales, not for an adapter's name.

    What it cannot see is for `Engine.weights_changed`: writes through `weight.data` other than PEFT's own, through
    arrays that share a weight's memory, and in place to inference tensors.

    Args:
        model (`PreTrainedModel`):
            The model. Neither it nor its weights are kept alive.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = weakref.ref(model)
        self.key: tuple = ()
        self._all = _Seen()
        self._own = _Seen()
        self._adapters: dict[str, tuple[_Seen, int]] = {}  # with a number that no other state of any weights has
        self._states: list[tuple] = []
        self._changes = (0, 0)
        _watch_optimizers()
        self._look(model)

    def guard(self, blocks: BlockManager) -> None:
        """Sees to it that only K/V of the weights of now are found; to be called before blocks are looked up.

        Requests that are running go on with the weights of now, over the K/V that they have, as Transformers' loop
        would. Nobody finds what they computed since the last look, nor what they compute from now on.

        Args:
            blocks (`BlockManager`):
                The blocks of the model's engine.
        """
        model = self._model()
        if model is None:
            return
        is_written, is_switched = self._look(model)
        if is_written:
            blocks.reset_prefix_cache()
        if is_switched or blocks.weights_key != self.key:
            blocks.switch_weights(self.key)
        else:
            blocks.confirm()

    def confirm(self, blocks: BlockManager) -> None:
        """Vouches for what a step has computed, if no adapter was switched meanwhile; to be called after each step.

        Weights that were written need no attention here: those of before never come back.

        Args:
            blocks (`BlockManager`):
                The blocks of the model's engine.
        """
        if CHANGES.num_switches == self._changes[1] and blocks.weights_key == self.key:
            blocks.confirm()

    def _look(self, model: torch.nn.Module) -> tuple[bool, bool]:
        """Returns whether the model's own weights were written or replaced, and whether any adapter was switched."""
        CHANGES.install()
        changes = CHANGES.num_writes, CHANGES.num_switches  # read first: a change meanwhile is seen by the next look
        tensors, layers = _weights_and_layers(model)
        states = [layer_state(layer) for layer in layers]
        before = self._changes
        if changes == before and states == self._states and self._all.are_still(tensors):
            return False, False
        weights = weights_by_adapter(model)
        own = weights.pop(None, [])
        is_written = changes[0] != before[0] or not self._own.are_still(own)
        self._changes, self._states, self._all, self._own = changes, states, _Seen(tensors), _Seen(own)
        self._adapters = {str(name): self._numbered(str(name), tensors) for name, tensors in weights.items()}
        self.key = self._make_key()
        return is_written, changes[1] != before[1]

    def _numbered(self, name: str, tensors: list[torch.Tensor]) -> tuple[_Seen, int]:
        known = self._adapters.get(name)
        return known if known and known[0].are_still(tensors) else (_Seen(tensors), next(_epochs))

    def _make_key(self) -> tuple:
        parts = [taking_part(state) for state in self._states]
        if not any(parts):
            return ()
        numbers = {name: number for name, (_, number) in self._adapters.items()}
        content = [[(numbers.get(name), scale) for name, scale in part] for part in parts]
        return (("adapters", hashlib.blake2b(repr(content).encode(), digest_size=16).digest()),)


def _weights_and_layers(model: torch.nn.Module) -> tuple[list[torch.Tensor], list[torch.nn.Module]]:
    """All parameters and saved buffers, and the layers of adapters, in one quick pass: every request asks for it."""
    tensors: list[torch.Tensor | None] = []
    layers = []
    modules: list[torch.nn.Module | None] = [model]
    while modules:
        module = modules.pop()
        if module is None:
            continue
        modules += module._modules.values()
        tensors += module._parameters.values()
        if module._buffers:
            transient = module._non_persistent_buffers_set
            tensors += [buffer for name, buffer in list(module._buffers.items()) if name not in transient]
        if is_adapter_layer(module):
            layers.append(module)
    return [tensor for tensor in tensors if tensor is not None], layers
