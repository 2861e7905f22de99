"""`generate` on the engine: from Transformers' arguments to requests, and back to its tensors."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from .. import compat
from ..cache.paged_cache import PagedCache
from ..errors import RequestAbortedError
from .adapters import replaced_by_adapter
from .answer import RequestState
from .attention import IMPLEMENTATIONS
from .coverage import foreign_field, foreign_input, rows_of
from .engine import Engine
from .hf_sampling import request_settings
from .model_state import training_obstacle
from .plan import EnginePlan
from .request import FinishReason, RequestExtras
from .sampling.params import SamplingParams
from .structured.params import StructuredOutputsParams

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class GenerateCall:
    """A call of `generate` that the engine runs.

    Args:
        input_ids (`torch.Tensor`):
            `[batch, length]`, padded as the caller gave it.
        rows (`list[list[int]]`):
            The tokens of each row, without padding.
        starts (`list[int]`):
            The column of each row's first token.
        params (`SamplingParams`):
            The same for all rows.
        extras (`RequestExtras`):
            The same for all rows.
        pad_token_id (`int`):
            Fills rows that end early.
        return_dict (`bool`):
            Whether a `GenerateDecoderOnlyOutput` is wanted, with the cache.
        streamer (`BaseStreamer`, *optional*):
            Gets each token of a single row.
        structured_outputs (`StructuredOutputsParams`, *optional*):
            The form of the answers.
        tokenizer (`PreTrainedTokenizerFast`, *optional*):
            For that.
    """

    input_ids: torch.Tensor
    rows: list[list[int]]
    starts: list[int]
    params: SamplingParams
    extras: RequestExtras
    pad_token_id: int
    return_dict: bool
    streamer: Any = None
    structured_outputs: StructuredOutputsParams | None = None
    tokenizer: Any = None

    def run(self, engine: Engine) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Runs the call.

        Args:
            engine (`Engine`):
                The model's engine.

        Returns:
            `torch.LongTensor` `[batch * num_return_sequences, length]`, or a `GenerateDecoderOnlyOutput`.
        """
        for row in self.rows:
            engine.check(row, self.params)
        params = self.params
        if self.structured_outputs is not None:
            engine.grammars.compile(self.structured_outputs, self.tokenizer)  # what is wrong with it is said here
            params = params.replace(structured_outputs=self.structured_outputs)
        with engine.requests() as states:
            if self.streamer is not None:
                self.streamer.put(self.input_ids.cpu())
            extras = dataclasses.replace(self.extras, keep_kv=self.return_dict)
            for row in self.rows:
                states.append(
                    engine.add_request(
                        row,
                        params,
                        tokenizer=self.tokenizer,
                        extras=extras,
                        on_update=_ignore if self.streamer is not None else None,
                    )
                )
            if self.streamer is not None:
                self._stream(engine, states[0])
            for state in engine.as_finished(states):
                if any(request.finish_reason is FinishReason.ABORT for request in state.group.requests):
                    raise RequestAbortedError("A row of this call was aborted.")
        sequences = self._sequences(states)
        if not self.return_dict:
            return sequences
        cache = self._cache(states, sequences.shape[1] - 1, engine.plan.block_size)
        fields: dict[str, Any] = {"sequences": sequences, compat.cache_output_field(): cache}
        return GenerateDecoderOnlyOutput(**fields)

    def _stream(self, engine: Engine, state: RequestState) -> None:
        request, sent = state.group.requests[0], 0

        def has_news() -> bool:
            return request.num_output_tokens > sent

        while not state.finished or has_news():
            engine.wait(state, has_news)
            if state.error is not None:
                return  # raised by `as_finished`
            tokens = request.output_token_ids
            while sent < len(tokens):
                token, sent = tokens[sent], sent + 1
                self.streamer.put(torch.tensor([token]))
        self.streamer.end()

    def _sequences(self, states: list[RequestState]) -> torch.Tensor:
        answers = [answer.request.output_token_ids for state in states for answer in state.answers]
        longest = max(map(len, answers))
        new = torch.full((len(answers), longest), self.pad_token_id, dtype=torch.long)
        for row, tokens in enumerate(answers):
            new[row, : len(tokens)] = torch.tensor(tokens)
        prompts = self.input_ids.repeat_interleave(self.params.n, dim=0)
        return torch.cat([prompts, new.to(prompts.device)], dim=1)

    def _cache(self, states: list[RequestState], length: int, block_size: int) -> PagedCache:
        """The K/V of every row at the columns of `sequences`, as Transformers' loop would have left them."""
        width = self.input_ids.shape[1]
        rows: list[tuple[list[int], Any]] = []
        for start, tokens, state in zip(self.starts, self.rows, states, strict=True):
            for answer in state.answers:
                prompt = range(start, start + len(tokens))
                new = range(width, width + answer.request.num_output_tokens - 1)
                rows.append(([*prompt, *new], answer.kv))
        cache = PagedCache(block_size=block_size)
        cache.fill(rows, length)
        return cache


def _ignore(state: RequestState) -> None:
    """Streams need an update after each token; the waiting thread is woken by the step's end."""


