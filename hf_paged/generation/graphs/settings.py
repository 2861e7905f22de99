"""Whether an engine captures its decoding steps, and for which sizes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ...configuration import PagedConfig
from ...kernels.base import PagedAttentionBackend
from ...modeling.layer_groups import LayerGroup
from ..plan import EnginePlan, log_note
from ..step_inputs import HostInputs
from .capture import CudaGraphs, GraphMaker
from .sizes import ShapeTable, batch_sizes, table_widths


@dataclasses.dataclass(frozen=True)
class GraphSettings:
    """What graphs are captured for.

    Args:
        shapes (`ShapeTable`):
            Their sizes.
        max_num_seqs (`int`):
            Requests that run at the same time.
        max_model_len (`int`):
            The longest context.
        block_size (`int`):
            Tokens per block.
        num_groups (`int`):
            Layer groups.
        budget (`int`):
            Bytes of the device's memory that they may take together.
        make_maker (`Callable[[], GraphMaker]`):
            Returns what captures graphs that share memory.
        note (`Callable[[str], None]`):
            Is told, once each, why there are no or no more graphs.
        saved_bytes (`Callable[[HostInputs], int]`):
            Returns how many bytes of K/V less a step reads if it is no graph.
    """

    shapes: ShapeTable
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_groups: int
    budget: int
    make_maker: Callable[[], GraphMaker]
    note: Callable[[str], None]
    saved_bytes: Callable[[HostInputs], int]


def obstacle_to_graphs(config: PagedConfig, backend: PagedAttentionBackend) -> str | None:
    """Returns why an engine captures no graphs, or `None` if it does.

    Args:
        config (`PagedConfig`):
            What the user asked for.
        backend (`PagedAttentionBackend`):
            The attention backend.
    """
    if backend.spec.device_type != "cuda":
        return f"a {backend.spec.device_type} has none"
    if config.enforce_eager:
        return "`enforce_eager` is set"
    if config.cuda_graph_sizes == ():
        return "`cuda_graph_sizes` is empty"
    if config.batch_invariant:
        return "batch-invariant steps are many calls"
    return None if backend.graph_safe else f"attention backend {backend.name} reads lengths on the host"


def with_graphs(plan: EnginePlan, config: PagedConfig, backend: PagedAttentionBackend) -> EnginePlan:
    """Returns a plan that says which graphs there will be, or why there will be none.

    Args:
        plan (`EnginePlan`):
            The plan without them.
        config (`PagedConfig`):
            What the user asked for.
        backend (`PagedAttentionBackend`):
            The attention backend.
    """
    notes: list[str] = []
    obstacle = obstacle_to_graphs(config, backend)
    if obstacle is not None:
        if config.cuda_graph_sizes:
            notes.append(f"cuda_graph_sizes has no effect: {obstacle}")
        return _noted(plan, notes, config, cuda_graphs=f"off: {obstacle}")
    sizes = batch_sizes(plan.max_num_seqs, config.cuda_graph_sizes)
    if config.cuda_graph_sizes and len(sizes) < len(set(config.cuda_graph_sizes)):
        notes.append(f"cuda_graph_sizes is {sizes}: at most {plan.max_num_seqs} (max_num_seqs) requests run")
    widths = table_widths(plan.max_model_len, plan.block_size)
    text = "off: no size is left"
    if sizes:
        contexts = ", ".join(str(min(width * plan.block_size, plan.max_model_len)) for width in widths)
        text = f"{len(sizes)} sizes up to {sizes[-1]} requests, for contexts of up to {contexts} tokens"
    return _noted(plan, notes, config, cuda_graphs=text, cuda_graph_sizes=sizes)


def _noted(plan: EnginePlan, notes: list[str], config: PagedConfig, **changes: Any) -> EnginePlan:
    for note in notes:
        log_note(note, config)
    return dataclasses.replace(plan, notes=(*plan.notes, *notes), **changes)


def graph_settings(
    plan: EnginePlan,
    groups: Sequence[LayerGroup],
    backend: PagedAttentionBackend,
    note: Callable[[str], None],
) -> GraphSettings | None:
    """Returns what a runner needs to capture graphs, or `None` if it is not to.

    Args:
        plan (`EnginePlan`):
            Of `with_graphs`.
        groups (`Sequence[LayerGroup]`):
            The model's layers.
        backend (`PagedAttentionBackend`):
            The attention backend.
        note (`Callable[[str], None]`):
            Is told why there are no or no more graphs.
    """
    if not plan.cuda_graph_sizes:
        return None
    return GraphSettings(
        ShapeTable(plan.cuda_graph_sizes, table_widths(plan.max_model_len, plan.block_size)),
        plan.max_num_seqs,
        plan.max_model_len,
        plan.block_size,
        len(groups),
        plan.graph_bytes,
        functools.partial(CudaGraphs, groups[0].device),
        note,
        functools.partial(_saved_bytes, backend, [group.bytes_per_token for group in groups]),
    )


def _saved_bytes(backend: PagedAttentionBackend, bytes_per_token: Sequence[int], host: HostInputs) -> int:
    """Layers with a window read all of it in any case; that they may be counted errs to the side of no graph."""
    return sum(
        backend.keys_saved(table, host.seq_lens_host) * num_bytes
        for table, num_bytes in zip(host.block_tables, bytes_per_token, strict=True)
    )
