"""`pipeline`: Transformers' text-generation pipeline, with continuous batching over an iterable of any length."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
import transformers
from transformers import TextGenerationPipeline
from transformers.pipelines.pt_utils import KeyDataset
from transformers.utils.chat_template_utils import Chat, is_valid_message

from .auto import AutoPagedModelForCausalLM
from .configuration import PagedConfig
from .errors import (
    ConfigurationError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    NotSupportedError,
    QueueFullError,
    RequestAbortedError,
    RowFailedError,
)
from .generation.answer import RequestState
from .generation.batch_planning import Planner, Wishes
from .generation.engine import Engine
from .generation.mixin import PagedGenerationMixin
from .generation.request import FinishReason

logger = logging.getLogger(__name__)

# Rows of unequal lengths end at unequal times and are handed out in order: fewer would leave seats empty meanwhile.
_ROWS_PER_SEAT = 4
_BATCHING = ("batch_size", "num_workers")  # of Transformers' DataLoader; the engine makes its batches by itself
# Arguments of `generate` that a request can have, and those that it cannot.
_WISHES = ("tokenizer", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
_ONLY_GENERATE = (
    "streamer",
    "assistant_model",
    "assistant_tokenizer",
    "custom_generate",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "synced_gpus",
)
_LOADING = ("revision", "token", "trust_remote_code", "device_map")


def pipeline(
    task: str | None = "text-generation",
    model: Any = None,
    config: Any = None,
    tokenizer: Any = None,
    *,
    dtype: Any = "auto",
    model_kwargs: Mapping[str, Any] | None = None,
    paged_config: PagedConfig | None = None,
    **kwargs: Any,
) -> PagedTextGenerationPipeline:
    """Transformers' `pipeline` for text generation: the same call and the same results, on a paged engine.

    Args:
        task (`str`, *optional*, defaults to `"text-generation"`):
            Only text generation.
        model (`str`, `os.PathLike` or `PreTrainedModel`):
            Name on the Hub, a folder, or a model in memory; one that is not paged yet is paged in place.
        config (`PreTrainedConfig`, *optional*):
            For a model that is loaded here.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*):
            By default the one that belongs to the model's name or folder.
        dtype (`str` or `torch.dtype`, defaults to `"auto"`):
            For a model that is loaded here.
        model_kwargs (`Mapping[str, Any]`, *optional*):
            Further arguments of `from_pretrained`.
        paged_config (`PagedConfig`, *optional*):
            Settings of the engine.
        kwargs (`Any`):
            `max_in_flight` (see `PagedTextGenerationPipeline`); `revision`, `token`, `trust_remote_code` and
            `device_map` for a model that is loaded here; and whatever else the text-generation pipeline takes,
            settings of `generate` included.

    Returns:
        `PagedTextGenerationPipeline`: To be called with texts, chats, or iterables of them.

    Raises:
        NotSupportedError: For another task.
        ConfigurationError: If no model was given.

    Example:

    ```python
    generator = hf_paged.pipeline("text-generation", model="org/model", max_new_tokens=50, do_sample=False)
    for row in generator(line for line in open("prompts.txt")):
        print(row[0]["generated_text"])
    ```
    """
    if task not in (None, "text-generation"):
        raise NotSupportedError(f"`task` {task!r} is not text generation; `transformers.pipeline` has others.")
    if model is None:
        raise ConfigurationError("`model` is needed: a name on the Hub, a folder, or a model in memory.")
    loading: dict[str, Any] = {name: kwargs.pop(name) for name in _LOADING if name in kwargs}
    hub: dict[str, Any] = {name: value for name, value in loading.items() if name != "device_map"}
    dtype = kwargs.pop("torch_dtype", None) or dtype  # its name in older code
    if isinstance(model, (str, os.PathLike)):
        name: Any = model
        loading = {"dtype": dtype, "config": config, **loading, **(model_kwargs or {})}
        loading["dtype"] = loading.pop("torch_dtype", None) or loading["dtype"]
        model = AutoPagedModelForCausalLM.from_pretrained(
            name, paged_config=paged_config, **{key: value for key, value in loading.items() if value is not None}
        )
        if loading.get("device_map") is not None and getattr(model, "hf_device_map", None) is None:
            kwargs.setdefault("device", model.device)
    else:
        name = getattr(model, "name_or_path", None)
        model = _paged(model, paged_config)
    if tokenizer is None or isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = _load_tokenizer(tokenizer or name, hub)
    pipe: Any = transformers.pipeline(
        "text-generation", model=model, tokenizer=tokenizer, pipeline_class=PagedTextGenerationPipeline, **kwargs
    )
    return pipe


class PagedTextGenerationPipeline(TextGenerationPipeline):
    """Transformers' `TextGenerationPipeline`, whose iterables run through continuous batching.

    One text or one chat is answered as Transformers does it, with `model.generate`. Of an iterable (a list, a
    generator, a dataset, ...), rows become requests of the model's engine as places get free:

        inputs   | yielded | in flight: running, waiting, or done before their turn | not drawn yet ...
                           |<----------------- max_in_flight --------------------->|

    Results come in input order. A row that fails (neither a text nor a chat, a chat that the template refuses, a
    prompt that is too long, ...) is a `RowFailedError` in its place, and does not stop the others. What the engine
    does not run as requests (beams, ...) goes through `model.generate`, one row at a time. Logits processors and
    stopping criteria of the caller's own are called for one row at a time, the rows in flight taking turns.

    Args:
        args (`Any`):
            As in Transformers.
        max_in_flight (`int`, *optional*):
            Rows that were drawn from an iterable and not yet handed out, at most; four times the `max_num_seqs` of
            the engine's plan unless set.
        kwargs (`Any`):
            As in Transformers. `batch_size` and `num_workers` change nothing: the engine fills its batches itself.

    Raises:
        ConfigurationError: If `max_in_flight` is not a whole number from 1.
    """

    def __init__(self, *args: Any, max_in_flight: int | None = None, **kwargs: Any):
        _check_in_flight(max_in_flight)
        super().__init__(*args, **kwargs)
        self.max_in_flight = max_in_flight

    def __call__(self, text_inputs: Any, *, max_in_flight: int | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Continues texts or answers chats.

        Args:
            text_inputs (`Any`):
                A text, a chat (a list of messages), or any iterable of texts and chats: a list, a generator, a
                dataset, a column of one.
            max_in_flight (`int`, *optional*):
                Instead of the pipeline's own.
            kwargs (`Any`):
                As in Transformers: `return_full_text`, `return_tensors`, `prefix`, settings of `generate`, ...

        Returns:
            For one text or chat a list with a `dict` for each answer; for a list (or tuple) a list of such lists; for
            any other iterable an iterator over them, with a length if the iterable has one. `generated_text` and
            `generated_token_ids` are as in Transformers. A row that failed is a `RowFailedError`. An iterator that is
            let go early ends what is in flight.

        Raises:
            ValueError: If a setting is wrong. What the iterable itself raises comes after the results of the rows that
                it gave before.
        """
        _check_in_flight(max_in_flight)
        inputs, is_single = _looked_at(text_inputs)
        if is_single:
            return super().__call__(inputs, **kwargs)
        for name in _BATCHING:
            kwargs.pop(name, None)
        preprocess, forward, postprocess = self._sanitize_parameters(**kwargs)
        call = _BulkCall(
            self,
            {**self._preprocess_params, **preprocess},
            {**self._forward_params, **forward},
            {**self._postprocess_params, **postprocess},
            max_in_flight or self.max_in_flight,
        )
        if isinstance(inputs, Sized):
            results = _SizedResults(inputs, call.results)
            return list(results) if isinstance(inputs, (list, tuple)) else results
        return call.results(iter(inputs))


