"""Which tokens a request has, and how often it generated each: kept up to date with the new tokens only."""

from __future__ import annotations

import numpy as np

from ..request import Request
from .memory import TokenReader


class TokenCounts(TokenReader):
    """The different tokens of one request.

    Args:
        request (`Request`):
            The request.
        with_prompt (`bool`):
            Whether tokens that only the prompt holds are listed.
    """

    def __init__(self, request: Request, with_prompt: bool):
        self.with_prompt = with_prompt
        super().__init__(request)

    def clear(self) -> None:
        """Forgets all tokens."""
        self._places: dict[int, int] = {}
        self._token_ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    @property
    def token_ids(self) -> np.ndarray:
        """Returns the different tokens, `[n]` int64; a view, valid until the next update."""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """Returns how often each was generated (0: prompt only), `[n]` float32; a view, valid until the next update."""
        return self._counts[: len(self._places)]

    def read(self, index: int) -> None:
        """Counts a token.

        Args:
            index (`int`):
                Its place among the request's tokens.
        """
        is_answer = index >= self.request.num_prompt_tokens
        if not is_answer and not self.with_prompt:
            return
        token_id = self.request.token_ids[index]
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._token_ids[place] = token_id
        self._counts[place] += is_answer
