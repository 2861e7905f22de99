"""Runs norms, activations, rope with the store of K/V, and copies of blocks in Triton's interpreter against float64.

A program, see `interpreted.py`; prints for each case its error beside what is allowed.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable

import torch

from hf_paged.kernels.cpu.rope import RopeLayout
from hf_paged.kernels.triton.activations import activation, gated_activation
from hf_paged.kernels.triton.cache import BlockCopies, rope_store
from hf_paged.kernels.triton.layer_cache import LayerCache
from hf_paged.kernels.triton.norms import Norm, add_normalized, normalized
from hf_paged.modeling.patterns.recipe import Activation
from hf_paged.modeling.patterns.reference import ACTIVATIONS
from tests.kernels.triton import interpreter  # noqa: F401 - mends the interpreter's bfloat16

DTYPES = torch.float32, torch.bfloat16, torch.float16
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of one rounding, relative
Cases = dict[str, Callable[[], tuple[float, float]]]


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error relative to the largest number of the row; a NaN that should not be, or should, is endless."""
    expected, actual = expected.double(), actual.double()
    if not torch.equal(actual.isnan(), expected.isnan()):
        return math.inf
    errors = (
        (actual - expected).abs() / expected.abs().nan_to_num().amax(-1, keepdim=True).clamp(min=1e-3)
    ).nan_to_num()
    return float(errors.max()) if errors.numel() else 0.0


# ------------------------------------------------------------------ norms


def wide_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x = x.double()
    if norm.kind == 2:
        x = x - x.mean(-1, keepdim=True)
    y = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    y = y if norm.weight is None else y * (norm.weight.double() + norm.offset)
    return y if norm.bias is None else y + norm.bias.double()


def make_norm(kind: int, size: int, dtype: torch.dtype, bare: bool = False, offset: float = 0.0) -> Norm:
    weight = None if bare else torch.randn(size).to(dtype)
    bias = torch.randn(size).to(dtype) if kind == 2 and not bare else None
    return Norm(kind, weight, bias, 1e-5, offset)


