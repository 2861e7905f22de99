"""Which tokens a request has, and how often it generated each: kept up to date with the new tokens only."""

from __future__ import annotations

import numpy as np

from ..request import Request

_TAIL = 16


class TokenCounts:
    """The different tokens of one request.

    Args:
        request (`Request`):
            The request. Its tokens may grow, and its last tokens may be taken back (the last 16 that were seen are
            compared, and all is counted again if they differ).
        with_prompt (`bool`):
            Whether tokens that only the prompt holds are listed.
    """

    def __init__(self, request: Request, with_prompt: bool):
        self.request = request
        self.with_prompt = with_prompt
        self._reset()

    def _reset(self) -> None:
        self._num_seen = 0 if self.with_prompt else self.request.num_prompt_tokens
        self._tail: list[int] = []
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

    def update(self) -> None:
        """Takes in the tokens that the request got since the last time."""
        token_ids = self.request.token_ids
        if token_ids[max(self._num_seen - len(self._tail), 0) : self._num_seen] != self._tail:
            self._reset()
        num_prompt = self.request.num_prompt_tokens
        for index in range(self._num_seen, len(token_ids)):
            self._add(token_ids[index], 1 if index >= num_prompt else 0)
        self._num_seen = len(token_ids)
        self._tail = token_ids[-_TAIL:]

    def _add(self, token_id: int, count: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._token_ids[place] = token_id
        self._counts[place] += count
