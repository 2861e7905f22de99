"""Transformers' own `pipeline` with a paged model: it calls `model.generate`, which runs on the paged engine."""

import argparse

from transformers import AutoTokenizer, pipeline

from hf_paged import AutoPagedModelForCausalLM
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
path = parser.parse_args().model or str(packaged_model_path())

tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
model = AutoPagedModelForCausalLM.from_pretrained(path, dtype="auto")
generator = pipeline("text-generation", model=model, tokenizer=tokenizer)

prompts = ["The sea is", "A recipe for bread:"]
for (result,) in generator(prompts, batch_size=2, max_new_tokens=16, do_sample=False):
    print(repr(result["generated_text"]))
