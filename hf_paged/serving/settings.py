"""`ServerSettings`: everything that can be set about the server, each once.

Flags, their help, keys of `--config` files and environment variables are all made from the fields of this class and
the texts of its docstring; `command_line.py` does that.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Mapping
from typing import Any

from ..configuration import KV_CACHE_DTYPES, PagedConfig
from ..errors import ConfigurationError

_MODEL, _ENGINE, _SCHEDULING = "Model", "Engine and K/V cache", "Scheduling and limits"
_HTTP, _KEYS, _API = "HTTP", "Keys and browsers", "Chat and answers"
_LOGS, _LIFE = "Logs, metrics and traces", "Start and stop"
GROUPS = (_MODEL, _ENGINE, _SCHEDULING, _HTTP, _KEYS, _API, _LOGS, _LIFE)

_MIB = 1 << 20
# `PagedConfig` calls it otherwise, or the server does it itself.
_NOT_PAGED = {"max_queue_size"}


def _in(group: str, default: Any, **how: Any) -> Any:
    """A setting: `flags` are further names of its option, `off` those that switch it off."""
    secret = how.get("secret", False)
    return dataclasses.field(default=default, repr=not secret, metadata={"group": group, **how})


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """What a server is started with. Names and defaults are vLLM's where it has them.

    Args:
        model (`str`, *optional*):
            Name on the Hub, a folder, or a GGUF file.
        demo (`bool`, defaults to `False`):
            Serve the small real model that comes as a Python package; no MODEL is needed.
        tokenizer (`str`, *optional*):
            Name or folder of another tokenizer than the model's own.
        served_model_name (`tuple[str, ...]`, *optional*):
            What clients may call the model; answers carry the first. By default the MODEL as it was given.
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub.
        dtype (`str`, defaults to `"auto"`):
            Dtype of the weights; auto is the checkpoint's own, half is float16, float is float32.
        device (`str`, defaults to `"auto"`):
            Where the model runs: auto (a GPU if there is one), cpu, cuda, cuda:1, ...
        quantization (`str`, *optional*):
            Quantizes a dense checkpoint once it is loaded: `int8`, `int4`, `fp8` or `w8a8`. A checkpoint that is
            quantized says so itself, and needs no flag.
        trust_remote_code (`bool`, defaults to `False`):
            Run model code that comes with the checkpoint.
        seed (`int`, *optional*):
            Makes requests without a seed of their own repeatable.
        max_model_len (`int`, *optional*):
            Prompt and answer together, in tokens; 8k is 8000, 8K is 8192. By default, and at most, the model's own
            limit.
        tensor_parallel_size (`int`, defaults to 1):
            Devices; only 1 so far.
        generation_config (`str`, defaults to `"auto"`):
            Where sampling defaults come from: auto (the model's generation_config.json) or vllm (plain sampling).
        override_generation_config (`dict`, *optional*):
            Sampling defaults as a JSON object, such as '{"temperature": 0.6}'.
        block_size (`int`, *optional*):
            Tokens per K/V block. 16 unless the attention backend needs more.
        num_blocks (`int`, *optional*):
            Blocks in the pool. Overrides --gpu-memory-utilization and --cpu-kv-cache-gib.
        gpu_memory_utilization (`float`, defaults to 0.9):
            Share of a GPU's memory that weights, activations and the K/V pool may use together.
        cpu_kv_cache_gib (`float`, *optional*):
            GiB of K/V pool on a CPU. By default what the requests can need, at most a quarter of the free memory.
        kv_cache_dtype (`str`, defaults to `"auto"`):
            auto stores K/V in the model's dtype, the others a byte for each number and a float16 scale for each token
            and head: about twice the tokens per GiB. fp8 is fp8_e4m3.
        enable_prefix_caching (`bool`, defaults to `True`):
            Keep the blocks of finished requests and reuse them for prompts with the same beginning.
        attn_backend (`str`, *optional*):
            An attention backend by name; by default the fastest that can do what the model needs.
        enforce_eager (`bool`, defaults to `False`):
            Never capture graphs or compile.
        cuda_graph_sizes (`tuple[int, ...]`, *optional*):
            Numbers of requests for which decoding steps are captured as CUDA graphs.
        batch_invariant (`bool`, defaults to `False`):
            Answers do not depend on which other requests run beside them. Slower.
        async_scheduling (`bool`, *optional*):
            Put a step together while the device is busy with the one before. By default on GPUs only.
        compile_parts (`bool`, defaults to `False`):
            Compile what no native operator does with torch.compile.
        max_num_seqs (`int`, *optional*):
            Requests that run at the same time.
        max_num_batched_tokens (`int`, *optional*):
            Tokens computed in one step over all requests (the token budget).
        enable_chunked_prefill (`bool`, defaults to `True`):
            Compute long prompts in several steps, so that they do not stop the other requests.
        scheduling_policy (`str`, defaults to `"fcfs"`):
            fcfs (first come, first served) or priority (requests carry one; lower runs earlier).
        max_num_queued_reqs (`int`, *optional*):
            Waiting requests beyond which new ones are answered with 503. No limit by default.
        max_num_queued_tokens (`int`, *optional*):
            Prompt tokens of waiting requests beyond which new ones are answered with 503. No limit by default.
        request_timeout (`float`, *optional*):
            Seconds that a request may take before it is aborted; requests may ask for less. No limit by default.
        max_logprobs (`int`, defaults to 20):
            Log-probabilities that a request may ask for at each position; at most 20.
        host (`str`, defaults to `"127.0.0.1"`):
            Address to listen on. 0.0.0.0 or :: makes the server reachable from other machines: set a key.
        port (`int`, defaults to 8000):
            Port to listen on; 0 takes a free one and prints it.
        uds (`str`, *optional*):
            Listen on a Unix domain socket instead.
        backlog (`int`, defaults to 2048):
            Connections that may wait to be accepted.
        root_path (`str`, defaults to `""`):
            Prefix that a proxy in front strips from paths.
        ssl_keyfile (`str`, *optional*):
            Key for TLS.
        ssl_certfile (`str`, *optional*):
            Certificate for TLS.
        timeout_keep_alive (`float`, defaults to 5.0):
            Seconds that a connection may stay open without a request.
        read_timeout (`float`, defaults to 60.0):
            Seconds that a client may take to send a request's headers, and again its body (plus 1 s per 16 KiB).
        max_body_mib (`int`, defaults to 32):
            Largest request body, in MiB.
        enable_request_id_headers (`bool`, defaults to `False`):
            Answer with the request's id in X-Request-Id.
        disable_fastapi_docs (`bool`, defaults to `False`):
            Leave out /docs, /redoc and /openapi.json.
        page (`bool`, defaults to `True`):
            The page at /: a chat, and a live view of the engine (/engine/events).
        api_key (`tuple[str, ...]`, *optional*):
            Keys, of which requests must carry one (Authorization: Bearer, or x-api-key). Several, and repeatable.
            Better given in HF_PAGED_API_KEY or a file: other users may see command lines for a moment.
        api_key_file (`str`, *optional*):
            File with keys, one a line.
        allowed_origins (`tuple[str, ...]`, *optional*):
            Web pages, by origin, that may read answers; * for all. By default pages of this machine (localhost).
        allowed_methods (`tuple[str, ...]`, defaults to `("*",)`):
            Methods that web pages may use.
        allowed_headers (`tuple[str, ...]`, defaults to `("*",)`):
            Headers that web pages may send.
        allow_credentials (`bool`, defaults to `False`):
            Whether web pages may send cookies.
        allowed_hosts (`tuple[str, ...]`, *optional*):
            Host names that requests may be addressed to; *.example.org matches subdomains. By default all.
        chat_template (`str`, *optional*):
            A Jinja template, or a file with one, instead of the tokenizer's own.
        trust_request_chat_template (`bool`, defaults to `False`):
            Run chat templates that come with requests (sandboxed).
        default_chat_template_kwargs (`dict`, *optional*):
            Arguments for the chat template as a JSON object, such as '{"enable_thinking": false}'.
        response_role (`str`, defaults to `"assistant"`):
            Role of the messages that the server answers with.
        enable_auto_tool_choice (`bool`, defaults to `False`):
            Let the model decide whether it calls tools; needs --tool-call-parser.
        tool_call_parser (`str`, *optional*):
            How the model writes calls of tools: hermes, llama3_json, pythonic, ...; auto looks at the template.
        reasoning_parser (`str`, *optional*):
            How the model marks its thinking: deepseek_r1, qwen3, ...; auto looks at the template.
        sse_keep_alive_interval (`float`, defaults to 15.0):
            Seconds of silence after which a stream gets a comment, so that proxies keep it open; 0 for never.
        stream_on_accept (`bool`, defaults to `False`):
            Stream to clients that do not say `stream` but accept text/event-stream.
        enable_force_include_usage (`bool`, defaults to `False`):
            End every stream with the usage, as if all requests asked for it.
        return_tokens_as_token_ids (`bool`, defaults to `False`):
            Name tokens `token_id:N` in log-probabilities.
        enable_log_requests (`bool`, defaults to `False`):
            Log each request as it comes: its id, its parameters and how long its prompt is.
        enable_log_prompts (`bool`, defaults to `False`):
            Log prompts, too; needs --enable-log-requests.
        max_log_len (`int`, *optional*):
            Characters of a prompt that are logged at most.
        disable_uvicorn_access_log (`bool`, defaults to `False`):
            Do not log a line for each answered request.
        disable_log_stats (`bool`, defaults to `False`):
            Do not log what the engine does every ten seconds.
        log_format (`str`, defaults to `"text"`):
            text or json (an object a line).
        log_level (`str`, defaults to `"info"`):
            debug, info, warning, error or critical.
        disable_access_log_for_endpoints (`tuple[str, ...]`, *optional*):
            Further paths whose requests are not logged, beside /health, /metrics and the other ones of probes.
        vllm_metric_names (`bool`, defaults to `True`):
            Give each metric under its vllm:* name as well.
        otlp_traces_endpoint (`str`, *optional*):
            URL of an OpenTelemetry collector that spans are sent to.
        shutdown_timeout (`float`, defaults to 0.0):
            Seconds for running requests to finish after SIGTERM or Ctrl-C; then they are aborted with an error. New
            ones are answered with 503 meanwhile.
        stall_timeout (`float`, defaults to 300.0):
            Seconds after which a step of the engine that does not end makes /health 503.

    Raises:
        ConfigurationError: If a value is impossible, or two contradict each other.
        NotSupportedError: If a value is understood but not built yet.
    """

    model: str | None = _in(_MODEL, None, metavar="MODEL")
    demo: bool = _in(_MODEL, False)
    tokenizer: str | None = _in(_MODEL, None)
    served_model_name: tuple[str, ...] | None = _in(_MODEL, None, metavar="NAME")
    revision: str | None = _in(_MODEL, None)
    dtype: str = _in(_MODEL, "auto", choices=("auto", "half", "float16", "bfloat16", "float", "float32", "float64"))
    device: str = _in(_MODEL, "auto")
    quantization: str | None = _in(_MODEL, None, flags=("-q",), metavar="NAME")
    trust_remote_code: bool = _in(_MODEL, False)
    seed: int | None = _in(_MODEL, None)
    max_model_len: int | None = _in(_MODEL, None, size=True, metavar="TOKENS")
    tensor_parallel_size: int = _in(_MODEL, 1, flags=("-tp",), metavar="N")
    generation_config: str = _in(_MODEL, "auto", choices=("auto", "vllm"))
    override_generation_config: dict[str, Any] | None = _in(_MODEL, None, metavar="JSON")

    block_size: int | None = _in(_ENGINE, None, metavar="TOKENS")
    num_blocks: int | None = _in(_ENGINE, None, flags=("--num-gpu-blocks-override",), metavar="N")
    gpu_memory_utilization: float = _in(_ENGINE, 0.9, metavar="SHARE")
    cpu_kv_cache_gib: float | None = _in(_ENGINE, None, metavar="GIB")
    kv_cache_dtype: str = _in(_ENGINE, "auto", choices=KV_CACHE_DTYPES)
    enable_prefix_caching: bool = _in(_ENGINE, True)
    attn_backend: str | None = _in(_ENGINE, None, flags=("--attention-backend",), metavar="NAME")
    enforce_eager: bool = _in(_ENGINE, False)
    cuda_graph_sizes: tuple[int, ...] | None = _in(_ENGINE, None, metavar="N")
    batch_invariant: bool = _in(_ENGINE, False)
    async_scheduling: bool | None = _in(_ENGINE, None)
    compile_parts: bool = _in(_ENGINE, False)

    max_num_seqs: int | None = _in(_SCHEDULING, None, metavar="N")
    max_num_batched_tokens: int | None = _in(_SCHEDULING, None, size=True, metavar="TOKENS")
    enable_chunked_prefill: bool = _in(_SCHEDULING, True)
    scheduling_policy: str = _in(_SCHEDULING, "fcfs", choices=("fcfs", "priority"))
    max_num_queued_reqs: int | None = _in(_SCHEDULING, None, flags=("--max-queue-size",), metavar="N")
    max_num_queued_tokens: int | None = _in(_SCHEDULING, None, size=True, metavar="TOKENS")
    request_timeout: float | None = _in(_SCHEDULING, None, metavar="SECONDS")
    max_logprobs: int = _in(_SCHEDULING, 20, metavar="N")

    host: str = _in(_HTTP, "127.0.0.1")
    port: int = _in(_HTTP, 8000)
    uds: str | None = _in(_HTTP, None, metavar="PATH")
    backlog: int = _in(_HTTP, 2048, metavar="N")
    root_path: str = _in(_HTTP, "", metavar="PATH")
    ssl_keyfile: str | None = _in(_HTTP, None, metavar="FILE")
    ssl_certfile: str | None = _in(_HTTP, None, metavar="FILE")
    timeout_keep_alive: float = _in(_HTTP, 5.0, metavar="SECONDS")
    read_timeout: float = _in(_HTTP, 60.0, metavar="SECONDS")
    max_body_mib: int = _in(_HTTP, 32, metavar="MIB")
    enable_request_id_headers: bool = _in(_HTTP, False)
    disable_fastapi_docs: bool = _in(_HTTP, False)
    page: bool = _in(_HTTP, True)

    api_key: tuple[str, ...] | None = _in(_KEYS, None, secret=True, metavar="KEY")
    api_key_file: str | None = _in(_KEYS, None, metavar="FILE")
    allowed_origins: tuple[str, ...] | None = _in(_KEYS, None, metavar="ORIGIN")
    allowed_methods: tuple[str, ...] = _in(_KEYS, ("*",), metavar="METHOD")
    allowed_headers: tuple[str, ...] = _in(_KEYS, ("*",), metavar="HEADER")
    allow_credentials: bool = _in(_KEYS, False)
    allowed_hosts: tuple[str, ...] | None = _in(_KEYS, None, metavar="HOST")

    chat_template: str | None = _in(_API, None, metavar="FILE_OR_TEXT")
    trust_request_chat_template: bool = _in(_API, False)
    default_chat_template_kwargs: dict[str, Any] | None = _in(_API, None, metavar="JSON")
    response_role: str = _in(_API, "assistant", metavar="ROLE")
    enable_auto_tool_choice: bool = _in(_API, False)
    tool_call_parser: str | None = _in(_API, None, metavar="NAME")
    reasoning_parser: str | None = _in(_API, None, metavar="NAME")
    sse_keep_alive_interval: float = _in(_API, 15.0, metavar="SECONDS")
    stream_on_accept: bool = _in(_API, False)
    enable_force_include_usage: bool = _in(_API, False)
    return_tokens_as_token_ids: bool = _in(_API, False)

    enable_log_requests: bool = _in(_LOGS, False, off=("--disable-log-requests",))
    enable_log_prompts: bool = _in(_LOGS, False)
    max_log_len: int | None = _in(_LOGS, None, metavar="N")
    disable_uvicorn_access_log: bool = _in(_LOGS, False)
    disable_log_stats: bool = _in(_LOGS, False)
    log_format: str = _in(_LOGS, "text", choices=("text", "json"))
    log_level: str = _in(
        _LOGS, "info", flags=("--uvicorn-log-level",), choices=("debug", "info", "warning", "error", "critical")
    )
    disable_access_log_for_endpoints: tuple[str, ...] | None = _in(_LOGS, None, metavar="PATH")
    vllm_metric_names: bool = _in(_LOGS, True)
    otlp_traces_endpoint: str | None = _in(_LOGS, None, metavar="URL")

    shutdown_timeout: float = _in(_LIFE, 0.0, metavar="SECONDS")
    stall_timeout: float = _in(_LIFE, 300.0, metavar="SECONDS")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            choices = field.metadata.get("choices")
            if choices and getattr(self, field.name) not in choices:
                raise ConfigurationError(
                    f"`{flag(field.name)}` must be one of {', '.join(choices)}, got {getattr(self, field.name)!r}."
                )
        _check_between("port", self.port, 0, 65535)
        for name in ("backlog", "max_body_mib"):
            _check_between(name, getattr(self, name), 1, 1 << 20)
        _check_between("max_logprobs", self.max_logprobs, 0, 20)
        for name in ("max_num_queued_reqs", "max_num_queued_tokens", "tensor_parallel_size", "max_log_len"):
            if getattr(self, name) is not None:
                _check_between(name, getattr(self, name), 1, 1 << 40)
        for name in ("sse_keep_alive_interval", "shutdown_timeout"):
            _check_between(name, getattr(self, name), 0, 1e9)
        for name in ("timeout_keep_alive", "read_timeout", "stall_timeout", "request_timeout"):
            if getattr(self, name) is not None:
                _check_between(name, getattr(self, name), 0.001, 1e9)
        self._check_pairs()
        self.paged_config()

    def _check_pairs(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigurationError("TLS needs both `--ssl-keyfile` and `--ssl-certfile`.")
        if self.enable_log_prompts and not self.enable_log_requests:
            raise ConfigurationError("`--enable-log-prompts` needs `--enable-log-requests`.")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigurationError("`--enable-auto-tool-choice` needs `--tool-call-parser NAME`.")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_key or ()):
            raise ConfigurationError("`--api-key` must be printable ASCII without spaces, and not empty.")
        if self.demo and self.model is not None:
            raise ConfigurationError(f"Give either a MODEL ({self.model!r}) or `--demo`, not both.")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigurationError(
                f"`--root-path` must begin with a slash and not end with one, got {self.root_path!r}."
            )

    @property
    def max_body_bytes(self) -> int:
        """Returns the size of the largest request body."""
        return self.max_body_mib * _MIB

    def paged_config(self) -> PagedConfig:
        """Returns the engine's settings.

        Raises:
            ConfigurationError: If one is impossible.
            NotSupportedError: If one is not built yet.
        """
        names = {field.name for field in dataclasses.fields(PagedConfig)} - _NOT_PAGED
        return PagedConfig(**{name: getattr(self, name) for name in names})

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings but the secret ones as plain values, for JSON; a demo's model is named like others."""
        hidden = {"demo", *(field.name for field in dataclasses.fields(self) if field.metadata.get("secret"))}
        shown = [field.name for field in dataclasses.fields(self) if field.name not in hidden]
        return {name: getattr(self, name) for name in shown}


def flag(name: str) -> str:
    """Returns the option of a setting.

    Args:
        name (`str`):
            Of the field.
    """
    return "--" + name.replace("_", "-")


def value_type(name: str) -> Any:
    """Returns the type of a setting's value, without `None`.

    Args:
        name (`str`):
            Of the field.
    """
    hint = _type_hints()[name]
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    return options[0] if type(None) in typing.get_args(hint) else hint


@functools.cache
def _type_hints() -> dict[str, Any]:
    return typing.get_type_hints(ServerSettings)


def help_texts() -> Mapping[str, str]:
    """Returns what each setting is for, from the docstring of `ServerSettings`."""
    doc = inspect.getdoc(ServerSettings) or ""
    found = re.findall(r"^ {4}(\w+) \(.*\):\n((?: {8}.*\n)+)", doc, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _check_between(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        limits = f"at least {low:g}" if high >= 1e9 else f"from {low:g} to {high:g}"
        raise ConfigurationError(f"`{flag(name)}` must be a number {limits}, got {value!r}.")
