"""`hf-paged bench quantization`: what quantized weights save, and what they cost; each in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...configuration import PagedConfig
from ...errors import UnknownNameError
from ...kernels.cpu import library
from ...quantization.on_load import SCHEMES
from ...quantization.recipes import Recipe
from ..noisy_copy import write_noisy_copy
from ..perplexity import english_windows
from ..quantize import NUM_SAMPLES, QuantizeJob, quantize_checkpoint
from .fresh_process import measure_in_fresh_process
from .report import Column, Report, mebibytes, milliseconds, one_decimal
from .session import BENCHMARKS, BenchSession

DENSE = "bf16"


def three_decimals(value: float) -> str:
    """Returns a number with three decimals.

    Args:
        value (`float`):
            The number.
    """
    return f"{value:.3f}"


def signed_percent(share: float) -> str:
    """Returns a share in percent, with its sign.

    Args:
        share (`float`):
            0 is no difference.
    """
    return f"{share * 100:+.2f} %"


def two_decimal_times(factor: float) -> str:
    """Returns a factor.

    Args:
        factor (`float`):
            1 is no difference.
    """
    return f"{factor:.2f}x"


COLUMNS = (
    Column("system", "weights"),
    Column("model_bytes", "size", mebibytes),
    Column("perplexity", "perplexity", three_decimals),
    Column("perplexity_change", "more than dense", signed_percent),
    Column("seconds_per_token", "one stream, ms/token", milliseconds),
    Column("seconds_factor", "of dense", two_decimal_times),
    Column("output_tokens_per_s", "W1, tokens/s", one_decimal),
    Column("speed_factor", "of dense", two_decimal_times),
    Column("growth_bytes", "memory added", mebibytes),
    Column("growth_factor", "of dense", two_decimal_times),
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row.

    Args:
        quantize (`str`, *optional*):
            Of `from_pretrained`.
        recipe (`Recipe`, *optional*):
            Of a checkpoint that is made first.
        settings (`dict[str, Any]`, defaults to `{}`):
            Of the engine, such as another dtype of K/V.
    """

    quantize: str | None = None
    recipe: Recipe | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


VARIANTS: dict[str, Variant] = {
    DENSE: Variant(),
    **{scheme: Variant(quantize=scheme) for scheme in SCHEMES},
    "rtn-int4": Variant(recipe=Recipe("rtn", symmetric=False)),
    "gptq-int4": Variant(recipe=Recipe("gptq")),
    "awq-int4": Variant(recipe=Recipe("awq")),
    "rtn-int8": Variant(recipe=Recipe("rtn", 8)),
    "rtn-fp8": Variant(recipe=Recipe("fp8", 8)),
}
# Measured only where they are asked for: as what `quantize=` makes, but for the embeddings.
_NOT_BY_DEFAULT = ("rtn-int8", "rtn-fp8")


def chosen_variants(only: str | None) -> dict[str, Variant]:
    """Returns the rows to measure; the dense model is always among them.

    Args:
        only (`str`, *optional*):
            Their names, separated by commas.

    Raises:
        UnknownNameError: If there is none of a name.
    """
    names = [name for name in VARIANTS if name not in _NOT_BY_DEFAULT]
    if only is not None:
        names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in VARIANTS:
            raise UnknownNameError(f"Unknown row {name!r} of `only`; available: {', '.join(VARIANTS)}.")
    return {name: variant for name, variant in VARIANTS.items() if name == DENSE or name in names}


@BENCHMARKS.register("quantization")
def quantization(session: BenchSession) -> Report:
    """Measures the dense model and quantized ones, one after the other, each in a fresh process.

    Args:
        session (`BenchSession`):
            Models and texts.
    """
    variants = chosen_variants(session.options.only)
    library.load()  # so that no process builds it
    windows, text = english_windows(session.tokenizer)
    if session.options.count is not None:
        windows = windows[: session.options.count]
    one, many = session.workload("W3"), session.workload("W1")
    settings = {
        "dtype": session.options.dtype,
        "runs": session.options.runs,
        "windows": windows,
        "text": text,
        "one": one.to_dict(),
        "many": many.to_dict(),
    }
    rows = []
    with _source(session) as source, tempfile.TemporaryDirectory() as folder:
        for name, variant in variants.items():
            path, made = _made(session, source, name, variant, Path(folder))
            session.log(f"measuring {name}")
            config = dataclasses.replace(session.options.config or PagedConfig(), **variant.settings)
            wanted = {"model": path, "quantize": variant.quantize, "config": config.to_dict()}
            row = {"system": name, **made, "read_bandwidth": session.bandwidth()}
            rows.append(row | measure_in_fresh_process("quantization_process", settings | wanted))
    _compare(rows)
    notes = [f"perplexity of {rows[0]['perplexity_tokens']:,} tokens: {text}"]
    notes += [_describe_checkpoints(rows)] if any(row.get("recipe") for row in rows) else []
    noise = session.options.noise
    notes += [f"the weights carry {noise:.1%} of seeded noise"] if noise else []
    details = {"workload": f"{one.describe()}; {many.describe()}", "noise": noise}
    return Report(f"Quantized weights (median of {session.options.runs})", COLUMNS, rows, notes, details)


@contextlib.contextmanager
def _source(session: BenchSession) -> Iterator[str]:
    """The dense model, or a copy of it with noise."""
    if not session.options.noise:
        yield session.path
        return
    with tempfile.TemporaryDirectory() as folder:
        session.log(f"adding {session.options.noise:.1%} of noise to a copy of the weights")
        write_noisy_copy(session.path, Path(folder), session.options.noise)
        yield folder


def _made(session: BenchSession, source: str, name: str, variant: Variant, folder: Path) -> tuple[str, dict[str, Any]]:
    """The checkpoint of a row, and how it was made."""
    if variant.recipe is None:
        return source, {}
    session.log(f"making {name}")
    samples = min(NUM_SAMPLES, session.options.count or NUM_SAMPLES)
    result = quantize_checkpoint(QuantizeJob(source, folder / name, variant.recipe, num_samples=samples))
    recipe = dataclasses.asdict(result) | {"out": name, "model": session.path}
    return str(folder / name), {"recipe": recipe, "making_seconds": result.seconds}


def _describe_checkpoints(rows: list[dict[str, Any]]) -> str:
    made = {row["system"]: row["recipe"] for row in rows if row.get("recipe")}
    said = ", ".join(f"{name} ({_groups(recipe)})" for name, recipe in made.items())
    return f"checkpoints of `hf-paged quantize`: {said}; the other rows are `quantize=` on load"


def _groups(recipe: dict[str, Any]) -> str:
    size = "a scale a row" if recipe["group_size"] == -1 else f"groups of {recipe['group_size']}"
    return f"{size}, {'symmetric' if recipe['symmetric'] else 'asymmetric'}"


def _compare(rows: list[dict[str, Any]]) -> None:
    dense = rows[0]
    for row in rows[1:]:
        row["perplexity_change"] = row["perplexity"] / dense["perplexity"] - 1
        row["seconds_factor"] = row["seconds_per_token"] / dense["seconds_per_token"]
        row["speed_factor"] = row["output_tokens_per_s"] / dense["output_tokens_per_s"]
        if row["growth_bytes"] and dense["growth_bytes"]:
            row["growth_factor"] = row["growth_bytes"] / dense["growth_bytes"]
