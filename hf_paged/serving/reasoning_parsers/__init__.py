"""Parsers of what models think before they answer, by the names that `--reasoning-parser` takes."""

from __future__ import annotations

import re
from itertools import groupby
from operator import itemgetter
from typing import Literal

from ...registry import Registry
from ..incremental_reader import SPACES, IncrementalParser, Markers, Reading

ReasoningPiece = tuple[Literal["reasoning", "content"], str]
_NEWLINES = re.compile(r"\n*")
_ANYTHING = re.compile(r"(?s:.)*")


class ReasoningParser(IncrementalParser):
    """Separates reasoning, between two tags at an answer's beginning, from content.

    Line breaks next to the tags belong to the format and are left out. Without a closing tag all is reasoning. Tags
    later in the content are content.

    Whether an answer begins inside the reasoning is seen in the prompt, where templates may end with the opening tag
    (or with an empty pair, to answer without thinking); if they end with neither, an opening tag in the answer says
    so, and without that the model's habit, `begins_inside`.

    Args:
        prompt (`str`, *optional*, defaults to `""`):
            The prompt's text, or its last few hundred characters.
        continued (`str`, *optional*, defaults to `""`):
            The beginning of the answer, if the prompt holds it already (`continue_final_message`).
    """

    open: str = "<think>"
    close: str = "</think>"
    begins_inside: bool = False

    def __init__(self, prompt: str = "", continued: str = ""):
        super().__init__()
        self.begins = self._begins(prompt, continued)
        self._markers = Markers([self.close])
        self._pieces: list[ReasoningPiece] = []
        self._newlines = 0  # held back, since the closing tag may follow
        self._blank = True  # no reasoning so far

    @classmethod
    def markers(cls) -> frozenset[str]:
        """Returns the texts that mark reasoning."""
        return frozenset((cls.open, cls.close))

    def feed(self, text: str) -> list[ReasoningPiece]:
        """Takes the answer's next text.

        Args:
            text (`str`):
                Any piece of it.

        Returns:
            `list[tuple[str, str]]`: What is certain by now: `"reasoning"` or `"content"`, and text.
        """
        self._push(text)
        return self._taken()

    def finish(self) -> list[ReasoningPiece]:
        """Returns the rest, once no more text will come."""
        self._close()
        return self._taken()

    def _begins(self, prompt: str, continued: str) -> Literal["inside", "outside", "undecided"]:
        prompt = prompt.rstrip()
        if prompt.endswith(self.close) or self.close in continued:
            return "outside"
        return "inside" if self.begins_inside or prompt.endswith(self.open) or self.open in continued else "undecided"

    def _parse(self) -> Reading[None]:
        reader = self._reader
        reader.record()
        yield from reader.run(SPACES)
        opened = yield from reader.accept(self.open)
        before = reader.recorded()
        if opened or self.begins == "inside":
            self._reason("" if opened else before)
            closed = yield from reader.until(self._markers, self._reason)
            if not closed:
                self._put("reasoning", "\n" * self._newlines)
            yield from reader.run(_NEWLINES)
        else:
            self._put("content", before)
        yield from reader.run(_ANYTHING, self._content)

    def _reason(self, text: str) -> None:
        if self._blank:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")
        if kept:
            self._put("reasoning", "\n" * self._newlines + kept)
            self._newlines = 0
            self._blank = False
        self._newlines += len(text) - len(kept)

    def _content(self, text: str) -> None:
        self._put("content", text)

    def _put(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if text:
            self._pieces.append((kind, text))

    def _taken(self) -> list[ReasoningPiece]:
        taken, self._pieces = self._pieces, []
        groups = groupby(taken, key=itemgetter(0))
        return [(kind, "".join([text for _, text in group])) for kind, group in groups]


class ThinkReasoningParser(ReasoningParser):
    """`<think>...</think>` where the answer or the prompt opens it: Qwen 3, GLM 4.5, DeepSeek V3.1, SmolLM3."""


class DeepSeekR1ReasoningParser(ReasoningParser):
    """`...</think>`, with or without an opening tag, since every answer begins with thinking: DeepSeek R1, QwQ."""

    begins_inside = True


class MistralReasoningParser(ReasoningParser):
    """`[THINK]...[/THINK]`: Magistral."""

    open = "[THINK]"
    close = "[/THINK]"


class SeedReasoningParser(ReasoningParser):
    """`<seed:think>...</seed:think>`: Seed-OSS."""

    open = "<seed:think>"
    close = "</seed:think>"


reasoning_parsers: Registry[type[ReasoningParser]] = Registry("reasoning parser")
for _names, _parser in {
    ("think", "qwen3", "glm45", "deepseek_v3", "smollm3"): ThinkReasoningParser,
    ("deepseek_r1",): DeepSeekR1ReasoningParser,
    ("mistral",): MistralReasoningParser,
    ("seed_oss",): SeedReasoningParser,
}.items():
    for _name in _names:
        reasoning_parsers.register(_name)(_parser)

_SIGNS = (("[THINK]", "mistral"), ("<seed:think>", "seed_oss"), ("<think>", "think"), ("</think>", "deepseek_r1"))


def get_reasoning_parser(name: str) -> type[ReasoningParser]:
    """Returns the class of parsers of that name; each answer needs a parser of its own.

    Args:
        name (`str`):
            As `--reasoning-parser` takes it.

    Raises:
        UnknownNameError: If there is none; lists those that there are.
    """
    return reasoning_parsers.get(name)


def detect_reasoning_parser(chat_template: str | None) -> str | None:
    """Returns the name of the parser for the tags in a chat template; `None` if there are none.

    Args:
        chat_template (`str`, *optional*):
            The template's text.
    """
    return next((name for sign, name in _SIGNS if sign in (chat_template or "")), None)