class _SizedResults:
    """The results of an iterable with a length. Each pass over them is a pass over the iterable."""

    def __init__(self, inputs: Any, run: Callable[[Iterator[Any]], Iterator[Any]]):
        self._inputs = inputs
        self._run = run

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> Iterator[Any]:
        inputs = self._inputs
        if hasattr(inputs, "__iter__"):
            return self._run(iter(inputs))
        return self._run(inputs[i] for i in range(len(inputs)))


@dataclasses.dataclass(slots=True)
class _Row:
    """A row that was drawn and has not been handed out."""

    index: int
    model_inputs: Any = None
    state: RequestState | None = None  # without one, `model.generate` answers the row in its turn
    error: RowFailedError | None = None


class _BulkCall:
    """One call of a pipeline with an iterable: settings that are the same for all rows, and how rows go through."""

    def __init__(
        self,
        pipe: PagedTextGenerationPipeline,
        preprocess: dict[str, Any],
        forward: dict[str, Any],
        postprocess: dict[str, Any],
        max_in_flight: int | None,
    ):
        self._pipe = pipe
        self._preprocess, self._forward, self._postprocess = preprocess, forward, postprocess
        self._has_warned = False
        self._planner, reason = _planner(pipe.model, _arguments_of_generate(pipe, forward))
        self._max_in_flight = 1
        if self._planner is not None:
            self._max_in_flight = max_in_flight or _ROWS_PER_SEAT * self._planner.engine.plan.max_num_seqs
        else:
            logger.info("Rows go through `model.generate` one by one: %s.", reason)

    def results(self, inputs: Iterator[Any]) -> Iterator[Any]:
        """Yields the result of each row, in order."""
        window: collections.deque[_Row] = collections.deque()
        indices = itertools.count()
        failure: Exception | None = None
        states: list[RequestState] = []
        drained = False
        try:
            while True:
                while not drained and len(window) < self._max_in_flight:
                    try:
                        value = next(inputs)
                    except StopIteration:
                        drained = True
                    except Exception as error:
                        drained, failure = True, error
                    else:
                        window.append(self._start(next(indices), value, states))
                if not window:
                    break
                yield self._finish(window.popleft(), states)
        finally:
            if self._planner is not None:
                self._planner.engine.abort_all(states)
        if failure is not None:
            raise failure

    # ------------------------------------------------------------------ a row comes in

    def _start(self, index: int, value: Any, states: list[RequestState]) -> _Row:
        try:
            row = _Row(index, self._pipe.preprocess(_as_input(value), **self._preprocess))
            if self._planner is not None:
                row.state = self._planner.start(row.model_inputs)
        except EngineClosedError:
            raise
        except Exception as error:
            return _Row(index, error=self._failed(index, error))
        if row.state is not None:
            states.append(row.state)
        return row

    # ------------------------------------------------------------------ a row goes out

    def _finish(self, row: _Row, states: list[RequestState]) -> Any:
        if row.error is not None:
            return row.error
        try:
            return self._pipe.postprocess(self._outputs(row, states), **self._postprocess)
        except EngineClosedError:
            raise
        except Exception as error:
            return self._failed(row.index, error)

    def _outputs(self, row: _Row, states: list[RequestState]) -> dict[str, Any]:
        """What the `_forward` of Transformers' pipeline returns."""
        if row.state is None:
            return self._pipe.forward(row.model_inputs, **self._forward)
        assert self._planner is not None and row.model_inputs is not None, "the row was given to the engine"
        self._planner.engine.wait(row.state)
        states.remove(row.state)
        if row.state.error is not None:
            raise row.state.error
        requests = row.state.group.requests
        if any(request.finish_reason is FinishReason.ABORT for request in requests):
            raise RequestAbortedError(f"The request of row {row.index} was aborted.")
        answers = [request.output_token_ids for request in requests]
        longest = max(map(len, answers))
        padded = [tokens + [self._planner.pad_token_id] * (longest - len(tokens)) for tokens in answers]
        prompt = row.model_inputs["input_ids"].cpu()
        sequences = torch.cat([prompt.expand(len(answers), -1), torch.tensor(padded, dtype=prompt.dtype)], dim=1)
        return {
            "generated_sequence": sequences[None],
            "input_ids": prompt,
            "prompt_text": row.model_inputs["prompt_text"],
        }

    def _failed(self, index: int, cause: Exception) -> RowFailedError:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("Row %d failed, and is an error object among the results: %s", index, cause)
        logger.debug("row %d failed", index, exc_info=cause)
        _drop_frames(cause)
        return RowFailedError(index, cause)


