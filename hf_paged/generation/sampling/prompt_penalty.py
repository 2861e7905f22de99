"""Favouring or avoiding the prompt's tokens."""

from __future__ import annotations

import torch

from .processors import Batch


class PromptPenalty:
    """Divides negative and multiplies positive scores of the prompt's tokens by `encoder_repetition_penalty`.

    Transformers' `EncoderRepetitionPenaltyLogitsProcessor`, for which a decoder-only model's prompt is the encoder's.

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        tokens, factors = {}, []
        for row, request, features in batch.features:
            if features.encoder_repetition_penalty != 1:
                tokens[row] = sorted({token for token in request.prompt_token_ids if token < batch.vocab_size})
                factors += [1 / features.encoder_repetition_penalty] * len(tokens[row])
        self._places = batch.positions(tokens)
        self._penalties = batch.tensor(factors)

    def is_active(self) -> bool:
        """Returns whether a request of the batch has such a penalty."""
        return len(self._places) > 0

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        flat = scores.view(-1)
        values = flat[self._places]
        flat[self._places] = torch.where(values < 0, values * self._penalties, values / self._penalties)
