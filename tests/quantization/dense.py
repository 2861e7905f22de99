"""The dense model that a quantized one stands for."""

from __future__ import annotations

import torch

from hf_paged.kernels.packed_rows import Codes, dequantized, format_of, rounded_tokens
from hf_paged.modeling.packed_linear import PackedLinear
from hf_paged.quantization.embedding import PackedEmbedding
from tests.families import tiny_model


def dense_model(model: torch.nn.Module, family: str, **overrides) -> torch.nn.Module:
    """A float64 model of the same family with the weights of a quantized one, and its rounding of inputs."""
    dense = tiny_model(family, **overrides).double()
    dense.set_experts_implementation("eager")  # the others know no float64
    for name, module in model.named_modules():
        own = dense.get_submodule(name)
        if isinstance(module, PackedLinear):
            own.weight.data = module.dequantize().double()
            if module.bias is not None:
                own.bias.data = module.bias.double()
            if module.is_packed and format_of(module.weight, module.in_features)[0] is Codes.W8A8:
                own.register_forward_pre_hook(lambda module, args: (rounded_tokens(args[0].float()).double(),))
        elif isinstance(module, PackedEmbedding):
            own.weight.data = dequantized(module.weight, module.embedding_dim).double()
        else:
            for key, value in module.named_parameters(recurse=False):
                getattr(own, key).data = value.double()
    return dense
