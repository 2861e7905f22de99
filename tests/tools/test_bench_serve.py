"""`hf-paged bench serve`: what it sends, when, and that its figures are what the server did."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import socket
import statistics
import sys
import threading
import time

import numpy as np
import pytest
from fastapi import FastAPI

from hf_paged.cli import main
from hf_paged.errors import ConfigurationError, MissingDependencyError
from hf_paged.tools.bench import serve, serve_statistics
from hf_paged.tools.bench.serve import ServerNotReadyError, run_serve_benchmark, write_files
from hf_paged.tools.bench.serve_arrivals import arrival_times
from hf_paged.tools.bench.serve_client import ConnectionLostError, HttpClient
from hf_paged.tools.bench.serve_dataset import make_requests
from hf_paged.tools.bench.serve_load import send_one
from hf_paged.tools.bench.serve_records import EventReader, RequestRecord, StreamRecorder
from hf_paged.tools.bench.serve_settings import ServeBenchSettings, parse_settings
from tests.tools.openai_mock import OpenAIMock, running


@pytest.fixture
def mock():
    mock = OpenAIMock()
    with running(mock.app) as mock.url:
        yield mock


def run(mock: OpenAIMock, *words: str):
    common = ["--base-url", mock.url, "--dataset-name", "packaged", "--disable-tqdm", "--output-len", "5"]
    return run_serve_benchmark(parse_settings([*common, *words]))


def prompts_file(tmp_path, *prompts: str) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_figures_are_what_the_server_did(mock, endpoint, separator):
    mock.delay, mock.separator = 0.02, separator
    found = run(mock, "--num-prompts", "6", "--endpoint", endpoint)
    result = found.result
    assert (result["completed"], result["failed"], result["error_kinds"]) == (6, 0, {})
    assert result["total_output_tokens"] == 60, "tokens are counted by the server, not by chunks"
    assert result["total_input_tokens"] == 42
    assert all(len(record.arrivals) == 5 for record in found.records)
    assert all("".join(record.texts) == "one two three four five " for record in found.records)
    gaps = [later - sooner for record in found.records for sooner, later in itertools.pairwise(record.arrivals)]
    assert result["median_itl_ms"] == pytest.approx(1e3 * statistics.median(gaps))
    assert result["median_ttft_ms"] > 15
    assert result["mean_e2el_ms"] > 5 * 19
    assert result["output_throughput"] == pytest.approx(60 / result["duration"])
    assert result["max_concurrent_requests"] == mock.most == 6


def test_request_says_what_was_asked_for(mock, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    words = ["--num-prompts", "1", "--ignore-eos", "--top-k", "7", "--extra-body", '{"priority": 3}']
    run(mock, *words, "--header", "X-Tenant=a", "--logprobs", "2", "--served-model-name", "other")
    body, headers = mock.bodies[-1], mock.headers[-1]
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["temperature"], body["logprobs"]) == ("other", 5, 0.0, 2)
    assert (body["ignore_eos"], body["top_k"], body["priority"]) == (True, 7, 3)
    assert "min_p" not in body
    assert headers["authorization"] == "Bearer sesame" and headers["x-tenant"] == "a"
    run(mock, "--num-prompts", "1", "--backend", "openai-chat", "--logprobs", "2")
    body = mock.bodies[-1]
    assert body["max_completion_tokens"] == 5 and body["messages"][0]["role"] == "user"
    assert body["logprobs"] is True and body["top_logprobs"] == 2 and body["model"] == "mock"


def test_errors_are_counted_by_kind(mock, tmp_path):
    path = prompts_file(tmp_path, "hello", "status 503", "error", "cut off", "status 400", "status 503")
    found = run(mock, "--dataset-name", "custom", "--dataset-path", path, "--num-prompts", "6")
    result = found.result
    assert result["completed"] == 1 and result["failed"] == 5
    assert result["error_kinds"] == {"http 503": 2, "http 400": 1, "error in stream": 1, "cut off": 1}
    assert "the engine fell over" in result["error_examples"]["error in stream"]
    assert result["total_output_tokens"] == 10, "tokens of failed requests do not count"


def test_server_that_takes_too_long_is_a_failure(mock):
    client = HttpClient(mock.url)
    mock.delay = 5.0
    record = asyncio.run(send_one(client, "/v1/completions", b'{"prompt": "x"}', 0.0, timeout=0.2))
    assert record.error_kind == "timeout" and not record.succeeded
    end = time.monotonic() + 10
    while mock.open and time.monotonic() < end:
        time.sleep(0.02)
    assert not mock.open, "the connection of a request that was given up stayed open"


def test_no_more_requests_at_a_time_than_allowed(mock):
    mock.delay = 0.005
    assert run(mock, "--num-prompts", "12", "--max-concurrency", "3").result["completed"] == 12
    assert mock.most == 3


def test_connections_are_used_again(mock):
    async def several() -> int:
        client = HttpClient(mock.url)
        opened = 0
        connect = client.connect

        async def counted():
            nonlocal opened
            opened += 1
            return await connect()

        client.connect = counted
        for _ in range(4):
            assert (await send_one(client, "/v1/completions", b'{"prompt": "x"}', 0.0)).succeeded
        client.close()
        return opened

    assert asyncio.run(several()) == 1


def test_connection_that_an_idle_server_closed_is_replaced():
    """uvicorn closes idle connections after five seconds; a request may be on its way just then."""
    mock = OpenAIMock()
    with running(mock.app, timeout_keep_alive=1) as url:

        async def twice():
            client = HttpClient(url)
            for _ in range(2):
                record = await send_one(client, "/v1/completions", b'{"prompt": "x"}', 0.0)
                assert record.succeeded, record
                await asyncio.sleep(1.5)

        asyncio.run(twice())


def answer_once(*pieces: bytes) -> str:
    """A server that says this to whoever connects first, and closes the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listener, listener.accept()[0] as connection:
            connection.recv(65536)
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.02)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def get(url: str):
    return asyncio.run(HttpClient(url).send("GET", "/"))


