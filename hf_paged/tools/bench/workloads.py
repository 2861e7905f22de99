"""The four workloads that are measured, cut from real English text to exact lengths.

| name | requests | prompt tokens | output tokens |
|------|----------|---------------|---------------|
| W1   | 64       | 16-256        | 16-256        |
| W2   | 64       | 512 shared + 16-64 of their own | 32 |
| W3   | 1        | 128           | 128           |
| W4   | 4        | 4,000         | 64            |

Outputs are forced to their length: greedy, the end-of-sequence token is ignored.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import UnknownNameError
from ..prompts import user_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# With this seed W1 has 8,974 prompt and 8,807 output tokens.
DEFAULT_SEED = 181


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests that are started together.

    Args:
        name (`str`):
            Its short name, such as `"W1"`.
        prompts (`list[list[int]]`):
            Token ids of each prompt.
        output_lengths (`list[int]`):
            Tokens to generate for each prompt, exactly.
    """

    name: str
    prompts: list[list[int]]
    output_lengths: list[int]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the tokens of all prompts together."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Returns the tokens of all outputs together."""
        return sum(self.output_lengths)

    def describe(self) -> str:
        """Returns one line for people."""
        return (
            f"{self.name}: {len(self)} request{'s' if len(self) != 1 else ''}, "
            f"{self.num_prompt_tokens:,} prompt and {self.num_output_tokens:,} output tokens"
        )

    def sample(self, count: int) -> Workload:
        """Returns fewer requests that stand for all: every k-th in the order of their total length.

        Args:
            count (`int`):
                How many.
        """
        if count >= len(self):
            return self
        order = sorted(range(len(self)), key=lambda i: len(self.prompts[i]) + self.output_lengths[i])
        chosen = sorted(order[(2 * k + 1) * len(self) // (2 * count)] for k in range(count))
        return Workload(self.name, [self.prompts[i] for i in chosen], [self.output_lengths[i] for i in chosen])

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return dataclasses.asdict(self)


class TextTokens:
    """The tokens of the packaged texts as one endless ring, from which pieces of any length are cut.

    Pieces start at different tokens, so that no two of them begin alike and share blocks of a prefix cache.

    Args:
        tokens (`Sequence[int]`):
            The ring.
        seed (`int`, defaults to 0):
            Order in which the starting points are used.
    """

    def __init__(self, tokens: Sequence[int], seed: int = 0):
        self._tokens = list(tokens)
        self._starts = list(range(len(self._tokens)))
        random.Random(seed).shuffle(self._starts)
        self._next = 0

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> TextTokens:
        """Returns the packaged texts as tokens of a model.

        Args:
            tokenizer (`PreTrainedTokenizerBase`):
                The model's tokenizer.
            seed (`int`, defaults to 0):
                Order in which the starting points are used.
        """
        return cls(tokenizer("\n\n".join(user_prompts()), add_special_tokens=False).input_ids, seed)

    def cut(self, length: int) -> list[int]:
        """Returns the next piece.

        Args:
            length (`int`):
                Its number of tokens.
        """
        start = self._starts[self._next % len(self._starts)]
        self._next += 1
        ring = self._tokens
        return [ring[(start + offset) % len(ring)] for offset in range(length)]


def mixed_lengths(text: TextTokens, count: int = 64, seed: int = DEFAULT_SEED) -> Workload:
    """W1: requests of very different lengths, as many users send them at the same time.

    Args:
        text (`TextTokens`):
            Where prompts are cut from.
        count (`int`, defaults to 64):
            Number of requests.
        seed (`int`, defaults to 181):
            Fixes the lengths.
    """
    numbers = random.Random(seed)
    prompt_lengths = [numbers.randint(16, 256) for _ in range(count)]
    output_lengths = [numbers.randint(16, 256) for _ in range(count)]
    return Workload("W1", [text.cut(length) for length in prompt_lengths], output_lengths)


def shared_prefix(text: TextTokens, count: int = 64, seed: int = DEFAULT_SEED) -> Workload:
    """W2: requests that begin with the same 512 tokens, like a long system prompt.

    Args:
        text (`TextTokens`):
            Where prompts are cut from.
        count (`int`, defaults to 64):
            Number of requests.
        seed (`int`, defaults to 181):
            Fixes the lengths.
    """
    numbers = random.Random(seed)
    shared = text.cut(512)
    return Workload("W2", [shared + text.cut(numbers.randint(16, 64)) for _ in range(count)], [32] * count)


def single_stream(text: TextTokens, count: int = 1, seed: int = DEFAULT_SEED) -> Workload:
    """W3: one user alone.

    Args:
        text (`TextTokens`):
            Where prompts are cut from.
        count (`int`, defaults to 1):
            Number of requests.
        seed (`int`, defaults to 181):
            Not used: the lengths are fixed.
    """
    return Workload("W3", [text.cut(128) for _ in range(count)], [128] * count)


def long_prompts(text: TextTokens, count: int = 4, seed: int = DEFAULT_SEED) -> Workload:
    """W4: a few long documents with short answers.

    Args:
        text (`TextTokens`):
            Where prompts are cut from.
        count (`int`, defaults to 4):
            Number of requests.
        seed (`int`, defaults to 181):
            Not used: the lengths are fixed.
    """
    return Workload("W4", [text.cut(4000) for _ in range(count)], [64] * count)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "W1": mixed_lengths,
    "W2": shared_prefix,
    "W3": single_stream,
    "W4": long_prompts,
}


def build_workload(name: str, text: TextTokens, count: int | None = None, seed: int = DEFAULT_SEED) -> Workload:
    """Returns a workload by its name.

    Args:
        name (`str`):
            `"W1"` to `"W4"`.
        text (`TextTokens`):
            Where prompts are cut from; building twice from the same object gives other texts of the same lengths.
        count (`int`, *optional*):
            Number of requests, for a smaller or larger version.
        seed (`int`, defaults to 181):
            Fixes the lengths.

    Raises:
        UnknownNameError: If there is none of that name.
    """
    if name not in WORKLOADS:
        raise UnknownNameError(f"Unknown workload {name!r}; available: {', '.join(WORKLOADS)}.")
    return WORKLOADS[name](text, **({} if count is None else {"count": count}), seed=seed)
