"""The server's logs: a line for each request, nothing secret in it, and nobody writes lines of their own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from hf_paged import SamplingParams
from hf_paged.errors import StepFailedError
from hf_paged.serving.access_log import (
    AccessLogMiddleware,
    RequestLog,
    configure_logging,
    current_record,
    escaped,
    log_stats,
    note_error,
    note_refusal,
)
from tests.serving.observed import PROMPTS

SECRET = "my name is Bond"


@pytest.fixture
def configured():
    """Configures logging for one test: returns a function that does it and returns where the lines go."""

    def configure(log_format="text", level="INFO"):
        stream = io.StringIO()
        configure_logging(log_format, level, stream)
        return stream

    return configure


class _Ids:
    """Stands for the layer that gives requests their ids, which lies inside of the log's."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        scope.setdefault("state", {})["request_id"] = (
            dict(scope["headers"]).get(b"x-request-id", b"r1").decode("latin-1")
        )
        await self.app(scope, receive, send)


def make_app(observed, **options):
    app = FastAPI()

    @app.get("/health")
    async def health():
        return {}

    @app.post("/v1/answer/{name}")
    async def answer(name: str, n: int = 1):
        outputs = await asyncio.gather(*(observed.ask(prompt, 5) for prompt in PROMPTS[:n]))
        return {"text": len(outputs)}

    @app.post("/v1/stream")
    async def stream(tokens: int = 6):
        async def pieces():
            async with observed.submit(PROMPTS[1], tokens) as answers:
                async for deltas in answers:
                    yield f"data: {deltas[0].token_ids}\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    @app.get("/refuse/{status}")
    async def refuse(status: int):
        return JSONResponse({}, status_code=status)

    @app.get("/field/{name:path}")
    async def field(name: str):
        note_refusal("not_supported", name)
        return JSONResponse({}, status_code=400)

    @app.get("/fail")
    async def fail():
        note_error(StepFailedError("a step\r\n2026-01-01 00:00:00 INFO forged: failed"))
        return JSONResponse({}, status_code=500)

    @app.get("/raise")
    async def raises(request: Request):
        raise RuntimeError("unexpected")

    return AccessLogMiddleware(_Ids(app), observed.metrics, **options)


