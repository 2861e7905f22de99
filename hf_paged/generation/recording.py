"""What requests want beside logits: hidden states and attention weights, collected call by call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from .request import HiddenStatesWanted
from .step import SchedulerOutput


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRange:
    """Where the tokens of one request lie in a model call.

    Args:
        row (`int`):
            Its row in the call's attention metadata.
        start (`int`):
            Its first token in the call.
        end (`int`):
            The token after its last.
        first_position (`int`):
            Position of its first token in the request.
    """

    row: int
    start: int
    end: int
    first_position: int


@dataclasses.dataclass(slots=True)
class Recorded:
    """What one request wanted beside logits, for consecutive positions.

    Args:
        first_position (`int`):
            The first of the positions.
        hidden_states (`torch.Tensor`, *optional*):
            `[layers, positions, hidden_size]`, those that the request named.
        attentions (`list[torch.Tensor]`, *optional*):
            Per layer `[num_query_heads, positions, keys]`, zero where a position cannot see a key.
    """

    first_position: int
    hidden_states: torch.Tensor | None = None
    attentions: list[torch.Tensor] | None = None

    @property
    def end_position(self) -> int:
        """Returns the position after the last."""
        some = [*(self.attentions or ())[:1], self.hidden_states]
        return self.first_position + next((tensor.shape[1] for tensor in some if tensor is not None), 0)

    def cut(self, end: int) -> None:
        """Forgets what lies behind a position.

        Args:
            end (`int`):
                The first position to be forgotten.
        """
        count = max(end - self.first_position, 0)
        if self.hidden_states is not None:
            self.hidden_states = self.hidden_states[:, :count]
        if self.attentions is not None:
            self.attentions = [weights[:, :count] for weights in self.attentions]

    def since(self, first_position: int) -> Recorded:
        """Returns what was recorded from a position on; may be nothing.

        Args:
            first_position (`int`):
                The position.
        """
        skip = min(max(first_position - self.first_position, 0), self.end_position - self.first_position)
        states, weights = self.hidden_states, self.attentions
        return Recorded(
            max(self.first_position, first_position),
            states[:, skip:] if states is not None else None,
            [layer[:, skip:] for layer in weights] if weights is not None else None,
        )

    def append(self, other: Recorded) -> None:
        """Takes in what a later call recorded; what is there already is kept.

        Args:
            other (`Recorded`):
                Of positions that begin no later than these end.
        """
        known = self.end_position - other.first_position
        assert known >= 0, f"positions {self.end_position} to {other.first_position} were never recorded"
        if other.end_position <= self.end_position:
            return  # the request has lost its blocks, and is being computed anew
        if other.hidden_states is not None and self.hidden_states is not None:
            self.hidden_states = torch.cat([self.hidden_states, other.hidden_states[:, known:]], dim=1)
        if other.attentions is not None and self.attentions is not None:
            self.attentions = [
                torch.cat([_widened(mine, theirs.shape[2]), theirs[:, known:]], dim=1)
                for mine, theirs in zip(self.attentions, other.attentions, strict=True)
            ]


def _widened(weights: torch.Tensor, num_keys: int) -> torch.Tensor:
    return torch.nn.functional.pad(weights, (0, num_keys - weights.shape[2]))


class StepRecorder:
    """Collects what the requests of a step want beside logits.

    Args:
        output (`SchedulerOutput`):
            The step.
    """

    def __init__(self, output: SchedulerOutput):
        self.recorded: dict[str, Recorded] = {}
        self._hidden = {s.request_id: s.hidden_states for s in output.scheduled if s.hidden_states is not None}
        self._attentions = frozenset(s.request_id for s in output.scheduled if s.attentions)
        self._samples = frozenset(s.request_id for s in output.scheduled if s.sample_ids)

    @property
    def wants_hidden_states(self) -> bool:
        """Returns whether the model must return its hidden states."""
        return bool(self._hidden)

    def attention_ranges(self, ranges: Mapping[str, TokenRange]) -> dict[str, TokenRange]:
        """Returns those tokens of a call whose attention weights are wanted.

        Args:
            ranges (`Mapping[str, TokenRange]`):
                Tokens by request.
        """
        return {request_id: tokens for request_id, tokens in ranges.items() if request_id in self._attentions}

    def take(
        self,
        ranges: Mapping[str, TokenRange],
        hidden_states: Sequence[torch.Tensor] | None,
        attentions: Mapping[str, list[torch.Tensor]],
    ) -> None:
        """Takes in what a model call computed.

        Args:
            ranges (`Mapping[str, TokenRange]`):
                Tokens by request.
            hidden_states (`Sequence[torch.Tensor]`, *optional*):
                Of the embeddings and each layer, `[1, tokens, hidden_size]`.
            attentions (`Mapping[str, list[torch.Tensor]]`):
                By request, per layer `[num_query_heads, tokens, keys]`.
        """
        for request_id, tokens in ranges.items():
            wanted, states, first = self._hidden.get(request_id), None, tokens.first_position
            if wanted is not None and hidden_states is not None:
                if not wanted.all_tokens:
                    if request_id not in self._samples:
                        continue
                    self.recorded.pop(request_id, None)
                    first = tokens.first_position + tokens.end - tokens.start - 1
                start = tokens.start + first - tokens.first_position
                states = _pick(hidden_states, wanted, start, tokens.end)
            elif request_id not in self._attentions:
                continue
            new = Recorded(first, states, attentions.get(request_id))
            if request_id in self.recorded:
                self.recorded[request_id].append(new)
            else:
                self.recorded[request_id] = new


def _pick(hidden_states: Sequence[torch.Tensor], wanted: HiddenStatesWanted, start: int, end: int) -> torch.Tensor:
    layers = range(len(hidden_states)) if wanted.layers is None else wanted.layers
    return torch.stack([hidden_states[layer][0, start:end] for layer in layers])
