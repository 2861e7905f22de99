"""Cards of checkpoints say how they were made, what was measured and how they are loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from huggingface_hub import ModelCard

from model_cards import make

RECIPE = {
    "out": "gptq-int4", "model": "a-path", "method": "gptq", "bits": 4, "group_size": 64, "symmetric": False,
    "layout": "gptq", "num_linears": 210, "num_dense": 1, "weight_bytes": 114_000_000, "dense_bytes": 269_000_000,
    "calibration": "some prose", "calibration_tokens": 32_768, "error": 0.0023, "seconds": 200.0,
}  # fmt: skip


def report() -> dict:
    dense = {"system": "bf16", "model_bytes": 269_000_000, "perplexity": 20.0, "seconds_per_token": 0.02,
             "output_tokens_per_s": 400.0}  # fmt: skip
    made = {**dense, "system": "gptq-int4", "perplexity": 21.0, "perplexity_change": 0.05, "recipe": RECIPE}
    return {
        "rows": [dense, made],
        "notes": ["perplexity of 20,440 tokens: English prose"],
        "machine": {"processor": "A processor", "num_threads": 2},
        "isa": "avx2",
        "date": "2026-01-02",
        "versions": {"hf_paged": "0.1.0"},
    }


def test_cards_are_written_from_the_figures_of_a_run(tmp_path: Path, monkeypatch, capsys):
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(report()))
    monkeypatch.setattr(sys, "argv", ["make.py", "--figures", str(file), "--out", str(tmp_path), "--model", "org/Name"])
    make.main()
    assert sorted(path.name for path in tmp_path.glob("*.md")) == ["Name-bf16.md", "Name-int4-GPTQ.md"]
    assert "Name-int4-GPTQ.md" in capsys.readouterr().out
    card = ModelCard.load(tmp_path / "Name-int4-GPTQ.md")
    assert card.data.library_name == "transformers" and card.data.base_model == "org/Name"
    assert {"hf_paged", "gptq", "4-bit"} <= set(card.data.tags)
    for words in (
        "# Name-int4-GPTQ",
        "hf-paged quantize --method gptq",
        "4 bits, groups of 64",
        "Calibrated on 32,768 tokens: some prose.",
        "| perplexity | 21.000 (+5.00% of bf16) |",
        "20,440 tokens: English prose",
        "A processor, 2 cores, operators avx2, 2026-01-02",
        'from_pretrained("Name-int4-GPTQ")',
        "vLLM",
    ):
        assert words in card.text
    dense = ModelCard.load(tmp_path / "Name-bf16.md")
    assert "dense weights in bfloat16" in dense.text and "| one stream | 20.0 ms a token |" in dense.text


def test_every_card_is_of_a_row_of_the_benchmark():
    from hf_paged.tools.bench.quantization import VARIANTS

    assert set(make.CARDS) <= set(VARIANTS)
    assert all(VARIANTS[name].recipe is not None for name in make.CARDS if name != "bf16")
