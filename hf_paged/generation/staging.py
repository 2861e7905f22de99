"""The way of a step's inputs to the device: all of them side by side, in one copy that nobody waits for.

    host     | pinned 0 | pinned 1 | pinned 2 |      filled in turn; each is filled again when its copy is behind
                   \\          |          /
    device              | memory |                  persists: the copy for step n + 1 comes after the kernels of step n

    memory   | input_ids | position_ids | ... | block_tables | slot_mapping | ... | sampling | extras | fill_in |
             0           multiples of `ALIGNMENT`

Where everything lies depends on shapes only, so the work that a CUDA graph has captured finds its inputs again.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from .step_inputs import HostInputs, ModelInputs

ALIGNMENT = 16  # bytes, of every array: what a Triton kernel is compiled for, and loads as one
NUM_BUFFERS = 3  # the steps on the device, of which there are two at most, and the one that is put together
_SMALLEST = 1 << 16
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
}
Layout = tuple[tuple[int, tuple[int, ...], np.dtype], ...]  # for each array where it begins, its shape and its dtype


@dataclasses.dataclass(slots=True)
class _Buffer:
    """Memory of the host that copies start from, and the end of the last one."""

    memory: torch.Tensor
    copied: torch.cuda.Event | None = None


class Staging:
    """Sends inputs to a device.

    On a CPU nothing is copied: the tensors share the memory of the arrays.

    Args:
        device (`torch.device`):
            Where to.
        copies (`bool`, *optional*):
            Whether inputs are copied to memory that persists; by default where the device is not the CPU.
    """

    def __init__(self, device: torch.device, copies: bool | None = None):
        self.device = device
        self.copies = device.type != "cpu" if copies is None else copies
        self._memory = self._allocate(0, device)
        self._buffers = [_Buffer(self._allocate(0)) for _ in range(NUM_BUFFERS)]
        self._turn = 0
        self._views: tuple[torch.Tensor, Layout, list[torch.Tensor]] | None = None  # of the last step

    @property
    def num_bytes(self) -> int:
        """Returns the size of the memory on the device."""
        return self._memory.nbytes

    @staticmethod
    def room(host: HostInputs) -> int:
        """Returns how many bytes inputs take on the device.

        Args:
            host (`HostInputs`):
                The inputs; only their shapes matter.
        """
        return _layout(host.arrays())[1]

    @staticmethod
    def most_room(num_tokens: int, num_requests: int, table_width: int, num_groups: int) -> int:
        """Returns how many bytes any inputs within some limits take at most, with blocks to be
        cleared and copied for each of them.

        Args:
            num_tokens (`int`):
                Tokens in a call, all of whose logits may be wanted.
            num_requests (`int`):
                Requests in a call, or tokens chosen after it.
            table_width (`int`):
                Blocks of a request.
            num_groups (`int`):
                Layer groups.
        """
        by_token = 8 * (4 + num_groups)  # input_ids, position_ids, logits_indices, token_rows, slot_mapping
        # cu_seqlens_q, seq_lens, block_tables; fill_in; settings, keys and rows of the sampler
        by_request = 4 * (2 + table_width * num_groups) + 16 + 8 * (5 + 3 + 1)
        by_request += 8 * (1 + 2) * num_groups  # a block to be cleared, and one to be copied
        return num_tokens * by_token + num_requests * by_request + ALIGNMENT * (10 + 4 * num_groups)

    def send(self, host: HostInputs, into: torch.Tensor | None = None) -> ModelInputs:
        """Sends inputs to the device, in one copy, without waiting for what it is doing.

        Args:
            host (`HostInputs`):
                The inputs; not to be changed any more if nothing is copied.
            into (`torch.Tensor`, *optional*):
                uint8, on the device, with `room` for them: they are copied there, wherever the device is.

        Returns:
            `ModelInputs`: On the device; what is sent next overwrites them, in the order of the current stream.
        """
        arrays = host.arrays()
        if into is None and not self.copies:
            return host.received(map(torch.from_numpy, arrays))
        layout, size = _layout(arrays)
        with torch.inference_mode(False):  # what persists is written to in any mode
            target = self._roomy_memory(size) if into is None else into
            assert target.nbytes >= size, f"inputs take {size} bytes, there are {target.nbytes}"
            buffer = self._next_buffer(size)
            memory = buffer.memory.numpy()
            for (start, shape, dtype), array in zip(layout, arrays, strict=True):
                np.ndarray(shape, dtype, memory, start)[...] = array
            buffer.copied = self._copy(target[:size], buffer.memory[:size])
            return host.received(self._views_of(target, layout))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        """Copies, and returns what says when the source has been read, unless that is so already."""
        if self.device.type != "cuda":
            target.copy_(source)
            return None
        target.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        return copied

    def _roomy_memory(self, size: int) -> torch.Tensor:
        if self._memory.nbytes < size:
            self._memory = self._allocate(_capacity(size), self.device)
        return self._memory

    def _next_buffer(self, size: int) -> _Buffer:
        """The buffer whose copy began the longest time ago, when it is behind."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % NUM_BUFFERS
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if buffer.memory.nbytes < size:
            buffer.memory = self._allocate(_capacity(size), pinned=self.device.type == "cuda")
        return buffer

    @staticmethod
    def _allocate(size: int, device: torch.device | str = "cpu", pinned: bool = False) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)

    def _views_of(self, memory: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
        """The arrays in some memory; made anew only when shapes change."""
        if self._views is None or self._views[0] is not memory or self._views[1] != layout:
            self._views = memory, layout, [_view(memory, *place) for place in layout]
        return self._views[2]


def _layout(arrays: list[np.ndarray]) -> tuple[Layout, int]:
    """Returns where arrays lie, and where they end."""
    places, end = [], 0
    for array in arrays:
        places.append((end, array.shape, array.dtype))
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(places), end


def _view(memory: torch.Tensor, start: int, shape: tuple[int, ...], dtype: np.dtype) -> torch.Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    return memory[start : start + size].view(_DTYPES[dtype]).view(shape)


def _capacity(size: int) -> int:
    return max(_SMALLEST, 1 << (size - 1).bit_length())
