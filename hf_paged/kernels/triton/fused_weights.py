"""Linears of one input in one matrix product, where their weights lie side by side in memory.

    rows side by side            | q ........ | k ... | v ... |          Phi-3, or parameters that were laid so
    part by part of each head    | q | k | v | q | k | v | ...           GPT-NeoX, BLOOM

Looked at anew in each call, since a parameter may be given other memory at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

OptionalTensors = Sequence[torch.Tensor | None]

_ALIGNMENT = 16  # bytes, of each part, so that kernels read a part alone as quickly as ever
# By the address of its first part, the memory that parts were laid into. It lives as long as one of them.
_laid: dict[int, StorageWeakRef] = {}


def joined(parts: OptionalTensors, in_blocks: bool = False) -> torch.Tensor | None:
    """Returns the tensor that some tensors are the consecutive rows of, or the consecutive parts of each block of rows.

    Args:
        parts (`Sequence[torch.Tensor | None]`):
            Weights `[rows, in]` or biases `[rows]`, contiguous; or `[blocks, rows, in]` and `[blocks, rows]`, alike, of
            which each block is contiguous.
        in_blocks (`bool`, defaults to `False`):
            Whether there are blocks.

    Returns:
        `torch.Tensor`, *optional*: A view of all rows, `[all rows, ...]`; none if they are not consecutive.
    """
    tensors = [part for part in parts if part is not None]
    if len(tensors) < len(parts):
        return None
    first, blocks = tensors[0], [part[0] if in_blocks else part for part in tensors]
    end = first.data_ptr()
    for tensor, block in zip(tensors, blocks, strict=True):
        is_alike = tensor.dtype == first.dtype and block.is_contiguous() and block.shape[1:] == blocks[0].shape[1:]
        if not (tensor.data_ptr() == end and is_alike):
            return None
        end += block.nbytes
    num_blocks = len(first) if in_blocks else 1
    width, rows = sum(block.numel() for block in blocks), sum(len(block) for block in blocks)
    if in_blocks and any(part.shape != first.shape or (num_blocks > 1 and part.stride(0) != width) for part in tensors):
        return None
    shape, stride = (num_blocks * rows, *blocks[0].shape[1:]), blocks[0].stride()
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) == 1:
        return first.detach().as_strided(shape, stride)
    memory = _memory_at(first.data_ptr())
    if memory is None or memory.nbytes() < end - first.data_ptr():
        return None
    return first.new_empty(0).set_(memory, 0, shape, stride)


def _memory_at(address: int) -> torch.UntypedStorage | None:
    """What `lay_side_by_side` made at an address, if it is there still: then nothing else is at its addresses."""
    reference = _laid.get(address)
    return None if reference is None else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def lay_side_by_side(parameters: Sequence[torch.Tensor]) -> None:
    """Moves parameters into one piece of memory, one after the other, where `joined` finds them.

    Each keeps a storage of its own, which is a slice of that memory: whoever copies, pickles, saves or moves one of
    them sees no other. They are the same objects with the same numbers. Until the old memory is free, there is both;
    the new one is free once all of them have been given other memory.

    Args:
        parameters (`Sequence[torch.Tensor]`):
            Of one dtype and device, `[rows, ...]`, contiguous, alike in all but their rows.
    """
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.cat([parameter.detach() for parameter in parameters]).untyped_storage()
        for address in [address for address, reference in list(_laid.items()) if reference.expired()]:
            _laid.pop(address, None)
        _laid[memory.data_ptr()] = StorageWeakRef(memory)
        start = 0
        for parameter in parameters:
            end = start + parameter.nbytes
            own = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            parameter.data = own.set_(memory[start:end], 0, parameter.shape, parameter.stride())
            start = end


def can_lie_side_by_side(parameters: Sequence[torch.Tensor]) -> bool:
    """Returns whether `lay_side_by_side` takes these, and each of them fills a storage that it alone knows the end of.

    Args:
        parameters (`Sequence[torch.Tensor]`):
            Weights or biases.
    """
    first = parameters[0]
    return len(set(map(id, parameters))) == len(parameters) and all(
        parameter.dtype == first.dtype
        and parameter.device == first.device
        and parameter.shape[1:] == first.shape[1:]
        and parameter.is_contiguous()
        and parameter.nbytes > 0
        and parameter.nbytes % _ALIGNMENT == 0
        and parameter.untyped_storage().nbytes() == parameter.nbytes
        for parameter in parameters
    )


class Linears:
    """Several linears of one input, or one; in one product where their weights lie side by side.

    Args:
        weights (`Sequence[torch.Tensor | None]`):
            Of the parts, `[rows, in]` or `[blocks, rows, in]`. A layer's tensors may be absent, but not these.
        biases (`Sequence[torch.Tensor | None]`):
            Of the parts, `[rows]` or `[blocks, rows]`.
    """

    def __init__(self, weights: OptionalTensors, biases: OptionalTensors):
        self._weights = [weight for weight in weights if weight is not None]
        assert len(self._weights) == len(weights), "a linear has a weight"
        self._biases = list(biases)
        self._tensors = [*self._weights, *(bias for bias in biases if bias is not None)]
        self._sizes = [len(weight) for weight in self._weights]
        self._in_blocks = self._weights[0].dim() == 3
        self._addresses: list[int] = []
        self._whole: tuple[torch.Tensor, torch.Tensor | None] | None = None  # keeps its memory, and so its addresses

    def __call__(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Multiplies.

        Args:
            x (`torch.Tensor`):
                `[tokens, in]`.

        Returns:
            `Sequence[torch.Tensor]`: Of each part `[tokens, rows]`, or `[tokens, blocks, rows]` if its weight is in
            blocks; perhaps views of one tensor, whose last dimension is contiguous.
        """
        addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        if addresses != self._addresses:
            self._addresses, self._whole = addresses, self._joined()
        if self._whole is None:
            return [_linear(x, *part) for part in zip(self._weights, self._biases, strict=True)]
        together = torch.nn.functional.linear(x, *self._whole)
        if self._in_blocks:
            return together.view(len(x), len(self._weights[0]), len(self._weights), -1).unbind(2)
        return together.split_with_sizes(self._sizes, dim=1) if len(self._sizes) > 1 else (together,)

    def _joined(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        whole, has_biases = joined(self._weights, self._in_blocks), any(bias is not None for bias in self._biases)
        bias = joined(self._biases, self._in_blocks) if has_biases else None
        return None if whole is None or (has_biases and bias is None) else (whole, bias)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.dim() == 2:
        return torch.nn.functional.linear(x, weight, bias)
    product = torch.nn.functional.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return product.unflatten(1, weight.shape[:-1])
