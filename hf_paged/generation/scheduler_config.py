"""The limits of a step, and which requests could never run within them. No torch."""

from __future__ import annotations

import dataclasses

from ..cache.block_manager import BlockManager
from ..errors import ConfigurationError, InvalidRequestError, PromptTooLongError
from .request import RequestGroup


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    Args:
        max_num_seqs (`int`):
            Requests that run at the same time.
        max_num_batched_tokens (`int`):
            Tokens computed in one step (the token budget).
        max_model_len (`int`):
            Tokens of a request, prompt and output together.
        enable_chunked_prefill (`bool`, defaults to `True`):
            Compute prompts in several steps. If not, a prompt waits for a step that has room for all of it; only
            two kinds are computed in chunks nevertheless: prompts whose logits are wanted, and preempted requests
            that have outgrown the token budget.
        max_partial_prefills (`int`, defaults to 4):
            Requests that are computed in several steps at the same time.
        prompt_logits_chunk (`int`, defaults to 256):
            Tokens per step of a request that wants logits at all prompt positions.

    Raises:
        ConfigurationError: If a limit is below 1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    max_partial_prefills: int = 4
    prompt_logits_chunk: int = 256

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, bool) and value < 1:
                raise ConfigurationError(f"`{name}` must be at least 1, got {value!r}.")

    def check(self, group: RequestGroup, block_manager: BlockManager) -> None:
        """Refuses what could never run to its end, since it would wait for ever and hold up those behind it.

        Args:
            group (`RequestGroup`):
                The branches of a prompt.
            block_manager (`BlockManager`):
                The pool that they must fit into, one at a time.

        Raises:
            PromptTooLongError: If the prompt, or prompt and answer, exceed a limit.
            InvalidRequestError: If there are more branches than requests may run.
        """
        if len(group.requests) > self.max_num_seqs:
            raise InvalidRequestError(
                f"`n` is {len(group.requests)}, but at most `max_num_seqs` = {self.max_num_seqs} requests run "
                "at the same time; ask for fewer answers."
            )
        request = group.requests[0]
        length, max_tokens = request.num_prompt_tokens, request.max_tokens
        chunked = self.enable_chunked_prefill or request.wants_prompt_logits
        limit = self.max_model_len if chunked else min(self.max_model_len, self.max_num_batched_tokens)
        if length > limit:
            raise PromptTooLongError(
                f"The prompt has {length} tokens; `max_model_len` = {self.max_model_len}"
                f"{'' if chunked else f', and, unchunked, `max_num_batched_tokens` = {self.max_num_batched_tokens}'}"
                f" allow {limit}. Shorten it or raise the limit."
            )
        num_stored = max(length, min(length + max_tokens, self.max_model_len) - 1)  # the last token is not stored
        if num_stored > block_manager.usable_tokens:
            raise PromptTooLongError(
                f"A prompt of {length} tokens with `max_tokens` = {max_tokens} needs "
                f"{block_manager.blocks_needed(num_stored)} K/V blocks, the pool has {block_manager.num_blocks} of "
                f"{block_manager.block_size} tokens. Shorten the prompt, lower `max_tokens` or raise `num_blocks`."
            )
