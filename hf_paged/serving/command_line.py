"""Where settings come from: flags, then environment variables, then a `--config` file, then defaults."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import logging
import os
import re
import reprlib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import ConfigurationError
from ..vllm_names import FORMER, RENAMED, SWITCHES, names_of_vllm, take_vllm_names
from .settings import GROUPS, ServerSettings, flag, help_texts, value_type

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "HF_PAGED_"
_FIELDS = {field.name: field for field in dataclasses.fields(ServerSettings)}
_VLLM_NAMES = [name for name in names_of_vllm() if name not in _FIELDS]
_OTHER_NAMES = {
    option.lstrip("-").replace("-", "_"): field.name
    for field in _FIELDS.values()
    for option in (*field.metadata.get("flags", ()), *field.metadata.get("off", ()))
}
_OFF_NAMES = {name for name in _OTHER_NAMES if name.startswith("disable_")}
_YES, _NO = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_LONGEST_SHOWN = 80
_MOST_VALUES = 10_000  # in a file, an alias counted wherever it stands


class UsageError(ConfigurationError):
    """The command line, a `--config` file or an environment variable is wrong."""


def parse_settings(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    prog: str | None = None,
    also: Sequence[str] = (),
) -> ServerSettings:
    """Returns the settings that a command line, the environment and a file say. `--help` ends the process.

    Args:
        arguments (`Sequence[str]`):
            Of the command line, without the program.
        environment (`Mapping[str, str]`, *optional*):
            Instead of the process's own.
        prog (`str`, *optional*):
            What `--help` calls the program.
        also (`Sequence[str]`, defaults to none):
            Flags that somebody else has read, to be suggested for a misspelled one.

    Raises:
        UsageError: Says which flag, key or variable is wrong, and what was probably meant.
        NotSupportedError: If something was asked for that is not built yet.
    """
    parser = make_parser(prog)
    given, unknown = parser.parse_known_args([_dashed(argument) for argument in arguments])
    if unknown:
        _refuse_unknown(
            unknown[0], [*also, *(option for action in parser._actions for option in action.option_strings)]
        )
    flags = {name: value for name, value in vars(given).items() if value is not None}
    if given.model_option is not None:
        if given.model is not None and given.model != given.model_option:
            raise UsageError(f"MODEL is {given.model!r} and `--model` is {given.model_option!r}; give one of them.")
        flags["model"] = given.model_option
    return make_settings(flags, environment)


def make_settings(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> ServerSettings:
    """Returns the settings that flags, the environment and a file say.

    Args:
        flags (`Mapping[str, Any]`):
            Values, as texts or of their types, by the names of settings; `config` names a file.
        environment (`Mapping[str, str]`, *optional*):
            Instead of the process's own.

    Raises:
        UsageError: Says which flag, key or variable is wrong, and what was probably meant.
        NotSupportedError: If something was asked for that is not built yet.
    """
    environment = os.environ if environment is None else environment
    flags = dict(flags)
    config = flags.pop("config", None)
    values: dict[str, Any] = {}
    if config is not None:
        values |= _values(_read_file(config), f"in {config}", lambda name: f"`{name}`")
    values |= _values(_from_environment(environment), "in the environment", lambda name: _variable(name))
    values |= _values(flags, "", lambda name: "MODEL" if name == "model" else f"`{flag(name)}`")
    if values.get("demo") and "model" in values and "model" not in flags:
        del values["model"]  # a file or the environment names one for other days
    if values.get("api_key_file") is not None:
        values["api_key"] = (*(values.get("api_key") or ()), *_keys_of(values["api_key_file"]))
    return ServerSettings(**values)


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def make_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """Returns a parser of all flags, ours and those of vLLM's that are known; values stay texts.

    Args:
        prog (`str`, *optional*):
            What `--help` calls the program.
    """
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [MODEL] [flags]",
        description="Serve a model over HTTP as OpenAI does. Flags have vLLM's names where it has them.",
        epilog="Each flag can also be a key of the --config file, or an environment variable such as HF_PAGED_PORT.\n"
        "Exit codes: 0 stopped by a signal, 1 could not start, 2 wrong usage, 3 the engine died, 130 or 143 stopped\n"
        "at once by a second signal.\n\n" + _examples(prog),
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    texts = help_texts()
    parser.add_argument("model", nargs="?", metavar="MODEL", help=texts.get("model"))
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    groups[GROUPS[0]].add_argument("--model", dest="model_option", metavar="MODEL", help="The same as MODEL.")
    for name, field in _FIELDS.items():
        if name != "model":
            _add_flag(groups[field.metadata["group"]], field, texts.get(name, ""))
    groups[GROUPS[-1]].add_argument(
        "--config", metavar="FILE.yaml", help="Read settings from a file; its keys are the names of flags."
    )
    hidden = parser.add_argument_group("vLLM's")
    for name in _VLLM_NAMES:
        if name in SWITCHES:
            hidden.add_argument(flag(name), action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        else:
            hidden.add_argument(flag(name), nargs="+" if name in RENAMED else None, help=argparse.SUPPRESS)
    return parser


def _examples(prog: str | None) -> str:
    if prog is None or not prog.startswith("hf-paged"):
        return f"Example:\n$ {prog or 'python -m hf_paged.serving.api_server'} --model MODEL --port 8000"
    return f"Example:\n$ {prog} --demo --port 0 --max-num-queued-reqs 256"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(
            prog, max_help_position=32, width=min(120, max(80, os.get_terminal_size().columns)) if os.isatty(1) else 120
        )

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Lines of the end are as they stand: examples are for copying."""
        return "".join(indent + line for line in text.splitlines(keepends=True))

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == argparse.ONE_OR_MORE:
            return f"{self._metavar_formatter(action, default_metavar)(1)[0]} ..."
        return super()._format_args(action, default_metavar)


