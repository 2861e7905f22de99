"""Everything that differs between the versions of Transformers we support (5.17 to 5.x), and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .errors import InvalidRequestError

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "accepts",
    "cache_argument",
    "cache_layer_tensors",
    "cache_output_field",
    "causal_model_class",
    "checkpointing_drops_cache",
    "eager_attention",
    "faithful_attention",
    "mask_function",
    "model_output_cache_field",
    "output_cache",
    "serve_command",
    "served_through",
    "stock_attention",
]


@functools.lru_cache(maxsize=256)
def _cache_argument_of_class(cls: type) -> str:
    forward = cls.forward  # type: ignore[attr-defined]
    parameters = inspect.signature(forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def cache_argument(model: torch.nn.Module) -> str:
    """Returns the name of the forward argument that takes the K/V cache.

    Transformers 5.24 renamed `past_key_values` to `cache`; remote code keeps the old name.

    Args:
        model (`torch.nn.Module`):
            A causal language model.
    """
    cls: Any = type(model)  # Any: the type stubs of torch say that classes of modules are not hashable
    return _cache_argument_of_class(cls)


def accepts(model: torch.nn.Module, argument: str) -> bool:
    """Returns whether a model's forward has an argument of that name.

    Args:
        model (`torch.nn.Module`):
            A causal language model.
        argument (`str`):
            The argument's name.
    """
    return argument in inspect.signature(type(model).forward).parameters


def output_cache(output: Any) -> Any:
    """Returns the cache of a model output under either of its names.

    Args:
        output (`ModelOutput`):
            What a model's forward returned.
    """
    for name in ("cache", "past_key_values"):
        if name in output:
            return output[name]
    return None


def _cache_field(output_class: Any) -> str:
    names = {field.name for field in dataclasses.fields(output_class)}
    return "cache" if "cache" in names else "past_key_values"


def cache_output_field() -> str:
    """Returns the name under which `generate`'s output carries the cache."""
    return _cache_field(GenerateDecoderOnlyOutput)


def model_output_cache_field() -> str:
    """Returns the name under which a model's output carries the cache."""
    return _cache_field(CausalLMOutputWithPast)


def causal_model_class(config: Any) -> type | None:
    """Returns the class that `AutoModelForCausalLM` makes of a configuration, or `None` if it does not know it.

    Args:
        config (`PreTrainedConfig`):
            A configuration.
    """
    mapping: Any = AutoModelForCausalLM._model_mapping
    return mapping.get(type(config), None)


