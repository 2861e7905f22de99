"""How much K/V memory stock Transformers takes, and how much of it holds something: plain arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class StaticBatchUsage:
    """K/V slots of a padded batch.

    Args:
        peak_slots (`int`):
            Slots in its last step, the step with the most.
        tokens_at_peak (`int`):
            Most tokens of unfinished requests in a step.
        waste (`float`):
            1 - tokens of unfinished requests / slots, averaged over steps.
    """

    peak_slots: int
    tokens_at_peak: int
    waste: float


def static_batch_usage(prompt_lengths: Sequence[int], output_lengths: Sequence[int]) -> StaticBatchUsage:
    """Counts a padded batch: every row is as long as the longest, and stays until the longest output ends.

    Args:
        prompt_lengths (`Sequence[int]`):
            Tokens of each prompt.
        output_lengths (`Sequence[int]`):
            Tokens that each request wants.
    """
    steps, longest, rows = max(output_lengths), max(prompt_lengths), len(prompt_lengths)
    requests = list(zip(prompt_lengths, output_lengths, strict=True))
    used = [sum(prompt + step for prompt, output in requests if output > step) for step in range(steps)]
    waste = sum(1 - tokens / (rows * (longest + step)) for step, tokens in enumerate(used)) / steps
    return StaticBatchUsage(rows * (longest + steps - 1), max(used), waste)


class ContinuousUsage:
    """Follows tokens and blocks of requests that come and go.

    `num_tokens` counts what was generated, `peak_tokens` and `peak_slots` are the most that unfinished requests had
    stored and held at one time.

    Args:
        prompt_lengths (`Sequence[int]`):
            Tokens of each prompt.
        block_size (`int`):
            Slots of a block.
    """

    def __init__(self, prompt_lengths: Sequence[int], block_size: int):
        self.prompt_lengths = prompt_lengths
        self.block_size = block_size
        self.generated = [0] * len(prompt_lengths)
        self.num_tokens = 0
        self.peak_tokens = 0
        self.peak_slots = 0
        self._tokens = 0
        self._slots = 0
        self._waste_sum = 0.0
        self._observed = 0

    @property
    def waste(self) -> float:
        """Returns 1 - tokens / slots of held blocks, averaged over observations."""
        return self._waste_sum / self._observed if self._observed else 0.0

    def observe(self, index: int, new_tokens: int, finished: bool) -> None:
        """Counts what a request got; its blocks are free again when it finishes.

        Args:
            index (`int`):
                Which request.
            new_tokens (`int`):
                Tokens it got since the last call.
            finished (`bool`):
                Whether it has ended.
        """
        before = self._stored(index)
        self.generated[index] += new_tokens
        self.num_tokens += new_tokens
        after = self._stored(index)
        self._tokens += after - before
        self._slots += self._slots_for(after) - self._slots_for(before)
        self.peak_tokens = max(self.peak_tokens, self._tokens)
        self.peak_slots = max(self.peak_slots, self._slots)
        if self._slots:
            self._waste_sum += 1 - self._tokens / self._slots
            self._observed += 1
        if finished:
            self._tokens -= after
            self._slots -= self._slots_for(after)

    def _stored(self, index: int) -> int:
        """Tokens whose K/V are stored: not those of a request that has not begun, nor of the token just sampled."""
        generated = self.generated[index]
        return self.prompt_lengths[index] + generated - 1 if generated else 0

    def _slots_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size) * self.block_size
