"""Everything that only a GPU can show, in at most 4.5 minutes: `python benchmarks/gpu/run.py`.

`--dry-run` runs the whole script on a CPU, with tiny shapes and the kernels in Triton's interpreter. See README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file: the packages beside it are found all the same
    sys.path[0] = str(ROOT)

from benchmarks.gpu.conductor import Conductor  # noqa: E402
from benchmarks.gpu.settings import DRY_PATIENCE, PARTS, PLOT_SECONDS, TOTAL_SECONDS, Part, Settings  # noqa: E402
from benchmarks.gpu.targets import Rows, Target, all_targets, correctness_targets  # noqa: E402

GIVEN_MODEL = Part("given_model", 45)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line.

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu/run.py", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU, to see that everything runs")
    parser.add_argument("--model", help="a Transformers folder whose parity and speed are measured as well")
    parser.add_argument("--parts", default=",".join(names), help=f"with commas between; available: {', '.join(names)}")
    parser.add_argument(
        "--seconds", type=float, help=f"of the whole run, shared out among its parts; by default {TOTAL_SECONDS:g}"
    )
    parser.add_argument("--results", type=Path, help="folder; by default build/bench-gpu")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    unknown = set(arguments.parts.split(",")) - set(names)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; available: {', '.join(names)}")
    if arguments.results is None:
        arguments.results = ROOT / "build" / ("bench-gpu-dry-run" if arguments.dry_run else "bench-gpu")
    arguments.stretches = arguments.seconds is not None
    if arguments.seconds is None:
        arguments.seconds = TOTAL_SECONDS * (DRY_PATIENCE if arguments.dry_run else 1)
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Runs the parts, prints the targets, writes JSON and plots; returns 1 if a part failed or a case is wrong.

    Args:
        words (`Sequence[str]`, *optional*):
            Instead of the command line's.
    """
    arguments = parse(words)
    obstacle = None if arguments.dry_run else gpu_obstacle()
    if obstacle:
        print(f"{obstacle}; `--dry-run` runs the script on a CPU", file=sys.stderr)
        return 2
    began = time.monotonic()

    def log(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)

    wanted = arguments.parts.split(",")
    parts = [part for part in PARTS if part.name in wanted] + ([GIVEN_MODEL] if arguments.model else [])
    if arguments.dry_run:
        parts = [Part(part.name, part.seconds * DRY_PATIENCE) for part in parts]
    if arguments.stretches:
        parts = stretched(parts, arguments.seconds)
    device = "cpu" if arguments.dry_run else "cuda"
    settings = Settings(device, arguments.dry_run, arguments.model, arguments.seed)
    path = arguments.results / "bench_gpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".log").unlink(missing_ok=True)
    conductor = Conductor(settings, path, arguments.seconds, log)
    results = conductor.run(parts)
    rows: Rows = {name: part["rows"] for name, part in results["parts"].items()}
    # Speeds of a dry run say nothing.
    targets = correctness_targets(rows) if arguments.dry_run else all_targets(rows)
    results["targets"] = [target.to_dict() for target in targets]
    results["seconds"] = time.monotonic() - began
    conductor.write()
    draw(rows, arguments.results, log)
    for target in targets:
        print(target.describe())
    print(f"written: {path} ({time.monotonic() - began:.0f} s)")
    return exit_code(results["parts"], targets)


def stretched(parts: Sequence[Part], seconds: float) -> list[Part]:
    """Returns parts with what they have more, in proportion, where that is more than all need.

    Args:
        parts (`Sequence[Part]`):
            The parts.
        seconds (`float`):
            Of the whole run.
    """
    scale = max(1.0, (seconds - PLOT_SECONDS) / sum(part.seconds for part in parts))
    return [Part(part.name, part.seconds * scale) for part in parts]


def gpu_obstacle() -> str | None:
    """Returns why there is nothing to measure here, or `None`."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU here"
    from hf_paged.kernels.triton.device import unavailable_reason

    reason = unavailable_reason()
    return f"the Triton backend cannot be used: it {reason}" if reason else None


def draw(rows: Rows, folder: Path, log: Callable[[str], None]) -> None:
    """Draws plots, or says why there are none.

    Args:
        rows (`Rows`):
            Rows of all parts, by name.
        folder (`Path`):
            Where they go.
        log (`Callable[[str], None]`):
            Told what was drawn.
    """
    from benchmarks.gpu.plots import plot_all

    about = next((row for row in rows.get("machine", []) if "device" in row), {"device": "unknown device"})
    try:
        drawn = plot_all(rows, folder, str(about.get("says", about["device"])))
    except ImportError as error:
        log(f"no plots: {error}")
    else:
        log(f"plots: {', '.join(str(path) for path in drawn) or 'none'}")


def exit_code(parts: dict[str, dict], targets: Sequence[Target]) -> int:
    """Returns 1 if a part failed or something was computed wrongly; missed speeds are figures, not failures.

    Args:
        parts (`dict[str, dict]`):
            What the parts did.
        targets (`Sequence[Target]`):
            All targets.
    """
    wrong = [target for target in targets if target.limit == 0 and target.is_met is False]
    return int(bool(wrong) or any(part["error"] for part in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
