"""A server that speaks OpenAI's API, through the standard library: no package is needed, and none is waited for."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import reprlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ...errors import ConfigurationError, EngineError, HfPagedError, InvalidRequestError
from .answers import Answer, Write
from .texts import has_surrogates

T = TypeVar("T")

KEY_VARIABLES = ("OPENAI_API_KEY", "HF_PAGED_API_KEY")
_SILENCE = 600.0  # seconds without a byte
_CONNECTING = 20.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key, and what is asked, are for the host that was named alone."""

    def redirect_request(self, *arguments: Any) -> None:
        """Sends no further request; see `HTTPRedirectHandler`."""


_OPENER = urllib.request.build_opener(_NoRedirect)


def check_server(base_url: str, api_key: str | None) -> tuple[str, str | None]:
    """Returns a server's URL without `/v1`, and the key that is sent to it, if any. Nothing is asked.

    Args:
        base_url (`str`):
            Its URL.
        api_key (`str`, *optional*):
            Its key; that of `OPENAI_API_KEY` or `HF_PAGED_API_KEY` by default.

    Raises:
        ConfigurationError: If it is no URL, or the key can be none. A key or a password is not in the message.
    """
    _, user, host = base_url.rpartition("@")
    if user:
        raise ConfigurationError(
            f"`--base-url` must not hold a user or a password (before @{host}); the server's key is `--api-key`, or "
            f"{' or '.join(KEY_VARIABLES)}."
        )
    if not _is_url(base_url):
        raise ConfigurationError(
            f"`--base-url` must be an http or https URL such as http://127.0.0.1:8000, got {base_url!r}."
        )
    return base_url.rstrip("/").removesuffix("/v1"), _key(api_key)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port  # which is looked at only now
    except ValueError:
        return False
    has_only_signs = text.isascii() and text.isprintable() and " " not in text
    return has_only_signs and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0


def _key(given: str | None) -> str | None:
    for name, key in [("`--api-key`", given), *((name, os.environ.get(name)) for name in KEY_VARIABLES)]:
        if key := (key or "").strip():  # the end of a line comes with a key that was read from a file
            if not (key.isascii() and key.isprintable()):
                raise ConfigurationError(f"{name} is no key: it must be printable ASCII, as HTTP carries nothing else.")
            return key
    return None


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
        self._url, self._key = check_server(base_url, api_key)
        self._seeds = random.Random(seed) if seed is not None else None
        self.max_model_len: int | None = None
        self.name = model or ""
        self._look_at_models()

    def _look_at_models(self) -> None:
        try:
            with self._open("/v1/models", timeout=_CONNECTING) as answer:
                models = {model["id"]: model for model in _models_of(json.loads(answer.read()))}
        except InvalidRequestError:
            if not self.name:
                raise ConfigurationError(
                    f"{self._url} does not list its models; name the MODEL beside `--base-url`."
                ) from None
            return
        except HfPagedError:  # some are a ValueError, too
            raise
        except (ValueError, RecursionError):
            raise ConfigurationError(
                f"{self._url} does not answer /v1/models as OpenAI does: with `data`, a list of models with `id`."
            ) from None
        if not self.name:
            if not models:
                raise ConfigurationError(f"{self._url} serves no model.")
            self.name = next(iter(models))
        if self.name not in models:
            raise ConfigurationError(f"{self._url} has no model {self.name!r}; it has {', '.join(models) or 'none'}.")
        limit = models[self.name].get("max_model_len")
        self.max_model_len = limit if isinstance(limit, int) else None

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
        usage = _Usage()
        with self._open(path, body) as lines:
            for event in _events(lines):
                if event.get("error"):
                    raise EngineError(f"The server broke off: {_message_of(event)}")
                usage = _usage_of(event) or usage
                for choice in _part(event, "choices", list):
                    reason = _part(choice, "finish_reason", str) or reason
                    if text := _text_of(choice):
                        first = time.perf_counter() - begin if first is None else first
                        pieces.append(text)
                        write(text)
        if reason is None:
            raise EngineError(f"{self._url} closed the connection before the answer was complete.")
        return Answer("".join(pieces), reason, *usage, first, time.perf_counter() - begin)

    @contextlib.contextmanager
    def _open(self, path: str, body: Any = None, timeout: float = _SILENCE) -> Iterator[Any]:
        """An answer of status 200, whatever else is an error that says what to do. Leaving it closes the connection."""
        headers = {"Accept": "*/*", "Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with _OPENER.open(request, timeout=timeout) as answer:
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
        except (OSError, ValueError, RecursionError, http.client.HTTPException):
            said = error.reason
        if wait := error.headers.get("Retry-After"):
            said += f" (Retry-After: {wait[:40]})"
        if error.code in (401, 403):
            where = " or ".join(KEY_VARIABLES)
            state = "refuses the key" if self._key else "wants a key"
            return ConfigurationError(f"{self._url} {state} ({said}); set {where}, or give `--api-key`.")
        if error.code < 400:
            to = error.headers.get("Location", "nowhere")
            return ConfigurationError(
                f"{self._url} answers {error.code} and sends to {to}; requests and keys are sent nowhere else: "
                "if that is right, name it as `--base-url`."
            )
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
        except (ValueError, RecursionError):
            raise EngineError(f"The server sent something that is not JSON: {data[:80]!r}.") from None
        if not isinstance(event, dict):
            raise _unlike_openai("an event", event)
        yield event


class _Usage(NamedTuple):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


def _models_of(body: Any) -> list[dict[str, Any]]:
    models = body.get("data") if isinstance(body, dict) else None
    if not isinstance(models, list):
        raise ValueError("no list")
    if not all(isinstance(model, dict) and isinstance(model.get("id"), str) for model in models):
        raise ValueError("no models")
    return models


def _usage_of(event: dict[str, Any]) -> _Usage | None:
    usage = _part(event, "usage", dict)
    if not usage:
        return None
    details = _part(usage, "prompt_tokens_details", dict)
    names = ((usage, "prompt_tokens"), (usage, "completion_tokens"), (details, "cached_tokens"))
    return _Usage(*(_part(holder, name, int) if holder.get(name) is not None else None for holder, name in names))


def _text_of(choice: Any) -> str:
    delta = _part(choice, "delta", dict)
    text = _part(choice, "text", str) or _part(delta, "content", str)
    if has_surrogates(text):
        raise _unlike_openai("a text", text)
    return text


def _part(holder: Any, name: str, kind: type[T]) -> T:
    """A part of an event that may be missing, which is the same as an empty one."""
    if not isinstance(holder, dict):
        raise _unlike_openai("a part of an event", holder)
    value = holder.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise _unlike_openai(f"`{name}`", value)
    return value


def _unlike_openai(what: str, value: Any) -> EngineError:
    return EngineError(f"The server did not answer as OpenAI does: {what} is {reprlib.repr(value)}.")


def _message_of(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
