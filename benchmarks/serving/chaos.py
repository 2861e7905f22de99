"""What happens when things go wrong: stopped processes, clients that vanish, failing steps, signals, nonsense.

python -m benchmarks.serving.chaos                     # all scenarios, ten minutes of mixed load
python -m benchmarks.serving.chaos --only drop,idle
python -m benchmarks.serving.chaos --seconds 60
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hf_paged.tools.bench.report import log_console, output_console, write_json
from hf_paged.tools.packaged_model import packaged_model_path

from .chaos_client import ANSWERED, DROPPED, FAILED, LOST, REFUSED, Tally
from .chaos_scenarios import SCENARIOS, Place
from .servers import end_servers_when_terminated, make_parser


def main() -> None:
    """Runs what the command line asks for; exit code 1 if anything was lost or not as it should be."""
    end_servers_when_terminated()
    arguments = parse()
    console, log = output_console(), log_console()
    model = Path(arguments.model) if arguments.model else packaged_model_path()
    place = Place(model, arguments.results, arguments.seconds, arguments.seed)
    tallies = []
    for name in arguments.only.split(","):
        begin = time.perf_counter()
        tally = SCENARIOS[name](place)
        tally.notes["seconds"] = round(time.perf_counter() - begin, 1)
        tally.notes["load_average"] = round(os.getloadavg()[0], 1)
        tallies.append(tally)
        log.print(f"{name}: {tally.to_dict()}", highlight=False, markup=False)
    print_tallies(console, tallies)
    write_json(arguments.results / "chaos.json", {"scenarios": [tally.to_dict() for tally in tallies]})
    if any(tally.problems or tally.kinds[LOST] for tally in tallies):
        sys.exit(1)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line.

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    parser = make_parser("chaos", __doc__)
    parser.add_argument("--only", default=",".join(SCENARIOS), help=f"with commas between: {', '.join(SCENARIOS)}")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the mixed load")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    if set(arguments.only.split(",")) - set(SCENARIOS):
        parser.error(f"--only: there are {', '.join(SCENARIOS)}")
    return arguments


def print_tallies(console: Any, tallies: Sequence[Tally]) -> None:
    """Prints a table, and what is not as it should be.

    Args:
        console (`Console`):
            Where to.
        tallies (`Sequence[Tally]`):
            What was counted.
    """
    table = Table(title="Chaos", title_justify="left")
    table.add_column("scenario")
    kinds = (ANSWERED, REFUSED, FAILED, DROPPED, LOST)
    for title in ("sent", *kinds, "blocks in use at the end"):
        table.add_column(title, justify="right")
    for tally in tallies:
        counts = [str(tally.kinds[kind]) for kind in kinds]
        table.add_row(tally.name, str(tally.sent), *counts, str(tally.notes.get("blocks_in_use", "-")))
    console.print(table)
    for tally in tallies:
        for problem in tally.problems:
            console.print(f"{tally.name}: NOT SO: {problem}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
