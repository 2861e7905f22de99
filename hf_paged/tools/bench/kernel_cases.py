"""The calls that `hf-paged bench kernels` times: native operators on a model's own weights and shapes.

Working sets are those of a step: each call of a case takes the next layer's weights or K/V, so that what a step reads
from main memory is not found in the caches here either.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ...cache.memory import allocate
from ...kernels.cpu import activations, attention, decoder, linear, norms, rope, sampling
from ...kernels.layers import TENSORS, LayerArguments, LayerShape
from ...kernels.metadata import PagedAttentionMetadata

_PAIRS: dict[int, rope.Pairs] = {1: "half", 2: "interleaved", 3: "interleaved_to_half"}
_ACTIVATION_NAMES = {number: name for name, number in reversed(activations.ACTIVATIONS.items())}
_WORKING_SET = 256 << 20  # bytes through which a case cycles at least, if it is not in the caches in a step either


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the calls are, in tokens.

    Args:
        linear_rows (`tuple[int, ...]`, defaults to `(1, 8, 64, 256)`):
            Rows of a layer's linears.
        head_rows (`tuple[int, ...]`, defaults to `(1, 64)`):
            Rows of the LM head.
        decodes (`tuple[tuple[int, int], ...]`, defaults to `((64, 200), (32, 512), (1, 2048))`):
            Requests and context of each.
        prefix (`tuple[int, int, int]`, defaults to `(64, 512, 32)`):
            Requests, shared context, own context.
        prefills (`tuple[tuple[int, int], ...]`, defaults to `((512, 512), (512, 2048))`):
            New tokens of one request, and its context with them.
        rows (`int`, defaults to 64):
            Rows of norms, rope, activations and sampling.
        stack_rows (`tuple[int, ...]`, defaults to `(1, 16, 64)`):
            Requests that decode in all layers.
        stack_context (`int`, defaults to 128):
            Their context.
    """

    linear_rows: tuple[int, ...] = (1, 8, 64, 256)
    head_rows: tuple[int, ...] = (1, 64)
    decodes: tuple[tuple[int, int], ...] = ((64, 200), (32, 512), (1, 2048))
    prefix: tuple[int, int, int] = (64, 512, 32)
    prefills: tuple[tuple[int, int], ...] = ((512, 512), (512, 2048))
    rows: int = 64
    stack_rows: tuple[int, ...] = (1, 16, 64)
    stack_context: int = 128

    def num_blocks(self, block_size: int) -> int:
        """Returns how many blocks the largest case needs.

        Args:
            block_size (`int`):
                Tokens per block.
        """
        requests = [*self.decodes, *((1, context) for _, context in self.prefills)]
        requests += [(max(self.stack_rows), self.stack_context), (self.rows, 1)]
        counts = [number * -(-context // block_size) for number, context in requests]
        number, shared, own = self.prefix
        return max(*counts, shared // block_size + number * -(-own // block_size))


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator at one size.

    Args:
        name (`str`):
            What it is.
        calls (`Sequence[Callable[[], Any]]`):
            Calls of it that touch different memory, to be made in turns.
        torch_calls (`Sequence[Callable[[], Any]]`, defaults to none):
            The same by torch, where torch has something alike.
        num_bytes (`float`, defaults to 0):
            What a call must read or write in main memory.
        operations (`float`, defaults to 0):
            Multiplications and additions of a call.
    """

    name: str
    calls: Sequence[Callable[[], Any]]
    torch_calls: Sequence[Callable[[], Any]] = ()
    num_bytes: float = 0
    operations: float = 0


class KernelCases:
    """All cases of one model.

    Args:
        layers (`Sequence[LayerArguments]`):
            Its decoder layers, without caches, all of one shape.
        head (`torch.Tensor`):
            `[vocab_size, hidden_size]`, the LM head.
        block_size (`int`):
            Tokens per block.
        sizes (`Sizes`):
            How large the calls are.
    """

    def __init__(self, layers: Sequence[LayerArguments], head: torch.Tensor, block_size: int, sizes: Sizes):
        self.sizes = sizes
        self.shape: LayerShape = layers[0].shape
        self.head = head.detach()
        self.dtype = head.dtype
        self.block_size = block_size
        self._weights = [dict(zip(TENSORS, layer.tensors, strict=True)) for layer in layers]
        self._random = np.random.default_rng(0)
        torch.manual_seed(0)
        caches = [self._caches() for _ in layers]
        self.layers = [
            LayerArguments(layer.shape, layer.tensors, *cache) for layer, cache in zip(layers, caches, strict=True)
        ]

    def __iter__(self) -> Iterator[Case]:
        """Yields all cases."""
        for rows in self.sizes.linear_rows:
            yield from self.linears(rows)
        yield from map(self.lm_head, self.sizes.head_rows)
        yield from itertools.starmap(self.decode, self.sizes.decodes)
        yield self.shared_prefix()
        yield from itertools.starmap(self.prefill, self.sizes.prefills)
        yield from self.small_operators()
        yield from self.sampling()
        yield from map(self.stack, self.sizes.stack_rows)

    # ------------------------------------------------------------------ linears

    def linears(self, rows: int) -> Iterator[Case]:
        """Yields the linears of a layer.

        Args:
            rows (`int`):
                Rows that are multiplied.
        """
        first = self._weights[0]
        activation = _ACTIVATION_NAMES[self.shape.activation]
        groups = [("q, k, v", ("q_weight", "k_weight", "v_weight")), ("o", ("o_weight",))]
        groups += [("gate, up", ("gate_weight", "up_weight")), ("down", ("down_weight",))]
        for title, names in groups:
            present = [name for name in names if first[name] is not None]
            if not present:
                continue
            gated = present == ["gate_weight", "up_weight"]
            weights = [[_present(layer[name]) for name in present] for layer in self._weights]
            x = self._normal(rows, weights[0][0].shape[-1])

            def call(given: list[torch.Tensor], x: torch.Tensor = x, gated: bool = gated) -> Any:
                if gated:
                    return linear.gated_linear(x, given[0], given[1], activation)
                return linear.linears(x, given)

            def plain(given: list[torch.Tensor], x: torch.Tensor = x, gated: bool = gated) -> Any:
                y = [functional.linear(x, weight) for weight in given]
                return functional.silu(y[0]) * y[1] if gated else y

            numbers = sum(weight.numel() for weight in weights[0])
            size = f"{rows} x {weights[0][0].shape[-1]} x {numbers // weights[0][0].shape[-1]}"
            flat = [[weight.reshape(-1, weight.shape[-1]) for weight in given] for given in weights]
            yield Case(
                f"linear {title} {size}",
                [_with(call, given) for given in weights],
                [_with(plain, given) for given in flat],
                numbers * self.dtype.itemsize,
                2.0 * rows * numbers,
            )

    def lm_head(self, rows: int) -> Case:
        """Returns the LM head.

        Args:
            rows (`int`):
                Rows that need logits.
        """
        x = self._normal(rows, self.head.shape[1])
        copies = [self.head]
        while len(copies) * self.head.nbytes < min(_WORKING_SET, 32 * self.head.nbytes):
            copies += [tensor.copy_(self.head) for tensor in self._allocate([tuple(self.head.shape)])]
        return Case(
            f"LM head {rows} x {self.head.shape[1]} x {self.head.shape[0]}",
            [_with(linear.linear, x, weight) for weight in copies],
            [_with(functional.linear, x, weight) for weight in copies],
            self.head.nbytes,
            2.0 * rows * self.head.numel(),
        )

    # ------------------------------------------------------------------ attention

    def decode(self, requests: int, context: int) -> Case:
        """Returns attention of one new token each.

        Args:
            requests (`int`):
                How many.
            context (`int`):
                Tokens of each, the new one included.
        """
        metadata = self._metadata([1] * requests, [context] * requests)
        query = self._queries(requests)
        q = query[:, :, None]
        return Case(
            f"attention, decode, {requests} x {context}",
            self._attention_calls(query, metadata),
            [_with(self._sdpa, q, *self._contiguous(layer, requests, context)) for layer in self.layers],
            requests * context * self._kv_bytes,
            requests * context * self._attention_operations,
        )

    def shared_prefix(self) -> Case:
        """Returns attention of one new token each, of requests that begin with the same blocks."""
        requests, shared, own = self.sizes.prefix
        metadata = self._metadata([1] * requests, [shared + own] * requests, shared // self.block_size)
        return Case(
            f"attention, decode, {requests} x ({shared} shared + {own})",
            self._attention_calls(self._queries(requests), metadata),
            num_bytes=(shared + requests * own) * self._kv_bytes,
            operations=requests * (shared + own) * self._attention_operations,
        )

    def prefill(self, new: int, context: int) -> Case:
        """Returns attention of many new tokens of one request.

        Args:
            new (`int`):
                How many.
            context (`int`):
                Tokens of the request, the new ones included.
        """
        metadata = self._metadata([new], [context])
        query = self._queries(new)
        q = query.transpose(0, 1)[None]
        mask = torch.ones(new, context, dtype=torch.bool).tril(context - new)
        pairs = new * (context - new) + new * (new + 1) // 2
        return Case(
            f"attention, prefill, {new} of {context}",
            self._attention_calls(query, metadata),
            [_with(self._sdpa, q, *self._contiguous(layer, 1, context), mask) for layer in self.layers],
            context * self._kv_bytes,
            pairs * self._attention_operations,
        )

    def _attention_calls(self, query: torch.Tensor, metadata: PagedAttentionMetadata) -> list[Callable[[], Any]]:
        lengths = metadata.cu_seqlens_q, metadata.seq_lens
        return [
            _with(attention.paged_attention, query, caches, metadata.block_tables, lengths, self.shape.scale)
            for caches in map(_caches_of, self.layers)
        ]

    def _sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, mask, scale=self.shape.scale, enable_gqa=True)

    # ------------------------------------------------------------------ the rest of a layer, and sampling

    def small_operators(self) -> Iterator[Case]:
        """Yields norms, rope with the store of K/V, and the gated activation; all work in the caches."""
        rows, shape, itemsize = self.sizes.rows, self.shape, self.dtype.itemsize
        hidden = self.head.shape[1]
        x, residual = self._normal(rows, hidden), self._normal(rows, hidden)
        weight = torch.ones(hidden, dtype=self.dtype)
        yield Case(
            f"RMS norm {rows} x {hidden}",
            [_with(norms.rms_norm, x, weight)],
            [_with(functional.rms_norm, x, (hidden,), weight, 1e-6)],
            2 * rows * hidden * itemsize,
        )
        yield Case(
            f"residual + RMS norm {rows} x {hidden}",
            [_with(norms.rms_norm, x, weight, 1e-6, 0.0, residual)],
            [lambda: functional.rms_norm(x + residual, (hidden,), weight, 1e-6)],
            4 * rows * hidden * itemsize,
        )
        if shape.rope_layout:
            yield self._rope_store()
        if shape.has_mlp and shape.gated:
            wide = self._weights[0]["down_weight"].shape[-1]  # type: ignore[union-attr]
            gate, up = self._normal(rows, wide), self._normal(rows, wide)
            name = _ACTIVATION_NAMES[shape.activation]
            yield Case(
                f"{name}(gate) * up {rows} x {wide}",
                [_with(activations.gated_activation, gate, up, name)],
                [lambda: functional.silu(gate) * up],
                3 * rows * wide * itemsize,
            )

    def _rope_store(self) -> Case:
        shape, rows = self.shape, self.sizes.rows
        layout = rope.RopeLayout(
            shape.rotary_dim, _PAIRS[shape.rope_layout], shape.rotary_begin, shape.cos_step, shape.sin_sign < 0
        )
        query = self._queries(rows)
        key = self._normal(rows, shape.num_kv_heads, shape.key_dim)
        value = self._normal(rows, shape.num_kv_heads, shape.value_dim)
        slots = torch.from_numpy(self._random.permutation(self._num_slots)[:rows].astype(np.int64))
        angles = self._angles(rows)
        moved = query.numel() + key.numel() + value.numel()
        return Case(
            f"rope + store {rows} x ({shape.num_query_heads} + 2 x {shape.num_kv_heads}) x {shape.key_dim}",
            [
                _with(rope.rope_store, query, key, value, angles, layout, _caches_of(layer), slots)
                for layer in self.layers
            ],
            num_bytes=2 * moved * self.dtype.itemsize,
        )

    def sampling(self) -> Iterator[Case]:
        """Yields the choice of a token by the largest score, and by top-k and top-p."""
        rows, vocab = self.sizes.rows, self.head.shape[0]
        scores = self._normal(rows, vocab) * 3
        yield Case(
            f"greedy {rows} x {vocab}",
            [_with(sampling.argmax_tokens, scores)],
            [_with(torch.argmax, scores, 1)],
            scores.nbytes,
        )
        k = min(50, vocab)
        settings = torch.tensor([[sampling.TRUNCATED, 0.8, k, 0.9, 0.0]] * rows, dtype=torch.float64)
        uniform = torch.from_numpy(self._random.uniform(0.01, 0.99, rows))

        def with_torch() -> torch.Tensor:
            best, tokens = scores.topk(k)
            weights = (best.float() / 0.8).softmax(1)
            weights[weights.cumsum(1) - weights > 0.9] = 0
            return tokens.gather(1, weights.multinomial(1))

        yield Case(
            f"top-k {k}, top-p 0.9 {rows} x {vocab}",
            [_with(sampling.draw_tokens, scores, settings, uniform)],
            [with_torch],
            scores.nbytes,
        )

    # ------------------------------------------------------------------ all layers

    def stack(self, requests: int) -> Case:
        """Returns all layers in one call.

        Args:
            requests (`int`):
                Requests that decode.
        """
        context = self.sizes.stack_context
        metadata = self._metadata([1] * requests, [context] * requests)
        hidden = self._normal(requests, self.head.shape[1])
        cos, sin = self._angles(requests) if self.shape.rope_layout else (None, None)
        numbers = sum(
            _present(weights[name]).numel()
            for weights in self._weights
            for name in TENSORS
            if name.endswith("_weight") and weights[name] is not None
        )
        tokens = len(self.layers) * requests * context
        return Case(
            f"{len(self.layers)} layers, {requests} x {context}",
            [_with(decoder.decoder_layers, hidden, self.layers, cos, sin, metadata)],
            num_bytes=numbers * self.dtype.itemsize + tokens * self._kv_bytes,
            operations=2.0 * requests * numbers + tokens * self._attention_operations,
        )

    # ------------------------------------------------------------------ inputs

    @property
    def _kv_bytes(self) -> int:
        """Bytes of one token's K/V in one layer."""
        return self.shape.num_kv_heads * (self.shape.key_dim + self.shape.value_dim) * self.dtype.itemsize

    @property
    def _attention_operations(self) -> float:
        """Operations of one new token on one token of the context, in one layer."""
        return 2.0 * self.shape.num_query_heads * (self.shape.key_dim + self.shape.value_dim)

    @property
    def _num_slots(self) -> int:
        return self.sizes.num_blocks(self.block_size) * self.block_size

    def _allocate(self, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        return allocate(shapes, self.dtype, torch.device("cpu"))

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size).to(self.dtype)

    def _queries(self, tokens: int) -> torch.Tensor:
        return self._normal(tokens, self.shape.num_query_heads, self.shape.key_dim)

    def _angles(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.rand(tokens, self.shape.rotary_dim * self.shape.cos_step)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _caches(self) -> list[torch.Tensor]:
        """Keys and values of a layer, full of numbers."""
        blocks, shape = self.sizes.num_blocks(self.block_size), self.shape
        sizes = [(blocks, shape.num_kv_heads, self.block_size, dim) for dim in (shape.key_dim, shape.value_dim)]
        return [tensor.copy_(self._normal(1, *tensor.shape[1:])) for tensor in self._allocate(sizes)]

    def _metadata(self, new: list[int], contexts: list[int], num_shared: int = 0) -> PagedAttentionMetadata:
        """Requests whose blocks lie anywhere; all begin with the same `num_shared` blocks."""
        widths = [-(-context // self.block_size) for context in contexts]
        blocks = self._random.permutation(self.sizes.num_blocks(self.block_size)).astype(np.int32)
        tables = np.zeros((len(new), max(widths)), dtype=np.int32)
        tables[:, :num_shared] = blocks[:num_shared]
        taken = num_shared
        for table, width in zip(tables, widths, strict=True):
            own = width - num_shared
            table[num_shared:width] = blocks[taken : taken + own]
            taken += own
        return PagedAttentionMetadata.build(tables, np.array(new), np.array(contexts), self.block_size)

    def _contiguous(self, layer: LayerArguments, requests: int, context: int) -> list[torch.Tensor]:
        """A layer's memory as keys and values `[requests, heads, context, dim]`, as torch wants them."""
        found = []
        for cache in _caches_of(layer):
            shape = requests, cache.shape[1], context, cache.shape[3]
            found.append(cache.view(-1)[: requests * context * cache.shape[1] * cache.shape[3]].view(shape))
        return found


def _caches_of(layer: LayerArguments) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = layer.key_cache, layer.value_cache
    assert isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor), "the cases have blocks of numbers"
    return keys, values


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "the layer has this tensor"
    return tensor.detach()


def _with(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: function(*args)
