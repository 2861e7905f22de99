"""The one line that changes: `AutoPagedModelForCausalLM` for `AutoModelForCausalLM`. The rest is Transformers."""

import argparse

from transformers import AutoTokenizer

from hf_paged import AutoPagedModelForCausalLM  # was: from transformers import AutoModelForCausalLM
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
path = parser.parse_args().model or str(packaged_model_path())

tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoPagedModelForCausalLM.from_pretrained(path, dtype="auto")

inputs = tokenizer(["The capital of France is", "Water boils at"], return_tensors="pt", padding=True).to(model.device)
tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)
for text in tokenizer.batch_decode(tokens, skip_special_tokens=True):
    print(repr(text))

# Many prompts of any lengths, without padding: continuous batching.
prompts = ["One, two,", "My favourite season of the year is", "def add(a, b):"]
for answer in model.generate_batch(prompts, tokenizer=tokenizer, max_new_tokens=16, do_sample=False).values():
    print(repr(tokenizer.decode(answer.generated_tokens, skip_special_tokens=True)))
