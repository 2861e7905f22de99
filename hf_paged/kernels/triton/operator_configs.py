"""What the kernels between linears are compiled for ahead of time: well-known sizes of each."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..packed_rows import Codes
from . import activations, cache, norms, packed_linear, sampling
from .launching import MAX_REGISTERS, padded
from .variant import KernelVariant

_AMD = frozenset({"gfx942"})
_NVIDIA = frozenset({"sm_80", "sm_89", "sm_90", "sm_100", "sm_120"})


def all_configurations() -> list[KernelVariant]:
    """Returns norms, activations, rope with the store of K/V, copies of blocks and sampling in their usual uses."""
    return [
        _norm("rms-4096", 4096, 1),
        _norm("rms-4096-add", 4096, 1, {"total_ptr", "residual_ptr"}),
        _norm("rms-8192-add", 8192, 1, {"total_ptr", "residual_ptr"}),
        _norm("rms-576-add", 576, 1, {"total_ptr", "residual_ptr"}),
        _norm("rms-3584-before-and-after", 3584, 1, {"total_ptr", "residual_ptr", "before_weight_ptr"}, before=1),
        _norm("layer-4096-add", 4096, 2, {"total_ptr", "residual_ptr", "bias_ptr"}),
        _norm("layer-4096-add-two", 4096, 2, {"total_ptr", "residual_ptr", "other_ptr", "bias_ptr"}),
        *(_activation(kind, {"up_ptr"}) for kind in (1, 2, 3)),
        _activation(6, set()),
        _rope_store("32x8x128", 32, 8, 128, 0),
        *(_rope_store("9x3x64", 9, 3, 64, 0, targets=targets) for targets in (_NVIDIA, _AMD)),
        _rope_store("32x32x96", 32, 32, 96, 0),
        _rope_store("16x8x256", 16, 8, 256, 0),
        _rope_store("32x8x128-normed", 32, 8, 128, 0, norm_kind=1),
        _rope_store("32x8x128-interleaved", 32, 8, 128, 1),
        _rope_store("32x8x128-i8", 32, 8, 128, 0, "i8"),
        _rope_store("32x8x128-fp8e4nv", 32, 8, 128, 0, "fp8e4nv", targets=(_NVIDIA | _AMD) - {"sm_80"}),
        *(
            _packed_linear(kind, size, group, tokens)
            for kind, size, group in (
                (Codes.Q4, 4096, 128),
                (Codes.Q4, 14336, 64),
                (Codes.Q8, 4096, 0),
                (Codes.E4M3, 4096, 128),
            )
            for tokens in (1, 64)
        ),
        _copies(),
        *(_chunks(dtype, draws) for dtype in ("bf16", "fp32") for draws in (False, True)),
        *(_draws(dtype, draws) for dtype in ("bf16", "fp32") for draws in (False, True)),
    ]


def _variant(
    name: str,
    kernel: str,
    types: dict[str, str],
    constants: dict[str, Any],
    *,
    absent: Collection[str] = (),
    undivided: Collection[str] = (),
    **rest: Any,
) -> KernelVariant:
    """A kernel without matrix products; all pointers are aligned and all numbers multiples of 16 but the undivided."""
    signature = {argument: kind for argument, kind in types.items() if argument not in absent}
    divisible = {argument for argument, kind in signature.items() if kind[0] in "*i" and argument not in undivided}
    return KernelVariant(
        name=name,
        kernel=f"{__package__}.{kernel}",
        signature=signature,
        constexprs={**dict.fromkeys(absent), **constants},
        divisible=frozenset(divisible),
        has_dot=False,
        **rest,
    )


def _pointers(dtype: str, *names: str) -> dict[str, str]:
    return dict.fromkeys((f"{name}_ptr" for name in names), f"*{dtype}")


def _norm(name: str, size: int, kind: int, given: Collection[str] = (), before: int = 0) -> KernelVariant:
    rows, block, warps = norms.launch_config(size)
    optional = _pointers("bf16", "total", "other", "residual", "before_weight", "before_bias", "bias")
    types = _pointers("bf16", "y", "x", "weight") | optional
    types |= dict.fromkeys(("eps", "offset", "before_eps", "before_offset", "multiplier"), "fp32")
    types |= dict.fromkeys(("num_rows", "inner", "outer_stride", "inner_stride"), "i32")
    constants = {"SIZE": size, "BLOCK": block, "ROWS": rows, "KIND": kind, "BEFORE_KIND": before, "inner": 1}
    return _variant(
        f"norm-{name}",
        "norms:norm_kernel",
        {argument: kind for argument, kind in types.items() if argument != "inner"},
        constants,
        absent=[pointer for pointer in optional if pointer not in given],
        undivided=["num_rows"],
        num_warps=warps,
    )


def _activation(kind: int, given: Collection[str]) -> KernelVariant:
    types = _pointers("bf16", "y", "gate", "up") | dict.fromkeys(("gate_stride", "up_stride", "size"), "i32")
    return _variant(
        f"activation-{kind}{'-gated' * bool(given)}",
        "activations:activation_kernel",
        types,
        {"KIND": kind, "BLOCK": activations.BLOCK},
        absent=[] if given else ["up_ptr"],
    )


def _packed_linear(kind: Codes, size: int, group: int, num_tokens: int) -> KernelVariant:
    tile = packed_linear.tile_of(num_tokens, group, kind)
    types = _pointers("bf16", "y", "x", "bias") | {"codes_ptr": "*u8", "heads_ptr": "*fp32"}
    types |= dict.fromkeys(("num_tokens", "num_columns", "x_stride", "row_bytes"), "i32")
    undivided = {"num_tokens", "row_bytes"}
    return KernelVariant(
        name=f"packed-linear-{kind.name.lower()}-{size}-{group or 'row'}-{num_tokens}",
        kernel=f"{__package__}.packed_linear:packed_linear_kernel",
        signature={argument: type for argument, type in types.items() if argument != "bias_ptr"},
        constexprs={
            "bias_ptr": None,
            "SIZE": size,
            "GROUP": group,
            "KIND": packed_linear.kernel_kind(kind),
            "BLOCK_M": tile.block_tokens,
            "BLOCK_N": packed_linear.BLOCK_COLUMNS,
            "BLOCK_K": tile.block_inputs,
        },
        num_warps=tile.num_warps,
        max_registers=MAX_REGISTERS,
        divisible=frozenset(types.keys() - undivided - {"bias_ptr"}),
        wide_loads=False,  # of codes: rows begin at multiples of 8 bytes
    )


def _rope_store(
    name: str,
    query_heads: int,
    kv_heads: int,
    dim: int,
    pairs: int,
    cache_dtype: str = "",
    norm_kind: int = 0,
    targets: frozenset[str] | None = None,
) -> KernelVariant:
    # Larger tiles have as many warps on all.
    heads = cache.heads_of_program(query_heads, dim)
    warps = cache.warps_of_program(heads, dim, 64 if targets == _AMD else 32)
    types = _pointers("bf16", "output", "query", "key", "value", "query_norm", "key_norm", "cos", "sin")
    types |= _pointers(cache_dtype or "bf16", "key_cache", "value_cache") | _pointers("i64", "slot_mapping")
    types |= _pointers("fp16", "key_scale", "value_scale")
    strides = [f"{part}{stride}" for part in ("query", "key", "value") for stride in ("_stride", "_head_stride")]
    types |= dict.fromkeys((*strides, "cos_stride"), "i32") | dict.fromkeys(("sin_sign", "eps", "offset"), "fp32")
    absent = [] if cache_dtype else ["key_scale_ptr", "value_scale_ptr"]
    absent += [] if norm_kind else ["query_norm_ptr", "key_norm_ptr"]
    constants = {
        "NUM_QUERY_HEADS": query_heads,
        "NUM_KV_HEADS": kv_heads,
        "KEY_DIM": dim,
        "VALUE_DIM": dim,
        "KEY_PAD": padded(dim),
        "VALUE_PAD": padded(dim),
        "BLOCK_SIZE": 16,
        "HEADS": heads,
        "PAIRS": pairs,
        "BEGIN": 0,
        "HALF": dim // 2,
        "COS_STEP": 1,
        "NORM_KIND": norm_kind,
    }
    return _variant(
        f"rope-store-{name}{f'-w{warps}' * (warps != 4)}",
        "cache_kernels:rope_store_kernel",
        types,
        constants,
        absent=absent,
        num_warps=warps,
        targets=targets,
    )


def _copies() -> KernelVariant:
    types = _pointers("i64", "addresses", "words", "pairs") | {"num_copies": "i32"}
    constants = {"BLOCK": cache.COPY_BLOCK}
    return _variant("copy-blocks", "cache_kernels:copy_blocks_kernel", types, constants, undivided=["num_copies"])


def _chunks(dtype: str, draws: bool) -> KernelVariant:
    types = _pointers("fp32", "maxima", "sums") | _pointers(dtype, "scores") | _pointers("fp64", "settings")
    types |= dict.fromkeys(("row_stride", "vocab_size", "num_chunks"), "i32")
    return _variant(
        f"chunks-{dtype}{'-draws' * draws}",
        "sampling_kernels:chunk_kernel",
        types,
        {"NUM_SETTINGS": sampling.NUM_SETTINGS, "CHUNK": sampling.CHUNK, "TILE": sampling.TILE},
        absent=[] if draws else ["sums_ptr", "settings_ptr"],
        undivided=["num_chunks"],
    )


def _draws(dtype: str, draws: bool) -> KernelVariant:
    types = _pointers("i64", "tokens", "keys") | _pointers("fp32", "best", "maxima", "sums")
    types |= _pointers("i32", "active") | _pointers(dtype, "scores") | _pointers("fp64", "settings")
    types |= dict.fromkeys(("row_stride", "vocab_size", "num_chunks"), "i32")
    constants = {
        "NUM_SETTINGS": sampling.NUM_SETTINGS,
        "SHIFT": {"fp32": 0, "bf16": 16, "fp16": 13}[dtype],
        "CHUNK": sampling.CHUNK,
        "STRIP": sampling.STRIP,
        "TILE": sampling.TILE,
    }
    return _variant(
        f"draw-{dtype}{'-best' * (not draws)}",
        "sampling_kernels:draw_kernel",
        types,
        constants,
        absent=[] if draws else ["keys_ptr", "active_ptr", "sums_ptr", "settings_ptr"],
        undivided=["num_chunks"],
        num_warps=sampling.NUM_WARPS[4 if dtype == "fp32" else 2],
        max_registers=MAX_REGISTERS,
        # The best token is found among maxima of chunks: one number each, and rows of them begin anywhere.
        wide_loads=draws,
    )
