"""`hf-paged generate`: many prompts through continuous batching, each answered in its place."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import EngineClosedError, HfPagedError
from ...generation.outputs import RequestOutput
from ..in_order import InOrder
from .files import Lines
from .local import LocalModel, run_until_ctrl_c
from .prompt_lines import PromptLine
from .texts import printable


@dataclasses.dataclass
class GenerateSummary:
    """What came of the prompts.

    Args:
        answered (`int`, defaults to 0):
            Those with an answer.
        failed (`int`, defaults to 0):
            Those with an error.
        prompt_tokens (`int`, defaults to 0):
            Of those that were answered.
        completion_tokens (`int`, defaults to 0):
            Of their answers.
        seconds (`float`, defaults to 0.0):
            From the first prompt to the last answer.
        first_error (`str`, *optional*):
            Why the first of them failed.
    """

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    first_error: str | None = None

    def count(self, entry: Mapping[str, Any]) -> None:
        """Counts an entry of the output.

        Args:
            entry (`Mapping[str, Any]`):
                An answer, or an error.
        """
        if "error" in entry:
            self.failed += 1
            self.first_error = self.first_error or entry["error"]["message"]
            return
        self.answered += 1
        self.prompt_tokens += entry["prompt_tokens"]
        self.completion_tokens += entry["completion_tokens"]

    def describe(self) -> str:
        """Returns a line for people."""
        speed = f" ({self.completion_tokens / self.seconds:.0f} tokens/s)" if self.seconds else ""
        failed = f", {self.failed} failed; the first: {printable(self.first_error or '')}" if self.failed else ""
        return (
            f"{self.answered} answered in {self.seconds:.1f} s: {self.prompt_tokens} prompt tokens, "
            f"{self.completion_tokens} generated{speed}{failed}"
        )


def generate(
    model: LocalModel,
    lines: Lines,
    sampling: Mapping[str, Any],
    write: Callable[[dict[str, Any]], Any],
    summary: GenerateSummary,
) -> None:
    """Answers prompts; entries come in their order, each as soon as it and those before it are there.

    Args:
        model (`LocalModel`):
            Who answers.
        lines (`Iterable[PromptLine]` or `AsyncIterator[PromptLine]`):
            Read as there is room: memory does not grow with their number.
        sampling (`Mapping[str, Any]`):
            Of prompts that do not say otherwise.
        write (`Callable[[dict[str, Any]], Any]`):
            Gets each entry.
        summary (`GenerateSummary`):
            Counts, also where this is interrupted.

    Raises:
        EngineClosedError: If the engine dies.
        KeyboardInterrupt: On Ctrl-C, after what was finished has been written.
    """

    def take(entry: dict[str, Any]) -> None:
        write(entry)
        summary.count(entry)

    async def answer(line: PromptLine) -> dict[str, Any]:
        return await _entry(model, line, sampling)

    async def work() -> None:
        await InOrder(answer, 2 * model.max_num_seqs).run(lines, take)

    begin = time.perf_counter()
    try:
        run_until_ctrl_c(work())
    finally:
        summary.seconds = time.perf_counter() - begin


async def _entry(model: LocalModel, line: PromptLine, sampling: Mapping[str, Any]) -> dict[str, Any]:
    asked = {"prompt": line.prompt} if line.messages is None else {"messages": line.messages}
    entry: dict[str, Any] = {"id": line.id, **(asked if any(asked.values()) else {})}
    if line.error is not None:
        return entry | {"error": {"message": line.error}}
    try:
        output = await _answer(model, line, sampling)
    except EngineClosedError:
        raise
    except HfPagedError as error:
        return entry | {"error": {"message": str(error)}}
    answer = output.outputs[0]
    return entry | {
        "text": answer.text,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(answer.token_ids),
        "finish_reason": answer.finish_reason,
    }


async def _answer(model: LocalModel, line: PromptLine, sampling: Mapping[str, Any]) -> RequestOutput:
    params = model.params({**sampling, **line.sampling})
    if line.messages is not None:
        tokens = model.chat_tokens(line.messages)
    elif isinstance(line.prompt, list):
        tokens = line.prompt
    else:
        tokens = model.text_tokens(line.prompt or "")
    async with model.engine.submit(tokens, params, stream=False) as answers:
        return await answers.output()
