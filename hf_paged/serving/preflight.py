"""What flags ask for that cannot be, found before a model is loaded, and most of it before torch is imported."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, InvalidRequestError, UnknownNameError
from ..generation.sampling.params import SamplingParams
from .command_line import UsageError
from .reasoning_parsers import get_reasoning_parser
from .settings import ServerSettings
from .tool_parsers import get_tool_parser

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
_HUB_SECONDS = 10


def check_flags(settings: ServerSettings) -> None:
    """Refuses what is understood and can be seen to be impossible without a model.

    Args:
        settings (`ServerSettings`):
            What was asked for.

    Raises:
        UsageError: Names the flag, its value, the limit and the way out.
    """
    if settings.tensor_parallel_size > 1:
        raise UsageError(
            f"`--tensor-parallel-size` {settings.tensor_parallel_size} is not built yet; the engine runs on one "
            "device: leave it out."
        )
    _check_sampling_defaults(settings.override_generation_config or {})
    _check_parsers(settings)
    if settings.chat_template is not None:
        load_chat_template(settings.chat_template)
    if settings.device not in ("auto", "cpu"):
        _check_device(settings.device)


def _check_sampling_defaults(given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in SAMPLING_DEFAULTS:
            raise UsageError(f"`--override-generation-config` may set {', '.join(SAMPLING_DEFAULTS)}, not {name!r}.")
    try:  # not with the first request, which would be told that it is at fault
        SamplingParams(**{"max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()})
    except InvalidRequestError as error:
        raise UsageError(f"`--override-generation-config`: {error}") from error


def _check_parsers(settings: ServerSettings) -> None:
    try:
        if settings.tool_call_parser not in (None, "auto"):
            get_tool_parser(settings.tool_call_parser)
        if settings.reasoning_parser not in (None, "auto"):
            get_reasoning_parser(settings.reasoning_parser)
    except UnknownNameError as error:
        raise UsageError(str(error)) from None


def load_chat_template(value: str) -> str:
    """Returns the template that `--chat-template` names.

    Args:
        value (`str`):
            A file, or the template itself.

    Raises:
        UsageError: If it is neither.
    """
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UsageError(
            f"`--chat-template` {value!r} is neither a file that can be read ({reason}) nor a template."
        ) from error


def _check_device(name: str) -> None:
    import torch

    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
        count = module.device_count() if module.is_available() else 0
    except (RuntimeError, AttributeError):  # torch's text goes on for lines
        raise UsageError(f"`--device` {name!r} is no device of torch; use auto, cpu, cuda or cuda:N.") from None
    if (device.index or 0) >= count:
        raise UsageError(
            f"`--device` {name!r} is not there: torch {torch.__version__} sees {count or 'no'} "
            f"{device.type} device{'s' * (count != 1)}. `--device auto` takes what there is."
        )


_WITHOUT_A_HUB = "Without the Hub: name a folder, or take the packaged model (`hf-paged demo --print-model-path`)."


@functools.cache
def check_model(name: str, revision: str | None = None) -> None:
    """Refuses a model that is not there, at once: a folder, a GGUF file, or a name on the Hub that nobody knows.

    What else may be wrong with it is found by loading it.

    Args:
        name (`str`):
            The MODEL.
        revision (`str`, *optional*):
            Branch, tag or commit on the Hub.

    Raises:
        ConfigurationError: If it is not there, or the Hub cannot be reached.
    """
    where = Path(name)
    if where.is_dir():
        if not any((where / file).exists() for file in ("config.json", "adapter_config.json", "params.json")):
            files = sorted(path.name for path in where.glob("*.gguf"))
            hint = f" Name the file to serve: {where / files[0]}." if files else ""
            raise ConfigurationError(f"The folder {name!r} holds no config.json, so it is no model.{hint}")
        return
    if where.is_file():
        if where.suffix != ".gguf":
            raise ConfigurationError(f"{name!r} is a file; MODEL is a folder, a .gguf file or a name on the Hub.")
        return
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except ValueError:
        raise ConfigurationError(
            f"There is no folder {name!r}, and it is no name on the Hub either (ORGANISATION/NAME)."
        ) from None
    _check_hub(name, revision)


def _check_hub(name: str, revision: str | None) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=_HUB_SECONDS)
    except GatedRepoError:
        return  # the Hub's own words say what to do
    except RepositoryNotFoundError:
        raise ConfigurationError(
            f"There is no folder {name!r}, and no such model on the Hub (or it is private: `hf auth login`)."
        ) from None
    except HfHubHTTPError:
        return  # of another kind, such as no config.json: loading tells
    except OfflineModeIsEnabled:
        raise ConfigurationError(
            f"There is no folder {name!r}, the Hub's cache on this machine does not have it, and HF_HUB_OFFLINE is "
            f"set. {_WITHOUT_A_HUB}"
        ) from None
    except Exception as error:  # of whatever HTTP library the Hub's client uses
        raise ConfigurationError(
            f"There is no folder {name!r}, the Hub's cache on this machine does not have it, and the Hub cannot be "
            f"reached: {error or type(error).__name__}. {_WITHOUT_A_HUB}"
        ) from None
