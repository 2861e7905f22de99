"""The engine as a watcher sees it: plain data that is looked at from outside, and what changes between two looks.

A look is taken by the event loop while the engine's thread goes on: it costs that thread nothing but the interpreter's
lock for a moment. Each container is copied in one piece; a look in the middle of a step may show a request at its new
length and a neighbour at its old one, which the next look puts right.

Nothing here knows a prompt or an answer: requests are ids and numbers.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import __version__
from ..generation.request import Request, RequestStatus
from .latencies import NUM_SLOTS, SECONDS, Point

if TYPE_CHECKING:
    from ..cache.block_manager import BlockManager
    from ..generation.scheduler import Scheduler
    from .service import Service

MAX_WAITING = 100  # requests that are named; the others are counted
REQUEST_FIELDS = ("status", "prompt", "computed", "generated", "limit", "cached", "preemptions", "arrived")


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """What a look has seen.

    Args:
        about (`Mapping[str, Any]`):
            What does not change: the model, the limits, the layer groups.
        figures (`Mapping[str, Any]`):
            Counts of now.
        marks (`Sequence[bytes]`):
            For each layer group a byte for each block: 1 if it can be found by its content.
        requests (`Mapping[str, tuple]`):
            By id the `REQUEST_FIELDS`: those that hold blocks, and the first of those that wait.
        tables (`Mapping[str, Sequence[Sequence[int]]]`):
            By id, for each layer group, the blocks that a request holds, in token order.
        latencies (`Mapping[str, Sequence[Point]]`):
            By kind the points of the last five minutes.
    """

    about: Mapping[str, Any]
    figures: Mapping[str, Any]
    marks: Sequence[bytes]
    requests: Mapping[str, tuple]
    tables: Mapping[str, Sequence[Sequence[int]]]
    latencies: Mapping[str, Sequence[Point]]


class EngineView:
    """Looks at a server's engine.

    Args:
        service (`Service`):
            The server.
    """

    def __init__(self, service: Service):
        self._service = service

    def look(self) -> Picture:
        """Returns what can be seen now."""
        live, metrics = self._service.engine.engine.live, self._service.metrics
        return Picture(
            about=self._about([pool.num_blocks for pool in live.block_manager.pools]),
            figures=self._figures(),
            latencies={
                "first_token": metrics.recent_first_token.points(),
                "inter_token": metrics.recent_inter_token.points(),
            },
            **held_and_waiting(live.scheduler, live.block_manager),
        )

    def _about(self, num_blocks: list[int]) -> dict[str, Any]:
        service, plan = self._service, self._service.engine.engine.plan
        return {
            "model": service.model_names[0],
            "version": __version__,
            "device": plan.device,
            "backend": plan.attn_backend,
            "block_size": plan.block_size,
            "num_blocks": num_blocks,  # of each layer group
            "max_num_seqs": plan.max_num_seqs,
            "max_model_len": plan.max_model_len,
            "prefix_caching": plan.enable_prefix_caching,
            "latency_seconds": SECONDS,
            "latency_slots": NUM_SLOTS,
            "request_fields": REQUEST_FIELDS,
        }

    def _figures(self) -> dict[str, Any]:
        service, engine, metrics = self._service, self._service.engine, self._service.metrics
        stats = metrics.stats
        return {
            "state": "draining" if service.draining else "asleep" if engine.engine.is_asleep else "serving",
            "now": round(time.perf_counter(), 3),
            "slot": metrics.recent_first_token.slot,
            "step_seconds": round(engine.seconds_since_step, 1),
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "steps": stats.num_steps,
            "generated": stats.num_generated_tokens,
            "computed": stats.num_computed_tokens,
            "prefix_queries": stats.num_prompt_tokens,
            "prefix_hits": stats.num_cached_tokens,
            "preemptions": stats.num_preemptions,
            "finished": stats.num_finished,
        }


def held_and_waiting(scheduler: Scheduler, manager: BlockManager) -> dict[str, Any]:
    """Returns what a `Picture` has of requests and blocks: `marks`, `requests` and `tables`.

    Args:
        scheduler (`Scheduler`):
            Knows who waits.
        manager (`BlockManager`):
            Knows who holds blocks.
    """
    requests: dict[str, tuple] = {}
    tables: dict[str, Sequence[Sequence[int]]] = {}
    for request, block_ids in manager.tables():
        requests[request.request_id] = _numbers(request, "running")
        tables[request.request_id] = list(map(list, block_ids))
    everybody = list(scheduler.requests.values())
    waiting = (r for r in everybody if r.status is not RequestStatus.RUNNING and r.request_id not in requests)
    for request in itertools.islice(waiting, MAX_WAITING):
        requests[request.request_id] = _numbers(request, request.status.value)
    return {"marks": [bytes(index.marks) for index in manager.indexes], "requests": requests, "tables": tables}


def _numbers(request: Request, status: str) -> tuple:
    metrics, num_prompt_tokens = request.metrics, request.num_prompt_tokens
    return (
        status,
        num_prompt_tokens,
        request.num_computed_tokens,
        len(request.token_ids) - num_prompt_tokens,
        request.max_tokens,
        metrics.num_cached_tokens,
        metrics.num_preemptions,
        metrics.arrival_time,
    )


def difference(old: Picture | None, new: Picture) -> dict[str, Any]:
    """Returns what somebody has to be told who has seen one picture, and shall see another.

        about       all, if anything of it is new; all that was seen before is to be forgotten then
        figures     always all
        marks       for each layer group base64 of a bit for each block, if a bit is new, else null
        requests    those whose numbers are new
        tables      [place, blocks of each group]: what a table holds from a place on; before that it is as it was
        gone        ids that are no more in `requests`, nor in `tables`
        freed       ids that are no more in `tables`, but in `requests`
        latencies   the points that are new

    Args:
        old (`Picture`, *optional*):
            What was seen; nothing by default.
        new (`Picture`):
            What there is now.
    """
    told: dict[str, Any] = {"figures": new.figures}
    if old is None or old.about != new.about:
        old, told["about"] = None, new.about
    before = old.marks if old is not None else [None] * len(new.marks)
    marks = [
        None if had == has else base64.b64encode(np.packbits(np.frombuffer(has, np.uint8)).tobytes()).decode()
        for had, has in zip(before, new.marks, strict=True)
    ]
    if any(mark is not None for mark in marks):
        told["marks"] = marks
    seen: Any = old.requests if old is not None else {}
    held: Any = old.tables if old is not None else {}
    told["requests"] = {name: numbers for name, numbers in new.requests.items() if seen.get(name) != numbers}
    told["tables"] = {
        name: _tail(held.get(name), table) for name, table in new.tables.items() if held.get(name) != table
    }
    told["gone"] = [name for name in seen if name not in new.requests]
    told["freed"] = [name for name in held if name not in new.tables and name in new.requests]
    points: Any = old.latencies if old is not None else {}
    for kind, now in new.latencies.items():
        if fresh := _new_points(points.get(kind, ()), now):
            told.setdefault("latencies", {})[kind] = fresh
    return {name: value for name, value in told.items() if value}


def _tail(old: Sequence[Sequence[int]] | None, new: Sequence[Sequence[int]]) -> tuple[int, list[Sequence[int]]]:
    """Where a table begins to be new, and what it holds from there on; most grow at their end."""
    start = 0
    if old is not None:
        length = min(len(old[0]), len(new[0]))
        # Of the common length, the last block is another one after a copy-on-write.
        start = next(
            (place for place in (length, length - 1) if place > 0 and all(map(_alike(place), old, new))),
            0,
        )
    return start, [ids[start:] for ids in new]


def _alike(place: int) -> Any:
    return lambda old, new: old[:place] == new[:place]


def _new_points(old: Sequence[Point], new: Sequence[Point]) -> list[Point]:
    had = set(old)
    return [point for point in new if point not in had]
