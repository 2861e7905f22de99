"""`quantize=`: a dense model becomes a quantized one after it is loaded, by rounding to the nearest.

    int8    integers of 8 bits, a scale a row
    int4    integers of 4 bits, a scale and a zero point for each 128 or 64 inputs
    fp8     float8 e4m3, a scale a row
    w8a8    as int8; the inputs of linears are rounded to 8 bits too, each token by its largest number

Linears of decoder layers become `QuantizedLinear`s of the compressed-tensors format, so that the model is saved as a
checkpoint that others load too. Embeddings that are tied to the head are kept once, in 8 bits a number; both are saved
dense. Heads of their own stay dense, and so do experts that are no linears.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError, NotSupportedError
from .base import LinearFormat, TensorInfo
from .compressed_tensors import CompressedTensorsFormat
from .compressed_writing import Tensors, float8_tensors, packed_config, packed_tensors, plain_config
from .embedding import PackedEmbedding, TiedHead
from .linear import QuantizedLinear
from .quantizer import METHOD, PagedQuantizationConfig, PagedQuantizer
from .rounding import GROUP_SIZES, Rounding, round_to_nearest

SCHEMES = ("int8", "int4", "fp8", "w8a8")


def check_scheme(scheme: Any) -> None:
    """Checks the value of `quantize`.

    Args:
        scheme (`Any`):
            What was given.

    Raises:
        ConfigurationError: If it is none of `SCHEMES`.
    """
    if scheme not in SCHEMES:
        raise ConfigurationError(f"`quantize` must be one of {', '.join(map(repr, SCHEMES))}, got {scheme!r}.")


@torch.no_grad()
def quantize_model(model: Any, scheme: str) -> None:
    """Quantizes a model in memory, in place and one linear after the other.

    Args:
        model (`PreTrainedModel`):
            A dense model.
        scheme (`str`):
            One of `SCHEMES`.

    Raises:
        ConfigurationError: If there is no such scheme.
        NotSupportedError: If the model is quantized already, or has no linears in layers.
    """
    check_scheme(scheme)
    if getattr(model, "hf_quantizer", None) is not None:
        raise NotSupportedError(
            f"`quantize` {scheme!r} is for dense models, and {type(model).__name__} is loaded from a checkpoint that "
            "is quantized already: leave it out."
        )
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear and "." in name}
    head = model.get_output_embeddings()
    linears = {name: module for name, module in linears.items() if module is not head}
    if not linears:
        raise NotSupportedError(f"`quantize` {scheme!r}: {type(model).__name__} has no `nn.Linear` in its layers.")
    dense = [name for name, module in model.named_modules() if type(module) is nn.Linear and name not in linears]
    size = _group_size(linears.values()) if scheme == "int4" else -1
    config, write = _scheme(scheme, size, dense)
    format = CompressedTensorsFormat(config)
    for name, module in linears.items():
        linear = format.linear_format(name)
        assert linear is not None, "all linears are targets"
        model.set_submodule(name, quantized(module, linear, write(module.weight)))
    _pack_tied_embeddings(model, head)
    mark_quantized(model, config)


def mark_quantized(model: Any, config: dict[str, Any]) -> None:
    """Tells a model whose linears have been replaced that it is quantized, so that it is saved as such.

    Args:
        model (`PreTrainedModel`):
            The model.
        config (`dict[str, Any]`):
            The `quantization_config` of its checkpoint.
    """
    model.config.quantization_config = PagedQuantizationConfig(config)
    model.hf_quantizer = PagedQuantizer(model.config.quantization_config, pre_quantized=True)
    model.is_quantized = True
    model.quantization_method = METHOD


def quantized(module: nn.Linear, format: LinearFormat, tensors: Tensors) -> QuantizedLinear:
    """Returns a packed linear in the place of a dense one.

    Args:
        module (`torch.nn.Linear`):
            The dense one; its bias is kept.
        format (`LinearFormat`):
            What the tensors mean.
        tensors (`dict[str, torch.Tensor]`):
            Of its weight.
    """
    infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    linear = QuantizedLinear(module.in_features, module.out_features, format, infos, module.bias)
    for name, tensor in tensors.items():
        setattr(linear, name, tensor)
    linear.pack()
    return linear


def _group_size(linears: Any) -> int:
    """The largest that divides the rows of all linears: a configuration has one."""
    widths = {module.in_features for module in linears}
    return next((size for size in GROUP_SIZES if all(width % size == 0 for width in widths)), -1)


def _scheme(scheme: str, size: int, dense: list[str]) -> tuple[dict[str, Any], Callable[[torch.Tensor], Tensors]]:
    """The configuration of a checkpoint, and what makes the tensors of a weight."""
    if scheme == "fp8":
        return plain_config("float", dense), float8_tensors
    if scheme == "w8a8":

        def write_int8(weight: torch.Tensor) -> Tensors:
            codes, scale, _ = round_to_nearest(weight, Rounding(8, -1, True), weight.dtype)
            return {"weight": (codes.to(torch.int16) - 128).to(torch.int8), "weight_scale": scale.to(weight.dtype)}

        return plain_config("int", dense, activations=True), write_int8
    rounding = Rounding(8, -1, True) if scheme == "int8" else Rounding(4, size, False)

    def write(weight: torch.Tensor) -> Tensors:
        codes, scale, zero = round_to_nearest(weight, rounding, weight.dtype)
        return packed_tensors(codes, scale.to(weight.dtype), zero, rounding)

    return packed_config(rounding, dense), write


def _pack_tied_embeddings(model: Any, head: Any) -> None:
    embedding = model.get_input_embeddings()
    is_plain = type(embedding) is nn.Embedding and type(head) is nn.Linear and embedding.max_norm is None
    if not is_plain or embedding.weight is not head.weight:
        return
    packed = PackedEmbedding(embedding.weight)
    names = {id(module): name for name, module in model.named_modules()}
    model.set_submodule(names[id(embedding)], packed)
    model.set_submodule(names[id(head)], TiedHead(packed, head.bias))
