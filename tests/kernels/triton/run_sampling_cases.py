"""Draws tokens in Triton's interpreter and holds them against float64; a program, see `interpreted.py`.

Prints for each case how many rows are wrong, of how many.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_paged.generation.sampling.random import uniforms
from hf_paged.kernels.triton.sampling import ANY, BEST, TRUNCATED, argmax_tokens, draw_tokens
from tests.kernels.sampling_cuts import CUTS
from tests.kernels.triton import interpreter  # noqa: F401 - mends the interpreter's bfloat16

MARGIN = 3e-6  # float32 sums: so near to the border of its share, either of two tokens is right
ALL_CUTS = [*CUTS, {"kind": ANY}, {"kind": ANY, "temperature": 3.0}]


def scores_of(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def keys_of(rows: int, seed: int = 0) -> torch.Tensor:
    keys = torch.randint(-(2**63), 2**63 - 1, (rows, 3), generator=torch.Generator().manual_seed(seed))
    keys[:, 1:] &= 2**32 - 1
    return keys


def uniform_of(keys: torch.Tensor) -> np.ndarray:
    return uniforms(*keys.numpy().view(np.uint64).T)


def remaining(
    row: torch.Tensor,
    kind: int = TRUNCATED,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, float]:
    """The tokens that remain in the order in which they are drawn, their weights, and the top-p that cuts halfway
    through its last token, so that rounding cannot decide which one that is."""
    scores = row.double().numpy()
    order = np.argsort(-scores, kind="stable") if kind == TRUNCATED else np.arange(len(scores))
    scores = scores[order]
    weights = np.exp((scores - scores.max()) / temperature)
    if top_k:
        weights = weights[scores >= scores[min(top_k, len(scores)) - 1]]
    if top_p < 1:
        cumulative = np.cumsum(weights)
        last = int(np.searchsorted(cumulative, top_p * cumulative[-1]))
        last = min(last, int(np.flatnonzero(weights > 1e-4 * cumulative[-1])[-1]))
        top_p = float((cumulative[last] - weights[last] / 2) / cumulative[-1])
        weights = weights[: last + 1]
    if min_p:
        weights = weights[weights >= min_p * (1 - 1e-6)]
    return order[: len(weights)], weights, top_p


def draw(scores: torch.Tensor, cuts: list[dict[str, Any]], keys: torch.Tensor) -> torch.Tensor:
    defaults = {"kind": TRUNCATED, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    settings = torch.tensor([list((defaults | cut).values()) for cut in cuts], dtype=torch.float64)
    return draw_tokens(scores, settings, keys)[0]


def num_wrong(scores: torch.Tensor, cuts: list[dict[str, Any]], seed: int = 0) -> int:
    """How many rows got a token whose share does not hold the row's uniform number."""
    found = [remaining(row, **cut) for row, cut in zip(scores, cuts, strict=True)]
    keys = keys_of(len(scores), seed)
    tokens = draw(scores, [{**cut, "top_p": top_p} for cut, (_, _, top_p) in zip(cuts, found, strict=True)], keys)
    wrong = 0
    for token, uniform, (order, weights, _) in zip(tokens.tolist(), uniform_of(keys), found, strict=True):
        place = np.flatnonzero(order == token)
        ends = np.cumsum(weights) / weights.sum()
        fits = len(place) == 1 and weights[place[0]] > 0
        if fits:
            end = ends[place[0]]
            fits = end - weights[place[0]] / weights.sum() - MARGIN <= uniform <= end + MARGIN
        wrong += not fits
    return wrong


# ------------------------------------------------------------------ cases: (wrong rows, rows)


def cut(dtype: torch.dtype, size: int, scale: float) -> tuple[int, int]:
    scores = scores_of(len(ALL_CUTS), size, dtype=dtype, scale=scale, seed=size)
    return num_wrong(scores, ALL_CUTS, seed=size), len(ALL_CUTS)


def tied(top_k: int = 0, top_p: float = 1.0) -> tuple[int, int]:
    row = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0] * 60, dtype=torch.bfloat16)
    return num_wrong(row.expand(6, -1), [{"top_k": top_k, "top_p": top_p}] * 6), 6


def zeros_of_both_signs() -> tuple[int, int]:
    """Equal scores, of which the first fifth remains."""
    scores = torch.zeros(8, 600)
    scores[:, 1::2] = -0.0
    keys = keys_of(8)
    tokens = draw(scores, [{"top_p": 0.19999}] * 8, keys)
    expected = np.floor(uniform_of(keys) * 120).astype(int)
    return int((tokens.numpy() != expected).sum()), 8


