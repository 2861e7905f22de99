"""Adapters switched while other requests run: every answer comes from the adapter of the moment, none from old K/V."""

import argparse
import threading

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from hf_paged import AutoPagedModelForCausalLM, SamplingParams
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
parser.add_argument("--rounds", type=int, default=3)
arguments = parser.parse_args()
path = arguments.model or str(packaged_model_path())

tokenizer = AutoTokenizer.from_pretrained(path)
paged = AutoPagedModelForCausalLM.from_pretrained(path, dtype="float32")
engine = paged.engine
model = None
for seed, name in enumerate(("first", "second")):
    torch.manual_seed(seed)  # random adapters here; `load_adapter` loads trained ones
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(paged, config, adapter_name=name) if model is None else model
    if name not in model.peft_config:
        model.add_adapter(name, config)

text = "Once upon a time there was a small house at the edge of the forest. " * 3
prompt = tokenizer(text).input_ids
params = SamplingParams(temperature=0, max_tokens=8)
is_over = threading.Event()
num_answered = 0


def load() -> None:
    """Requests that come all the time and do not care which adapter answers them."""
    global num_answered
    while not is_over.is_set():
        engine.generate([[7, 8, 9, num_answered % 100], prompt[:30]], params)
        num_answered += 2


def ask() -> tuple[str, int]:
    (output,) = engine.generate([prompt], params)
    return tokenizer.decode(output.outputs[0].token_ids), output.num_cached_tokens


thread = threading.Thread(target=load)
thread.start()
answers: dict[str, str] = {}
try:
    for _ in range(arguments.rounds):
        for name in ("first", "second"):
            model.set_adapter(name)
            answer, num_cached = ask()
            assert answers.setdefault(name, answer) == answer, "an answer depends on nothing but its adapter"
            print(f"{name}: {num_cached:3} of {len(prompt)} prompt tokens were cached: {answer!r}")
        with model.disable_adapter():
            answer, num_cached = ask()
        assert answers.setdefault("none", answer) == answer
        print(f"none: {num_cached:3} of {len(prompt)} prompt tokens were cached: {answer!r}")
finally:
    is_over.set()
    thread.join()
print(f"{len(set(answers.values()))} different answers, while {num_answered} other requests were answered")
