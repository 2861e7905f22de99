"""What the engine keeps of a request beside its tokens: texts, log-probabilities, and who waits for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .detokenizer import IncrementalDetokenizer
from .outputs import CompletionOutput, Logprob, RequestOutput
from .recording import Recorded
from .request import FinishReason, Request, RequestGroup
from .stop_strings import StopStringMatcher


class Answer:
    """One branch of a request as text.

    Args:
        request (`Request`):
            Its tokens.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Makes the text; without one there is none.
        streaming (`bool`):
            Whether the text is wanted while the request runs, or only at its end.
    """

    def __init__(self, request: Request, tokenizer: Any, streaming: bool):
        params = request.params
        self.request = request
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.recorded: Recorded | None = None  # hidden states, if they were asked for
        self.scores: list[torch.Tensor] | None = [] if request.extras.scores else None  # processed, one row per token
        self.kv: list[tuple[Any, Any]] | None = None  # per layer, copied at the end if that was asked for
        self._matcher = StopStringMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                after_prompt=True,
            )
        self._incremental = streaming or self._matcher is not None
        extras = request.extras
        # Whether there is anything to do after a token that does not end the answer.
        self.follows_tokens = bool(
            self._incremental or params.logprobs is not None or extras.scores or extras.stopping_criteria
        )
        self._num_detokenized = 0
        self._complete = False

    def add_logprobs(self, logprobs: dict[int, Logprob]) -> None:
        """Takes in the log-probabilities of the last sampled token.

        Args:
            logprobs (`dict[int, Logprob]`):
                Token id -> log-probability; holds the sampled token.
        """
        assert self.logprobs is not None, "log-probabilities were not asked for"
        self.logprobs.append(logprobs)
        self.cumulative_logprob += logprobs[self.request.token_ids[-1]].logprob

    def advance(self) -> str | None:
        """Brings the text up to the request's tokens.

        Returns:
            `str` or `None`: The stop string that the text has just reached, if any; the engine then ends the request.
        """
        request = self.request
        if self._detokenizer is None or self._complete or not (self._incremental or request.is_finished):
            return None
        self._complete = request.is_finished
        tokens = request.token_ids[request.num_prompt_tokens + self._num_detokenized :]
        self._num_detokenized += len(tokens)
        is_stopped = request.finish_reason is FinishReason.STOP
        stopped_by_token = is_stopped and request.token_ids[-1] in request.stop_token_ids
        if stopped_by_token and not request.params.include_stop_str_in_output:
            tokens = tokens[:-1]  # the stop token's own text is not part of the answer
        delta = self._detokenizer.append(tokens)
        if request.is_finished:
            delta += self._detokenizer.finish()
        if self._matcher is None:
            self.text += delta
            return None
        self.text += self._matcher.append(delta, can_stop=request.num_output_tokens >= request.params.min_tokens)
        if self._matcher.matched is None and request.is_finished:
            self.text += self._matcher.finish()
        self._complete |= self._matcher.matched is not None
        return self._matcher.matched

    def snapshot(self) -> CompletionOutput:
        """Returns the answer so far."""
        request = self.request
        return CompletionOutput(
            index=request.branch,
            text=self.text,
            token_ids=request.output_token_ids,
            cumulative_logprob=self.cumulative_logprob if self.logprobs is not None else None,
            logprobs=list(self.logprobs) if self.logprobs is not None else None,
            finish_reason=request.finish_reason.value if request.finish_reason is not None else None,
            stop_reason=request.stop_reason,
            hidden_states=self.hidden_states if request.is_finished else None,
            scores=self.all_scores if request.is_finished else None,
        )

    @property
    def hidden_states(self) -> torch.Tensor | None:
        """Returns the hidden states so far, `[layers, tokens, hidden_size]`, if they were asked for."""
        states = self.recorded.hidden_states if self.recorded is not None else None
        return states.clone() if states is not None else None  # steps run in inference mode; this is a plain tensor

    @property
    def all_scores(self) -> torch.Tensor | None:
        """Returns the processed scores so far, `[answer tokens, vocab_size]`, if they were asked for."""
        return torch.stack(self.scores) if self.scores else None


class RequestState:
    """A request as its caller sees it.

    Args:
        group (`RequestGroup`):
            The requests, one per answer.
        prompt (`str`, *optional*):
            The prompt's text.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Makes the texts.
        on_update (`Callable[[RequestState], None]`, *optional*):
            Called by the thread that runs the steps after each token, and once at the end. Must return quickly.
        stream (`bool`, defaults to `True`):
            Whether `on_update` needs to hear of more than the end.
    """

    def __init__(
        self,
        group: RequestGroup,
        prompt: str | None,
        tokenizer: Any,
        on_update: Callable[[RequestState], None] | None,
        stream: bool = True,
    ):
        self.group = group
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.on_update = on_update
        self.answers = [Answer(request, tokenizer, stream and on_update is not None) for request in group.requests]
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.finished = False
        self._prompt_recorded: Recorded | None = None  # by the branch that computed the prompt
        group.context = self

    @property
    def request_id(self) -> str:
        """Returns the id that the user sees."""
        return self.group.group_id

    @property
    def error(self) -> BaseException | None:
        """Returns the exception that ended one of the answers, if any did."""
        return next((request.error for request in self.group.requests if request.error is not None), None)

    def add_prompt_logprobs(self, start: int, logprobs: Sequence[dict[int, Logprob]]) -> None:
        """Takes in the log-probabilities of a chunk of the prompt; a chunk computed twice counts once.

        Args:
            start (`int`):
                Position of the first token that the entries are about, at least 1.
            logprobs (`Sequence[dict[int, Logprob]]`):
                One entry per token.
        """
        if self.prompt_logprobs is None:
            self.prompt_logprobs = [None]
        self.prompt_logprobs[start:] = logprobs

    def take_recorded(self, request: Request, recorded: Recorded) -> None:
        """Takes in hidden states of some of a branch's tokens; those of the prompt are the same for all branches.

        Args:
            request (`Request`):
                The branch that computed them.
            recorded (`Recorded`):
                What was computed.
        """
        wanted = request.extras.hidden_states
        branch = self.answers[request.branch]
        if wanted is not None and not wanted.all_tokens:
            branch.recorded = recorded
        elif branch.recorded is not None:
            branch.recorded.append(recorded)
        elif self._prompt_recorded is None or recorded.first_position == 0:
            branch.recorded = self._prompt_recorded = recorded
        else:
            branch.recorded = copy.copy(self._prompt_recorded)
            branch.recorded.cut(request.num_prompt_tokens)
            branch.recorded.append(recorded)

    def output(self) -> RequestOutput:
        """Returns all answers so far, in vLLM's form."""
        first = self.group.requests[0]
        prompt_logprobs = self.prompt_logprobs
        if self.tokenizer is not None:
            self._decode_logprobs()
        if prompt_logprobs is None and first.params.prompt_logprobs is not None and self.finished:
            prompt_logprobs = [None]  # a prompt of one token
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=list(prompt_logprobs) if prompt_logprobs is not None else None,
            outputs=[answer.snapshot() for answer in self.answers],
            finished=self.finished,
            metrics=first.metrics,
            num_cached_tokens=first.metrics.num_cached_tokens,
        )

    def _decode_logprobs(self) -> None:
        entries = [entry for answer in self.answers for entry in answer.logprobs or ()]
        entries += [entry for entry in self.prompt_logprobs or () if entry is not None]
        for entry in entries:
            for token_id, logprob in entry.items():
                if logprob.decoded_token is None:
                    logprob.decoded_token = self.tokenizer.decode([token_id])
