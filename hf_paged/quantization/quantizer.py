"""How Transformers comes to load quantized checkpoints into our modules: a quantizer of its own kind, registered.

config.json   "quantization_config": {"quant_method": "gptq", ...}
loading       the configuration is handed to `from_pretrained` with {"quant_method": "hf_paged", "original": ...}
before        linears of which the files hold packed tensors become `QuantizedLinear`s, on the meta device
after         values are looked at, and codes put into the rows that operators read
saving        the configuration writes the original again
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import CheckpointError
from .base import FORMATS, CheckpointFormat, LinearFormat, TensorInfo
from .checkpoint_files import read_headers
from .experts import replace_experts
from .linear import QuantizedLinear

logger = logging.getLogger(__name__)

METHOD = "hf_paged"


@register_quantization_config(METHOD)
class PagedQuantizationConfig(QuantizationConfigMixin):
    """Stands in for a checkpoint's own `quantization_config` while it is loaded, and writes that when it is saved.

    Args:
        original (`dict[str, Any]`):
            The checkpoint's.
        kwargs (`Any`):
            Ignored.
    """

    def __init__(self, original: dict[str, Any], **kwargs: Any):
        self.quant_method = METHOD  # type: ignore[assignment]
        self.original = original

    def to_dict(self) -> dict[str, Any]:
        """Returns the checkpoint's own configuration."""
        return copy.deepcopy(self.original)

    def to_diff_dict(self) -> dict[str, Any]:
        """Returns the checkpoint's own configuration."""
        return self.to_dict()


