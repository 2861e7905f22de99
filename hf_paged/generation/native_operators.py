"""The operators that native layers run on: the native library's, Triton's on GPUs, or the same in plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..kernels.base import PagedAttentionBackend
from ..kernels.cpu import decoder, library, linear, norms
from ..kernels.layers import LayerArguments
from ..kernels.metadata import PagedAttentionMetadata
from ..kernels.triton import device
from ..modeling.patterns import reference
from ..modeling.patterns.recipe import NormKind


class DecoderLayers(Protocol):
    """Runs layers, attention blocks or MLPs one after the other; see `modeling/patterns/reference.py`."""

    def __call__(
        self,
        hidden: torch.Tensor,
        layers: Sequence[LayerArguments],
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        metadata: PagedAttentionMetadata | None,
    ) -> torch.Tensor: ...


class NormFunction(Protocol):
    """A norm over the last dimension; see `modeling/patterns/reference.py`."""

    def __call__(
        self,
        x: torch.Tensor,
        kind: NormKind,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> torch.Tensor: ...


@dataclasses.dataclass(frozen=True)
class Operators:
    """A set of operators.

    Args:
        name (`str`):
            What they are, for people.
        decoder_layers (`DecoderLayers`):
            Whole layers, attention blocks and MLPs.
        linear (`Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]`, *optional*):
            `x`, `weight`, `bias`, as `torch.nn.functional.linear`; `None` leaves linears as they are.
        norm (`NormFunction`, *optional*):
            Norms that stand alone; `None` leaves them as they are.
        joins_linears (`bool`, defaults to `False`):
            Whether linears of one input are one product where their weights lie side by side.
    """

    name: str
    decoder_layers: DecoderLayers
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None
    norm: NormFunction | None = None
    joins_linears: bool = False


REFERENCE = Operators("reference", reference.decoder_layers, reference.linear, reference.normalized)


def native_operators() -> Operators | None:
    """Returns the operators of the native library, or `None` where it does not run."""
    if not (library.load() and norms.load() and linear.load()):
        return None
    return Operators("native", decoder.decoder_layers, linear.linear, _norm)


def triton_operators(backend: PagedAttentionBackend) -> Operators | None:
    """Returns the operators for models on a GPU, or `None` where Triton's kernels do not run.

    Args:
        backend (`PagedAttentionBackend`):
            The attention backend of the engine, by which their layers attend.
    """
    if device.unavailable_reason() is not None:
        return None
    # Triton takes long to import and is not needed on a CPU.
    from ..kernels.triton.norms import Norm, normalized
    from ..kernels.triton.operators import TritonLayers

    def norm(
        x: torch.Tensor, kind: NormKind, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, offset: float
    ) -> torch.Tensor:
        return normalized(x, Norm(kind, weight, bias, eps, offset))

    # Linears that stand alone are torch's, as they are.
    return Operators("triton", TritonLayers(backend), norm=norm, joins_linears=True)


def _norm(
    x: torch.Tensor, kind: NormKind, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, offset: float
) -> torch.Tensor:
    if kind == NormKind.RMS and bias is None:
        return norms.rms_norm(x, weight, eps, offset)[0]
    return norms.layer_norm(x, weight, bias, eps, offset)[0]
