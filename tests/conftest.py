"""Tiny random models of each family, the packaged real model, and texts for it."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before torch is loaded: where other processes take a core, threads that wait by spinning cost a factor of ten.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from tests.families import FAMILIES, tiny_model


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Commands and servers send logs to where stderr is at that moment: to a test's own, which ends with it."""
    names = (None, "hf_paged", "huggingface_hub", "uvicorn", "uvicorn.error", "uvicorn.access")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate, logger.disabled) for logger in loggers]
    yield
    for logger, handlers, level, propagate, disabled in before:
        logger.handlers[:], logger.propagate, logger.disabled = handlers, propagate, disabled
        logger.setLevel(level)


@pytest.fixture
def tiny_llama():
    """A llama with random weights that are large enough for its greedy texts to vary."""
    return tiny_model("llama")


@pytest.fixture(params=sorted(FAMILIES))
def family(request) -> str:
    """The name of each family that the engine runs."""
    return request.param


@pytest.fixture(scope="session")
def real_model_path() -> str:
    """The folder of the packaged real model (SmolLM2-135M-Instruct)."""
    from hf_paged.tools.packaged_model import packaged_model_path

    return str(packaged_model_path())


@pytest.fixture(scope="session")
def real_tokenizer(real_model_path):
    """The packaged real model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model_path)


@pytest.fixture(scope="session")
def real_model(real_model_path):
    """The packaged real model in float32, paged with default settings. Tests that need others page it anew."""
    from hf_paged import AutoPagedModelForCausalLM

    return AutoPagedModelForCausalLM.from_pretrained(real_model_path, dtype=torch.float32)


def random_prompts(count: int, vocab_size: int, *, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Prompts of random tokens (never 0, the padding token); lengths around multiples of 16 are frequent."""
    source = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 48]
    return [
        [
            source.randrange(1, vocab_size)
            for _ in range(source.choice(lengths) if source.random() < 0.6 else source.randint(1, longest))
        ]
        for _ in range(count)
    ]
