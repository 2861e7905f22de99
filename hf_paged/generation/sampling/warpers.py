"""What Transformers does to scores after temperature, for the rows that need more than a token from it.

A row needs it that uses a setting without a faster form here (`top_h`, `typical_p`, `epsilon_cutoff`, `eta_cutoff`,
`renormalize_logits`), or that wants its scores returned. Transformers' own classes do the work, in its order; they look
at scores alone, so that rows with equal settings are done together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..request import Request
from .chunks import row_blocks
from .features import NO_FEATURES, SamplingFeatures
from .processors import Batch

# Each class, the setting that it takes, and the value that switches it off, in Transformers' order.
_WARPERS: tuple[tuple[Callable[[Any], Any], str, Any], ...] = (
    (TemperatureLogitsWarper, "temperature", 1.0),
    (TopHLogitsWarper, "top_h", None),
    (TopKLogitsWarper, "top_k", 0),
    (TopPLogitsWarper, "top_p", 1.0),
    (MinPLogitsWarper, "min_p", 0.0),
    (TypicalLogitsWarper, "typical_p", None),
    (EpsilonLogitsWarper, "epsilon_cutoff", None),
)
_SETTINGS = (*((name, off) for _, name, off in _WARPERS), ("eta_cutoff", None))  # the last one wants a device too
_CUTS = tuple(name for name, _ in _SETTINGS[1:])


@dataclasses.dataclass(frozen=True, slots=True)
class WarperSettings:
    """What is done to the scores of some rows.

    Args:
        values (`tuple[tuple[str, float], ...]`):
            The settings that are on, by name.
        renormalize (`bool`):
            Whether log-probabilities are made of the result.
    """

    values: tuple[tuple[str, float], ...]
    renormalize: bool

    @property
    def cuts(self) -> bool:
        """Returns whether tokens are removed."""
        return any(name in _CUTS for name, _ in self.values)

    def warpers(self, device: torch.device) -> list[Any]:
        """Returns Transformers' processors.

        Args:
            device (`torch.device`):
                Where the scores are.
        """
        values = dict(self.values)
        made: list[Any] = [cls(values[name]) for cls, name, _ in _WARPERS if name in values]
        if "eta_cutoff" in values:
            made.append(EtaLogitsWarper(values["eta_cutoff"], device=device))  # type: ignore[arg-type]  # takes any
        return made + [LogitNormalization()] * self.renormalize


def settings_of(request: Request) -> WarperSettings | None:
    """Returns what is done to a request's scores, or `None` if its token can be drawn without.

    Args:
        request (`Request`):
            The request.
    """
    params, extras = request.params, request.extras
    features: SamplingFeatures = extras.features or NO_FEATURES
    samples = params.temperature > 0
    if not (extras.scores or features.renormalize_logits or (samples and features.truncates)):
        return None
    values = []
    if samples:  # Transformers has none of them when it takes the best token
        for name, off in _SETTINGS:
            value = getattr(features, name) if hasattr(features, name) else getattr(params, name)
            if value is not None and value != off:
                values.append((name, float(value) if name != "top_k" else int(value)))
    return WarperSettings(tuple(values), features.renormalize_logits)


class Warpers:
    """Temperature, truncation and normalization of the rows that want their scores, or use what has no faster form.

    Afterwards such a row is drawn from as it is, with temperature 1.

    Args:
        batch (`Batch`):
            The requests.
    """

    def __init__(self, batch: Batch):
        self._groups: dict[WarperSettings, list[int]] = {}
        for row, request in enumerate(batch.requests):
            extras = request.extras
            settings = settings_of(request) if extras.scores or extras.features is not None else None
            if settings is not None and (settings.values or settings.renormalize):
                self._groups.setdefault(settings, []).append(row)
        self._warpers = {settings: settings.warpers(batch.device) for settings in self._groups}

    @property
    def rows(self) -> list[int]:
        """Returns the rows that are changed."""
        return [row for rows in self._groups.values() for row in rows]

    @property
    def cut_rows(self) -> list[int]:
        """Returns the rows of which tokens are removed."""
        return [row for settings, rows in self._groups.items() if settings.cuts for row in rows]

    def is_active(self) -> bool:
        """Returns whether a request of the batch needs it."""
        return bool(self._groups)

    def apply(self, scores: torch.Tensor) -> None:
        """Changes the scores in place. Rows without a finite maximum, of which nothing can be drawn, stay as they are.

        Args:
            scores (`torch.Tensor`):
                `[requests, vocab_size]` float32, contiguous.
        """
        for settings, rows in self._groups.items():
            for block in row_blocks(len(rows), scores.shape[1]):
                index = torch.tensor(rows[block], device=scores.device)
                index = index[torch.isfinite(scores[index].amax(dim=1))]
                if len(index):
                    scores[index] = _warped(scores[index], self._warpers[settings])


def _warped(part: torch.Tensor, warpers: list[Any]) -> torch.Tensor:
    # PyTorch adds up a single row in another order than each of several, so a single row brings a copy along: a row's
    # result must not depend on how many are beside it.
    whole = part if len(part) > 1 else part.expand(2, -1)
    for warper in warpers:
        whole = warper(None, whole)
    return whole[: len(part)]
