"""A tiny random model with a tokenizer: it writes anything, so whatever a grammar lets through is seen."""

from __future__ import annotations

import pytest

from hf_paged import LLM
from tests.paged_models import assert_idle
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def shared_llm(tiny_checkpoint):  # noqa: F811
    with LLM(str(tiny_checkpoint), block_size=16, num_blocks=400, max_num_seqs=32, max_model_len=2048) as llm:
        llm.engine.grammars.warm_up().result()
        yield llm


@pytest.fixture
def llm(shared_llm):
    yield shared_llm
    assert_idle(shared_llm.engine)
    assert shared_llm.generate("Hello", use_tqdm=False)[0].finished, "the engine is not usable any more"
