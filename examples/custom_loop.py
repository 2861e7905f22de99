"""A loop of your own over a stock model with a `PagedCache`: one prompt, four continuations, one copy of its K/V."""

import argparse
import inspect

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged import PagedCache
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
path = parser.parse_args().model or str(packaged_model_path())

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
prompt = tokenizer("The old lighthouse keeper opened the door and saw", return_tensors="pt").input_ids

cache = PagedCache(model.config, block_size=4)
# Transformers 5.24 calls the argument `cache`; before, it was `past_key_values`.
argument = {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}
with torch.inference_mode():
    logits = model(prompt, **argument).logits[:, -1]
    print(f"{prompt.shape[1]} prompt tokens, {cache.num_blocks_held} blocks")

    cache.batch_repeat_interleave(4)  # moves block tables, copies nothing
    logits = logits.repeat_interleave(4, dim=0)
    print(f"four rows, still {cache.num_blocks_held} blocks")

    answers = []
    for _ in range(12):
        tokens = torch.multinomial(torch.softmax(logits.float(), dim=-1), num_samples=1)
        answers.append(tokens)
        logits = model(tokens, **argument).logits[:, -1]
    print(f"12 tokens further in each row, {cache.num_blocks_held} blocks")

for text in tokenizer.batch_decode(torch.cat(answers, dim=1)):
    print(repr(text))
