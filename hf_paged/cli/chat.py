"""`hf-paged chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import exits
from .answerer import opened
from .examples import examples
from .interrupts import stopping_only
from .options import ApiKey, BaseUrl, Demo, takes_model, takes_sampling

EXAMPLES = examples(
    "hf-paged chat --demo --system 'You answer in one sentence.'",
    "echo 'Why is the sky blue?' | hf-paged chat --demo --max-tokens 40",
)


@takes_model
@takes_sampling
def chat(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A folder or a name on the Hub; a model of the server with --base-url."),
    ] = None,
    demo: Demo = False,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    load: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on with a conversation that /save has written.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write an object a line for each answer, not its text.")] = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk with a model in the terminal: with a memory, streaming, and /commands (/help lists them).

    Ctrl-C stops an answer, and ends the chat at the prompt. Piped, each line of the input is a message of one
    conversation, and nothing but answers is written.
    """
    from ..tools.terminal.chat import COMMANDS, Chat
    from ..tools.terminal.conversation import Conversation
    from ..tools.terminal.screen import Screen, remembered_lines

    conversation = Conversation.load(load) if load is not None else Conversation()
    conversation.system = system or conversation.system
    seed = sampling.pop("seed", None)
    conversation.sampling |= sampling
    screen = Screen()
    with opened(model, demo, base_url, api_key, engine, seed) as answerer, stopping_only():
        talk = Chat(answerer, conversation, screen, as_json=json)
        if not screen.interactive:
            talk.run()
        else:
            with remembered_lines(list(COMMANDS)) as problem:
                screen.note(f"{answerer.name}. /help lists the commands; Ctrl-D ends the chat.")
                if problem is not None:
                    screen.note(f"(the history of what you type is not kept: {problem})")
                talk.run()
    if talk.failed and not screen.interactive:
        raise typer.Exit(exits.FAILED)
