"""`generate_batch`: any number of prompts through the engine, with Transformers' arguments and results."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from ..errors import InvalidRequestError, NotSupportedError
from .admission import check_prompt
from .answer import RequestState
from .coverage import foreign_field, foreign_input, rows_of
from .engine import Engine
from .hf_generate import banned_sequences, lengths_open, sampling_params
from .outputs import GenerationOutput
from .progress import progress
from .request import RequestExtras
from .sampling.params import SamplingParams


def run_batch(
    model: Any,
    inputs: Sequence[Any],
    generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
    *,
    tokenizer: Any = None,
    progress_bar: bool = False,
    record_timestamps: bool = False,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Answers prompts with continuous batching.

    Args:
        model (`PreTrainedModel`):
            The paged model.
        inputs (`Sequence[Any]`):
            Token id lists, or, with a tokenizer, texts and chats (lists of messages).
        generation_config (`GenerationConfig` or `Sequence[GenerationConfig]`, *optional*):
            One for all prompts, or one for each; open fields come from `model.generation_config`.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For texts and chats.
        progress_bar (`bool`, defaults to `False`):
            Whether to show one.
        record_timestamps (`bool`, defaults to `False`):
            Whether results carry the time of each token.
        kwargs (`Any`):
            Fields of `GenerationConfig`, for all prompts.

    Returns:
        `dict[str, GenerationOutput]`: By request id, in input order.

    Raises:
        InvalidRequestError: If a prompt or a parameter is wrong; nothing is started.
        NotSupportedError: If a field asks for something the engine does not run.
    """
    engine: Engine = model.engine
    prompts = [check_prompt(_tokens_of(prompt, tokenizer), engine.limits) for prompt in _as_prompts(inputs)]
    configs = _configs(generation_config, len(prompts))
    settings = {id(config): _settings(model, config, kwargs) for config in configs}
    planned = [
        (settings[id(config)].params(len(prompt), engine.plan.max_model_len), settings[id(config)].banned)
        for prompt, config in zip(prompts, configs, strict=True)
    ]
    for prompt, (params, _) in zip(prompts, planned, strict=True):
        engine.check(prompt, params, exact_room=True)
    stamps: dict[int, list[float]] = collections.defaultdict(list)
    on_update = functools.partial(_stamp, stamps) if record_timestamps else None
    with engine.requests() as states, progress(progress_bar, len(prompts), "Processed prompts", "prompt") as advance:
        for prompt, (params, banned) in zip(prompts, planned, strict=True):
            states.append(
                engine.add_request(prompt, params, extras=RequestExtras(bad_words_ids=banned), on_update=on_update)
            )
        for _ in engine.as_settled(states):
            advance()
    return _results(states, stamps if record_timestamps else None)


def _stamp(stamps: dict[int, list[float]], state: RequestState) -> None:
    now = time.perf_counter()
    for answer in state.answers:
        times = stamps[id(answer.request)]
        times.extend([now] * (answer.request.num_output_tokens - len(times)))


def _results(states: Sequence[RequestState], stamps: dict[int, list[float]] | None) -> dict[str, GenerationOutput]:
    results = {}
    for i, state in enumerate(states):
        for answer in state.answers:
            request = answer.request
            request_id = f"req_{i}" if len(state.answers) == 1 else f"req_{i}_{request.branch}"
            metrics = request.metrics
            results[request_id] = GenerationOutput(
                request_id=request_id,
                prompt_ids=request.prompt_token_ids,
                generated_tokens=request.output_token_ids,
                logprobs=[],
                error=str(request.error) if request.error is not None else None,
                status=request.finish_reason.value if request.finish_reason is not None else "",
                created_time=metrics.arrival_time,
                lifespan=(metrics.first_scheduled_time or -1, metrics.finished_time or -1),
                timestamps=stamps[id(request)] if stamps is not None else None,
            )
    return results


def _as_prompts(inputs: Any) -> list[Any]:
    """Returns the prompts of what a tokenizer or a user made: a list, a matrix, or a mapping with `input_ids`."""
    if hasattr(inputs, "keys"):
        mask = inputs.get("attention_mask")
        inputs = inputs["input_ids"]
        if mask is not None and isinstance(inputs, torch.Tensor):
            found = rows_of(inputs, torch.as_tensor(mask))
            if found is None:
                raise InvalidRequestError("`attention_mask` has holes, or rows without a token.")
            return found[0]
    if isinstance(inputs, (str, bytes)) or not hasattr(inputs, "__iter__"):
        raise InvalidRequestError(f"`inputs` must be a list of prompts, got {type(inputs).__name__}.")
    prompts = list(inputs)
    return [prompts] if prompts and all(isinstance(message, dict) for message in prompts) else prompts  # one chat


def _tokens_of(prompt: Any, tokenizer: Any) -> Any:
    if isinstance(prompt, str):
        return _need(tokenizer, prompt)(prompt)["input_ids"]
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], dict):
        ids = _need(tokenizer, prompt).apply_chat_template(prompt, add_generation_prompt=True, tokenize=True)
        return ids["input_ids"] if hasattr(ids, "keys") else ids
    if isinstance(prompt, torch.Tensor) and prompt.ndim == 2 and prompt.shape[0] == 1:
        return prompt[0]
    return prompt


def _need(tokenizer: Any, prompt: Any) -> Any:
    if tokenizer is None:
        raise InvalidRequestError(
            f"`inputs` holds a {'text' if isinstance(prompt, str) else 'chat'}; pass `tokenizer=` to generate_batch, "
            "or tokenize it first."
        )
    return tokenizer


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


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What a configuration says to prompts of every length."""

    config: GenerationConfig
    length_open: bool
    stop_token_ids: list[int]
    banned: tuple[tuple[int, ...], ...]

    def params(self, length: int, max_model_len: int) -> SamplingParams:
        """The parameters for a prompt of some length."""
        config = self.config
        if config.max_new_tokens is not None:
            new = config.max_new_tokens
        elif self.length_open:  # Transformers' default number of new tokens, as far as the model goes
            new = min(config.max_length, max(max_model_len - length, 1))
        else:
            new = config.max_length - length
        if new < 1:
            raise InvalidRequestError(
                f"`max_length` {config.max_length} and `max_new_tokens` {config.max_new_tokens} leave no room after a "
                f"prompt of {length} tokens; set `max_new_tokens` to at least 1."
            )
        least = config.min_new_tokens if config.min_new_tokens is not None else (config.min_length or 0) - length
        return sampling_params(config, new, max(least, 0)).replace(stop_token_ids=self.stop_token_ids)


def _settings(model: Any, given: GenerationConfig | None, kwargs: dict[str, Any]) -> _Settings:
    length_open, _ = lengths_open(model, given, kwargs)
    config, model_kwargs = model._prepare_generation_config(copy.deepcopy(given), **kwargs)
    model._validate_model_kwargs(dict(model_kwargs))  # Transformers' error for unknown names
    field = foreign_field(config) or foreign_input(model_kwargs)
    if field is not None:
        raise NotSupportedError(
            f"`{field}` is not supported by generate_batch yet; `generate` runs it through Transformers' loop."
        )
    if config.do_sample and not config.temperature > 0:
        raise InvalidRequestError(
            f"`temperature` must be positive when sampling, got {config.temperature}; use `do_sample=False` for greedy."
        )
    eos = config.eos_token_id
    ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    limits = model.engine.limits
    ends = [token for token in ends if 0 <= token < limits.vocab_size]
    banned = banned_sequences(config, torch.tensor(ends) if ends else None, limits)
    return _Settings(config, length_open, ends, banned)
