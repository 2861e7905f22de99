"""Pictures of reports: one registry for `--plot`, which draws what was just measured, and `hf-paged bench plot`.

Nothing here imports matplotlib until a picture is drawn, so that what is missing can be said before a measurement.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError, HfPagedError, MissingDependencyError, UnknownNameError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
# Where the function is that draws a picture of a report.
_PLACES = {
    "speed": ("plots_speed", "draw_speed"),
    "concurrency": ("plots_speed", "draw_concurrency"),
    "start": ("plots_speed", "draw_start"),
    "memory": ("plots_memory", "draw_memory"),
    "pool": ("plots_memory", "draw_pool"),
    "latency": ("plots_latency", "draw_latency"),
    "serve": ("plots_serve", "draw_serve"),
    "quantization": ("plots_quantization", "draw_quantization"),
    "step": ("plots_step", "draw_step"),
    "kernels": ("plots_step", "draw_kernels"),
    "engines": ("plots_peers", "draw_engines"),
    "servers": ("plots_peers", "draw_servers"),
}
# What can be drawn of a report, by the benchmark that wrote it; the first is drawn unless another is named.
PICTURES = {
    "throughput": ("speed", "latency", "memory", "pool"),
    "concurrency": ("concurrency",),
    "prefix": ("speed", "latency", "memory", "pool"),
    "latency": ("latency", "speed"),
    "long": ("speed", "latency", "memory", "pool"),
    "step": ("step",),
    "kernels": ("kernels",),
    "memory": ("memory", "pool", "speed", "latency"),
    "quantization": ("quantization",),
    "start": ("start",),
    "serve": ("serve",),
    "engines": ("engines",),
    "servers": ("servers",),
}
# Reports without a name say by their fields what they are.
_KNOWN_BY = {
    "serve": {"request_throughput", "output_throughput", "completed"},
    "engines": {"machine", "rows", "targets", "unavailable"},
    "servers": {"medians", "results", "starts"},
}


class ReportFileError(HfPagedError, ValueError):
    """A file is not a benchmark's report, or lacks what its picture shows."""


def check_target(path: Path, kind: str | None = None, picture: str | None = None) -> None:
    """Makes sure that a picture can be drawn and written, before anything is measured.

    Args:
        path (`Path`):
            The picture's file.
        kind (`str`, *optional*):
            The benchmark.
        picture (`str`, *optional*):
            Which picture of it.

    Raises:
        MissingDependencyError: Without matplotlib.
        ConfigurationError: If the file's suffix is unknown, or it cannot be written.
        UnknownNameError: If the benchmark has no such picture.
    """
    if kind is not None:
        choose_picture(kind, picture)
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "`--plot` needs the package matplotlib, which is not installed: `pip install 'hf-paged[bench]'`."
        )
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(f"`--plot` must name a file that ends in {', '.join(SUFFIXES)}, got '{path}'.")
    check_writable(path, "--plot")


def check_writable(path: Path, flag: str) -> None:
    """Makes sure that a file can be written, before anything is measured.

    Args:
        path (`Path`):
            The file; its folder is made if need be.
        flag (`str`):
            The option that names it.

    Raises:
        ConfigurationError: If it cannot.
    """
    try:
        target = Path(os.path.realpath(path))  # a link stays, wherever it leads
        existed = target.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not existed:
            target.unlink()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(
            f"`{flag}` names '{path}', which cannot be written ({reason}); name another."
        ) from error


def choose_picture(kind: str, picture: str | None = None) -> str:
    """Returns the name of a picture of a benchmark's report.

    Args:
        kind (`str`):
            The benchmark.
        picture (`str`, *optional*):
            Which picture; the benchmark's main one by default.

    Raises:
        UnknownNameError: If there is none of that name.
    """
    names = PICTURES[kind]
    if picture is not None and picture not in names:
        raise UnknownNameError(f"Unknown `--picture` {picture!r} of `{kind}`; available: {', '.join(names)}.")
    return picture or names[0]


