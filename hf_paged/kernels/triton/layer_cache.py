"""A layer's keys and values as the Triton kernels take them, plain or quantized."""

from __future__ import annotations

import dataclasses

import torch

from ..quantized_blocks import Blocks, split


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values in blocks; quantized ones have a scale for each slot and head.

        keys[block, kv_head]        | slot 0: Dk numbers | slot 1 | ... | slot block_size - 1 |
        key_scales[block, kv_head]  | slot 0: 1 scale    | slot 1 | ... | slot block_size - 1 |

    A key is `keys * key_scales`, a value `values * value_scales`. Slots that no token has may hold anything, NaN too.

    Args:
        keys (`torch.Tensor`):
            `[num_blocks, num_kv_heads, block_size, Dk]`, contiguous: the query's dtype, or `torch.int8`,
            `torch.float8_e4m3fn` or `torch.float8_e5m2` with scales.
        values (`torch.Tensor`):
            `[num_blocks, num_kv_heads, block_size, Dv]`, contiguous, of the keys' dtype.
        key_scales (`torch.Tensor`, *optional*):
            float16 `[num_blocks, num_kv_heads, block_size]`, contiguous.
        value_scales (`torch.Tensor`, *optional*):
            float16 `[num_blocks, num_kv_heads, block_size]`, contiguous.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @classmethod
    def of(cls, keys: Blocks, values: Blocks) -> LayerCache:
        """Returns what a layer is given as blocks.

        Args:
            keys (`Blocks`):
                `[num_blocks, num_kv_heads, block_size, Dk]`.
            values (`Blocks`):
                `[num_blocks, num_kv_heads, block_size, Dv]`.
        """
        (codes, scales), (value_codes, value_scales) = split(keys), split(values)
        return cls(codes, value_codes, scales, value_scales)

    @property
    def is_quantized(self) -> bool:
        """Returns whether there are scales."""
        return self.key_scales is not None
