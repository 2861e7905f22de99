"""The grammars of an engine's requests: compiled while they wait, followed while they run."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from ...errors import EngineClosedError, EngineError, HfPagedError, InvalidRequestError
from ..model_state import with_end_of
from .cache import CompiledGrammar
from .compiler import compile_grammar, compiler, require_llguidance
from .masks import GrammarMasks
from .params import StructuredOutputsParams
from .tokenizers import TokenizerSpec

if TYPE_CHECKING:
    import concurrent.futures

    from ..answer import RequestState
    from ..engine import Engine
    from ..request import Request


class Grammars:
    """What an engine has to do with grammars.

    Args:
        engine (`Engine`):
            The engine; it is not kept alive.
    """

    def __init__(self, engine: Engine):
        self.masks = GrammarMasks()
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> Engine:
        """Returns the engine.

        Raises:
            EngineClosedError: If it is gone.
        """
        engine = self._engine()
        if engine is None:
            raise EngineClosedError("The engine was deleted.")
        return engine

    def compile(self, params: Any, tokenizer: Any = None) -> CompiledGrammar:
        """Compiles a grammar and waits for it; a request with the same one then starts at once. Thread-safe.

        Args:
            params (`StructuredOutputsParams` or `Mapping[str, Any]`):
                The form of the answer.
            tokenizer (`PreTrainedTokenizerFast`, *optional*):
                Instead of the engine's own.

        Returns:
            `CompiledGrammar`: Nothing need be done with it.

        Raises:
            InvalidRequestError: If it is malformed, or too large.
            NotSupportedError: If the tokenizer is none of the tokenizers library.
            MissingDependencyError: If llguidance is not installed.
            QueueFullError: If too many wait to be compiled.
        """
        return self.submit(params, tokenizer).result()

    def submit(self, params: Any, tokenizer: Any = None) -> concurrent.futures.Future[CompiledGrammar]:
        """Has a grammar compiled and waits for nothing. Thread-safe.

        Servers do this before they submit a request, `await asyncio.wrap_future(engine.grammars.submit(params))`, so
        that a mistake is known before anything is sent.

        Args:
            params (`StructuredOutputsParams` or `Mapping[str, Any]`):
                The form of the answer.
            tokenizer (`PreTrainedTokenizerFast`, *optional*):
                Instead of the engine's own.

        Returns:
            `concurrent.futures.Future`: Of what `compile` returns, or raises.

        Raises:
            InvalidRequestError: If it is malformed, or was refused before.
            NotSupportedError: If the tokenizer is none of the tokenizers library.
            MissingDependencyError: If llguidance is not installed.
            QueueFullError: If too many wait to be compiled.
        """
        return compile_grammar(StructuredOutputsParams.of(params).source, self._spec(tokenizer))

    def warm_up(self, tokenizer: Any = None) -> concurrent.futures.Future[Any]:
        """Makes everything ready for the first grammar, which otherwise waits for it a second or two.

        Args:
            tokenizer (`PreTrainedTokenizerFast`, *optional*):
                Instead of the engine's own.

        Returns:
            `concurrent.futures.Future`: Done when all is ready; nobody need wait for it.

        Raises:
            NotSupportedError: If the tokenizer is none of the tokenizers library.
            MissingDependencyError: If llguidance is not installed.
        """
        return compiler().submit(None, self._spec(tokenizer))

    def _spec(self, tokenizer: Any) -> TokenizerSpec:
        require_llguidance()
        engine = self.engine
        tokenizer = tokenizer if tokenizer is not None else engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("`structured_outputs` needs a tokenizer, and the engine was given none.")
        return TokenizerSpec(tokenizer, engine.limits.vocab_size, with_end_of(tokenizer, engine.limits.eos_token_ids))

    def prepare(self, state: RequestState) -> None:
        """Gives a new request its grammar, if that is there; else it waits until it has been compiled.

        Args:
            state (`RequestState`):
                The request, before it is queued.

        Raises:
            InvalidRequestError: If its grammar was refused before.
        """
        wanted = state.group.requests[0].params.structured_outputs
        if wanted is None:
            return
        grammar = compiler().find(wanted.source, self._spec(state.tokenizer))
        for request in state.group.requests:
            request.grammar, request.ready = grammar, grammar is not None

    def let_go(self, request: Request) -> None:
        """A request has ended.

        Args:
            request (`Request`):
                The request.
        """
        grammar, matcher, request.grammar, request.matcher = request.grammar, request.matcher, None, None
        if grammar is not None and matcher is not None:
            compiler().cache.used(grammar, request.num_output_tokens, is_worn_out=matcher.error() is not None)

    def start(self, state: RequestState) -> None:
        """Has the grammar of a request compiled, which waits meanwhile.

        Args:
            state (`RequestState`):
                The request, when it has been queued.
        """
        wanted = state.group.requests[0].params.structured_outputs
        assert wanted is not None, "only a grammar keeps a request from being ready"
        try:
            future = compiler().submit(wanted.source, self._spec(state.tokenizer))
        except HfPagedError as error:
            self.engine.live.take_grammar(state, None, error)
            return
        engine = self._engine

        def tell(done: concurrent.futures.Future[CompiledGrammar]) -> None:
            found = engine()
            if found is None:
                return
            error = done.exception()
            grammar = done.result() if error is None else None
            with contextlib.suppress(EngineClosedError):  # whose requests have been told
                found.post(lambda: found.live.take_grammar(state, grammar, _own(error)))

        future.add_done_callback(tell)


def _own(error: BaseException | None) -> BaseException | None:
    """An error that several requests raise: each gets one of its own, whose traceback is not the others'."""
    if isinstance(error, HfPagedError) and not isinstance(error, EngineError):
        return type(error)(*error.args)
    return error
