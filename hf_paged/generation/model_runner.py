"""Everything that runs on the device: the K/V pool, block copies, the model call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import compat
from ..cache.step_cache import StepCache, StepLayerSpec
from ..errors import EngineClosedError
from ..kernels.base import PagedAttentionBackend
from ..kernels.quantized_blocks import picked
from ..modeling.layer_groups import LayerGroup
from .graphs.decode import DecodeGraphs
from .graphs.watch import GraphWatch
from .input_batch import TILE, InputBatch
from .kv_pool import KVPool
from .outputs import StepResult
from .recording import Recorded, StepRecorder
from .sampling.pending import PendingTokens, to_device
from .staging import Staging
from .step import SchedulerOutput
from .step_inputs import HostInputs, ModelInputs

if TYPE_CHECKING:
    from .graphs.settings import GraphSettings
    from .step_forwards import StepForwards

# Of what travels with a step's inputs; with the number of a layer group behind it.
_CLEARED, _COPIED = "cleared", "copied"


@dataclasses.dataclass(slots=True)
class StepHandle:
    """A step that has been launched.

    Args:
        output (`SchedulerOutput`):
            What it does.
        logits (`torch.Tensor`):
            `[num_rows, vocab_size]`; those of a replayed step with `pending` are overwritten by the next replay.
        prompt_rows (`dict[str, tuple[int, int]]`):
            Rows of the shares that want prompt logits.
        recorded (`dict[str, Recorded]`):
            What else was wanted of the model, by request.
        seconds_inputs (`float`):
            Time that building the inputs took.
        pending (`PendingTokens`, *optional*):
            The tokens, if they are chosen on the device.
    """

    output: SchedulerOutput
    logits: torch.Tensor
    prompt_rows: dict[str, tuple[int, int]]
    recorded: dict[str, Recorded]
    seconds_inputs: float
    pending: PendingTokens | None = None


class ModelRunner:
    """Runs steps on one device. It knows tokens, blocks and positions; sampling and texts are the engine's.

    Args:
        model (`PreTrainedModel`):
            A model whose attention implementation is ours.
        groups (`tuple[LayerGroup, ...]`):
            Its layers.
        backend (`PagedAttentionBackend`):
            Stores and attends.
        num_blocks (`int`):
            Blocks in the pool.
        block_size (`int`):
            Tokens per block.
        max_num_seqs (`int`):
            Requests at most.
        max_model_len (`int`):
            Tokens of a request at most.
        tiled (`bool`, defaults to `False`):
            Compute every request in calls of its own, of one width, so that its logits do not depend on others.
        forwards (`StepForwards`, *optional*):
            What modules do in steps instead of their own forwards.
        graphs (`GraphSettings`, *optional*):
            Which decoding steps are captured as graphs, by `capture_graphs` or later.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        groups: tuple[LayerGroup, ...],
        backend: PagedAttentionBackend,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        tiled: bool = False,
        forwards: StepForwards | None = None,
        graphs: GraphSettings | None = None,
    ):
        # Weak: the engine is kept alive by its model, which would never be freed if it were kept alive in turn.
        self._model = weakref.ref(model)
        self.tiled = tiled
        self.pools = [KVPool(group, num_blocks, block_size) for group in groups]
        layers = [
            StepLayerSpec(layer.layer_idx, group_idx, pool.keys[i], pool.values[i], layer.window)
            for group_idx, (group, pool) in enumerate(zip(groups, self.pools, strict=True))
            for i, layer in enumerate(group.layers)
        ]
        self.cache = StepCache(backend, sorted(layers, key=lambda layer: layer.layer_idx))
        self.batch = InputBatch(max_num_seqs, max_model_len, block_size, len(groups), backend.alike_keys)
        self.staging = Staging(groups[0].device)
        self._cache_argument = compat.cache_argument(model)
        self._selects_logits = compat.accepts(model, "logits_to_keep")
        self._forwards = None if forwards is None else forwards.bind(self.cache)
        self.graphs: DecodeGraphs | None = None
        if graphs is not None:
            self.graphs = DecodeGraphs(graphs, self.staging, functools.partial(GraphWatch, forwards=self._forwards))
        # Experts multiply the tokens of a call that chose them, so that their products depend on which those are.
        self._tile_tokens = 1 if tiled and has_experts(model) else TILE

    @property
    def model(self) -> Any:
        """Returns the model.

        Raises:
            EngineClosedError: If it was deleted.
        """
        model = self._model()
        if model is None:
            raise EngineClosedError("The engine's model was deleted; keep a reference to it while using its engine.")
        return model

    @torch.inference_mode()
    def launch(
        self,
        output: SchedulerOutput,
        embeds: Mapping[str, torch.Tensor] | None = None,
        choose: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], PendingTokens] | None = None,
        sampling: Mapping[str, np.ndarray] | None = None,
    ) -> StepHandle:
        """Starts a step.

        Args:
            output (`SchedulerOutput`):
                What it does; at least one share.
            embeds (`Mapping[str, torch.Tensor]`, *optional*):
                For the shares that bring them, embeddings `[prompt tokens, hidden_size]` by request.
            choose (`Callable[[torch.Tensor, Mapping[str, torch.Tensor]], PendingTokens]`, *optional*):
                Chooses a token for each of the `sample_ids` from the logits, on the device, given what came there for
                it. The next step may then be launched before anybody knows which.
            sampling (`Mapping[str, np.ndarray]`, *optional*):
                What `choose` wants on the device; goes there with the inputs.

        Returns:
            `StepHandle`: To be handed to `collect`.
        """
        started = time.perf_counter()
        work = self._prepare(output)
        recorder = StepRecorder(output)
        if self.tiled:
            assert choose is None, "the plan runs no step of tiles ahead"
            self._work_on_blocks({name: to_device(array, self.staging.device) for name, array in work.items()})
            return self._launch_tiles(output, recorder, embeds)
        host, graphs = self.batch.build(output, sampling), self.graphs
        host.extras = work
        shape = None if graphs is None else graphs.shape_for(host, self.model, self._call_alone)
        if graphs is not None and shape is not None:
            inputs = self._send(host.padded(*shape), graphs.memory)
            seconds_inputs = time.perf_counter() - started
            logits = graphs.replay(shape)[: len(host.logits_indices)]
            if choose is None:
                logits = logits.clone()  # whoever reads them may do so when the next step is under way
        else:
            inputs = self._send(host)
            self.cache.begin(inputs.metadata, recorder.attention_ranges(inputs.ranges))
            seconds_inputs = time.perf_counter() - started
            logits = self._call(inputs, recorder, embeds)
        pending = None
        if choose is not None:
            pending = choose(logits, inputs.sampling)
            self.batch.keep(output, pending.token_ids)
        return StepHandle(output, logits, inputs.prompt_rows, recorder.recorded, seconds_inputs, pending)

    def inputs_of(self, output: SchedulerOutput) -> ModelInputs:
        """Prepares a step that `call` runs, perhaps several times; nothing is recorded.

        Args:
            output (`SchedulerOutput`):
                The step.
        """
        work = self._prepare(output)
        host = self.batch.build(output)
        host.extras = work
        return self._send(host)

    @torch.inference_mode()
    def call(self, inputs: ModelInputs) -> torch.Tensor:
        """Runs a prepared step and returns its logits.

        Args:
            inputs (`ModelInputs`):
                What `inputs_of` returned.
        """
        self.cache.begin(inputs.metadata)
        return self._call(inputs, StepRecorder(SchedulerOutput(0, ())), None)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures decoding steps, if that was asked for; no block is touched."""
        if self.graphs is not None:
            self.graphs.capture_all(self.model, self._call_alone)

    def _call_alone(self, inputs: ModelInputs) -> torch.Tensor:
        """A call beside the steps, which leaves no trace if it fails."""
        try:
            return self.call(inputs)
        except BaseException:
            self.cache.abandon()
            raise

    def _send(self, host: HostInputs, into: torch.Tensor | None = None) -> ModelInputs:
        """Brings inputs to the device, and does there what comes before the model's call."""
        inputs = self.staging.send(host, into)
        self.batch.fill_in(inputs)
        self._work_on_blocks(inputs.extras)
        return inputs

    def _prepare(self, output: SchedulerOutput) -> dict[str, np.ndarray]:
        """Takes in what a step tells; returns what is to be done with blocks before the model runs, by group."""
        self.batch.apply(output)
        work = {}
        for group, pool in enumerate(self.pools):
            new = [block for share in output.scheduled if share.new_block_ids for block in share.new_block_ids[group]]
            stale = pool.take(new, output.cleared_blocks[group] if output.cleared_blocks else ())
            if stale:
                work[f"{_CLEARED}{group}"] = np.array(stale)
            if output.block_copies and output.block_copies[group]:
                work[f"{_COPIED}{group}"] = np.ascontiguousarray(np.array(output.block_copies[group]).T)
        return work

    def _work_on_blocks(self, work: Mapping[str, torch.Tensor]) -> None:
        for group, pool in enumerate(self.pools if work else ()):
            cleared, copied = work.get(f"{_CLEARED}{group}"), work.get(f"{_COPIED}{group}")
            if cleared is not None:
                pool.clear(cleared)
            if copied is not None:
                pool.copy(copied)

    def _call(
        self, inputs: ModelInputs, recorder: StepRecorder, embeds: Mapping[str, torch.Tensor] | None
    ) -> torch.Tensor:
        """One model call, over a view that has begun; returns the logits of the wanted tokens."""
        keep: dict[str, Any] = {"logits_to_keep": inputs.logits_indices} if self._selects_logits else {}
        tokens: dict[str, Any] = {"input_ids": inputs.input_ids}
        if embeds and inputs.ranges:
            tokens = {"inputs_embeds": self._embed(inputs, embeds)}
        if recorder.wants_hidden_states:
            keep["output_hidden_states"] = True
        is_as_it_is = self._forwards is None or recorder.wants_hidden_states or self.cache.attention_ranges
        with contextlib.nullcontext() if is_as_it_is else self._forwards.step():  # type: ignore[union-attr]
            result = self.model(
                **tokens,
                position_ids=inputs.position_ids,
                use_cache=True,
                **keep,
                **{self._cache_argument: self.cache},
            )
        attentions = self.cache.attentions
        self.cache.end()
        recorder.take(inputs.ranges, getattr(result, "hidden_states", None), attentions)
        return result.logits[0] if self._selects_logits else result.logits[0, inputs.logits_indices]

    def _embed(self, inputs: ModelInputs, embeds: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The embeddings of a call's tokens, some of which were given by their requests."""
        embedded = self.model.get_input_embeddings()(inputs.input_ids)
        for request_id, tokens in inputs.ranges.items():
            given = embeds.get(request_id)
            if given is not None:
                part = given[tokens.first_position : tokens.first_position + tokens.end - tokens.start]
                embedded[0, tokens.start : tokens.start + len(part)] = part.to(embedded)
        return embedded

    def _launch_tiles(
        self, output: SchedulerOutput, recorder: StepRecorder, embeds: Mapping[str, torch.Tensor] | None
    ) -> StepHandle:
        """The batch-invariant way: every share in calls of its own, of one width; with experts every token."""
        sampled: list[torch.Tensor] = []
        prompts: dict[str, list[torch.Tensor]] = {}
        for share in output.scheduled:
            start, end = share.num_computed_tokens, share.num_computed_tokens + share.num_scheduled_tokens
            while start < end:
                count = min(end - start, TILE - start % TILE, self._tile_tokens)
                inputs = self._send(self.batch.build_tile(share, start, count))
                self.cache.begin(inputs.metadata)
                logits = self._call(inputs, recorder, embeds)[start % TILE : start % TILE + count]
                if share.prompt_logits:
                    prompts.setdefault(share.request_id, []).append(logits)
                start += count
            if share.sample_ids:
                sampled.append(logits[-1:])
        prompt_rows, first = {}, len(sampled)
        for request_id, rows in prompts.items():
            prompt_rows[request_id] = (first, first := first + sum(len(logits) for logits in rows))
            sampled += rows
        logits = torch.cat(sampled) if sampled else torch.empty(0)
        return StepHandle(output, logits, prompt_rows, recorder.recorded, 0.0)

    def collect(self, handle: StepHandle) -> StepResult:
        """Waits for a step and returns what it computed.

        Args:
            handle (`StepHandle`):
                What `launch` returned.
        """
        chosen = handle.pending.wait() if handle.pending is not None else None
        return StepResult(handle.logits, handle.output.sample_rows, handle.prompt_rows, handle.recorded, chosen)

    def read(self, request_id: str, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies the K/V of a request's first tokens out of its blocks.

        Args:
            request_id (`str`):
                A request that had a share in the last step.
            num_tokens (`int`):
                How many of its tokens.

        Returns:
            As `read_blocks`.
        """
        return self.read_blocks(self.batch.tables_of(request_id), num_tokens)

    def read_blocks(
        self, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies K/V out of blocks.

        Args:
            block_ids (`Sequence[Sequence[int]]`):
                A request's blocks, by layer group.
            num_tokens (`int`):
                How many of its tokens.

        Returns:
            Per layer keys `[num_kv_heads, num_tokens, Dk]` and values `[num_kv_heads, num_tokens, Dv]`, in the model's
            dtype.
        """
        count = -(-num_tokens // self.batch.block_size)
        indices = [torch.tensor(ids[:count], device=self.staging.device) for ids in block_ids]
        dtype = self.cache.backend.spec.dtype
        copies = []
        for layer in self.cache.layers:
            key, value = (
                picked(cache, indices[layer.spec.group_idx], dtype).transpose(0, 1).flatten(1, 2)[:, :num_tokens]
                for cache in (layer.spec.key_cache, layer.spec.value_cache)
            )
            copies.append((key, value))
        return copies


def has_experts(model: torch.nn.Module) -> bool:
    """Returns whether a model has layers in which each token goes through some experts only.

    Args:
        model (`torch.nn.Module`):
            Any model.
    """
    return any(
        "experts" in name.lower() for module in model.modules() for name in (*module._modules, type(module).__name__)
    )
