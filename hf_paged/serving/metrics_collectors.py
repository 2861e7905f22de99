"""What prometheus-client is given when somebody asks: plain numbers, under our names and under vLLM's."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

OUR_PREFIX = "hf_paged:"
VLLM_PREFIX = "vllm:"


class Histogram:
    """Counts numbers by size. Observing takes a third of a microsecond and no lock: one thread at a time may do it.

    Args:
        bounds (`Iterable[float]`):
            Upper ends of the buckets, themselves included. The last bucket has none.
        vllm_bounds (`Iterable[float]`, *optional*):
            Those of them that vLLM has, for the histogram under vLLM's name; by default all.
    """

    __slots__ = ("bounds", "counts", "sum", "vllm_bounds")

    def __init__(self, bounds: Iterable[float], vllm_bounds: Iterable[float] | None = None):
        self.bounds = tuple(sorted(bounds))
        self.vllm_bounds = self.bounds if vllm_bounds is None else tuple(sorted(vllm_bounds))
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a number.

        Args:
            value (`float`):
                The number.
            times (`int`, defaults to 1):
                How often it was seen.
        """
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """Returns how many numbers have been seen."""
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """Returns the upper end of the bucket in which a quantile lies; infinity for the last one, 0 if it is empty.

        Args:
            q (`float`):
                0.99 for what 99 % of the numbers do not exceed.
        """
        wanted, seen = q * self.count, 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            if seen and seen >= wanted:
                return bound
        return 0.0

    def buckets(self, bounds: Sequence[float]) -> list[tuple[str, float]]:
        """Returns how many numbers are at most as large as each of some bounds.

        Args:
            bounds (`Sequence[float]`):
                Some of `self.bounds`, in order.
        """
        counts, total, wanted = self.counts.copy(), 0, set(bounds)
        result: list[tuple[str, float]] = []
        for bound, count in zip(self.bounds, counts, strict=False):
            total += count
            if bound in wanted:
                result.append((floatToGoString(bound), total))
        return [*result, ("+Inf", total + counts[-1])]


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """A metric and where its numbers come from.

    Args:
        kind (`str`):
            `"counter"`, `"gauge"` or `"histogram"`.
        name (`str`):
            Without its prefix, and without the `_total` that a counter gets.
        documentation (`str`):
            One sentence.
        source (`Any`):
            A number, a `Histogram`, a mapping from label values to those, or a function that returns one of them.
        labels (`tuple[str, ...]`, defaults to `()`):
            Beside those that all series carry.
        in_vllm (`bool`, defaults to `True`):
            Whether vLLM has it too.
    """

    kind: str
    name: str
    documentation: str
    source: Any
    labels: tuple[str, ...] = ()
    in_vllm: bool = True


class Collector:
    """Hands series to prometheus-client, when it asks.

    Args:
        series (`Sequence[Series]`):
            What there is.
        labels (`Mapping[str, str]`):
            Carried by all series; nothing that a request says.
        vllm_names (`bool`):
            Whether what vLLM also has is there under vLLM's name too.
    """

    def __init__(self, series: Sequence[Series], labels: Mapping[str, str], vllm_names: bool):
        self._series = series
        self._labels = dict(labels)
        self._prefixes = (OUR_PREFIX, VLLM_PREFIX) if vllm_names else (OUR_PREFIX,)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their numbers of now."""
        for series in self._series:
            value = series.source() if callable(series.source) else series.source  # once: both names tell the same
            for prefix in self._prefixes if series.in_vllm else (OUR_PREFIX,):
                yield self._family(series, prefix, value)

    def _family(self, series: Series, prefix: str, value: Any) -> Metric:
        name, labels = prefix + series.name, [*self._labels, *series.labels]
        children = value if isinstance(value, Mapping) else {(): value}
        if series.kind == "histogram":
            family = HistogramMetricFamily(name, series.documentation, labels=labels)
            for key, histogram in list(children.items()):
                bounds = histogram.vllm_bounds if prefix == VLLM_PREFIX else histogram.bounds
                family.add_metric(self._values(key), histogram.buckets(bounds), histogram.sum)
            return family
        families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        plain = families[series.kind](name, series.documentation, labels=labels)
        for key, number in list(children.items()):
            plain.add_metric(self._values(key), number)
        return plain

    def _values(self, key: str | tuple[str, ...]) -> list[str]:
        return [*self._labels.values(), *((key,) if isinstance(key, str) else key)]
