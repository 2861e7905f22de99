"""The callers' own processors, and those of Transformers that have no form for a whole batch: one row at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import EngineError, InvalidRequestError
from ..request import Request
from .processors import Batch


@dataclasses.dataclass(frozen=True)
class PerAnswer:
    """A value for `RequestExtras.logits_processor`: processors with a state, made anew for each answer.

    Args:
        make (`Callable[[Request], Sequence[Callable]]`):
            Makes the processors of an answer before its first token.
    """

    make: Callable[[Request], Sequence[Callable]]


class RowProcessors:
    """Calls the processors of `RequestExtras.logits_processor` after all of ours and before temperature.

    They get normal tensors of their own (not inference tensors), which they may change and keep.

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self._batch = batch
        self.rows = [row for row, request in enumerate(batch.requests) if request.extras.logits_processor]

    def is_active(self) -> bool:
        """Returns whether a request of the batch has processors of its own."""
        return bool(self.rows)

    def apply(self, scores: torch.Tensor) -> dict[int, Exception]:
        """Changes the scores in place.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.

        Returns:
            `dict[int, Exception]`: What processors raised, by row; an `EngineError` where that was no `Exception`.

        Raises:
            KeyboardInterrupt: Only this one ends the step.
        """
        errors: dict[int, Exception] = {}
        for row in self.rows:
            request = self._batch.requests[row]
            with torch.inference_mode(False), torch.no_grad():
                try:
                    processed = self._processed(request, scores[row : row + 1].clone())
                except Exception as error:
                    # This frame is left out of the traceback: it would keep the scores of the whole batch.
                    errors[row] = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
                    continue
            scores[row] = processed[0]
        return errors

    def _processed(self, request: Request, scores: torch.Tensor) -> torch.Tensor:
        input_ids = torch.tensor([request.token_ids], dtype=torch.int64, device=scores.device)
        for processor in self._batch.memory.recall(request, "processors", _make):
            try:
                result = processor(input_ids, scores)
            except (Exception, KeyboardInterrupt) as error:
                error.add_note(f"Raised by logits processor {name_of(processor)} of request {request.request_id!r}.")
                raise
            except BaseException as error:
                # The thread that is here works for others too, and whoever waits may be an event loop: `SystemExit`
                # would end them.
                raise EngineError(
                    f"Logits processor {name_of(processor)} of request {request.request_id!r} raised {error!r}."
                ) from error
            scores = _checked(result, scores, processor)
        return scores


def name_of(function: Any) -> str:
    """Returns what to call a processor or criterion in a message.

    Args:
        function (`Any`):
            It.
    """
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _make(request: Request) -> Sequence[Callable]:
    given = request.extras.logits_processor
    return list(given.make(request) if isinstance(given, PerAnswer) else given)


def _checked(result: Any, scores: torch.Tensor, processor: Any) -> torch.Tensor:
    if not isinstance(result, torch.Tensor) or result.shape != scores.shape or not result.is_floating_point():
        got = f"{result.dtype} of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else repr(result)
        raise InvalidRequestError(
            f"Logits processor {name_of(processor)} must return floating point scores of shape "
            f"{tuple(scores.shape)}, as it was given, got {got:.200}."
        )
    return result.to(scores.device, torch.float32)