class _RowPlanner:
    """Makes requests of rows that share the arguments of `generate`."""

    def __init__(self, model: Any, arguments: Mapping[str, Any]):
        self.engine: Engine = model.engine
        fields = dict(arguments)
        self._config = fields.pop("generation_config", None)
        wishes = {name: fields.pop(name) for name in _WISHES if name in fields}
        complete, _ = model._prepare_generation_config(copy.deepcopy(self._config), **fields)
        self._returns_dict = bool(complete.return_dict_in_generate)
        self._has_clock = complete.max_time is not None
        self._num_answers = complete.num_return_sequences or 1
        ends = complete.eos_token_id
        pad = complete.pad_token_id
        self.pad_token_id = next(
            (one for one in [pad, *(ends if isinstance(ends, list) else [ends])] if one is not None), 0
        )
        self._planner = Planner(model, self.engine, Wishes(**wishes), fields, exact_room=False)

    def obstacle(self) -> str | None:
        """Why no row can be a request, or `None`; raises for settings that suit no row."""
        if self._returns_dict:
            return "`return_dict_in_generate` is set"
        if self._has_clock:
            return "`max_time` is set, which counts from the start of each row"
        if self._num_answers > self.engine.plan.max_num_seqs:
            return f"`num_return_sequences` {self._num_answers} exceeds `max_num_seqs` {self.engine.plan.max_num_seqs}"
        try:
            return self._planner.plan([0], self._config).reason
        except NotSupportedError as error:
            return str(error)

    def start(self, model_inputs: Mapping[str, Any]) -> RequestState | None:
        """Makes a request of a row, or returns `None` if `model.generate` has to answer it."""
        (tokens,) = model_inputs["input_ids"].tolist()
        mask = model_inputs.get("attention_mask")
        if not tokens or (mask is not None and not bool(mask.all())):
            return None  # Transformers has a way with empty prompts, and counts padding
        planned = self._planner.plan(tokens, self._config)
        params, max_model_len = planned.params, self.engine.plan.max_model_len
        if params is None or (params.max_tokens is not None and len(tokens) + params.max_tokens > max_model_len):
            return None
        while True:
            try:
                return self.engine.add_request(
                    tokens, params, tokenizer=planned.wishes.tokenizer, extras=planned.extras
                )
            except QueueFullError:
                _wait_for_room(self.engine)


