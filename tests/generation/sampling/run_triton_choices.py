"""Chooses tokens by Triton, in its interpreter, and by the native operator; a program, see `interpreted.py`."""

from __future__ import annotations

import json

import numpy as np
import torch

from hf_paged.generation.request import Request
from hf_paged.generation.sampling.choose import DrawPlan, choose, choose_by_triton, padded_sampling
from hf_paged.generation.sampling.params import SamplingParams
from hf_paged.generation.sampling.truncation import Truncation
from tests.kernels.triton import interpreter  # noqa: F401 - mends the interpreter's bfloat16


def plan_of(rows: int, greedy: bool) -> DrawPlan:
    """Rows that draw in different ways, some of whose last tokens are in flight."""
    requests = [
        Request(f"r{row}", [3] * (row + 1), SamplingParams(), max_tokens=9, seed=2**63 + row) for row in range(rows)
    ]
    for row, request in enumerate(requests):
        request.branch, request.num_in_flight_tokens = row % 3, row % 2
    kinds = np.arange(rows) % 4
    return DrawPlan(
        requests,
        (kinds == 0) | greedy,
        kinds > 1,
        Truncation(
            temperature=0.5 + kinds / 2,
            top_k=np.where(kinds == 2, 20, 0),
            top_p=np.where(kinds == 3, 0.8, 1.0),
            min_p=np.zeros(rows),
        ),
    )


def main() -> None:
    """Prints one line for each case."""
    source = torch.Generator().manual_seed(0)
    for greedy in (True, False):
        for dtype in (torch.float32, torch.bfloat16):
            plan = plan_of(12, greedy)
            scores = (torch.randn(12, 700, generator=source) * 3).to(dtype)
            sent = None
            if dtype == torch.bfloat16:  # as in a padded step
                sent = {name: torch.from_numpy(array) for name, array in padded_sampling(plan.wanted(), 16).items()}
            tokens, best = choose_by_triton(scores, plan, sent)
            expected, largest = choose(scores, plan)
            same = tokens.tolist() == expected.tolist() and best.tolist() == largest.tolist()
            print(json.dumps({"case": f"greedy={greedy} {dtype}", "same": same}))


if __name__ == "__main__":
    main()
