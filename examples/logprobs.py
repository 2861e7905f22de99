"""How sure the model is: log-probabilities of the answer's tokens, of their rivals, and of the prompt."""

import argparse
import math

from hf_paged import LLM, SamplingParams
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
path = parser.parse_args().model or str(packaged_model_path())

llm = LLM(model=path)
params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=0)
(output,) = llm.generate("The opposite of hot is", params, use_tqdm=False)

print("prompt")
for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
    print(f"  {entry[token].decoded_token!r:12} {math.exp(entry[token].logprob):6.1%}, rank {entry[token].rank}")

print("answer")
answer = output.outputs[0]
for entry in answer.logprobs:
    best = sorted(entry.values(), key=lambda logprob: logprob.rank)
    print("  " + "   ".join(f"{logprob.decoded_token!r:12} {math.exp(logprob.logprob):6.1%}" for logprob in best))
print(f"probability of the whole answer: {math.exp(answer.cumulative_logprob):.2%}")
