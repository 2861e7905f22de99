"""`python -m benchmarks.gates`, or `make gates`: compiles every Triton kernel ahead of time and judges the code.

Needs no GPU. Every configuration of every kernel is compiled for each architecture that uses it, with the oldest Triton
that is supported and with the newest. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_paged.tools.bench.report import log_console, write_json

from . import baseline
from .architectures import ARCHITECTURES
from .checks import violations
from .environments import FOLDER, VERSIONS, TritonInstall, TritonUnavailableError, install
from .processes import compile_all, list_variants
from .report import summary, table, violation_lines, write_figures

# Configurations of each kernel and architecture in a sample: of those with matrix products, and of the others.
SAMPLE = {True: 3, False: 1}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line.

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gates", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the new baseline, and figures.md")
    parser.add_argument("--sample", action="store_true", help="some configurations of each kernel")
    parser.add_argument(
        "--sample-if-unchanged", action="store_true", help="--sample, if no kernel has changed since the baseline"
    )
    parser.add_argument("--only", help="kernels and configurations whose name contains this")
    parser.add_argument("--targets", default=",".join(ARCHITECTURES), help="architectures, with commas between")
    parser.add_argument("--versions", default=",".join(VERSIONS), help="of Triton, with commas between")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, default=FOLDER / "gates.json", help="where all figures go")
    arguments = parser.parse_args(words)
    arguments.sample |= arguments.sample_if_unchanged and baseline.is_of_these_sources()
    for given, known in ((arguments.targets, ARCHITECTURES), (arguments.versions, VERSIONS)):
        unknown = set(given.split(",")) - set(known)
        if unknown:
            parser.error(f"unknown: {', '.join(sorted(unknown))}; available: {', '.join(known)}")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Compiles, prints the report and returns how many compilations violate something (at most 100).

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    arguments = parse(words)
    log = log_console()

    def tell(line: str) -> None:
        log.print(line, highlight=False, markup=False)

    try:
        tritons = [install(name, tell) for name in arguments.versions.split(",")]
    except TritonUnavailableError as error:
        tell(str(error))
        return 1
    rows = compile_with(tritons, arguments, tell)
    if not rows:
        tell("nothing was compiled: no kernel of that name for these architectures")
        return 1
    if arguments.record:
        baseline.record(rows, keep=is_partial(arguments))
        if not is_partial(arguments):
            write_figures(rows)
            baseline.record_sources()
    counts = baseline.read()
    for row in rows:
        row["violations"] = list(violations(row, baseline.recorded(counts, row)))
        row["violations"] += missing(row, counts)
    lines = table(rows)
    for version in sorted({triton.version for triton in tritons} - baseline.versions_of(counts)):
        lines.append(f"Nothing is recorded of Triton {version}: its instruction counts were not compared.")
    print(*lines, *violation_lines(rows), summary(rows), sep="\n")
    write_json(arguments.json, {"triton": [triton.full_version for triton in tritons], "rows": rows})
    return min(sum(bool(row["violations"]) for row in rows), 100)


def compile_with(
    tritons: Iterable[TritonInstall], arguments: argparse.Namespace, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Returns a row for each kernel, architecture and version.

    Args:
        tritons (`Iterable[TritonInstall]`):
            The versions.
        arguments (`argparse.Namespace`):
            The command line's.
        tell (`Callable[[str], None]`):
            Told how it goes.
    """
    targets = arguments.targets.split(",")
    rows = []
    for triton in tritons:
        jobs = choose(list_variants(triton), targets, arguments.only, arguments.sample)
        tell(f"Triton {triton.full_version}: {len(jobs)} compilations")
        rows += compile_all(jobs, triton, arguments.processes, Progress(len(jobs), tell))
    return rows


def choose(
    variants: Sequence[dict[str, Any]], targets: Sequence[str], only: str | None = None, sample: bool = False
) -> list[dict[str, Any]]:
    """Returns what is compiled.

    Args:
        variants (`Sequence[dict[str, Any]]`):
            From `processes.list_variants`.
        targets (`Sequence[str]`):
            Architectures.
        only (`str`, *optional*):
            What names contain.
        sample (`bool`, defaults to `False`):
            Only some configurations of each kernel (`SAMPLE`), other ones for each architecture.
    """
    wanted = [v for v in variants if only is None or only in v["name"] or only in v["kernel"]]
    pairs = [(variant, target) for target in targets for variant in wanted if target in variant["targets"]]
    if sample:
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for variant, target in pairs:
            groups.setdefault((variant["kernel"], target), []).append(variant)
        pairs = [(v, target) for (_, target), group in groups.items() for v in spread(group, targets.index(target))]
    return [{"variant": variant["name"], "target": target} for variant, target in pairs]


def spread(group: Sequence[dict[str, Any]], offset: int) -> list[dict[str, Any]]:
    """Returns at most as many of a kernel's configurations as `SAMPLE` says, as far apart in the list as can be.

    Args:
        group (`Sequence[dict[str, Any]]`):
            All of them.
        offset (`int`):
            Where to begin.
    """
    count = min(SAMPLE[group[0]["has_dot"]], len(group))
    return [group[(offset + number * len(group) // count) % len(group)] for number in range(count)]


def missing(row: dict[str, Any], counts: baseline.Counts) -> list[str]:
    """Returns the complaint about a kernel that nobody has recorded, or nothing.

    Args:
        row (`dict[str, Any]`):
            What was compiled.
        counts (`baseline.Counts`):
            What is recorded.
    """
    known = row["version"] not in baseline.versions_of(counts) or baseline.recorded(counts, row) is not None
    if known or "figures" not in row:
        return []
    return ["is not recorded; look at its figures, then `make gates ARGS=--record`"]


def is_partial(arguments: argparse.Namespace) -> bool:
    """Returns whether only some kernels, architectures or versions were asked for.

    Args:
        arguments (`argparse.Namespace`):
            The command line's.
    """
    everything = {"targets": set(ARCHITECTURES), "versions": set(VERSIONS)}
    given = any(set(getattr(arguments, name).split(",")) != whole for name, whole in everything.items())
    return given or arguments.sample or arguments.only is not None


class Progress:
    """Says now and then how far a run is; called from several threads.

    Args:
        total (`int`):
            Compilations of the run.
        tell (`Callable[[str], None]`):
            Told a line.
    """

    SECONDS = 20.0

    def __init__(self, total: int, tell: Callable[[str], None]):
        self._total, self._tell = total, tell
        self._done, self._said = 0, time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._done += 1
            if time.monotonic() > self._said + self.SECONDS or self._done == self._total:
                self._said = time.monotonic()
                self._tell(f"    {self._done} of {self._total} ({row['name']}, {row['target']})")


if __name__ == "__main__":
    sys.exit(main())
