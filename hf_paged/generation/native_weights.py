"""Lays weights side by side at load, for operators that then multiply with them in one product, on a GPU.

    q | k | v    gate | up      a layer's linears of one input, of recognised modules with plain weights

Parameters stay the same objects with the same numbers, and each keeps a storage of its own; only their memory is new.
So is that of a view that somebody took of `parameter.data` before: it no longer shows what is written to the parameter.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Iterator, Sequence

import torch

from ..kernels.triton.fused_weights import can_lie_side_by_side, joined, lay_side_by_side
from ..modeling.patterns.plain import is_plain_tensor
from .native_units import Unit

logger = logging.getLogger(__name__)

_TOGETHER = (("q", "k", "v"), ("gate", "up"))
_MIB = 1 << 20


def lay_weights_side_by_side(model: torch.nn.Module, units: Sequence[Unit]) -> int:
    """Moves the weights of a model that are read together into one piece of memory each, one layer after the other.

    The old memory of a layer is given back before the next layer has its turn: there is never more than one layer's
    weights twice. Weights that share memory with others stay where they are, and so do all that are left when the
    device has no room.

    Args:
        model (`torch.nn.Module`):
            The model.
        units (`Sequence[Unit]`):
            What was recognised in it.

    Returns:
        `int`: The bytes that were moved; none if all of them lie side by side already.
    """
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}.values()
    users = collections.Counter(_memory_of(tensor) for tensor in tensors)
    num_bytes = 0
    try:
        for unit in units:
            moved = 0
            for parameters in _groups(unit):
                is_apart = joined(parameters) is None and can_lie_side_by_side(parameters)
                if is_apart and all(users[_memory_of(parameter)] == 1 for parameter in parameters):
                    lay_side_by_side(parameters)
                    moved += sum(parameter.nbytes for parameter in parameters)
            if moved:
                _give_back(unit.module.parameters())
            num_bytes += moved
    except torch.OutOfMemoryError as error:
        logger.warning(
            "Some weights of %s are multiplied with one by one: laid side by side they would be read in one launch, "
            "but there is no room to move them. %s",
            type(model).__name__,
            error,
        )
    if num_bytes:
        logger.info("%d MiB of weights now lie side by side, to be read in one launch.", num_bytes // _MIB)
    return num_bytes


def _groups(unit: Unit) -> Iterator[list[torch.Tensor]]:
    """The weights, and the biases, of a module's linears that have their input in common."""
    sources = {} if unit.recipe is None else unit.recipe.sources
    for names in _TOGETHER:
        for kind in ("weight", "bias"):
            found = [sources.get(f"{name}_{kind}") for name in names]
            tensors = [source.parameters.get(source.name) for source in found if source is not None and not source.view]
            if len(tensors) == len(names) and all(map(is_plain_tensor, tensors)):
                yield tensors  # type: ignore[misc]


def _memory_of(tensor: torch.Tensor) -> tuple[torch.device, int]:
    try:
        return tensor.device, tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # some quantized weights have no storage
        return tensor.device, 0


def _give_back(tensors: Iterable[torch.Tensor]) -> None:
    """Memory of one layer rarely fits the next one's; kept by torch's allocator it would add up to the whole model."""
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.empty_cache()
