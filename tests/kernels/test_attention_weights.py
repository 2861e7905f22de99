"""The attention weights that are recorded, against the formula in float64 and Transformers' eager attention."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.llama.modeling_llama import eager_attention_forward

from hf_paged.kernels.reference import attention_weights
from tests.kernels.attention_calls import Call, make_call

SCALE = 0.21


def weights_of(call: Call, **features) -> list[torch.Tensor]:
    """Of each request of a call, `[num_query_heads, tokens, keys]`."""
    found, start = [], 0
    for row, (count, seq_len) in enumerate(zip(call.query_lens, call.metadata.seq_lens_host.tolist(), strict=True)):
        query = call.query[start : start + count]
        table = call.metadata.block_tables[row]
        found.append(attention_weights(query, call.key_cache, table, seq_len - count, scale=SCALE, **features))
        start += count
    return found


def formula(call: Call, row: int, start: int, window: int | None, softcap: float | None) -> torch.Tensor:
    keys = call.contexts[row][0].double().repeat_interleave(call.query.shape[1] // call.contexts[row][0].shape[0], 0)
    count, seq_len = call.query_lens[row], keys.shape[1]
    query = call.query[start : start + count].double().transpose(0, 1)
    scores = query @ keys.transpose(1, 2) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    for place, position in enumerate(range(seq_len - count, seq_len)):
        scores[:, place, position + 1 :] = -math.inf
        if window is not None:
            scores[:, place, : max(position - window + 1, 0)] = -math.inf
    return scores.softmax(-1)


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_equal_the_formula(window, softcap, block_size, dtype):
    lengths = [(1, 1), (1, 33), (5, 5), (17, 40), (16, 16)]
    call = make_call(lengths, num_heads=6, num_kv_heads=2, key_dim=8, block_size=block_size, dtype=dtype)
    start = 0
    for row, found in enumerate(weights_of(call, window=window, softcap=softcap)):
        expected = formula(call, row, start, window, softcap)
        assert found.shape == expected.shape == (6, lengths[row][0], lengths[row][1]) and found.dtype == dtype
        tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        assert (found[expected == 0] == 0).all(), "a key is weighed that cannot be seen"
        start += lengths[row][0]


def test_weights_equal_transformers_eager_attention():
    call = make_call([(9, 20)], num_heads=6, num_kv_heads=2, key_dim=8, block_size=4)
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 3
    mask = torch.full((9, 20), -math.inf).triu(12)[None, None]
    keys, values = (context[None] for context in call.contexts[0])
    query = call.query.transpose(0, 1)[None]
    _, expected = eager_attention_forward(module, query, keys, values, mask, scaling=SCALE, dropout=0.0)
    torch.testing.assert_close(weights_of(call)[0], expected[0], atol=1e-6, rtol=1e-6)
