"""English text that is on every machine: the prose of Python's own reference, in two halves that share no paragraph.

One half calibrates quantization, the other one tells how good it is. The reference is what `help("topics")` shows, from
the standard library's module `pydoc_data.topics`; paragraphs of code, of grammar or of few words are left out.
"""

from __future__ import annotations

import functools
import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigurationError, MissingDependencyError
from .prompts import user_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORDS = 12
_LETTERS = 0.8  # of a paragraph's characters, spaces included
_SPECIALS_APART = "\n\n"


def evaluation_name() -> str:
    """Returns what the text is called that quality is measured on."""
    return f"prose of Python {_version()}'s language reference (every other topic of pydoc_data.topics)"


def calibration_name() -> str:
    """Returns what the text is called that is calibrated on unless a file is named."""
    return f"fifty packaged prompts and prose of Python {_version()}'s language reference (the other topics)"


def evaluation_texts() -> list[str]:
    """Returns paragraphs to measure quality on, about 20,000 words.

    Raises:
        MissingDependencyError: If Python was installed without its reference.
    """
    return list(_halves()[0])


def calibration_texts() -> list[str]:
    """Returns texts to calibrate on: none of them is among `evaluation_texts`.

    Raises:
        MissingDependencyError: If Python was installed without its reference.
    """
    return [*user_prompts(), *_halves()[1]]


def read_texts(path: Path) -> list[str]:
    """Returns the texts of a file.

    Args:
        path (`Path`):
            Plain text, or JSON lines (`.jsonl`) with a `text` each.

    Raises:
        ConfigurationError: If it cannot be read, is no such file, or holds no text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        texts = _texts_of_lines(text) if path.suffix.lower() in (".jsonl", ".ndjson") else re.split(r"\n\s*\n", text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ConfigurationError(
            f"`--calibration` '{path}' cannot be read ({reason}); it must be plain text, or JSON lines (.jsonl) with a "
            "`text` each."
        ) from None
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigurationError(f"`--calibration` '{path}' holds no text.")
    return texts


def token_windows(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, count: int | None = None
) -> list[list[int]]:
    """Returns texts, one after the other, cut into windows of tokens.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The model's.
        texts (`Sequence[str]`):
            The texts.
        length (`int`):
            Tokens of a window, that with which the tokenizer begins a text included. Fewer texts are one short window.
        count (`int`, *optional*):
            How many at most, evenly spread.

    Raises:
        ConfigurationError: If there is not one token.
    """
    begin = tokenizer("").input_ids
    begin = begin if begin and begin == [tokenizer.bos_token_id] else []
    rows = tokenizer([text + _SPECIALS_APART for text in texts], add_special_tokens=False).input_ids
    tokens = [token for row in rows for token in row]
    if not tokens:
        raise ConfigurationError("The text for calibration holds no token.")
    size = min(length - len(begin), len(tokens))
    available = len(tokens) // size
    wanted = min(available, count or available)
    starts = [number * available // wanted * size for number in range(wanted)]
    return [begin + tokens[start : start + size] for start in starts]


def _texts_of_lines(text: str) -> list[str]:
    texts = [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
    if not all(isinstance(each, str) for each in texts):
        raise TypeError("a `text` is no string")
    return texts


def _version() -> str:
    return ".".join(platform.python_version_tuple()[:2])


@functools.cache
def _halves() -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise MissingDependencyError(
            "This Python was installed without `pydoc_data`, the English text that is used by default; name a file "
            "with `--calibration`, or install the whole standard library."
        ) from None
    halves: tuple[list[str], list[str]] = ([], [])
    seen: set[str] = set()  # topics repeat what others say
    for number, name in enumerate(sorted(topics)):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(paragraph.split())
            if text not in seen and _is_prose(text):
                seen.add(text)
                halves[number % 2].append(text)
    return tuple(halves[0]), tuple(halves[1])


def _is_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in text)
    return len(text.split()) >= _WORDS and letters >= _LETTERS * len(text)
