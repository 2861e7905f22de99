"""No n-gram twice."""

from __future__ import annotations

import collections

import torch

from ..request import Request
from .memory import TokenReader
from .processors import Batch


class NGrams(TokenReader):
    """The n-grams of one request, by their first n - 1 tokens.

    Args:
        request (`Request`):
            The request.
        size (`int`):
            Tokens of an n-gram, at least 1.
        prompt_only (`bool`):
            Whether those that reach into the answer are left out.
    """

    def __init__(self, request: Request, size: int, prompt_only: bool):
        self.size = size
        self.prompt_only = prompt_only
        super().__init__(request)

    def clear(self) -> None:
        """Forgets all n-grams."""
        self._following: collections.defaultdict[tuple[int, ...], set[int]] = collections.defaultdict(set)

    def read(self, index: int) -> None:
        """Takes in the n-gram that ends with a token.

        Args:
            index (`int`):
                The token's place among the request's tokens.
        """
        start = index + 1 - self.size
        if start >= 0 and not (self.prompt_only and index >= self.request.num_prompt_tokens):
            token_ids = self.request.token_ids
            self._following[tuple(token_ids[start:index])].add(token_ids[index])

    def following(self) -> set[int]:
        """Returns the tokens that would complete a known n-gram now."""
        self.update()
        token_ids = self.request.token_ids
        start = len(token_ids) + 1 - self.size
        return self._following.get(tuple(token_ids[start:]), set()) if start >= 0 else set()


class NoRepeatNGram:
    """Removes tokens that would repeat an n-gram of the request (`no_repeat_ngram_size`) or of its prompt
    (`encoder_no_repeat_ngram_size`), as Transformers' processors of these names do.

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self._batch = batch
        self._ngrams: list[tuple[int, NGrams]] = []
        for row, request, features in batch.features:
            sizes = ((features.no_repeat_ngram_size, False), (features.encoder_no_repeat_ngram_size, True))
            self._ngrams += [(row, _ngrams_of(batch, request, *size)) for size in sizes if size[0]]

    def is_active(self) -> bool:
        """Returns whether a request of the batch has such a size."""
        return bool(self._ngrams)

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        banned: dict[int, list[int]] = {}
        for row, ngrams in self._ngrams:
            banned.setdefault(row, []).extend(ngrams.following())
        scores.view(-1)[self._batch.positions(banned)] = -torch.inf


def _ngrams_of(batch: Batch, request: Request, size: int, prompt_only: bool) -> NGrams:
    name = "prompt n-grams" if prompt_only else "n-grams"
    return batch.memory.recall(request, name, lambda request: NGrams(request, size, prompt_only))
