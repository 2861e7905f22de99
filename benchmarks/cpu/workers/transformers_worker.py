"""Stock Transformers: `generate` one by one or with a padded batch, or its own continuous batching."""

from __future__ import annotations

import mmap
import time
from typing import Any

from measure import Answer, Engine, serve  # isort: skip - the clock of the imports starts here

import torch
import transformers
from transformers import GenerationConfig, StoppingCriteriaList

from hf_paged.tools.bench.baselines import METHODS, StepClock, load_model
from hf_paged.tools.bench.machine import huge_page_bytes
from hf_paged.tools.bench.workloads import Workload

HUGE_PAGE = 2 << 20


class StockEngine(Engine):
    """A stock model.

    Args:
        job (`dict[str, Any]`):
            See `Engine`. Options: `huge_pages` moves the weights to 2 MiB pages.
    """

    def __init__(self, job: dict[str, Any]):
        self.model = load_model(job["model"], "bfloat16", job["threads"])
        if job["options"].get("huge_pages"):
            move_to_huge_pages(self.model)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[Answer]:
        """See `Engine`: one prompt after the other.

        Args:
            prompts (`list[list[int]]`):
                Token ids.
            lengths (`list[int]`):
                Tokens to generate for each.
        """
        begin = time.perf_counter()
        answers = []
        for prompt, length in zip(prompts, lengths, strict=True):
            clock = StepClock(float("inf"))
            ids = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                generation_config=GenerationConfig(do_sample=False, max_new_tokens=length, pad_token_id=0),
                stopping_criteria=StoppingCriteriaList([clock]),
            )
            answers.append(Answer(ids[0, len(prompt) :].tolist(), clock.times[0] - begin, clock.times[-1] - begin))
        return answers

    def measure(self, name: str, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Any:
        """See `Engine`.

        Args:
            name (`str`):
                The workload's name.
            prompts (`list[list[int]]`):
                Token ids.
            lengths (`list[int]`):
                Tokens to generate for each.
            options (`dict[str, Any]`):
                `method`, `budget` (seconds) and `sample` (requests) of the project's baselines; without a method,
                `max_tokens` cuts the answers.
        """
        if "method" in options:
            workload = Workload(name, prompts, lengths)
            sample = options.get("sample", len(workload))
            result = METHODS[options["method"]](self.model, workload, options["budget"], sample)
            return {
                "seconds": result.measured_seconds,
                "output_tokens_per_s": result.output_tokens_per_s,
                "extrapolated": result.extrapolated,
                "how": result.how,
            }
        most = options.get("max_tokens", max(lengths))
        cut = [min(length, most) for length in lengths]
        result = super().measure(name, prompts, cut, options)
        return result if cut == lengths else result | {"how": f"{result['how']}, {most} tokens of each answer"}

    def about(self) -> dict[str, Any]:
        """Returns versions and settings, for the report."""
        return {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "attention": self.model.config._attn_implementation,
            "huge_page_bytes": huge_page_bytes(),
        }


def move_to_huge_pages(model: torch.nn.Module) -> None:
    """Moves all parameters into one buffer on transparent huge pages.

    Args:
        model (`torch.nn.Module`):
            The model; tied parameters stay tied.
    """
    parameters = list(model.parameters())
    offsets, size = [], 0
    for parameter in parameters:
        offsets.append(size)
        size += -(-parameter.nbytes // 64) * 64
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole = whole[-whole.data_ptr() % HUGE_PAGE :]
    for parameter, offset in zip(parameters, offsets, strict=True):
        place = whole[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        place.copy_(parameter.data)
        parameter.data = place


if __name__ == "__main__":
    serve(StockEngine)
