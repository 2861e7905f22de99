"""What a user may ask of the paged engine. What was decided is in `generation/plan.py`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from .errors import ConfigurationError

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8")
_SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "batch_invariant", "compile_parts")


@dataclasses.dataclass(frozen=True)
class PagedConfig:
    """Settings of the paged engine of one model. `None` means: read from the machine and the model.

    Limits that do not fit together are no error at load: they become what fits, with one log line
    (`hf-paged info MODEL` prints the result).

    Args:
        block_size (`int`, *optional*):
            Tokens per K/V block. 16 on a CPU and on a GPU unless the backend needs more.
        num_blocks (`int`, *optional*):
            Blocks in the pool. Overrides `gpu_memory_utilization` and `cpu_kv_cache_gib`.
        gpu_memory_utilization (`float`, defaults to 0.9):
            Share of an accelerator's memory that weights, activations and the K/V pool may use together.
        cpu_kv_cache_gib (`float`, *optional*):
            GiB of K/V pool on a CPU. By default what `max_num_seqs` requests of `max_model_len` tokens need,
            at most a quarter of the memory that is free.
        max_num_seqs (`int`, *optional*):
            Requests that run at the same time.
        max_num_batched_tokens (`int`, *optional*):
            Tokens computed in one step over all requests (the token budget): 1,024 on a CPU by default, 8,192 on
            an accelerator.
        max_model_len (`int`, *optional*):
            Prompt and answer together, in tokens. By default the model's own limit.
        kv_cache_dtype (`str`, defaults to `"auto"`):
            `"auto"` stores K/V in the model's dtype. `"int8"`, `"fp8_e4m3"` (or `"fp8"`) and `"fp8_e5m2"` store a byte
            for each number, and a float16 scale for each token and head: about twice the tokens per GiB.
        enable_prefix_caching (`bool`, defaults to `True`):
            Keep the blocks of finished requests and reuse them for prompts with the same beginning.
        enable_chunked_prefill (`bool`, defaults to `True`):
            Compute long prompts in several steps, so that they do not stop the other requests.
        attn_backend (`str`, *optional*):
            Name of an attention backend; by default the fastest that can do what the model needs.
        scheduling_policy (`str`, defaults to `"fcfs"`):
            `"fcfs"` (first come, first served) or `"priority"`.
        max_queue_size (`int`, *optional*):
            Waiting requests beyond which new ones are refused with `QueueFullError`.
        enforce_eager (`bool`, defaults to `False`):
            Never capture graphs or compile.
        cuda_graph_sizes (`tuple[int, ...]`, *optional*):
            Numbers of requests for which decoding steps are captured as CUDA graphs; steps of other numbers are padded
            to the next. By default powers of two up to 8, then ever fewer up to `max_num_seqs`. Empty for none.
        batch_invariant (`bool`, defaults to `False`):
            A request's logits do not depend on which other requests run beside it. Slower.
        async_scheduling (`bool`, *optional*):
            Put a step together while the device is still busy with the one before, so that it never waits for the
            CPU. Same results. By default on CUDA devices only. Steps with requests that need to see each token first
            (processors, criteria, penalties, log-probabilities, hidden states, beams) wait for it nevertheless.
        compile_parts (`bool`, defaults to `False`):
            Compile what layers do beside attention, and no native operator does (norms, MLPs, experts), with
            `torch.compile`, in engine steps only. Results differ by rounding. The first steps take as long as that
            takes, seconds to minutes; what cannot be compiled runs as it is, with one warning.

    Raises:
        ConfigurationError: If a value is impossible whatever the model.
    """

    block_size: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gib: float | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    attn_backend: str | None = None
    scheduling_policy: str = "fcfs"
    max_queue_size: int | None = None
    enforce_eager: bool = False
    cuda_graph_sizes: tuple[int, ...] | None = None
    batch_invariant: bool = False
    async_scheduling: bool | None = None
    compile_parts: bool = False

    def __post_init__(self):
        for name in ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            _check_count(name, getattr(self, name))
        _check_count("max_queue_size", self.max_queue_size)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigurationError(
                f"`gpu_memory_utilization` must be a share in (0, 1], got {share!r}; 0.9 is the usual value."
            )
        gib = self.cpu_kv_cache_gib
        if gib is not None and (isinstance(gib, bool) or not isinstance(gib, (int, float)) or not 0 < gib < math.inf):
            raise ConfigurationError(f"`cpu_kv_cache_gib` must be a positive number of GiB, got {gib!r}.")
        self._check_switches()
        if not isinstance(self.async_scheduling, bool | None):
            raise ConfigurationError(
                f"`async_scheduling` must be True, False, or None for what suits the device, got "
                f"{self.async_scheduling!r}."
            )
        object.__setattr__(self, "cuda_graph_sizes", _checked_sizes(self.cuda_graph_sizes))
        for name in ("kv_cache_dtype", "scheduling_policy", "attn_backend"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name == "attn_backend"):
                raise ConfigurationError(f"`{name}` must be a name (a string), got {value!r}.")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigurationError(
                f"`kv_cache_dtype` must be one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}; 'auto' "
                "keeps K/V in the model's dtype."
            )

    def _check_switches(self) -> None:
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"`{name}` must be True or False, got {getattr(self, name)!r}.")
        if self.compile_parts and self.enforce_eager:
            raise ConfigurationError(
                "`compile_parts=True` and `enforce_eager=True` contradict each other: set one of them to False."
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PagedConfig:
        """Builds a configuration from plain values.

        Args:
            values (`dict[str, Any]`):
                Field names and their values.

        Raises:
            ConfigurationError: If a name is not a field.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise ConfigurationError(f"Unknown PagedConfig field(s) {unknown}; the fields are {names}.")
        return cls(**values)


def _checked_sizes(sizes: Any) -> tuple[int, ...] | None:
    if sizes is None:
        return None
    if not isinstance(sizes, (tuple, list)) or any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigurationError(
            f"`cuda_graph_sizes` must be whole numbers of at least 1, such as (1, 8, 64), or None, got {sizes!r}."
        )
    return tuple(sizes)


def _check_count(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"`{name}` must be a whole number of at least 1, or None, got {value!r}.")
