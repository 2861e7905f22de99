"""Compiles grammars beside everything else: in threads whose work is first done in another process, with a cache."""

from __future__ import annotations

import atexit
import concurrent.futures
import dataclasses
import importlib.util
import os
import queue
import threading
from typing import Any

from ...errors import EngineError, HfPagedError, InvalidRequestError, MissingDependencyError, QueueFullError
from . import grammar_process, tokenizers
from .cache import CompiledGrammar, GrammarCache
from .params import GrammarSource
from .proving import GrammarProcess, refusal
from .tokenizers import GrammarTokenizer, TokenizerSpec

NUM_THREADS = 2
STACK_BYTES = 64 * 2**20  # far more than the other process had for the same grammar
MAX_QUEUED = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
    source: GrammarSource | None  # None: only make everything ready
    spec: TokenizerSpec
    future: concurrent.futures.Future[Any]


class GrammarCompiler:
    """Compiles grammars in two threads, each with a process of its own.

    Args:
        cache (`GrammarCache`, *optional*):
            Where they are kept.
    """

    def __init__(self, cache: GrammarCache | None = None):
        self.cache = cache if cache is not None else GrammarCache()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending: dict[tuple, _Job] = {}
        self._lock = threading.Lock()
        self._processes: list[GrammarProcess] = []
        self._num_idle = 0

    def find(self, source: GrammarSource, spec: TokenizerSpec) -> CompiledGrammar | None:
        """Returns a grammar if it has been compiled already.

        Args:
            source (`GrammarSource`):
                The grammar.
            spec (`TokenizerSpec`):
                What for.

        Raises:
            InvalidRequestError: If it was refused before.
        """
        tokenizer = spec.find()
        return None if tokenizer is None else self.cache.get(tokenizer, source)

    def submit(self, source: GrammarSource | None, spec: TokenizerSpec) -> concurrent.futures.Future[Any]:
        """Has a grammar compiled, once for all who ask for it.

        Args:
            source (`GrammarSource`, *optional*):
                The grammar; without one all is made ready for the first.
            spec (`TokenizerSpec`):
                What for.

        Returns:
            `concurrent.futures.Future`: Of a `CompiledGrammar`.

        Raises:
            MissingDependencyError: If llguidance is not installed.
            QueueFullError: If too many wait.
        """
        require_llguidance()
        key = (source, id(spec.tokenizer), spec.vocab_size, spec.eos_token_ids)
        with self._lock:
            job = self._pending.get(key)
            if job is not None:
                return job.future
            if len(self._pending) >= MAX_QUEUED:
                raise QueueFullError(f"{len(self._pending)} grammars wait to be compiled; try again later.")
            job = self._pending[key] = _Job(source, spec, concurrent.futures.Future())
            job.future.set_running_or_notify_cancel()  # others may wait for it: nobody can cancel it
            if self._num_idle < len(self._pending) and len(self._processes) < NUM_THREADS:
                self._start_thread()
        self._jobs.put(job)
        return job.future

    def _start_thread(self) -> None:
        process = GrammarProcess()
        self._processes.append(process)
        self._num_idle += 1
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._run, args=(process,), name="hf_paged-grammars", daemon=True).start()
        finally:
            threading.stack_size(before)

    def _run(self, process: GrammarProcess) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._num_idle -= 1
            grammar, error = None, None
            try:
                grammar = self._do(job, process)
            except BaseException as failure:  # a panic of the library is no `Exception`
                error = failure
            with self._lock:
                self._num_idle += 1
                spec = job.spec
                del self._pending[job.source, id(spec.tokenizer), spec.vocab_size, spec.eos_token_ids]
            if error is None:
                job.future.set_result(grammar)
            elif isinstance(error, HfPagedError):
                job.future.set_exception(error)
            else:
                job.future.set_exception(_unexpected(error))
            del job, grammar, error  # this thread may wait for long

    def _do(self, job: _Job, process: GrammarProcess) -> CompiledGrammar | None:
        tokenizer = job.spec.make()
        if job.source is None:
            process.make_ready(tokenizer.name, tokenizer.definition)
            return None
        found = self.cache.get(tokenizer, job.source)
        if found is not None:
            return found
        try:
            proof = process.prove(job.source, tokenizer.name, tokenizer.definition)
            start = _compile(job.source, tokenizer, proof.grammar)
        except InvalidRequestError as error:
            self.cache.put(tokenizer, job.source, str(error))
            raise
        compiled = CompiledGrammar(job.source, tokenizer, start, proof.num_bytes)
        self.cache.put(tokenizer, job.source, compiled)
        return compiled

    def close(self) -> None:
        """Ends the processes and, when they have nothing to do, the threads."""
        with self._lock:
            processes, self._processes = self._processes, []
        for process in processes:
            self._jobs.put(None)
            process.end()

    def disown(self) -> None:
        """Lets go of the processes, in a forked process where they are the parent's."""
        for process in self._processes:
            process.disown()


def _compile(source: GrammarSource, tokenizer: GrammarTokenizer, grammar: str) -> Any:
    try:
        return grammar_process.compile_grammar(tokenizer.library, grammar)
    except ValueError as error:
        raise refusal(source, error) from error


def _unexpected(error: BaseException) -> HfPagedError:
    wrapped = EngineError(f"Compiling a grammar failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def require_llguidance() -> None:
    """Raises if the grammar library is not there.

    Raises:
        MissingDependencyError: Names the package and how to get it.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise MissingDependencyError(
            "`structured_outputs` needs the package llguidance, which is not installed: "
            "`pip install hf-paged[structured]`."
        )


_compiler: GrammarCompiler | None = None
_compiler_lock = threading.Lock()


def compiler() -> GrammarCompiler:
    """Returns the compiler of this process, made at the first use."""
    global _compiler
    with _compiler_lock:
        if _compiler is None:
            _compiler = GrammarCompiler()
            atexit.register(_compiler.close)
        return _compiler


def compile_grammar(source: GrammarSource, spec: TokenizerSpec) -> concurrent.futures.Future[CompiledGrammar]:
    """Has a grammar compiled, unless it is there.

    Args:
        source (`GrammarSource`):
            The grammar.
        spec (`TokenizerSpec`):
            What for.

    Returns:
        `concurrent.futures.Future`: Of the grammar.

    Raises:
        InvalidRequestError: If it was refused before.
        MissingDependencyError: If llguidance is not installed.
        QueueFullError: If too many wait.
    """
    found = compiler().find(source, spec)
    if found is None:
        return compiler().submit(source, spec)
    future: concurrent.futures.Future[CompiledGrammar] = concurrent.futures.Future()
    future.set_result(found)
    return future


def _forget_compiler() -> None:
    """A forked process has neither the threads nor a right to the processes."""
    global _compiler, _compiler_lock
    _compiler_lock = threading.Lock()
    tokenizers.forget_lock()
    if _compiler is not None:
        atexit.unregister(_compiler.close)
        _compiler.disown()
        _compiler = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_compiler)
