"""What is written into K/V blocks: new keys and values, rotated and perhaps quantized, and copies of blocks.

A quantized cache (see `layer_cache.py`) has one float16 scale per slot and head: the largest number of a head is stored
as 127 (int8) or 448 (float8). A head that holds a NaN or an infinity gets a scale that makes all of it NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cpu.rope import RopeLayout
from .cache_kernels import copy_blocks_kernel, rope_store_kernel
from .launching import DTYPES, check, check_codes, check_dtype, on_device, padded, warp_size
from .layer_cache import LayerCache
from .norms import Norm

# What this file can: dtypes of new keys and values, of caches with scales, and heads up to a size.
CAPABLE_DTYPES = DTYPES
MAX_HEAD_DIM = 1024
NUMBERS_PER_PROGRAM = 2048
COPY_BLOCK = 1024

_NO_ROPE = RopeLayout(0)
_NO_NORMS = Norm(0), Norm(0)


def heads_of_program(num_heads: int, head_dim: int) -> int:
    """Returns the table's entry for heads of a size: how many of them a program takes.

    Args:
        num_heads (`int`):
            Query heads.
        head_dim (`int`):
            The larger of Dk and Dv.
    """
    return min(padded(num_heads), max(1, NUMBERS_PER_PROGRAM // padded(head_dim)))


def warps_of_program(num_heads: int, head_dim: int, threads: int) -> int:
    """Returns the table's entry for the heads of a program: so many warps that each thread loads 16 bytes at a time.

    Args:
        num_heads (`int`):
            Of a program, see `heads_of_program`.
        head_dim (`int`):
            The larger of Dk and Dv.
        threads (`int`):
            Of a warp.
    """
    return max(1, min(4, num_heads * padded(head_dim) // (8 * threads)))


def rope_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    layout: RopeLayout | None,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
    norms: tuple[Norm, Norm] | None = None,
) -> torch.Tensor:
    """Norms and rotates queries and keys, and writes keys and values into their slots, in one launch.

    Args:
        query (`torch.Tensor`):
            `[tokens, num_query_heads, Dk]` float32, bfloat16 or float16; heads may be views into a merged projection.
        key (`torch.Tensor`):
            `[tokens, num_kv_heads, Dk]`, of the query's dtype.
        value (`torch.Tensor`):
            `[tokens, num_kv_heads, Dv]`, of the query's dtype.
        angles (`tuple[torch.Tensor, torch.Tensor]`, *optional*):
            cos and sin, `[tokens, n]` or `[1, n]` for all tokens; none in layers without positions.
        layout (`RopeLayout`, *optional*):
            How the model pairs numbers and angles; none without angles.
        cache (`LayerCache`):
            Where keys and values are written to: float32, bfloat16 or float16, or with scales int8 or a float8.
        slot_mapping (`torch.Tensor`):
            int64 `[tokens]`: `block_id * block_size + offset`, or a negative number for a token that is not stored
            (padding). No slot may occur twice; slots are not checked, as that would wait for the device.
        norms (`tuple[Norm, Norm]`, *optional*):
            Of the query and key heads, before they are rotated: alike but for their weights, without bias.

    Returns:
        `torch.Tensor`: The queries, a new contiguous tensor of their shape and dtype.

    Raises:
        NotSupportedError: If a shape or dtype does not fit.
    """
    _check_shapes(query, key, value, cache, slot_mapping)
    cos, sin = angles if angles is not None else (None, None)
    pairs, begin, dim, step, sign = (layout if layout is not None and angles is not None else _NO_ROPE).arguments()
    check(begin + dim <= query.shape[2], f"rope turns numbers up to {begin + dim} of heads of {query.shape[2]}.")
    cos_stride = 0
    if cos is not None and sin is not None:
        fits = cos.shape == sin.shape and cos.stride() == sin.stride() and cos.shape[0] in (1, query.shape[0])
        fits = fits and cos.dim() == 2 and (dim == 0 or (dim // 2 - 1) * step < cos.shape[1])
        check(fits, f"cos {list(cos.shape)} and sin {list(sin.shape)} must be alike, [tokens, n], and long enough.")
        cos_stride, step = (0 if cos.shape[0] == 1 else cos.stride(0)), step * cos.stride(1)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not query.shape[0]:
        return output
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    query_norm, key_norm = norms or _NO_NORMS
    (num_query_heads, key_dim), (num_kv_heads, value_dim) = query.shape[1:], value.shape[1:]
    heads = heads_of_program(num_query_heads, max(key_dim, value_dim))
    tiles = -(-num_query_heads // heads) + 2 * -(-num_kv_heads // heads)
    with on_device(query):
        rope_store_kernel[(query.shape[0], tiles)](
            output, cache.keys, cache.values, cache.key_scales, cache.value_scales, query, key, value,
            query_norm.weight, key_norm.weight, cos, sin, slot_mapping, query.stride(0), query.stride(1), key.stride(0),
            key.stride(1), value.stride(0), value.stride(1), cos_stride, sign, query_norm.eps, query_norm.offset,
            NUM_QUERY_HEADS=num_query_heads, NUM_KV_HEADS=num_kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
            KEY_PAD=padded(key_dim), VALUE_PAD=padded(value_dim), BLOCK_SIZE=cache.keys.shape[2], HEADS=heads,
            PAIRS=pairs, BEGIN=begin, HALF=dim // 2, COS_STEP=step, NORM_KIND=int(query_norm.kind),
            num_warps=warps_of_program(heads, max(key_dim, value_dim), warp_size()),
        )  # fmt: skip
    return output


def _check_shapes(query, key, value, cache: LayerCache, slots: torch.Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_dtype(name, tensor, (query.dtype,) if query.dtype in CAPABLE_DTYPES else CAPABLE_DTYPES)
        check(tensor.dim() == 3 and tensor.shape[0] == query.shape[0], f"`{name}` must be [tokens, heads, head_dim].")
        check(tensor.shape[2] <= MAX_HEAD_DIM, f"heads of {tensor.shape[2]} are larger than {MAX_HEAD_DIM}.")
    check(slots.shape == (query.shape[0],) and slots.dtype == torch.int64, "`slot_mapping` must be int64 [tokens].")
    check(key.shape[1:] == (value.shape[1], query.shape[2]), "query, key and value differ in heads or head_dim.")
    num_blocks, _, block_size, _ = cache.keys.shape
    for name, new, blocks, scales in (
        ("keys", key, cache.keys, cache.key_scales),
        ("values", value, cache.values, cache.value_scales),
    ):
        if cache.is_quantized:
            check_codes(name, blocks)
        else:
            check_dtype(name, blocks, CAPABLE_DTYPES)
        shape = (num_blocks, new.shape[1], block_size, new.shape[2])
        fits = blocks.shape == shape and blocks.is_contiguous()
        check(fits, f"the cache of {name} is {list(blocks.shape)}; it must be contiguous {list(shape)}.")
        if cache.is_quantized:
            fits = scales is not None and scales.shape == shape[:3] and scales.is_contiguous()
            fits = fits and scales is not None and scales.dtype == torch.float16
            check(fits, f"the scales of {name} must be contiguous float16 {list(shape[:3])}.")


class BlockCopies:
    """Copies blocks of the caches of all layers in one launch.

    Args:
        caches (`Sequence[torch.Tensor]`):
            Keys, values and scales of all layers, each `[num_blocks, ...]` and contiguous, on one device, with blocks
            of a multiple of 16 bytes. Their memory must outlive this object; it holds them.

    Raises:
        NotSupportedError: If one of them is not so.
    """

    def __init__(self, caches: Sequence[torch.Tensor]):
        self._caches = list(caches)
        sizes = [cache.nbytes // max(len(cache), 1) for cache in self._caches]
        check(
            all(cache.is_contiguous() for cache in self._caches) and not any(size % 16 for size in sizes),
            f"caches must be contiguous, with blocks of a multiple of 16 bytes, not of {sorted(set(sizes))}.",
        )
        numbers = [[cache.data_ptr() for cache in self._caches], [size // 8 for size in sizes]]
        device = self._caches[0].device if self._caches else None
        self._addresses, self._words = torch.tensor(numbers, dtype=torch.int64, device=device)

    def copy(self, pairs: torch.Tensor) -> None:
        """Copies blocks.

        Args:
            pairs (`torch.Tensor`):
                int64 `[2, copies]`, contiguous, on the device: source and destination block ids; no destination is a
                source or occurs twice.

        Raises:
            NotSupportedError: If the pairs are not so.
        """
        fits = pairs.dim() == 2 and len(pairs) == 2 and pairs.dtype == torch.int64 and pairs.is_contiguous()
        check(fits, f"`pairs` is {list(pairs.shape)} of {pairs.dtype}; it must be contiguous int64 [2, copies].")
        if self._caches and pairs.shape[1]:
            with on_device(pairs):
                copy_blocks_kernel[(pairs.shape[1], len(self._caches))](
                    self._addresses, self._words, pairs, pairs.shape[1], BLOCK=COPY_BLOCK, num_warps=4
                )
