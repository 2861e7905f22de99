"""Assisted decoding that goes on from a cache: Transformers' loop computes the whole prompt again, on top of it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache

from .. import compat

# The cache of the loop that has not made its first call yet, and how many tokens of the prompt are in it.
_resumed: contextvars.ContextVar[tuple[Cache, int] | None] = contextvars.ContextVar("_resumed", default=None)


@contextlib.contextmanager
def resumed(model: Any, input_ids: torch.Tensor, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Lets the first call of an assisted decoding loop compute only what its cache does not hold.

    Args:
        model (`PreTrainedModel`):
            The paged model.
        input_ids (`torch.Tensor`):
            `[1, length]`, the prompt of the loop.
        arguments (`Mapping[str, Any]`):
            What the loop was given: `generation_config` and model inputs.
    """
    cache = arguments.get(compat.cache_argument(model))
    if not isinstance(cache, Cache):
        yield
        return
    known = int(cache.get_seq_length())
    mask = arguments.get("attention_mask")
    # Transformers drops a mask of ones. One that is longer than the ids says that they are the new ones alone.
    columns = mask.shape[1] if mask is not None else getattr(arguments.get("generation_config"), "_mask_length", -1)
    goes_on = 0 < known < input_ids.shape[1] == columns
    token = _resumed.set((cache, known) if goes_on else None)
    try:
        yield
    finally:
        _resumed.reset(token)


def without_known_tokens(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a model's call, less the tokens that its cache already holds.

    Args:
        kwargs (`dict[str, Any]`):
            Arguments of the call. Calls with another cache, as an assistant's, are left alone.
    """
    waiting = _resumed.get()
    if waiting is None or not any(kwargs.get(name) is waiting[0] for name in ("cache", "past_key_values")):
        return kwargs
    _resumed.set(None)
    rest = dict(kwargs)
    if kwargs.get("inputs_embeds") is not None:
        rest["inputs_embeds"] = kwargs["inputs_embeds"][:, waiting[1] :]
        count = rest["inputs_embeds"].shape[1]
    else:
        count = kwargs["input_ids"].shape[1] - waiting[1]
    for name in ("input_ids", "position_ids", "token_type_ids"):
        if kwargs.get(name) is not None:
            rest[name] = kwargs[name][..., -count:]
    return rest
