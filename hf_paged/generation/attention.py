"""The attention function that is registered with Transformers, and how a plain forward gets past it.

A paged model's attention implementation is named `hf_paged` (or `hf_paged_<stock>`). Two callers reach it:

- an engine step, whose cache view hands back keys that carry the layer's paged cache: paged attention runs;
- anything else (training, `model(input_ids)`, another cache): the call goes on, unchanged, to the stock
  implementation that the model would have without us, and the mask is made by that implementation's mask function.

Which stock implementation that is stands in the registered name, so there is no state to lose or to leak: the name
survives deepcopy and pickle, and Transformers does not write it to `config.json`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import compat
from ..cache.step_cache import AttentionRequest, StepLength, paged_layer_of
from ..errors import UnsupportedAttentionError

# Names may contain neither "flash" nor "sdpa": Transformers looks for these words in them.
IMPLEMENTATIONS = {
    "hf_paged": "sdpa",
    "hf_paged_eager": "eager",
    "hf_paged_fa2": "flash_attention_2",
    "hf_paged_fa3": "flash_attention_3",
    "hf_paged_flex": "flex_attention",
}
_NAMES = {stock: name for name, stock in IMPLEMENTATIONS.items()}

# Keyword arguments of Transformers' attention calls that change nothing for a paged step.
_IGNORED = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "is_causal"}
)


def paged_name(stock: str) -> str | None:
    """Returns the paged implementation over a stock one, or `None` if there is none.

    Args:
        stock (`str`):
            `"sdpa"`, `"eager"`, ...
    """
    return _NAMES.get(stock)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    stock: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer, paged in an engine step and stock otherwise.

    Args:
        module (`torch.nn.Module`):
            The attention module.
        query (`torch.Tensor`):
            `[batch, num_query_heads, tokens, Dk]`; in an engine step batch is 1.
        key (`torch.Tensor`):
            `[batch, num_kv_heads, keys, Dk]`.
        value (`torch.Tensor`):
            `[batch, num_kv_heads, keys, Dv]`.
        attention_mask (`torch.Tensor`, *optional*):
            The stock implementation's mask; `None` in an engine step.
        args (`Any`):
            Passed on to the stock function.
        stock (`str`):
            Name of the stock implementation.
        kwargs (`Any`):
            Transformers' further arguments (`scaling`, `sliding_window`, `softcap`, `s_aux`, ...).

    Returns:
        The output `[batch, tokens, num_query_heads, Dv]` and the attention weights or `None`.

    Raises:
        UnsupportedAttentionError: In an engine step, for an argument that paged attention does not know.
    """
    layer = paged_layer_of(key)
    if layer is None:
        return compat.stock_attention(stock, module)(module, query, key, value, attention_mask, *args, **kwargs)
    scaling = kwargs.pop("scaling", None)
    kwargs.pop("dropout", None)
    window, softcap, sinks = (kwargs.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _IGNORED)
    if unknown or attention_mask is not None or getattr(module, "is_causal", True) is False:
        what = f"the arguments {unknown}" if unknown else "a mask" if attention_mask is not None else "no causal order"
        raise UnsupportedAttentionError(
            f"{type(module).__name__} asks for {what}, which paged attention does not implement; "
            "run this model through Transformers' own loop (`model.unpaged()`)."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = layer.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionRequest(scale, window, softcap, sinks),
    )
    return output.unsqueeze(0), None


def paged_mask(*args: Any, kv_length: int, stock: str, **kwargs: Any) -> torch.Tensor | None:
    """Makes no mask for an engine step, and the stock implementation's mask for anything else.

    Args:
        args (`Any`):
            Passed on to the stock function.
        kv_length (`int`):
            What the cache answered to `get_mask_sizes`; an engine step's view answers with a `StepLength`.
        stock (`str`):
            Name of the stock implementation.
        kwargs (`Any`):
            Transformers' further arguments.
    """
    if isinstance(kv_length, StepLength):
        return None
    return compat.mask_function(stock)(*args, kv_length=kv_length, **kwargs)


def register() -> None:
    """Registers our implementations with Transformers' attention and mask interfaces. Harmless when repeated."""
    for name, stock in IMPLEMENTATIONS.items():
        compat.AttentionInterface.register(name, functools.partial(paged_attention_forward, stock=stock))
        compat.AttentionMaskInterface.register(name, functools.partial(paged_mask, stock=stock))
