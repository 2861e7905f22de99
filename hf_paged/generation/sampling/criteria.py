"""Callers' own reasons to end an answer."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import EngineError, InvalidRequestError
from ..request import Request
from .row_processors import name_of


def stops(request: Request, scores: Any = None, device: torch.device | str = "cpu") -> bool:
    """Asks all of a request's `stopping_criteria` whether its answer ends after the token that it has just got.

    As in Transformers, each is asked, whatever those before it say.

    Args:
        request (`Request`):
            The request, its new token included.
        scores (`Any`, *optional*):
            Passed on: the processed scores of the tokens so far (Transformers passes a tuple of `[1, vocab_size]`), or
            `None` where nobody wanted them.
        device (`torch.device` or `str`, defaults to `"cpu"`):
            Where the criteria expect their input, which is where the model is.

    Returns:
        `bool`: Whether one of them says so; False without criteria.

    Raises:
        InvalidRequestError: If one returns neither a bool nor a tensor of one bool.
        Exception: What a criterion raises.
        EngineError: If it raises something that is no `Exception`, such as `SystemExit`.
    """
    criteria = request.extras.stopping_criteria
    if not criteria:
        return False
    with torch.inference_mode(False), torch.no_grad():
        input_ids = torch.tensor([request.token_ids], dtype=torch.int64, device=device)
        answers = [_answer(criterion, request, input_ids, scores) for criterion in criteria]
    return any(answers)


def _answer(criterion: Any, request: Request, input_ids: torch.Tensor, scores: Any) -> bool:
    try:
        answer = criterion(input_ids, scores)
    except (Exception, KeyboardInterrupt) as error:
        error.add_note(f"Raised by stopping criterion {name_of(criterion)} of request {request.request_id!r}.")
        raise
    except BaseException as error:  # such as `SystemExit`, which would end the work for others
        raise EngineError(
            f"Stopping criterion {name_of(criterion)} of request {request.request_id!r} raised {error!r}."
        ) from error
    if isinstance(answer, bool):
        return answer
    if isinstance(answer, torch.Tensor) and answer.dtype == torch.bool and answer.numel() == 1:
        return bool(answer)
    got = f"{answer.dtype} of shape {tuple(answer.shape)}" if isinstance(answer, torch.Tensor) else repr(answer)
    raise InvalidRequestError(
        f"Stopping criterion {name_of(criterion)} must return one bool for each row it is given (a tensor of shape "
        f"(1,), or a bool), got {got:.200}."
    )
