"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): caches a latent, expands it, then attends.

Transformers hands the latent to the cache and calls the module's `expand_kv` on what comes back. The expansion makes
new tensors, so the mark that an engine step puts on the keys would be lost; here it is carried over. K/V are then
stored expanded: right for every such family, and larger than the latent would be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

LAYER_ATTRIBUTE = "_hf_paged_layer"  # carries the paged layer on a key tensor
_MARK = "_hf_paged_carries_layer"


def patch(model: torch.nn.Module) -> None:
    """Makes `expand_kv` of a model's attention modules carry the mark over. Calls without a mark are untouched.

    Args:
        model (`torch.nn.Module`):
            The model; the classes of its modules are changed once.
    """
    for cls in {type(module) for module in model.modules()}:
        expand = getattr(cls, "expand_kv", None)
        if expand is not None and not hasattr(expand, _MARK):
            cls.expand_kv = _carrying(expand)  # type: ignore[attr-defined]


def _carrying(expand: Callable) -> Callable:
    @functools.wraps(expand)
    def expand_kv(self: Any, latent: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = expand(self, latent, *args, **kwargs)
        layer = getattr(latent, LAYER_ATTRIBUTE, None)
        if layer is not None:
            setattr(key, LAYER_ATTRIBUTE, layer)
        return key, value

    setattr(expand_kv, _MARK, True)
    return expand_kv