@register_quantizer(METHOD)
class PagedQuantizer(HfQuantizer):
    """Loads checkpoints of all `FORMATS` without another package, on any device.

    Args:
        quantization_config (`PagedQuantizationConfig`):
            With the checkpoint's own.
        kwargs (`Any`):
            Of Transformers.
    """

    quantization_config: PagedQuantizationConfig

    def __init__(self, quantization_config: PagedQuantizationConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        original = quantization_config.original
        self.format: CheckpointFormat = FORMATS.get(original["quant_method"])(original)
        self._experts: list[str] = []

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> nn.Module:
        headers = _with_names_of(model, read_headers(checkpoint_files or ()))
        self._experts = replace_linears(model, self.format, headers)
        return model

    def update_weight_conversions(self, weight_conversions: list, *model: Any) -> list:
        """Leaves out what would stack the weights of experts that are kept one by one.

        Args:
            weight_conversions (`list`):
                Those of the model.
            model (`Any`):
                The model, in newer versions of Transformers.

        Returns:
            `list`: Those to use.
        """
        conversions = super().update_weight_conversions(weight_conversions, *model)
        stacks = [f"{name}.{stack}" for name in self._experts for stack in ("gate_up_proj", "down_proj")]
        return [
            conversion
            for conversion in conversions
            if not isinstance(conversion, WeightConverter)
            or not any(re.search(target, name) for target in conversion.target_patterns for name in stacks)
        ]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for name, module in quantized_linears(model):
            module.format.check_values(name, module.tensors())
            module.pack()
        return model

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        for name, module in list(quantized_linears(model)):
            dense = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
            dense.weight = nn.Parameter(module.dequantize().to(dtype or torch.float32), requires_grad=False)
            if module.bias is not None:
                dense.bias = module.bias
            model.set_submodule(name, dense)
        return model

    def is_serializable(self) -> bool:
        """Returns that `save_pretrained` writes the checkpoint again."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Returns that weights cannot be trained."""
        return False


def quantized_linears(model: nn.Module) -> list[tuple[str, QuantizedLinear]]:
    """Returns the names and modules of a model's quantized linears.

    Args:
        model (`torch.nn.Module`):
            The model.
    """
    return [(name, module) for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]


def _with_names_of(model: Any, headers: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Headers under the names that tensors have in the model, where a file has older ones."""
    renamings = [
        conversion for conversion in get_model_conversion_mapping(model) if isinstance(conversion, WeightRenaming)
    ]
    return {rename_source_key(name, renamings, [])[0]: info for name, info in headers.items()}


def replace_linears(model: nn.Module, format: CheckpointFormat, headers: Mapping[str, TensorInfo]) -> list[str]:
    """Puts a `QuantizedLinear` wherever the files of a checkpoint hold packed tensors.

    Args:
        model (`torch.nn.Module`):
            Built from its configuration, without weights.
        format (`CheckpointFormat`):
            What the checkpoint's configuration says.
        headers (`Mapping[str, TensorInfo]`):
            What its files hold, under the names of the model.

    Returns:
        `list[str]`: The names of modules of experts whose weights are kept one by one.

    Raises:
        CheckpointError: If the two contradict each other, before any weight is read.
        NotSupportedError: If experts are stored in a way that is not built.
    """
    prefix = getattr(model, "base_model_prefix", "")

    def make_expert(name: str, out_features: int, in_features: int) -> QuantizedLinear:
        stored, linear = _tensors_of(name, headers, prefix), format.linear_format(name)
        tensors = None if linear is None else _packed_tensors(name, linear, stored)
        if linear is None or tensors is None:
            raise CheckpointError(
                f"The files hold no packed tensors of `{name}`, as they do of other experts: all experts of a layer "
                "are quantized, or none is."
            )
        linear.check(name, tensors, out_features, in_features)
        return QuantizedLinear(in_features, out_features, linear, tensors)

    experts = replace_experts(model, headers, make_expert)
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    count = len(experts)
    for name, module in linears:
        stored = _tensors_of(name, headers, prefix)
        linear = format.linear_format(name)
        if linear is None:
            _check_dense(name, stored)
            continue
        tensors = _packed_tensors(name, linear, stored)
        if tensors is None:
            continue
        out_features, in_features = module.weight.shape
        if isinstance(module, Conv1D):
            in_features, out_features = module.weight.shape
        linear.check(name, tensors, out_features, in_features)
        model.set_submodule(name, QuantizedLinear(in_features, out_features, linear, tensors, module.bias))
        count += 1
    if not count:
        raise CheckpointError(
            f"config.json says that the checkpoint is quantized ({type(format).__name__}), and its files hold no "
            f"packed tensor for any of the model's {len(linears)} linears: it belongs to another checkpoint."
        )
    return experts


def _tensors_of(name: str, headers: Mapping[str, TensorInfo], base_model_prefix: str) -> dict[str, TensorInfo]:
    """The tensors directly below a module; files may leave out the prefix of the base model, or have it beside ours."""
    short = name.removeprefix(f"{base_model_prefix}.")
    for candidate in dict.fromkeys((name, short, f"{base_model_prefix}.{name}")):
        start = f"{candidate}."
        stored = {key[len(start) :]: info for key, info in headers.items() if key.startswith(start)}
        stored = {key: info for key, info in stored.items() if "." not in key}
        if stored:
            return stored
    return {}


_PACKED_NAMES = ("qweight", "weight_packed")


def _check_dense(name: str, stored: Mapping[str, TensorInfo]) -> None:
    packed = [tensor for tensor in _PACKED_NAMES if tensor in stored]
    if packed:
        raise CheckpointError(
            f"The `quantization_config` leaves `{name}` dense, and the files hold `{name}.{packed[0]}`: config.json "
            "belongs to another checkpoint."
        )


def _packed_tensors(name: str, linear: LinearFormat, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo] | None:
    """The tensors of a quantized linear; none if the files hold a dense one, or nothing (a tied head)."""
    found = {key: info for key, info in stored.items() if key in (*linear.required, *linear.optional)}
    missing = [key for key in linear.required if key not in stored]
    dense = "weight" in stored and stored["weight"].dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
    )
    if not set(found) & set(linear.required) or (dense and missing):
        return None
    if missing:
        raise CheckpointError(
            f"The files hold no `{name}.{missing[0]}`, which {linear} needs beside {sorted(found)}: the checkpoint is "
            "incomplete, or its config.json belongs to another one."
        )
    return found
