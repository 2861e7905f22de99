"""Each example runs from the command line, on a tiny model here and on the real one where there is time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# A line that shows that the example did what it is there to show.
# A text is shown by `repr`, which takes double quotes where the text holds a single one.
EXPECTED = {
    "async_streaming": r"^'2 \+ 2 =': ['\"]",
    "chat": r"[1-9]\d* of \d+ prompt tokens were cached",
    "custom_loop": r"^four rows, still \d+ blocks",
    "generate_one_line_change": r"^['\"]The capital of France is.+['\"]",
    "logprobs": r"rank \d+$",
    "offline_batch": r"^Prompt: 'In the morning the baker', generated text: ['\"].+['\"]",
    "own_backend": r"^simple: \[['\"].+\]",
    "pipeline_dataset": r"^nothing: 'failed: A row must be a text",
    "pipeline_stream": r"^memory grew by -?\d+\.\d MiB after the first tenth of 300 rows",
    "peft_switch": r"^first: +[1-9]\d* of \d+ prompt tokens were cached",
    "priorities": r"^1\. priority 0: stop the leak",
    "shared_prefix": r"^ *[1-9]\d* of \d+ prompt tokens were cached: When",
    "stock_pipeline": r"^['\"]The sea is.+['\"]",
    "trl_loop": r"^as a fresh engine: ['\"]",
    "transformers_serve_clients": r"^[1-8] of 8 answers are those of a client alone",
}
# What makes an example's run shorter.
SHORTER = {"pipeline_stream": ("--rows", "300")}


def run_example(example: Path, *arguments: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(example), *SHORTER.get(example.stem, ()), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_each_example_shows_is_known():
    assert sorted(EXPECTED) == [example.stem for example in EXAMPLES]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_on_a_tiny_model(example, tiny_checkpoint):  # noqa: F811
    assert re.search(EXPECTED[example.stem], run_example(example, "--model", str(tiny_checkpoint)), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_on_the_real_model(example, real_model_path):
    assert re.search(EXPECTED[example.stem], run_example(example), re.MULTILINE)
