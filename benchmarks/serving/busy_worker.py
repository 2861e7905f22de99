"""As busy as a benchmark's client: a share of a core, in slices, until it is ended."""

from __future__ import annotations

import sys
import time

SLICE = 0.02


def main() -> None:
    """Spins for its share of each slice, sleeps for the rest."""
    share = float(sys.argv[1])
    while True:
        end = time.perf_counter() + SLICE * share
        while time.perf_counter() < end:
            pass
        time.sleep(SLICE * (1 - share))


if __name__ == "__main__":
    main()
