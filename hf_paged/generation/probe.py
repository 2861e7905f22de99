"""Runs the paged path on a few tokens at load, against the plain forward."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from ..cache import memory
from ..errors import HfPagedError, NotEnoughMemoryError, UnsupportedModelError
from ..kernels.base import PagedAttentionBackend
from ..modeling.layer_groups import LayerGroup, num_embeddings
from .model_runner import ModelRunner
from .step import ScheduledRequest, SchedulerOutput

# Relative error of the logits, in the Frobenius norm. Rounding depends on the shape of a call, and a router may
# choose another expert for it; attending to the wrong tokens is off by far more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_HALF = 0.2
_MIB = 1 << 20
_SMALL_MODEL = 1 << 30  # bytes of weights that one thread reads in a fraction of a second


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """A model in training mode does not drop anything out while it is looked at.

    Args:
        model (`PreTrainedModel`):
            The model; its modules are in the modes that they were in afterwards.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def one_thread_if_small(model: torch.nn.Module) -> Iterator[None]:
    """Has one thread look at a small model on a CPU, which several would not do faster.

    Where other programs keep the cores busy, each of thousands of tiny operations would wait until all of its threads
    have got one: half a second of work has taken twenty.

    Args:
        model (`PreTrainedModel`):
            The model.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if size > _SMALL_MODEL or not torch.backends.openmp.is_available():
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def enough_memory(model: torch.nn.Module) -> Iterator[None]:
    """What looks at a model may run out of its device's memory, and then says so.

    Args:
        model (`PreTrainedModel`):
            The model.

    Raises:
        NotEnoughMemoryError: Instead of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        device = next(model.parameters()).device
        raise NotEnoughMemoryError(
            f"A few tokens of {type(model).__name__} cannot be computed on {device}: "
            f"{memory.free_memory(device) / _MIB:.0f} MiB are free there beside the weights and other programs. Free "
            "memory, or use another device."
        ) from error


@torch.inference_mode()
def check_against_stock(
    model: PreTrainedModel, groups: tuple[LayerGroup, ...], backend: PagedAttentionBackend, block_size: int
) -> None:
    """Computes two short sequences together on the paged path, in chunks, and compares with the plain forward.

    Args:
        model (`PreTrainedModel`):
            The model, with our attention implementation set.
        groups (`tuple[LayerGroup, ...]`):
            Its layers.
        backend (`PagedAttentionBackend`):
            The attention backend.
        block_size (`int`):
            Tokens per block.

    Raises:
        UnsupportedModelError: If the paged path fails, or gives other logits.
    """
    vocab = num_embeddings(model)
    device = groups[0].device
    first = [(7 * i + 3) % vocab for i in range(block_size + 3)]
    second = [(5 * i + 2) % vocab for i in range(5)]
    counts = [math.ceil(len(tokens) / block_size) for tokens in (first, second)]
    ids = tuple(range(counts[0])), tuple(range(counts[0], sum(counts)))
    blocks = tuple(tuple(block_ids for _ in groups) for block_ids in ids)
    steps = [
        SchedulerOutput(
            0,
            (
                ScheduledRequest("a", 0, len(first) - 1, tuple(first), blocks[0], is_new=True),
                ScheduledRequest("b", 0, 2, tuple(second), blocks[1], is_new=True),
            ),
        ),
        SchedulerOutput(
            1,
            (
                ScheduledRequest("a", len(first) - 1, 1, sample_ids=("a",)),
                ScheduledRequest("b", 2, len(second) - 2, sample_ids=("b",)),
            ),
        ),
    ]
    try:
        with one_thread_if_small(model):
            runner = ModelRunner(
                model,
                groups,
                backend,
                num_blocks=sum(counts),
                block_size=block_size,
                max_num_seqs=2,
                max_model_len=max(counts) * block_size,
            )
            logits = [runner.collect(runner.launch(step)).logits for step in steps][-1]
            stock = [
                model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[0, -1]
                for tokens in (first, second)
            ]
    except (NotEnoughMemoryError, torch.OutOfMemoryError):  # which say nothing about the model
        raise
    except HfPagedError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run on the paged engine: {error}") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails when its tokens come in one flat row: {type(error).__name__}: {error}"
        ) from error
    expected = torch.stack(stock).double()
    difference, size = float((logits.double() - expected).norm()), float(expected.norm())
    tolerance = _TOLERANCE.get(stock[0].dtype, _TOLERANCE_HALF)
    if not difference <= tolerance * size and bool(expected.isfinite().all()):
        raise UnsupportedModelError(
            f"{type(model).__name__} gives other logits on the paged path than on its own: relative error "
            f"{difference:.2g} / {size:.2g}, allowed {tolerance:.2g}. "
            "Some layer does more than attention over keys and values."
        )
