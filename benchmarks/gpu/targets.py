"""The speeds that hf_paged must reach on a GPU, each beside its figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..target import Target

Rows = dict[str, list[dict[str, Any]]]
OURS = "hf_paged"


def all_targets(rows: Rows) -> list[Target]:
    """Returns all targets.

    Args:
        rows (`Rows`):
            Rows of all parts, by name.
    """
    return [*correctness_targets(rows), *speed_targets(rows)]


def correctness_targets(rows: Rows) -> list[Target]:
    """Returns what must be right, and can be tried in a dry run as well.

    Args:
        rows (`Rows`):
            Rows of all parts, by name.
    """
    return [
        Target("essential checks that fail", 0, False, _worst(rows.get("essentials", []), "failed_checks", max)),
        Target("kernel cases that fail", 0, False, _worst(rows.get("cases", []), "failed_cases", max)),
        Target("parity failures", 0, False, parity_failures(rows)),
        Target("sleeps that fail", 0, False, _worst(rows.get("memory", []), "sleep_failures", max)),
    ]


def speed_targets(rows: Rows) -> list[Target]:
    """Returns what must be fast.

    Args:
        rows (`Rows`):
            Rows of all parts, by name.
    """
    attention = [row for row in rows.get("attention", []) if "seconds" in row]
    decodes = [row for row in attention if row["kind"] == "decode" and row["system"] == OURS]
    many = [row for row in decodes if row["num_requests"] >= 32 and row["context"] >= 2048]
    one = [row for row in decodes if row["num_requests"] == 1 and row["context"] >= 32768]
    large, small, latency = (rows.get(part, []) for part in ("large_model", "small_model", "latency"))
    with_graphs = [row for row in large if row.get("mode") == "graphs"]
    return [
        Target("decoding 32 and more x 2k and more: share of copy", 0.85, True, _worst(many, "bandwidth_share", min)),
        Target("decoding 1 x 32k: share of copy bandwidth", 0.70, True, _worst(one, "bandwidth_share", min)),
        Target("prefill against SDPA's flash kernel", 0.9, True, prefill_against_sdpa(attention)),
        Target("8B: decode step over what memory allows", 1.25, False, _worst(with_graphs, "over_floor", max)),
        *(
            Target(f"{name}: tokens/s against {rival}", limit, True, against(part, rival))
            for name, part in (("8B", large), ("135M", small))
            for rival, limit in (("generate, one by one", 24.0), ("generate_batch", 3.0))
        ),
        Target("8B: share of time in which the GPU is busy", 0.97, True, _worst(with_graphs, "busy_share", min)),
        Target("memory used beside the plan, share of all", 0.02, False, memory_error(rows.get("memory", []))),
        Target("p99 between tokens over the median", 2.0, False, _worst(latency, "p99_over_median", max)),
    ]


def parity_failures(rows: Rows) -> float | None:
    """Returns how many models gave tokens that stock Transformers does not choose, or `None` if none was tried.

    Args:
        rows (`Rows`):
            Rows of all parts, by name.
    """
    tried = [row for part in ("parity", "given_model") for row in rows.get(part, []) if "worst_regret" in row]
    return float(sum(not row["passed"] for row in tried)) if tried else None


def memory_error(rows: Iterable[dict[str, Any]]) -> float | None:
    """Returns how far what is used is from what was planned, or `None` if that was not measured.

    Args:
        rows (`Iterable[dict[str, Any]]`):
            Of the part `memory`.
    """
    return _worst([{"error": abs(row["memory_share"])} for row in rows if "memory_share" in row], "error", max)


def prefill_against_sdpa(attention: Iterable[dict[str, Any]]) -> float | None:
    """Returns SDPA's time over ours on the prefill where we do worst.

    Args:
        attention (`Iterable[dict[str, Any]]`):
            Timed rows.
    """
    times: dict[str, dict[str, float]] = {}
    for row in attention:
        if row["kind"] == "prefill":
            times.setdefault(row["problem"], {})[row["system"]] = row["seconds"]
    ratios = [found["sdpa"] / found[OURS] for found in times.values() if {"sdpa", OURS} <= set(found)]
    return min(ratios, default=None)


def against(part: Iterable[dict[str, Any]], rival: str) -> float | None:
    """Returns our tokens per second over a rival's, on the largest load that both answered.

    Args:
        part (`Iterable[dict[str, Any]]`):
            Rows of a model.
        rival (`str`):
            Name of the other system.
    """
    rates = {
        (row["system"], row["requests"]): row["output_tokens_per_s"] for row in part if row.get("output_tokens_per_s")
    }
    both = [count for system, count in rates if system == rival and (OURS, count) in rates]
    return rates[OURS, max(both)] / rates[rival, max(both)] if both else None


def _worst(rows: Iterable[dict[str, Any]], name: str, worst: Callable[..., float]) -> float | None:
    found = [row[name] for row in rows if row.get(name) is not None]
    return worst(found) if found else None
