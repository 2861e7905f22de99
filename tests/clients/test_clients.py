"""Well-known clients against one server with the packaged real model: each in its own environment, none changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.serving.servers import RunningServer, our_command, serving
from tests.clients import environments
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
TASKS = Path(__file__).parent / "lm_eval_tasks"
MODEL, KEY = "smollm2", "sesame"
SECONDS = 200


@pytest.fixture(scope="module")
def server(real_model_path, tmp_path_factory) -> Iterator[RunningServer]:
    flags = ["--served-model-name", MODEL, "--api-key", KEY, "--dtype", "float32", "--max-model-len", "2048"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-num-seqs", "16"]
    log = tmp_path_factory.mktemp("clients") / "server.log"
    with serving(our_command(Path(real_model_path), *flags), log, timeout=120) as server:
        yield server
        assert server.process.poll() is None, "the server died"
        assert b"Traceback" not in log.read_bytes(), log.read_text()


def run(server: RunningServer, *command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Runs a client and returns what it printed; it fails if the client does."""
    named = {"BASE_URL": f"{server.url}/v1", "MODEL": MODEL, "API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_API_KEY")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment | named | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.parametrize("version", ["openai-2", "openai-3"])
def test_openai(server, version):
    said = run(server, environments.python_of(version), SCRIPTS / "openai_client.py")
    assert f"openai {version[-1]}." in said


def test_openai_for_javascript(server):
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    modules = environments.node_modules()
    assert "ok" in run(server, "node", SCRIPTS / "openai_client.mjs", MODULES=str(modules))


@pytest.mark.parametrize("name", ["langchain", "instructor", "anthropic"])
def test_client(server, name):
    run(server, environments.python_of(name), SCRIPTS / f"{name}_client.py")


@pytest.fixture(scope="module")
def stock(real_model_path):
    return AutoModelForCausalLM.from_pretrained(real_model_path, dtype=torch.float32)


def log_probability(model, tokenizer, context: str, continuation: str) -> tuple[float, bool]:
    """Of a continuation, and whether it is what greedy search says."""
    ids = tokenizer(context + continuation, return_tensors="pt").input_ids
    start = len(tokenizer(context).input_ids)
    with torch.no_grad():
        logits = model(ids).logits[0, start - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, ids[0, start:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == ids[0, start:]).all())


def test_lm_eval(server, stock, real_tokenizer, tmp_path):
    """lm-eval scores answers by `echo` and `logprobs`, and reads texts up to its stop strings."""
    python = environments.python_of("lm-eval")
    arguments = f"model={MODEL},base_url={server.url}/v1/completions,tokenizer_backend=remote,num_concurrent=4"
    command = [
        python,
        "-m",
        "lm_eval",
        "--model",
        "local-completions",
        "--model_args",
        f"{arguments},max_retries=1,auth_token={KEY}",
    ]
    command += ["--include_path", ".", "--tasks", "colours_choice,colours_text", "--log_samples"]
    run(server, *command, "--output_path", tmp_path, OPENAI_API_KEY=KEY, cwd=TASKS, HF_HOME=str(tmp_path / "hf"))
    (chosen,) = tmp_path.rglob("samples_colours_choice*.jsonl")
    samples = [json.loads(line) for line in chosen.read_text().splitlines()]
    assert len(samples) == 6
    for sample in samples:
        for number, (found, _) in enumerate(zip(sample["resps"], sample["doc"]["choices"], strict=True)):
            asked = sample["arguments"][f"gen_args_{number}"]
            expected, is_greedy = log_probability(stock, real_tokenizer, asked["arg_0"], asked["arg_1"])
            assert float(found[0][0]) == pytest.approx(expected, abs=2e-3)
            assert str(found[0][1]) == str(is_greedy)
    (written,) = tmp_path.rglob("samples_colours_text*.jsonl")
    for line in written.read_text().splitlines():
        sample = json.loads(line)
        text = sample["resps"][0][0]
        asked = sample["arguments"]["gen_args_0"]["arg_0"]
        assert "\n" not in text
        ids = real_tokenizer(asked, return_tensors="pt")
        greedy = stock.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids.input_ids.shape[1] :]
        assert real_tokenizer.decode(greedy, skip_special_tokens=True).split("\n")[0] == text


@pytest.fixture(scope="module")
def tiny_server(tiny_checkpoint, tmp_path_factory) -> Iterator[RunningServer]:  # noqa: F811
    """A server whose answers are short and quick: a few hundred requests without a limit of their own."""
    flags = ["--served-model-name", MODEL, "--max-model-len", "256", "--max-num-seqs", "16"]
    log = tmp_path_factory.mktemp("schemathesis") / "server.log"
    with serving(our_command(tiny_checkpoint, *flags), log, timeout=120) as server:
        yield server
        assert server.process.poll() is None, "the server died"


def test_schemathesis_finds_no_server_error(tiny_server):
    """Requests made from `/openapi.json`, right and wrong ones."""
    python = environments.python_of("schemathesis")
    url = tiny_server.url
    command = [python.with_name("schemathesis"), "run", f"{url}/openapi.json", "--url", url, "--no-color"]
    command += [
        "--checks",
        "not_a_server_error",
        "--max-examples",
        "25",
        "--seed",
        "7",
        "--request-timeout",
        "60",
    ]
    said = run(tiny_server, *command, "--phases", "examples,fuzzing", "--generation-database", "none")
    assert "generated" in said and " failed" not in said, said[-3000:]
