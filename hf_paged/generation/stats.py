"""Counters and timers of an engine."""

from __future__ import annotations

import bisect
import dataclasses

STEP_SIZE_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclasses.dataclass
class EngineStats:
    """What an engine has done since it was made, or since `reset_stats`.

    Args:
        num_steps (`int`):
            Steps run.
        num_failed_steps (`int`):
            Steps that raised.
        num_shrunk_steps (`int`):
            Steps that ran out of memory and were run again, smaller.
        num_prompt_tokens (`int`):
            Prompt tokens of admitted requests, cached or computed.
        num_cached_tokens (`int`):
            Of these, found in the prefix cache.
        num_computed_tokens (`int`):
            Tokens that went through the model, recomputed ones included.
        num_generated_tokens (`int`):
            Tokens sampled.
        num_preemptions (`int`):
            Times that a request lost its blocks.
        num_finished (`int`):
            Requests that ended.
        waste_sum (`float`):
            Sum over steps of 1 - tokens stored / slots in blocks held by live requests.
        step_sizes (`list[int]`):
            How many steps computed at most as many tokens as each of `STEP_SIZE_BOUNDS` says, and more than the one
            before; at the end those with more than all of them.
        peak_blocks_held (`int`):
            Most blocks held by live requests in a step.
        peak_tokens_stored (`int`):
            Tokens stored in that step.
        peak_running (`int`):
            Most requests with a share in one step.
        seconds_schedule (`float`):
            Time spent deciding.
        seconds_inputs (`float`):
            Time spent building the model's inputs.
        seconds_model (`float`):
            Time spent in the model.
        seconds_sample (`float`):
            Time spent choosing tokens.
        seconds_collect (`float`):
            Time spent on bookkeeping and texts after the model.
        bytes_per_block (`int`):
            Bytes of a block over all layers.
        pool_bytes (`int`):
            Bytes of the pool.
    """

    num_steps: int = 0
    num_failed_steps: int = 0
    num_shrunk_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    waste_sum: float = 0.0
    step_sizes: list[int] = dataclasses.field(default_factory=lambda: [0] * (len(STEP_SIZE_BOUNDS) + 1))
    peak_blocks_held: int = 0
    peak_tokens_stored: int = 0
    peak_running: int = 0
    seconds_schedule: float = 0.0
    seconds_inputs: float = 0.0
    seconds_model: float = 0.0
    seconds_sample: float = 0.0
    seconds_collect: float = 0.0
    bytes_per_block: int = 0
    pool_bytes: int = 0

    @property
    def kv_waste(self) -> float:
        """Returns the share of slots in held blocks that held no token, averaged over steps."""
        return self.waste_sum / self.num_steps if self.num_steps else 0.0

    @property
    def peak_kv_bytes_held(self) -> int:
        """Returns the bytes of the most blocks that live requests held in a step."""
        return self.peak_blocks_held * self.bytes_per_block

    def observe_step(self, num_tokens: int) -> None:
        """Counts a step that has run.

        Args:
            num_tokens (`int`):
                Tokens that went through the model.
        """
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        self.step_sizes[bisect.bisect_left(STEP_SIZE_BOUNDS, num_tokens)] += 1

    def observe_blocks(self, blocks_held: int, tokens_stored: int, block_size: int) -> None:
        """Counts a step's use of the pool.

        Args:
            blocks_held (`int`):
                Blocks held by live requests; a shared one counts once.
            tokens_stored (`int`):
                Tokens in them.
            block_size (`int`):
                Tokens per block.
        """
        if blocks_held:
            self.waste_sum += 1 - tokens_stored / (blocks_held * block_size)
        if blocks_held > self.peak_blocks_held:
            self.peak_blocks_held = blocks_held
            self.peak_tokens_stored = tokens_stored
