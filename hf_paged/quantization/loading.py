"""From the name of a quantized checkpoint to the configuration with which Transformers loads it into our modules."""

from __future__ import annotations

import os
from typing import Any

from ..errors import ConfigurationError, NotSupportedError
from . import fine_grained_fp8
from .base import FORMATS

# What Transformers loads by itself: dense, or into modules of another package that it asks for.
PASSED_ON = (
    "bitsandbytes",
    "gguf",
    "torchao",
    "mxfp4",
    "hqq",
    "quanto",
    "eetq",
    "higgs",
    "aqlm",
    "vptq",
    "spqr",
    "bitnet",
    "fp_quant",
    "fouroversix",
    "quark",
    "auto-round",
    "nvfp4",
    "mxfp8",
    "metal",
    "sinq",
    "gemma",
)
_HUB_ARGUMENTS = (
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)


def take_over(name_or_path: str | os.PathLike, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Looks whether a checkpoint is quantized in a format of ours, and arranges that it is loaded by us.

    Args:
        name_or_path (`str` or `os.PathLike`):
            Name on the Hub, or a folder.
        kwargs (`dict[str, Any]`):
            For `AutoModelForCausalLM.from_pretrained`.

    Returns:
        `dict[str, Any]`: The arguments to use instead; the same where the checkpoint is not ours.

    Raises:
        NotSupportedError: If it is quantized by a method that nobody knows.
        CheckpointError: If its `quantization_config` makes no sense.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if kwargs.get("gguf_file") is not None or kwargs.get("quantization_config") is not None:
        return kwargs
    config = kwargs.get("config")
    if config is None:
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        try:
            values, _ = PreTrainedConfig.get_config_dict(name_or_path, **hub)
        except OSError:
            return kwargs  # a folder of adapters, or nothing: Transformers knows what to say
        if _original_of(values) is None:
            return kwargs
        # What the model is to be computed in is no field of its configuration: "auto" would become one.
        dtypes: dict[str, Any] = {name: kwargs[name] for name in ("dtype", "torch_dtype") if name in kwargs}
        rest = {name: value for name, value in kwargs.items() if name not in dtypes}
        config, rest = AutoConfig.from_pretrained(name_or_path, return_unused_kwargs=True, **rest)
        kwargs = {**hub, **rest, **dtypes}
    original = _original_of(config)
    if original is None:
        return kwargs
    return {**kwargs, "config": _stand_in(config, original)}


def named_scheme(name_or_path: str | os.PathLike, quantization: str, kwargs: dict[str, Any]) -> str | None:
    """Returns what vLLM's `quantization` means for a checkpoint: how it is quantized, or how it is to be.

    Args:
        name_or_path (`str` or `os.PathLike`):
            Name on the Hub, or a folder.
        quantization (`str`):
            A method (`"gptq"`, `"awq_marlin"`, ...), or one of `on_load.SCHEMES`.
        kwargs (`Any`):
            For `AutoModelForCausalLM.from_pretrained`.

    Returns:
        `str` or `None`: The value for `quantize`; none where the checkpoint is quantized like that already.

    Raises:
        ConfigurationError: If the checkpoint is quantized otherwise, or dense and there is no such scheme.
    """
    from transformers import PreTrainedConfig

    from .on_load import SCHEMES

    method = "gguf" if kwargs.get("gguf_file") is not None else None
    if method is None:
        hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
        values, _ = PreTrainedConfig.get_config_dict(name_or_path, **hub)
        own = values.get("quantization_config") or _nested(values.get("text_config") or {}) or {}
        method = str(own.get("quant_method") or ("bitsandbytes" if own else "")) or None
    asked = quantization.lower().removesuffix("_marlin").replace("_", "-")
    if method is not None and method.replace("_", "-") != asked:
        raise ConfigurationError(
            f"`quantization` {quantization!r} does not fit {str(name_or_path)!r}, which is quantized by {method!r}: "
            "leave it out, a checkpoint says so itself."
        )
    if method is None and asked not in SCHEMES:
        raise ConfigurationError(
            f"`quantization` {quantization!r} does not fit {str(name_or_path)!r}, which is not quantized. Leave it "
            f"out, or quantize it at load: {', '.join(map(repr, SCHEMES))}."
        )
    return asked if method is None else None


def _original_of(config: Any) -> dict[str, Any] | None:
    """The `quantization_config` of a checkpoint that is ours to load."""
    from transformers.utils.quantization_config import QuantizationConfigMixin

    get = config.get if isinstance(config, dict) else lambda name, default=None: getattr(config, name, default)
    original = get("quantization_config") or (get("text_config") and _nested(get("text_config")))
    if isinstance(original, QuantizationConfigMixin):
        original = original.to_dict()
    if not isinstance(original, dict):
        return None
    method = str(original.get("quant_method") or "")
    if original.get("load_in_4bit") or original.get("load_in_8bit") or method in PASSED_ON:
        return None
    if method == fine_grained_fp8.METHOD and not fine_grained_fp8.is_built_for(original):
        return None
    if method not in FORMATS:
        raise NotSupportedError(
            f"The checkpoint is quantized by the method {method or None!r}, which nothing here can load. Known are "
            f"{', '.join(FORMATS)}, and by Transformers' own loaders {', '.join(PASSED_ON)}."
        )
    return original


def _nested(config: Any) -> Any:
    return (
        config.get("quantization_config") if isinstance(config, dict) else getattr(config, "quantization_config", None)
    )


def _stand_in(config: Any, original: dict[str, Any]) -> Any:
    from .quantizer import METHOD

    FORMATS.get(original["quant_method"])(original)  # what is wrong with it is said before anything is fetched
    config.quantization_config = {"quant_method": METHOD, "original": original}
    return config
