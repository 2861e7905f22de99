"""hf_paged itself: `AutoPagedModelForCausalLM`, its engine's `generate`."""

from __future__ import annotations

import time
from typing import Any

from measure import Answer, Engine, serve  # isort: skip - the clock of the imports starts here

import torch

import hf_paged
from hf_paged.tools.bench.engine_run import forced, load_paged_model

STEP_REQUESTS = 64
STEP_CONTEXT = 128
STEPS = 32
PARTS = ("schedule", "inputs", "model", "sample", "collect")


class PagedEngine(Engine):
    """The engine of a paged model.

    Args:
        job (`dict[str, Any]`):
            See `Engine`. Options: fields of `PagedConfig`.
    """

    def __init__(self, job: dict[str, Any]):
        torch.set_num_threads(job["threads"])
        config = hf_paged.PagedConfig(**job["options"]) if job["options"] else None
        self.model = load_paged_model(job["model"], torch.bfloat16, config)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[Answer]:
        """See `Engine`.

        Args:
            prompts (`list[list[int]]`):
                Token ids.
            lengths (`list[int]`):
                Tokens to generate for each.
        """
        outputs = self.model.engine.generate(prompts, [forced(length) for length in lengths])
        begin = min(output.metrics.arrival_time for output in outputs)
        return [
            Answer(o.outputs[0].token_ids, o.metrics.first_token_time - begin, o.metrics.finished_time - begin)
            for o in outputs
        ]

    def measure(self, name: str, prompts: list[list[int]], lengths: list[int], options: dict[str, Any]) -> Any:
        """See `Engine`; `"step"` times the steps of decoding requests, part by part.

        Args:
            name (`str`):
                The workload's name.
            prompts (`list[list[int]]`):
                Token ids.
            lengths (`list[int]`):
                Tokens to generate for each.
            options (`dict[str, Any]`):
                Not used.
        """
        if name == "step":
            return self.measure_steps(prompts)
        return super().measure(name, prompts, lengths, options)

    def measure_steps(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Returns the mean seconds of a decoding step and of its parts, around a context of 128 tokens.

        Args:
            prompts (`list[list[int]]`):
                Prompts whose requests reach the context halfway through the steps.
        """
        engine = self.model.engine
        states = [engine.add_request(prompt, forced(4 * STEPS)) for prompt in prompts]
        try:
            while any(not state.output().outputs[0].token_ids for state in states):
                engine.step()
            engine.reset_stats()
            begin = time.perf_counter()
            for _ in range(STEPS):
                engine.step()
            seconds = (time.perf_counter() - begin) / STEPS
            stats = engine.stats()
        finally:
            engine.abort_all()
        parts = {f"{part}_seconds": getattr(stats, f"seconds_{part}") / stats.num_steps for part in PARTS}
        return {"seconds": seconds, "num_requests": stats.num_generated_tokens / STEPS, **parts}

    def about(self) -> dict[str, Any]:
        """Returns versions and settings, for the report."""
        plan = self.model.engine.plan
        return {"version": hf_paged.__version__, "torch": torch.__version__, "plan": str(plan)}


if __name__ == "__main__":
    serve(PagedEngine)
