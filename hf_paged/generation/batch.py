"""`generate_batch`: any number of prompts through the engine, with Transformers' arguments and results."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import GenerationConfig

from ..errors import InvalidRequestError
from .answer import RequestState
from .batch_planning import PlannedRequest, Planner, Wishes, prompts_of
from .batch_results import RequestLog, output_of
from .batching_settings import BatchingSettings
from .engine import Engine
from .loop_requests import LoopPool, LoopRequest
from .outputs import GenerationOutput
from .progress import progress

logger = logging.getLogger(__name__)


def run_batch(
    model: Any,
    inputs: Any,
    generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
    settings: BatchingSettings,
    *,
    progress_bar: bool = False,
    record_timestamps: bool = False,
    kwargs: Mapping[str, Any],
) -> dict[str, GenerationOutput]:
    """Answers prompts with continuous batching.

    Args:
        model (`PreTrainedModel`):
            The paged model.
        inputs (`Any`):
            Token id lists, or, with a tokenizer, texts and chats (lists of messages).
        generation_config (`GenerationConfig` or `Sequence[GenerationConfig]`, *optional*):
            One for all prompts, or one for each; open fields come from `model.generation_config`.
        settings (`BatchingSettings`):
            What the continuous batching configuration says.
        progress_bar (`bool`, defaults to `False`):
            Whether to show one.
        record_timestamps (`bool`, defaults to `False`):
            Whether results carry the time of each token.
        kwargs (`Mapping[str, Any]`):
            `Wishes` and fields of `GenerationConfig`, for all prompts.

    Returns:
        `dict[str, GenerationOutput]`: By request id, in input order.

    Raises:
        InvalidRequestError: If a prompt or a parameter is wrong; nothing is started.
        NotSupportedError: If a field asks for something that a batch cannot give.
    """
    engine = settings.engine(model)
    prompts = prompts_of(inputs)
    configs = _configs(generation_config, len(prompts))
    wishes, fields = Wishes.take({**settings.defaults(), **kwargs})
    planner = Planner(model, engine, wishes, fields)
    planned = [planner.plan(*prompt, row=i) for i, prompt in enumerate(zip(prompts, configs, strict=True))]
    requests: list[_Request] = []
    with (
        engine.requests() as states,
        LoopPool() as loops,
        progress(progress_bar, len(prompts), "Processed prompts", "prompt") as advance,
    ):
        for i, one in enumerate(planned):
            log = one.log(record_timestamps)
            if one.params is None:
                requests.append((LoopRequest(f"req_{i}", one, record_timestamps=record_timestamps), log))
                loops.submit(requests[-1][0], model)  # type: ignore[arg-type]
            else:
                states.append(_add(engine, one, settings.seed_of(i), log))
                requests.append((states[-1], log))
        for _ in engine.as_settled(states):
            advance()
        for _ in loops.as_finished([request for request, _ in requests if isinstance(request, LoopRequest)]):
            advance()
    results = _results(requests)
    _report_failures(results)
    return results


_Request = tuple[RequestState | LoopRequest, RequestLog]


def _add(engine: Engine, planned: PlannedRequest, seed: int | None, log: RequestLog) -> RequestState:
    return engine.add_request(
        planned.tokens,
        planned.seeded(seed),
        priority=planned.wishes.priority,
        tokenizer=planned.wishes.tokenizer,
        extras=planned.extras,
        on_update=log.take if log.is_wanted else None,
    )


def _results(requests: Sequence[_Request]) -> dict[str, GenerationOutput]:
    results: dict[str, GenerationOutput] = {}
    for i, (request, log) in enumerate(requests):
        if isinstance(request, LoopRequest):
            outputs = request.outputs()
        else:
            outputs = [output_of(request, answer, f"req_{i}", log) for answer in request.answers]
        results |= {output.request_id: output for output in outputs}
    return results


def _report_failures(results: Mapping[str, GenerationOutput]) -> None:
    failed = [output for output in results.values() if output.error is not None]
    if failed:
        logger.error("%d of %d requests failed, the first with: %s", len(failed), len(results), failed[0].error)


def _configs(given: Any, count: int) -> list[GenerationConfig | None]:
    if given is None or isinstance(given, GenerationConfig):
        return [given] * count
    if not isinstance(given, (list, tuple)):
        raise InvalidRequestError(
            f"`generation_config` must be a GenerationConfig or a list of them, got {type(given).__name__}."
        )
    configs = list(given)
    if len(configs) != count:
        raise InvalidRequestError(f"{count} prompts were given {len(configs)} generation configurations.")
    for config in configs:
        if config is not None and not isinstance(config, GenerationConfig):
            raise InvalidRequestError(f"`generation_config` must hold GenerationConfigs, got {type(config).__name__}.")
    return configs