def cache_layer_tensors(cache: Any, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the keys and values of one layer of a stock cache, or `None` if that layer has none.

    Args:
        cache (`transformers.Cache`):
            A cache that a forward has filled.
        layer_idx (`int`):
            The layer's index.
    """
    layer = cache.layers[layer_idx]
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
        return None
    return keys, values


def eager_attention(module: torch.nn.Module) -> Callable:
    """Returns the eager attention function of the file that defines a module.

    Transformers hands it to `get_interface` as the default, where an attention function cannot see it.

    Args:
        module (`torch.nn.Module`):
            The attention module that is being run.

    Raises:
        KeyError: If neither the module's file nor a base class's defines one.
    """
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise KeyError(f"{type(module).__module__} has no `eager_attention_forward`")


def stock_attention(name: str, module: torch.nn.Module) -> Callable:
    """Returns the attention function that Transformers would run under an implementation's name.

    Args:
        name (`str`):
            `"sdpa"`, `"eager"`, ...
        module (`torch.nn.Module`):
            The attention module that is being run.
    """
    if name == "eager":
        return eager_attention(module)
    return ALL_ATTENTION_FUNCTIONS[name]


def checkpointing_drops_cache(model: torch.nn.Module) -> bool:
    """Returns whether layers in training mode, with activation checkpointing, ignore a cache that they are given.

    They all did until checkpointing moved from `__call__` into `forward`; since then only when gradients are wanted.

    Args:
        model (`torch.nn.Module`):
            The model.
    """
    if not model.training or "__call__" not in vars(GradientCheckpointingLayer):
        return False
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def faithful_attention(model: Any, name: str) -> str:
    """Returns the stock attention that computes what the model's own code asks for.

    Before Transformers 5.24 SDPA accepts a soft cap (Gemma 2) and silently leaves it out. `"paged|sdpa"` is how a model
    is loaded for Transformers' own continuous batching; without that, it computes what `"sdpa"` does.

    Args:
        model (`PreTrainedModel`):
            The model.
        name (`str`):
            The implementation that it has.
    """
    name = name.removeprefix("paged|")
    config = model.config.get_text_config(decoder=True)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "eager" if capped and name == "sdpa" else name


def mask_function(name: str) -> Callable:
    """Returns Transformers' mask function of an implementation.

    Args:
        name (`str`):
            `"sdpa"`, `"eager"`, ...
    """
    return ALL_MASK_ATTENTION_FUNCTIONS[name]


def serve_command() -> type | None:
    """Returns the class behind `transformers serve`, or `None` where its packages are missing."""
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        return None
    from transformers.cli.serve import Serve

    return Serve


@contextlib.contextmanager
def served_through(page: Callable[[Any], Any], prepare: Callable[[Any], object]) -> Iterator[None]:
    """Makes servers of `transformers serve` that are built meanwhile run models of ours.

    Transformers' command gives its manager the sampling settings of the first request alone. Here each request brings
    its own configuration and tokenizer; `init_continuous_batching` must return a manager that takes them.

    Args:
        page (`Callable[[PreTrainedModel], PreTrainedModel]`):
            Makes a paged model of one that was loaded.
        prepare (`Callable[[FastAPI], object]`):
            Called with each server's application.
    """
    from transformers.cli.serving import model_manager, server, utils

    class PagedModelManager(model_manager.ModelManager):
        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            return page(super()._load_model(*args, **kwargs))

    build = server.build_server

    def build_server(*args: Any, **kwargs: Any) -> Any:
        for handler in (*args, *kwargs.values()):
            if isinstance(handler, utils.BaseHandler):
                _blame_client(handler)
        app = build(*args, **kwargs)
        app.add_middleware(_ShowsConnection)
        prepare(app)
        return app

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (model_manager, "ModelManager", PagedModelManager),
            (utils, "GenerationState", _paged_generation_state()),
            (server, "build_server", build_server),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


_receive: contextvars.ContextVar[Callable[[], Any]] = contextvars.ContextVar("hf_paged_serve_receive")


class _ShowsConnection:
    """Middleware that lets those who answer a request see whether its client is still there."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Callable[[], Any], send: Any) -> None:
        _receive.set(receive)
        await self._app(scope, receive, send)


async def _wait_while_connected(task: asyncio.Future) -> None:
    """Waits for a task that answers a request, whose body was read, or for the end of the client's connection."""

    async def leave() -> None:
        while (await _receive.get()())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(leave())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()


def _blame_client(handler: Any) -> None:
    """Makes a handler of Transformers' server say of a field it cannot read that the request is wrong."""

    def readable(name: str) -> None:
        read = getattr(handler, name, None)
        if read is None:
            return

        @functools.wraps(read)
        def checked(*args: Any, **kwargs: Any) -> Any:
            with _invalid_request():
                return read(*args, **kwargs)

        setattr(handler, name, checked)

    validate = handler._validate_request

    def validate_request(body: dict) -> None:
        validate(body)
        messages = body.get("messages")
        takes_messages = "messages" in getattr(handler._valid_params_class, "__mutable_keys__", ())
        if takes_messages and not (messages and isinstance(messages, list)):
            raise InvalidRequestError(f"`messages` must be a list of at least one message, got {messages!r}.")

    handler._validate_request = validate_request
    for name in ("_build_generation_config", "get_processor_inputs_from_messages"):
        readable(name)


_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


@contextlib.contextmanager
def _invalid_request(faults: tuple[type[Exception], ...] = _UNREADABLE) -> Iterator[None]:
    """What Transformers raises over a field of a request is the request's fault."""
    try:
        yield
    except InvalidRequestError:
        raise
    except faults as error:
        raise InvalidRequestError(f"A field of the request makes no sense: {type(error).__name__}: {error}") from error


def _paged_generation_state() -> type:
    from fastapi import HTTPException
    from transformers.cli.serving import utils

    class PagedGenerateManager(utils.CBGenerateManager):
        def init_cb(self, model: Any, gen_config: Any) -> None:
            super().init_cb(model, gen_config)
            manager: Any = self._cb
            self._cb = manager if isinstance(manager, _PerRequest) else _PerRequest(manager)  # type: ignore[assignment]

        def generate_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
        ) -> Any:
            with _PerRequest.settings(gen_config, processor):
                return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
        ) -> Any:
            with _PerRequest.settings(gen_config, processor):
                answer = super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)
                task = asyncio.ensure_future(answer)
            try:
                await _wait_while_connected(task)
            finally:
                if not task.done():
                    self._cb.cancel_request(args[0] if args else kwargs["request_id"])  # type: ignore[union-attr]
                    task.cancel()
            if not task.done():
                raise HTTPException(499, "The client closed the connection.")
            return task.result()

    class PagedGenerationState(utils.GenerationState):
        def use_continuous_batching(self, model: Any, modality: Any) -> bool:
            refused = getattr(model, "_paged_refusal", None) is not None
            return not refused and super().use_continuous_batching(model, modality)

        def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
            manager = super().get_manager(model_id, use_cb=use_cb)
            if use_cb and not isinstance(manager, PagedGenerateManager):
                manager = self._cb_manager = PagedGenerateManager(self._cb_config)
            return manager

    return PagedGenerationState


class _PerRequest:
    """A manager that gives each request of `transformers serve` the configuration that came with it."""

    _settings: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("hf_paged_serve_settings")

    def __init__(self, manager: Any):
        self._manager = manager

    @classmethod
    @contextlib.contextmanager
    def settings(cls, generation_config: Any, processor: Any) -> Iterator[None]:
        """What requests that are added meanwhile, by the calling task, bring along."""
        if isinstance(generation_config.sequence_bias, dict):  # `logit_bias`, whose whole numbers JSON makes ints
            with _invalid_request():
                bias = {tokens: float(value) for tokens, value in generation_config.sequence_bias.items()}
            generation_config.sequence_bias = bias
        tokenizer = getattr(processor, "tokenizer", processor)
        token = cls._settings.set({"generation_config": generation_config, "tokenizer": tokenizer})
        try:
            yield
        finally:
            cls._settings.reset(token)

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        with _invalid_request((ValueError, TypeError)):  # what Transformers' processors say of a setting
            return self._manager.add_request(*args, **{**self._settings.get(), **kwargs})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)
