"""Token sequences that must not be generated."""

from __future__ import annotations

import torch

from .processors import Batch, ends_with


class BadWords:
    """Removes tokens that would complete one of a request's `bad_words_ids`.

    As in Transformers' `NoBadWordsLogitsProcessor`, the beginning of a sequence may lie in the prompt, and a sequence
    that is just one of the tokens that end the request is ignored.

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self._batch = batch
        self._words: dict[int, list[tuple[int, ...]]] = {}
        for row, request in enumerate(batch.requests):
            words = [
                word
                for word in request.extras.bad_words_ids
                if not (len(word) == 1 and word[0] in request.stop_token_ids)
            ]
            if words:
                self._words[row] = words

    def is_active(self) -> bool:
        """Returns whether a request of the batch has bad words."""
        return bool(self._words)

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        requests = self._batch.requests
        banned = {
            row: [word[-1] for word in words if ends_with(requests[row].token_ids, word[:-1])]
            for row, words in self._words.items()
        }
        scores.view(-1)[self._batch.positions(banned)] = -torch.inf
