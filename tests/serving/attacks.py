"""Hostile requests beside an honest one, and what must hold of both.

`attack` sends requests while a stream of somebody else runs, and checks that

    each hostile request is refused (or answered) in time, and never with 5xx
    the stream has exactly the bytes that it has alone
    `/health` is 200 and the next request is answered as ever
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.serving.events import events_of
from tests.serving.servers import ServerThread, chat, make_tiny_service

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
REFUSED = frozenset(range(400, 500))
ANSWERED = REFUSED | {200}
SECONDS = 1.0
# A busy machine is slow now and then: what took too long is sent again.
_TRIES = 4
_PADDING = 40
_PAUSE = 0.2  # between somebody else's streams
# Long enough to outlast most attacks, with all that could be disturbed: sampling, log-probabilities, cached blocks.
HONEST = chat(
    "The quick brown fox jumps over the lazy dog. " * 8,
    max_tokens=120,
    seed=11,
    ignore_eos=True,
    stream=True,
    logprobs=True,
    top_logprobs=2,
    presence_penalty=0.3,
    return_token_ids=True,
)


def padded_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint whose logits are wider than its tokenizer, as those of many models are."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.resize_token_embeddings(model.config.vocab_size + _PADDING, mean_resizing=False)
    shutil.copytree(checkpoint, folder)
    model.save_pretrained(folder)
    return folder


class Target(ServerThread):
    """A server, and what it answers to an honest request while nobody else is there."""

    def __init__(self, checkpoint: Path, **settings: Any):
        super().__init__(make_tiny_service(checkpoint, batch_invariant=True, **settings))
        self.checkpoint = checkpoint
        self.headers: dict[str, str] = {}
        self.alone = b""
        self.next = ""
        self._client: httpx.Client | None = None

    def __enter__(self) -> Target:
        super().__enter__()
        if self.service.settings.api_key:
            self.headers = {"Authorization": f"Bearer {self.service.settings.api_key[0]}"}
        self._client = self.client()
        self.alone = self.honest_answer()
        self.next = self.next_answer()
        assert len(self.alone) > 1000
        return self

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client of this server, with a key if one is needed."""
        return super().client(**{"headers": self.headers, "verify": False, **options})

    def __exit__(self, *exception: object) -> None:
        if self._client is not None:
            self._client.close()
        super().__exit__(*exception)

    def honest_answer(self, started: threading.Event | None = None) -> bytes:
        """All that a stream says of its answer, whatever its chunks were."""
        lines = []
        with self.client() as client, client.stream("POST", CHAT, json=HONEST) as response:
            assert response.status_code == 200
            for text in response.iter_text():
                lines.append(text)
                if started is not None:
                    started.set()
        choices = [choice for chunk in events_of("".join(lines)) for choice in chunk["choices"]]
        told = {
            "content": "".join(choice["delta"].get("content", "") for choice in choices),
            "token_ids": [token for choice in choices for token in choice.get("token_ids", ())],
            "logprobs": [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())],
            "finish_reason": choices[-1]["finish_reason"],
        }
        return json.dumps(told).encode()

    def next_answer(self) -> str:
        """What the next request is answered."""
        with self.client() as client:
            response = client.post(CHAT, json=chat("And now?", seed=5, max_tokens=6))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    def send(self, path: str, body: Any, *, method: str = "POST", **options: Any) -> httpx.Response:
        """Sends a request: a body of bytes as it is, anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        assert self._client is not None, "the server has been entered"
        return self._client.request(method, path, content=content, headers=headers, **options)

    def raw(self, data: bytes, *, end: bool = False) -> bytes:
        """What comes back on a connection of its own until the server closes it; with `end`, nothing more is sent."""
        with self.connect() as connection:
            connection.sendall(data)
            if end:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(65536):
                    answer += piece
            return answer


@contextlib.contextmanager
def bystander(target: Target) -> Iterator[None]:
    """Somebody whose streams, one after the other until the end of the block, must not change."""
    started, over = threading.Event(), threading.Event()
    wrong: list[Any] = []

    def ask() -> None:
        try:
            while True:
                answer = target.honest_answer(started)
                if answer != target.alone:
                    wrong.append(answer)
                if over.wait(_PAUSE):
                    return
        except BaseException as error:
            wrong.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield
    finally:
        over.set()
        thread.join(60)
    assert not thread.is_alive(), "somebody else's stream hangs"
    assert not wrong, f"somebody else's stream has changed: {wrong[0]!r:.500}"


def assert_well(target: Target) -> None:
    """The server goes on as if nothing had been."""
    with target.client() as client:
        assert client.get("/health").status_code == 200
    assert target.next_answer() == target.next
    deadline = time.monotonic() + 20
    blocks = target.service.engine.engine.live.block_manager
    while blocks.num_blocks_held or target.app.state.work.num_running:
        assert time.monotonic() < deadline, "something of the attack is left"
        time.sleep(0.01)


def attack(
    target: Target,
    requests: Sequence[tuple[str, Any]] | Sequence[Callable[[], httpx.Response]],
    *,
    statuses: frozenset[int] = REFUSED,
    seconds: float = SECONDS,
) -> list[httpx.Response]:
    """Sends requests beside an honest stream, and checks all that must hold.

    Args:
        target (`Target`):
            The server.
        requests (`Sequence`):
            Paths and bodies, or functions that send something.
        statuses (`frozenset[int]`, *optional*):
            That the answers may have; only refusals by default.
        seconds (`float`, defaults to 1.0):
            In which each must be there.

    Returns:
        `list[httpx.Response]`: The answers.
    """
    answers = []
    with bystander(target):
        for request in requests:
            answers.append(_timed(target, request, seconds))
            said = answers[-1].text[:300]
            assert answers[-1].status_code in statuses, f"{request!r:.300} -> {answers[-1].status_code} {said}"
            if answers[-1].status_code in REFUSED:
                assert "error" in answers[-1].json() and len(answers[-1].content) < 4096
    assert_well(target)
    return answers


def _timed(target: Target, request: Any, seconds: float) -> httpx.Response:
    taken = []
    for _ in range(_TRIES):
        started = time.monotonic()
        answer = request() if callable(request) else target.send(*request)
        taken.append(time.monotonic() - started)
        if taken[-1] <= seconds:
            return answer
    raise AssertionError(f"{request!r:.300} took {', '.join(f'{t:.2f}' for t in taken)} s, more than {seconds:g} s")


def hang_up(connection: socket.socket) -> None:
    """Has a connection reset when it is closed, as when a client is killed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
