"""Weights that wait in host memory while an engine sleeps, and come back into the same parameters.

    awake     parameter -> storage on the device
    asleep    parameter -> storage on the host (pinned for CUDA): may be read, saved, written to
    awake     parameter -> new storage on the device, with what the parameter then is

Whole storages move, so that parameters that are views of one storage are so before, meanwhile and afterwards.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator

import torch

from ..cache import memory
from ..errors import NotEnoughMemoryError

logger = logging.getLogger(__name__)

_GIB = 1 << 30
Moves = list[tuple[torch.Tensor, torch.device]]  # tensors, and where each is to be


class SleepingWeights:
    """Moves a model's weights to the host.

    Args:
        model (`torch.nn.Module`):
            The model. Neither it nor its weights are kept alive.

    Raises:
        NotEnoughMemoryError: If the host has not that much left; nothing has moved then.
    """

    def __init__(self, model: torch.nn.Module):
        named = {name: tensor for name, tensor in _named_tensors(model) if _is_movable(tensor)}
        self._places = {name: tensor.device for name, tensor in named.items()}
        self._addresses: set[int] = set()  # of storages on the host
        self._is_pinned = False
        tensors = list({id(tensor): tensor for tensor in named.values()}.values())
        sizes = [tensor.untyped_storage().nbytes() for tensor in _one_of_each_storage(tensors)]
        self.num_bytes = sum(sizes)
        if not sizes:
            return
        free = memory.free_memory(torch.device("cpu"))
        if self.num_bytes > free:
            raise NotEnoughMemoryError(
                f"The weights take {self.num_bytes / _GIB:.2f} GiB, and {free / _GIB:.2f} GiB of host memory are free: "
                "the engine cannot sleep. Free memory, or call `release()`, which leaves the weights where they are."
            )
        # Torch's pinned memory comes in powers of two.
        is_cuda = {device.type for device in self._places.values()} == {"cuda"}
        self._is_pinned = is_cuda and sum(1 << (size - 1).bit_length() for size in sizes) < free
        moved = _move([(tensor, torch.device("cpu")) for tensor in tensors], self._host_buffer)
        self._addresses = {storage.data_ptr() for storage in moved}
        for device in set(self._places.values()):
            memory.give_back(device)
        where = "pinned host memory" if self._is_pinned else "host memory"
        logger.info("%.2f GiB of weights wait in %s.", self.num_bytes / _GIB, where)

    def _host_buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        try:
            return memory.host_buffer(num_bytes, self._is_pinned)
        except RuntimeError as error:
            if not self._is_pinned:
                raise
            logger.warning("The weights wait in host memory that is not pinned, which takes longer: %s", error)
            self._is_pinned = False
            return memory.host_buffer(num_bytes, pinned=False)

    def restore(self, model: torch.nn.Module) -> None:
        """Moves weights back to where they were, also those that have been written or replaced meanwhile.

        Args:
            model (`torch.nn.Module`):
                The model.

        Raises:
            NotEnoughMemoryError: If the device has not that much left; nothing has moved then.
        """
        moves = {
            id(tensor): (tensor, self._places[name])
            for name, tensor in _named_tensors(model)
            if name in self._places and _is_plain(tensor) and self._is_away(tensor)
        }
        try:
            _move(list(moves.values()), memory.device_buffer)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # whose variables hold what there was room for
            device = next(iter(self._places.values()))
            raise NotEnoughMemoryError(
                f"{self.num_bytes / _GIB:.2f} GiB of weights are to come back to {device}, where "
                f"{memory.free_memory(device) / _GIB:.2f} GiB are free; the engine sleeps on. Free memory there, and "
                "call `wake_up()` again."
            ) from error
        self._addresses = set()
        if self._is_pinned:
            memory.give_back_pinned()

    def _is_away(self, tensor: torch.Tensor) -> bool:
        is_host = memory.accelerator_of(tensor.device) is None
        return is_host or tensor.untyped_storage().data_ptr() in self._addresses


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _is_movable(tensor: torch.Tensor) -> bool:
    """Others (quantized weights that are more than their storage, inference tensors) stay where they are."""
    return _is_plain(tensor) and memory.accelerator_of(tensor.device) is not None


def _is_plain(tensor: torch.Tensor) -> bool:
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_known and not tensor.is_inference() and tensor.untyped_storage().nbytes() > 0


def _one_of_each_storage(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({(tensor.device, tensor.untyped_storage().data_ptr()): tensor for tensor in tensors}.values())


def _move(moves: Moves, allocate: Callable[[int, torch.device], torch.Tensor]) -> list[torch.UntypedStorage]:
    """Gives tensors storages of the same contents elsewhere: all of them, or none if something goes wrong."""
    with torch.inference_mode(False), torch.no_grad():
        buffers: dict[tuple[torch.device, int, torch.device], torch.Tensor] = {}
        for tensor, device in moves:
            storage = tensor.untyped_storage()
            key = (tensor.device, storage.data_ptr(), device)
            if key not in buffers:
                buffers[key] = allocate(storage.nbytes(), device)
                source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                buffers[key].copy_(source, non_blocking=True)
        for device in {device for tensor, target in moves for device in (tensor.device, target)}:
            accelerator = memory.accelerator_of(device)
            if accelerator is not None:
                accelerator.synchronize(device)
        before = [tensor.data for tensor, _ in moves]
        try:
            for (tensor, device), old in zip(moves, before, strict=True):
                buffer = buffers[old.device, old.untyped_storage().data_ptr(), device]
                view = torch.empty(0, dtype=old.dtype, device=device)
                tensor.data = view.set_(buffer.untyped_storage(), old.storage_offset(), old.shape, old.stride())
        except BaseException:  # Ctrl-C: half of a model here and half there is of no use
            for (tensor, _), old in zip(moves, before, strict=True):
                tensor.data = old
            raise
        return [buffer.untyped_storage() for buffer in buffers.values()]
