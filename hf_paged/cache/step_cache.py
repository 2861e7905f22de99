"""The cache that an engine step shows to the model: it marks the new keys, and attention does the rest.

    model calls            cache.update(key, value, layer)     attention(query, key, value)
    the step's view        returns them, with the layer    ->  finds the layer on the key,
                           attached to the key                 stores K/V into its blocks, runs the backend

The layer travels as a Python attribute of the key tensor, the one route that works in every family and version. K/V
are stored as they arrive at attention, so a family that caches something smaller and expands it (MLA) is stored
expanded. A model that attends by itself would see the new tokens only; the view notices and raises.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import AttentionBypassedError, UnsupportedModelError
from ..kernels.base import PagedAttentionBackend
from ..kernels.metadata import PagedAttentionMetadata
from ..kernels.quantized_blocks import Blocks
from ..kernels.reference import attention_weights
from ..modeling.attention_patches.latent import LAYER_ATTRIBUTE


class StepLength(int):
    """A number of tokens, marked as coming from an engine step, for which no mask is made."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionRequest:
    """What an attention module asks for beside its tensors.

    Args:
        scale (`float`):
            Factor on the scores.
        window (`int`, *optional*):
            Sliding window.
        softcap (`float`, *optional*):
            Soft cap on the scores.
        sinks (`torch.Tensor`, *optional*):
            `[num_query_heads]`, learned attention sinks.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def attach_layer(key: torch.Tensor, layer: Any) -> None:
    """Attaches a paged layer to a key tensor.

    Args:
        key (`torch.Tensor`):
            The new keys of a step.
        layer (`StepLayer`):
            The layer that they belong to.
    """
    setattr(key, LAYER_ATTRIBUTE, layer)


def paged_layer_of(key: torch.Tensor) -> Any:
    """Returns the paged layer that an engine step attached to a key tensor, or `None` outside of one.

    Args:
        key (`torch.Tensor`):
            The keys that an attention function received.
    """
    return getattr(key, LAYER_ATTRIBUTE, None)


@dataclasses.dataclass(frozen=True, eq=False)
class StepLayerSpec:
    """What a step's view must know of a layer.

    Args:
        layer_idx (`int`):
            Its index in the model.
        group_idx (`int`):
            The layer group whose block tables it uses.
        key_cache (`Blocks`):
            `[num_blocks, num_kv_heads, block_size, Dk]`.
        value_cache (`Blocks`):
            `[num_blocks, num_kv_heads, block_size, Dv]`.
        window (`int`, *optional*):
            The sliding window that the model's configuration gives it.
    """

    layer_idx: int
    group_idx: int
    key_cache: Blocks
    value_cache: Blocks
    window: int | None


class StepLayer(CacheLayerMixin):
    """One layer of a step's view.

    Args:
        view (`StepCache`):
            The view that it belongs to.
        spec (`StepLayerSpec`):
            Its blocks and its window.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, view: StepCache, spec: StepLayerSpec):
        self._view = weakref.ref(view)  # a cycle would keep the pool until the garbage collector comes
        self.spec = spec
        self.is_initialized = True

    @property
    def view(self) -> StepCache:
        """Returns the view that this layer belongs to."""
        view = self._view()
        assert view is not None, "a layer is used while its view is"
        return view

    @property
    def metadata(self) -> PagedAttentionMetadata:
        """Returns the step's lengths and block tables of this layer's group."""
        return self.view.metadata[self.spec.group_idx]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Marks the step's new keys as belonging to this layer.

        Args:
            key_states (`torch.Tensor`):
                `[1, num_kv_heads, tokens, Dk]`.
            value_states (`torch.Tensor`):
                `[1, num_kv_heads, tokens, Dv]`.
            args (`Any`):
                Ignored.
            kwargs (`Any`):
                Ignored.

        Returns:
            The same tensors; the keys carry this layer for the attention function.

        Raises:
            AttentionBypassedError: If the layer before did not run paged attention.
        """
        self.view.check_attended()
        self.view.unattended = self
        attach_layer(key_states, self)
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, request: AttentionRequest
    ) -> torch.Tensor:
        """Stores new keys and values in this layer's blocks and attends over all of their requests' blocks.

        Args:
            query (`torch.Tensor`):
                `[tokens, num_query_heads, Dk]`.
            key (`torch.Tensor`):
                `[tokens, num_kv_heads, Dk]`.
            value (`torch.Tensor`):
                `[tokens, num_kv_heads, Dv]`.
            request (`AttentionRequest`):
                What the attention module asks for.

        Returns:
            `torch.Tensor` `[tokens, num_query_heads, Dv]`.

        Raises:
            UnsupportedModelError: If the module's window is not the one that the layer was found to have at load.
        """
        spec, backend = self.spec, self.view.backend
        if request.window != spec.window:
            raise UnsupportedModelError(
                f"Layer {spec.layer_idx} asks for a sliding window of {request.window}; at load it was {spec.window}."
            )
        self.view.unattended = None
        self.view.num_attended += 1
        num_rows, token_rows = query.shape[0], self.metadata.token_rows
        if token_rows is not None:
            query, key, value = (states.index_select(0, token_rows) for states in (query, key, value))
        backend.store(key, value, spec.key_cache, spec.value_cache, self.metadata)
        output = backend.attend(
            query,
            spec.key_cache,
            spec.value_cache,
            self.metadata,
            scale=request.scale,
            window=request.window,
            softcap=request.softcap,
            sinks=request.sinks,
        )
        if self.view.attention_ranges:
            self._record_attention(query, request)
        assert isinstance(output, torch.Tensor), "a backend returns a pair only when asked for the log-sum-exp"
        if self.view.observer is not None:
            self.view.observer(spec.layer_idx, query, key, value, request, output)
        if token_rows is None:
            return output
        return output.new_zeros(num_rows, *output.shape[1:]).index_copy_(0, token_rows, output)

    def _record_attention(self, query: torch.Tensor, request: AttentionRequest) -> None:
        """Backends do not return attention weights, so those that are wanted are computed once more."""
        for request_id, tokens in self.view.attention_ranges.items():
            weights = attention_weights(
                query[tokens.start : tokens.end],
                self.spec.key_cache,
                self.metadata.block_tables[tokens.row],
                tokens.first_position,
                scale=request.scale,
                window=request.window,
                softcap=request.softcap,
            )
            self.view.attentions.setdefault(request_id, []).append(weights)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the blocks exist.

        Args:
            key_states (`torch.Tensor`):
                Ignored.
            value_states (`torch.Tensor`):
                Ignored.
        """

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns marked sizes, for which our mask function makes no mask.

        Args:
            query_length (`int`):
                New tokens of the call.
        """
        return StepLength(query_length), 0

    def get_seq_length(self) -> int:
        """Returns 0: every token of a step carries its own position."""
        return 0

    def get_max_length(self) -> int:
        """Returns -1, Transformers' word for no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before Transformers 5.24


