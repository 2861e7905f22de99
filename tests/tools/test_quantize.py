"""`hf-paged quantize` and the texts and the measure that go with it, on a tiny checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_paged import AutoPagedModelForCausalLM, ConfigurationError, NotSupportedError, PagedConfig
from hf_paged.cli import exits, main
from hf_paged.quantization import making
from hf_paged.quantization.recipes import METHODS, Recipe
from hf_paged.tools import english
from hf_paged.tools.noisy_copy import write_noisy_copy
from hf_paged.tools.perplexity import english_windows, measure_perplexity
from hf_paged.tools.quantize import QuantizeJob, quantize_checkpoint

SMALL = {"num_samples": 3, "seq_length": 32}


def call(*arguments: str) -> int:
    """Runs a command in this process and returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_is_written_with_its_tokenizer_and_a_card_and_loads(method, tiny_checkpoint: Path, tmp_path: Path):
    out, told = tmp_path / "new" / "made", []
    bits = 8 if method == "fp8" else 4
    job = QuantizeJob(str(tiny_checkpoint), out, Recipe(method, bits), **SMALL)
    result = quantize_checkpoint(job, lambda done, count: told.append((done, count)))
    assert told[-1] == (2, 2)
    assert [path.name for path in out.parent.iterdir()] == ["made"]
    assert result.weight_bytes == (out / "model.safetensors").stat().st_size and result.num_linears == 14
    assert "in the layout of" in result.describe() and (result.error is None) == (method in ("rtn", "fp8"))
    card = (out / "README.md").read_text()
    assert card.startswith("---\n") and "library_name: transformers" in card and str(tmp_path) not in card
    assert f"--method {method}" in card and "14 quantized, 1 dense" in card
    assert ("Calibrated on 96 tokens" in card) == (method in ("gptq", "awq"))
    model = AutoPagedModelForCausalLM.from_pretrained(out, paged_config=PagedConfig(num_blocks=32))
    tokenizer = AutoTokenizer.from_pretrained(out)
    inputs = tokenizer("Why is the sky", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1] == inputs.input_ids.shape[1] + 4
    assert oct(out.stat().st_mode)[-3:] == "755"
    with pytest.raises(NotSupportedError, match=f"is quantized already, by '{result.layout}'"):
        quantize_checkpoint(QuantizeJob(str(out), tmp_path / "again", Recipe("rtn")))
    assert not (tmp_path / "again").exists()


def test_the_command_says_what_it_did(tiny_checkpoint: Path, tmp_path: Path, capsys):
    flags = ["--num-samples", "2", "--seq-length", "16"]
    assert call("quantize", tiny_checkpoint, tmp_path / "a", "--method", "gptq", "--symmetric", *flags) == exits.DONE
    out = capsys.readouterr().out
    assert "gptq, 4 bits, groups of 32, symmetric, in the layout of gptq: 14 linears, 1 left dense" in out
    assert "calibrated on 32 tokens" in out
    assert call("quantize", tiny_checkpoint, tmp_path / "b", "--bits", "8", "--json") == exits.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["bits"] == 8 and found["group_size"] == -1 and found["weight_bytes"] < found["dense_bytes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m"], "Give MODEL and OUT; got 1 words"),
        (["m", "out", "more"], "Give MODEL and OUT; got 3 words"),
        (["--demo", "m", "out"], "Give OUT alone, as --demo is the model; got 2 words"),
        (["m", "out", "--method", "best"], "Invalid value for '--method'"),
        (["m", "out", "--method", "awq", "--bits", "3"], "`bits` 3 is not built for `awq`, which has 4"),
        (["m", "out", "--bits", "5"], "`bits` 5 is not built for `rtn`, which has 4 or 8"),
        (["m", "out", "--group-size", "0"], "`group_size` must be a multiple of 8, or -1"),
        (["m", "out", "--num-samples", "0"], "Invalid value for '--num-samples'"),
        (["m", "out", "--calibration", "text.txt"], "`rtn` looks at no text; leave `--calibration` out"),
        (["m", "full"], "OUT 'full' exists and is not empty"),
        (["m", "file"], "OUT 'file' exists and is no folder"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_loaded(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    assert call("quantize", *words) == exits.WRONG_USAGE
    first, second = capsys.readouterr().err.strip().splitlines()
    assert message in first and "hf-paged quantize --help" in second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def nothing_is_left(folder: Path) -> bool:
    return not folder.exists() or not any(folder.iterdir())


def test_what_goes_wrong_later_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path, monkeypatch):
    out = tmp_path / "a" / "b" / "out"

    def refused(match: str, error: type = ConfigurationError, **job) -> None:
        with pytest.raises(error, match=match):
            quantize_checkpoint(QuantizeJob(**{"model": str(tiny_checkpoint), "out": out, **SMALL, **job}))
        assert nothing_is_left(tmp_path)

    refused("`group_size` 24 does not divide the 32 inputs", recipe=Recipe("gptq", 4, 24))
    with monkeypatch.context() as patched:
        usage = namedtuple("usage", "total used free")
        patched.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1 << 20))
        refused(r"needs about .* MB, and its disk has 1 MB free", recipe=Recipe("rtn"))
    with monkeypatch.context() as patched:
        patched.setattr(making, "gptq", lambda *words: (_ for _ in ()).throw(KeyboardInterrupt))
        refused("^$", KeyboardInterrupt, recipe=Recipe("gptq"))
    with monkeypatch.context() as patched:
        patched.setattr("hf_paged.tools.model_card.model_card", lambda result: 1 / 0)
        refused("division", ZeroDivisionError, recipe=Recipe("rtn"))


