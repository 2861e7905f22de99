"""Each example runs from the command line, on a tiny model here and on the real one where there is time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.families import tiny_model

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# A line that shows that the example did what it is there to show.
EXPECTED = {
    "async_streaming": r"^'2 \+ 2 =': '",
    "chat": r"[1-9]\d* of \d+ prompt tokens were cached",
    "custom_loop": r"^four rows, still \d+ blocks",
    "generate_one_line_change": r"^'The capital of France is.+'",
    "logprobs": r"rank \d+$",
    "offline_batch": r"^Prompt: 'In the morning the baker', generated text: '.+'",
    "own_backend": r"^simple: \['.+\]",
    "priorities": r"^1\. priority 0: stop the leak",
    "shared_prefix": r"^ *[1-9]\d* of \d+ prompt tokens were cached: When",
    "stock_pipeline": r"^'The sea is.+'",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<start>' + message['role'] + '\n' + message['content'] + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and one each for the beginning and the end of a message."""
    bytes_as_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({text: token for token, text in enumerate(bytes_as_text)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<start>", "<end>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<end>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="module")
def tiny_model_path(tmp_path_factory) -> str:
    """A complete model folder: weights, configuration, tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_example(example: Path, *arguments: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(example), *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_each_example_shows_is_known():
    assert sorted(EXPECTED) == [example.stem for example in EXAMPLES]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_on_a_tiny_model(example, tiny_model_path):
    assert re.search(EXPECTED[example.stem], run_example(example, "--model", tiny_model_path), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_on_the_real_model(example, real_model_path):
    assert re.search(EXPECTED[example.stem], run_example(example), re.MULTILINE)
