"""`hf-paged bench quantization` on a tiny model: rows of true processes, and rows that are chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_paged.configuration import PagedConfig
from hf_paged.errors import UnknownNameError
from hf_paged.quantization.on_load import SCHEMES
from hf_paged.tools.bench import quantization, quantization_process
from hf_paged.tools.bench.quantization import DENSE, chosen_variants
from hf_paged.tools.bench.session import BenchOptions, BenchSession, run_benchmark


def test_rows_are_chosen_by_name_and_the_dense_model_is_always_there():
    assert list(chosen_variants(None)) == [DENSE, *SCHEMES, "rtn-int4", "gptq-int4", "awq-int4"]
    assert list(chosen_variants("awq-int4, int8")) == [DENSE, "int8", "awq-int4"]
    with pytest.raises(UnknownNameError, match="Unknown row 'int5' of `only`; available: bf16, int8"):
        chosen_variants("int8,int5")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh processes, which only take longer, are seen where the command line's examples run."""

    def measure(name: str, settings: dict[str, Any]) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []
        monkeypatch.setattr(quantization_process, "settings_of_parent", lambda: json.loads(json.dumps(settings)))
        monkeypatch.setattr(quantization_process, "answer_parent", answers.append)
        quantization_process.main()
        return json.loads(json.dumps(answers[0]))

    monkeypatch.setattr(quantization, "measure_in_fresh_process", measure)


def test_rows_are_made_measured_and_compared(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, in_this_process):
    monkeypatch.setattr(BenchSession, "bandwidth", lambda self: 10e9)
    said: list[str] = []
    options = BenchOptions(
        model=str(tiny_checkpoint),
        runs=1,
        count=2,
        dtype="float32",
        config=PagedConfig(cpu_kv_cache_gib=0.05),
        only="gptq-int4",
        noise=0.01,
        log=said.append,
    )
    report = run_benchmark("quantization", options)
    dense, made = report.rows
    assert dense["system"] == DENSE and made["recipe"]["method"] == "gptq" and made["recipe"]["group_size"] == 32
    assert made["model_bytes"] < dense["model_bytes"]
    assert abs(made["perplexity_change"]) < 0.2 and made["perplexity_tokens"] == 2 * 511
    assert made["seconds_factor"] > 0 and made["speed_factor"] > 0
    assert "adding 1.0% of noise to a copy of the weights" in said and "making gptq-int4" in said
    found = json.loads(json.dumps(report.to_dict()))
    assert found["noise"] == 0.01 and "groups of 32" in " ".join(found["notes"])
