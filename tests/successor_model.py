"""A model whose next token depends on the last one alone, as a test wants it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tokenizers_for_tests import VOCAB_SIZE, tiny_tokenizer


def ids(*tokens: str) -> list[int]:
    """Token ids of the tiny tokenizer's tokens; a space at a token's beginning is written as such."""
    found = tiny_tokenizer().convert_tokens_to_ids([token.replace(" ", "Ġ").replace("\n", "Ċ") for token in tokens])
    assert None not in found, f"not all of {tokens} are tokens"
    return found


def successor_model(*chains: Sequence[int]) -> LlamaForCausalLM:
    """After each token of a chain comes the next one, and after its last one the first; all else leads to token 0."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=288, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB_SIZE, 288))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for chain in chains:
            for token, following in zip(chain, [*chain[1:], chain[0]], strict=True):
                model.lm_head.weight[following, token] = 1.0
    model.generation_config.pad_token_id = 0
    return model