def run(app, *requests):
    async def everything():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return [await client.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(everything())


def lines_of(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_finished_request_is_one_line_with_what_it_cost(observed, configured):
    stream = configured("json")
    run(make_app(observed), ("POST", "/v1/answer/x?key=" + SECRET, {"headers": {"X-Request-Id": "abc-1"}}))
    (line,) = lines_of(stream)
    assert line["message"] == "POST /v1/answer/{name} 200"
    assert line["level"] == "info" and line["logger"] == "hf_paged.access"
    assert line["id"] and line["prompt"] == len(PROMPTS[0]) and line["generated"] == 5
    assert line["finish"] == "length" and 0 < line["ttft"] < line["e2e"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}", line["time"])
    assert SECRET not in stream.getvalue()


def test_a_request_with_several_prompts_is_one_line_with_their_sums(observed, configured):
    stream = configured("json")
    run(make_app(observed), ("POST", "/v1/answer/x?n=3", {}))
    (line,) = lines_of(stream)
    assert line["prompt"] == sum(map(len, PROMPTS[:3])) and line["generated"] == 15 and line["finish"] == "length"


def test_a_text_line_can_be_read(observed, configured):
    stream = configured("text")
    run(make_app(observed), ("POST", "/v1/answer/x", {}))
    (line,) = stream.getvalue().splitlines()
    assert re.match(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO hf_paged.access: POST /v1/answer/\{name\} 200 id=[\w-]+ ", line
    )
    assert " generated=5 " in line and line.endswith("finish=length")


def test_a_stream_whose_client_leaves_is_logged_when_the_engine_has_ended_it(observed, configured):
    stream = configured("json")
    app = make_app(observed)

    async def leave():
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.body" and message.get("body"):
                left.set()

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": "/v1/stream", "raw_path": b"/v1/stream", "query_string": b"tokens=5000", "headers": [],
            "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 80), "scheme": "http", "root_path": "",
        }  # fmt: skip
        await app(scope, receive, send)
        await observed.idle()

    asyncio.run(leave())
    (line,) = lines_of(stream)
    assert line["message"] == "POST /v1/stream 200" and line["finish"] == "abort" and line["client"] == "127.0.0.1"
    assert 1 <= line["generated"] < 5000


def test_a_client_that_left_before_the_answer_began_has_a_status_of_its_own(observed, configured):
    stream = configured("json")

    async def cancelled(scope, receive, send):
        raise asyncio.CancelledError

    async def run_it():
        scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": []}
        with pytest.raises(asyncio.CancelledError):
            await AccessLogMiddleware(cancelled, observed.metrics)(scope, None, None)

    asyncio.run(run_it())
    assert lines_of(stream)[0]["message"] == "POST /v1/x 499"
    assert observed.metrics.http_requests == {("unmatched", "499"): 1}


def test_probes_are_quiet_and_refusals_are_no_errors(observed, configured):
    stream = configured("json")
    requests = [("GET", path, {}) for path in ("/health", "/refuse/400", "/refuse/503", "/nothing/here")]
    run(make_app(observed), *requests, ("GET", "/x", {"headers": {"X-Request-Id": "two words"}}))
    *lines, last = lines_of(stream)
    assert last["id"] == "two words"
    assert [line["message"] for line in lines] == [
        "GET /refuse/{status} 400", "GET /refuse/{status} 503", "GET /nothing/here 404",
    ]  # fmt: skip
    assert {line["level"] for line in lines} == {"info"}
    assert "prompt" not in lines[0]


def test_further_endpoints_may_be_quiet_beside_those_of_probes(make_client, caplog):
    client = make_client(disable_access_log_for_endpoints=("/version",))
    with caplog.at_level(logging.INFO, logger="hf_paged.access"):
        for path in ("/health", "/metrics", "/version", "/v1/models"):
            client.get(path)
    assert [record.getMessage() for record in caplog.records if record.name == "hf_paged.access"] == [
        "GET /v1/models 200"
    ]


def test_our_own_mistakes_are_errors_with_their_traceback(observed, configured):
    stream = configured("json")
    failed, raised = run(make_app(observed), ("GET", "/fail", {}), ("GET", "/raise", {}))
    assert (failed.status_code, raised.status_code) == (500, 500)
    noted, unexpected = lines_of(stream)
    assert noted["level"] == unexpected["level"] == "error"
    assert noted["error"].startswith("StepFailedError: a step") and "StepFailedError" in noted["traceback"]
    assert unexpected["error"] == "RuntimeError: unexpected" and "in raises" in unexpected["traceback"]


@pytest.mark.parametrize("field", ["max_tokens", "response_format.json_schema", "messages[3].content[0].image_url"])
def test_a_refusal_names_the_field(observed, configured, field):
    stream = configured("json")
    run(make_app(observed), ("GET", f"/field/{field}", {}))
    (line,) = lines_of(stream)
    assert (line["code"], line["param"]) == ("not_supported", field)


@pytest.mark.parametrize("field", ["my name is Bond", "Bond", "metadata.a'b", "x" * 50, ".".join("abcdef")])
def test_a_field_of_the_clients_own_words_is_not_named(observed, configured, field):
    stream = configured("json")
    run(make_app(observed), ("GET", f"/field/{field}", {}))
    (line,) = lines_of(stream)
    assert line["code"] == "not_supported" and "param" not in line


def test_errors_outside_of_a_request_are_logged_too(configured):
    stream = configured("json")
    assert current_record() is None
    note_error(ValueError("alone"))
    assert "ValueError: alone" in lines_of(stream)[0]["traceback"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_nobody_writes_a_line_of_their_own(observed, configured, log_format):
    stream = configured(log_format)
    evil = "x\r\n2026-01-01 00:00:00 INFO forged: \x1b[31mred\x07\u2028\x7f\x85\u202e"
    app = make_app(observed)
    scope_id = {"headers": {"X-Request-Id": "ab"}}
    run(app, ("GET", "/fail", scope_id), ("GET", "/refuse/404", {}))
    logging.getLogger("hf_paged.serving.other").warning("value %s", evil)
    foreign = {"name": "somebody.else", "levelno": logging.ERROR, "levelname": "ERROR", "msg": "value %r and %s"}
    record = logging.makeLogRecord({**foreign, "args": (evil, "\ud800")})
    for handler in logging.getLogger().handlers:  # not through the logger: pytest's own handler cannot hand that on
        if type(handler).__module__.startswith("hf_paged"):
            handler.handle(record)

    async def evil_request():
        scope = {"type": "http", "method": evil, "path": "/" + evil, "headers": [], "state": {"request_id": evil}}
        await AccessLogMiddleware(_refusing, observed.metrics)(scope, None, _nowhere)

    asyncio.run(evil_request())
    text = stream.getvalue()
    for line in text.split("\n"):
        assert line.isprintable(), line
        assert not line.startswith("2026-01-01")
        if log_format == "json" and line:
            json.loads(line)
    assert "forged" in text


async def _refusing(scope, receive, send):
    await send({"type": "http.response.start", "status": 404, "headers": []})


async def _nowhere(message):
    pass


def test_escaping_leaves_ordinary_text_alone():
    assert escaped("Grüße, 世界 🙂 – ok") == "Grüße, 世界 🙂 – ok"
    assert escaped("a\r\nb\x1b\u2028\ud800") == "a\\r\\nb\\x1b\\u2028\\ud800"


def test_a_flood_of_refusals_is_counted_instead_of_logged(observed, configured):
    stream = configured("json")
    app = AccessLogMiddleware(_refusing, observed.metrics)

    async def flood():
        for _ in range(5000):
            await app({"type": "http", "method": "GET", "path": "/x", "headers": []}, None, _nowhere)
        await asyncio.sleep(1.2)

    asyncio.run(flood())
    *single, last = lines_of(stream)
    told = re.fullmatch(r"(\d+) more requests were refused within a second: (\d+) x 404", last["message"])
    assert told and int(told[1]) == int(told[2]) == 5000 - len(single)
    assert len(single) <= 60


def test_a_flood_of_refusals_hides_no_error_of_our_own(observed, configured):
    stream = configured("json")
    app = AccessLogMiddleware(_refusing, observed.metrics)
    failing = AccessLogMiddleware(_failing, observed.metrics)
    failing._refusals, failing._failures = app._refusals, app._failures

    async def flood():
        scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        for number in range(1000):
            await app(dict(scope), None, _nowhere)
            if number >= 990:
                with contextlib.suppress(RuntimeError):
                    await failing(dict(scope), None, _nowhere)
        await asyncio.sleep(1.2)

    asyncio.run(flood())
    errors = [line for line in lines_of(stream) if line["level"] == "error"]
    assert len(errors) == 10 and all("RuntimeError" in line["traceback"] for line in errors)


async def _failing(scope, receive, send):
    raise RuntimeError("our own mistake")


def test_logs_can_be_turned_off_but_for_errors(observed, configured):
    stream = configured("json")
    run(make_app(observed, lines=False), ("POST", "/v1/answer/x", {}), ("GET", "/refuse/503", {}), ("GET", "/fail", {}))
    assert [line["message"] for line in lines_of(stream)] == ["GET /fail 500"]
    assert sum(observed.metrics.http_requests.values()) == 3


def test_arrivals_show_parameters_and_lengths_but_prompts_only_if_asked(configured):
    stream = configured("json")
    params = SamplingParams(max_tokens=5, temperature=0.5, stop=["\nEnd"], logit_bias=dict.fromkeys(range(500), 1.0))
    RequestLog().arrived("a", params, 12, SECRET)
    RequestLog(prompts=True, max_log_len=4).arrived("b", params, 12, SECRET)
    RequestLog(prompts=True).arrived("c", params, 12, SECRET)
    without, short, whole = lines_of(stream)
    assert without["prompt"] == 12 and "text" not in without
    assert "max_tokens=5" in without["params"] and "temperature=0.5" in without["params"]
    assert "top_p" not in without["params"] and len(without["params"]) < 400
    assert short["text"] == SECRET[:4] and whole["text"] == SECRET


def test_arrivals_are_logged_by_whoever_watches_requests(observed, configured):
    stream = configured("json")
    observed.start_over(request_log=RequestLog())
    observed.ask_all(PROMPTS[:2], max_tokens=3)
    assert [line["prompt"] for line in lines_of(stream)] == [len(prompt) for prompt in PROMPTS[:2]]


def test_the_engines_line_comes_while_it_is_busy_and_once_after(observed, configured):
    stream = configured("json")

    async def run_it():
        teller = asyncio.create_task(log_stats(observed.metrics, interval=0.05))
        await asyncio.sleep(0.12)
        quiet = stream.getvalue()
        await asyncio.gather(*(observed.ask(prompt, 30) for prompt in PROMPTS))
        await observed.idle()
        await asyncio.sleep(0.16)
        told = len(lines_of(stream))
        await asyncio.sleep(0.12)
        teller.cancel()
        return quiet, told

    quiet, told = asyncio.run(run_it())
    lines = lines_of(stream)
    assert quiet == "" and told == len(lines) >= 2
    pattern = (
        r"running: \d+, waiting: \d+, prompts: ([\d.]+) tokens/s, answers: ([\d.]+) tokens/s, "
        r"K/V cache usage: [\d.]+ %, prefix cache hit rate: [\d.]+ %"
    )
    rates = [re.fullmatch(pattern, line["message"]).groups() for line in lines]
    assert max(float(answers) for _, answers in rates) > 0
    assert rates[-1] == ("0.0", "0.0") and lines[-1]["message"].startswith("running: 0, waiting: 0")


def test_warnings_of_the_hubs_client_come_once(configured, capfd):
    stream = configured()
    logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
    assert stream.getvalue().count("Retrying in 1s") == 1
    assert "Retrying" not in capfd.readouterr().err


def test_logging_can_be_configured_twice(configured):
    first, second = configured("text"), configured("json")
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("hf_paged.x").info("ours")
    logging.getLogger("some.library").info("not shown")
    logging.getLogger("uvicorn.access").warning("GET /?key=secret")
    assert first.getvalue() == "" and [line["message"] for line in lines_of(second)] == ["started", "ours"]
