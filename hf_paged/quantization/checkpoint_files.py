"""What the files of a checkpoint hold, without reading their tensors."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .base import TensorInfo

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_headers(files: Iterable[str]) -> dict[str, TensorInfo]:
    """Reads names, shapes and dtypes.

    Args:
        files (`Iterable[str]`):
            Paths of safetensors files, or of pickle files.

    Raises:
        CheckpointError: If a file is truncated or damaged; names it.
    """
    found: dict[str, TensorInfo] = {}
    for file in files:
        found.update(_safetensors_header(file) if str(file).endswith(".safetensors") else _pickle_header(file))
    return found


def _safetensors_header(file: str) -> dict[str, TensorInfo]:
    found = {}
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in list(tensors.keys()):
                part = tensors.get_slice(name)
                dtype = part.get_dtype()
                if dtype not in _DTYPES:
                    raise CheckpointError(f"`{name}` in `{file}` has the dtype {dtype}, which torch has not.")
                found[name] = TensorInfo(tuple(part.get_shape()), _DTYPES[dtype])
    except SafetensorError as error:
        raise CheckpointError(f"`{file}` is truncated or damaged ({error}); fetch it again.") from error
    return found


def _pickle_header(file: str) -> dict[str, TensorInfo]:
    try:
        tensors = torch.load(file, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(file))
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    except Exception as error:  # What the reader raises for a damaged file is what its bytes happen to ask for.
        raise CheckpointError(
            f"`{file}` is truncated or damaged, or holds more than tensors ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no words'}); fetch it again."
        ) from error
