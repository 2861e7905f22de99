"""From a prompt and a `GenerationConfig` to a request of the engine, or to a call of `generate` that answers it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from ..errors import InvalidRequestError, NotSupportedError
from .admission import check_prompt
from .batch_results import RequestLog
from .coverage import FIELDS, Way, foreign_input, rows_of
from .engine import Engine
from .hf_generate import engine_obstacle, lengths_open
from .hf_sampling import HOW, CustomParts, request_settings
from .request import NO_EXTRAS, HiddenStatesWanted, RequestExtras
from .sampling.params import SamplingParams
from .structured.hf_arguments import checked_tokenizer
from .structured.params import StructuredOutputsParams

# Fields that choose a cache or how it is filled: the K/V of a batch are always paged and computed in chunks, as in
# Transformers' own continuous batching.
_CACHE_FIELDS = {
    "use_cache": True,
    **dict.fromkeys(("cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config")),
}
# Fields that choose what a `ModelOutput` holds; a `GenerationOutput` always has the same fields.
_OUTPUT_FIELDS = {"return_dict_in_generate": False, "output_scores": False, "output_hidden_states": False}
_UNSUPPORTED = {
    "output_attentions": "call `generate`, which returns them",
    "output_logits": "ask for `logprobs=`, or for `output_scores=True`",
}


_PROMPTS = ("inputs", "input_ids", "attention_mask")  # as keywords: the prompts have come another way


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What a request of `generate_batch` or of the manager may ask for beside its `GenerationConfig`.

    Args:
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For texts, chats and stop strings.
        priority (`int`, defaults to 0):
            Lower runs earlier under the priority policy.
        seed (`int`, *optional*):
            Fixes what is sampled, whatever runs beside it.
        logprobs (`int`, *optional*):
            Log-probabilities of each token of the answer and of this many best ones; 0 for its own alone.
        prompt_logprobs (`int`, *optional*):
            The same for each token of the prompt.
        processed_logprobs (`bool`, defaults to `False`):
            Whether `GenerationOutput.logprobs` are those that the tokens were chosen with (Transformers'
            `return_logprobs`).
        scores (`bool`, defaults to `False`):
            Whether the processed scores of each token come back.
        hidden_states (`HiddenStatesWanted` or `bool`, *optional*):
            Which hidden states come back; `True` means all.
        logits_processor (`Sequence[Callable]`, *optional*):
            Called in order as `processor(input_ids [1, tokens], scores [1, vocab_size])`.
        stopping_criteria (`Sequence[Callable]`, *optional*):
            Called after each token as `criteria(input_ids [1, tokens], scores)`.
        prefix_allowed_tokens_fn (`Callable`, *optional*):
            As in `generate`.
        custom_generate (`str` or `Callable`, *optional*):
            As in `generate`.
        assistant_model (`PreTrainedModel`, *optional*):
            As in `generate`.
        structured_outputs (`StructuredOutputsParams` or `dict`, *optional*):
            The form of the answers; needs the tokenizer.
    """

    tokenizer: Any = None
    priority: int = 0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    processed_logprobs: bool = False
    scores: bool = False
    hidden_states: HiddenStatesWanted | bool | None = None
    logits_processor: Sequence[Callable] | None = None
    stopping_criteria: Sequence[Callable] | None = None
    prefix_allowed_tokens_fn: Callable | None = None
    custom_generate: Any = None
    assistant_model: Any = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self):
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
            checked_tokenizer(self.tokenizer)
        wanted = self.hidden_states
        if wanted is None or isinstance(wanted, bool):
            return
        if not isinstance(wanted, HiddenStatesWanted) or wanted.layers == ():
            raise InvalidRequestError(
                f"`hidden_states` must be True, or a HiddenStatesWanted that names a layer, got {wanted!r}."
            )

    @classmethod
    def take(cls, kwargs: Mapping[str, Any]) -> tuple[Wishes, dict[str, Any]]:
        """Returns the wishes among keyword arguments, and the others: fields of `GenerationConfig`.

        Args:
            kwargs (`Mapping[str, Any]`):
                As given.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        wishes = {name: value for name, value in kwargs.items() if name in names}
        return cls(**wishes), {name: value for name, value in kwargs.items() if name not in names}

    def for_generate(self, row: int) -> dict[str, Any]:
        """Returns those that are arguments of `generate`.

        Args:
            row (`int`):
                Which row `prefix_allowed_tokens_fn` is told.
        """
        names: tuple[str, ...] = ("tokenizer", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
        names = (*names, "custom_generate", "assistant_model", "structured_outputs")
        given = {name: getattr(self, name) for name in names}
        allowed = self.prefix_allowed_tokens_fn
        if allowed is not None:
            given["prefix_allowed_tokens_fn"] = lambda _, tokens: allowed(row, tokens)
        return {name: value for name, value in given.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class PlannedRequest:
    """A checked prompt and how it is answered.

    Args:
        tokens (`list[int]`):
            The prompt.
        params (`SamplingParams`, *optional*):
            How the engine samples; `None` if `generate` answers it.
        extras (`RequestExtras`):
            What else the engine is asked for.
        wishes (`Wishes`):
            As given.
        num_answers (`int`):
            How many answers it has.
        generate_kwargs (`dict[str, Any]`):
            Arguments of `generate`, if that answers it.
        reason (`str`, *optional*):
            Why it is `generate` that answers it.
        eos_token_ids (`frozenset[int]`, defaults to none):
            What ends an answer of `generate`.
        pad_token_id (`int`, *optional*):
            What fills an answer of `generate` that ended before others.
        wants_scores (`bool`, defaults to `False`):
            Whether the processed scores come back.
    """

    tokens: list[int]
    params: SamplingParams | None
    extras: RequestExtras
    wishes: Wishes
    num_answers: int
    generate_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    reason: str | None = None
    eos_token_ids: frozenset[int] = frozenset()
    pad_token_id: int | None = None
    wants_scores: bool = False

    def log(self, timestamps: bool) -> RequestLog:
        """Returns what is to be written down about it.

        Args:
            timestamps (`bool`):
                Whether the time of each token is wanted.
        """
        return RequestLog(
            self.num_answers,
            timestamps=timestamps,
            logprobs=self.params is not None and self.wishes.processed_logprobs,
            keep_scores=self.wants_scores,
        )

    def seeded(self, seed: int | None) -> SamplingParams:
        """Returns its parameters, with the form of its answer, and a seed if it has none of its own.

        Args:
            seed (`int`, *optional*):
                The seed.
        """
        assert self.params is not None, "the engine was given a request that is for `generate`"
        changes: dict[str, Any] = {}
        if self.params.seed is None and seed is not None:
            changes["seed"] = seed
        if self.wishes.structured_outputs is not None:
            changes["structured_outputs"] = self.wishes.structured_outputs
        return self.params.replace(**changes) if changes else self.params


class Planner:
    """Plans the requests of one call; prompts that share a configuration share the work.

    Args:
        model (`PreTrainedModel`):
            The paged model.
        engine (`Engine`):
            What runs the requests.
        wishes (`Wishes`):
            For all of them.
        fields (`Mapping[str, Any]`):
            Fields of `GenerationConfig`, for all of them.
        exact_room (`bool`, defaults to `True`):
            Refuse an answer that may outgrow `max_model_len`, instead of ending it there.
    """

    def __init__(
        self, model: Any, engine: Engine, wishes: Wishes, fields: Mapping[str, Any], *, exact_room: bool = True
    ):
        self._model, self._engine, self._wishes = model, engine, wishes
        self._fields = dict(fields)
        self._exact_room = exact_room
        self._settings: dict[int, _Settings] = {}
        if wishes.structured_outputs is not None:
            engine.grammars.compile(wishes.structured_outputs, wishes.tokenizer)  # what is wrong with it is said here

    def plan(self, prompt: Any, config: GenerationConfig | None, row: int = 0) -> PlannedRequest:
        """Checks a prompt and plans how it is answered.

        Args:
            prompt (`Any`):
                Token ids, or, with a tokenizer, a text or a chat.
            config (`GenerationConfig`, *optional*):
                Its configuration; open fields come from `model.generation_config`.
            row (`int`, defaults to 0):
                Which row `prefix_allowed_tokens_fn` is told.

        Raises:
            InvalidRequestError: If the prompt or a parameter is wrong.
            NotSupportedError: If a field asks for something that a batch cannot give.
        """
        engine, wishes = self._engine, self._wishes
        if id(config) not in self._settings:
            self._settings[id(config)] = _Settings(self._model, config, self._fields, wishes)
        settings = self._settings[id(config)]
        tokens = check_prompt(tokens_of(prompt, wishes.tokenizer), engine.limits)
        if settings.reason is not None:
            return PlannedRequest(
                tokens,
                None,
                NO_EXTRAS,
                wishes,
                settings.num_answers,
                settings.generate_kwargs(config, len(tokens), engine.plan.max_model_len, row),
                settings.reason,
                settings.eos_token_ids,
                settings.pad_token_id,
            )
        params, extras = settings.for_engine(len(tokens), engine.plan.max_model_len, row)
        engine.check(tokens, params, exact_room=self._exact_room)
        return PlannedRequest(tokens, params, extras, wishes, settings.num_answers, wants_scores=settings.wants_scores)


class _Settings:
    """What a configuration says to prompts of every length."""

    def __init__(self, model: Any, given: GenerationConfig | None, fields: Mapping[str, Any], wishes: Wishes):
        self._model, self._wishes = model, wishes
        self._length_open, _ = lengths_open(model, given, fields)
        given, fields, outputs = _without_outputs(model, given, fields)
        config, _ = model._prepare_generation_config(given)
        model_kwargs = config.update(**fields)  # afterwards: Transformers warns where both are given
        model._validate_model_kwargs(dict(model_kwargs))  # Transformers' error for unknown names
        self._config = config
        names = (name for name in _PROMPTS if model_kwargs.get(name) is not None)
        name = next(names, None) or foreign_input(model_kwargs)
        if name is not None:
            raise NotSupportedError(f"`{name}` is an input of `generate`; a batch takes prompts of tokens or texts.")
        for name, way_out in _UNSUPPORTED.items():
            if outputs[name]:
                raise NotSupportedError(f"`{name}` is not returned by a batch; {way_out}.")
        self.wants_scores = wishes.scores or outputs["output_scores"]
        self._hidden_states = wishes.hidden_states or outputs["output_hidden_states"]
        _check_counts(config)
        for name, value in {**_CACHE_FIELDS, **_OUTPUT_FIELDS}.items():
            setattr(config, name, value)
        self.num_answers = config.num_return_sequences or 1
        self.reason = _reason(model, config, wishes)
        self._generate_fields = {**fields, **_CACHE_FIELDS, **_OUTPUT_FIELDS}
        ends = config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        self.eos_token_ids = frozenset(token for token in ends if token >= 0)  # -1 is Transformers' word for none
        self.pad_token_id = config.pad_token_id if config.pad_token_id is not None else next(iter(ends), None)
        self._by_length: dict[tuple[int, int], tuple[SamplingParams, RequestExtras]] = {}
        if self.reason is None:
            self._complete()
        else:
            self._refuse_details()

    def _complete(self) -> None:
        config = self._config
        if config.do_sample and not config.temperature > 0:
            raise InvalidRequestError(
                f"`temperature` must be positive when sampling, got {config.temperature}; use `do_sample=False` for "
                "greedy."
            )
        config.eos_token_id = sorted(self.eos_token_ids) or None
        if config.pad_token_id is None:
            config.pad_token_id = 0  # nothing is padded; without one Transformers warns
        self._model._prepare_special_tokens(config, True, device=self._model.device)

    def _refuse_details(self) -> None:
        wishes = self._wishes
        if wishes.prompt_logprobs is not None or wishes.logprobs or self.wants_scores or self._hidden_states:
            raise NotSupportedError(
                "`logprobs` of other tokens, `prompt_logprobs`, `scores` and `hidden_states` are not returned for a "
                f"request that Transformers' own loop answers ({self.reason}); call `generate` for it."
            )
        if wishes.seed is not None:
            raise NotSupportedError(
                f"`seed` is for requests that the engine samples, and {self.reason}; use `torch.manual_seed`."
            )

    def generate_kwargs(
        self, given: GenerationConfig | None, length: int, max_model_len: int, row: int
    ) -> dict[str, Any]:
        """Arguments of a call of `generate` that answers a prompt of some length."""
        config = copy.deepcopy(given) if given is not None else GenerationConfig()
        for name, value in self._generate_fields.items():
            setattr(config, name, value)
        config.max_new_tokens = self._num_new_tokens(length, max_model_len)
        return {"generation_config": config, **self._wishes.for_generate(row)}

    def for_engine(self, length: int, max_model_len: int, row: int) -> tuple[SamplingParams, RequestExtras]:
        """What a request of the engine with a prompt of some length asks for."""
        wishes = self._wishes
        key = length, row if wishes.prefix_allowed_tokens_fn is not None else 0
        # The clock of `max_time` starts when its criterion is made, so each request gets one of its own.
        if key not in self._by_length or self._config.max_time is not None:
            max_tokens = self._num_new_tokens(length, max_model_len)
            config = self._config
            least = config.min_new_tokens if config.min_new_tokens is not None else (config.min_length or 0) - length
            params, extras = request_settings(
                self._model,
                config,
                length,
                max_tokens=max_tokens,
                min_tokens=max(least, 0),
                custom=CustomParts(
                    logits_processor=wishes.logits_processor,
                    stopping_criteria=wishes.stopping_criteria,
                    prefix_allowed_tokens_fn=wishes.prefix_allowed_tokens_fn,
                    row=row,
                    tokenizer=wishes.tokenizer,
                ),
            )
            hidden_states = HiddenStatesWanted() if self._hidden_states is True else self._hidden_states or None
            self._by_length[key] = (
                params.replace(seed=wishes.seed, logprobs=wishes.logprobs, prompt_logprobs=wishes.prompt_logprobs),
                dataclasses.replace(
                    extras, scores=self.wants_scores or wishes.processed_logprobs, hidden_states=hidden_states
                ),
            )
        return self._by_length[key]

    def _num_new_tokens(self, length: int, max_model_len: int) -> int:
        config = self._config
        if config.max_new_tokens is not None:
            new = config.max_new_tokens
        elif self._length_open:  # Transformers' default number of new tokens, as far as the model goes
            new = min(config.max_length, max(max_model_len - length, 1))
        else:
            new = config.max_length - length
        if new < 1:
            raise InvalidRequestError(
                f"`max_length` {config.max_length} and `max_new_tokens` {config.max_new_tokens} leave no room after a "
                f"prompt of {length} tokens; set `max_new_tokens` to at least 1."
            )
        return new


def _without_outputs(
    model: Any, given: GenerationConfig | None, fields: Mapping[str, Any]
) -> tuple[GenerationConfig | None, dict[str, Any], dict[str, bool]]:
    """Sets aside what `ModelOutput`s are to hold, which Transformers warns about where it returns none.

    Returns a copy of the configuration and the fields without it, and what was asked for.
    """
    names = [*_OUTPUT_FIELDS, *_UNSUPPORTED]
    sources = (fields.get, lambda name: getattr(given, name, None), lambda name: getattr(model.generation_config, name))
    outputs = {
        name: bool(next((value for value in (source(name) for source in sources) if value is not None), False))
        for name in names
    }
    given = copy.deepcopy(given)
    if given is not None:
        for name in names:
            setattr(given, name, None)
    return given, {name: value for name, value in fields.items() if name not in names}, outputs


def _check_counts(config: GenerationConfig) -> None:
    for name in ("num_beams", "num_return_sequences"):
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidRequestError(f"`{name}` must be a whole number of at least 1, got {value!r}.")


def _reason(model: Any, config: GenerationConfig, wishes: Wishes) -> str | None:
    """Why Transformers' own loop answers a request, or `None`."""
    obstacle = engine_obstacle(model)
    if obstacle is not None:
        return obstacle
    for name in ("custom_generate", "assistant_model"):
        if getattr(wishes, name) is not None:
            return f"`{name}` was given"
    values = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    defaults = GenerationConfig._get_default_generation_params()
    is_set = {n for n, v in values.items() if v is not None and v is not False and v != defaults.get(n)}
    for name in sorted(is_set - set(HOW) - set(_CACHE_FIELDS)):
        entry = FIELDS.get(name)
        if entry is None or entry.plain or (entry.needs and not is_set.intersection(entry.needs)):
            continue
        if entry.way is Way.REFUSED:
            raise NotSupportedError(f"`{name}` is not run on a paged model: {entry.how}.")
        return f"`{name}` is set"
    return None


def prompts_of(inputs: Any) -> list[Any]:
    """Returns the prompts of what a tokenizer or a user made: a list, a matrix, or a mapping with `input_ids`.

    Args:
        inputs (`Any`):
            As given to `generate_batch`.

    Raises:
        InvalidRequestError: If it is none of these.
    """
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


def tokens_of(prompt: Any, tokenizer: Any) -> Any:
    """Returns the tokens of a prompt.

    Args:
        prompt (`Any`):
            Token ids, a text, or a chat (a list of messages).
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            For texts and chats.

    Raises:
        InvalidRequestError: If a tokenizer is needed and there is none.
    """
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
