"""What the page for users of vLLM says is missing is refused, and what it says is the same is understood."""

from __future__ import annotations

import re

import pytest

from hf_paged import LLM
from hf_paged.errors import HfPagedError, NotSupportedError
from hf_paged.serving.command_line import parse_settings
from hf_paged.vllm_names import SWITCHES
from tests.documentation.pages import DOCS

TEXT = (DOCS / "quickstart_vllm.md").read_text(encoding="utf-8")
# What is said to `LLM` and to the server alike; what is said for a single call or prompt is tested with `LLM`.
OF_CALLS = {"lora_request", "multi_modal_data"}
VALUES = {"quantization": "awq", "runner": "pooling", "cpu_offload_gb": "4"}


def first_column(title: str) -> list[list[str]]:
    """The words that stand as code in the first cell of each row of a section's table."""
    section = re.split(r"^## ", TEXT.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]
    return [re.findall(r"`([^`]+)`", row) for row in re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE)]


def missing_settings() -> list[str]:
    names = [name for row in first_column("What is missing") for name in row if not name.startswith("LLM.")]
    names = [re.split(r"[=\s]", name.lstrip("-").replace("-", "_"))[0] for name in names]
    return sorted({name for name in names if name.isidentifier()} - OF_CALLS - {"encode", "classify", "score"})


def value_of(name: str) -> list[str]:
    if name in SWITCHES:
        return []
    return [VALUES.get(name, "2" if name.endswith("_size") else '{"a": 1}')]


def test_the_page_names_what_is_missing():
    assert {"tensor_parallel_size", "enable_lora", "speculative_config"} <= set(missing_settings())


@pytest.mark.parametrize("name", missing_settings())
def test_what_is_missing_is_refused(name):
    with pytest.raises(NotSupportedError):
        settings = parse_settings(["model", "--" + name.replace("_", "-"), *value_of(name)], {})
        LLM("no/model", **{name: getattr(settings, name)})  # what the server does next


def test_flags_with_another_name_here_are_answered_with_it():
    for row in re.findall(r"^\| (`--[^|]*) \| (`--[^|]*) \| (?:.*likewise|the old name.*) \|$", TEXT, re.MULTILINE):
        old, new = (re.findall(r"--[a-z-]+", cell) for cell in row)
        with pytest.raises(HfPagedError, match=new[0]):
            parse_settings(["model", old[0], "8"], {})
    assert "`--cudagraph-capture-sizes` | `--cuda-graph-sizes`" in TEXT and "`--kv-cache-memory-bytes` |" in TEXT


def test_flags_that_are_the_same_are_taken():
    flags = {
        "--gpu-memory-utilization": "0.5",
        "--max-model-len": "2k",
        "--dtype": "bfloat16",
        "--kv-cache-dtype": "fp8",
        "--scheduling-policy": "priority",
        "--uvicorn-log-level": "warning",
        "--load-format": "auto",
    }
    switches = {"--enable-prefix-caching", "--enforce-eager", "--async-scheduling", "--disable-custom-all-reduce"}
    assert all(f"`{name}" in TEXT for name in (*flags, *switches))
    settings = parse_settings(["model", *(word for pair in flags.items() for word in pair), *switches], {})
    assert (settings.gpu_memory_utilization, settings.max_model_len, settings.log_level) == (0.5, 2000, "warning")
    assert settings.enforce_eager and settings.async_scheduling and settings.scheduling_policy == "priority"
