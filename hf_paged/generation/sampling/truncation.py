"""Temperature, top-k, top-p and min-p: which tokens remain, and how likely they are.

Only the tokens that may remain are ever sorted. A threshold below which nothing can remain is known before:

    top-k   the k-th largest chunk maximum: k entries at least are as large
    top-p   (1 - p) / 256 of the mass, if the tokens above it hold the share p already, else (1 - p) / 8192, else
            (1 - p) / vocabulary: all the tokens below that together weigh less than 1 - p
    min-p   its share of the best token

The results are those of Transformers' `TemperatureLogitsWarper`, `TopKLogitsWarper`, `TopPLogitsWarper` and
`MinPLogitsWarper` in this order: tokens that tie with the k-th remain, and top-p and min-p look at what top-k left.
Of tokens with equal scores at the border of top-p, those with the lower ids remain (Transformers leaves it open).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from .chunks import chunk_sums, entries_above, row_blocks

_LOWEST = torch.finfo(torch.float32).min  # as a threshold it admits all tokens but those at -inf
_GUESSES = (256, 8192)
# Float32 arithmetic breaks down beyond these; the answer (greedy, uniform) does not change any more.
_TEMPERATURES = (1e-30, 1e30)


@dataclasses.dataclass(frozen=True, slots=True)
class Truncation:
    """Parameters of some rows.

    Args:
        temperature (`np.ndarray`):
            `[rows]` float64, positive.
        top_k (`np.ndarray`):
            `[rows]` int64; 0 keeps all.
        top_p (`np.ndarray`):
            `[rows]` float64 in (0, 1]; 1 keeps all.
        min_p (`np.ndarray`):
            `[rows]` float64 in [0, 1]; 0 keeps all.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray

    def __post_init__(self):
        object.__setattr__(self, "temperature", np.clip(self.temperature, *_TEMPERATURES))

    def __getitem__(self, rows: np.ndarray) -> Truncation:
        return Truncation(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclasses.dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that may remain in some rows, by id, and how many of the best of them do.

    Args:
        rows (`np.ndarray`):
            `[n]` which rows, int64.
        token_ids (`np.ndarray`):
            `[n, width]` int64, ascending, then padding.
        values (`np.ndarray`):
            `[n, width]` float32, their scores, -inf for padding.
        ordered (`np.ndarray`):
            `[n, width]` the scores, best first.
        cumulative (`np.ndarray`):
            `[n, width]` float64, running sum of the ordered scores' weights (the best token weighs 1).
        counts (`np.ndarray`):
            `[n]` how many of the ordered ones remain, at least 1.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    values: np.ndarray
    ordered: np.ndarray
    cumulative: np.ndarray
    counts: np.ndarray

    def __getitem__(self, mask: np.ndarray) -> Candidates:
        return Candidates(*(getattr(self, field.name)[mask] for field in dataclasses.fields(self)))

    def tokens_at(self, places: np.ndarray) -> np.ndarray:
        """Returns the tokens at some places of the order; equal scores are ordered by id.

        Args:
            places (`np.ndarray`):
                `[n]` one place for each row, from 0.

        Returns:
            `np.ndarray`: `[n]` token ids.
        """
        # Sorting the scores alone is several times faster than sorting them with their tokens.
        each = np.arange(len(places))
        value = self.ordered[each, places][:, None]
        equal = self.values == value
        number = places - (self.ordered > value).sum(axis=1)  # which of the equal ones
        found = equal & (np.cumsum(equal, axis=1) == number[:, None] + 1)
        return self.token_ids[each, found.argmax(axis=1)]


def chunk_weights(scores: torch.Tensor, best: torch.Tensor, rows: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    """Sums exp((score - best) / temperature) over each chunk.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`.
        best (`torch.Tensor`):
            `[rows]` float32, each row's maximum.
        rows (`np.ndarray`):
            `[n]` the rows to do.
        temperature (`np.ndarray`):
            `[n]` their temperatures.

    Returns:
        `np.ndarray`: `[n, chunks]` float64.
    """
    index = torch.from_numpy(rows).to(scores.device)
    scale = torch.from_numpy(temperature).to(scores.device, torch.float32)[:, None]
    sums = []
    for block in row_blocks(len(rows), scores.shape[1]):
        weights = scores[index[block]].float()
        sums.append(chunk_sums(weights.sub_(best[index[block], None]).div_(scale[block]).exp_()))
    return torch.cat(sums).cpu().numpy().astype(np.float64)


def top_k_thresholds(scores: torch.Tensor, maxima: torch.Tensor, top_k: np.ndarray) -> torch.Tensor:
    """Finds for each row a value that is at most its k-th largest score, and not much less.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`.
        maxima (`torch.Tensor`):
            Its `chunk_maxima`.
        top_k (`np.ndarray`):
            `[rows]` at least 1.

    Returns:
        `torch.Tensor`: `[rows]` float32, finite.
    """
    num_chunks = maxima.shape[1]
    k = torch.from_numpy(top_k).to(scores.device)
    # At least k chunks hold an entry as large as the k-th largest maximum.
    ordered = maxima.sort(dim=1, descending=True).values
    thresholds = ordered.gather(1, (k.clamp(max=num_chunks) - 1)[:, None])[:, 0]
    many = np.flatnonzero(top_k * 2 > num_chunks)  # too many for this to say much
    if len(many):
        index = torch.from_numpy(many).to(scores.device)
        largest = scores[index].float().topk(min(int(top_k.max()), scores.shape[1])).values
        thresholds[index] = largest.gather(1, (k[index].clamp(max=scores.shape[1]) - 1)[:, None])[:, 0]
    return thresholds.clamp(min=_LOWEST)


def truncate(scores: torch.Tensor, maxima: torch.Tensor, settings: Truncation) -> list[Candidates]:
    """Applies temperature, top-k, top-p and min-p to rows that use at least one of the last three.

    Args:
        scores (`torch.Tensor`):
            `[rows, vocab_size]`; each row's maximum is finite.
        maxima (`torch.Tensor`):
            Its `chunk_maxima`.
        settings (`Truncation`):
            Each row's parameters.

    Returns:
        `list[Candidates]`: Every row once, grouped with rows of similarly many tokens.
    """
    best = maxima.amax(dim=1)
    with_k = np.flatnonzero(settings.top_k > 0)
    without_k = np.flatnonzero(settings.top_k == 0)
    thresholds = torch.empty_like(best)
    total = np.full(len(best), np.nan)  # the mass that top-p takes its share of; nan: of what was looked at
    if len(with_k):
        index = torch.from_numpy(with_k).to(scores.device)
        thresholds[index] = top_k_thresholds(_rows(scores, index), maxima[index], settings.top_k[with_k])
    if not len(without_k):
        return _refine(scores, maxima, thresholds, np.arange(len(best)), settings, total)

    share = np.zeros(len(best))  # what top-p lets go
    nucleus = without_k[settings.top_p[without_k] < 1]
    if len(nucleus):
        total[nucleus] = chunk_weights(scores, best, nucleus, settings.temperature[nucleus]).sum(axis=1)
        share[nucleus] = (1 - settings.top_p[nucleus]) * total[nucleus]
    groups, rows = [], np.arange(len(best))
    for divisor in (*_GUESSES, 2 * scores.shape[1]):
        guess = share / divisor
        _set_thresholds(thresholds, best, np.intersect1d(rows, without_k), guess, settings)
        tried = _refine(scores, maxima, thresholds, rows, settings, total)
        short = [_is_short(group, guess, settings, total) & (divisor in _GUESSES) for group in tried]
        groups += [group[~mask] for group, mask in zip(tried, short, strict=True) if not mask.all()]
        rows = np.sort(np.concatenate([group.rows[mask] for group, mask in zip(tried, short, strict=True)]))
        if not len(rows):
            break
    return groups


def _rows(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return scores if len(index) == len(scores) else scores[index]


def _set_thresholds(
    thresholds: torch.Tensor, best: torch.Tensor, rows: np.ndarray, weights: np.ndarray, settings: Truncation
) -> None:
    """Turns the least weight that may remain into a score, a little lower so that rounding cannot matter."""
    highest = best.cpu().numpy().astype(np.float64)[rows]
    least = np.minimum(np.maximum(weights, settings.min_p)[rows], 1.0)
    with np.errstate(divide="ignore"):  # log(0) = -inf: keep all
        scores = highest + settings.temperature[rows] * np.log(least) - 1e-5 * (1 + np.abs(highest))
    scores = np.maximum(scores, _LOWEST).astype(np.float32)
    thresholds[torch.from_numpy(rows).to(thresholds.device)] = torch.from_numpy(scores).to(thresholds.device)


def _is_short(group: Candidates, guess: np.ndarray, settings: Truncation, total: np.ndarray) -> np.ndarray:
    """Returns `[n]` whether top-p needs tokens below the guessed weight."""
    rows = group.rows
    needed = settings.top_p[rows] * total[rows] * (1 + 1e-6)
    return (guess[rows] > settings.min_p[rows]) & (group.cumulative[:, -1] < needed)


def _refine(
    scores: torch.Tensor,
    maxima: torch.Tensor,
    thresholds: torch.Tensor,
    rows: np.ndarray,
    settings: Truncation,
    total: np.ndarray,
) -> list[Candidates]:
    """Reads the entries above the thresholds and cuts them exactly, rows of similar width together."""
    if len(rows) < len(thresholds):
        index = torch.from_numpy(rows).to(scores.device)
        scores, maxima, thresholds = scores[index], maxima[index], thresholds[index]
    groups = []
    for local, values, token_ids in padded_entries(*entries_above(scores, maxima, thresholds), num_rows=len(rows)):
        group = rows[local]
        ordered = -np.sort(-values, axis=1)
        cumulative, counts = _cut(ordered, settings[group], total[group])
        groups.append(Candidates(group, token_ids, values, ordered, cumulative, counts))
    return groups


def padded_entries(
    rows: np.ndarray, columns: np.ndarray, values: np.ndarray, num_rows: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Arranges the entries of rows as rectangles.

    Args:
        rows (`np.ndarray`):
            `[entries]` ascending.
        columns (`np.ndarray`):
            `[entries]` ascending within a row.
        values (`np.ndarray`):
            `[entries]`.
        num_rows (`int`):
            How many rows there are; each has at least one entry.

    Returns:
        `list[tuple[np.ndarray, np.ndarray, np.ndarray]]`: Groups of rows of similar width: the rows `[n]`, their values
        `[n, width]` (padded by -inf) and columns `[n, width]`.
    """
    counts = np.bincount(rows, minlength=num_rows)
    starts = np.cumsum(counts) - counts
    # By powers of two, so that one wide row does not make all rows wide.
    sizes = np.ceil(np.log2(np.maximum(counts, 64)))
    groups = []
    for size in np.unique(sizes):
        group = np.flatnonzero(sizes == size)
        offsets = np.arange(counts[group].max())
        inside = offsets < counts[group, None]
        source = np.where(inside, starts[group, None] + offsets, 0)
        groups.append((group, np.where(inside, values[source], np.float32(-np.inf)), columns[source]))
    return groups


def _cut(ordered: np.ndarray, settings: Truncation, total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts rows of ordered scores `[n, width]`; returns the running weights and how many remain."""
    num_rows, width = ordered.shape
    top_k = np.where(settings.top_k > 0, np.minimum(settings.top_k, width), width)
    kth = ordered[np.arange(num_rows), top_k - 1]
    values = ordered.astype(np.float64)
    weights = np.exp((values - values[:, :1]) / settings.temperature[:, None])
    weights[ordered < kth[:, None]] = 0
    cumulative = np.cumsum(weights, axis=1)
    whole = np.where(np.isnan(total), cumulative[:, -1], total)
    limit = np.where(settings.top_p < 1, settings.top_p * whole, np.inf)
    before = np.concatenate((np.zeros((num_rows, 1)), cumulative[:, :-1]), axis=1)
    remain = (weights > 0) & (before < limit[:, None]) & (weights >= settings.min_p[:, None])
    # The conditions are met by the best ones up to some place, as none is met again once it fails.
    return cumulative, remain.sum(axis=1)
