"""Decoding steps as graphs: which there are, when they are captured, and when a step has to run without.

    step of 13 requests, 900 tokens   ->  padded to 16 requests, 2048 tokens
    host      inputs, in one copy     ->  | memory that all graphs read their inputs from |
    device    copy, replay            ->  | logits of all graphs |  ->  sampler, before the next replay

Graphs are captured when the pool is made, the largest first, since later ones fit into the memory of the first, until
their budget is spent. Those that are missing are captured when they are first wanted, or a larger one serves. If the
model changes they are dropped, and captured anew once it has stayed the same for some steps.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..staging import Staging
from ..step_inputs import HostInputs, ModelInputs
from .capture import GraphMaker, Replay, described
from .settings import GraphSettings
from .sizes import GraphShape
from .watch import GraphWatch

logger = logging.getLogger(__name__)

ModelCall = Callable[[ModelInputs], torch.Tensor]
STEPS_BEFORE_ANEW = 32  # with an unchanged model
# Of K/V that requests share: a graph reads them for each request, other steps once, but their kernels are launched one
# by one, which takes the host some milliseconds.
MAX_WASTE = 8 << 30
# Whoever changes the model so often, before graphs have run so many steps, has no use for them.
MAX_CHANGES = 16
MIN_REPLAYS = 500
_MIB = 1 << 20


class DecodeGraphs:
    """The graphs of one runner. It is given the runner's call each time, so that it keeps neither alive.

    Args:
        settings (`GraphSettings`):
            What they are captured for.
        staging (`Staging`):
            Sends inputs.
        make_watch (`Callable[[PreTrainedModel], GraphWatch]`):
            Returns what notices that a model is not what it is now.
    """

    def __init__(self, settings: GraphSettings, staging: Staging, make_watch: Callable[[Any], GraphWatch]):
        self.settings = settings
        self.num_replays = 0
        self.num_bytes = 0
        self._staging = staging
        self._make_watch = make_watch
        self._maker: GraphMaker | None = None
        self._graphs: dict[GraphShape, Replay] = {}
        self._watch: GraphWatch | None = None
        self._memory: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        self._is_off = False
        self._is_full = False
        self._largest = settings.shapes.sizes[-1]  # of which a graph fits into the budget
        self._refused: str | None = None  # the last graph that did not fit, before there was one that did
        self._num_changes = 0
        self._replays_before = 0
        self._num_steady = 0

    @property
    def shapes(self) -> list[GraphShape]:
        """Returns the shapes that there are graphs of, ascending."""
        return sorted(self._graphs)

    @property
    def memory(self) -> torch.Tensor:
        """Returns the memory that graphs read their inputs from, uint8."""
        if self._memory is None:
            settings = self.settings
            size = Staging.most_room(
                settings.max_num_seqs, settings.max_num_seqs, settings.shapes.widths[-1], settings.num_groups
            )
            with torch.inference_mode(False):
                self._memory = torch.zeros(size, dtype=torch.uint8, device=self._staging.device)
        return self._memory

    # ------------------------------------------------------------------ a step

    def shape_for(self, host: HostInputs, model: Any, call: ModelCall) -> GraphShape | None:
        """Returns the shape of the graph that a step is to be run by, or `None` if it has to run without.

        Captures the graph if it is missing and there is room.

        Args:
            host (`HostInputs`):
                The step's inputs.
            model (`PreTrainedModel`):
                The model.
            call (`Callable[[ModelInputs], torch.Tensor]`):
                Calls it and returns its logits.
        """
        if self._is_off or not host.is_plain_decode or not self._is_unchanged(model):
            return None
        # A prompt of one new token may be answered several times: there are more rows for the sampler then.
        num_rows = max([host.num_requests, *(len(array) for array in host.sampling.values())])
        if num_rows > self.settings.shapes.sizes[-1] or host.table_width > self.settings.shapes.widths[-1]:
            return None
        if self.settings.saved_bytes(host) > MAX_WASTE:
            return None
        if any(array.shape[-1] > self.settings.max_num_seqs for array in host.extras.values()):
            return None  # more blocks to clear or copy than there is room for in `memory`
        fitting = self.settings.shapes.fitting(num_rows, host.table_width)
        if self._may_capture(fitting[0]):
            self._capture(fitting[0], call)
        return next((shape for shape in fitting if shape in self._graphs), None)

    def replay(self, shape: GraphShape) -> torch.Tensor:
        """Runs a step whose inputs have been sent to `memory`, padded to a shape.

        Args:
            shape (`GraphShape`):
                What `shape_for` returned.

        Returns:
            `torch.Tensor`: `[num_requests, vocab_size]`, padding included: overwritten by the next replay, in the order
            of the stream.
        """
        assert self._logits is not None, "a graph was captured with its logits"
        self._graphs[shape]()
        self.num_replays += 1
        return self._logits[: shape.num_requests]

    def _is_unchanged(self, model: Any) -> bool:
        """Returns whether graphs are those of the model as it is; drops them if not."""
        if self._watch is None or not self._watch.is_same():
            is_first = self._watch is None
            self._watch = self._make_watch(model)
            self._num_steady = STEPS_BEFORE_ANEW if is_first else 0
            if not is_first:
                self._take_change()
        self._num_steady += 1
        return not self._is_off and self._watch.is_open(model)

    def _take_change(self) -> None:
        had_graphs = bool(self._graphs)
        self.clear()
        if self.num_replays - self._replays_before >= MIN_REPLAYS:
            self._num_changes = 0
        self._replays_before = self.num_replays
        self._num_changes += had_graphs
        if self._num_changes >= MAX_CHANGES:
            self._give_up(f"the model has changed {MAX_CHANGES} times before they were of use")
        elif had_graphs:
            logger.info("The model has changed: its decoding steps are captured anew.")

    # ------------------------------------------------------------------ capturing

    def capture_all(self, model: Any, call: ModelCall) -> None:
        """Captures all graphs that there is room for, the largest first.

        Args:
            model (`PreTrainedModel`):
                The model.
            call (`Callable[[ModelInputs], torch.Tensor]`):
                Calls it and returns its logits.
        """
        if self._is_off or not self._is_unchanged(model):
            return
        started, shapes = time.perf_counter(), self.settings.shapes.all()
        for shape in shapes:
            if self._may_capture(shape):
                self._capture(shape, call)
        if self._graphs:
            logger.info(
                "Captured %d of %d graphs of decoding steps in %.1f s and %.0f MiB.",
                len(self._graphs),
                len(shapes),
                time.perf_counter() - started,
                self.num_bytes / _MIB,
            )

    def clear(self) -> None:
        """Drops all graphs and what they share."""
        if self._maker is not None:
            self._maker.close()
        self._graphs.clear()
        self._maker = self._memory = self._logits = None
        self.num_bytes, self._is_full = 0, False

    def _may_capture(self, shape: GraphShape) -> bool:
        if self._is_off or self._is_full or shape in self._graphs or shape.num_requests > self._largest:
            return False
        return self._num_steady > STEPS_BEFORE_ANEW

    @torch.inference_mode()
    def _capture(self, shape: GraphShape, call: ModelCall) -> None:
        maker = self._maker = self._maker or self.settings.make_maker()
        before = maker.free_bytes()
        try:
            replay = self._captured(shape, call, maker)
        except torch.OutOfMemoryError:
            self._refuse(shape, "there is no memory for it")
            return
        except Exception as error:
            self._give_up(f"a decoding step cannot be captured: {described(error)}")
            return
        taken = max(before - maker.free_bytes(), 0)
        if self.num_bytes + taken > self.settings.budget:
            del replay
            self._refuse(shape, f"it takes {taken / _MIB:.0f} MiB")
            return
        self.num_bytes += taken
        self._graphs[shape] = replay
        if self._refused is not None:
            self.settings.note(self._refused)
            self._refused = None

    def _captured(self, shape: GraphShape, call: ModelCall, maker: GraphMaker) -> Replay:
        """Captures a step with nobody in it, which touches no block: it may be run at any time."""
        settings = self.settings
        inputs = self._staging.send(
            HostInputs.blank(shape.num_requests, shape.table_width, settings.num_groups, settings.block_size),
            self.memory,
        )
        # The number of launched programs comes from the longest context that the graph will be replayed with.
        longest = min(shape.table_width * settings.block_size, settings.max_model_len)
        lengths = np.full(shape.num_requests, longest, dtype=np.int32)
        run = functools.partial(_call_with_lengths, call, inputs, lengths)
        if self._logits is None:
            logits = maker.warm_up(run)
            self._logits = logits.new_zeros(self._largest, logits.shape[-1])
        target = self._logits[: shape.num_requests]
        maker.warm_up(lambda: target.copy_(run()))
        return maker.capture(lambda: target.copy_(run()))

    def _refuse(self, shape: GraphShape, reason: str) -> None:
        """There is no room for a graph: for no other one if there are some already, else for none of its size."""
        room = f"{self.num_bytes / _MIB:.0f} of {self.settings.budget / _MIB:.0f} MiB are taken"
        if self._graphs:
            self._is_full = True
            told = f"no more are captured than {len(self._graphs)}: as to the next, {reason} ({room})"
            self.settings.note(f"CUDA graphs: {told}; other steps run without")
            return
        self.clear()
        self._largest = max([size for size in self.settings.shapes.sizes if size < shape.num_requests], default=0)
        if self._largest:
            told = f"none is captured for {shape.num_requests} requests or more: {reason} ({room})"
            self._refused = f"CUDA graphs: {told}; such steps run without"
        else:
            self._give_up(f"as to the smallest, {reason} ({room})")

    def _give_up(self, reason: str) -> None:
        self.clear()
        self._is_off = True
        self.settings.note(f"CUDA graphs are off: {reason}")


def _call_with_lengths(call: ModelCall, inputs: ModelInputs, lengths: np.ndarray) -> torch.Tensor:
    """Calls the model on a step that backends plan as if all contexts were so long; nothing prepared is kept."""
    metadata = tuple(
        dataclasses.replace(part, seq_lens_host=lengths, block_tables_host=None, prepared={})
        for part in inputs.metadata
    )
    return call(dataclasses.replace(inputs, metadata=metadata))
