"""Real English text that ships with the package: requests as people write them to an assistant."""

from __future__ import annotations

import functools
from importlib import resources

SEPARATOR = "\n---\n"


@functools.cache
def user_prompts() -> tuple[str, ...]:
    """Returns fifty questions and tasks, from a line to a page (14 to 250 tokens with SmolLM2's tokenizer)."""
    text = resources.files(__package__).joinpath("data", "prompts.txt").read_text(encoding="utf-8")
    return tuple(prompt.strip() for prompt in text.split(SEPARATOR))
