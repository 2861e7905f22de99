"""Choosing a token in each row of the processed scores: by native code or Triton where they run, else by torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...kernels.cpu import sampling as native
from ...kernels.triton import device as gpu
from ..request import Request
from .chunks import WIDE_CHUNK_SIZE, argmax_rows, chunk_maxima, wide_maxima
from .draw import draw_candidates, draw_full
from .pending import to_device
from .random import uniforms
from .truncation import Truncation, truncate


@dataclasses.dataclass(frozen=True)
class DrawPlan:
    """How the token of each row is chosen.

    Args:
        requests (`Sequence[Request]`):
            Request i belongs to row i.
        greedy (`np.ndarray`):
            `[rows]` whether the best token is taken.
        truncated (`np.ndarray`):
            `[rows]` whether only some tokens may remain.
        settings (`Truncation`):
            Temperature, top-k, top-p and min-p of the rows.
    """

    requests: Sequence[Request]
    greedy: np.ndarray
    truncated: np.ndarray
    settings: Truncation

    @functools.cached_property
    def all_greedy(self) -> bool:
        """Returns whether nothing is drawn."""
        return bool(self.greedy.all())

    @functools.cached_property
    def native_settings(self) -> torch.Tensor:
        """Returns the settings as the native operator takes them."""
        kinds = np.where(self.greedy, native.BEST, np.where(self.truncated, native.TRUNCATED, native.ANY))
        settings = self.settings
        columns = (kinds, settings.temperature, settings.top_k, settings.top_p, settings.min_p)
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.float64))

    @functools.cached_property
    def _keys(self) -> np.ndarray:
        """`[rows, 3]` seed, branch and position; the last column is set at each step."""
        keys = np.zeros((len(self.requests), 3), dtype=np.uint64)
        keys[:, 0] = [request.seed % 2**64 for request in self.requests]
        keys[:, 1] = [request.branch for request in self.requests]
        return keys

    def keys(self) -> np.ndarray:
        """Returns what the rows' random numbers depend on now: `[rows, 3]` uint64, valid until the next call."""
        self._keys[:, 2] = [request.num_output_tokens + request.num_in_flight_tokens for request in self.requests]
        return self._keys

    def wanted(self) -> dict[str, np.ndarray]:
        """Returns what drawing tokens takes where the scores are: `settings` and `keys`, with a row for each token."""
        if self.all_greedy:
            return {}
        return {"settings": self.native_settings.numpy(), "keys": self.keys().view(np.int64).copy()}