def _planner(model: Any, arguments: Mapping[str, Any]) -> tuple[_RowPlanner | None, str | None]:
    """What makes requests of rows, or why `model.generate` has to answer all of them."""
    paged = _engine_model(model)
    if paged is None:
        return None, "the engine cannot run this model"
    for name in _ONLY_GENERATE:
        if arguments.get(name) is not None:
            return None, f"`{name}` was given"
    fields = {name: value for name, value in arguments.items() if name not in _ONLY_GENERATE}
    planner = _RowPlanner(paged, fields)
    reason = planner.obstacle()
    return (planner, None) if reason is None else (None, reason)


class _Recorder:
    """Stands in for a model, to learn how Transformers' pipeline calls its `generate`."""

    def __init__(self, model: Any):
        self._model = model
        self.kwargs: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *, input_ids: torch.Tensor, attention_mask: Any, **kwargs: Any) -> torch.Tensor:
        self.kwargs = kwargs
        return input_ids


def _arguments_of_generate(pipe: PagedTextGenerationPipeline, forward: Mapping[str, Any]) -> dict[str, Any]:
    """What the pipeline hands to `generate` beside a row, whose place one token takes here."""
    recorder, stand_in = _Recorder(pipe.model), copy.copy(pipe)
    stand_in.model = recorder  # type: ignore[assignment]
    stand_in._forward({"input_ids": torch.ones(1, 1, dtype=torch.long), "prompt_text": ""}, **forward)
    return recorder.kwargs


