"""The calls with which the Triton attention kernels are tried; this file imports no Triton."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

DECODE = [(1, 1), (1, 33), (1, 70)]
MIXED = [(1, 50), (7, 40), (20, 20)]
TILE_EDGES = [(1, 63), (1, 64), (1, 65), (2, 64), (2, 66)]
LONG = [(1, 520), (1, 257), (1, 30)]
# Largest absolute error against float64 on the same inputs; values are of the order of 1.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Args:
        lengths (`list[tuple[int, int]]`):
            (new tokens, context) of each request, decoding requests first.
        call (`dict[str, Any]`):
            Further arguments of `make_call`.
        features (`dict[str, Any]`):
            Of `attend`; `sinks` and `alibi_slopes` as booleans.
        variant (`str`):
            How the call is changed, or what is done with it; a name in `run_attention_cases.py`.
    """

    lengths: list[tuple[int, int]]
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    features: dict[str, Any] = dataclasses.field(default_factory=dict)
    variant: str = "plain"

    @property
    def dtype(self) -> torch.dtype:
        return self.call.get("dtype", torch.float32)


def _dtypes_and_lengths() -> dict[str, Case]:
    lengths = {"decode": DECODE, "mixed": MIXED, "edges of a tile": TILE_EDGES, "splits": LONG}
    return {
        f"{name}, {str(dtype).removeprefix('torch.')}": Case(lengths[name], {"dtype": dtype})
        for name, dtype in itertools.product(lengths, TOLERANCE)
    }


def _shapes() -> dict[str, Case]:
    # Heads (query, K/V) x head sizes x block sizes, each value of each with several of the others.
    heads = ((2, 2), (4, 2), (9, 3), (7, 1), (8, 1), (20, 1))
    sizes = ((32, 32), (40, 40), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (48, 32), (192, 128), (256, 256))
    blocks = (16, 32, 64, 128)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    cases = {}
    for index, (key_dim, value_dim) in enumerate(sizes):
        num_heads, num_kv_heads = heads[index % len(heads)]
        for shift in (0, 2):
            block_size, dtype = blocks[(index + shift) % 4], dtypes[(index + shift) % 3]
            name = f"heads {num_heads}/{num_kv_heads}, sizes {key_dim}/{value_dim}, block {block_size}, {dtype}"
            call = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "key_dim": key_dim, "value_dim": value_dim}
            call |= {"block_size": block_size, "dtype": dtype}
            # sgl-project/sglang#1159: sizes that are no power of two; triton-lang/triton#621: only 64 numbers used.
            variant = "energy only in the last dimensions" if shift else "plain"
            cases[name] = Case([(1, 40), (3, 70)], call, variant=variant)
    return cases


def _features() -> dict[str, Case]:
    settings: dict[str, dict[str, Any]] = {
        "window": {"window": 17},
        "window of one token": {"window": 1},
        "softcap": {"softcap": 1.0},
        "sinks": {"sinks": True},
        "alibi": {"alibi_slopes": True},
        "all": {"window": 17, "softcap": 2.0, "sinks": True, "alibi_slopes": True, "return_lse": True},
    }
    cases = {f"{name}, mixed": Case(MIXED, {}, features) for name, features in settings.items()}
    cases |= {f"{name}, splits": Case(LONG, {}, features) for name, features in settings.items()}
    cases["all, mixed, bfloat16"] = Case(MIXED, {"dtype": torch.bfloat16}, settings["all"])
    cases["window past the first tiles"] = Case([(1, 200), (3, 150)], {}, {"window": 70})
    cases["window over several splits"] = Case([(1, 900)], {"num_heads": 3, "num_kv_heads": 1}, {"window": 600})
    cases["log-sum-exp, splits"] = Case(LONG, {}, {"return_lse": True})
    cases["12 heads, alibi"] = Case(MIXED, {"num_heads": 12, "num_kv_heads": 12, "key_dim": 32}, settings["alibi"])
    return cases


def _variants() -> dict[str, Case]:
    bf16, small = {"dtype": torch.bfloat16}, {"num_heads": 4, "num_kv_heads": 1}
    sharing = [(1, 300), (1, 257), (1, 290), (1, 330), (1, 400), (1, 20)]
    return {
        "prefill over several row tiles": Case([(150, 150)], {"num_heads": 2, "num_kv_heads": 2}),
        "a chunk after a long context, splits": Case([(1, 20), (3, 600)], small, {"return_lse": True}),
        "a query cut from a wider tensor": Case(MIXED, bf16, variant="strided"),
        "padded requests": Case(DECODE, {}, {"return_lse": True}, "padded"),
        "padded requests, splits, sinks": Case(LONG, {}, {"sinks": True}, "padded"),
        "lengths shorter than the host was told": Case(DECODE, {}, {"return_lse": True}, "replayed"),
        "int8": Case(MIXED, bf16, variant="int8"),
        "int8, splits": Case(LONG, bf16, variant="int8"),
        "int8, block 128, softcap, alibi": Case(
            MIXED, {"block_size": 128}, {"softcap": 2.0, "alibi_slopes": True}, "int8"
        ),
        "int8, window, head 80": Case(MIXED, {"key_dim": 80}, {"window": 17}, "int8"),
        "float8": Case(MIXED, bf16, variant="float8"),
        "float8, splits, sinks": Case(LONG, {"dtype": torch.float16}, {"sinks": True}, "float8"),
        "float8 e5m2": Case(MIXED, bf16, variant="float8 e5m2"),
        "shared prefix": Case(sharing, small, {"return_lse": True}, "shared"),
        "shared prefix, sinks, softcap": Case(
            [*sharing, (5, 30)], {"dtype": torch.bfloat16, **small}, {"sinks": True, "softcap": 2.0}, "shared"
        ),
        "shared prefix, window": Case(sharing, small, {"window": 40}, "shared but not read once"),
        "shared prefix, blocks of 64": Case(sharing, {"block_size": 64, **small}, variant="shared"),
    }


CASES = {**_dtypes_and_lengths(), **_shapes(), **_features(), **_variants()}
