"""`LLM`: offline inference with vLLM's names."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .auto import AutoPagedModelForCausalLM, check_dtype, refuse_reserved
from .configuration import PagedConfig
from .errors import (
    ConfigurationError,
    InvalidEmbedsError,
    InvalidRequestError,
    NotSupportedError,
    UnsupportedModelError,
)
from .generation.outputs import RequestOutput
from .generation.progress import progress
from .generation.request import HiddenStatesWanted, RequestExtras
from .generation.sampling.params import SamplingParams
from .quantization.loading import named_scheme
from .vllm_names import refuse_misspelled, take_vllm_names

_UNBUILT_PROMPT_KEYS = ("multi_modal_data", "mm_processor_kwargs")


class LLM:
    """A model with its tokenizer and a paged engine, for many prompts at once.

    Args:
        model (`str` or `PreTrainedModel`):
            Name on the Hub, a folder, or a paged model in memory.
        tokenizer (`str` or `PreTrainedTokenizerBase`, *optional*):
            By default the model's own.
        dtype (`str` or `torch.dtype`, defaults to `"auto"`):
            Dtype of the weights.
        tensor_parallel_size (`int`, defaults to 1):
            Devices; only 1 so far.
        seed (`int`, *optional*):
            Makes requests without a seed of their own repeatable.
        trust_remote_code (`bool`, defaults to `False`):
            Allow model code from the checkpoint.
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub.
        quantization (`str`, *optional*):
            How the checkpoint is quantized, which it also says itself; or, for a dense one, how it is to be once it is
            loaded: `"int8"`, `"int4"`, `"fp8"` or `"w8a8"`.
        paged_config (`PagedConfig`, *optional*):
            All engine settings at once, instead of the single ones.
        kwargs (`Any`):
            The fields of `PagedConfig` (`gpu_memory_utilization`, `max_model_len`, `max_num_seqs`,
            `max_num_batched_tokens`, `enable_prefix_caching`, `block_size`, ...), and whatever
            `AutoModelForCausalLM.from_pretrained` takes (`gguf_file`, `token`, `device_map`, ...).

    Raises:
        UnsupportedModelError: If the paged engine cannot run this model.
        NotSupportedError: If something was asked for that is not built yet.

    Example:

    ```python
    llm = LLM(model="org/model")
    for output in llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, top_p=0.95)):
        print(output.outputs[0].text)
    ```
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        dtype: Any = "auto",
        tensor_parallel_size: int = 1,
        seed: int | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        quantization: str | None = None,
        paged_config: PagedConfig | None = None,
        **kwargs: Any,
    ):
        config = _paged_config(paged_config, kwargs)
        take_vllm_names(kwargs)
        _take_device(kwargs, isinstance(model, (str, os.PathLike)))
        refuse_misspelled(kwargs, LLM.__init__)
        check_dtype(dtype)
        if isinstance(model, (str, os.PathLike)):
            load = {"trust_remote_code": trust_remote_code, "revision": revision, **kwargs}
            load = {name: value for name, value in load.items() if value is not None}
            if quantization is not None:
                load["quantize"] = named_scheme(model, quantization, load)
            self.model = AutoPagedModelForCausalLM.from_pretrained(
                model, paged_config=config, tensor_parallel_size=tensor_parallel_size, dtype=dtype, **load
            )
            self.tokenizer = load_tokenizer(model if tokenizer is None else tokenizer, load)
        else:
            refuse_reserved(tensor_parallel_size)
            if quantization is not None:
                raise ConfigurationError(
                    f"`quantization` {quantization!r} is for models that are loaded by their names, and this one is in "
                    "memory: leave it out."
                )
            self.model = _page(model, config, dtype, kwargs)
            self.tokenizer = load_tokenizer(model.name_or_path if tokenizer is None else tokenizer, {})
        if self.model._paged_refusal is not None:
            raise UnsupportedModelError(self.model._paged_refusal)
        self.engine = self.model.engine
        self.engine.tokenizer = self.tokenizer
        self._seeds = random.Random(seed) if seed is not None else None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LLM({self.model.name_or_path!r}, {self.engine.plan.model} on {self.engine.plan.device})"

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: Any = None,
        hidden_states: HiddenStatesWanted | bool = False,
        scores: bool = False,
    ) -> list[RequestOutput]:
        """Answers prompts; all are checked before the first is started.

        Args:
            prompts (`Any`):
                A text, a list of texts, token id lists, `{"prompt_token_ids": [...]}`, `{"prompt": "..."}` or
                `{"prompt_embeds": tensor}` (`[tokens, hidden_size]`).
            sampling_params (`SamplingParams` or `Sequence[SamplingParams]`, *optional*):
                One for all, or one for each. Fields that are not given come from the model's
                `generation_config.json`, then from vLLM's defaults.
            use_tqdm (`bool`, defaults to `True`):
                Whether to show a progress bar.
            priority (`Sequence[int]`, *optional*):
                One for each prompt; lower runs earlier under the priority policy.
            lora_request (`Any`, *optional*):
                Reserved; only `None`.
            hidden_states (`HiddenStatesWanted` or `bool`, defaults to `False`):
                Which hidden states the answers carry; `True` means those of all layers and tokens.
            scores (`bool`, defaults to `False`):
                Whether the answers carry the processed scores that each token was chosen from.

        Returns:
            `list[RequestOutput]`: In input order.

        Raises:
            InvalidRequestError: If a prompt or a parameter is wrong; none is started.
            NotSupportedError: If something was asked for that is not built yet.
            EngineError: If a step failed.
        """
        if lora_request is not None:
            raise NotSupportedError("`lora_request` (an adapter per request) is not built yet; load it into the model.")
        parsed = [self._parse(prompt) for prompt in _as_prompts(prompts)]
        params = self._params(sampling_params, len(parsed))
        priorities = [0] * len(parsed) if priority is None else list(priority)
        if len(priorities) != len(parsed):
            raise InvalidRequestError(f"{len(parsed)} prompts were given {len(priorities)} priorities.")
        self.engine.check_all([tokens for _, tokens, _ in parsed], params)
        extras = RequestExtras(hidden_states=_hidden_states_wanted(hidden_states), scores=scores)
        with self.engine.requests() as states:
            for (text, tokens, embeds), param, rank in zip(parsed, params, priorities, strict=True):
                wanted = extras if embeds is None else dataclasses.replace(extras, prompt_embeds=embeds)
                states.append(self.engine.add_request(tokens, param, prompt=text, priority=rank, extras=wanted))
            with progress(use_tqdm, len(states), "Processed prompts", "prompt") as advance:
                for _ in self.engine.as_finished(states):
                    advance()
            return [state.output() for state in states]

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Any = None,
    ) -> list[RequestOutput]:
        """Answers conversations.

        Args:
            messages (`Any`):
                A conversation (a list of messages with `role` and `content`), or a list of conversations.
            sampling_params (`SamplingParams` or `Sequence[SamplingParams]`, *optional*):
                As in `generate`.
            use_tqdm (`bool`, defaults to `True`):
                Whether to show a progress bar.
            chat_template (`str`, *optional*):
                Instead of the tokenizer's own.
            add_generation_prompt (`bool`, defaults to `True`):
                Whether the prompt ends where the assistant's turn begins.
            continue_final_message (`bool`, defaults to `False`):
                Whether the last message is to be continued.
            tools (`list[dict[str, Any]]`, *optional*):
                Handed to the template.
            chat_template_kwargs (`Mapping[str, Any]`, *optional*):
                Handed to the template.
            lora_request (`Any`, *optional*):
                Reserved; only `None`.

        Returns:
            `list[RequestOutput]`: In input order.

        Raises:
            InvalidRequestError: If there is no message or no chat template, or the template refuses the messages.
            NotSupportedError: If a message holds something other than text.
        """
        conversations = _as_conversations(messages)
        if chat_template is None and self.tokenizer.chat_template is None:
            raise InvalidRequestError("The tokenizer has no chat template; pass `chat_template=`, or use `generate`.")
        template = {
            **(chat_template_kwargs or {}),
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        try:
            texts = [self.tokenizer.apply_chat_template(c, tokenize=False, **template) for c in conversations]
        except Exception as error:  # templates refuse in many ways
            raise InvalidRequestError(f"The chat template refused `messages`: {error}") from error
        prompts = [
            {"prompt": text, "prompt_token_ids": self.tokenizer(text, add_special_tokens=False)["input_ids"]}
            for text in texts
        ]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that a request without any gets."""
        return self.engine.resolve(None)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached K/V."""
        self.engine.weights_changed()

    def sleep(self, level: int = 1) -> None:
        """Frees a GPU for others until `wake_up`: the K/V pool goes, and the weights wait in host memory.

        On a CPU the weights stay where they are. `llm.engine.release()` frees the pool alone.

        Args:
            level (`int`, defaults to 1):
                Only 1, which keeps the weights.

        Raises:
            EngineError: If requests are running.
            NotEnoughMemoryError: If the host has no room for the weights.
            NotSupportedError: If another level was asked for.
        """
        self.engine.sleep(level)

    def wake_up(self) -> None:
        """Brings the weights back and takes requests again after `sleep`.

        Raises:
            NotEnoughMemoryError: If the weights have no room on their device any more.
        """
        self.engine.wake_up()

    def close(self) -> None:
        """Frees everything; the object cannot be used afterwards. Safe to call twice."""
        self.engine.close()

    def _params(self, given: Any, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            params = [given or SamplingParams()] * count
        elif isinstance(given, (list, tuple)):
            params = list(given)
        else:
            raise InvalidRequestError(
                f"`sampling_params` must be a SamplingParams or a list of them, got {type(given).__name__}."
            )
        if len(params) != count:
            raise InvalidRequestError(f"{count} prompts were given {len(params)} sampling parameters.")
        if self._seeds is not None:
            params = [p if p.seed is not None else p.replace(seed=self._seeds.getrandbits(63)) for p in params]
        return params

    def _parse(self, prompt: Any) -> tuple[str | None, Any, Any]:
        """Returns a prompt's text, if it has one, its tokens, and its embeddings, if it has them instead."""
        if isinstance(prompt, dict) and prompt.get("prompt_embeds") is not None:
            embeds = prompt["prompt_embeds"]
            if getattr(embeds, "ndim", None) != 2:
                raise InvalidEmbedsError("`prompt_embeds` must be a tensor [tokens, hidden_size].")
            return None, [0] * len(embeds), embeds
        return (*self._parse_tokens(prompt), None)

    def _parse_tokens(self, prompt: Any) -> tuple[str | None, Any]:
        if isinstance(prompt, dict):
            for key in _UNBUILT_PROMPT_KEYS:
                if prompt.get(key) is not None:
                    raise NotSupportedError(f"`{key}` in a prompt is not built yet; only text and token ids are.")
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), prompt["prompt_token_ids"]
            if not isinstance(prompt.get("prompt"), str):
                raise InvalidRequestError(
                    f"A prompt must be a text, a list of token ids, or a dict with `prompt` (a text) or "
                    f"`prompt_token_ids`; this dict has {sorted(prompt)}."
                )
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.tokenizer(prompt)["input_ids"]
        if prompt is None or not hasattr(prompt, "__iter__"):
            raise InvalidRequestError(
                "A prompt must be a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`, got "
                f"{prompt!r}."
            )
        return None, prompt


def _hidden_states_wanted(given: Any) -> HiddenStatesWanted | None:
    if given is None or isinstance(given, bool):
        return HiddenStatesWanted() if given else None
    if not isinstance(given, HiddenStatesWanted):
        raise InvalidRequestError(f"`hidden_states` must be a HiddenStatesWanted or a bool, got {given!r}.")
    return given


def _as_prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not hasattr(prompts, "__iter__"):
        raise InvalidRequestError(
            f"`prompts` must be a text, a list of texts, token ids or dicts, got {type(prompts).__name__}."
        )
    prompts = list(prompts)
    if prompts and all(isinstance(token, int) and not isinstance(token, bool) for token in prompts):
        return [prompts]  # one prompt of token ids
    return prompts


def _as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """Returns a list of conversations whose messages have plain texts."""
    if not messages or not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRequestError(
            f"`messages` must be a list of messages or of such lists, not empty; got {messages!r}."
        )
    conversations = [messages] if isinstance(messages[0], dict) else list(messages)
    for conversation in conversations:
        if not conversation or not all(isinstance(message, dict) and "role" in message for message in conversation):
            raise InvalidRequestError(
                f"A conversation is a list of messages with `role` and `content`, got {conversation!r}."
            )
    return [[_as_text(message) for message in conversation] for conversation in conversations]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise NotSupportedError(f"A message may hold text only so far, not {part!r}.")
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _paged_config(paged_config: PagedConfig | None, kwargs: dict[str, Any]) -> PagedConfig:
    """Takes the engine's settings out of the keyword arguments."""
    names = set(PagedConfig().to_dict())
    given = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if paged_config is None:
        return PagedConfig(**given)
    if given:
        raise InvalidRequestError(f"Give either `paged_config` or the single settings {sorted(given)}, not both.")
    return paged_config


def _page(model: Any, config: PagedConfig, dtype: Any, kwargs: dict[str, Any]) -> Any:
    """Takes a model in memory as it is; one that is not paged, or shall have other settings, is paged."""
    if kwargs:
        raise TypeError(f"LLM got unexpected arguments for a model in memory: {sorted(kwargs)}")
    if dtype not in ("auto", getattr(model, "dtype", None)):
        raise InvalidRequestError(f"`dtype` {dtype} is for loading; a model in memory has {model.dtype} already.")
    if hasattr(model, "_paged_config") and config == PagedConfig():
        return model
    return AutoPagedModelForCausalLM.from_model(model, paged_config=config)


def load_tokenizer(tokenizer: Any, load: Mapping[str, Any]) -> Any:
    """Returns a tokenizer.

    Args:
        tokenizer (`Any`):
            Its name or folder; one that is loaded is returned.
        load (`Mapping[str, Any]`):
            What the model is loaded with; what is for tokenizers as well is taken out of it.
    """
    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer
    if not tokenizer:
        raise InvalidRequestError("`tokenizer` is needed: the model in memory was not loaded from a name or a folder.")
    from transformers import AutoTokenizer

    names = ("revision", "token", "cache_dir", "trust_remote_code", "gguf_file", "subfolder", "local_files_only")
    return AutoTokenizer.from_pretrained(tokenizer, **{name: load[name] for name in names if name in load})


def _take_device(kwargs: dict[str, Any], is_loaded: bool) -> None:
    """Makes Transformers' `device_map` of vLLM's `device`; by default a model is loaded onto a GPU if there is one."""
    device = kwargs.pop("device", None)
    if not is_loaded:
        if device not in (None, "auto"):
            raise NotSupportedError(f"`device` {device!r} is for models that are loaded; move this one with `.to()`.")
        return
    if device in (None, "auto"):
        device = "cuda" if torch.cuda.is_available() else None
    if device is not None and str(device) != "cpu":
        kwargs.setdefault("device_map", device)
