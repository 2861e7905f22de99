"""`hf-paged quantize`: from a dense checkpoint to a quantized one, which is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, NotSupportedError
from ..quantization.recipes import Recipe

logger = logging.getLogger(__name__)

NUM_SAMPLES = 64
SEQ_LENGTH = 512
_MANY_BYTES = 20 << 20  # beside weights: a tokenizer
Progress = Callable[[int, int], object]


@dataclasses.dataclass(frozen=True)
class QuantizeJob:
    """What is to be done.

    Args:
        model (`str`):
            A folder or a name on the Hub: a dense checkpoint.
        out (`Path`):
            The folder to write; it must not exist, or be empty.
        recipe (`Recipe`):
            How.
        calibration (`Path`, *optional*):
            A file of text, by default English text that is on every machine.
        num_samples (`int`, defaults to 64):
            Pieces of that text.
        seq_length (`int`, defaults to 512):
            Tokens of a piece.

    Raises:
        ConfigurationError: If a number makes no sense, or a file is named that is not looked at.
    """

    model: str
    out: Path
    recipe: Recipe
    calibration: Path | None = None
    num_samples: int = NUM_SAMPLES
    seq_length: int = SEQ_LENGTH

    def __post_init__(self):
        if self.num_samples < 1:
            raise ConfigurationError(f"`num_samples` must be at least 1, got {self.num_samples}.")
        if self.seq_length < 8:
            raise ConfigurationError(f"`seq_length` must be at least 8, got {self.seq_length}.")
        if self.calibration is not None and not self.recipe.is_calibrated:
            raise ConfigurationError(f"`{self.recipe.method}` looks at no text; leave `--calibration` out.")


@dataclasses.dataclass(frozen=True)
class QuantizeResult:
    """What was done.

    Args:
        out (`str`):
            The folder.
        model (`str`):
            What it was made of.
        method (`str`):
            By which method.
        bits (`int`):
            Of a number.
        group_size (`int`):
            That was chosen; -1 is a whole row.
        symmetric (`bool`):
            Whether zero is in the middle of the codes.
        layout (`str`):
            The `quant_method` in its config.json.
        num_linears (`int`):
            Linears that are quantized.
        num_dense (`int`):
            Linears that are not.
        weight_bytes (`int`):
            Of its files of weights.
        dense_bytes (`int`):
            Of the dense weights.
        calibration (`str`, *optional*):
            What was looked at.
        calibration_tokens (`int`):
            So many tokens of it.
        error (`float`, *optional*):
            With calibration: the squared error of a linear's output in relation to its square, mean over linears.
        seconds (`float`):
            How long it took.
    """

    out: str
    model: str
    method: str
    bits: int
    group_size: int
    symmetric: bool
    layout: str
    num_linears: int
    num_dense: int
    weight_bytes: int
    dense_bytes: int
    calibration: str | None
    calibration_tokens: int
    error: float | None
    seconds: float

    def describe(self) -> str:
        """Returns lines for people."""
        groups = "one scale a row" if self.group_size == -1 else f"groups of {self.group_size}"
        kind = "float8 e4m3" if self.method == "fp8" else f"{self.bits} bits"
        lines = [
            f"{self.out}: {self.weight_bytes / 1e6:,.0f} MB of weights, dense {self.dense_bytes / 1e6:,.0f} MB",
            f"{self.method}, {kind}, {groups}, {'symmetric' if self.symmetric else 'asymmetric'}, in the layout of "
            f"{self.layout}: {self.num_linears} linears, {self.num_dense} left dense",
        ]
        if self.calibration is not None:
            lines.append(f"calibrated on {self.calibration_tokens:,} tokens: {self.calibration}")
        if self.error is not None:
            lines.append(f"squared error of a linear's output, mean: {self.error:.2%}")
        return "\n".join(lines)


def check_out(out: Path) -> None:
    """Refuses a folder that holds something.

    Args:
        out (`Path`):
            The folder to write.

    Raises:
        ConfigurationError: If it is a file, or is not empty.
    """
    if out.is_dir():
        if any(out.iterdir()):
            raise ConfigurationError(f"OUT '{out}' exists and is not empty; name another folder, or remove it.")
    elif out.exists() or out.is_symlink():
        raise ConfigurationError(f"OUT '{out}' exists and is no folder; name another one.")


def quantize_checkpoint(
    job: QuantizeJob, progress: Progress = lambda done, count: None, log: Callable[[str], object] = logger.info
) -> QuantizeResult:
    """Reads a checkpoint, quantizes it, and writes another one.

    Args:
        job (`QuantizeJob`):
            What is to be done.
        progress (`Callable[[int, int], object]`, *optional*):
            Told how many layers of how many are done.
        log (`Callable[[str], object]`, *optional*):
            Told what is being done.

    Raises:
        ConfigurationError: If OUT cannot be written, a group size does not fit, or there is no text.
        NotSupportedError: If the checkpoint is quantized already, or the method cannot be used with the model.
    """
    begin = time.perf_counter()
    check_out(job.out)
    with _folder_beside(job.out) as folder:
        config = _dense_config(job.model)
        tokenizer = _tokenizer(job, log)
        windows, text = _windows(job, config, tokenizer)
        log(f"loading {job.model}")
        model = _load(job.model)
        dense_bytes = sum(parameter.nbytes for parameter in model.parameters())
        _check_room(job, model)
        from ..quantization.making import quantize_with

        made = quantize_with(model, job.recipe, windows, progress)
        log("writing")
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        errors = list(made.errors.values())
        result = QuantizeResult(
            out=str(job.out),
            model=job.model,
            method=made.recipe.method,
            bits=made.recipe.bits,
            group_size=made.recipe.group_size or -1,
            symmetric=made.recipe.is_symmetric,
            layout=json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"],
            num_linears=len(made.linears),
            num_dense=len(made.dense),
            weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
            dense_bytes=dense_bytes,
            calibration=text,
            calibration_tokens=sum(window.numel() for window in windows),
            error=sum(errors) / len(errors) if errors else None,
            seconds=time.perf_counter() - begin,
        )
        from .model_card import model_card

        model_card(result).save(folder / "README.md")
        os.rename(folder, job.out)
    return result


@contextlib.contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """A folder beside another one, so that it can become that one; what is left of it is removed."""
    made: list[Path] = []
    try:
        for parent in reversed([out.parent, *out.parent.parents]):
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        folder.chmod(0o755)
    except OSError as error:
        raise ConfigurationError(
            f"OUT '{out}' cannot be written ({error.strerror or error}); name another folder."
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in reversed(made):
            with contextlib.suppress(OSError):  # of those that hold what was written
                parent.rmdir()


def _dense_config(model: str) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    found = getattr(config, "quantization_config", None)
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
        raise NotSupportedError(f"{model!r} is quantized already, by {method!r}; name the dense checkpoint.")
    return config


def _tokenizer(job: QuantizeJob, log: Callable[[str], object]) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(job.model)
    except (OSError, ValueError) as error:
        if job.recipe.is_calibrated:
            raise ConfigurationError(
                f"{job.model!r} has no tokenizer that can be loaded, and `{job.recipe.method}` looks at text "
                f"({str(error).splitlines()[0]}); `rtn` needs none."
            ) from error
        log("there is no tokenizer, so none is written")
        return None


def _windows(job: QuantizeJob, config: Any, tokenizer: Any) -> tuple[list[Any], str | None]:
    if not job.recipe.is_calibrated:
        return [], None
    import torch

    from .english import calibration_name, calibration_texts, read_texts, token_windows

    texts = calibration_texts() if job.calibration is None else read_texts(job.calibration)
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or job.seq_length
    windows = token_windows(tokenizer, texts, min(job.seq_length, longest), job.num_samples)
    name = calibration_name() if job.calibration is None else f"the file {job.calibration.name}"
    return [torch.tensor([window]) for window in windows], name


def _load(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype="auto", use_safetensors=True)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        raise NotSupportedError(
            f"{model!r} is no decoder-only language model, which is all that is quantized."
        ) from error


def _check_room(job: QuantizeJob, model: Any) -> None:
    """Before an hour of work: is there room for what it makes?"""
    from ..quantization.making import choose_linears

    linears, _ = choose_linears(model, job.recipe)
    size = 128 if job.recipe.group_size in (None, -1) else job.recipe.group_size
    packed = {id(linear.weight): linear.weight.numel() for linear in linears.values()}
    needed = sum(int(count * (job.recipe.bits / 8 + 4 / size)) for count in packed.values()) + _MANY_BYTES
    needed += sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in packed)
    free = shutil.disk_usage(job.out.parent).free
    if free < needed:
        raise ConfigurationError(
            f"OUT '{job.out}' needs about {needed / 1e6:,.0f} MB, and its disk has {free / 1e6:,.0f} MB free; make "
            "room, or name a folder elsewhere."
        )
