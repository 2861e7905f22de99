"""Stock Transformers is measured on what was asked for, and its memory is counted right."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_paged.errors import EngineError
from hf_paged.tools.bench import baselines
from hf_paged.tools.bench.baseline_process import StockTransformers
from hf_paged.tools.bench.kv_usage import ContinuousUsage, static_batch_usage
from hf_paged.tools.bench.workloads import Workload

WORKLOAD = Workload("test", [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]], [6, 12, 3])
# Two layers, two K/V heads of 8 numbers, keys and values, float32.
BYTES_PER_TOKEN = 2 * 2 * 8 * 2 * 4


@pytest.fixture(scope="module")
def stock(tiny_checkpoint):
    return baselines.load_model(str(tiny_checkpoint), "float32", threads=1)


@pytest.fixture(autouse=True)
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_bytes_per_token_are_measured(stock):
    assert baselines.kv_bytes_per_token(stock) == BYTES_PER_TOKEN


@pytest.mark.parametrize("method", baselines.METHODS)
def test_every_method_generates_all_tokens(stock, method: str):
    result = baselines.METHODS[method](stock, WORKLOAD, 60.0, len(WORKLOAD))
    assert not result.extrapolated and result.measured_share == 1
    assert result.seconds == pytest.approx(result.measured_seconds)
    assert result.output_tokens_per_s == pytest.approx(WORKLOAD.num_output_tokens / result.measured_seconds)
    assert 0 <= result.kv_waste < 1
    assert 0 < result.kv_bytes_used <= result.kv_bytes_held


def test_greedy_ignores_the_end_of_sequence_token(stock, monkeypatch: pytest.MonkeyPatch):
    # A head that only ever says 0, which is the tiny model's end-of-sequence token.
    monkeypatch.setattr(
        stock.lm_head, "forward", lambda x: torch.eye(1, stock.config.vocab_size).expand(*x.shape[:2], -1)
    )
    clock = baselines._generate(stock, [[5, 6, 7]], 20, deadline=float("inf"))
    assert len(clock.times) == 20


def test_a_sample_is_extrapolated(stock):
    result = baselines.one_by_one(stock, WORKLOAD, 60.0, 2)
    assert result.extrapolated and result.how.startswith("2 of 3 requests")
    assert result.seconds > result.measured_seconds
    assert result.first_token_seconds is not None and result.seconds_per_token is not None


@pytest.mark.parametrize("method", baselines.METHODS)
def test_the_budget_ends_a_measurement(stock, method: str):
    endless = Workload("test", [[5, 6, 7, 8]] * 2, [4000, 4000])
    result = baselines.METHODS[method](stock, endless, 0.3, 2)
    assert result.extrapolated and 0 < result.measured_share < 0.3
    assert result.measured_seconds < 0.3 * result.seconds
    assert result.output_tokens_per_s == pytest.approx(8000 / result.seconds)


@pytest.mark.parametrize("method", ["static_batch", "generate_batch"])
def test_a_budget_that_prompts_use_up_still_leaves_steps_that_decode(stock, method: str):
    endless = Workload("test", [[5, 6, 7, 8]] * 2, [4000, 4000])
    result = baselines.METHODS[method](stock, endless, 0.0, 2)
    assert all(len(times) >= baselines.MIN_STEPS - 1 for times in result.requests["itls"])
    assert result.measured_share < 0.1


def test_steps_are_extrapolated_from_the_last_half():
    # A slow first step (the prompts), then 1 s each.
    assert baselines._late_step_seconds([0, 10, 11, 12, 13, 14]) == 1
    assert baselines._late_step_seconds([0, 7]) == 7


def test_static_batch_usage_counts_padding_and_finished_rows():
    # Rows are as long as the longest prompt (4) and stay for 3 steps: 8, 10, 12 slots; the second row ends after one.
    usage = static_batch_usage([4, 2], [3, 1])
    assert usage.peak_slots == 2 * 6
    assert usage.tokens_at_peak == 6
    assert usage.waste == pytest.approx(((1 - 6 / 8) + (1 - 5 / 10) + (1 - 6 / 12)) / 3)


def test_static_batch_usage_is_what_transformers_really_holds(stock):
    lengths = [len(prompt) for prompt in WORKLOAD.prompts]
    ids = torch.ones((3, max(lengths)), dtype=torch.long)
    output = stock.generate(ids, generation_config=baselines._greedy(12), return_dict_in_generate=True)
    cache = baselines.output_cache(output)
    held = sum(t.nbytes for i in range(2) for t in baselines.cache_layer_tensors(cache, i))
    assert static_batch_usage(lengths, WORKLOAD.output_lengths).peak_slots * BYTES_PER_TOKEN == held


def test_continuous_usage_follows_requests():
    usage = ContinuousUsage([10, 5], block_size=8)
    usage.observe(0, 1, finished=False)  # 10 tokens in 2 blocks
    usage.observe(1, 4, finished=True)  # and 8 in 1 block, then none
    usage.observe(0, 7, finished=True)  # 17 in 3 blocks
    assert (usage.num_tokens, usage.peak_tokens, usage.peak_slots) == (12, 18, 24)
    assert usage.waste == pytest.approx(((1 - 10 / 16) + (1 - 18 / 24) + (1 - 17 / 24)) / 3)


def test_the_process_answers_and_ends(tiny_checkpoint):
    with StockTransformers(str(tiny_checkpoint), "float32", 1) as process:
        result = process.measure("static_batch", WORKLOAD)
        assert result.method == "static_batch" and result.output_tokens_per_s > 0
        assert dataclasses.asdict(result)["extrapolated"] is False
        with pytest.raises(EngineError, match="KeyError"):
            process.measure("no_such_method", WORKLOAD)
        assert process.measure("one_by_one", WORKLOAD, sample=1).extrapolated, "one failure does not end it"
    assert process._process.poll() is not None


def test_a_model_that_does_not_load_is_an_error(tmp_path):
    with pytest.raises(EngineError, match="Stock Transformers failed"):
        StockTransformers(str(tmp_path / "nothing"), "float32", 1)
