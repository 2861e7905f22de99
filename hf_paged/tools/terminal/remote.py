"""A server that speaks OpenAI's API, through the standard library: no package is needed, and none is waited for."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ...errors import ConfigurationError, EngineError, HfPagedError, InvalidRequestError
from .answers import Answer, Write

KEY_VARIABLES = ("OPENAI_API_KEY", "HF_PAGED_API_KEY")
_SILENCE = 600.0  # seconds without a byte
_CONNECTING = 20.0


class RemoteServer:
    """Answers with what a server answers.

    Args:
        base_url (`str`):
            Its URL, with or without `/v1`.
        model (`str`, *optional*):
            Which of its models; the first that it lists by default.
        api_key (`str`, *optional*):
            Its key; that of `OPENAI_API_KEY` or `HF_PAGED_API_KEY` by default.
        seed (`int`, *optional*):
            Makes all answers together repeatable, where the server can.

    Raises:
        ConfigurationError: If it is no URL, nobody answers there, or not as OpenAI does.
    """

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None, seed: int | None = None):
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(
                f"`--base-url` must be an http or https URL such as http://127.0.0.1:8000, got {base_url!r}."
            )
        self._url = base_url.rstrip("/").removesuffix("/v1")
        self._key = api_key or next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)
        self._seeds = random.Random(seed) if seed is not None else None
        self.max_model_len: int | None = None
        self.name = model or ""
        self._look_at_models()

    def _look_at_models(self) -> None:
        try:
            with self._open("/v1/models", timeout=_CONNECTING) as answer:
                models = {str(model["id"]): model for model in json.loads(answer.read())["data"]}
        except InvalidRequestError:
            if not self.name:
                raise ConfigurationError(
                    f"{self._url} does not list its models; name the MODEL beside `--base-url`."
                ) from None
            return
        except HfPagedError:  # some are a ValueError, too
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{self._url} does not answer /v1/models as OpenAI does: {error!r}.") from error
        if not self.name:
            if not models:
                raise ConfigurationError(f"{self._url} serves no model.")
            self.name = next(iter(models))
        if self.name not in models:
            raise ConfigurationError(f"{self._url} has no model {self.name!r}; it has {', '.join(models) or 'none'}.")
        self.max_model_len = models[self.name].get("max_model_len")

    def chat(self, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any], write: Write) -> Answer:
        """Answers a conversation; see `Answerer`.

        Args:
            messages (`Sequence[Mapping[str, Any]]`):
                With `role` and `content`.
            sampling (`Mapping[str, Any]`):
                Fields of `SamplingParams` that were given.
            write (`Callable[[str], Any]`):
                Gets the answer's text piece by piece.
        """
        return self._stream("/v1/chat/completions", {"messages": list(messages)}, sampling, write)

    def complete(self, prompt: str, sampling: Mapping[str, Any], write: Write) -> Answer:
        """Continues a text; see `Answerer`.

        Args:
            prompt (`str`):
                The text.
            sampling (`Mapping[str, Any]`):
                Fields of `SamplingParams` that were given.
            write (`Callable[[str], Any]`):
                Gets the answer's text piece by piece.
        """
        return self._stream("/v1/completions", {"prompt": prompt}, sampling, write)

    def _stream(self, path: str, body: dict[str, Any], sampling: Mapping[str, Any], write: Write) -> Answer:
        given = {name: value for name, value in sampling.items() if value is not None}
        if self._seeds is not None:
            given.setdefault("seed", self._seeds.getrandbits(31))
        body = {"model": self.name, **body, **given, "stream": True, "stream_options": {"include_usage": True}}
        begin = time.perf_counter()
        pieces: list[str] = []
        first = reason = None
        usage: dict[str, Any] = {}
        with self._open(path, body) as lines:
            for event in _events(lines):
                if event.get("error"):
                    raise EngineError(f"The server broke off: {_message_of(event)}")
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    reason = choice.get("finish_reason") or reason
                    text = choice["text"] if "text" in choice else (choice.get("delta") or {}).get("content")
                    if text:
                        first = time.perf_counter() - begin if first is None else first
                        pieces.append(text)
                        write(text)
        if reason is None:
            raise EngineError(f"{self._url} closed the connection before the answer was complete.")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        seconds = time.perf_counter() - begin
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return Answer("".join(pieces), reason, *counts, cached, first, seconds)

    @contextlib.contextmanager
    def _open(self, path: str, body: Any = None, timeout: float = _SILENCE) -> Iterator[Any]:
        """An answer of status 200, whatever else is an error that says what to do. Leaving it closes the connection."""
        headers = {"Accept": "*/*", "Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except TimeoutError:
            raise EngineError(f"{self._url} has been silent for {timeout:g} s.") from None
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            raise ConfigurationError(
                f"No server answers at {self._url} ({reason}); `hf-paged serve MODEL` starts one."
            ) from None
        except (BrokenPipeError, KeyboardInterrupt):
            raise
        except (ConnectionError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or repr(error)
            raise EngineError(f"The connection to {self._url} was lost: {reason}.") from None

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        try:
            said = _message_of(json.loads(error.read()))
        except (OSError, ValueError):
            said = error.reason
        if error.code in (401, 403):
            where = " or ".join(KEY_VARIABLES)
            state = "refuses the key" if self._key else "wants a key"
            return ConfigurationError(f"{self._url} {state} ({said}); set {where}, or give `--api-key`.")
        kind = EngineError if error.code >= 500 else InvalidRequestError
        return kind(f"{self._url} answers {error.code}: {said}")

    def close(self) -> None:
        """Nothing is open between two answers."""


def _events(lines: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise EngineError(f"The server sent something that is not JSON: {data[:80]!r}.") from None
        if isinstance(event, dict):
            yield event


def _message_of(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
