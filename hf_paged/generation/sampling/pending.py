"""Tokens that a device is choosing: the next step reads them there, the host when they have arrived."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..outputs import SamplerOutput


class PendingTokens:
    """The tokens of a step on their way to the host. Making one does not wait for the device.

        device   | step n | choose, copy |   step n + 1 ...
        host     | launch n | launch n + 1 | ... wait: tokens of n

    Args:
        token_ids (`torch.Tensor`):
            `[rows]` int64, on the device.
        best (`torch.Tensor`):
            `[rows]` float32, each row's largest score: not finite if there is no token to choose.
        vocab_size (`int`):
            Token ids are below it.
    """

    def __init__(self, token_ids: torch.Tensor, best: torch.Tensor, vocab_size: int):
        self.token_ids = token_ids.clamp(0, vocab_size - 1)  # where nothing could be chosen the next step reads it too
        self._host = [_start_copy(tensor) for tensor in (self.token_ids, best)]
        self._copied = None
        if token_ids.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(token_ids.device))

    def wait(self) -> SamplerOutput:
        """Waits for the tokens; may be called again.

        Returns:
            `SamplerOutput`: The tokens, and the rows that had none to choose.
        """
        if self._copied is not None:
            self._copied.synchronize()
        token_ids, best = (tensor.tolist() for tensor in self._host)
        failed = [row for row, value in enumerate(best) if not math.isfinite(value)]
        for row in failed:
            token_ids[row] = 0
        return SamplerOutput(token_ids, failed_rows=failed)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies an array to a device without waiting for what the device is doing.

    Args:
        array (`np.ndarray`):
            Not to be changed any more: on the CPU the tensor shares its memory.
        device (`torch.device`):
            Where to.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    """On CUDA a copy to pinned memory, complete when the stream has come that far."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
