"""`hf-paged complete`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from .answerer import opened
from .examples import examples
from .interrupts import stopping_only
from .options import MAX_TOKENS, ApiKey, BaseUrl, Demo, takes_model, takes_sampling
from .usage import UsageError

EXAMPLES = examples(
    "hf-paged complete --demo 'The capital of France is' --max-tokens 12",
    "echo 'def add(a, b):' | hf-paged complete --demo --max-tokens 20 --json",
)


@takes_model
@takes_sampling
def complete(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL PROMPT", help="MODEL is left out with --demo. PROMPT may come from stdin."),
    ] = None,
    demo: Demo = False,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    served_model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The same as MODEL; of the server with --base-url.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write an object with text, tokens and times.")] = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Continue one text, as it is: without a chat template. The continuation is streamed to standard output."""
    from ..tools.terminal.screen import Screen
    from ..tools.terminal.texts import to_json

    model, prompts = split_words(list(words or ()), served_model, named=demo or base_url is not None)
    if len(prompts) > 1:
        raise UsageError(f"There is one PROMPT, got {len(prompts)}: quote it. `hf-paged generate` takes many.")
    prompt = prompts[0] if prompts else _from_stdin()
    screen = Screen()
    seed = sampling.pop("seed", None)
    with opened(model, demo, base_url, api_key, engine, seed) as answerer, stopping_only():
        write = _nothing if json else screen.write
        try:
            answer = answerer.complete(prompt, {"max_tokens": MAX_TOKENS, **sampling}, write)
        finally:
            screen.end_answer()  # also of one that broke off, before it is told why
        if json:
            fields = {"model": answerer.name, "prompt": prompt, **answer.to_dict()}
            screen.write(to_json(fields) + "\n")
            return
        screen.note(f"({answer.describe()})")


def split_words(words: list[str], option: str | None, *, named: bool) -> tuple[str | None, list[str]]:
    """Returns the MODEL and the prompts among the arguments of a command.

    Args:
        words (`list[str]`):
            Its arguments.
        option (`str`, *optional*):
            What `--model` said.
        named (`bool`):
            Whether it is known without a MODEL who answers.
    """
    if option is not None or named or not words:
        return option, words
    return words[0], words[1:]


def _from_stdin() -> str:
    if sys.stdin.isatty():
        raise UsageError("Give a PROMPT, or pipe one in.")
    prompt = sys.stdin.read()
    if not prompt:
        raise UsageError("There is no PROMPT: standard input is empty.")
    return prompt.removesuffix("\n")


def _nothing(text: str) -> None:
    pass
