"""Flags that several verbs share, each declared once: the model, its engine, how answers are sampled.

The flags of the engine are made from the server's settings, so that they mean the same, also as environment variables
(`HF_PAGED_MAX_MODEL_LEN`) and as keys of a `--config` file.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..serving.settings import GROUPS, ServerSettings, flag, help_texts, value_type

MODEL_GROUPS = GROUPS[:3]
MAX_TOKENS = 256  # of a continuation, unless it is said; a chat's answer may fill the context
# What only a server needs, and what a verb has as an argument, or in another way.
_OF_SERVERS = {
    *("model", "demo", "seed", "served_model_name"),
    *("max_num_queued_reqs", "max_num_queued_tokens", "request_timeout", "max_logprobs"),
}
_OF_CHATS = ("chat_template", "default_chat_template_kwargs")
_NO = "no_"
_SAMPLING = "Sampling"
_OTHER = "Where the answers come from"
_MODEL_SETTINGS = [
    field
    for field in dataclasses.fields(ServerSettings)
    if field.name in _OF_CHATS or (field.metadata["group"] in MODEL_GROUPS and field.name not in _OF_SERVERS)
]

Demo = Annotated[
    bool, typer.Option("--demo", help="The small real model that comes as a Python package.", rich_help_panel=_OTHER)
]
BaseUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="A running server that speaks OpenAI's API, ours or another.", rich_help_panel=_OTHER
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Its key; better given in OPENAI_API_KEY or HF_PAGED_API_KEY, which nobody else sees.",
        rich_help_panel=_OTHER,
    ),
]

# Name -> type, metavar, help.
_SAMPLING_FLAGS: dict[str, tuple[Any, str, str]] = {
    "max_tokens": (int, "N", "Tokens of an answer at most."),
    "temperature": (float, "T", "0 takes the most probable token each time; more is more varied."),
    "top_p": (float, "P", "Only the most probable tokens that together reach this probability."),
    "top_k": (int, "K", "Only this many of the most probable tokens; 0 for all."),
    "min_p": (float, "P", "No tokens less probable than this share of the best one."),
    "repetition_penalty": (float, "X", "Above 1: tokens that are there already become less probable."),
    "presence_penalty": (float, "X", "From -2 to 2; the same for tokens of the answer."),
    "frequency_penalty": (float, "X", "From -2 to 2; the same, once for each time."),
    "stop": (list[str], "TEXT", "The answer ends before this text; may be given several times."),
    "seed": (int, "N", "Makes answers repeatable."),
}


def takes_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the flags of a model and its engine. It gets those that were given as `engine`, by their names.

    Args:
        command (`Callable`):
            The command, with a keyword argument `engine`.
    """
    texts = help_texts()
    added = [each for field in _MODEL_SETTINGS for each in _parameters(field, texts.get(field.name, ""))]
    config = typer.Option(
        "--config",
        metavar="FILE.yaml",
        help="Read settings of the model and the engine from a file; its keys are the names of flags.",
        rich_help_panel=MODEL_GROUPS[0],
    )
    added.append(keyword("config", Annotated[Path | None, config]))
    return gathered(command, "engine", added)


def takes_sampling(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the flags of sampling. It gets those that were given as `sampling`, by their names.

    Args:
        command (`Callable`):
            The command, with a keyword argument `sampling`.
    """
    added = []
    for name, (kind, metavar, text) in _SAMPLING_FLAGS.items():
        option = typer.Option(flag(name), metavar=metavar, help=text, rich_help_panel=_SAMPLING, show_default=False)
        added.append(keyword(name, Annotated[kind | None, option]))
    return gathered(command, "sampling", added)


def _parameters(field: dataclasses.Field, text: str) -> list[inspect.Parameter]:
    """The flag of a setting; a switch has two, of which help shows the one that changes something."""
    how, kind, name = field.metadata, value_type(field.name), flag(field.name)
    panel = how["group"] if how["group"] in MODEL_GROUPS else MODEL_GROUPS[0]
    words: dict[str, Any] = {"rich_help_panel": panel, "show_default": False}
    if kind is bool:
        on = typer.Option(name, help=text, hidden=field.default is True, **words)
        off = typer.Option(f"--no-{name[2:]}", help=f"Turns off: {text}", hidden=field.default is False, **words)
        return [
            keyword(field.name, Annotated[bool | None, on]),
            keyword(_NO + field.name, Annotated[bool | None, off]),
        ]
    if how.get("choices"):
        text += f" One of {', '.join(how['choices'])}."
    if field.default not in (None, ""):
        text += f" (default: {field.default})"
    option = typer.Option(name, *how.get("flags", ()), metavar=how.get("metavar", "VALUE"), help=text, **words)
    return [keyword(field.name, Annotated[str | None, option])]


def keyword(name: str, annotation: Any) -> inspect.Parameter:
    """Returns a flag for `gathered`, that need not be given.

    Args:
        name (`str`):
            The argument's name.
        annotation (`Any`):
            Its type, with the option.
    """
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def gathered(command: Callable[..., Any], name: str, added: list[inspect.Parameter]) -> Callable[..., Any]:
    """Returns a command with further flags in its signature, which Typer reads; it gets those given as one dictionary.

    Args:
        command (`Callable`):
            The command.
        name (`str`):
            Its keyword argument that gets the dictionary.
        added (`list[inspect.Parameter]`):
            The flags, keyword only.
    """
    own = inspect.signature(command, eval_str=True)
    parameters = [parameter for parameter in own.parameters.values() if parameter.name != name] + added
    names = [parameter.name for parameter in added]

    def gather(**values: Any) -> Any:
        given = {each: values.pop(each) for each in names}
        given = {each: value for each, value in given.items() if value not in (None, [])}
        for each in [each for each in given if each.startswith(_NO)]:
            given[each.removeprefix(_NO)] = not given.pop(each)
        return command(**values, **{name: given})

    gather.__name__, gather.__doc__ = command.__name__, command.__doc__
    gather.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    gather.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return gather
