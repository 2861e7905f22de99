"""Reinforcement learning on one copy of the weights: answer with `generate_batch`, learn from it, answer again."""

import argparse

import torch
from transformers import AutoTokenizer

from hf_paged import AutoPagedModelForCausalLM
from hf_paged.tools.packaged_model import packaged_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a folder or a name on the Hub; by default the packaged model")
parser.add_argument("--steps", type=int, default=3)
arguments = parser.parse_args()
path = arguments.model or str(packaged_model_path())

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoPagedModelForCausalLM.from_pretrained(path, dtype="float32")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
questions = ["Name an animal.", "Where is the sea?", "What do bakers do?"]
chats = [[{"role": "user", "content": question}] for question in questions]
NUM_ANSWERS, NUM_TOKENS = 3, 16


def reward(tokens: list[int]) -> float:
    """Short words are good. A real reward asks a judge, or runs the tests."""
    words = tokenizer.decode(tokens, skip_special_tokens=True).split()
    return -sum(map(len, words)) / max(len(words), 1)


def log_probabilities(prompt: list[int], answer: list[int]) -> torch.Tensor:
    """A plain forward, with gradients: `[answer tokens]`."""
    logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


for step in range(arguments.steps):
    model.eval()
    results = list(
        model.generate_batch(
            chats,
            tokenizer=tokenizer,
            do_sample=True,
            num_return_sequences=NUM_ANSWERS,
            max_new_tokens=NUM_TOKENS,
            progress_bar=False,
        ).values()
    )
    rewards = torch.tensor([reward(result.generated_tokens) for result in results]).view(len(chats), NUM_ANSWERS)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    model.train()
    losses = [
        -advantage * log_probabilities(result.prompt_ids, result.generated_tokens).mean()
        for result, advantage in zip(results, advantages, strict=True)
    ]
    torch.stack(losses).mean().backward()
    optimizer.step()  # noticed by the engine: it forgets the K/V of the old weights
    optimizer.zero_grad()
    print(f"step {step}: mean reward {rewards.mean():.2f}")

model.eval()
chat = tokenizer.apply_chat_template(chats[0], add_generation_prompt=True, tokenize=False)
(trained,) = model.generate_batch([chat], tokenizer=tokenizer, max_new_tokens=NUM_TOKENS, progress_bar=False).values()
fresh = AutoPagedModelForCausalLM.from_pretrained(path, dtype="float32")
fresh.load_state_dict(model.state_dict())
(again,) = fresh.generate_batch([chat], tokenizer=tokenizer, max_new_tokens=NUM_TOKENS, progress_bar=False).values()
assert again.generated_tokens == trained.generated_tokens, "the engine answers by the weights of the moment"
print(f"as a fresh engine: {tokenizer.decode(trained.generated_tokens)!r}")
