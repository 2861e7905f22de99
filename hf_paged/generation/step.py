"""The contract of a step: what the scheduler decided, in ints and strings only, so that it can travel to any rank."""

from __future__ import annotations

import dataclasses

from .request import HiddenStatesWanted


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step.

    Args:
        request_id (`str`):
            Whose.
        num_computed_tokens (`int`):
            Tokens whose K/V are in blocks before this step (prefix hits included).
        num_scheduled_tokens (`int`):
            Tokens computed in this step, from `num_computed_tokens` on.
        new_token_ids (`tuple[int, ...]`):
            Tokens that the runner has not been told yet: all of them when `is_new`, else those appended since the
            request was last scheduled. The last token of a share may be missing: the runner chose it for the request
            in the step before, and nobody else knows it yet.
        new_block_ids (`tuple[tuple[int, ...], ...]`):
            For each layer group the blocks that the runner has not been told yet (the whole table when `is_new`).
        is_new (`bool`):
            Whether the runner must forget what it knew of this request (admitted, resumed or forked).
        sample_ids (`tuple[str, ...]`):
            Requests that get a token from the logits of the last scheduled position: none while the prompt is
            incomplete, the request itself, and the branches that were forked from it in this step.
        prompt_logits (`bool`):
            Whether logits are needed at all scheduled positions.
        hidden_states (`HiddenStatesWanted`, *optional*):
            Which hidden states are wanted.
        attentions (`bool`):
            Whether attention weights are wanted.
        embeds (`bool`):
            Whether the prompt is given as embeddings.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_token_ids: tuple[int, ...] = ()
    new_block_ids: tuple[tuple[int, ...], ...] = ()
    is_new: bool = False
    sample_ids: tuple[str, ...] = ()
    prompt_logits: bool = False
    hidden_states: HiddenStatesWanted | None = None
    attentions: bool = False
    embeds: bool = False

    @property
    def is_special(self) -> bool:
        """Returns whether the runner must know which tokens of the call are this request's."""
        return self.hidden_states is not None or self.attentions or self.embeds


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step does. Frozen; the same object (or its bytes) reaches every rank.

    Args:
        step_id (`int`):
            Number of the step, counting from 0.
        scheduled (`tuple[ScheduledRequest, ...]`):
            Shares of the step in schedule order. May be empty.
        cleared_blocks (`tuple[tuple[int, ...], ...]`):
            For each layer group, blocks handed out for this step that it will not fill completely. The runner zeroes
            them before the model runs, so that a slot past a request's last token never holds anything but finite
            numbers of its own.
        block_copies (`tuple[tuple[tuple[int, int], ...], ...]`):
            For each layer group, (source, destination) pairs to copy after clearing and before the model runs
            (copy-on-write).
        removed_ids (`tuple[str, ...]`):
            Requests that the runner may forget: finished, aborted or preempted since the last step.
    """

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    cleared_blocks: tuple[tuple[int, ...], ...] = ()
    block_copies: tuple[tuple[tuple[int, int], ...], ...] = ()
    removed_ids: tuple[str, ...] = ()

    @property
    def num_scheduled_tokens(self) -> int:
        """Returns the tokens computed in this step, over all requests."""
        return sum(share.num_scheduled_tokens for share in self.scheduled)

    @property
    def sample_rows(self) -> list[int]:
        """Returns for each sampled request, in schedule and branch order, its row of the logits."""
        sampling = [share for share in self.scheduled if share.sample_ids]
        return [row for row, share in enumerate(sampling) for _ in share.sample_ids]