def test_an_empty_folder_is_filled(tiny_checkpoint: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    quantize_checkpoint(QuantizeJob(str(tiny_checkpoint), tmp_path / "out", Recipe("rtn", 8)))
    assert (tmp_path / "out" / "config.json").is_file()


def test_without_a_tokenizer_only_rounding_can_be_done(tiny_checkpoint: Path, tmp_path: Path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_checkpoint / name, bare)
    with pytest.raises(ConfigurationError, match="has no tokenizer that can be loaded, and `awq` looks at text"):
        quantize_checkpoint(QuantizeJob(str(bare), tmp_path / "out", Recipe("awq")))
    said: list[str] = []
    quantize_checkpoint(QuantizeJob(str(bare), tmp_path / "out", Recipe("rtn")), log=said.append)
    assert "there is no tokenizer, so none is written" in said


# ------------------------------------------------------------------ texts


def test_texts_of_a_file_are_read(tiny_checkpoint: Path, tmp_path: Path):
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("One paragraph\nof two lines.\n\n\nAnother one.\n")
    lines.write_text('{"text": "One."}\n\n{"text": "Two.", "more": 1}\n')
    assert english.read_texts(plain) == ["One paragraph\nof two lines.", "Another one.\n"]
    assert english.read_texts(lines) == ["One.", "Two."]
    job = QuantizeJob(str(tiny_checkpoint), tmp_path / "out", Recipe("gptq"), calibration=lines, **SMALL)
    result = quantize_checkpoint(job)
    assert result.calibration == "the file a.jsonl" and 0 < result.calibration_tokens <= 32


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", None, "No such file"),
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\n \n", "holds no text"),
        ("a.txt", b"\xff\xfe\x00", "UnicodeDecodeError"),
        ("a.jsonl", b'{"prompt": "x"}', "KeyError"),
        ("a.jsonl", b'{"text": 3}', "a `text` is no string"),
        ("a.jsonl", b'["x"]', "TypeError"),
        ("a.jsonl", b"{", "JSONDecodeError"),
        ("a.jsonl", b'{"text": " "}', "holds no text"),
    ],
)
def test_a_file_without_text_is_refused(name, text, message, tmp_path: Path):
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigurationError, match=message):
        english.read_texts(tmp_path / name)


def test_the_two_halves_of_the_english_text_share_nothing(tiny_checkpoint: Path):
    measured, calibrated = english.evaluation_texts(), english.calibration_texts()
    assert not set(measured) & set(calibrated)
    assert sum(len(text.split()) for text in measured) > 12_000
    assert sum(len(text.split()) for text in calibrated) > 12_000
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    windows, name = english_windows(tokenizer, tokens=2000, length=128)
    assert len(windows) == 16 and {len(window) for window in windows} == {128} and "pydoc_data" in name


def test_windows_begin_as_the_tokenizer_begins_texts(tiny_checkpoint: Path, tmp_path: Path):
    from tokenizers import processors

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.add_special_tokens({"bos_token": "<|user|>"})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", tokenizer.bos_token_id)]
    )
    windows = english.token_windows(tokenizer, ["One two three four five six seven eight."] * 5, 8)
    assert len(windows) > 3 and all(window[0] == tokenizer.bos_token_id and len(window) == 8 for window in windows)


# ------------------------------------------------------------------ perplexity


def test_perplexity_is_what_the_dense_model_says(tiny_checkpoint: Path):
    model = AutoPagedModelForCausalLM.from_pretrained(
        tiny_checkpoint, dtype=torch.float32, paged_config=PagedConfig(num_blocks=128)
    )
    windows, name = english_windows(AutoTokenizer.from_pretrained(tiny_checkpoint), tokens=300, length=64)
    told: list[tuple[int, int]] = []
    found = measure_perplexity(model, windows, name, lambda *numbers: told.append(numbers))
    plain, losses = model.unpaged(), []
    with torch.no_grad():
        for window in windows:
            ids = torch.tensor([window])
            losses.append(float(plain(ids, labels=ids).loss))
    assert found.value == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert found.tokens == 63 * len(windows) and found.text == name and told[-1] == (len(windows), len(windows))


def test_noise_is_of_the_size_that_is_asked_for_and_always_the_same(tiny_checkpoint: Path, tmp_path: Path):
    for name in ("a", "b"):
        write_noisy_copy(str(tiny_checkpoint), tmp_path / name, 0.01)
    from safetensors.torch import load_file

    before, one, other = (
        load_file(folder / "model.safetensors") for folder in (tiny_checkpoint, tmp_path / "a", tmp_path / "b")
    )
    for name, weight in before.items():
        assert torch.equal(one[name], other[name])
        if weight.ndim > 1:
            there = weight != 0
            assert float((one[name][there] / weight[there]).std()) == pytest.approx(0.01, rel=0.1)
        else:
            assert torch.equal(one[name], weight)
