"""vLLM's engine settings that have no counterpart here: which change nothing, and which ask for something unbuilt."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable
from typing import Any

from .configuration import PagedConfig
from .errors import ConfigurationError, NotSupportedError

logger = logging.getLogger(__name__)

# Name -> what it asks for, unless it is off (None, False, 0, 1 device).
_UNBUILT = {
    "compilation_config": "a compilation configuration",
    "cpu_offload_gb": "weights offloaded to the CPU",
    "data_parallel_size": "data parallelism",
    "enable_expert_parallel": "expert parallelism",
    "enable_lora": "an adapter per request",
    "hf_overrides": "overrides of the model's configuration",
    "kv_transfer_config": "K/V transfer between engines",
    "limit_mm_per_prompt": "images, audio or video",
    "lora_modules": "an adapter per request",
    "middleware": "middleware of one's own",
    "pipeline_parallel_size": "pipeline parallelism",
    "rope_scaling": "other rotary embeddings than the model's",
    "runner": "pooling and embeddings",
    "speculative_config": "speculative decoding",
    "speculative_model": "speculative decoding",
    "task": "pooling and embeddings",
    "tool_parser_plugin": "tool parsers of one's own",
    "tool_server": "tools that the server calls",
}
# Name -> what the same is called here.
RENAMED = {"cudagraph_capture_sizes": "cuda_graph_sizes"}
# Names that vLLM no longer has, or has no need of here -> what to do instead.
FORMER = {
    "enable_reasoning": "`--reasoning-parser NAME` alone turns reasoning on",
    "guided_decoding_backend": "structured output always runs on llguidance; leave it out",
    "structured_outputs_config": "structured output always runs on llguidance; leave it out",
    "guided_decoding_disable_any_whitespace": "JSON is always written without free white space; leave it out",
    "kv_cache_memory_bytes": "`--num-blocks` or `--cpu-kv-cache-gib` sizes the pool",
    "max_cpu_loras": "an adapter per request is not built yet",
    "max_lora_rank": "an adapter per request is not built yet",
    "max_loras": "an adapter per request is not built yet",
    "max_context_len_to_capture": "`--cuda-graph-sizes` says what is captured",
    "model_impl": "models are always Transformers' own; leave it out",
    "num_lookahead_slots": "speculative decoding is not built yet",
    "num_scheduler_steps": "`--async-scheduling` puts a step together while the one before runs",
    "num_speculative_tokens": "speculative decoding is not built yet",
    "hf_token": "set HF_TOKEN, or run `hf auth login`",
}
_OFF: tuple = (None, False, 0, 1, "auto", "generate", {})  # True equals 1, so it is looked at apart
# Name -> the values with which it asks for nothing that the engine does not do anyway; None stands for any.
_HARMLESS: dict[str, tuple | None] = {
    "disable_async_output_proc": None,
    "disable_custom_all_reduce": None,
    "disable_log_stats": None,
    "distributed_executor_backend": None,
    "enable_sleep_mode": None,
    "download_dir": (None,),
    "load_format": ("auto", "safetensors"),
    "max_seq_len_to_capture": None,
    "preemption_mode": ("recompute",),
    "skip_tokenizer_init": (False,),
    "swap_space": None,
    "tokenizer_mode": ("auto", "slow"),
    "use_v2_block_manager": None,
    "worker_use_ray": (False,),
    # of its server
    "api_server_count": (1,),
    "chat_template_content_format": ("auto", "string"),
    "disable_frontend_multiprocessing": None,
    "enable_log_outputs": (False,),
    "enable_prompt_tokens_details": None,
    "enable_server_load_tracking": None,
    "enable_tokenizer_info_endpoint": None,
    "h11_max_header_count": None,
    "h11_max_incomplete_event_size": None,
}
# Those that are given without a value on a command line.
SWITCHES = frozenset(
    {
        "disable_async_output_proc",
        "disable_custom_all_reduce",
        "disable_frontend_multiprocessing",
        "disable_log_stats",
        "enable_expert_parallel",
        "enable_log_outputs",
        "enable_lora",
        "enable_prompt_tokens_details",
        "enable_server_load_tracking",
        "enable_sleep_mode",
        "enable_tokenizer_info_endpoint",
        "skip_tokenizer_init",
        "use_v2_block_manager",
        "worker_use_ray",
    }
)


def names_of_vllm() -> list[str]:
    """Returns the names that `take_vllm_names` takes."""
    return sorted({*_UNBUILT, *_HARMLESS, *RENAMED})


def take_vllm_names(kwargs: dict[str, Any], shown: Callable[[str], str] = "`{}`".format) -> None:
    """Takes vLLM's settings out of keyword arguments: those that change nothing go, others are refused.

    Args:
        kwargs (`dict[str, Any]`):
            Keyword arguments; changed in place.
        shown (`Callable[[str], str]`, *optional*):
            How messages call a name.

    Raises:
        NotSupportedError: If one asks for something that is not built.
        ConfigurationError: If one has another name here.
    """
    for name in list(kwargs):
        value = kwargs[name]
        if name in RENAMED and value is not None:
            raise ConfigurationError(f"{shown(name)} of vLLM is {shown(RENAMED[name])} here, got {value!r}; give that.")
        if name in RENAMED:
            del kwargs[name]
        elif name in _UNBUILT:
            if value is True or value not in _OFF:
                got = "" if value is True else f", got {value!r}"
                raise NotSupportedError(f"{shown(name)} ({_UNBUILT[name]}) is not built yet{got}; leave it out.")
            logger.info("%s of vLLM asks for nothing and is left aside.", shown(name))
            del kwargs[name]
        elif name in _HARMLESS:
            allowed = _HARMLESS[name]
            if allowed is not None and value not in allowed:
                good = " or ".join(map(repr, allowed))
                raise NotSupportedError(f"{shown(name)} {value!r} is not supported, only {good}; leave it out.")
            logger.info("%s of vLLM changes nothing here and is left aside.", shown(name))
            del kwargs[name]


def refuse_misspelled(kwargs: dict[str, Any], *known: Callable) -> None:
    """Refuses keyword arguments that look like a misspelled setting, before a model's class stumbles over them.

    Args:
        kwargs (`dict[str, Any]`):
            Keyword arguments that no setting of ours has claimed.
        known (`Callable`):
            Functions whose arguments are known names too.

    Raises:
        ConfigurationError: Names the argument and the setting that it resembles.
    """
    names = set(PagedConfig().to_dict()).union(*(inspect.signature(function).parameters for function in known))
    for name in kwargs:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
        if close and name not in names:
            raise ConfigurationError(f"Unknown argument `{name}`; did you mean `{close[0]}`?")