def _add_flag(group: Any, field: dataclasses.Field, text: str) -> None:
    kind, how = value_type(field.name), field.metadata
    options = [flag(field.name), *how.get("flags", ())]
    default = field.default
    shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
    text = text.replace("%", "%%")
    if default not in (None, False, True, ""):
        text += f" (default: {shown})"
    if kind is bool:
        group.add_argument(
            *options,
            dest=field.name,
            action=argparse.BooleanOptionalAction,
            default=None,
            help=f"{text} On by default." if default is True else text,
        )
        if how.get("off"):
            group.add_argument(*how["off"], dest=field.name, action="store_const", const=False, help=argparse.SUPPRESS)
        return
    many = typing.get_origin(kind) is tuple
    group.add_argument(
        *options,
        dest=field.name,
        metavar="{" + ",".join(how["choices"]) + "}" if how.get("choices") else how.get("metavar", "VALUE"),
        help=text,
        **({"nargs": "+", "action": "extend"} if many else {}),
    )


def _dashed(argument: str) -> str:
    """Flags may be written with underscores."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _refuse_unknown(argument: str, known: Sequence[str]) -> NoReturn:
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        raise UsageError(f"There is one MODEL; {_shown(argument)} is one too many, or a value of no flag.")
    raise UsageError(f"Unknown flag `{name}`{_suggestion(name, known)} See --help.")


def _suggestion(name: str, known: Sequence[str]) -> str:
    """The end of a sentence about a name that nobody knows."""
    former = FORMER.get(name.lstrip("-").replace("-", "_"))
    if former is not None:
        return f" of vLLM: {former}."
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean `{close[0]}`?" if close else "."


def _values(found: Mapping[str, Any], where: str, name_of: Callable[[str], str]) -> dict[str, Any]:
    """Gives settings their types; vLLM's names are taken, or refused with the reason."""
    others = {name: _scalar(value) for name, value in found.items() if name in _VLLM_NAMES}
    take_vllm_names(others, name_of)
    values = {}
    for name, value in found.items():
        if name not in _FIELDS:
            continue
        try:
            values[name] = convert(name, value)
        except (TypeError, ValueError, AttributeError) as error:
            secret = _FIELDS[name].metadata.get("secret")
            got = "" if secret else f", got {_shown(value)}"
            at = f" ({where})" if where else ""
            raise UsageError(f"{name_of(name)} {error}{got}{at}.") from None
    return values


def convert(name: str, value: Any) -> Any:
    """Returns a setting's value from the text of a flag or variable, or from what a file holds.

    Args:
        name (`str`):
            Of the setting.
        value (`Any`):
            As it was found.

    Raises:
        ValueError: What it must be.
    """
    kind, how = value_type(name), _FIELDS[name].metadata
    if value is None or value == "None":
        return _FIELDS[name].default
    if kind is bool:
        return _as_bool(value)
    if how.get("size"):
        return _as_size(value)
    if kind is int or kind is float:
        return _as_number(value, kind)
    if typing.get_origin(kind) is dict:
        return _as_object(value)
    if typing.get_origin(kind) is tuple:
        items = _as_list(value, split=not how.get("secret"))
        element = typing.get_args(kind)[0]
        return tuple(_as_number(item, int) if element is int else _as_text(item) for item in items)
    return _as_text(value)


