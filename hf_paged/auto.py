"""`AutoPagedModelForCausalLM`: the one line that a user of Transformers changes."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from .configuration import PagedConfig
from .errors import ConfigurationError, NotSupportedError, UnsupportedModelError

logger = logging.getLogger(__name__)


class AutoPagedModelForCausalLM:
    """Loads causal language models that run on a paged K/V cache with continuous batching.

    The result is an instance of the model's own class as well: everything Transformers does with it keeps working.

    Args:
        args (`Any`):
            Refused: use `from_pretrained` or `from_model`.
        kwargs (`Any`):
            Refused.

    Example:

    ```python
    model = AutoPagedModelForCausalLM.from_pretrained("org/model")
    model.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=20)
    ```
    """

    def __init__(self, *args: Any, **kwargs: Any):
        raise OSError(
            "AutoPagedModelForCausalLM is made with `AutoPagedModelForCausalLM.from_pretrained(name_or_path)` or "
            "`AutoPagedModelForCausalLM.from_model(model)`."
        )

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        paged_config: PagedConfig | None = None,
        tensor_parallel_size: int | None = None,
        quantize: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Loads a model as `AutoModelForCausalLM.from_pretrained` does and gives it a paged engine.

        Args:
            name_or_path (`str` or `os.PathLike`):
                Name on the Hub, or a folder.
            paged_config (`PagedConfig`, *optional*):
                Settings of the engine.
            tensor_parallel_size (`int`, *optional*):
                Reserved; only 1 is accepted so far.
            quantize (`str`, *optional*):
                Quantizes a dense checkpoint after it is loaded: `"int8"`, `"int4"`, `"fp8"` or `"w8a8"`.
            kwargs (`Any`):
                Whatever `AutoModelForCausalLM.from_pretrained` takes (`dtype`, `revision`, `token`, `cache_dir`,
                `gguf_file`, `quantization_config`, `device_map`, `trust_remote_code`, ...). Weights are read from
                safetensors (or GGUF) only, unless `use_safetensors=False` asks for pickle files.

        Returns:
            The model; an instance of its own class and of `PagedGenerationMixin`. With `output_loading_info=True` a
            pair of it and the information, as in Transformers.

        Raises:
            UnsupportedModelError: If it is no causal language model.
            NotSupportedError: If something was asked for that is not built yet.
            ConfigurationError: If `paged_config` is not a `PagedConfig`, or there is no such `quantize`.
            CheckpointError: If a quantized checkpoint is damaged, or contradicts its configuration.
        """
        refuse_reserved(tensor_parallel_size)
        _check_config(paged_config)
        check_dtype(kwargs.get("dtype"))
        _refuse_engine_settings(kwargs)
        from transformers import AutoModelForCausalLM

        from .cache.memory import move_weights_to_huge_pages
        from .quantization.loading import take_over
        from .quantization.on_load import check_scheme, quantize_model

        if quantize is not None:
            check_scheme(quantize)
        safe_only = kwargs.get("gguf_file") is None and kwargs.get("use_safetensors") is None
        if safe_only:
            kwargs["use_safetensors"] = True
        kwargs = take_over(name_or_path, kwargs)
        try:
            loaded = AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            raise UnsupportedModelError(
                f"{name_or_path!r} is no decoder-only language model, which is all that the paged engine runs "
                f"(AutoModelForCausalLM does not know its configuration: {str(error).splitlines()[0]})"
            ) from error
        except OSError as error:
            if safe_only and any(name in str(error) for name in ("safetensors", "pytorch_model.bin")):
                raise OSError(
                    f"{error} Only safetensors files are read unless pickle files, which can run code of their author, "
                    "are asked for: `use_safetensors=False`. The model's `save_pretrained` then writes safetensors."
                ) from error
            raise
        model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
        if quantize is not None:
            quantize_model(model, quantize)
        move_weights_to_huge_pages(model)
        model = cls.from_model(model, paged_config=paged_config)
        return (model, *info) if info else model

    @classmethod
    def from_model(cls, model: Any, *, paged_config: PagedConfig | None = None) -> Any:
        """Gives a model in memory a paged engine, in place. `model.unpaged()` takes it back.

        A model that the engine cannot run correctly keeps running through Transformers' own loop; one warning names
        the layer and why.

        Args:
            model (`PreTrainedModel` or `PeftModel`):
                A causal language model, also one with adapters.
            paged_config (`PagedConfig`, *optional*):
                Settings of the engine.

        Returns:
            The same object.

        Raises:
            UnsupportedModelError: If it is no causal language model of Transformers.
            ConfigurationError: If `paged_config` is not a `PagedConfig`.
        """
        _check_config(paged_config)
        from transformers import PreTrainedModel

        from .generation.mixin import page_model

        inner = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
        if not isinstance(inner, PreTrainedModel) or not isinstance(inner, torch.nn.Module):
            raise UnsupportedModelError(
                f"`model` must be a PreTrainedModel of Transformers, got {type(model).__name__}; "
                "load names and folders with `from_pretrained`."
            )
        generates = inner.can_generate() and inner.get_output_embeddings() is not None
        if getattr(inner.config, "is_encoder_decoder", False) or not generates:
            raise UnsupportedModelError(
                f"{type(inner).__name__} is no decoder-only language model, which is all that the paged engine runs."
            )
        page_model(inner, paged_config or PagedConfig())
        return model


def check_dtype(dtype: Any) -> None:
    """Refuses a name of a dtype that torch does not have.

    Args:
        dtype (`Any`):
            As given to `from_pretrained`.

    Raises:
        ConfigurationError: If it is a name that torch does not know.
    """
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigurationError(
            f"`dtype` {dtype!r} is no dtype of torch; use 'auto', 'float32', 'bfloat16' or 'float16'."
        )


def _refuse_engine_settings(kwargs: dict[str, Any]) -> None:
    for name in set(kwargs) & set(PagedConfig().to_dict()):
        raise ConfigurationError(
            f"`{name}` is a setting of the engine: pass `paged_config=PagedConfig({name}={kwargs[name]!r})`."
        )


def _check_config(paged_config: Any) -> None:
    if paged_config is not None and not isinstance(paged_config, PagedConfig):
        raise ConfigurationError(f"`paged_config` must be a PagedConfig, got {type(paged_config).__name__}.")


def refuse_reserved(tensor_parallel_size: int | None) -> None:
    """Refuses what has a name already and is not built yet.

    Args:
        tensor_parallel_size (`int`, *optional*):
            Only 1 is built.

    Raises:
        NotSupportedError: If it is not built.
        ConfigurationError: If it makes no sense.
    """
    if tensor_parallel_size is not None and (
        isinstance(tensor_parallel_size, bool) or not isinstance(tensor_parallel_size, int) or tensor_parallel_size < 1
    ):
        raise ConfigurationError(f"`tensor_parallel_size` must be a whole number from 1, got {tensor_parallel_size!r}.")
    if tensor_parallel_size is not None and tensor_parallel_size > 1:
        raise NotSupportedError(
            f"`tensor_parallel_size` {tensor_parallel_size} is not built yet; the engine runs on one device."
        )