def _drop_frames(error: BaseException | None) -> None:
    """Lets go of the frames behind an error: results that are kept must not keep the rows, or the model, with them."""
    while error is not None:
        error.__traceback__ = None
        # Of an error of the engine, others may hold the cause too.
        error = None if isinstance(error, EngineError) else error.__cause__ or error.__context__


def _engine_model(model: Any) -> Any:
    """The paged model that answers rows, or `None` if only `model.generate` can."""
    if not isinstance(model, PagedGenerationMixin):
        adapter = getattr(model, "active_peft_config", None)
        if adapter is None or adapter.is_prompt_learning:
            return None
        model = model.get_base_model()
    return model if isinstance(model, PagedGenerationMixin) and model._paged_refusal is None else None


def _wait_for_room(engine: Engine) -> None:
    """Runs a step, which takes requests out of the engine's full queue if any can run."""
    state = next(iter(list(engine.live.states.values())), None)
    if state is not None:
        num_steps = engine.stats().num_steps
        engine.wait(state, lambda: engine.stats().num_steps != num_steps)


def _looked_at(inputs: Any) -> tuple[Any, bool]:
    """Inputs, and whether they are one text or chat; looks at the first row of an iterable, as Transformers does."""
    if isinstance(inputs, (str, bytes, Mapping, Chat)) or not _is_iterable(inputs):
        return inputs, True
    if isinstance(inputs, (list, tuple, KeyDataset)):
        is_chat = len(inputs) > 0 and is_valid_message(inputs[0])
        return (Chat(inputs) if is_chat else inputs), is_chat  # type: ignore[arg-type]
    if isinstance(inputs, Iterator):
        for first in inputs:
            rest = itertools.chain([first], inputs)
            return (Chat(list(rest)), True) if is_valid_message(first) else (rest, False)  # type: ignore[arg-type]
    return inputs, False


def _is_iterable(inputs: Any) -> bool:
    return isinstance(inputs, Iterable) or (hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__"))


def _as_input(row: Any) -> str | Chat:
    if isinstance(row, (str, Chat)):
        return row
    if isinstance(row, (list, tuple)) and row and all(map(is_valid_message, row)):
        return Chat(list(row))  # type: ignore[arg-type]
    hint = " Of a dataset, choose a column: `KeyDataset(dataset, name)`." if isinstance(row, Mapping) else ""
    raise InvalidRequestError(
        "A row must be a text, or a chat (a list of messages with `role` and `content`, not empty), got "
        f"{type(row).__name__}.{hint}"
    )


def _paged(model: Any, paged_config: PagedConfig | None) -> Any:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if isinstance(inner, PagedGenerationMixin) and paged_config is None:
        return model
    return AutoPagedModelForCausalLM.from_model(model, paged_config=paged_config)


def _load_tokenizer(name: Any, hub: Mapping[str, Any]) -> Any:
    if not name:
        raise ConfigurationError("`tokenizer` is needed: the model in memory was not loaded from a name or a folder.")
    return transformers.AutoTokenizer.from_pretrained(name, **hub)


def _check_in_flight(value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigurationError(f"`max_in_flight` must be a whole number from 1, got {value!r}.")