def _as_text(value: Any) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError("must be a text")
    return str(value)


def _as_bool(value: Any) -> bool:
    text = str(value).lower()
    if text not in _YES | _NO:
        raise ValueError("must be true or false")
    return text in _YES


def _as_number(value: Any, kind: type) -> Any:
    what = "a whole number" if kind is int else "a number"
    try:
        if isinstance(value, bool) or (kind is int and isinstance(value, float)):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"must be {what}") from None


def _as_size(value: Any) -> int | None:
    if str(value) in ("auto", "-1"):
        return None
    found = _SIZE.fullmatch(str(value))
    number = float(found[1]) * _UNITS[found[2]] if found and not isinstance(value, bool) else 0
    if number < 1 or number != int(number):
        raise ValueError("must be a whole number of tokens, such as 8192, 8k (8000) or 8K (8192)")
    return int(number)


def _as_object(value: Any) -> dict[str, Any]:
    parsed = _scalar(value)
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object")
    return parsed


def _as_list(value: Any, split: bool) -> list[Any]:
    """A list, a JSON list as a text, or values with commas between them."""
    values = value if isinstance(value, list | tuple) else [value]
    items: list[Any] = []
    for item in values:
        parsed = _scalar(item) if isinstance(item, str) and item.startswith("[") else None
        if isinstance(parsed, list):
            items += parsed
        elif isinstance(item, str) and split:
            items += [part.strip() for part in item.split(",") if part.strip()]
        else:
            items.append(item)
    return items


def _scalar(value: Any) -> Any:
    """The value of a flag that is vLLM's: a number or JSON, or else a text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name in _FIELDS:
        value = environment.get(_variable(name))
        if value is None or value == "":
            continue
        if name == "port" and value.startswith("tcp://"):
            logger.warning("HF_PAGED_PORT is what Kubernetes sets for a service named hf-paged; it is left aside.")
            continue
        found[name] = value
    variables = {_variable(name) for name in _FIELDS}
    for variable in environment:
        close = difflib.get_close_matches(variable, variables, n=1, cutoff=0.9)
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in variables and close:
            logger.warning("The environment variable %s means nothing; did you mean %s?", variable, close[0])
    return found


def _read_file(path: str) -> dict[str, Any]:
    import yaml

    try:
        parsed = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`--config` {path!r} cannot be read: {_reason(error)}.") from None
    except RecursionError:
        raise UsageError(f"`--config` {path!r} has too many brackets within one another.") from None
    except (yaml.YAMLError, ValueError) as error:  # a date that there is not, and the like
        raise UsageError(f"`--config` {path!r} is not YAML: {' '.join(str(error).split())}.") from None
    if parsed is None:
        return {}
    if not _is_small(parsed):
        raise UsageError(f"`--config` {path!r} holds more than {_MOST_VALUES:,} values, its aliases written out.")
    if not isinstance(parsed, dict):
        raise UsageError(f"`--config` {path!r} must hold `name: value` lines, not a {type(parsed).__name__}.")
    found: dict[str, Any] = {}
    for key, value in parsed.items():
        name = str(key).lstrip("-").replace("-", "_")
        off = name.startswith("no_") or name in _OFF_NAMES
        name = _OTHER_NAMES.get(name, name.removeprefix("no_"))
        if name not in _FIELDS and name not in _VLLM_NAMES:
            raise UsageError(f"`--config` {path!r} has an unknown key `{key}`{_suggestion(name, list(_FIELDS))}")
        try:
            found[name] = not _as_bool(value) if off and _is_switch(name) else value
        except ValueError as error:
            raise UsageError(f"`{key}` {error}, got {_shown(value)} (in {path}).") from None
    return found


def _is_small(parsed: Any) -> bool:
    """Whether a value has few parts. With aliases some lines can stand for billions, or a list hold itself."""
    waiting, seen = [parsed], 0
    while waiting:
        value = waiting.pop()
        seen += 1
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
        if seen + len(waiting) + len(parts) > _MOST_VALUES:
            return False
        waiting += parts
    return True


def _is_switch(name: str) -> bool:
    return name in SWITCHES or (name in _FIELDS and value_type(name) is bool)


def _keys_of(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`--api-key-file` {path!r} cannot be read: {_reason(error)}.") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise UsageError(f"`--api-key-file` {path!r} holds no key.")
    return keys


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else reprlib.repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."
