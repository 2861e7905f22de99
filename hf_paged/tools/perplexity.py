"""How well a model foresees a text: the measure by which quantized weights and K/V are judged.

Windows of tokens are prompts of the paged engine, so that what is measured is what is served: its operators, its K/V
cache. perplexity = exp(mean over tokens of -log p(token | those before it in its window)); the first token of a window
is given.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..generation.sampling.params import SamplingParams
from .english import evaluation_name, evaluation_texts, token_windows

WINDOW = 512
TOKENS = 20_480
_AT_A_TIME = 8  # windows


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """What was found.

    Args:
        value (`float`):
            The perplexity.
        tokens (`int`):
            That were foreseen.
        text (`str`):
            What was read.
    """

    value: float
    tokens: int
    text: str


def measure_perplexity(
    model: Any, windows: Sequence[Sequence[int]], text: str, progress: Callable[[int, int], object] | None = None
) -> Perplexity:
    """Measures a paged model.

    Args:
        model (`PagedGenerationMixin`):
            The model.
        windows (`Sequence[Sequence[int]]`):
            Tokens, at least two in each.
        text (`str`):
            What they are called.
        progress (`Callable[[int, int], object]`, *optional*):
            Told how many windows of how many are done.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    total, count = 0.0, 0
    for start in range(0, len(windows), _AT_A_TIME):
        part = [list(window) for window in windows[start : start + _AT_A_TIME]]
        for output in model.engine.generate(part, [params] * len(part)):
            for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
                total -= entry[token].logprob
                count += 1
        if progress is not None:
            progress(min(start + _AT_A_TIME, len(windows)), len(windows))
    return Perplexity(math.exp(total / count), count, text)


def english_windows(tokenizer: Any, tokens: int = TOKENS, length: int = WINDOW) -> tuple[list[list[int]], str]:
    """Returns windows of the English text that quality is measured on, and its name.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's.
        tokens (`int`, defaults to 20480):
            At least so many in all, where there are so many.
        length (`int`, defaults to 512):
            Tokens of a window.
    """
    return token_windows(tokenizer, evaluation_texts(), length, -(-tokens // (length - 1))), evaluation_name()