def kind_of(report: dict[str, Any]) -> str:
    """Returns which benchmark wrote a report.

    Args:
        report (`dict[str, Any]`):
            The report.

    Raises:
        ReportFileError: If none did.
    """
    if str(report.get("benchmark")) in PICTURES:
        return report["benchmark"]
    for kind, names in _KNOWN_BY.items():
        if names <= report.keys():
            return kind
    raise ReportFileError(
        "This JSON is no report of a benchmark; `hf-paged bench NAME --json FILE`, `bench serve --save-result FILE`, "
        "`make bench-cpu` and `make bench-serve` write such."
    )


def draw(report: dict[str, Any], picture: str | None = None) -> Figure:
    """Returns a picture of a report.

    Args:
        report (`dict[str, Any]`):
            From `Report.to_dict`, or what was read from a file.
        picture (`str`, *optional*):
            Which picture; the benchmark's main one by default.

    Raises:
        ReportFileError: If no benchmark wrote the report.
        UnknownNameError: If it has no such picture.
    """
    module, function = _PLACES[choose_picture(kind_of(report), picture)]
    drawing: Callable[[dict[str, Any]], Figure] = getattr(importlib.import_module(f".{module}", __package__), function)
    return drawing(report)


def plot_report(report: dict[str, Any], path: Path, picture: str | None = None) -> None:
    """Draws a report into a file.

    Args:
        report (`dict[str, Any]`):
            From `Report.to_dict`.
        path (`Path`):
            The file; its folder is made if need be.
        picture (`str`, *optional*):
            Which picture; the benchmark's main one by default.

    Raises:
        ReportFileError: If no benchmark wrote the report.
        UnknownNameError: If it has no such picture.
    """
    figure = draw(report, picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def plot_where_possible(report: dict[str, Any], path: Path) -> str:
    """Draws a report whose figures are written already, if there is matplotlib.

    Args:
        report (`dict[str, Any]`):
            The report.
        path (`Path`):
            The picture.

    Returns:
        `str`: The picture's file, or why there is none.
    """
    try:
        check_target(path)
    except MissingDependencyError as error:
        return f"no picture: {error}"
    plot_report(report, path)
    return str(path)


def plot_file(file: Path, path: Path | None = None, picture: str | None = None) -> Path:
    """Draws a report that was written earlier.

    Args:
        file (`Path`):
            The report's JSON.
        path (`Path`, *optional*):
            The picture; by default beside the report, as PNG.
        picture (`str`, *optional*):
            Which picture; the benchmark's main one by default.

    Returns:
        `Path`: The picture.

    Raises:
        ReportFileError: If the file is no report, or lacks what the picture shows.
        MissingDependencyError: Without matplotlib.
        ConfigurationError: If the picture cannot be written.
        UnknownNameError: If the report has no such picture.
    """
    report = read_report(file)
    kind = kind_of(report)
    path = path or file.with_suffix(".png")
    check_target(path, kind, picture)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from")  # a name in another script has boxes then
            warnings.simplefilter("error", RuntimeWarning)  # of numbers that overflow
            plot_report(report, path, picture)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeWarning) as error:
        if isinstance(error, HfPagedError):
            raise
        raise ReportFileError(
            f"'{file}' lacks what the picture `{choose_picture(kind, picture)}` of `{kind}` shows "
            f"({type(error).__name__}: {error}): it is of another version, or was changed; measure again."
        ) from error
    return path


def read_report(file: Path) -> dict[str, Any]:
    """Returns what a benchmark wrote.

    Args:
        file (`Path`):
            A file of JSON.

    Raises:
        ReportFileError: If it cannot be read, or is no object in JSON.
    """
    try:
        report = json.loads(
            file.read_text(encoding="utf-8"), parse_int=_whole, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError:
        raise ReportFileError(f"'{file}' has too many brackets within one another; measure again.") from None
    except OSError as error:
        raise ReportFileError(f"'{file}' cannot be read: {error.strerror or error}.") from error
    except ValueError as error:  # of JSON, or of UTF-8
        raise ReportFileError(f"'{file}' is not whole JSON ({error}); measure again.") from error
    if not isinstance(report, dict):
        raise ReportFileError(f"'{file}' holds {type(report).__name__}, not the JSON object that a benchmark writes.")
    return report


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no number that can be drawn")
    return value


def _whole(text: str) -> int:
    _finite(text)
    return int(text)
