"""`PagedGenerationMixin`: what a paged model does differently from the same model of Transformers."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from .. import compat
from ..configuration import PagedConfig
from ..errors import UnsupportedAttentionError, UnsupportedModelError
from ..modeling.layer_groups import inspect_configuration
from . import assisted, attention
from .batch import run_batch
from .batching_settings import BatchingSettings, close_extra_engine
from .engine import Engine
from .engine_cache import EngineCache
from .hf_generate import plan_generate
from .loop_call import choose_cache, loop_call
from .manager import ContinuousBatchingManager, take_kept_manager
from .outputs import GenerationOutput
from .structured.hf_arguments import StructuredArguments

logger = logging.getLogger(__name__)

# Engines live beside their models, not in them: a copy or a pickle of a model never carries a pool.
_engines: weakref.WeakKeyDictionary[torch.nn.Module, Engine] = weakref.WeakKeyDictionary()
_engines_lock = threading.RLock()
_classes: dict[type, type] = {}
if hasattr(os, "register_at_fork"):  # the thread that holds it may not exist in a forked process
    os.register_at_fork(after_in_child=_engines_lock._at_fork_reinit)  # type: ignore[attr-defined]


class PagedGenerationMixin:
    """Generation on a paged K/V cache, in front of a Transformers model class.

    `generate` and `generate_batch` run on the model's engine; what the engine does not run yet goes through
    Transformers' own loop with a `PagedCache`. A plain `model(...)` is Transformers', untouched.
    """

    _paged_config: PagedConfig
    _paged_refusal: str | None
    _paged_before: str

    @property
    def engine(self) -> Engine:
        """Returns the model's engine, made at the first use.

        Raises:
            UnsupportedModelError: If the paged engine cannot run this model.
        """
        if self._paged_refusal is not None:
            raise UnsupportedModelError(self._paged_refusal)
        with _engines_lock:
            engine = _engines.get(self)  # type: ignore[call-overload]
            if engine is None:
                engine = _engines[self] = Engine(self, self._paged_config)  # type: ignore[index, arg-type]
            return engine

    def generate(  # noqa: PLR0913 - the signature is Transformers'
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Callable | None = None,
        synced_gpus: bool | None = None,
        assistant_model: Any = None,
        streamer: Any = None,
        negative_prompt_ids: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        custom_generate: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Transformers' `generate`: same arguments, same results.

        Greedy search and sampling run on the paged engine, together with whatever else it is running. Everything
        else goes through Transformers' own loop, with a `PagedCache`.

        Args:
            inputs (`torch.Tensor`, *optional*):
                Token ids `[batch, length]`, or one row `[length]`.
            generation_config (`GenerationConfig`, *optional*):
                As in Transformers.
            logits_processor (`LogitsProcessorList`, *optional*):
                As in Transformers.
            stopping_criteria (`StoppingCriteriaList`, *optional*):
                As in Transformers.
            prefix_allowed_tokens_fn (`Callable`, *optional*):
                As in Transformers.
            synced_gpus (`bool`, *optional*):
                As in Transformers.
            assistant_model (`PreTrainedModel`, *optional*):
                As in Transformers.
            streamer (`BaseStreamer`, *optional*):
                As in Transformers.
            negative_prompt_ids (`torch.Tensor`, *optional*):
                As in Transformers.
            negative_prompt_attention_mask (`torch.Tensor`, *optional*):
                As in Transformers.
            custom_generate (`str` or `Callable`, *optional*):
                As in Transformers.
            kwargs (`Any`):
                Fields of `GenerationConfig`, `attention_mask` and other model inputs; and `structured_outputs`
                (`StructuredOutputsParams` or `dict`), the form of the answers, with `tokenizer`.

        Returns:
            `torch.LongTensor` `[batch * num_return_sequences, length]`, or a `GenerateDecoderOnlyOutput` with
            `return_dict_in_generate`.
        """
        inputs = _as_rows(inputs)
        for name in ("input_ids", "attention_mask"):
            if name in kwargs:
                kwargs[name] = _as_rows(kwargs[name])
        if kwargs.get("cache_implementation") == "paged":
            # Transformers would run its own continuous batching, which drops the attention mask.
            logger.info("generate on a paged model is paged; `cache_implementation='paged'` changes nothing.")
            del kwargs["cache_implementation"]
        special = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
            "assistant_model": assistant_model,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            "custom_generate": custom_generate,
        }
        given = {name: value for name, value in special.items() if value is not None}
        structured = StructuredArguments.take(kwargs)
        call = plan_generate(self, inputs, generation_config, given, streamer, kwargs)
        if not isinstance(call, str):
            return (call if structured is None else structured.for_engine(call)).run(self.engine)
        if structured is not None:
            given["logits_processor"] = structured.for_loop(self, generation_config, kwargs, logits_processor)
        logger.debug("generate runs Transformers' own loop: %s.", call)
        with loop_call(_loop_obstacle(given, kwargs)) as loop:
            result = super().generate(  # type: ignore[misc]
                inputs=inputs, generation_config=generation_config, streamer=streamer, **given, **kwargs
            )
            return loop.finish(result)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Where Transformers' `generate` makes its cache, everything else being decided."""
        cache = choose_cache(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        if cache is not None:
            model_kwargs[compat.cache_argument(self)] = cache  # type: ignore[arg-type]
            return None
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    @functools.wraps(GenerationMixin._assisted_decoding)
    def _assisted_decoding(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with assisted.resumed(self, input_ids, kwargs):
            return super()._assisted_decoding(input_ids, *args, **kwargs)  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the model: Transformers' own, but for the calls of a decoding loop whose rows are in the engine."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if isinstance(cache, EngineCache):
            return cache.forward(**kwargs)
        return super().__call__(*args, **assisted.without_known_tokens(kwargs))  # type: ignore[misc]

    def generate_batch(
        self,
        inputs: Sequence[Any],
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = True,
        persistent_manager: bool = False,
        warmup: bool = True,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """Transformers' `generate_batch`: many prompts of any lengths with continuous batching.

        Args:
            inputs (`Sequence[Any]`):
                Token id lists, or, with a tokenizer, texts and chats (lists of messages).
            generation_config (`GenerationConfig` or `Sequence[GenerationConfig]`, *optional*):
                One for all prompts, or one for each. Open fields come from `model.generation_config`, as in
                `generate`; Transformers' own `generate_batch` does not stop at end-of-sequence tokens instead.
            continuous_batching_config (`ContinuousBatchingConfig`, *optional*):
                Transformers' settings; what differs from the model's engine makes one more engine.
            record_timestamps (`bool`, defaults to `False`):
                Whether results carry the time of each token.
            progress_bar (`bool`, defaults to `True`):
                Whether to show one.
            persistent_manager (`bool`, defaults to `False`):
                Whether the pool of an engine that `continuous_batching_config` asked for stays; the model's own does.
            warmup (`bool`, defaults to `True`):
                Accepted for Transformers' sake: there is nothing to warm up.
            tokenizer (`PreTrainedTokenizerBase`, *optional*):
                For texts, chats and stop strings.
            kwargs (`Any`):
                Fields of `GenerationConfig`, and `structured_outputs`, `logprobs`, `prompt_logprobs`, `hidden_states`,
                `scores`, `priority`, `seed`, `logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn`, for
                all prompts.

        Returns:
            `dict[str, GenerationOutput]`: By request id, in input order.

        Raises:
            InvalidRequestError: If a prompt or a parameter is wrong; nothing is started.
            NotSupportedError: If a field asks for something that a batch cannot give.
        """
        own = self.generation_config if generation_config is None else generation_config  # type: ignore[attr-defined]
        settings = BatchingSettings.of(continuous_batching_config or getattr(own, "continuous_batching_config", None))
        try:
            return run_batch(
                self,
                inputs,
                generation_config,
                settings,
                progress_bar=progress_bar,
                record_timestamps=record_timestamps,
                kwargs=kwargs if tokenizer is None else {**kwargs, "tokenizer": tokenizer},
            )
        finally:
            settings.let_go(self, keep_pool=persistent_manager)

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> ContinuousBatchingManager:
        """Transformers' `init_continuous_batching`: a manager for requests that come and go.

        Args:
            generation_config (`GenerationConfig`, *optional*):
                For requests that bring none; open fields come from `model.generation_config`.
            continuous_batching_config (`ContinuousBatchingConfig`, *optional*):
                Transformers' settings; what differs from the model's engine makes one more engine.
            workload_hints (`WorkloadHints`, *optional*):
                Accepted for Transformers' sake.

        Returns:
            `ContinuousBatchingManager`: Not started yet; or the one that was stopped with `keep_for_next_session`.

        Raises:
            UnsupportedModelError: If the paged engine cannot run this model.
        """
        kept = take_kept_manager(self)
        if kept is not None:
            logger.info("The manager of an earlier session is used again; its settings stay.")
            return kept
        return ContinuousBatchingManager(self, generation_config, continuous_batching_config, workload_hints)

    @contextlib.contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: Any = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: Any = None,
    ) -> Iterator[ContinuousBatchingManager]:
        """Transformers' `continuous_batching_context_manager`: a manager that is started, and stopped at the end.

        Args:
            generation_config (`GenerationConfig`, *optional*):
                As for `init_continuous_batching`.
            block (`bool`, defaults to `True`):
                Whether to wait for the manager's thread at the end.
            timeout (`float`, *optional*):
                Seconds to wait at most.
            continuous_batching_config (`ContinuousBatchingConfig`, *optional*):
                As for `init_continuous_batching`.
            persistent_manager (`bool`, defaults to `False`):
                Keep the pool and the manager for the next session.
            warmup (`bool`, defaults to `True`):
                Run two steps first.
            workload_hints (`WorkloadHints`, *optional*):
                Accepted for Transformers' sake.

        Yields:
            `ContinuousBatchingManager`: Running.
        """
        manager = self.init_continuous_batching(generation_config, continuous_batching_config, workload_hints)
        if warmup and not manager.warmed_up:
            manager.warmup()
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Ends the manager that was kept for the next session, if there is one, and frees its pool."""
        manager = take_kept_manager(self)
        if manager is not None:
            manager.destroy()

    def unpaged(self) -> Any:
        """Closes the engine and gives back the model as it was before it was paged.

        Returns:
            `PreTrainedModel`: The same object, of its own class.
        """
        with _engines_lock:
            engine = _engines.pop(self, None)  # type: ignore[call-overload]
        if engine is not None:
            engine.close()
        close_extra_engine(self)
        if self.config._attn_implementation in attention.IMPLEMENTATIONS:  # type: ignore[attr-defined]
            self.set_attn_implementation(self._paged_before)  # type: ignore[attr-defined]
        del self._paged_config, self._paged_refusal, self._paged_before
        self.__class__ = _stock_class(type(self))
        return self

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        """What `to`, `half`, `cuda` and their siblings come down to. An engine is for one dtype and device."""
        before = self.dtype, self.device  # type: ignore[attr-defined]
        super()._apply(fn, recurse)  # type: ignore[misc]
        if (self.dtype, self.device) != before:  # type: ignore[attr-defined]
            with _engines_lock:
                engine = _engines.pop(self, None)  # type: ignore[call-overload]
            if engine is not None:
                engine.close()  # the next use makes another
            close_extra_engine(self)
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _rebuild, (_stock_class(type(self)),), self.__getstate__()


def page_model(model: Any, config: PagedConfig) -> None:
    """Makes a model a paged one, in place.

    Args:
        model (`PreTrainedModel`):
            The model; one that is paged already gets a new engine if the settings differ, and requests of the old
            one end.
        config (`PagedConfig`):
            Settings of the engine.
    """
    if isinstance(model, PagedGenerationMixin):
        engine = _engines.get(model)  # type: ignore[call-overload]
        if config == model._paged_config and not (engine is not None and (engine.is_closed or engine.is_forked)):
            return  # nothing would change, and requests may be running
        model.unpaged()
    before = model.config._attn_implementation
    stock = compat.faithful_attention(model, before)
    if stock != before.removeprefix("paged|"):
        logger.warning(
            "%s: Transformers' %r attention drops the soft cap of this model; plain forwards use %r.",
            type(model).__name__,
            before,
            stock,
        )
    refusal = _prepare_attention(model, stock)
    model.__class__ = paged_class(type(model))
    model._paged_config, model._paged_refusal, model._paged_before = config, refusal, before
    if refusal is None:
        try:
            assert isinstance(model, PagedGenerationMixin), "the class was set above"
            model.engine  # noqa: B018 - a model that the engine cannot run is found out here, not at the first request
        except (UnsupportedModelError, UnsupportedAttentionError) as error:
            if isinstance(error, UnsupportedAttentionError) and config.attn_backend is not None:
                model.unpaged()
                raise  # a backend was asked for by name
            refusal = model._paged_refusal = str(error)
            model.set_attn_implementation(before)
        except BaseException:
            model.unpaged()
            raise
    if refusal is not None:
        logger.warning("%s It runs through Transformers' own loop, with Transformers' own cache.", refusal)


def _prepare_attention(model: Any, stock: str) -> str | None:
    """Sets our attention implementation, or returns why not."""
    attention.register()
    name = attention.paged_name(stock)
    try:
        inspect_configuration(model)
    except UnsupportedModelError as error:
        return str(error)
    if name is None:
        return f"The attention implementation {stock!r} of {type(model).__name__} has no paged counterpart."
    model.set_attn_implementation(name)
    return None


def paged_class(cls: type) -> type:
    """Returns the paged class of a model class: a subclass with the same name and module.

    `save_pretrained` writes the class's name, `pipeline` looks it up, and Transformers greps the module's source.

    Args:
        cls (`type`):
            A class of Transformers, or of remote code.
    """
    if cls not in _classes:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        metaclass: Any = type(cls)
        _classes[cls] = metaclass(cls.__name__, (PagedGenerationMixin, cls), names)
    return _classes[cls]


def _stock_class(cls: type) -> type:
    return next(base for base in cls.__mro__[1:] if base is not PagedGenerationMixin)


def _rebuild(cls: type) -> Any:
    attention.register()
    paged: Any = paged_class(cls)
    return paged.__new__(paged)


def _as_rows(tokens: Any) -> Any:
    return tokens[None] if isinstance(tokens, torch.Tensor) and tokens.ndim == 1 else tokens


def _loop_obstacle(given: dict[str, Any], kwargs: dict[str, Any]) -> str | None:
    """Why the rows of a call of `generate` cannot be in the engine, as far as its arguments say."""
    if given.get("custom_generate") is not None:
        return "`custom_generate` may do anything with its cache"
    if given.get("synced_gpus"):
        return "`synced_gpus` runs rows that have ended"
    if kwargs.get("position_ids") is not None:
        return "`position_ids` were given"
    return None
