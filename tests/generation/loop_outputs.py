"""Calls of `generate` on a stock and on a paged model, and whether their outputs are the same."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.utils import ModelOutput

from hf_paged import PagedCache
from hf_paged.compat import cache_output_field

ROWS = [[7, 150, 9], [5, 17, 33, 8, 61, 90, 4, 33, 8, 61], list(range(3, 40))]
PROMPT = torch.tensor([ROWS[1]])
TWO = torch.tensor([ROWS[1], ROWS[1][::-1]])


def padded(rows: list[list[int]] = ROWS) -> dict[str, torch.Tensor]:
    """Rows of unequal length with padding on the left, and their mask."""
    width = max(map(len, rows))
    tokens = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}


class Nothing(transformers.LogitsProcessor):
    """Does nothing; a call that has it looks at its rows together, so Transformers' loop must run it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def in_the_loop() -> dict[str, Any]:
    """An argument that changes no result and makes a call of `generate` run Transformers' own loop."""
    return {"logits_processor": transformers.LogitsProcessorList([Nothing()])}


def assert_same(ours: Any, theirs: Any, where: str = "output") -> None:
    """The same types, keys, lengths, shapes and dtypes all the way down, and the same numbers within 1e-4."""
    if isinstance(theirs, ModelOutput):
        assert type(ours) is type(theirs) and list(ours) == list(theirs), where
        for name in theirs:
            if name == cache_output_field():
                assert isinstance(ours[name], PagedCache), where
                assert ours[name].get_seq_length() == theirs[name].get_seq_length(), where
            else:
                assert_same(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(theirs, (tuple, list)):
        assert type(ours) is type(theirs) and len(ours) == len(theirs), where
        for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{where}[{place}]")
    elif isinstance(theirs, torch.Tensor):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device), where
        if theirs.is_floating_point():
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, msg=lambda text: f"{where}: {text}")
        else:
            assert torch.equal(ours, theirs), f"{where}: {ours} is not {theirs}"
    else:
        assert ours == theirs, where


def both(stock: Any, model: Any, seed: int = 0, **call: Any) -> tuple[Any, Any]:
    """What the paged and the stock model return for a call, with the same seed."""
    results = []
    for each in (model, stock):
        torch.manual_seed(seed)
        results.append(each.generate(**{"max_new_tokens": 8, **call}))
    return results[0], results[1]


def check_same(stock: Any, model: Any, **call: Any) -> Any:
    """The paged model returns what the stock one does, having run engine steps; returns its result."""
    before = model.engine.stats().num_steps
    ours, theirs = both(stock, model, **call)
    assert_same(ours, theirs)
    assert model.engine.stats().num_steps > before, "it did not run on the engine"
    return ours
