"""Offline inference as in any article about vLLM; only the import is another."""

import argparse

from hf_paged import LLM, SamplingParams
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
path = parser.parse_args().model or str(packaged_model_path())

prompts = [
    "The three primary colours are",
    "A good breakfast starts with",
    "The largest planet of the solar system is",
    "In the morning the baker",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=7)

llm = LLM(model=path)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    print(f"Prompt: {output.prompt!r}, generated text: {output.outputs[0].text!r}")
