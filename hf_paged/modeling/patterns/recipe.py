"""What a decoder layer, or a part of one, is made of: numbers, and where its tensors are to be found at each step.

    hidden -> norm1 -> q, k, v -> q/k norm -> rope -> attention -> o -> post-attention norm -> + -> norm2 -> gate, up
           -> activation -> down -> post-MLP norm -> +

Nothing is copied or packed: every step fetches the tensors anew, so that weights that were written in place, swapped
or re-assigned are those of the moment.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...kernels.layers import TENSORS, LayerArguments, LayerShape
from ...kernels.quantized_blocks import Blocks

TENSOR_INDEX = {name: i for i, name in enumerate(TENSORS)}


class NormKind(enum.IntEnum):
    """How a norm computes."""

    NONE = 0
    RMS = 1
    LAYER = 2


class ResidualFlow(enum.IntEnum):
    """What the attention block and the MLP of a layer are given, and what is added to what."""

    SEQUENTIAL = 0
    PARALLEL_ONE_NORM = 1
    PARALLEL_TWO_NORMS = 2
    NONE = 3


class RopeLayout(enum.IntEnum):
    """Which numbers of a head are rotated together: i and i + n/2, or 2i and 2i + 1, written there or to i, i + n/2."""

    NONE = 0
    HALF = 1
    INTERLEAVED = 2
    INTERLEAVED_TO_HALF = 3


class QKNormKind(enum.IntEnum):
    """Over what queries and keys are normalised."""

    NONE = 0
    PER_HEAD = 1
    FULL_WIDTH = 2


class Activation(enum.IntEnum):
    """The activation of an MLP; the numbers are those of `csrc/activation.h`."""

    IDENTITY = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    QUICK_GELU = 4
    RELU = 5
    RELU2 = 6
    SIGMOID = 7
    TANH = 8


View = Callable[[torch.Tensor], torch.Tensor]


class TensorSource(NamedTuple):
    """Where a tensor lies: a parameter of a module, or a view of one.

    Args:
        parameters (`dict[str, Any]`):
            The `_parameters` of the module.
        name (`str`):
            The name in there.
        view (`View`, *optional*):
            Takes a part of it, without copying.
    """

    parameters: dict[str, Any]
    name: str
    view: View | None = None

    def fetch(self) -> torch.Tensor:
        """Returns the tensor of now."""
        tensor = self.parameters[self.name]
        return tensor if self.view is None else self.view(tensor)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A view of rows of a fused weight or bias.

    Args:
        start (`int`):
            The first.
        stop (`int`):
            The one after the last.
    """

    start: int
    stop: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.start : self.stop]


@dataclasses.dataclass(frozen=True)
class HeadRows:
    """A view of the queries, keys or values of a weight or bias that holds all three head by head.

        rows of the weight    | head 0: q | k | v | head 1: q | k | v | ...      parts of equal size

    Args:
        num_heads (`int`):
            Heads.
        part (`int`):
            Which part of each head.
        num_parts (`int`):
            How many parts a head has.
    """

    num_heads: int
    part: int
    num_parts: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(self.num_heads, self.num_parts, -1, *tensor.shape[1:])[:, self.part]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRecipe:
    """How a decoder layer, an attention block or an MLP is computed.

    Args:
        sources (`dict[str, TensorSource]`):
            Where the tensors are, by their names in `TENSORS`; absent ones are left out.
        shape (`LayerShape`):
            Its numbers.
    """

    sources: dict[str, TensorSource]
    shape: LayerShape

    @property
    def is_rotary(self) -> bool:
        """Returns whether it needs the angles of the positions."""
        return self.shape.rope_layout != RopeLayout.NONE

    def arguments(self, key_cache: Blocks | None = None, value_cache: Blocks | None = None) -> LayerArguments:
        """Returns the layer as the operator takes it, with the tensors of now.

        Args:
            key_cache (`Blocks`, *optional*):
                The layer's key blocks.
            value_cache (`Blocks`, *optional*):
                The layer's value blocks.
        """
        tensors: list[torch.Tensor | None] = [None] * len(TENSORS)
        for name, source in self.sources.items():
            tensors[TENSOR_INDEX[name]] = source.fetch()
        return LayerArguments(self.shape, tensors, key_cache, value_cache)