def padded_sampling(arrays: Mapping[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
    """Adds rows to what is wanted where the scores are.

    Args:
        arrays (`Mapping[str, np.ndarray]`):
            Of `Sampler.wanted`.
        num_rows (`int`):
            How many rows there are then, at least as many as before.

    Returns:
        `dict[str, np.ndarray]`: The same; the further rows take the best token.
    """
    padded = {}
    for name, array in arrays.items():
        padded[name] = np.zeros((num_rows, *array.shape[1:]), dtype=array.dtype)
        if name == "settings":
            padded[name][:] = (native.BEST, 1, 0, 1, 0)
        padded[name][: len(array)] = array
    return padded


def choose(scores: torch.Tensor, plan: DrawPlan) -> tuple[np.ndarray, np.ndarray]:
    """Chooses a token in each row.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`, contiguous within a row.
        plan (`DrawPlan`):
            How.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: `[rows]` int64 token ids, and `[rows]` float32, each row's largest score (NaN
        if it holds one). Where that is not finite the token means nothing, unless the row is greedy.
    """
    if native.takes(scores):
        token_ids, best = choose_natively(scores, plan)
        return token_ids.numpy(), best.numpy()
    if _triton_takes(scores):
        token_ids, best = choose_by_triton(scores, plan)
        return token_ids.cpu().numpy(), best.cpu().numpy()
    return _choose_greedily(scores) if plan.all_greedy else _choose_by_torch(scores, plan)


def choose_ahead(
    scores: torch.Tensor, plan: DrawPlan, sent: Mapping[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the same tokens as `choose`, without waiting for the device that the scores are on.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`, contiguous within a row.
        plan (`DrawPlan`):
            How; `can_choose_ahead`, or it waits after all.
        sent (`Mapping[str, torch.Tensor]`, *optional*):
            What `plan.wanted()` returned, where the scores are; there may be more rows.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `[rows]` int64 token ids and `[rows]` float32 largest scores, on the
        device.
    """
    if _triton_takes(scores):
        return choose_by_triton(scores, plan, sent)
    if plan.all_greedy and scores.device.type != "cpu":
        return _best_tokens(scores)
    if native.takes(scores):
        return choose_natively(scores, plan, sent)
    token_ids, best = choose(scores, plan)
    return to_device(token_ids, scores.device), to_device(best, scores.device)


def can_choose_ahead(device: torch.device, greedy: bool) -> bool:
    """Returns whether tokens can be chosen without waiting for the device that the scores are on.

    Args:
        device (`torch.device`):
            Which; nobody waits for a CPU.
        greedy (`bool`):
            Whether the best tokens are wanted, and not drawn ones.
    """
    return greedy or device.type == "cpu" or (device.type == "cuda" and _has_triton())


def choose_by_triton(
    scores: torch.Tensor, plan: DrawPlan, sent: Mapping[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses a token in each row on a GPU.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`, contiguous within a row.
        plan (`DrawPlan`):
            How.
        sent (`Mapping[str, torch.Tensor]`, *optional*):
            As for `choose_ahead`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: As of `choose`, on the device.
    """
    from ...kernels.triton.sampling import argmax_tokens, draw_tokens  # Triton takes long to import

    if plan.all_greedy:
        return argmax_tokens(scores)
    return draw_tokens(scores, *_settings_and_keys(scores, plan, sent))


def choose_natively(
    scores: torch.Tensor, plan: DrawPlan, sent: Mapping[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses a token in each row on a CPU, by native code.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`, contiguous within a row.
        plan (`DrawPlan`):
            How.
        sent (`Mapping[str, torch.Tensor]`, *optional*):
            As for `choose_ahead`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: As of `choose`.
    """
    if plan.all_greedy:
        return native.argmax_tokens(scores)
    settings, keys = _settings_and_keys(scores, plan, sent)
    return native.draw_tokens(scores, settings, native.philox_uniforms(keys))


def _settings_and_keys(
    scores: torch.Tensor, plan: DrawPlan, sent: Mapping[str, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if sent is None:
        wanted = plan.wanted()
        return to_device(wanted["settings"], scores.device), to_device(wanted["keys"], scores.device)
    return sent["settings"][: len(scores)], sent["keys"][: len(scores)]


@functools.cache
def _has_triton() -> bool:
    return gpu.unavailable_reason() is None


def _triton_takes(scores: torch.Tensor) -> bool:
    return scores.is_cuda and scores.dtype in native.DTYPES and _has_triton()


def _choose_greedily(scores: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    token_ids, best = _best_tokens(scores)
    return token_ids.cpu().numpy(), best.cpu().numpy()


def _best_tokens(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    maxima = wide_maxima(scores)
    return argmax_rows(scores, maxima, WIDE_CHUNK_SIZE), maxima.amax(dim=1).float()


def _choose_by_torch(scores: torch.Tensor, plan: DrawPlan) -> tuple[np.ndarray, np.ndarray]:
    maxima = chunk_maxima(scores)
    best = maxima.amax(dim=1)
    largest = best.cpu().numpy()
    token_ids = np.zeros(len(largest), dtype=np.int64)
    greedy = np.flatnonzero(plan.greedy)
    if len(greedy):
        token_ids[greedy] = argmax_rows(_take(scores, greedy), _take(maxima, greedy)).cpu().numpy()
    uniform = uniforms(*plan.keys().T)
    sampled = np.isfinite(largest) & ~plan.greedy
    truncated = np.flatnonzero(sampled & plan.truncated)
    if len(truncated):
        for group in truncate(_take(scores, truncated), _take(maxima, truncated), plan.settings[truncated]):
            row = truncated[group.rows]
            token_ids[row] = draw_candidates(group, uniform[row])
    full = np.flatnonzero(sampled & ~plan.truncated)
    if len(full):
        token_ids[full] = draw_full(scores, best, full, plan.settings.temperature[full], uniform[full])
    return token_ids, largest


def _take(tensor: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return tensor if len(rows) == len(tensor) else tensor[torch.from_numpy(rows).to(tensor.device)]