def impossible_tokens() -> tuple[int, int]:
    scores = torch.full((6, 500), -torch.inf)
    scores[:, [3, 400]] = torch.tensor([1.0, 2.0])
    cuts = [{}, {"kind": ANY}, {"top_k": 50}, {"top_p": 0.99999}, {"top_k": 1}, {"min_p": 0.9}]
    return num_wrong(scores, cuts), 6


def hot_and_cold() -> tuple[int, int]:
    scores = scores_of(1, 300).expand(8, -1).clone()
    scores[:, 100:] = -torch.inf
    cold = [{"temperature": 1e-30, "top_p": 0.9}, {"kind": ANY, "temperature": 1e-30}]
    hot = [{"temperature": 1e30, "top_k": 100}, {"temperature": 1e30}, {"kind": ANY, "temperature": 1e30}] * 2
    return num_wrong(scores, [*cold, *hot]), 8


def not_finite() -> tuple[int, int]:
    """Each of: NaN, infinity, nothing but -inf."""
    wrong = 0
    scores = scores_of(3, 700)
    scores[0, 600], scores[1, 15], scores[2] = torch.nan, torch.inf, -torch.inf
    for kind in (None, BEST, ANY, TRUNCATED):
        if kind is None:
            tokens, best = argmax_tokens(scores)
        else:
            settings = torch.tensor([[kind, 1.0, 5, 0.9, 0]] * 3)
            tokens, best = draw_tokens(scores, settings, keys_of(3))
        wrong += not (best[0].isnan() and best[1] == torch.inf and best[2] == -torch.inf)
        wrong += tokens.tolist() != [0, 15 if kind in (None, BEST) else 0, 0]
    return wrong, 8


def best(dtype: torch.dtype) -> tuple[int, int]:
    wrong = 0
    for size in (1, 2, 127, 128, 129, 5003):
        scores = scores_of(5, size, dtype=dtype, seed=size)
        scores[3] = scores[3].clamp(max=1.0)  # many are the largest
        tokens, values = argmax_tokens(scores)
        first = [int((row == row.max()).nonzero()[0, 0]) for row in scores]
        wrong += tokens.tolist() != first or values.tolist() != scores.float().amax(1).tolist()
    return wrong, 6


def rows_apart() -> tuple[int, int]:
    part = scores_of(8, 700)[1::3, 100:633]
    keys, cuts = keys_of(3), [{"top_k": 20}, {"top_p": 0.8}, {"kind": ANY}]
    return int((draw(part, cuts, keys) != draw(part.contiguous(), cuts, keys)).sum()), 3


def batch_mates() -> tuple[int, int]:
    """A row's token is the same alone, in other company and elsewhere in memory."""
    scores, keys = scores_of(len(ALL_CUTS), 300, dtype=torch.bfloat16), keys_of(len(ALL_CUTS), 5)
    together = draw(scores, ALL_CUTS, keys)
    alone = [int(draw(scores[i : i + 1].clone(), ALL_CUTS[i : i + 1], keys[i : i + 1])) for i in range(len(ALL_CUTS))]
    back = draw(scores.flip(0), ALL_CUTS[::-1], keys.flip(0)).flip(0)
    return int((together != torch.tensor(alone)).sum() + (together != back).sum()), 2 * len(ALL_CUTS)


CASES: dict[str, Callable[[], tuple[int, int]]] = {
    **{
        f"cuts of {dtype}, {size} tokens, scale {scale}": lambda dtype=dtype, size=size, scale=scale: cut(
            dtype, size, scale
        )
        for dtype, size, scale in (
            (torch.float32, 700, 3.0),
            (torch.float32, 7, 3.0),
            (torch.float32, 1501, 12.0),
            (torch.bfloat16, 1000, 3.0),
            (torch.bfloat16, 129, 0.01),
            (torch.float16, 300, 3.0),
            (torch.float16, 1, 3.0),
        )
    },
    "ties with the k-th": lambda: tied(top_k=70),
    "ties at the border of top-p": lambda: tied(top_p=0.8),
    "ties at the border of both": lambda: tied(top_k=70, top_p=0.7),
    "zeros of both signs": zeros_of_both_signs,
    "impossible tokens": impossible_tokens,
    "hot and cold": hot_and_cold,
    "NaN and infinities": not_finite,
    **{f"best of {dtype}": lambda dtype=dtype: best(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    "rows that lie apart": rows_apart,
    "batch mates": batch_mates,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, case in CASES.items():
        wrong, rows = case()
        print(json.dumps({"name": name, "wrong": wrong, "rows": rows}), flush=True)
