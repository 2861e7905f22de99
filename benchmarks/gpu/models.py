"""Llama-like models with seeded random weights, made on the device: nothing is downloaded, nothing is read."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_paged.tools.bench.workloads import DEFAULT_SEED, Workload

from .sizes import ModelSize

MAX_LENGTH = 8192


def random_model(size: ModelSize, device: str, dtype: torch.dtype, seed: int) -> Any:
    """Returns a stock model whose texts never end on their own.

    Args:
        size (`ModelSize`):
            Its shape.
        device (`str`):
            Where it is made.
        dtype (`torch.dtype`):
            Of its weights.
        seed (`int`):
            Of its weights.
    """
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=size.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype=dtype,
    )
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    return _endless(model)


def load_model(path: str, device: str) -> Any:
    """Returns a stock model from a folder, in its own dtype, whose texts never end on their own.

    Args:
        path (`str`):
            The folder.
        device (`str`):
            Where it goes.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    return _endless(model.to(device))


def _endless(model: Any) -> Any:
    model.eval()
    model.config.eos_token_id = None
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Returns random token ids; no two prompts begin alike.

    Args:
        lengths (`list[int]`):
            Tokens of each prompt.
        vocab_size (`int`):
            Tokens of the vocabulary.
        seed (`int`):
            Which.
    """
    numbers = random.Random(seed)
    return [[numbers.randrange(1, vocab_size) for _ in range(length)] for length in lengths]


def random_load(count: int, vocab_size: int, max_prompt: int, max_output: int, seed: int) -> Workload:
    """Returns a load with the lengths of W1: prompts and answers of 16 tokens and more.

    Args:
        count (`int`):
            Requests.
        vocab_size (`int`):
            Tokens of the vocabulary.
        max_prompt (`int`):
            Longest prompt.
        max_output (`int`):
            Longest answer.
        seed (`int`):
            Of the tokens; the lengths are those of W1.
    """
    numbers = random.Random(DEFAULT_SEED)
    prompts = [numbers.randint(min(16, max_prompt), max_prompt) for _ in range(count)]
    outputs = [numbers.randint(min(16, max_output), max_output) for _ in range(count)]
    return Workload(f"{count} requests", random_prompts(prompts, vocab_size, seed), outputs)