def test_answers_of_all_shapes_are_read():
    assert get(answer_once(b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: 5\r\n\r\nhe", b"llo")).body == b"hello"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert get(answer_once(chunked + b"3\r\nhel\r\n", b"2\r\nlo\r", b"\n0\r\n\r\n")).body == b"hello"
    until_closed = get(answer_once(b"HTTP/1.1 404 Not Found\r\nX-A: b\r\n\r\n", b"gone"))
    assert (until_closed.status, until_closed.body, until_closed.headers["x-a"]) == (404, b"gone", "b")


@pytest.mark.parametrize("pieces", [[], [b"nonsense\r\n\r\n"], [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhe"]])
def test_answers_that_are_none_are_told_apart_from_answers(pieces):
    with pytest.raises(ConnectionLostError):
        get(answer_once(*pieces))


def test_events_are_found_wherever_the_network_cuts_them():
    stream = b": hi\n\ndata: one\n\nevent: x\ndata: two\ndata: lines\n\n: ping\n\ndata:three\n\n"
    expected = [b"one", b"two\nlines", b"three"]
    for text in (stream, stream.replace(b"\n", b"\r\n")):
        for size in (1, 2, 3, 7, 1000):
            found: list[bytes] = []
            reader = EventReader(found.append)
            for start in range(0, len(text), size):
                reader.feed(text[start : start + size])
            assert found == expected, size


def test_only_chunks_that_carry_something_are_tokens():
    record = RequestRecord(start=1.0)
    recorder = StreamRecorder(record)
    deltas = [{"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"content": "a"}, {"tool_calls": [{}]}, {}]
    for now, delta in enumerate(deltas, start=2):
        recorder.feed(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode(), float(now))
    assert record.arrivals == [3.0, 4.0, 5.0] and record.end == 6.0
    assert record.ttft == 2.0 and record.latency == 5.0 and not record.succeeded
    recorder.feed(b"data: [DONE]\n\n", 9.0)
    assert record.succeeded and record.num_output_tokens == 3
    recorder.feed(b"data: {\n\n", 9.0)
    assert record.error_kind == "bad event" and not record.succeeded


@pytest.mark.parametrize("event", ["5", "[]", '{"choices": [null]}', '{"usage": [1]}', '{"choices": [{"text": 5}]}'])
def test_events_that_are_no_chunks_are_failures_of_their_request(event):
    record = RequestRecord()
    StreamRecorder(record).feed(f"data: {event}\n\ndata: [DONE]\n\n".encode(), 1.0)
    assert record.error_kind == "bad event" and record.error == event and not record.texts


def made(start: float, *arrivals: float, tokens: int | None = None) -> RequestRecord:
    return RequestRecord(
        planned=start, start=start, arrivals=list(arrivals), end=arrivals[-1], output_tokens=tokens, is_complete=True
    )


def test_statistics_by_hand():
    failed = RequestRecord(planned=1.0, start=1.0, end=2.0, error_kind="http 503", error="no")
    records = [made(1.0, 1.2, 1.3, 1.5), made(1.5, 2.0, 2.1, tokens=5), failed]
    result = serve_statistics.summarize(
        records, 2.0, percentiles=(50.0, 90.0), goodput=[("ttft", 400.0), ("tpot", 200.0)]
    )
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (2, 1, 8)
    assert result["mean_ttft_ms"] == pytest.approx(350) and result["std_ttft_ms"] == pytest.approx(150)
    assert result["mean_tpot_ms"] == pytest.approx((150 + 25) / 2)
    assert result["median_itl_ms"] == result["p50_itl_ms"] == pytest.approx(100)
    assert result["p90_e2el_ms"] == pytest.approx(590)
    assert result["request_goodput"] == 0.5 and result["request_throughput"] == 1.0
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == 8 and result["tokens_counted_by"] == "chunks"
    assert result["ttfts"] == pytest.approx([0.2, 0.5, 1.0]) and result["errors"] == ["", "", "no"]


def test_nobody_answered():
    failed = RequestRecord(planned=1.0, start=1.0, end=2.0, error_kind="http 503", error="no")
    result = serve_statistics.summarize([failed], 1.0, goodput=[("ttft", 1.0)])
    assert result["completed"] == 0 and result["output_throughput"] == 0 and result["mean_ttft_ms"] == 0


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 8.0, math.inf])
def test_arrivals_have_their_rate_and_shape(burstiness):
    times = arrival_times(4000, 20.0, burstiness, seed=3)
    assert times[-1] == pytest.approx(200.0) and times == sorted(times)
    gaps = np.diff(times)
    # The variation coefficient of a gamma distribution is one over the root of its shape.
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), abs=0.1)
    assert times == arrival_times(4000, 20.0, burstiness, seed=3)
    assert burstiness == math.inf or times != arrival_times(4000, 20.0, burstiness, seed=4)


def test_requests_come_at_their_times(mock):
    found = run(mock, "--num-prompts", "10", "--request-rate", "20", "--burstiness", "inf")
    starts = [record.start for record in found.records]
    assert starts[-1] - starts[0] == pytest.approx(0.45, abs=0.15)
    assert found.result["request_rate"] == 20.0


def test_random_prompts_have_their_length(tiny_checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    settings = ServeBenchSettings(num_prompts=8, input_len=40, output_len=10, random_range_ratio=0.5)
    requests = make_requests(settings, lambda: tokenizer)
    lengths = [len(tokenizer.encode(request.prompt)) for request in requests]
    assert all(abs(found - request.prompt_len) <= 1 for found, request in zip(lengths, requests, strict=True))
    assert len(set(lengths)) > 2 and all(20 <= n <= 60 for n in lengths)
    assert all(5 <= request.output_len <= 15 for request in requests)
    assert requests == make_requests(settings, lambda: tokenizer)
    prefixed = make_requests(ServeBenchSettings(num_prompts=3, input_len=9, random_prefix_len=30), lambda: tokenizer)
    assert len({request.prompt[:40] for request in prefixed}) == 1 < len({request.prompt for request in prefixed})


def test_packaged_prompts_are_all_different():
    requests = make_requests(ServeBenchSettings(dataset_name="packaged", num_prompts=120), pytest.fail)
    assert len({request.prompt for request in requests}) == 120


def test_conversations_of_a_sharegpt_file(tmp_path, tiny_checkpoint):
    from transformers import AutoTokenizer

    talk = {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because of that."}]}
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([talk, {"conversations": [{"from": "human", "value": "alone"}]}]))
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    settings = ServeBenchSettings(dataset_name="sharegpt", dataset_path=path, num_prompts=3)
    requests = make_requests(settings, lambda: tokenizer)
    assert [request.prompt for request in requests] == ["Why?"] * 3
    assert requests[0].output_len == len(tokenizer.encode("Because of that."))
    fixed = ServeBenchSettings(dataset_name="sharegpt", dataset_path=path, num_prompts=3, output_len=4)
    assert make_requests(fixed, pytest.fail)[0].output_len == 4


@pytest.mark.parametrize("text", ["{", '[{"a": 1}]', "[]"])
@pytest.mark.parametrize("kind", ["sharegpt", "custom"])
def test_file_without_prompts_is_refused(tmp_path, kind, text):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="dataset-path"):
        make_requests(ServeBenchSettings(dataset_name=kind, dataset_path=path, num_prompts=1), pytest.fail)


def test_words_of_vllm_are_understood():
    words = (
        "--backend vllm --host example.org --port 81 --model m --dataset-name random --random-input-len 9 "
        "--random-output-len 8 --num-prompts 7 --request-rate inf --max-concurrency 6 --goodput ttft:200 tpot:50 "
        "e2el:9000 --percentile-metrics ttft,e2el --metric-percentiles 50,99.9 --save-result --result-dir out "
        "--metadata tp=1 dtype=bf16 --seed 5 --temperature 0.7"
    )
    settings = parse_settings(words.split())
    assert settings.url == "http://example.org:81" and settings.path == "/v1/completions"
    assert (settings.input_len, settings.output_len, settings.num_prompts) == (9, 8, 7)
    assert settings.goodput == (("ttft", 200.0), ("tpot", 50.0), ("e2el", 9000.0))
    assert settings.metric_percentiles == (50.0, 99.9) and settings.percentile_metrics == ("ttft", "e2el")
    assert dict(settings.metadata) == {"tp": "1", "dtype": "bf16"} and math.isinf(settings.request_rate)
    assert parse_settings(["--base-url", "http://h:1/v1/"]).url == "http://h:1"


@pytest.mark.parametrize(
    "words",
    ["--num-prompts 0", "--request-rate 0", "--burstiness -1", "--max-concurrency 0", "--random-range-ratio 1",
     "--base-url ftp://x", "--dataset-name sharegpt"],
)  # fmt: skip
def test_values_that_make_no_sense_are_named(words):
    with pytest.raises(ConfigurationError, match=words.split()[0] if "sharegpt" not in words else "--dataset-path"):
        parse_settings(words.split())


@pytest.mark.parametrize("words", ["--goodput itl:3", "--goodput ttft", "--percentile-metrics x", "--extra-body [1]"])
def test_words_that_are_none_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        parse_settings(words.split())
    shown = capsys.readouterr().err
    assert words.split()[0] in shown and shown.count("\n") == 2


def test_header_with_a_line_break_is_refused():
    with pytest.raises(ConfigurationError, match="line break"):
        HttpClient("http://h", {"X-A": "b\r\nX-C: d"})


def test_server_that_is_not_there_or_refuses():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    common = ["--port", str(port), "--ready-check-timeout-sec", "0.1", "--disable-tqdm", "--dataset-name", "packaged"]
    with pytest.raises(ServerNotReadyError, match="/v1/models"):
        run_serve_benchmark(parse_settings(common))
    with pytest.raises(ServerNotReadyError, match="no connection"):
        run_serve_benchmark(parse_settings([*common, "--model", "m"]))


def test_server_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(serve, "SHORTEST_WAIT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = ["--port", str(listener.getsockname()[1]), "--ready-check-timeout-sec", "0.1", "--disable-tqdm"]
        words += ["--dataset-name", "packaged"]
        with pytest.raises(ServerNotReadyError, match="TimeoutError"):
            run_serve_benchmark(parse_settings(words))
        with pytest.raises(ServerNotReadyError, match=r"timeout: no end within 0\.1 s"):
            run_serve_benchmark(parse_settings([*words, "--model", "m"]))


@pytest.mark.parametrize("answer", ["[]", '{"data": ["m"]}', '{"data": []}', "5"])
def test_list_of_models_that_is_none_is_told(answer):
    url = answer_once(f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n{answer}".encode())
    with pytest.raises(ServerNotReadyError, match="No model is known"):
        run_serve_benchmark(parse_settings(["--base-url", url, "--ready-check-timeout-sec", "0.1"]))


def test_server_that_starts_meanwhile_is_waited_for():
    mock, app = OpenAIMock(), FastAPI()
    calls = []

    @app.middleware("http")
    async def busy_at_first(request, call_next):
        from fastapi.responses import JSONResponse

        calls.append(request.url.path)
        return JSONResponse({}, 503) if len(calls) < 3 else await call_next(request)

    app.mount("/", mock.app)
    with running(app) as mock.url:
        assert run(mock, "--num-prompts", "1").result["completed"] == 1
    assert len(calls) >= 4


def test_command_line_writes_files(mock, tmp_path, capsys):
    saved, plot = tmp_path / "a" / "result.json", tmp_path / "plot.png"
    words = ["--base-url", mock.url, "--dataset-name", "packaged", "--num-prompts", "4", "--output-len", "3"]
    words += ["--num-warmups", "2", "--metadata", "note=hi", "--disable-tqdm", "--goodput", "e2el:60000"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *words, "--save-result", str(saved), "--plot", str(plot)])
    assert not ended.value.code
    assert len(mock.bodies) == 1 + 2 + 4
    shown = capsys.readouterr().out
    assert "4 of 4" in shown and "time to first token" in shown and "p99" in shown
    result = json.loads(saved.read_text())
    for key in ("date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
                "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
                "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
                "max_output_tokens_per_s", "max_concurrent_requests", "mean_ttft_ms", "median_tpot_ms", "std_itl_ms",
                "p99_e2el_ms"):  # fmt: skip
        assert key in result, f"vLLM's key {key} is missing"
    assert result["note"] == "hi" and result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert "ttfts" not in result and plot.read_bytes().startswith(b"\x89PNG")


def test_details_and_names_of_files(mock, tmp_path):
    found = run(mock, "--num-prompts", "2")
    words = ["--result-dir", str(tmp_path), "--label", "x", "--plot"]
    (plot,) = write_files(parse_settings(words), found)
    assert plot.parent == tmp_path and plot.name.startswith("x-infqps-mock-") and plot.suffix == ".png"
    saved, plot = write_files(parse_settings([*words, "--save-result", "--save-detailed"]), found)
    assert saved.name.startswith("x-infqps-mock-") and len(json.loads(saved.read_text())["ttfts"]) == 2
    assert plot == saved.with_suffix(".png") and plot.exists()
    assert write_files(parse_settings([*words, "--save-result", "a.json"]), found)[1] == tmp_path / "a.png"


def test_without_matplotlib_a_plot_is_refused_before_anything_is_sent(mock, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"hf-paged\[bench\]"):
        run(mock, "--num-prompts", "1", "--plot", "a.png")
    assert not mock.bodies


def test_figures_are_printed_before_a_file_that_cannot_be_written(mock, tmp_path, capsys):
    (tmp_path / "file").touch()
    words = ["--base-url", mock.url, "--dataset-name", "packaged", "--num-prompts", "1", "--output-len", "2"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *words, "--disable-tqdm", "--save-result", str(tmp_path / "file" / "result.json")])
    shown = capsys.readouterr()
    assert ended.value.code == 1 and "1 of 1" in shown.out and "Error" in shown.err


def test_key_is_the_first_that_is_named(mock, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("HF_PAGED_API_KEY", "third")
    assert parse_settings([]).key == "third"
    monkeypatch.setenv("OPENAI_API_KEY", "second")
    assert parse_settings([]).key == "second"
    settings = parse_settings(["--api-key", "first"])
    assert settings.key == "first" and "first" not in repr(settings)
    run(mock, "--num-prompts", "1", "--api-key", "first")
    assert mock.headers[-1]["authorization"] == "Bearer first"


def test_key_on_the_command_line_is_painted_over(mock, monkeypatch):
    hidden = []
    monkeypatch.setattr("hf_paged.serving.process_list.hide", hidden.append)
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--base-url", mock.url, "--dataset-name", "packaged", "--num-prompts", "1",
              "--disable-tqdm", "--api-key", "sesame"])  # fmt: skip
    assert hidden == [["sesame"]]


@pytest.mark.parametrize("model", [[], ["--model", "m"]])
def test_server_that_wants_a_key_is_told_apart_from_one_that_is_not_ready(monkeypatch, model):
    for name in ("OPENAI_API_KEY", "HF_PAGED_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    app = FastAPI()

    @app.middleware("http")
    async def refuse(request, call_next):
        from fastapi.responses import JSONResponse

        return JSONResponse({"error": {"message": "no"}}, 401)

    with running(app) as url:
        words = ["--base-url", url, "--dataset-name", "packaged", *model]
        with pytest.raises(ServerNotReadyError, match="needs a key, and none was given; the first of `--api-key`"):
            run_serve_benchmark(parse_settings(words))
        monkeypatch.setenv("HF_PAGED_API_KEY", "wrong")
        with pytest.raises(ServerNotReadyError, match="the key of HF_PAGED_API_KEY is none of its keys"):
            run_serve_benchmark(parse_settings(words))
        with pytest.raises(ServerNotReadyError, match="the key of `--header` is none"):
            run_serve_benchmark(parse_settings([*words, "--header", "Authorization=Bearer x"]))


def test_nobody_answered_is_a_failure_of_the_command(mock, tmp_path, monkeypatch):
    path = prompts_file(tmp_path, "hello")
    calls = []
    stream = mock.stream

    async def only_once(*args):
        calls.append(args)
        if len(calls) == 1:
            async for event in stream(*args):
                yield event

    monkeypatch.setattr(mock, "stream", only_once)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--base-url", mock.url, "--dataset-name", "custom", "--dataset-path", path,
              "--num-prompts", "2", "--disable-tqdm"])  # fmt: skip
    assert ended.value.code == 1


def test_help_does_not_load_torch():
    import subprocess

    code = "import sys; from hf_paged.tools.bench.serve_settings import make_parser; make_parser().format_help();"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
