"""`AsyncEngine`: an engine with a thread of its own, for programs whose requests come and go (servers, agents)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from ..errors import EngineClosedError, InvalidRequestError, RequestAbortedError
from . import exit_guard
from .answer import RequestState
from .outputs import RequestOutput
from .sampling.params import SamplingParams

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT = 10.0


class AsyncEngine:
    """Runs a paged model's engine in a thread and hands out results as async iterators.

    Args:
        model (`PreTrainedModel`):
            A paged model; it is kept alive.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For prompts given as text, texts of answers and stop strings.

    Raises:
        UnsupportedModelError: If the paged engine cannot run this model.
        InvalidRequestError: If the model is not a paged one.

    Example:

    ```python
    engine = AsyncEngine(model, tokenizer=tokenizer)
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=50)):
        print(output.outputs[0].text)
    engine.close()
    ```
    """

    def __init__(self, model: Any, *, tokenizer: Any = None):
        if not hasattr(model, "_paged_refusal"):
            raise InvalidRequestError(
                f"`model` must be a paged model, got {type(model).__name__}; make one with "
                "`AutoPagedModelForCausalLM.from_pretrained(name)` or `.from_model(model)`."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.engine = model.engine
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._live: dict[str, RequestState] = {}

    def start(self) -> None:
        """Starts the thread; `generate` does so by itself. Safe to call twice, and before the first request.

        Raises:
            EngineClosedError: If the engine was closed.
        """
        with self._lock:
            if self._stop.is_set():
                raise EngineClosedError("This AsyncEngine was closed; make a new one.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hf_paged-engine", daemon=True)
                self._thread.start()
                exit_guard.guard(self)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.engine.serve(self._stop)
            except EngineClosedError:  # also what an engine says that has just gone to sleep
                if self.engine.is_closed:
                    return
            except Exception:
                # Requests of the step have failed with the cause; the engine itself is usable.
                logger.exception("a step of the engine failed")

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        extra_keys: tuple = (),
        output_kind: Literal["cumulative", "delta", "final"] = "cumulative",
    ) -> AsyncIterator[RequestOutput]:
        """Answers one prompt and yields outputs as tokens come. Leaving the loop early aborts the request.

        Args:
            prompt (`str` or `Sequence[int]`):
                Text, or token ids.
            sampling_params (`SamplingParams`, *optional*):
                How to sample.
            request_id (`str`, *optional*):
                Unique among live requests; a new one by default.
            priority (`int`, defaults to 0):
                Lower runs earlier under the priority policy.
            extra_keys (`tuple`, defaults to `()`):
                Requests share cached prompts only with requests of equal keys (a tenant's salt, ...).
            output_kind (`str`, defaults to `"cumulative"`):
                `"cumulative"`: all so far; `"delta"`: what is new; `"final"`: only the finished output.

        Yields:
            `RequestOutput`: Until one is `finished`.

        Raises:
            InvalidRequestError: If something is wrong with the request.
            RequestAbortedError: If somebody aborted it.
            EngineError: If a step failed; the cause is attached.
        """
        if output_kind not in ("cumulative", "delta", "final"):
            raise InvalidRequestError(f"`output_kind` must be 'cumulative', 'delta' or 'final', got {output_kind!r}.")
        self.start()
        text, tokens = self._tokenize(prompt)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[RequestOutput] = asyncio.Queue()
        sent: dict[int, tuple[int, int]] = {}

        def on_update(state: RequestState) -> None:
            if output_kind == "final" and not state.finished:
                return
            output = state.output()
            if output_kind == "delta":
                _cut(output, sent)
            loop.call_soon_threadsafe(queue.put_nowait, output)

        state = self.engine.add_request(
            tokens,
            sampling_params,
            request_id=request_id,
            prompt=text,
            priority=priority,
            extra_keys=extra_keys,
            tokenizer=self.tokenizer,
            on_update=on_update,
        )
        self._live[state.request_id] = state
        try:
            while True:
                output = await queue.get()
                if state.error is not None:
                    raise state.error
                if output.finished and any(answer.finish_reason == "abort" for answer in output.outputs):
                    raise RequestAbortedError(f"Request {state.request_id!r} was aborted.")
                yield output
                if output.finished:
                    return
        finally:
            self._live.pop(state.request_id, None)
            if not state.finished:
                self.engine.abort(state.request_id)

    def _tokenize(self, prompt: str | Sequence[int]) -> tuple[str | None, Sequence[int]]:
        if not isinstance(prompt, str):
            return None, prompt
        if self.tokenizer is None:
            raise InvalidRequestError("`prompt` is a text, and the engine was given no tokenizer.")
        return prompt, self.tokenizer(prompt)["input_ids"]

    async def abort(self, request_id: str) -> None:
        """Ends a request; unknown and finished ones are ignored.

        Args:
            request_id (`str`):
                Which.
        """
        self.engine.abort(request_id)

    def close(self) -> None:
        """Ends the thread; streams that are still running are aborted. Safe to call twice."""
        self._stop.set()
        self.engine.wake()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.engine.abort_all(list(self._live.values()))

    def end_at_exit(self) -> None:
        """Ends the thread, for the end of the interpreter; waits ten seconds at most."""
        self._stop.set()
        self.engine.wake()
        if self._thread is not None:
            self._thread.join(_EXIT_TIMEOUT)


def _cut(output: RequestOutput, sent: dict[int, tuple[int, int]]) -> None:
    """Leaves in an output only what earlier ones did not have."""
    for answer in output.outputs:
        num_tokens, num_chars = sent.get(answer.index, (0, 0))
        sent[answer.index] = len(answer.token_ids), len(answer.text)
        answer.text = answer.text[num_chars:]
        answer.token_ids = answer.token_ids[num_tokens:]
        if answer.logprobs is not None:
            answer.logprobs = answer.logprobs[num_tokens:]
