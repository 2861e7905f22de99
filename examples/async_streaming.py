"""Requests that come and go: an engine with a thread of its own, one async iterator per request."""

import argparse
import asyncio

from transformers import AutoTokenizer

from hf_paged import AsyncEngine, AutoPagedModelForCausalLM, SamplingParams
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
path = parser.parse_args().model or str(packaged_model_path())


async def answer(engine: AsyncEngine, prompt: str) -> None:
    """Prints a request's text piece by piece."""
    params = SamplingParams(temperature=0, max_tokens=12)
    async for output in engine.generate(prompt, params, output_kind="delta"):
        print(f"{prompt!r}: {output.outputs[0].text!r}")


async def main() -> None:
    """Answers three prompts at the same time; they share the model's steps."""
    model = AutoPagedModelForCausalLM.from_pretrained(path, dtype="auto")
    engine = AsyncEngine(model, tokenizer=AutoTokenizer.from_pretrained(path))
    try:
        await asyncio.gather(*(answer(engine, prompt) for prompt in ("Once upon a time", "2 + 2 =", "Dear diary,")))
    finally:
        engine.close()


asyncio.run(main())
