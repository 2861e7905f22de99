"""Runs the Triton backend in Triton's interpreter against the reference; a program, started by test_triton.py.

It is a process of its own because the interpreter must be switched on before Triton is imported, and because a wrong
pointer in a kernel ends the process. Prints one line of JSON per case.
"""

from __future__ import annotations

import dataclasses
import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import interpreter  # noqa: F401, E402 - mends the interpreter's bfloat16
import torch  # noqa: E402
from attention_calls import make_call  # noqa: E402

from hf_paged.kernels import select_backend  # noqa: E402

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
DECODE = [(1, 1), (1, 33), (1, 70)]
MIXED = [(1, 50), (7, 40), (20, 20)]

# name: (lengths, arguments of make_call, features)
CASES = {
    "decode float32": (DECODE, {}, {}),
    "decode bfloat16": (DECODE, {"dtype": torch.bfloat16}, {}),
    "decode float16": (DECODE, {"dtype": torch.float16}, {}),
    "mixed float32": (MIXED, {}, {}),
    "mixed bfloat16": (MIXED, {"dtype": torch.bfloat16}, {}),
    "lengths around a tile": ([(1, 63), (1, 64), (1, 65), (2, 64), (2, 66)], {}, {}),
    "prefill over several row tiles": ([(70, 70)], {"num_heads": 2, "num_kv_heads": 2}, {}),
    "group of 1": (MIXED, {"num_heads": 2, "num_kv_heads": 2}, {}),
    "group of 4": (MIXED, {"num_heads": 8, "num_kv_heads": 2}, {}),
    "group of 8": (MIXED, {"num_heads": 8, "num_kv_heads": 1}, {}),
    "group of 20": (DECODE, {"num_heads": 20, "num_kv_heads": 1}, {}),
    "block size 8": (MIXED, {"block_size": 8}, {}),
    "block size 32": (MIXED, {"block_size": 32}, {}),
    "block size 128": ([(1, 100), (1, 140)], {"block_size": 128}, {}),
    "head size 40": (DECODE, {"key_dim": 40}, {}),
    "head size 96": (DECODE, {"key_dim": 96}, {}),
    "head size 256": ([(1, 40)], {"key_dim": 256, "num_heads": 2, "num_kv_heads": 1}, {}),
    "values smaller than keys": (MIXED, {"key_dim": 48, "value_dim": 32}, {}),
    "window": (MIXED, {}, {"window": 17}),
    "window past the first tile": ([(1, 200), (3, 150)], {}, {"window": 5}),
    "softcap": (MIXED, {}, {"softcap": 1.0}),
    "sinks": (MIXED, {}, {"sinks": torch.linspace(-5.0, 5.0, 9)}),
    "alibi, 12 heads": (
        MIXED,
        {"num_heads": 12, "num_kv_heads": 12, "key_dim": 32},
        {"alibi_slopes": 2.0 ** -torch.linspace(0.5, 8.0, 12)},
    ),
    "everything, with log-sum-exp": (
        MIXED,
        {"dtype": torch.bfloat16},
        {"window": 17, "softcap": 2.0, "sinks": torch.linspace(-5.0, 5.0, 9), "return_lse": True},
    ),
}


def run(name: str) -> dict[str, object]:
    """Returns a case's largest errors beside what is allowed."""
    lengths, arguments, features = CASES[name]
    call = make_call(lengths, **arguments)
    wide = dataclasses.replace(call.spec, dtype=torch.float64)
    scale = call.spec.key_dim**-0.5
    expected = select_backend(wide, "reference").attend(
        call.query.double(), call.key_cache.double(), call.value_cache.double(), call.metadata, scale=scale, **features
    )
    actual = select_backend(call.spec, "triton").attend(
        call.query, call.key_cache, call.value_cache, call.metadata, scale=scale, **features
    )
    result: dict[str, object] = {"name": name, "allowed": TOLERANCE[call.spec.dtype]}
    if "return_lse" in features:
        result["lse_error"] = (actual[1].double() - expected[1]).abs().max().item()
        actual, expected = actual[0], expected[0]
    # NaN compares as larger than everything, so that it cannot pass.
    result["error"] = (actual.double() - expected).abs().nan_to_num(nan=1e9).max().item()
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        print(json.dumps(run(case)), flush=True)
