"""Sessions: rows of the engine whose tokens their caller chooses, so that any decoding loop can run on it.

Transformers' own loop (`generate` with beams, processors, criteria, ...) calls the model with an `EngineCache`. The
call does not run the model: it gives the session its new tokens and waits for the engine's steps to compute their
logits, together with everybody else's.

    Transformers' loop            session                        engine
    model(tokens, cache)     ->   rows get their tokens     ->   steps, with all other requests
    logits of all rows       <-   every row has its logits  <-
    cache.reorder_cache()    ->   with the next tokens      ->   block tables move, no K/V does

Rows with the same prompt compute it once and share its blocks.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import RequestAbortedError
from ..modeling.layer_groups import configured_window
from .admission import check_embeds, check_prompt, make_group
from .answer import RequestState
from .recording import Recorded
from .request import Request, RequestExtras
from .sampling.params import SamplingParams
from .stats import EngineStats

if TYPE_CHECKING:
    from .engine import Engine

_LONGEST_WAIT = 0.05  # seconds that a step waits for a session's tokens
_PATIENCE = 1.0  # seconds that a session may think before others may take its blocks


class OpenSessions:
    """The sessions of an engine. A step waits a moment for those that are choosing tokens, so that rows of several
    callers meet in it."""

    def __init__(self) -> None:
        self._sessions: set[Session] = set()

    def add(self, session: Session) -> None:
        """Adds a session.

        Args:
            session (`Session`):
                The session.
        """
        self._sessions.add(session)

    def discard(self, session: Session) -> None:
        """Forgets a session.

        Args:
            session (`Session`):
                The session.
        """
        self._sessions.discard(session)

    def await_choices(self, lock: threading.Condition, counters: EngineStats) -> None:
        """Waits until nobody is choosing any more, for half a step at most, and once for each choice.

        Args:
            lock (`threading.Condition`):
                Is notified when a session has chosen.
            counters (`EngineStats`):
                Say how long a step takes.
        """
        if not self._sessions or not counters.num_steps:
            return
        choosing = [session for session in tuple(self._sessions) if session.is_choosing and not session.was_awaited]
        if choosing:
            limit = min(_LONGEST_WAIT, counters.seconds_model / counters.num_steps / 2)
            with lock:
                lock.wait_for(lambda: not any(session.is_choosing for session in choosing), limit)
            for session in choosing:
                session.was_awaited = True


class Session:
    """Rows whose tokens are chosen by a caller. Used by one thread; the engine's steps may run in any.

    Args:
        engine (`Engine`):
            The engine.
        max_new_tokens (`int`):
            Tokens that a row may get after its prompt, at most.
        hidden_states (`bool`, defaults to `False`):
            Whether the hidden states of all tokens are wanted.
        attentions (`bool`, defaults to `False`):
            Whether the attention weights of all tokens are wanted.
    """

    def __init__(self, engine: Engine, max_new_tokens: int, *, hidden_states: Any = None, attentions: bool = False):
        self.engine = engine
        self.max_new_tokens = max_new_tokens
        self.requests: list[Request] = []
        self._extras = RequestExtras(hidden_states=hidden_states, attentions=attentions)
        self._states: list[RequestState] = []
        self._places: dict[str, int] = {}
        self._logits: list[torch.Tensor | None] = []
        self._recorded: list[Recorded | None] = []
        self._fed_from: list[int] = []  # the position of the first token that each row was given last
        self._parents: list[int] | None = None
        self._is_ending = False  # no more tokens will be chosen
        self._continued = True  # whether the scheduler has the tokens that were given last
        self._choosing_since: float | None = None
        self.was_awaited = False  # by a step, since the logits came

    @property
    def records_hidden_states(self) -> bool:
        """Returns whether the hidden states of all tokens are wanted."""
        return self._extras.hidden_states is not None

    @property
    def records_attentions(self) -> bool:
        """Returns whether the attention weights of all tokens are wanted."""
        return self._extras.attentions

    @property
    def records(self) -> bool:
        """Returns whether more than logits is wanted of each token."""
        return self.records_attentions or self.records_hidden_states

    @property
    def is_choosing(self) -> bool:
        """Returns whether all rows have their logits and the caller has not yet taken too long to choose tokens."""
        return self._choosing_since is not None and time.perf_counter() - self._choosing_since < _PATIENCE

    @property
    def awaits_logits(self) -> bool:
        """Returns whether the caller can only go on once rows are computed; else it is choosing tokens."""
        return self._choosing_since is None

    @property
    def is_closed(self) -> bool:
        """Returns whether the rows have been given back."""
        return bool(self._states) and all(state.finished for state in self._states)

    # ------------------------------------------------------------------ the caller's side

    def start(self, rows: Sequence[Sequence[int]], embeds: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Gives the rows their prompts.

        Args:
            rows (`Sequence[Sequence[int]]`):
                The prompt of each row; equal ones are computed once.
            embeds (`Sequence[torch.Tensor]`, *optional*):
                Each row's embeddings `[prompt tokens, hidden_size]`, instead of those of its tokens.

        Returns:
            `torch.Tensor` `[rows, vocab_size]`: The logits after the last token of each row.
        """
        self._logits = [None] * len(rows)
        self._recorded = [None] * len(rows)
        self._fed_from = [0] * len(rows)
        self.engine.sessions.add(self)
        for group in self._groups(rows, embeds):
            self._enqueue(group, list(rows[group[0]]), embeds[group[0]] if embeds is not None else None)
        self.requests.sort(key=lambda request: self._places[request.request_id])
        return self._wait()

    def feed(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Gives each row its next tokens.

        Args:
            rows (`Sequence[Sequence[int]]`):
                At least one token for each row.

        Returns:
            `torch.Tensor` `[rows, vocab_size]`: The logits after the last token of each row.
        """
        tokens = [check_prompt(row, self.engine.limits) for row in rows]
        parents, self._parents = self._parents, None
        self._post_continuation(parents, tokens)
        return self._wait()

    def reorder(self, parents: Sequence[int]) -> None:
        """Makes each row a copy of another, with effect from the next tokens on.

        Args:
            parents (`Sequence[int]`):
                For each row the one that it continues.
        """
        before = self._parents if self._parents is not None else range(len(self.requests))
        self._parents = [before[parent] for parent in parents]

    def hidden_states(self) -> tuple[torch.Tensor, ...]:
        """Returns the hidden states of the tokens of the last call, per layer `[rows, tokens, hidden_size]`."""
        recorded = [self._of_last_call(row) for row in range(len(self.requests))]
        return tuple(torch.stack([one.hidden_states for one in recorded], dim=1).unbind(0))  # type: ignore[misc]

    def attentions(self) -> tuple[torch.Tensor, ...]:
        """Returns the attention weights of the last call, per layer `[rows, num_query_heads, tokens, keys]`.

        Keys that no token of the call can see any more have no columns: Transformers' caches have forgotten them.
        """
        recorded = [self._of_last_call(row) for row in range(len(self.requests))]
        layers = zip(*(one.attentions for one in recorded if one.attentions is not None), strict=True)
        weights = [torch.stack(layer) for layer in layers]
        config = self.engine.model.config.get_text_config(decoder=True)
        for layer_idx, layer in enumerate(weights):
            window = configured_window(config, layer_idx)
            if window is not None:
                weights[layer_idx] = layer[..., -(layer.shape[2] + window - 1) :]
        return tuple(weights)

    def _of_last_call(self, row: int) -> Recorded:
        recorded = self._recorded[row]
        assert recorded is not None, "a row's tokens were recorded when its logits came"
        return recorded

    def read_kv(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Returns for each row its K/V per layer, `[num_kv_heads, tokens, Dk or Dv]`, as copies."""
        parents, self._parents = self._parents, None
        self._is_ending = True
        self._post_continuation(parents, [[]] * len(self.requests))
        copies: list[Any] = []
        errors: list[Exception] = []
        while not copies:
            self.engine.run_until(lambda: self._failed() is not None or (self._continued and self._all_computed()))
            self._raise_failure()
            done: list[bool] = []

            def read(done: list[bool] = done) -> None:
                try:
                    if self._failed() is None and self._all_computed():  # nobody took blocks in the meantime
                        copies.extend([self.engine.read_kv(request) for request in self.requests])
                except Exception as error:  # for this caller, not for whoever runs the step
                    errors.append(error)
                finally:
                    done.append(True)

            self.engine.post(read)
            self.engine.run_until(lambda done=done: bool(done) or self._failed() is not None)  # type: ignore[misc]
            self._raise_failure()
            if errors:
                raise errors[0]
        return copies

    def close(self) -> None:
        """Gives the rows' blocks back. Safe to call twice."""
        self.engine.sessions.discard(self)
        self.engine.end(self._states)

    # ------------------------------------------------------------------ the engine's side

    def take_logits(self, request: Request, logits: torch.Tensor) -> None:
        """Takes a row's logits; called by the thread that runs the steps.

        Args:
            request (`Request`):
                The row.
            logits (`torch.Tensor`):
                `[vocab_size]`.
        """
        self._logits[self._places[request.request_id]] = logits
        if self._has_logits() and not self._is_ending:
            self._choosing_since = time.perf_counter()

    def take_recorded(self, request: Request, recorded: Recorded) -> None:
        """Takes what was recorded of a row; called by the thread that runs the steps.

        Args:
            request (`Request`):
                The row.
            recorded (`Recorded`):
                What it wanted, for some of its tokens.
        """
        place = self._places[request.request_id]
        mine = self._recorded[place]
        if mine is None:
            self._recorded[place] = recorded.since(self._fed_from[place])
        else:
            mine.append(recorded)

    def _post_continuation(self, parents: list[int] | None, tokens: Sequence[Sequence[int]]) -> None:
        self._choosing_since, self._continued = None, False
        self.engine.post(lambda: self._continue(parents, tokens))

    def _continue(self, parents: list[int] | None, tokens: Sequence[Sequence[int]]) -> None:
        """Runs between two steps."""
        scheduler = self.engine.live.scheduler
        # Only here: until now a step may have computed a row anew that had lost its blocks, as it was before.
        self._logits = [None] * len(tokens)
        self._recorded = [None] * len(tokens)
        self._choosing_since, self.was_awaited, self._continued = None, False, True
        if any(request.is_finished for request in self.requests):
            return  # the session has failed or was aborted; its caller will hear of it
        if parents is not None:
            scheduler.reorder(self.requests, [self.requests[parent] for parent in parents])
        self._fed_from = [request.num_tokens for request in self.requests]
        for request, new in zip(self.requests, tokens, strict=True):
            scheduler.extend(request, new)

    # ------------------------------------------------------------------ inside

    def _groups(self, rows: Sequence[Sequence[int]], embeds: Sequence[torch.Tensor] | None) -> list[list[int]]:
        """Returns the rows that share a prompt."""
        if embeds is not None or self.records:
            return [[row] for row in range(len(rows))]  # every row is recorded, and so computed, by itself
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, tokens in enumerate(rows):
            groups.setdefault(tuple(tokens), []).append(row)
        return list(groups.values())

    def _enqueue(self, rows: list[int], tokens: list[int], embeds: torch.Tensor | None) -> None:
        engine, extras = self.engine, self._extras
        if embeds is not None:
            check_embeds(embeds, len(tokens), engine.model)
            extras = dataclasses.replace(extras, prompt_embeds=embeds.detach())
        params = SamplingParams(n=len(rows), max_tokens=self.max_new_tokens, temperature=1.0, seed=0, ignore_eos=True)
        group = make_group(
            check_prompt(tokens, engine.limits),
            engine.resolve(params),
            engine.limits,
            request_id=None,
            priority=0,
            extra_keys=(),
            extras=extras,
        )
        for row, request in zip(rows, group.requests, strict=True):
            request.session = self
            self._places[request.request_id] = row
        self.requests = [*self.requests, *group.requests]
        state = RequestState(group, None, None, None)
        try:
            self._states.append(state)
            engine.enqueue(state)
        except BaseException:
            self._states = [known for known in self._states if known is not state]  # nobody will ever end it
            raise

    def _wait(self) -> torch.Tensor:
        self.engine.run_until(lambda: self._failed() is not None or self._has_logits())
        self._raise_failure()
        logits = torch.stack(self._logits)  # type: ignore[arg-type]
        self._choosing_since = time.perf_counter()
        return logits

    def _has_logits(self) -> bool:
        return self._continued and all(row is not None for row in self._logits)

    def _failed(self) -> Request | None:
        return next((request for request in self.requests if request.is_finished), None)

    def _raise_failure(self) -> None:
        request = self._failed()
        if request is not None:
            raise request.error or RequestAbortedError("The rows of this call were aborted.")

    def _all_computed(self) -> bool:
        return all(request.num_pending_tokens == 0 for request in self.requests)
