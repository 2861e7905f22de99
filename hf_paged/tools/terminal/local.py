"""A model of this machine, on the paged engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from ...errors import InvalidRequestError, MissingDependencyError
from ...generation.async_engine import AsyncEngine
from ...generation.sampling.params import SamplingParams
from ...serving.model_loading import load_llm
from ...serving.settings import ServerSettings
from .answers import Answer, Write

T = TypeVar("T")


class LocalModel:
    """Answers with a model that is loaded into this process.

    Args:
        settings (`ServerSettings`):
            Which model, and its engine.
        name (`str`, *optional*):
            What it is called; the MODEL by default.
        seed (`int`, *optional*):
            Makes all answers together repeatable.

    Raises:
        HfPagedError: If it cannot be loaded.
    """

    def __init__(self, settings: ServerSettings, name: str | None = None, seed: int | None = None):
        self._llm = load_llm(settings)
        self._template = dict(settings.default_chat_template_kwargs or {})
        self.name = name or str(settings.model)
        self.tokenizer = self._llm.tokenizer
        self.engine = AsyncEngine(self._llm.model, tokenizer=self.tokenizer)
        plan = self._llm.engine.plan
        self.max_model_len: int | None = plan.max_model_len
        self.max_num_seqs = plan.max_num_seqs
        self._seeds = random.Random(seed) if seed is not None else None

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
        # Without a limit of its own an answer may be as long as the context allows.
        params = self.params({"max_tokens": None, **sampling})
        return run_until_ctrl_c(self._stream(self.chat_tokens(messages), params, write))

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
        return run_until_ctrl_c(self._stream(self.text_tokens(prompt), self.params(sampling), write))

    def params(self, sampling: Mapping[str, Any]) -> SamplingParams:
        """Returns parameters, with a seed of their own if all answers are to be repeatable.

        Args:
            sampling (`Mapping[str, Any]`):
                Fields of `SamplingParams` that were given.

        Raises:
            InvalidRequestError: If one is impossible.
        """
        if self._seeds is not None and sampling.get("seed") is None:
            sampling = {**sampling, "seed": self._seeds.getrandbits(63)}
        return SamplingParams(**sampling)

    def text_tokens(self, prompt: str) -> list[int]:
        """Returns the tokens of a text.

        Args:
            prompt (`str`):
                The text.

        Raises:
            InvalidRequestError: If it has none.
        """
        tokens = self.tokenizer(prompt)["input_ids"]
        if not tokens:
            raise InvalidRequestError("The prompt is empty.")
        return tokens

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of a conversation, as the model's template writes it.

        Args:
            messages (`Sequence[Mapping[str, Any]]`):
                With `role` and `content`.

        Raises:
            InvalidRequestError: If there is no template, or it refuses the messages.
        """
        if self.tokenizer.chat_template is None:
            raise InvalidRequestError(
                f"{self.name} has no chat template, so it is no model for chats; `hf-paged complete` continues texts, "
                "and `--chat-template FILE` names a template."
            )
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **self._template
            )
        except ImportError as error:
            raise MissingDependencyError("Chats need the package jinja2: pip install 'hf-paged[serve]'.") from error
        except Exception as error:  # templates refuse in many ways
            raise InvalidRequestError(f"The chat template refused the messages: {error}") from error
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    async def _stream(self, tokens: list[int], params: SamplingParams, write: Write) -> Answer:
        begin = time.perf_counter()
        pieces: list[str] = []
        first: float | None = None
        reason, count = None, 0
        async with self.engine.submit(tokens, params) as answers:
            async for deltas in answers:
                (delta,) = deltas
                first = time.perf_counter() - begin if first is None else first
                count += len(delta.token_ids)
                reason = delta.finish_reason
                if delta.text:
                    pieces.append(delta.text)
                    write(delta.text)
            cached = answers.num_cached_tokens
        seconds = time.perf_counter() - begin
        return Answer("".join(pieces), reason, len(tokens), count, cached, first, seconds)

    def close(self) -> None:
        """Ends the engine."""
        self.engine.close()
        self._llm.close()


def run_until_ctrl_c(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in an event loop of its own. Ctrl-C cancels it, and once it has cleaned up is raised here.

    Args:
        work (`Coroutine`):
            What to run.
    """
    before = signal.getsignal(signal.SIGINT)
    interrupted = False

    def stop(task: asyncio.Task) -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        if before is not signal.SIG_IGN:
            # Not everywhere, and not in every thread.
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop, task)
        return await work

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        with contextlib.suppress(ValueError):  # of another thread than the main one
            if before is not None:
                signal.signal(signal.SIGINT, before)
