"""What all wrappers of Triton kernels need: checks of their arguments, sizes of tiles, and the device of a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import torch

from ...errors import NotSupportedError
from .device import device_traits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_REGISTERS = 255
QUANTIZED_DTYPES = (torch.int8, torch.float8_e5m2, torch.float8_e4m3fn)  # of K/V with scales
NEEDS_SM_89 = (torch.float8_e4m3fn,)  # no conversion to it on older GPUs


def warp_size() -> int:
    """Returns how many threads a warp of this machine's GPUs has."""
    return 32 if torch.version.hip is None else 64


def register_limit(tensor: torch.Tensor) -> dict[str, int]:
    """Returns the option of a launch with at most eight warps that lets its threads have `MAX_REGISTERS`.

    Without it NVIDIA's compiler looks for a number with which more programs fit, and spills what is too much for it.
    AMD's knows no such option.

    Args:
        tensor (`torch.Tensor`):
            An argument of the launch.
    """
    return {"maxnreg": MAX_REGISTERS} if tensor.is_cuda and torch.version.hip is None else {}


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Returns a context in which Triton launches on a tensor's device, and not on the current one.

    Args:
        tensor (`torch.Tensor`):
            An argument of the launch.
    """
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def padded(size: int, least: int = 1) -> int:
    """Returns the smallest power of two that is at least a size: Triton's tiles have no other sizes.

    Args:
        size (`int`):
            What must fit, positive.
        least (`int`, defaults to 1):
            The smallest answer.
    """
    return max(least, 1 << (size - 1).bit_length())


def check_dtype(name: str, tensor: torch.Tensor, dtypes: Collection[torch.dtype] = DTYPES) -> None:
    """Checks a tensor's dtype.

    Args:
        name (`str`):
            What the tensor is called.
        tensor (`torch.Tensor`):
            The tensor.
        dtypes (`Collection[torch.dtype]`, *optional*):
            Those that a kernel takes; by default, the three that models are computed in.

    Raises:
        NotSupportedError: If it is none of them.
    """
    if tensor.dtype not in dtypes:
        raise NotSupportedError(f"`{name}` is {tensor.dtype}; the Triton kernel takes {', '.join(map(str, dtypes))}.")


def check_codes(name: str, tensor: torch.Tensor) -> None:
    """Checks the dtype of quantized K/V.

    Args:
        name (`str`):
            What the tensor is called.
        tensor (`torch.Tensor`):
            The codes.

    Raises:
        NotSupportedError: If the kernels do not take it, or its GPU does not know it.
    """
    check_dtype(name, tensor, QUANTIZED_DTYPES)
    if tensor.dtype in NEEDS_SM_89 and tensor.is_cuda:
        architecture = device_traits(tensor.device).architecture
        check(architecture != "sm_80", f"{tensor.dtype} needs a GPU of sm_89 or newer; use int8 or fp8_e5m2.")


def check(condition: bool, message: str) -> None:
    """Refuses arguments.

    Args:
        condition (`bool`):
            Whether they fit.
        message (`str`):
            What is wrong and what would be right.

    Raises:
        NotSupportedError: If they do not; it is a `RuntimeError` too, as the native operators raise.
    """
    if not condition:
        raise NotSupportedError(message)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as `[rows, size]` whose rows may lie apart, copied only if its strides need it.

    Args:
        x (`torch.Tensor`):
            `[..., size]`.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
