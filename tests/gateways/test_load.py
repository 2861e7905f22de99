"""Answered, refused and lost are told apart, and so is a client that left by itself."""

from __future__ import annotations

import asyncio

import pytest

from examples.gateways.common.load import ANSWERED, LEFT, LOST, REFUSED, Outcome
from tests.gateways.fake_gateway import NEVER, Script, answer, full, gateway, http, right, stream


def ask(script: Script, *, streamed: bool = False, timeout: float = 30.0) -> Outcome:
    async def work() -> Outcome:
        async with gateway(script, timeout=timeout) as client:
            return await client.ask(stream=streamed)

    return asyncio.run(work())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_whole_answer_of_the_right_length_is_answered(streamed):
    outcome = ask(right, streamed=streamed)
    assert outcome.kind == ANSWERED and outcome.seconds > 0


def test_a_stream_whose_usage_the_gateway_has_only_estimated_is_answered():
    assert ask(lambda number, body: stream(completion_tokens=14, estimated=True), streamed=True).kind == ANSWERED


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("headers", [(), ("Retry-After: 1",)])
def test_a_refusal_is_no_loss_and_whether_it_says_when_to_come_again_is_noted(status, headers, streamed):
    outcome = ask(lambda number, body: full(status, *headers), streamed=streamed)
    assert outcome.kind == REFUSED and outcome.has_retry_after == bool(headers)
    assert outcome.detail.startswith(f"{status}: ") and "the queue is full" in outcome.detail


LOSSES = {
    "another 5xx": (False, http(502, b"bad gateway"), "502: bad gateway"),
    "a mistake that was none": (False, http(400, b"no"), "400: no"),
    "too short": (False, answer(tokens=3), "3 of 16 tokens"),
    "no text": (False, answer(text=""), "0 characters"),
    "an answer that is none": (False, http(200, b"{}"), "200 without an answer"),
    "no answer": (False, b"", "RemoteProtocolError"),
    "half an answer": (False, answer()[:-5], "RemoteProtocolError"),
    "a stream without an end": (True, stream(done=False), "no end"),
    "a stream that breaks off": (True, stream()[:-30], "RemoteProtocolError"),
    "an answer that ended for another reason": (False, answer(reason="stop"), "stop"),
    "a stream that is too short": (True, stream(completion_tokens=15), "15 of 16 tokens"),
    "a stream that does not say why it ended": (True, stream(reason=None), "None"),
    "an error in a stream": (True, stream({"error": {"message": "gone"}}), "gone"),
    "a chunk that is no JSON": (True, http(200, b"data: {\n\n", kind="text/event-stream"), "not JSON"),
    "no stream": (True, answer(), "no end"),
}


@pytest.mark.parametrize("what", LOSSES)
def test_everything_else_is_lost(what):
    streamed, said, detail = LOSSES[what]
    outcome = ask(lambda number, body: said, streamed=streamed)
    assert outcome.kind == LOST and detail in outcome.detail, outcome


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_never_comes_is_lost(streamed):
    outcome = ask(lambda number, body: NEVER, streamed=streamed, timeout=0.3)
    assert outcome.kind == LOST and "0.3 s" in outcome.detail


def test_nobody_there_is_lost():
    async def work() -> Outcome:
        async with gateway(right) as client:
            pass
        async with gateway(right) as other:
            other._http.base_url = client._http.base_url  # whose server has ended
            return await other.ask()

    assert asyncio.run(work()).kind == LOST


def test_clients_that_leave_are_told_apart_from_those_that_got_an_answer():
    async def work() -> list[Outcome]:
        left = asyncio.Event()
        left.set()
        async with gateway(right) as client:
            stayed = await client.leave_whole(100, asyncio.Event())
            of_stream = await client.leave_stream(100)
        async with gateway(lambda number, body: NEVER) as client:
            return [stayed, of_stream, await client.leave_whole(100, left)]

    stayed, of_stream, of_answer = asyncio.run(work())
    assert stayed.kind == LOST and "200" in stayed.detail
    assert of_stream.kind == LEFT and of_answer.kind == LEFT
