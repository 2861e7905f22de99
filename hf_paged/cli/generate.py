"""`hf-paged generate`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import typer

from . import exits
from .answerer import opened_model
from .complete import split_words
from .examples import examples
from .options import MAX_TOKENS, Demo, takes_model, takes_sampling
from .usage import UsageError

_BAR_AFTER = 2.0  # seconds
EXAMPLES = examples(
    "hf-paged generate --demo 'Once upon a time' 'The sea' --max-tokens 20",
    "printf '%s\\n' 'One, two,' 'Red, green,' | hf-paged generate --demo --max-tokens 8 -o answers.jsonl",
    'echo \'{"messages": [{"role": "user", "content": "Hi!"}]}\' | hf-paged generate --demo --max-tokens 9',
)


@takes_model
@takes_sampling
def generate(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL PROMPTS", help="MODEL is left out with --demo or --model."),
    ] = None,
    demo: Demo = False,
    model_option: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The same as MODEL, so that all words are prompts.")
    ] = None,
    input: Annotated[
        str | None,
        typer.Option("--input", "-i", metavar="FILE", help="Prompts, one a line; - is the standard input."),
    ] = None,
    input_format: Annotated[
        Literal["auto", "text", "jsonl"],
        typer.Option(help="auto: .jsonl and .txt say it, or else the first line."),
    ] = "auto",
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Answers, an object a line; - is the standard output.")
    ] = "-",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output file that is there.")] = False,
    json: Annotated[
        bool | None,
        typer.Option("--json/--no-json", help="Objects, or texts for people; objects unless on a terminal."),
    ] = None,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Answer many prompts at once: words, lines of text, or JSON lines; from arguments, a file or a pipe of any length.

    A JSON line has `prompt` (a text or token ids) or `messages`, and may have an `id` and sampling fields. The output
    has an object for each, in the order of the input: id, prompt, text, prompt_tokens, completion_tokens,
    finish_reason. A line that cannot be answered has `error` in its place, and the exit code is 1; the others are
    answered. Ctrl-C leaves the lines that are finished.
    """
    from ..tools.terminal.files import count_lines, opened_lines, opened_output
    from ..tools.terminal.prompt_lines import PromptLine

    model, prompts = split_words(list(words or ()), model_option, named=demo)
    if prompts and input is not None:
        raise UsageError(f"Give either prompts ({prompts[0]!r}) or `--input` {input!r}, not both.")
    source = None if prompts else _source(input)
    _check_files(source, output, overwrite, json)
    seed = sampling.pop("seed", None)
    with opened_model(model, demo, engine, seed) as local:
        from ..tools.terminal.generate import GenerateSummary, generate

        form = None if input_format == "auto" else input_format
        summary = GenerateSummary()
        with contextlib.ExitStack() as stack:
            if source is None:
                lines: Any = [PromptLine(number, prompt) for number, prompt in enumerate(prompts, 1)]
                total: int | None = len(lines)
            else:
                lines = stack.enter_context(opened_lines(source, form))
                total = count_lines(source) if sys.stderr.isatty() else None
            write = _for_people if _wants_text(json, output) else stack.enter_context(opened_output(output))
            advance = stack.enter_context(_bar(total, output))

            def take(entry: dict[str, Any]) -> None:
                write(entry)
                advance()

            try:
                generate(local, lines, {"max_tokens": MAX_TOKENS, **sampling}, take, summary)
            except KeyboardInterrupt:
                where = f"; they are in {output}" if output != "-" else ""
                print(f"hf-paged: stopped early: {summary.describe()}{where}", file=sys.stderr)
                raise
    if output != "-" or summary.failed:
        print(f"hf-paged: {summary.describe()}", file=sys.stderr)
    if summary.failed:
        raise typer.Exit(exits.FAILED)


def _source(input: str | None) -> str:
    if input is None and sys.stdin.isatty():
        raise UsageError("Give prompts, `--input FILE`, or pipe lines in.")
    return input or "-"


def _check_files(source: str | None, output: str, overwrite: bool, json: bool | None) -> None:
    from ..errors import ConfigurationError
    from ..tools.terminal.files import check_output, check_source

    if output != "-" and json is False:
        raise UsageError("`--no-json` is for the standard output; a file has objects.")
    try:
        if source is not None:
            check_source(source)
        check_output(output, source, overwrite)
    except ConfigurationError as error:
        raise UsageError(str(error)) from None


def _wants_text(json: bool | None, output: str) -> bool:
    return output == "-" and (not json if json is not None else sys.stdout.isatty())


def _for_people(entry: dict[str, Any]) -> None:
    from ..tools.terminal.files import write_out
    from ..tools.terminal.texts import printable

    asked = entry.get("prompt") or (entry["messages"][-1]["content"] if entry.get("messages") else "")
    answer = entry.get("text") or entry.get("error", {}).get("message", "")
    write_out(printable(f"> {asked}\n{answer.strip()}\n\n"))


@contextlib.contextmanager
def _bar(total: int | None, output: str) -> Iterator[Callable[[], object]]:
    """A progress bar on a terminal, once it takes long. It would stand in the way of answers on the same terminal."""
    if not sys.stderr.isatty() or (output == "-" and sys.stdout.isatty()):
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="prompt", desc="answers", delay=_BAR_AFTER) as bar:
        yield bar.update
