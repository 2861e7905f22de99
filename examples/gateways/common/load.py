"""A client that counts what becomes of each of its requests."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

PATH = "/v1/chat/completions"
TOKENS = 16
# Far beyond what any answer here takes: a request that is not answered by then is lost.
TIMEOUT = 180.0
# `LEFT` is what the client gave up itself.
ANSWERED, REFUSED, LOST, LEFT = "answered", "refused", "lost", "left"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a request.

    Args:
        kind (`str`):
            answered: whole, of the right length. refused: 503 or 429, so that the client knows that it may come again.
            left: by its client. lost: anything else.
        detail (`str`):
            Status and what was said, unless it was answered.
        seconds (`float`):
            From its sending to its end.
        has_retry_after (`bool`):
            Whether a refusal says when to come again.
    """

    kind: str
    detail: str = ""
    seconds: float = 0.0
    has_retry_after: bool = False


class Client:
    """Asks a gateway, or a server.

    Args:
        url (`str`):
            Without `/v1`.
        model (`str`):
            The name under which it is asked for.
        headers (`Mapping[str, str]`, *optional*):
            Sent with each request.
        timeout (`float`, defaults to 180.0):
            Seconds after which a request is lost.
    """

    def __init__(self, url: str, model: str, headers: Mapping[str, str] | None = None, timeout: float = TIMEOUT):
        self.model, self._timeout, self._count = model, timeout, 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        # As OpenAI's libraries do. Of a client that says neither `stream` nor this, OmniRoute thinks that it streams.
        headers = {"Accept": "application/json", **(headers or {})}
        # `trust_env`: a proxy of the environment is not for the loopback.
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    def body(self, tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
        """Returns a request whose answer has exactly so many tokens.

        Args:
            tokens (`int`, defaults to 16):
                Of the answer.
            fields (`Any`):
                Further fields.
        """
        self._count += 1
        messages = [{"role": "user", "content": f"{self._count}. Tell me something about the number {self._count}."}]
        length = {"max_tokens": tokens, "ignore_eos": True}
        return {"model": self.model, "messages": messages, "temperature": 0, **length, **fields}

    async def ask(self, tokens: int = TOKENS, *, stream: bool = False) -> Outcome:
        """Sends a request and returns what became of it; it raises nothing.

        Args:
            tokens (`int`, defaults to 16):
                Of the answer; one of another length is lost.
            stream (`bool`, defaults to `False`):
                Whether it comes piece by piece.
        """
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                outcome = await (self._ask_stream(tokens) if stream else self._ask_whole(tokens))
        except TimeoutError:
            outcome = Outcome(LOST, f"no end within {self._timeout:g} s")
        except httpx.HTTPError as error:
            outcome = Outcome(LOST, f"{type(error).__name__}: {error}")
        return dataclasses.replace(outcome, seconds=time.perf_counter() - begin)

    async def _ask_whole(self, tokens: int) -> Outcome:
        answer = await self._http.post(PATH, json=self.body(tokens))
        if answer.status_code != 200:
            return judge_refusal(answer.status_code, answer.headers, answer.text)
        try:
            told = answer.json()
            choice, usage = told["choices"][0], told["usage"]
            return _judge_length(choice["message"]["content"], choice["finish_reason"], usage, tokens)
        except (ValueError, LookupError, TypeError):
            return Outcome(LOST, f"200 without an answer: {answer.text[:200]}")

    async def _ask_stream(self, tokens: int) -> Outcome:
        body = self.body(tokens, stream=True, stream_options={"include_usage": True})
        text, reason, usage, ended = "", None, None, False
        async with self._http.stream("POST", PATH, json=body) as answer:
            if answer.status_code != 200:
                said = (await answer.aread()).decode("utf-8", "replace")
                return judge_refusal(answer.status_code, answer.headers, said)
            async for event in events(answer):
                if ended:
                    return Outcome(LOST, f"something came after the end: {event[:200]}")
                if event == "[DONE]":
                    ended = True
                    continue
                try:
                    chunk = json.loads(event)
                except ValueError:
                    return Outcome(LOST, f"a chunk is not JSON: {event[:200]}")
                if "error" in chunk or "choices" not in chunk:
                    return Outcome(LOST, f"an error in the stream: {event[:200]}")
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice.get("finish_reason") or reason
                usage = chunk.get("usage") or usage
        return _judge_length(text, reason, usage or {}, tokens) if ended else Outcome(LOST, "the stream has no end")

    async def leave_stream(self, tokens: int) -> Outcome:
        """Starts a stream and leaves after its first piece of text.

        Args:
            tokens (`int`):
                That it would have had.
        """
        async with self._http.stream("POST", PATH, json=self.body(tokens, stream=True)) as answer:
            if answer.status_code == 200:
                async for event in events(answer):
                    if event != "[DONE]" and any(c["delta"].get("content") for c in json.loads(event)["choices"]):
                        return Outcome(LEFT)
        return Outcome(LOST, f"status {answer.status_code}: the stream had no text to leave")

    async def leave_whole(self, tokens: int, when: asyncio.Event) -> Outcome:
        """Asks for an answer in one piece and leaves before it.

        Args:
            tokens (`int`):
                That it would have had.
            when (`asyncio.Event`):
                When to leave.
        """
        asking = asyncio.create_task(self._http.post(PATH, json=self.body(tokens)))
        leaving = asyncio.create_task(when.wait())
        await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if asking.done():
            return Outcome(LOST, f"status {asking.result().status_code} before the client could leave")
        asking.cancel()
        await asyncio.wait((asking,))
        return Outcome(LEFT)

    async def post(self, content: bytes) -> int:
        """Sends whatever it is and returns the status.

        Args:
            content (`bytes`):
                The body.
        """
        return (await self._http.post(PATH, content=content, headers={"Content-Type": "application/json"})).status_code


def judge_refusal(status: int, headers: Mapping[str, str], said: str) -> Outcome:
    """Returns what an answer other than 200 to a request without fault is.

    Args:
        status (`int`):
            Of HTTP.
        headers (`Mapping[str, str]`):
            Names in lower case.
        said (`str`):
            The body.
    """
    detail = f"{status}: {' '.join(said.split())[:200]}"
    if status in (429, 503):
        return Outcome(REFUSED, detail, has_retry_after="retry-after" in headers)
    return Outcome(LOST, detail)


def _judge_length(text: str | None, reason: str | None, usage: Mapping[str, Any], tokens: int) -> Outcome:
    """A gateway may say that it has only estimated the usage; why the answer ended still says that it was whole."""
    count = usage.get("completion_tokens")
    if not text or reason != "length" or (count != tokens and not usage.get("estimated")):
        return Outcome(LOST, f"a wrong length: {count} of {tokens} tokens, {len(text or '')} characters, {reason}")
    return Outcome(ANSWERED)


async def events(answer: httpx.Response) -> AsyncIterator[str]:
    """Yields the data of a stream's events.

    Args:
        answer (`httpx.Response`):
            An open one.
    """
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()
