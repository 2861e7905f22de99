"""Token embeddings in 8 bits a number, and the head that is tied to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..kernels.packed_rows import Codes, Numbers, dequantized, pack_rows
from ..modeling.packed_linear import PackedLinear


class PackedEmbedding(nn.Module):
    """A table of embeddings in packed rows, each with one scale. It is saved as the dense table that it stands for.

    Args:
        weight (`torch.Tensor`):
            `[num_embeddings, embedding_dim]`, the dense table.
    """

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.dtype = weight.dtype
        self.weight = nn.Parameter(_rows(weight), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Looks up embeddings.

        Args:
            input_ids (`torch.Tensor`):
                `[...]` integers.

        Returns:
            `torch.Tensor`: `[..., embedding_dim]` in the dtype of the dense table.
        """
        rows = self.weight[input_ids.reshape(-1)]
        return dequantized(rows, self.embedding_dim).to(self.dtype).view(*input_ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Returns what `print(model)` shows."""
        return f"{self.num_embeddings}, {self.embedding_dim}, 8 bits"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = dequantized(self.weight, self.embedding_dim).to(self.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedEmbedding:
        """Moves the rows; a conversion changes the dtype of what is looked up."""
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        return self


class TiedHead(PackedLinear):
    """A head that multiplies with the rows of the embeddings. Nothing of it is saved but its bias.

    Args:
        embedding (`PackedEmbedding`):
            Whose rows.
        bias (`torch.nn.Parameter`, *optional*):
            `[num_embeddings]`.
    """

    def __init__(self, embedding: PackedEmbedding, bias: nn.Parameter | None = None):
        super().__init__(embedding.embedding_dim, embedding.num_embeddings, embedding.weight, bias)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(prefix + "weight")


def _rows(weight: torch.Tensor) -> torch.Tensor:
    """Each row of a table in 8 bits a number, a piece of it at a time: in float32 it may be large."""
    pieces = []
    for piece in weight.detach().split(8192):
        piece = piece.float()
        scale = piece.abs().amax(1, keepdim=True) / 127
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        codes = (piece / scale).round().clamp(-127, 127).to(torch.int8)
        pieces.append(pack_rows(Numbers(codes, scale, torch.zeros_like(scale), Codes.Q8)))
    return torch.cat(pieces)
