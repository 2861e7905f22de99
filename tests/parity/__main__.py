"""Prints the parity matrix: `python -m tests.parity`."""

from __future__ import annotations

import argparse
import sys

import torch
import transformers

from hf_paged.generation.coverage import coverage
from hf_paged.tools.packaged_model import packaged_model_path
from tests.parity.cases import CASES
from tests.parity.combinations import combination
from tests.parity.comparison import Comparison, compare
from tests.parity.world import World

HEADER = f"{'field':34} {'way':11} {'engine steps':13} {'result':11} {'max score difference':21} {'rows of scores'}"


def main() -> int:
    """Compares everything, and returns 1 if anything differs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--combinations", type=int, default=200, help="how many random combinations")
    parser.add_argument("--layers", type=int, help="keep only so many layers of the model: faster, less real")
    parser.add_argument("--only", nargs="*", help="names of fields, or numbers of combinations")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    world = World(str(packaged_model_path()), given.layers)
    entries, failed = coverage(), 0
    print(f"Transformers {transformers.__version__}, torch {torch.__version__}, {world.paged.config._name_or_path}")
    print(HEADER)
    for name, case in CASES.items():
        if name in entries and (not given.only or name in given.only):
            failed += _print(name, entries[name].way.value, compare(world, case))
    for number in range(given.combinations):
        if not given.only or str(number) in given.only:
            name, case = combination(number)
            failed += _print(name, "", compare(world, case))
    print(f"{failed} differ")
    return int(failed > 0)


def _print(name: str, way: str, found: Comparison) -> int:
    result = "DIFFERENT" if found.problems else "same error" if found.error else "same"
    steps = found.engine_steps
    print(
        f"{name:34} {way:11} {steps:<13} {result:11} {found.max_difference:<21.1e} {found.compared_scores}", flush=True
    )
    for line in [*found.problems[:3], *([found.error] if found.error and not found.problems else [])]:
        print(f"    {line[:200]}")
    return int(bool(found.problems))


if __name__ == "__main__":
    sys.exit(main())
