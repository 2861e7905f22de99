"""Ending an answer at a string, exactly, while its text is streamed."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Looks for stop strings in a text that arrives in pieces, and says what may be shown already.

        stop "O P Q"   text "M N O P"   released "M N ", held back "O P"

    Held back is the longest end of the text that could begin a stop string, and no more.
    The match that ends first counts; of several that end at the same place, the longest.

    Args:
        stop (`Sequence[str]`):
            The stop strings, none of them empty. May be empty itself: then all text is released at once.
        include (`bool`, defaults to `False`):
            Whether the stop string itself is released.
    """

    def __init__(self, stop: Sequence[str], include: bool = False):
        assert all(stop), f"empty stop strings match everywhere; the parameters refuse them, got {stop!r}"
        self.matched: str | None = None
        self._stop = tuple(stop)
        self._include = include
        self._first = frozenset(text[0] for text in stop)
        self._longest = max((len(text) for text in stop), default=0)
        self._held = ""

    def append(self, text: str, can_stop: bool = True) -> str:
        """Takes a piece of text and returns what may be shown now; sets `matched` if a stop string ends in it.

        Args:
            text (`str`):
                The new text of one token.
            can_stop (`bool`, defaults to `True`):
                Whether a stop string that ends in this piece ends the answer: False for the first `min_tokens` tokens.
                One that begins there and ends later counts, as in vLLM.

        Returns:
            `str`: Text to show; after a match, the rest of the text up to the stop string (or its end).
        """
        assert self.matched is None, f"the text ended with the stop string {self.matched!r} already"
        if not self._stop or not text:
            return text
        num_old = len(self._held)
        text = self._held + text
        match = self._first_match(text, num_old) if can_stop else None
        if match is not None:
            start, end = match
            self.matched, self._held = text[start:end], ""
            return text[: end if self._include else start]
        held = self._num_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Returns the text that was held back, when the answer ends for another reason."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str, num_old: int) -> tuple[int, int] | None:
        """Returns where the first stop string that ends after the old text begins and ends."""
        best: tuple[int, int] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, num_old + 1 - len(stop)))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best[1], best[0]):
                best = (start, end)
        return best

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest end of the text that could begin a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length] in self._first and self._begins_a_stop(text[-length:]):
                return length
        return 0

    def _begins_a_stop(self, end: str) -> bool:
        return any(len(stop) > len(end) and stop.startswith(end) for stop in self._stop)