def plan_generate(
    model: Any,
    inputs: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    special: Mapping[str, Any],
    streamer: Any,
    kwargs: dict[str, Any],
) -> GenerateCall | str:
    """Returns how the engine runs a call of `generate`, or why Transformers' own loop must.

    Args:
        model (`PreTrainedModel`):
            The paged model.
        inputs (`torch.Tensor`, *optional*):
            The first argument.
        generation_config (`GenerationConfig`, *optional*):
            As given.
        special (`Mapping[str, Any]`):
            Further arguments that were given (processors, criteria, ...).
        streamer (`BaseStreamer`, *optional*):
            As given.
        kwargs (`dict[str, Any]`):
            Fields of the configuration, and model inputs.

    Raises:
        ValueError: For what Transformers refuses with one.
    """
    reason = engine_obstacle(model)
    if reason is not None:
        return reason
    if special and not all(_empty(value) for value in special.values()):
        return f"`{next(name for name, value in special.items() if not _empty(value))}` was given"
    if kwargs.get("cache_implementation") is not None:
        return "`cache_implementation` was given"
    open_lengths = lengths_open(model, generation_config, kwargs)
    config, model_kwargs = model._prepare_generation_config(
        generation_config, **{name: value for name, value in kwargs.items() if name != "tokenizer"}
    )
    field = foreign_field(config)
    if field is not None:
        return f"`{field}` is set"
    name = foreign_input(model_kwargs)
    if name is not None:
        return f"`{name}` was given"
    input_ids = inputs if inputs is not None else model_kwargs.get("input_ids")
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.is_floating_point():
        return "the inputs are not a matrix of token ids"
    if inputs is not None and model_kwargs.get("input_ids") is not None:
        return "both `inputs` and `input_ids` were given"
    if streamer is not None and (input_ids.shape[0] != 1 or config.num_return_sequences != 1):
        return "a streamer was given for several rows"
    return _make_call(model, input_ids, config, model_kwargs, open_lengths, streamer)


def engine_obstacle(model: Any) -> str | None:
    """Returns why the engine cannot run any call of a model in the state that it is in, or `None`.

    Args:
        model (`PreTrainedModel`):
            The paged model.
    """
    if model._paged_refusal is not None:
        return "the engine cannot run this model"
    if model.config._attn_implementation not in IMPLEMENTATIONS:
        return f"the attention implementation was set to {model.config._attn_implementation!r}"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on, under which layers compute in another dtype than the K/V pool's"
    obstacle = training_obstacle(model)
    if obstacle is not None:
        return f"the model is in training mode, and {obstacle}"
    return replaced_by_adapter(model)


def _make_call(
    model: Any,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    open_lengths: tuple[bool, bool],
    streamer: Any,
) -> GenerateCall | str:
    batch, length = input_ids.shape
    if length == 0 or batch == 0:
        return "the inputs are empty"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        return "`attention_mask` has another shape than the inputs"
    model._prepare_special_tokens(config, mask is not None, device=input_ids.device, batch_size=batch)
    if mask is None:
        mask = model._prepare_attention_mask_for_generation(input_ids, config, {})
    found = rows_of(input_ids, mask)
    if found is None:
        return "`attention_mask` has holes"
    rows, starts = found
    if not bool(mask[:, -1].all()):
        return "the rows are padded on the right"  # Transformers continues after the padding, and warns
    padded = any(len(row) != length for row in rows)
    config = model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=open_lengths[0],
        has_default_min_length=open_lengths[1],
        model_input_name="input_ids",
        input_ids_length=length,
        inputs_tensor=input_ids,
    )
    model._validate_generated_length(config, length, open_lengths[0])
    if config.do_sample and not config.temperature > 0:
        return "`temperature` is not positive"  # Transformers has a message for it
    max_new_tokens = config.max_length - length
    beyond = _beyond_limits(model.engine.plan, max(map(len, rows)), max_new_tokens, config.num_return_sequences or 1)
    if beyond is not None:
        return beyond
    least = max((config.min_length or 0) - length, 0)
    params, extras = request_settings(model, config, length, max_tokens=max_new_tokens, min_tokens=least)
    if extras.logits_processor is not None or extras.stopping_criteria is not None:
        return "processors or criteria of this call look at its rows together"
    if padded and (extras.features is not None or extras.bad_words_ids or params.repetition_penalty != 1):
        return "Transformers' processors look at padding too"
    pad = config._pad_token_tensor
    return GenerateCall(
        input_ids,
        rows,
        starts,
        params,
        extras,
        int(pad) if pad is not None else 0,
        bool(config.return_dict_in_generate),
        streamer,
    )


def _beyond_limits(plan: EnginePlan, longest: int, max_new_tokens: int, num_answers: int) -> str | None:
    if longest + max_new_tokens > plan.max_model_len:
        return (
            f"{longest} prompt tokens and up to {max_new_tokens} new ones exceed `max_model_len` {plan.max_model_len}"
        )
    if num_answers > plan.max_num_seqs:
        return f"`num_return_sequences` {num_answers} exceeds `max_num_seqs` {plan.max_num_seqs}"
    if not plan.enable_chunked_prefill and longest > plan.max_num_batched_tokens:
        return f"{longest} prompt tokens exceed `max_num_batched_tokens` {plan.max_num_batched_tokens}, unchunked"
    return None


def lengths_open(model: Any, config: GenerationConfig | None, kwargs: Mapping[str, Any]) -> tuple[bool, bool]:
    """Returns whether nobody set `max_length`, and `min_length`: Transformers asks before it fills in defaults.

    Args:
        model (`PreTrainedModel`):
            The paged model, which has a configuration of its own.
        config (`GenerationConfig`, *optional*):
            As given.
        kwargs (`Mapping[str, Any]`):
            As given.
    """

    def is_open(name: str) -> bool:
        given = kwargs.get(name) is None and (config is None or getattr(config, name) is None)
        return given and getattr(model.generation_config, name) is None

    return is_open("max_length"), is_open("min_length")


def _empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, list) and not value)
