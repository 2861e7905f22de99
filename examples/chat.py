"""A conversation of two turns. The second turn finds the first one's K/V in the prefix cache."""

import argparse

from hf_paged import LLM, SamplingParams
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
path = parser.parse_args().model or str(packaged_model_path())

llm = LLM(model=path)
params = SamplingParams(temperature=0, max_tokens=32)
conversation = [{"role": "system", "content": "You answer in one short sentence."}]

for question in ("Why is the sky blue?", "And at sunset?"):
    conversation.append({"role": "user", "content": question})
    (output,) = llm.chat(conversation, params, use_tqdm=False)
    conversation.append({"role": "assistant", "content": output.outputs[0].text})
    print(f"> {question}")
    print(f"{output.outputs[0].text.strip()}")
    print(f"  ({output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached)")
