"""Loading by name, from a hub on the loopback: sharded files, revisions, tokens, pickle only when asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.families import tiny_model
from tests.hub_server import Hub, serve
from tests.tokenizers_for_tests import VOCAB_SIZE, tiny_tokenizer

TOKEN = "hf_the_right_one"
PROMPT = [5, 17, 33, 8]

# All loads in one process of their own: the endpoint is read when `huggingface_hub` is imported.
SCRIPT = """
import json, sys, torch
from hf_paged import LLM, AutoPagedModelForCausalLM, SamplingParams

def text(model):
    return model.generate(torch.tensor([%(prompt)s]), max_new_tokens=6)[0].tolist()

def load(name, **kwargs):
    model = AutoPagedModelForCausalLM.from_pretrained(name, dtype=torch.float32, **kwargs)
    return {"logits": model(torch.tensor([%(prompt)s])).logits.tolist(), "text": text(model)}

def offline(name, **kwargs):
    llm = LLM(name, dtype="float32", **kwargs)
    output = llm.generate("the hello", SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)[0]
    return {"prompt": output.prompt_token_ids, "tokens": output.outputs[0].token_ids}

results = {}
for key, call in json.loads(sys.argv[1]).items():
    try:
        results[key] = (offline if call.pop("offline", False) else load)(**call)
    except Exception as error:
        results[key] = {"error": [c.__name__ for c in type(error).__mro__], "message": str(error)}
print("RESULTS" + json.dumps(results))
"""

CALLS = {
    "main": {"name": "org/private-model", "token": TOKEN},
    "branch": {"name": "org/private-model", "token": TOKEN, "revision": "second"},
    "wrong_token": {"name": "org/private-other", "token": "hf_a_wrong_one"},
    "no_token": {"name": "org/private-other", "token": False},
    "no_revision": {"name": "org/private-model", "token": TOKEN, "revision": "third"},
    "no_repository": {"name": "org/nothing", "token": False},
    "pickle": {"name": "org/pickled", "token": False},
    "pickle_wanted": {"name": "org/pickled", "token": False, "use_safetensors": False},
    "offline": {"name": "org/private-model", "token": TOKEN, "revision": "second", "offline": True},
    "offline_pickle": {"name": "org/pickled", "use_safetensors": False, "offline": True},
}


def model_of(seed: int):
    model = tiny_model("llama", vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(seed))
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, torch.nn.Module]:
    return {"main": model_of(1), "second": model_of(2), "pickled": model_of(3)}


@pytest.fixture(scope="module")
def hub(tmp_path_factory, models) -> Hub:
    root = tmp_path_factory.mktemp("hub")
    for revision in ("main", "second"):
        folder = root / "org" / "private-model" / revision
        models[revision].save_pretrained(folder, max_shard_size="100KB")
        tiny_tokenizer().save_pretrained(folder)
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    folder = root / "org" / "private-other" / "main"
    models["main"].save_pretrained(folder)
    folder = root / "org" / "pickled" / "main"
    models["pickled"].config.save_pretrained(folder)
    models["pickled"].generation_config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    torch.save(models["pickled"].state_dict(), folder / "pytorch_model.bin")
    return Hub(root, TOKEN)


@pytest.fixture(scope="module")
def results(hub, tmp_path_factory) -> dict:
    home = tmp_path_factory.mktemp("home")
    root = str(Path(__file__).parent.parent)
    with serve(hub) as address:
        environment = {
            **os.environ,
            "HF_ENDPOINT": address,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": root,
            "NO_PROXY": "*",
        }
        environment.pop("HF_HUB_OFFLINE", None)
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT % {"prompt": PROMPT}, json.dumps(CALLS)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.split("RESULTS")[1])


@pytest.mark.parametrize(("key", "name"), [("main", "main"), ("branch", "second"), ("pickle_wanted", "pickled")])
def test_model_by_name_gives_the_local_models_logits(results, models, key, name):
    assert "error" not in results[key], results[key]
    expected = models[name](torch.tensor([PROMPT])).logits
    torch.testing.assert_close(torch.tensor(results[key]["logits"]), expected, atol=1e-5, rtol=1e-5)
    assert results[key]["text"] == models[name].generate(torch.tensor([PROMPT]), max_new_tokens=6)[0].tolist()


def test_shards_were_fetched_one_by_one(results, hub):
    fetched = {path.split("/")[-1] for method, path in hub.requests if method == "GET"}
    assert {"model.safetensors.index.json", "config.json", "generation_config.json"} <= fetched
    assert len({name for name in fetched if name.startswith("model-")}) > 2


@pytest.mark.parametrize("key", ["wrong_token", "no_token"])
def test_wrong_token_fails_and_says_so(results, key):
    assert "OSError" in results[key]["error"]
    assert "private-other" in results[key]["message"] and "access" in results[key]["message"]
    assert TOKEN not in results[key]["message"]


def test_missing_revision_and_repository_fail_and_say_so(results):
    assert "OSError" in results["no_revision"]["error"] and "third" in results["no_revision"]["message"]
    assert "OSError" in results["no_repository"]["error"] and "org/nothing" in results["no_repository"]["message"]


def test_pickle_files_are_refused_unless_asked_for(results, hub):
    assert "OSError" in results["pickle"]["error"]
    assert "`use_safetensors=False`" in results["pickle"]["message"]
    for key in ("pickle_wanted", "offline_pickle"):
        assert "error" not in results[key], results[key]


def test_offline_api_takes_name_revision_and_token(results, models):
    result = results["offline"]
    assert "error" not in result, result
    assert result["prompt"] == tiny_tokenizer()("the hello")["input_ids"]
    expected = models["second"].generate(torch.tensor([result["prompt"]]), max_new_tokens=6)[0].tolist()
    assert result["prompt"] + result["tokens"] == expected