def norm_alone(kind: int, dtype: torch.dtype, size: int, **options: object) -> tuple[float, float]:
    x = torch.randn(5, size).to(dtype) * 3 + 1
    x[3, size // 2] = math.nan
    norm = make_norm(kind, size, dtype, **options)  # type: ignore[arg-type]
    return error_of(normalized(x, norm), wide_norm(x, norm)), ROUNDING[dtype]


def norm_of_heads() -> tuple[float, float]:
    fused = torch.randn(4, 7 * 24).to(torch.bfloat16)
    heads = fused[:, 24:].view(4, 6, 24)[:, 1:4]
    norm = make_norm(1, 24, torch.bfloat16)
    return error_of(normalized(heads, norm), wide_norm(heads, norm)), ROUNDING[torch.bfloat16]


def norm_of_sum(dtype: torch.dtype, before: bool, other: bool, after: bool) -> tuple[float, float]:
    size = 72
    branch, residual, second = torch.randn(3, 6, size).to(dtype)
    residual[2, 5] = math.nan
    first, last = make_norm(2, size, dtype), make_norm(1, size, dtype, offset=1.0)
    y, total = add_normalized(
        branch,
        residual,
        last if after else None,
        before=first if before else None,
        other=second if other else None,
        multiplier=0.5,
    )
    added = branch.double() + (second.double() if other else 0)
    added = wide_norm(added, first) if before else added
    expected = residual.double() + added * 0.5
    error = max(error_of(total, expected), error_of(y, wide_norm(total, last) if after else expected))
    return error, (3 if before else 1) * ROUNDING[dtype]


NORMS: Cases = {
    **{
        f"norm {kind} {dtype} {size}": lambda kind=kind, dtype=dtype, size=size: norm_alone(kind, dtype, size)
        for kind, (dtype, size) in itertools.product((1, 2), zip(DTYPES, (1, 77, 1030), strict=True))
    },
    "norm without weights": lambda: norm_alone(2, torch.float32, 33, bare=True),
    "norm with weights around 0": lambda: norm_alone(1, torch.float32, 64, offset=1.0),
    "norm of strided heads": norm_of_heads,
    "norm of a sum": lambda: norm_of_sum(torch.bfloat16, False, False, True),
    "norm of a sum, float32": lambda: norm_of_sum(torch.float32, False, False, True),
    "norm of a normed sum": lambda: norm_of_sum(torch.float32, True, False, True),
    "norm of a normed sum, bfloat16": lambda: norm_of_sum(torch.bfloat16, True, False, True),
    "norm of three": lambda: norm_of_sum(torch.float16, False, True, True),
    "a sum alone": lambda: norm_of_sum(torch.float32, False, False, False),
}


# ------------------------------------------------------------------ activations


def gate_and_up(kind: Activation, dtype: torch.dtype, size: int) -> tuple[float, float]:
    merged = torch.randn(3, 2 * size).to(dtype) * 4
    merged[1, 3] = math.nan
    gate, up = merged.split(size, dim=1)
    expected = ACTIVATIONS[kind](gate.double()) * up.double()
    return error_of(gated_activation(gate, up, kind), expected), ROUNDING[dtype]


def one_alone(kind: Activation) -> tuple[float, float]:
    x = torch.cat(
        [torch.linspace(-30, 30, 400), torch.linspace(-0.2, 0.2, 101), torch.tensor([math.inf, 88.0, -104.0])]
    )
    expected = ACTIVATIONS[kind](x.double())
    actual = activation(x, kind).double()
    is_finite = expected.isfinite()
    same = torch.equal(actual[~is_finite], expected[~is_finite])
    errors = (actual - expected)[is_finite].abs() / (expected[is_finite].abs() + 1e-6)
    return float(errors.max()) if same else math.inf, 2e-1 if kind == Activation.GELU else 2e-5


ACTIVATED: Cases = {
    **{f"activation {kind.name}": lambda kind=kind: one_alone(kind) for kind in Activation},
    **{
        f"gated {kind.name} {dtype}": lambda kind=kind, dtype=dtype: gate_and_up(kind, dtype, size=37)
        for kind, dtype in itertools.product((Activation.SILU, Activation.GELU_TANH), DTYPES)
    },
    "gated, more than one tile": lambda: gate_and_up(Activation.GELU, torch.float32, 1500),
}


# ------------------------------------------------------------------ rope and store


def turned(x: torch.Tensor, layout: RopeLayout, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half, begin, step = layout.rotary_dim // 2, layout.rotary_begin, layout.cos_step
    y = x.double().clone()
    part = y[..., begin : begin + 2 * half].clone()
    cos, sin = (table[:, : half * step : step].double()[:, None] for table in (cos, -sin if layout.reverse else sin))
    first, second = (
        (part[..., :half], part[..., half:]) if layout.pairs == "half" else (part[..., ::2], part[..., 1::2])
    )
    both = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(both, -1).flatten(-2) if layout.pairs == "interleaved" else torch.cat(both, -1)
    y[..., begin : begin + 2 * half] = turned
    return y


def stored(
    layout: RopeLayout | None,
    dtype: torch.dtype = torch.float32,
    dims: tuple[int, int] = (24, 24),
    heads: tuple[int, int] = (6, 2),
    norm: int = 0,
    quantized: torch.dtype | None = None,
    cos_rows: int = 5,
) -> tuple[float, float]:
    """Five tokens, one of them padding, heads that are views of one tensor, and a NaN in one key and one value."""
    torch.manual_seed(1)
    (key_dim, value_dim), (num_heads, num_kv_heads), block_size = dims, heads, 4
    sizes = [num_heads * key_dim, num_kv_heads * key_dim, num_kv_heads * value_dim]
    query, key, value = (
        part.unflatten(1, (-1, dim))
        for part, dim in zip(
            torch.randn(5, sum(sizes)).to(dtype).split(sizes, 1), (key_dim, key_dim, value_dim), strict=True
        )
    )
    key[0, 1, 3] = value[4, 0, 0] = math.nan
    value[1, 1] = 0
    slots = torch.tensor([13, 2, -1, 7, 4])
    shape, cache_dtype = (4, num_kv_heads, block_size), quantized or dtype
    scales = [torch.full(shape, 7.0, dtype=torch.float16) if quantized else None for _ in range(2)]
    keys, values = (torch.ones(*shape, dim).to(cache_dtype) for dim in dims)
    cache = LayerCache(keys, values, *scales)
    columns = 1 if layout is None else layout.rotary_dim * layout.cos_step
    angles = torch.rand(cos_rows, columns) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = None
    if norm:
        norms = (make_norm(norm, key_dim, dtype), make_norm(norm, key_dim, dtype))
        norms = tuple(Norm(norm, n.weight, None, 1e-5, 0.5) for n in norms)
    output = rope_store(query, key, value, None if layout is None else (cos, sin), layout, cache, slots, norms)
    wide = [
        wide_norm(part, n) if norms else part.double()
        for part, n in zip((query, key), norms or (None, None), strict=True)
    ]
    if layout is not None:
        wide = [turned(part, layout, cos, sin) for part in wide]
    error = error_of(output, wide[0])
    for held, scale, new, dim in ((keys, scales[0], wide[1], key_dim), (values, scales[1], value.double(), value_dim)):
        rows = held.double() if scale is None else held.double() * scale.double()[..., None]
        rows = rows.transpose(1, 2).reshape(-1, num_kv_heads, dim)
        if quantized:  # one NaN spoils its head
            new = torch.where(new.isnan().any(-1, keepdim=True), math.nan, new)
        kept = slots >= 0
        error = max(error, error_of(rows[slots[kept]], new[kept]))
        others = torch.ones(16, dtype=torch.bool)
        others[slots[kept]] = False
        if not torch.equal(rows[others], torch.full_like(rows[others], 7.0 if quantized else 1.0)):
            return math.inf, 0.0
    steps = {torch.int8: 0.5 / 127 + 1e-3, torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}
    return error, steps.get(quantized, ROUNDING[dtype] + 1e-6)


HALF = RopeLayout(24)
STORES: Cases = {
    "rope and store": lambda: stored(HALF),
    "rope and store, bfloat16": lambda: stored(HALF, torch.bfloat16),
    "rope and store, float16": lambda: stored(HALF, torch.float16),
    "interleaved": lambda: stored(RopeLayout(24, "interleaved", cos_step=2)),
    "interleaved to half, reverse": lambda: stored(RopeLayout(24, "interleaved_to_half", reverse=True)),
    "part of each head": lambda: stored(RopeLayout(8, rotary_begin=16)),
    "part of each head, interleaved": lambda: stored(RopeLayout(10, "interleaved", rotary_begin=5), dims=(17, 17)),
    "halves of 8, from 8 on": lambda: stored(RopeLayout(16, rotary_begin=8), dims=(32, 32)),
    "one angle for all tokens": lambda: stored(HALF, cos_rows=1),
    "without rope": lambda: stored(None, torch.bfloat16),
    "values smaller than keys": lambda: stored(HALF, dims=(24, 10)),
    "many heads": lambda: stored(RopeLayout(128), heads=(36, 36), dims=(128, 128)),
    "as many K/V heads": lambda: stored(HALF, heads=(3, 3)),
    "normed heads": lambda: stored(HALF, norm=1),
    "normed heads, part of which turns": lambda: stored(RopeLayout(8, rotary_begin=4), norm=1),
    "layer norm of heads, bfloat16": lambda: stored(HALF, torch.bfloat16, norm=2),
    "int8": lambda: stored(HALF, quantized=torch.int8),
    "int8 from bfloat16": lambda: stored(HALF, torch.bfloat16, quantized=torch.int8),
    "fp8": lambda: stored(HALF, quantized=torch.float8_e4m3fn),
    "fp8 e5m2": lambda: stored(HALF, quantized=torch.float8_e5m2),
    "fp8 from bfloat16, odd sizes": lambda: stored(None, torch.bfloat16, (17, 9), quantized=torch.float8_e4m3fn),
}


# ------------------------------------------------------------------ copies


def copied() -> tuple[float, float]:
    """Two layers of different shapes and dtypes, and scales."""
    caches = [
        torch.randn(6, 2, 16, 40),
        torch.randn(6, 3, 16, 33).to(torch.bfloat16),
        torch.randint(-127, 127, (6, 2, 16, 200), dtype=torch.int8),
        torch.randn(6, 2, 16).to(torch.float16),
    ]
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        cache[[5, 0]] = cache[[1, 3]]
    BlockCopies(caches).copy(torch.tensor([[1, 3], [5, 0]]))
    same = all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
    return 0.0 if same else math.inf, 0.0


CASES = {"norms": NORMS, "activations": ACTIVATED, "cache": STORES | {"copies of blocks": copied}}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for kernel, cases in CASES.items():
        for name, case in cases.items():
            torch.manual_seed(0)
            error, allowed = case()
            line = {"kernel": kernel, "name": name, "error": min(error, 1e9), "allowed": allowed}
            print(json.dumps(line), flush=True)
