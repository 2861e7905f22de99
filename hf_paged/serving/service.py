"""`Service`: what every route works with: the engine, the tokenizer, the limits, the worker threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import DeadlineExceededError
from ..generation.answer_stream import AnswerStream
from ..generation.async_engine import AsyncEngine
from ..generation.sampling.params import SamplingParams
from .errors import ApiError, overloaded
from .ids import new_id
from .observability import Observability
from .parser_choice import ParserChoice, choose_parsers

if TYPE_CHECKING:
    from .metrics import Metrics
    from .settings import ServerSettings

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, ready for the engine.

    Args:
        token_ids (`list[int]`):
            Its tokens.
        text (`str`, *optional*):
            Its text, if it was given as one.
    """

    token_ids: list[int]
    text: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestContext:
    """What a request says about itself beside what it wants.

    Args:
        request_id (`str`):
            Unique; of the client, or made here.
        priority (`int`, defaults to 0):
            Lower runs earlier under the priority policy.
        cache_salt (`str`, *optional*):
            Prompts share cached blocks only with prompts of the same salt.
        deadline (`float`, *optional*):
            Seconds that it may take, from its arrival on.
        trace (`Any`, *optional*):
            The span that it belongs to.
        arrived (`float`, defaults to now):
            When it arrived, by `time.monotonic()`.
    """

    request_id: str
    priority: int = 0
    cache_salt: str | None = None
    deadline: float | None = None
    trace: Any = None
    arrived: float = dataclasses.field(default_factory=time.monotonic)

    @contextlib.asynccontextmanager
    async def before_deadline(self) -> AsyncIterator[None]:
        """Ends what is done for a request before the engine has it (template, tokens, grammar) at its deadline, too.

        Raises:
            DeadlineExceededError: If that is reached.
        """
        left = None if self.deadline is None else self.deadline - (time.monotonic() - self.arrived)
        try:
            async with asyncio.timeout(left) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceededError(f"The answer was not begun within {self.deadline:g} s.") from None


class Service:
    """Everything that the routes share.

    Args:
        engine (`AsyncEngine`):
            Runs the requests.
        tokenizer (`PreTrainedTokenizerBase`):
            The model's.
        settings (`ServerSettings`):
            What the server was started with.
        metrics (`Metrics`):
            Counts.
        model_names (`Sequence[str]`):
            What clients may call the model; answers carry the first.
        parsers (`ParserChoice`, *optional*):
            Which parsers read answers; those that `settings` name by default.
        observability (`Observability`, *optional*):
            Told of every request; by default only `metrics` are.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Any,
        settings: ServerSettings,
        metrics: Metrics,
        model_names: Sequence[str],
        *,
        parsers: ParserChoice | None = None,
        observability: Observability | None = None,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = metrics
        self.model_names = tuple(model_names)
        self.created = int(time.time())
        self.parsers = parsers or choose_parsers(
            tokenizer,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        )
        self.observability = observability or Observability(metrics)
        self.draining = False
        self._seeds = random.Random(settings.seed) if settings.seed is not None else None
        # Tokenizers run outside of the interpreter's lock, but two cores are not to be taken from the engine.
        self._workers = concurrent.futures.ThreadPoolExecutor(max_workers=2, thread_name_prefix="hf_paged-worker")
        self._slow_worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hf_paged-slow-worker")

    @property
    def max_model_len(self) -> int:
        """Returns how many tokens a prompt and its answer may have together."""
        return self.engine.engine.plan.max_model_len

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Runs something that takes longer than a moment in a worker thread.

        Args:
            function (`Callable`):
                What to run.
            args (`Any`):
                Its arguments.
        """
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *args)

    async def run_aside(self, function: Callable[..., T], *args: Any) -> T:
        """Runs what may take many seconds in a thread of its own, one after the other.

        Args:
            function (`Callable`):
                What to run.
            args (`Any`):
                Its arguments.
        """
        return await asyncio.get_running_loop().run_in_executor(self._slow_worker, function, *args)

    def check_model(self, name: str | None) -> str:
        """Returns the name under which the model answers.

        Args:
            name (`str`, *optional*):
                What the client asked for; the only model there is, by default.

        Raises:
            ApiError: 404, if there is no such model.
        """
        if name is None or name in self.model_names:
            return self.model_names[0] if name is None else name
        shown = name if len(name) <= 200 else name[:200] + "..."
        raise ApiError(
            404,
            f"`model` {shown!r} is not served here; this server has {', '.join(self.model_names)}.",
            param="model",
            code="model_not_found",
        )

    def check_admission(self, num_tokens: int = 0) -> None:
        """Refuses work that would have to wait too long, before any time is spent on it.

        Args:
            num_tokens (`int`, defaults to 0):
                Of the prompt, once they are known.

        Raises:
            ApiError: 503 with `Retry-After`.
        """
        if self.draining:
            self.metrics.rejected("shutting_down")
            raise overloaded("The server is shutting down and takes no new requests.", "shutting_down")
        settings, engine = self.settings, self.engine
        limit, token_limit = settings.max_num_queued_reqs, settings.max_num_queued_tokens
        if limit is None and token_limit is None:
            return
        # Requests that a free seat awaits are not in the queue, even if no step has begun since they came.
        waiting = engine.num_waiting - max(0, engine.engine.plan.max_num_seqs - engine.num_running)
        if limit is not None and waiting >= limit:
            self.metrics.rejected("max_num_queued_reqs")
            raise overloaded(
                f"{waiting} requests are waiting, and `--max-num-queued-reqs` is {limit}; try again later."
            )
        if token_limit is not None and waiting >= 0:
            tokens = engine.num_waiting_tokens
            if tokens + num_tokens > token_limit and tokens:
                self.metrics.rejected("max_num_queued_tokens")
                raise overloaded(
                    f"The waiting prompts have {tokens} tokens, this one {num_tokens}, and `--max-num-queued-tokens` "
                    f"is {token_limit}; try again later."
                )

    def submit(
        self, prompt: Prompt, params: SamplingParams, context: RequestContext, *, stream: bool = True
    ) -> AnswerStream:
        """Hands a request to the engine.

        Args:
            prompt (`Prompt`):
                The prompt.
            params (`SamplingParams`):
                How to sample.
            context (`RequestContext`):
                Who asks.
            stream (`bool`, defaults to `True`):
                Whether deltas are read, or the whole answer only.

        Raises:
            ApiError: 503, if too much is waiting already.
            InvalidRequestError: If something is wrong with the request.
        """
        self.check_admission(len(prompt.token_ids))
        if self._seeds is not None and params.seed is None:
            params = params.replace(seed=self._seeds.getrandbits(63))
        answers = self.engine.submit(
            prompt.token_ids,
            params,
            prompt=prompt.text,
            # Clients and gateways may send an id twice; those of requests that run at the same time differ.
            request_id=f"{context.request_id}-{new_id()[:8]}",
            priority=context.priority,
            extra_keys=() if context.cache_salt is None else ("salt", context.cache_salt),
            stream=stream,
            deadline=context.deadline,
            arrived=context.arrived,
        )
        self.observability.watch(answers, context.trace)
        return answers

    def close(self) -> None:
        """Ends the engine's thread and the workers, and sends the last traces."""
        self.engine.close()
        for workers in (self._workers, self._slow_worker):
            workers.shutdown(wait=False, cancel_futures=True)
        self.observability.close()
