"""Prompts with the same beginning compute it once: later ones find its blocks in the prefix cache."""

import argparse

from hf_paged import LLM, SamplingParams
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
path = parser.parse_args().model or str(packaged_model_path())

manual = (
    "Manual of the kettle. Fill it with cold water up to the mark. Close the lid, set it on its base and press the "
    "switch; it turns itself off when the water boils. Once a month, boil it with vinegar against limescale.\n"
)
questions = ["How do I switch it on?", "When does it turn off?", "What helps against limescale?"]

llm = LLM(model=path)
params = SamplingParams(temperature=0, max_tokens=12)
for question in questions:
    (output,) = llm.generate(f"{manual}Question: {question}\nAnswer:", params, use_tqdm=False)
    print(f"{output.num_cached_tokens:3} of {len(output.prompt_token_ids)} prompt tokens were cached: {question}")

# Tenants who must not learn from response times what others asked do not share: each has a key of its own.
tokens = llm.tokenizer(f"{manual}Question: {questions[0]}\nAnswer:")["input_ids"]
state = llm.engine.add_request(tokens, params, extra_keys=("another tenant",))
llm.engine.wait(state)
print(f"{state.output().num_cached_tokens:3} of {len(tokens)} prompt tokens were cached: another tenant's question")
