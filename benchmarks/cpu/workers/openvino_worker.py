"""OpenVINO GenAI: its continuous batching pipeline on a model that `export_openvino.py` wrote."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

from measure import Answer, Engine, serve  # isort: skip - the clock of the imports starts here

import numpy as np
import openvino as ov
import openvino_genai as genai


class OpenVinoEngine(Engine):
    """`ContinuousBatchingPipeline`, driven step by step, so that the first tokens' times are seen.

    Args:
        job (`dict[str, Any]`):
            See `Engine`. Options: `model` (the exported folder), `properties` (of the device), `scheduler`.
    """

    def __init__(self, job: dict[str, Any]):
        options = job["options"]
        self.scheduler = genai.SchedulerConfig()
        for name, value in options["scheduler"].items():
            setattr(self.scheduler, name, value)
        self.properties = {"INFERENCE_NUM_THREADS": job["threads"], **options["properties"]}
        # Prompts are token ids, so the pipeline gets a tokenizer that does nothing.
        self.pipeline = genai.ContinuousBatchingPipeline(
            options["model"], genai.Tokenizer(options["model"]), self.scheduler, "CPU", **self.properties
        )
        self.count = 0

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[Answer]:
        """See `Engine`.

        Args:
            prompts (`list[list[int]]`):
                Token ids.
            lengths (`list[int]`):
                Tokens to generate for each.
        """
        begin = time.perf_counter()
        handles = []
        for prompt, length in zip(prompts, lengths, strict=True):
            config = genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, do_sample=False)
            tensor = ov.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self.pipeline.add_request(self.count, tensor, config))
            self.count += 1
        tokens: list[list[int]] = [[] for _ in prompts]
        firsts = [0.0] * len(prompts)
        lasts = [0.0] * len(prompts)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now = time.perf_counter() - begin
            for index, handle in enumerate(handles):
                while handle.can_read():
                    (output,) = handle.read().values()
                    tokens[index] += output.generated_ids
                    firsts[index] = firsts[index] or now
                    lasts[index] = now
        return [Answer(*answer) for answer in zip(tokens, firsts, lasts, strict=True)]

    def about(self) -> dict[str, Any]:
        """Returns versions and settings, for the report."""
        core = ov.Core()
        return {
            "version": importlib.metadata.version("openvino-genai"),
            "default_inference_precision": str(core.get_property("CPU", "INFERENCE_PRECISION_HINT")),
            "capabilities": core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"),
            "properties": {name: str(value) for name, value in self.properties.items()},
            "scheduler": self.scheduler.to_string(),
        }


if __name__ == "__main__":
    serve(OpenVinoEngine)
