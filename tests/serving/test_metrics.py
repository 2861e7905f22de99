"""`/metrics`: the names that dashboards and routers read, and numbers that agree with what was answered."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from hf_paged.errors import DeadlineExceededError, RequestAbortedError, StepFailedError
from hf_paged.serving.access_log import AccessLogMiddleware
from hf_paged.serving.metrics import Metrics
from hf_paged.serving.metrics_collectors import Histogram
from tests.paged_models import broken_forward
from tests.serving.observed import PROMPTS, Observed, numbers_of

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total"),
    *("prompt_tokens_cached_total", "generation_tokens_total"),
)
HISTOGRAMS = (
    *("iteration_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens", "request_params_n"),
)
REQUEST_TIMES = (
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds", "time_to_first_token_seconds"),
)


def test_an_idle_server_has_every_series_and_all_are_zero(observed):
    numbers = observed.numbers()
    for prefix in ("hf_paged:", "vllm:"):
        names = [*GAUGES, *COUNTERS, *(f"{name}_count" for name in HISTOGRAMS), *(f"{name}_sum" for name in HISTOGRAMS)]
        assert {name: numbers[prefix + name] for name in names} == dict.fromkeys(names, 0)
        for reason in ("stop", "length", "abort", "error"):
            assert numbers[f"{prefix}request_success_total{{finished_reason={reason}}}"] == 0
    assert numbers["hf_paged:admission_rejections_total{reason=max_num_queued_reqs}"] == 0
    assert numbers["process_resident_memory_bytes"] > 1e6
    info = next(name for name in numbers if name.startswith("vllm:cache_config_info"))
    assert "block_size=8" in info and "num_gpu_blocks=100" in info and numbers[info] == 1


def test_all_series_carry_the_served_models_name_and_the_engines_number(observed):
    for line in observed.metrics.render()[0].decode().splitlines():
        if line.startswith(("hf_paged:", "vllm:")):
            assert 'model_name="tiny"' in line and 'engine="0"' in line


def test_token_counters_agree_with_the_answers(observed):
    outputs = observed.ask_all(max_tokens=7)
    again = observed.ask_all(PROMPTS[:4], max_tokens=5)
    numbers, outputs = observed.numbers(), [*outputs, *again]
    generated = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    assert cached > 0
    assert numbers["hf_paged:generation_tokens_total"] == generated == numbers["hf_paged:request_generation_tokens_sum"]
    assert numbers["hf_paged:prompt_tokens_total"] == prompts == numbers["hf_paged:request_prompt_tokens_sum"]
    assert numbers["hf_paged:prompt_tokens_cached_total"] == cached == numbers["hf_paged:prefix_cache_hits_total"]
    assert numbers["hf_paged:prefix_cache_queries_total"] == prompts
    assert numbers["hf_paged:request_success_total{finished_reason=length}"] == len(outputs)
    assert numbers["hf_paged:request_params_max_tokens_sum"] == 12 * 7 + 4 * 5
    for name in REQUEST_TIMES:
        assert numbers[f"hf_paged:{name}_count"] == len(outputs)
    assert numbers["hf_paged:inter_token_latency_seconds_count"] == generated - len(outputs)
    assert {name: numbers[f"hf_paged:{name}"] for name in GAUGES} == dict.fromkeys(GAUGES, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_several_answers_to_a_prompt_count_once_as_a_request(observed, stream):
    (output,) = observed.ask_all(PROMPTS[5:6], max_tokens=6, n=3, temperature=1.0, seed=1, stream=stream)
    numbers = observed.numbers()
    assert len(output.outputs) == 3
    assert numbers["hf_paged:generation_tokens_total"] == 18
    assert numbers["hf_paged:prompt_tokens_total"] == len(PROMPTS[5])
    assert numbers["hf_paged:inter_token_latency_seconds_count"] == 15
    assert numbers["hf_paged:request_success_total{finished_reason=length}"] == 1
    assert numbers["hf_paged:request_time_per_output_token_seconds_count"] == 1
    assert numbers["hf_paged:request_params_n_sum"] == 3


def test_phases_add_up(observed):
    observed.ask_all(max_tokens=10)
    numbers = observed.numbers()
    seconds = {name: numbers[f"hf_paged:{name}_sum"] for name in REQUEST_TIMES}
    queue, prefill, decode = (seconds[f"request_{phase}_time_seconds"] for phase in ("queue", "prefill", "decode"))
    assert seconds["request_inference_time_seconds"] == pytest.approx(prefill + decode)
    assert seconds["e2e_request_latency_seconds"] == pytest.approx(queue + prefill + decode)
    assert seconds["time_to_first_token_seconds"] == pytest.approx(queue + prefill)
    # What is seen of the tokens in the event loop ends with the engine's own time of the last one.
    assert numbers["hf_paged:inter_token_latency_seconds_sum"] == pytest.approx(decode, rel=0.2, abs=0.02)
    assert numbers["hf_paged:request_time_per_output_token_seconds_sum"] == pytest.approx(decode / 9)


def test_a_token_that_stops_an_answer_counts_as_stop(observed):
    (output,) = observed.ask_all(PROMPTS[:1], max_tokens=8)
    third = output.outputs[0].token_ids[2]
    (stopped,) = observed.ask_all(PROMPTS[:1], max_tokens=8, stop_token_ids=[third])
    numbers = observed.numbers()
    assert numbers["hf_paged:request_success_total{finished_reason=stop}"] == 1
    assert numbers["hf_paged:generation_tokens_total"] == 8 + len(stopped.outputs[0].token_ids)


def test_five_aborts_leave_nothing_running_and_are_counted(observed):
    async def run():
        async def leave(prompt):
            async with observed.submit(prompt, 4000) as answers:
                async for _ in answers:
                    return sum(len(r.token_ids) for r in answers.state.group.requests)

        await asyncio.gather(*(leave(prompt) for prompt in PROMPTS[:5]))
        await observed.idle()

    asyncio.run(run())
    numbers = observed.numbers()
    assert numbers["hf_paged:request_success_total{finished_reason=abort}"] == 5
    assert {name: numbers[f"vllm:{name}"] for name in GAUGES} == dict.fromkeys(GAUGES, 0)
    assert numbers["hf_paged:e2e_request_latency_seconds_count"] == 0  # how patient clients are is another question
    assert numbers["hf_paged:prompt_tokens_total"] == sum(map(len, PROMPTS[:5]))
    assert numbers["hf_paged:generation_tokens_total"] >= 5


def test_a_request_aborted_while_it_waits_leaves_no_tokens(observed):
    async def run():
        busy = [observed.submit(prompt, 200) for prompt in PROMPTS[:8]]
        late = observed.submit(PROMPTS[8], 200)
        while observed.engine.num_running < 8:
            await asyncio.sleep(0.001)
        assert observed.numbers()["vllm:num_requests_waiting"] == 1
        late.abort()
        with pytest.raises(RequestAbortedError):
            await late.output()
        for answers in busy:
            answers.abort()
        await observed.idle()

    asyncio.run(run())
    numbers = observed.numbers()
    assert numbers["hf_paged:request_success_total{finished_reason=abort}"] == 9
    assert numbers["hf_paged:time_to_first_token_seconds_count"] == 8


def test_a_missed_deadline_is_an_abort(observed):
    async def run():
        answers = observed.engine.submit(PROMPTS[0], None, deadline=0.0)
        observed.observability.watch(answers)
        with pytest.raises(DeadlineExceededError):
            await answers.output()

    asyncio.run(run())
    assert observed.numbers()["hf_paged:request_success_total{finished_reason=abort}"] == 1


def test_a_step_that_fails_is_an_error(observed):
    async def run():
        with broken_forward(observed.model, RuntimeError("no")), pytest.raises(StepFailedError):
            await observed.ask(PROMPTS[0])

    asyncio.run(run())
    numbers = observed.numbers()
    assert numbers["hf_paged:request_success_total{finished_reason=error}"] == 1
    assert numbers["hf_paged:e2e_request_latency_seconds_count"] == 0


def test_a_reader_that_is_slow_changes_no_count(observed):
    async def run():
        async with observed.submit(PROMPTS[0], 60) as answers:
            async for _ in answers:
                time.sleep(0.02)  # the whole event loop, that is
        await observed.idle()

    asyncio.run(run())
    numbers = observed.numbers()
    assert numbers["hf_paged:generation_tokens_total"] == 60
    assert numbers["hf_paged:inter_token_latency_seconds_count"] == 59


def test_steps_are_counted_by_their_tokens(observed):
    observed.ask_all(max_tokens=6)
    numbers, stats = observed.numbers(), observed.engine.engine.stats()
    assert numbers["vllm:iteration_tokens_total_count"] == stats.num_steps > 6
    assert numbers["vllm:iteration_tokens_total_sum"] == stats.num_computed_tokens
    assert numbers["vllm:iteration_tokens_total_bucket{le=16384.0}"] == stats.num_steps
    assert 0 < numbers["vllm:iteration_tokens_total_bucket{le=8.0}"] < stats.num_steps


def test_lost_blocks_are_counted():
    observed = Observed(num_blocks=12, max_num_seqs=8, enable_prefix_caching=False)
    try:
        observed.ask_all([[i + 1] * 9 for i in range(6)], max_tokens=24)
        numbers = observed.numbers()
        assert numbers["vllm:num_preemptions_total"] == observed.engine.engine.stats().num_preemptions > 0
        assert numbers["vllm:prompt_tokens_total"] == 6 * 9  # once each, however often they were computed
        assert numbers["vllm:generation_tokens_total"] == 6 * 24
    finally:
        observed.engine.close()


def test_counts_go_on_when_the_pool_is_freed(observed):
    observed.ask_all(max_tokens=4)
    before = observed.numbers()
    observed.engine.engine.release()
    observed.ask_all(PROMPTS[:2], max_tokens=4)
    after = observed.numbers()
    for name in COUNTERS:
        assert after[f"hf_paged:{name}"] >= before[f"hf_paged:{name}"]


def test_both_names_tell_the_same_and_vllms_can_be_left_out(observed):
    observed.ask_all(max_tokens=4)
    numbers = observed.numbers()
    theirs = {name.removeprefix("vllm:"): value for name, value in numbers.items() if name.startswith("vllm:")}
    assert theirs
    assert theirs == {name: numbers["hf_paged:" + name] for name in theirs}
    alone = numbers_of(Metrics(observed.engine, "tiny", vllm_names=False).render()[0].decode())
    assert not any(name.startswith("vllm:") for name in alone) and "hf_paged:num_requests_running" in alone


def test_buckets_under_vllms_names_are_vllms(observed):
    numbers = observed.numbers()

    def bounds(name):
        return [key.split("le=")[1].rstrip("}") for key in numbers if key.startswith(f"{name}_bucket")]

    expected = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 +Inf"
    assert " ".join(bounds("vllm:inter_token_latency_seconds")) == expected
    assert bounds("vllm:request_queue_time_seconds")[:3] == ["0.3", "0.5", "0.8"]
    assert bounds("hf_paged:request_queue_time_seconds")[:3] == ["0.001", "0.0025", "0.005"]
    assert bounds("vllm:time_to_first_token_seconds")[-3:] == ["640.0", "2560.0", "+Inf"]
    assert bounds("vllm:iteration_tokens_total")[:4] == ["1.0", "8.0", "16.0", "32.0"]
    assert bounds("vllm:request_prompt_tokens")[:5] == ["1.0", "2.0", "5.0", "10.0", "20.0"]


def test_openmetrics_is_given_to_those_who_ask(observed):
    observed.ask_all(max_tokens=4)
    body, content_type = observed.metrics.render("application/openmetrics-text; version=1.0.0, text/plain;q=0.5")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    samples = {s.name: s.value for family in parse_openmetrics(body.decode()) for s in family.samples}
    assert any(name.endswith("generation_tokens_total") and value == 48 for name, value in samples.items())
    plain, content_type = observed.metrics.render("*/*")
    assert content_type.startswith("text/plain; version=0.0.4") and b"# EOF" not in plain


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=abc", "text/plain; version=x", ";,;=\x00"])
def test_nonsense_in_the_accept_header_is_answered_all_the_same(observed, accept):
    body, content_type = observed.metrics.render(accept)
    assert b"hf_paged:num_requests_running" in body
    assert "abc" not in content_type and "x" not in content_type.split(";")[1]


def test_reading_while_the_engine_runs_disturbs_nobody(observed):
    problems, done = [], threading.Event()

    def read():
        while not done.is_set():
            try:
                numbers = observed.numbers()
                assert 0 <= numbers["vllm:kv_cache_usage_perc"] <= 1
            except Exception as error:
                problems.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        outputs = observed.ask_all(max_tokens=30)
    finally:
        done.set()
        reader.join()
    assert not problems and all(len(output.outputs[0].token_ids) == 30 for output in outputs)


def test_refusals_are_counted_by_reason_and_unknown_reasons_share_one(observed):
    for reason in (
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_num_queued_tokens",
        "shutting_down",
        'nobody\n"knows',
    ):
        observed.metrics.rejected(reason)
    numbers = observed.numbers()
    counts = {r: numbers[f"hf_paged:admission_rejections_total{{reason={r}}}"] for r in observed.metrics.rejections}
    assert list(counts.values()) == [1, 2, 1, 0, 1]


def test_ten_thousand_methods_paths_and_models_add_no_series(observed):
    app = FastAPI()

    @app.get("/v1/models/{name}")
    def model(name: str):
        return {"id": name}

    @app.post("/v1/completions")
    def complete():
        return {}

    source = random.Random(0)

    async def ask(client, count):
        for _ in range(count):
            word = "".join(source.choices("abcdefgh%2Fxyz", k=8))
            path = source.choice([f"/{word}", f"/v1/models/{word}", "/v1/completions", f"/v1/completions?model={word}"])
            method = source.choice(["GET", "POST", "DELETE", word.upper().replace("%", "")])
            await client.request(method, path, json={"model": word})

    async def run():
        wrapped = AccessLogMiddleware(app, observed.metrics, lines=False)
        transport = httpx.ASGITransport(app=wrapped)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await ask(client, 200)
            some = observed.numbers()
            await ask(client, 1000)
            # The rest without a client, which takes most of the time.
            for number in range(8800):
                scope = {"type": "http", "method": f"M{number}", "path": f"/{number}", "headers": [], "state": {}}
                await AccessLogMiddleware(_not_found, observed.metrics, lines=False)(scope, None, _nowhere)
            return some

    some = asyncio.run(run())
    many = observed.numbers()
    assert set(many) == set(some)
    requests = {name: value for name, value in many.items() if name.startswith("hf_paged:http_requests_total")}
    assert sum(requests.values()) == 10_000
    assert {name.split("route=")[1].split(",")[0] for name in requests} == {
        "/v1/models/{name}", "/v1/completions", "unmatched",
    }  # fmt: skip


async def _not_found(scope, receive, send):
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _nowhere(message):
    pass


def test_an_event_loop_that_is_held_up_is_seen(observed):
    async def run():
        watcher = asyncio.create_task(observed.metrics.watch_event_loop(interval=0.005))
        await asyncio.sleep(0.05)
        time.sleep(0.15)
        await asyncio.sleep(0.02)
        watcher.cancel()

    asyncio.run(run())
    lag = observed.metrics.event_loop_lag
    assert lag.count >= 3
    assert lag.quantile(1.0) >= 0.2  # the bucket of 0.145 to 0.15
    assert observed.numbers()["hf_paged:event_loop_lag_seconds_count"] == lag.count


def test_quantiles_of_a_histogram_are_ends_of_buckets():
    histogram = Histogram((1, 2, 5))
    assert histogram.quantile(0.5) == 0
    for value in (0.5, 1, 1.5, 4):
        histogram.observe(value)
    assert [histogram.quantile(q) for q in (0.25, 0.5, 0.75, 1.0)] == [1, 1, 2, 5]
    histogram.observe(7, times=4)
    assert histogram.quantile(0.9) == float("inf")
    assert histogram.buckets((1, 5)) == [("1.0", 2), ("5.0", 4), ("+Inf", 8)] and histogram.sum == 35
