"""The packaged model is an ordinary Transformers folder that answers, made once however many processes ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hf_paged import cache_folder as cache_folder_module
from hf_paged.cache_folder import cache_folder
from hf_paged.errors import MissingDependencyError
from hf_paged.tools import packaged_model
from hf_paged.tools.packaged_model import packaged_model_path


@pytest.fixture(scope="module")
def folder() -> Path:
    return packaged_model_path()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path))
    return tmp_path


def leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob(".*") if path.is_dir()]


def test_the_folder_is_complete(folder: Path):
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["vocab_size"]) == (30, 3, 49152)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)


def test_weights_have_stock_names_and_are_the_dequantized_ones(folder: Path):
    import gguf
    import torch
    from safetensors import safe_open

    package = packaged_model._find_package(cache_folder())
    assert package is not None
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(package.path).tensors}
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert len(names) == 272 and "lm_head.weight" not in names, "the head is tied to the embeddings"
        for ours, theirs in {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
            "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
        }.items():
            tensor = tensors[theirs]
            expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).bfloat16()
            assert torch.equal(weights.get_tensor(ours), expected)


def test_the_tokenizer_is_that_of_smollm2(folder: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("In 1902") == ["In", "Ġ", "1", "9", "0", "2"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.model_max_length == 8192
    for text in ("Ünïcödé 日本語 😀 ▁ m²", "  two  spaces\n\n\ttab ", "x = {1: 'a'}"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_stock_transformers_loads_it_and_it_answers(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(loading.values())
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_many_at_once_convert_only_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    conversions = []

    def slow(gguf_file: Path, folder: Path) -> None:
        conversions.append(gguf_file)
        time.sleep(0.2)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(packaged_model, "_convert", slow)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(packaged_model_path())) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 10 and len(set(paths)) == 1 and len(conversions) == 1
    assert (paths[0] / "config.json").is_file() and not leftovers(empty_cache)


def test_where_locks_do_not_hold_the_faster_process_wins(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    package = packaged_model._find_package(empty_cache)
    assert package is not None
    folder = packaged_model._folder_of(empty_cache, package.version)

    def overtaken(gguf_file: Path, temporary: Path) -> None:
        (temporary / "config.json").write_text("late")
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("early")

    monkeypatch.setattr(packaged_model, "_convert", overtaken)
    assert packaged_model_path() == folder
    assert (folder / "config.json").read_text() == "early" and not leftovers(empty_cache)


def test_a_failed_conversion_leaves_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(gguf_file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("out of disk")

    monkeypatch.setattr(packaged_model, "_convert", fail)
    with pytest.raises(RuntimeError, match="out of disk"):
        packaged_model_path()
    assert list((empty_cache / "models").iterdir()) == []


def test_where_no_terminal_is_a_conversion_shows_no_bars(capfd: pytest.CaptureFixture[str]):
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = reader.tqdm
    with packaged_model._bars_on_terminals():
        assert list(reader.tqdm([1, 2], desc="Converting")) == [1, 2]
    assert reader.tqdm is bar and not capfd.readouterr().err


def test_without_gguf_the_error_says_what_to_install(empty_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packaged_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install gguf"):
        packaged_model_path()


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = packaged_model.importlib.metadata.distributions
    only_cache = lambda name, path: find(name=name, path=path) if path is not sys.path else []  # noqa: E731
    monkeypatch.setattr(packaged_model.importlib.metadata, "distributions", only_cache)


def test_a_failed_download_says_why(empty_cache: Path, not_installed: None, monkeypatch: pytest.MonkeyPatch):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: No matching distribution found\n")
    monkeypatch.setattr(packaged_model.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(MissingDependencyError, match="No matching distribution found.*--model"):
        packaged_model_path()
    assert not leftovers(empty_cache)


def test_a_converted_model_outlives_its_package(empty_cache: Path, not_installed: None):
    folder = packaged_model._folder_of(empty_cache, "0.0.1")
    folder.mkdir(parents=True)
    assert packaged_model_path() == folder


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        ("linux", "XDG_CACHE_HOME", "{value}/hf_paged"),
        ("win32", "LOCALAPPDATA", "{value}/hf_paged/Cache"),
        ("darwin", "XDG_CACHE_HOME", "{home}/Library/Caches/hf_paged"),
        ("linux", "HF_PAGED_CACHE", "{value}"),
    ],
)
def test_the_cache_folder_is_the_platforms_own(
    platform: str, variable: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("HF_PAGED_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(cache_folder_module.sys, "platform", platform)
    assert cache_folder() == Path(expected.format(value=tmp_path, home=Path.home()))


def test_a_relative_xdg_folder_is_ignored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_PAGED_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(cache_folder_module.sys, "platform", "linux")
    assert cache_folder() == Path.home() / ".cache" / "hf_paged"


@pytest.mark.slow
def test_processes_that_start_together_share_one_download_and_conversion(tmp_path: Path):
    code = (
        "import sys\n"
        "from hf_paged.tools import packaged_model as p\n"
        "find, path = p._find_package, sys.path\n"
        "def find_only_in_cache(cache):\n"
        "    sys.path = []\n"
        "    try: return find(cache)\n"
        "    finally: sys.path = path\n"
        "p._find_package = find_only_in_cache\n"
        "print(p.packaged_model_path())"
    )
    environment = os.environ | {"HF_PAGED_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(4)
    ]
    answers, errors = zip(*(process.communicate() for process in processes), strict=True)
    assert len(set(answers)) == 1 and "it/s" not in "".join(errors)
    assert (Path(answers[0].strip()) / "model.safetensors").stat().st_size > 200e6
    assert not leftovers(tmp_path)