class StepCache(Cache):
    """A `transformers.Cache` that shows one engine step to the model. The engine points it at each step in turn.

    Args:
        backend (`PagedAttentionBackend`):
            Stores and attends.
        layers (`list[StepLayerSpec]`):
            One per layer, in model order.
    """

    layers: list[StepLayer]  # type: ignore[assignment]

    def __init__(self, backend: PagedAttentionBackend, layers: list[StepLayerSpec]):
        super().__init__(layers=[StepLayer(self, spec) for spec in layers])
        self.backend = backend
        self.metadata: tuple[PagedAttentionMetadata, ...] = ()
        self.unattended: StepLayer | None = None
        self.num_attended = 0
        self.attention_ranges: Mapping[str, Any] = {}
        self.attentions: dict[str, list[torch.Tensor]] = {}
        self.observer: Callable[..., None] | None = None  # told what attention was given, and what it returned
        self._head_counts = {(spec.group_idx, spec.key_cache.shape[1]) for spec in layers}

    def begin(
        self, metadata: tuple[PagedAttentionMetadata, ...], attention_ranges: Mapping[str, Any] | None = None
    ) -> None:
        """Points the view at a step.

        Args:
            metadata (`tuple[PagedAttentionMetadata, ...]`):
                The step's lengths and block tables, one per layer group.
            attention_ranges (`Mapping[str, TokenRange]`, *optional*):
                Tokens whose attention weights are wanted, by request; they will be in `attentions`.
        """
        self.metadata = metadata
        self.attention_ranges, self.attentions = attention_ranges or {}, {}
        self.unattended = None
        self.num_attended = 0
        for group_idx, num_kv_heads in self._head_counts:
            self.backend.prepare(metadata[group_idx], num_kv_heads)

    def check_attended(self) -> None:
        """Checks that the last layer that stored keys also ran paged attention over them.

        Raises:
            AttentionBypassedError: If it did not.
        """
        if self.unattended is not None:
            layer, self.unattended = self.unattended, None
            raise AttentionBypassedError(
                f"Layer {layer.spec.layer_idx} gave its keys to the paged cache but computed attention by itself, over "
                "the new tokens alone. Its model cannot run on the paged engine; use Transformers' own loop."
            )

    def attended(self, num_layers: int) -> None:
        """Takes note of layers that are computed by one operator, which stores and attends by itself.

        Args:
            num_layers (`int`):
                How many.

        Raises:
            AttentionBypassedError: If the layer before did not run paged attention.
        """
        self.check_attended()
        self.num_attended += num_layers

    def abandon(self) -> None:
        """Lets go of a step that failed."""
        self.metadata = ()
        self.unattended = None

    def end(self) -> None:
        """Checks that every layer stored and attended once, and lets go of the step.

        Raises:
            AttentionBypassedError: If a layer did not.
        """
        self.check_attended()
        if self.num_attended != len(self.layers):
            raise AttentionBypassedError(
                f"{self.num_attended} of {len(self.layers)} layers ran paged attention in this step; the others "
                "computed attention in a way that the paged cache does not see."
            )
        self.metadata = ()
