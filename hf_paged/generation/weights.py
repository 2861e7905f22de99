"""Notices that a model computes other K/V than before: by other weights, another adapter, or hooks in its forward."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from .adapters import CHANGES, is_adapter_layer, lasting_buffers, layer_state, taking_part, weights_by_adapter
from .native_watch import StructureWatch
from .seen_tensors import SeenTensors, watch_optimizers

if TYPE_CHECKING:
    from ..cache.block_manager import BlockManager

_epochs = itertools.count(1)
_CAPTURING = "transformers.utils.output_capturing"


class WeightWatch:
    """Compares a model's weights with what it saw last.

    A weight is known by its object, its memory, its version, which torch counts up at every write in place
    (`load_state_dict`, `copy_`), and the number of optimizer steps that it took part in. A change of the model's own
    weights makes all cached K/V worthless. Adapters come and go instead: the K/V under each state of them are kept
    apart by a key, and found again when that state comes back. The key stands for the weights that take part and their
    scales, not for an adapter's name. Forward hooks, forward pre-hooks and a `forward` that was set on a module count
    as its own weights: adding or removing one (a steering vector) is a write. So do, in a model without adapters, plain
    attributes of modules and of the configuration (`scaling`), and modules and forwards that are replaced.

    What it cannot see is for `Engine.weights_changed`: writes through `weight.data` other than PEFT's own, through
    arrays that share a weight's memory, and in place to inference tensors; what a hook reads; methods other than
    `forward` that are replaced in a class; attributes beside adapters.

    Args:
        model (`PreTrainedModel`):
            The model, which is not kept alive; its modules are until `clear`.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = weakref.ref(model)
        self.key: tuple = ()
        self._all = SeenTensors()
        self._own = SeenTensors()
        self._adapters: dict[str, tuple[SeenTensors, int]] = {}  # with a number that no other state of any weights has
        self._states: list[tuple] = []
        self._changes = (0, 0)
        self._patches: tuple[list, list] = ([], [])
        self._num_handles = 0  # how many hooks there were in this process, of whatever model
        self._structure: StructureWatch | None = None
        watch_optimizers()
        self._look(model)

    def clear(self) -> None:
        """Lets go of the model's modules."""
        self._structure = None

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
        """Vouches for what a step has computed; to be called after each step.

        Not if an adapter was switched meanwhile, or a hook made: either may be gone before the next look.

        Weights that were written need no attention here: those of before never come back.

        Args:
            blocks (`BlockManager`):
                The blocks of the model's engine.
        """
        is_same = CHANGES.num_switches == self._changes[1] and RemovableHandle.next_id == self._num_handles
        if is_same and blocks.weights_key == self.key:
            blocks.confirm()

    def _look(self, model: torch.nn.Module) -> tuple[bool, bool]:
        """Returns whether the model's own part was changed, and whether an adapter or a hook came, and maybe went."""
        CHANGES.install()
        changes = CHANGES.num_writes, CHANGES.num_switches  # read first: a change meanwhile is seen by the next look
        num_handles, num_handles_before = RemovableHandle.next_id, self._num_handles
        self._num_handles = num_handles
        tensors, layers, patches = _parts_of(model)
        is_patched, self._patches = patches != self._patches, patches
        is_patched |= self._is_rebuilt(model, bool(layers))
        is_hooked = num_handles != num_handles_before
        states = [layer_state(layer) for layer in layers]
        before = self._changes
        if changes == before and states == self._states and self._all.are_still(tensors):
            return is_patched, is_hooked
        weights = weights_by_adapter(model)
        own = weights.pop(None, [])
        is_written = is_patched or changes[0] != before[0] or not self._own.are_still(own)
        self._changes, self._states, self._all, self._own = changes, states, SeenTensors(tensors), SeenTensors(own)
        self._adapters = {str(name): self._numbered(str(name), tensors) for name, tensors in weights.items()}
        self.key = self._make_key()
        return is_written, is_hooked or changes[1] != before[1]

    def _is_rebuilt(self, model: torch.nn.Module, has_adapters: bool) -> bool:
        """Returns whether modules, their attributes or their forwards are others than at the last look.

        Adapters come and go by such changes, and are told apart in their own way.
        """
        before, is_same = (
            self._structure,
            not has_adapters and self._structure is not None and self._structure.is_same(),
        )
        if not is_same:
            self._structure = None if has_adapters else StructureWatch(model)
        return before is not None and self._structure is not None and not is_same

    def _numbered(self, name: str, tensors: list[torch.Tensor]) -> tuple[SeenTensors, int]:
        known = self._adapters.get(name)
        return known if known and known[0].are_still(tensors) else (SeenTensors(tensors), next(_epochs))

    def _make_key(self) -> tuple:
        parts = [taking_part(state) for state in self._states]
        if not any(parts):
            return ()
        numbers = {name: number for name, (_, number) in self._adapters.items()}
        content = [[(numbers.get(name), scale) for name, scale in part] for part in parts]
        return (("adapters", hashlib.blake2b(repr(content).encode(), digest_size=16).digest()),)


def _parts_of(
    model: torch.nn.Module,
) -> tuple[list[torch.Tensor], list[torch.nn.Module], tuple[list[int], list[Any]]]:
    """What a forward depends on, in one quick pass, since every request asks for it.

    All parameters and lasting buffers, the layers of adapters, and what was put into the forward: the numbers of hooks,
    which no two hooks of a process share, and references to the forwards that were set on modules.
    """
    tensors: list[torch.Tensor | None] = []
    layers: list[torch.nn.Module] = []
    hooks = [*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks]
    forwards: list[Any] = []
    modules: list[torch.nn.Module | None] = [model]
    while modules:
        module = modules.pop()
        if module is None:
            continue
        modules += module._modules.values()
        tensors += module._parameters.values()
        if module._buffers:
            tensors += [buffer for _, buffer in lasting_buffers(module)]
        if module._forward_hooks or module._forward_pre_hooks:
            hooks += _numbers(module._forward_hooks)
            hooks += _numbers(module._forward_pre_hooks)
        if "forward" in module.__dict__:
            forwards.append(_reference(module.forward))
        if is_adapter_layer(module):
            layers.append(module)
    return [tensor for tensor in tensors if tensor is not None], layers, (hooks, forwards)


def _numbers(hooks: Mapping[int, Any]) -> list[int]:
    """Without the hooks by which Transformers returns hidden states: it makes them at the first call that wants any."""
    return [number for number, hook in list(hooks.items()) if getattr(hook, "__module__", None) != _CAPTURING]


def _reference(function: Any) -> Any:
    """Equals the reference of a later moment only if the function is the same; does not keep it alive."""
    try:
        return weakref.ref(function)
    except TypeError:
        return id(function)
