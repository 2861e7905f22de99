"""What a `PagedCache` holds, by itself: to copy it, and to keep it in a safetensors file.

    format    hf_paged.PagedCache          metadata of the file; strings, as safetensors wants them
    version   1
    block_size, tables, lengths            JSON: an int, block ids of each row, tokens in each layer

    layers.<i>.keys     [num_kv_heads, blocks * block_size, Dk]
    layers.<i>.values   [num_kv_heads, blocks * block_size, Dv]

A block to which several rows refer is in the file once; slots without a token are zero.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import CacheFileError, ConfigurationError

_FORMAT = "hf_paged.PagedCache"
_VERSION = "1"


@dataclasses.dataclass
class CacheContents:
    """The blocks of one cache and who refers to them.

    Args:
        block_size (`int`):
            Tokens per block.
        tables (`list[list[int]]`):
            For each row the numbers of its blocks, counted from 0.
        lengths (`list[int]`):
            Tokens that each layer holds of each row.
        layers (`dict[int, tuple[torch.Tensor, torch.Tensor]]`):
            Keys and values of each layer that has any, `[num_kv_heads, blocks * block_size, Dk or Dv]`.
    """

    block_size: int
    tables: list[list[int]]
    lengths: list[int]
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]

    @property
    def num_blocks(self) -> int:
        """Returns the number of different blocks."""
        return len({block_id for row in self.tables for block_id in row})

    def check(self) -> None:
        """Checks that the parts belong together.

        Raises:
            ValueError: If they do not; the message says which.
        """
        if not (_is_count(self.block_size) and self.block_size > 0):
            raise ValueError(f"`block_size` is {self.block_size!r}")
        if not (isinstance(self.lengths, list) and all(map(_is_count, self.lengths))):
            raise ValueError("`lengths` is not a list of token counts")
        if not (isinstance(self.tables, list) and all(isinstance(row, list) for row in self.tables)):
            raise ValueError("`tables` is not a list of rows")
        self._check_tables()
        self._check_layers()

    def _check_tables(self) -> None:
        columns = -(-max(self.lengths, default=0) // self.block_size)
        ids = [block_id for row in self.tables for block_id in row]
        if any(len(row) != columns for row in self.tables) or not all(map(_is_count, ids)):
            raise ValueError(f"`tables` is not {columns} block ids in each row")
        if set(ids) != set(range(self.num_blocks)):
            raise ValueError("`tables` does not number its blocks from 0")

    def _check_layers(self) -> None:
        if any(length and (not self.tables or i not in self.layers) for i, length in enumerate(self.lengths)):
            raise ValueError("a layer that holds tokens has no blocks")
        for i, tensors in self.layers.items():
            if not 0 <= i < len(self.lengths):
                raise ValueError(f"there are blocks of a layer {i}, but {len(self.lengths)} layers")
            for tensor in tensors:
                if tensor.ndim != 3 or tensor.shape[1] != self.num_blocks * self.block_size:
                    raise ValueError(f"layer {i} has blocks of shape {tuple(tensor.shape)}")

    def without_leftovers(self) -> CacheContents:
        """Returns the contents with zeros in the slots that hold no token: what was there was cropped."""
        length = max(self.lengths, default=0)
        used = length % self.block_size
        if not used:
            return self
        last = sorted({row[-1] for row in self.tables})
        layers = {}
        for i, tensors in self.layers.items():
            cleared = []
            for tensor in tensors:
                blocks = tensor.detach().clone().view(tensor.shape[0], -1, self.block_size, tensor.shape[2])
                blocks[:, last, used:] = 0
                cleared.append(blocks.view(tensor.shape))
            layers[i] = (cleared[0], cleared[1])
        return dataclasses.replace(self, layers=layers)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def write_cache_file(path: str | os.PathLike, contents: CacheContents) -> None:
    """Writes a file, or leaves what was there.

    Args:
        path (`str` or `os.PathLike`):
            The file; its folder exists.
        contents (`CacheContents`):
            What to write.

    Raises:
        OSError: If it cannot be written.
    """
    contents = contents.without_leftovers()
    tensors = {
        f"layers.{i}.{name}": tensor.detach().contiguous()
        for i, pair in contents.layers.items()
        for name, tensor in zip(("keys", "values"), pair, strict=True)
    }
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "block_size": json.dumps(contents.block_size),
        "tables": json.dumps(contents.tables, separators=(",", ":")),
        "lengths": json.dumps(contents.lengths, separators=(",", ":")),
    }
    target = Path(path)
    # Beside the target, since only within one file system a rename is a single act.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        save_file(tensors, temporary, metadata=metadata)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except SafetensorError as error:  # how it says that the disk is full or the folder is not there
        raise OSError(f"{target} cannot be written: {error}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_cache_file(path: str | os.PathLike, device: str | torch.device = "cpu") -> CacheContents:
    """Reads a file.

    Args:
        path (`str` or `os.PathLike`):
            The file.
        device (`str` or `torch.device`, defaults to `"cpu"`):
            Where the blocks go.

    Raises:
        CacheFileError: If it is something else, is damaged, or is of another version.
        ConfigurationError: If the device cannot be used here.
        FileNotFoundError: If there is none.
    """
    place = _usable(device)
    if Path(path).is_dir():
        raise CacheFileError(f"{path} is a folder; give the file that `PagedCache.save` has written.")
    try:
        with safe_open(path, framework="pt", device=place) as file:
            metadata = file.metadata() or {}
            _check_kind(path, metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        return _contents(metadata, tensors)
    except SafetensorError as error:
        raise CacheFileError(f"{path} is no safetensors file, or is incomplete: {error}.") from error
    except (KeyError, TypeError, RecursionError, json.JSONDecodeError) as error:
        raise CacheFileError(f"{path} lacks a part of a PagedCache: {error!r}.") from error
    except CacheFileError:
        raise
    except ValueError as error:
        raise CacheFileError(f"{path} contradicts itself: {error}.") from error


def _usable(device: str | torch.device) -> str:
    """A device as safetensors calls it; found out before the file is read, whose errors would be about the file."""
    try:
        checked = torch.device(device)
        torch.zeros(1, device=checked)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ImportError) as error:
        raise ConfigurationError(
            f"`device` {str(device)!r} cannot be used here: {str(error).partition(chr(10))[0].rstrip('.')}. Give the "
            "model's own (`model.device`), or leave it out for the CPU."
        ) from error
    if checked.type == "meta":
        raise ConfigurationError("`device` 'meta' holds no values; give the model's own, or leave it out for the CPU.")
    return "cpu" if checked.type == "cpu" else str(checked)


def _check_kind(path: str | os.PathLike, metadata: dict[str, str]) -> None:
    if metadata.get("format") != _FORMAT:
        raise CacheFileError(
            f"{path} is not a saved PagedCache (its `format` is {metadata.get('format')!r}, not {_FORMAT!r}); "
            "use a file that `PagedCache.save` has written."
        )
    if metadata.get("version") != _VERSION:
        raise CacheFileError(
            f"{path} is of version {metadata.get('version')!r} of the format, this is version {_VERSION!r}; compute "
            "the cache again, or load it with the hf_paged that wrote it."
        )


def _contents(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> CacheContents:
    fields = {name: json.loads(metadata[name]) for name in ("block_size", "tables", "lengths")}
    layers = {}
    for name in list(tensors):
        prefix, number, side = name.split(".")
        if prefix != "layers" or side not in ("keys", "values"):
            raise ValueError(f"it has a tensor {name!r}")
        layers[int(number)] = (tensors[f"layers.{number}.keys"], tensors[f"layers.{number}.values"])
    contents = CacheContents(layers=layers, **fields)
    contents.check()
    return contents
