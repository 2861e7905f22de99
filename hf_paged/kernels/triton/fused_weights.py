"""Linears of one input in one matrix product, where their weights lie side by side in one tensor.

    rows side by side            | q ........ | k ... | v ... |          Phi-3, or parameters that are views of one
    part by part of each head    | q | k | v | q | k | v | ...           GPT-NeoX, BLOOM

Looked at anew in each call, since a parameter may be given other memory at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

OptionalTensors = Sequence[torch.Tensor | None]


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
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for tensor, block in zip(tensors, blocks, strict=True):
        is_next = tensor.data_ptr() == end and tensor.untyped_storage().data_ptr() == storage
        is_alike = tensor.dtype == first.dtype and block.is_contiguous() and block.shape[1:] == blocks[0].shape[1:]
        if not (is_next and is_alike):
            return None
        end += block.nbytes
    num_blocks = len(first) if in_blocks else 1
    width, rows = sum(block.numel() for block in blocks), sum(len(block) for block in blocks)
    if in_blocks and any(part.shape != first.shape or (num_blocks > 1 and part.stride(0) != width) for part in tensors):
        return None
    return first.detach().as_strided((num_blocks * rows, *blocks[0].shape[1:]), blocks[0].stride())


def lay_side_by_side(parameters: Sequence[torch.Tensor]) -> None:
    """Moves parameters into one tensor, one after the other; each is a view of it from then on.

    Modules, `state_dict`, `save_pretrained` and optimizers see the same parameters with the same numbers; only a
    `torch.save` of one of them alone writes all. Until the old memory is free, there is both.

    Args:
        parameters (`Sequence[torch.Tensor]`):
            Of one dtype and device, `[rows, ...]`, alike in all but their rows.
    """
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part


def linear(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiplies with a weight.

    Args:
        x (`torch.Tensor`):
            `[tokens, in]`.
        weight (`torch.Tensor`, *optional*):
            `[rows, in]`, or `[blocks, rows, in]`. A layer's tensors may be absent, but not this one.
        bias (`torch.Tensor`, *optional*):
            `[rows]`, or `[blocks, rows]`.

    Returns:
        `torch.Tensor`: `[tokens, rows]`.
    """
    assert weight is not None, "a linear has a weight"
    if weight.dim() == 3:
        weight, bias = weight.flatten(0, 1), None if bias is None else bias.flatten()
    return torch.nn.functional.linear(x, weight, bias)


def linears(x: torch.Tensor, weights: OptionalTensors, biases: OptionalTensors) -> Sequence[torch.Tensor]:
    """Multiplies with several weights, in one product where they lie side by side.

    Args:
        x (`torch.Tensor`):
            `[tokens, in]`.
        weights (`Sequence[torch.Tensor | None]`):
            Of the parts; see `linear`.
        biases (`Sequence[torch.Tensor | None]`):
            Of the parts.

    Returns:
        `Sequence[torch.Tensor]`: Of each part `[tokens, rows]`, or `[tokens, blocks, rows]` if its weight is in blocks;
        perhaps views of one tensor, whose last dimension is contiguous.
    """
    given = [weight for weight in weights if weight is not None]
    assert len(given) == len(weights), "a linear has a weight"
    in_blocks, has_biases = given[0].dim() == 3, any(bias is not None for bias in biases)
    whole, bias = joined(weights, in_blocks), joined(biases, in_blocks) if has_biases else None
    if whole is None or (has_biases and bias is None):
        parts = [linear(x, *part) for part in zip(weights, biases, strict=True)]
        return [part.unflatten(1, weight.shape[:-1]) for part, weight in zip(parts, given, strict=True)]
    together = torch.nn.functional.linear(x, whole, bias)
    if in_blocks:
        return together.view(len(x), len(given[0]), len(given), -1).unbind(2)
    return together.split([len(weight) for weight in given], dim=1)
