"""Calls that no caller should make: run as a program, it prints how each of them is refused.

A wrong number must never become an address, so each call runs in a process of its own: one that crashes says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch

from hf_paged.kernels.cpu import attention, decoder, rope, sampling
from hf_paged.kernels.layers import TENSORS, LayerShape

SCALES = torch.ones(10, 2, 8, dtype=torch.float16)


def attend(**changes: torch.Tensor | None) -> None:
    """Two requests of one and three tokens over blocks of eight; `changes` replace tensors."""
    tensors = {
        "query": torch.randn(4, 4, 16),
        "key_cache": torch.randn(10, 2, 8, 16),
        "value_cache": torch.randn(10, 2, 8, 16),
        "key_scales": None,
        "value_scales": None,
        "block_tables": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 4], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 9], dtype=torch.int32),
    }
    torch.ops.hf_paged.paged_attention(*(tensors | changes).values(), 0.25, 0, 0.0, None, None, False)


def attend_lengths(cu_seqlens_q: list[int], seq_lens: list[int]) -> None:
    """The same call with other lengths."""
    attend(cu_seqlens_q=_ints(cu_seqlens_q), seq_lens=_ints(seq_lens))


def attend_heads(num_query_heads: int, num_kv_heads: int, block_size: int) -> None:
    """The same call with other heads and blocks."""
    caches = {name: torch.randn(10, num_kv_heads, block_size, 16) for name in ("key_cache", "value_cache")}
    attend(query=torch.randn(4, num_query_heads, 16), **caches)


def attend_codes(scales: torch.Tensor | None, other_scales: torch.Tensor | None) -> None:
    """The same call over blocks of codes."""
    codes = torch.zeros(10, 2, 8, 16, dtype=torch.int8)
    attend(key_cache=codes, value_cache=codes, key_scales=scales, value_scales=other_scales)


def rotate(begin: int = 0, cos_rows: int = 3, sin_rows: int = 3) -> None:
    """Rotates three tokens."""
    cos, sin = torch.randn(cos_rows, 4), torch.randn(sin_rows, 4)
    torch.ops.hf_paged.rope(torch.randn(3, 2, 8), cos, sin, 0, begin, 8, 1, 1.0)


def draw(
    temperature: float = 1.0, top_k: float = 0, top_p: float = 1.0, min_p: float = 0, uniform: float = 0.5
) -> None:
    """Draws one token."""
    settings = torch.tensor([[sampling.TRUNCATED, temperature, top_k, top_p, min_p]], dtype=torch.float64)
    sampling.draw_tokens(torch.randn(1, 500), settings, torch.tensor([uniform], dtype=torch.float64))


def run_block(**changes: int) -> None:
    """An attention block of one head with numbers that do not fit it."""
    numbers = {"num_query_heads": 1, "num_kv_heads": 1, "key_dim": 8, "value_dim": 8, "rope_layout": 1, "rotary_dim": 8}
    tensors = dict.fromkeys(TENSORS) | {f"{name}_weight": torch.randn(8, 8) for name in "qkvo"}
    shape = LayerShape(has_mlp=0, residual_flow=3, **numbers | changes)
    caches = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8)
    lengths = _ints([[0]]), torch.tensor([0]), _ints([0, 1]), _ints([1])
    torch.ops.hf_paged.decoder_layers(
        torch.randn(1, 8), list(tensors.values()), shape.ints, shape.floats, torch.randn(1, 8), torch.randn(1, 8),
        [caches[0]], [], [caches[1]], [], *lengths,
    )  # fmt: skip


def _ints(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CALLS: dict[str, Callable[[], None]] = {
    "a negative block": lambda: attend(block_tables=_ints([[-1, 1], [2, 3]])),
    "a block beyond the cache": lambda: attend(block_tables=_ints([[0, 1], [2, 10]])),
    "a table without columns": lambda: attend(block_tables=torch.zeros(2, 0, dtype=torch.int32)),
    "a table that is a slice too narrow": lambda: attend(block_tables=_ints([[9, 0], [9, 2]])[:, 1:]),
    "no query heads": lambda: attend_heads(0, 2, 8),
    "no K/V heads": lambda: attend_heads(4, 0, 8),
    "blocks without slots": lambda: attend_heads(4, 2, 0),
    "codes without scales": lambda: attend_codes(None, None),
    "keys with scales, and values without": lambda: attend_codes(SCALES, None),
    "too few scales": lambda: attend_codes(SCALES, SCALES[:9]),
    "scales of another dtype": lambda: attend_codes(SCALES, SCALES.bfloat16()),
    "scales of numbers": lambda: attend(key_scales=SCALES, value_scales=SCALES),
    "lengths that decrease": lambda: attend_lengths([0, 5, 4], [5, 9]),
    "lengths that begin late": lambda: attend_lengths([1, 2, 4], [5, 9]),
    "tokens of no request": lambda: attend_lengths([4], []),
    "a context shorter than its tokens": lambda: attend_lengths([0, 1, 4], [5, 2]),
    "a huge context": lambda: attend_lengths([0, 1, 4], [5, 2**31 - 1]),
    "a rotary part far away": lambda: rotate(begin=2**63 - 1),
    "sines of fewer tokens": lambda: rotate(sin_rows=1),
    "cosines of fewer tokens": lambda: rotate(cos_rows=2, sin_rows=2),
    "a temperature of zero": lambda: draw(temperature=0),
    "a temperature that is no number": lambda: draw(temperature=math.nan),
    "half a top-k": lambda: draw(top_k=0.5),
    "a top-p of zero": lambda: draw(top_p=0),
    "a min-p that no token has": lambda: draw(top_k=3, min_p=2),
    "a draw of one": lambda: draw(uniform=1),
    "a block with a negative rotary part": lambda: run_block(rotary_dim=-2),
    "a block with a rotary part far away": lambda: run_block(rotary_begin=2**62, rotary_dim=2),
    "a block with angles at negative places": lambda: run_block(cos_step=-1),
    "a block of an unknown layout": lambda: run_block(rope_layout=9),
    "a block without query heads": lambda: run_block(num_query_heads=0),
}


def outcome(call: Callable[[], None]) -> str:
    """Runs a call in a forked process: "refused", "accepted", or by which signal it died."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "refused", 1: "accepted"}.get(code, f"died with exit code {code}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if all(family.load() for family in (attention, decoder, rope, sampling)):
        for name, call in CALLS.items():
            print(f"{name}: {outcome(call)}", flush=True)
    else:
        print("no native library")
