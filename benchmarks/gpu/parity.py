"""Whether the engine's greedy tokens are the stock model's: each must have (nearly) the largest stock logit."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.tools.bench.engine_run import forced

from .engines import paged
from .models import random_prompts
from .settings import Run

PROMPT_LENGTHS = (3, 16, 17, 31, 45, 64, 5, 33)
OUTPUT_LENGTH = 24
GRAPH_SIZES = (1, 8)  # fewer than usual, which saves time
# How far below the largest logit a token may be, in standard deviations of the logits: rounding decides ties.
ALLOWED = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}


def check_tokens(model: Any, name: str, run: Run, num_shared: int = 0, **changed: Any) -> dict[str, Any]:
    """Returns how far the engine's tokens are from the stock model's choice, prompts of all lengths together.

    Args:
        model (`PreTrainedModel`):
            A stock model.
        name (`str`):
            For people.
        run (`Run`):
            What the part is given.
        num_shared (`int`, defaults to 0):
            Tokens that all prompts have in common.
        changed (`Any`):
            Settings of the engine other than usual.
    """
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    prefix, *own = random_prompts([num_shared, *PROMPT_LENGTHS], vocab_size, run.settings.seed)
    prompts = [prefix + tokens for tokens in own]
    with paged(model, run, **({"cuda_graph_sizes": GRAPH_SIZES} | changed)) as ours:
        backend = ours.engine.plan.attn_backend
        if prefix:  # is cached then, and shared
            ours.engine.generate([prefix], [forced(1)])
        answers = ours.engine.generate(prompts, [forced(OUTPUT_LENGTH)] * len(prompts))
    tokens = [answer.outputs[0].token_ids for answer in answers]
    regrets = [regret(model, prompt, list(chosen)) for prompt, chosen in zip(prompts, tokens, strict=True)]
    worst = max(map(max, regrets))
    allowed = ALLOWED[model.dtype]
    same = sum(r == 0.0 for row in regrets for r in row)
    total = sum(map(len, regrets))
    passed = worst <= allowed
    said = "parity" if passed else "NO PARITY"
    return {
        "model": name,
        "dtype": str(model.dtype),
        "attn_backend": backend,
        "worst_regret": worst,
        "allowed_regret": allowed,
        "same_tokens": same,
        "tokens": total,
        "passed": passed,
        "says": f"{said} of {name} in {model.dtype} ({backend}): {same} of {total} tokens are stock's choice, "
        f"the worst {worst:.4f} standard deviations below (at most {allowed:g})",
    }


@torch.inference_mode()
def regret(model: Any, prompt: list[int], chosen: list[int]) -> list[float]:
    """Returns how far each chosen token's stock logit is below the largest, in standard deviations of the logits.

    Args:
        model (`PreTrainedModel`):
            The stock model, given the prompt and the tokens chosen before.
        prompt (`list[int]`):
            The prompt.
        chosen (`list[int]`):
            The engine's tokens.
    """
    ids = torch.tensor([prompt + chosen[:-1]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
    picked = logits.gather(1, torch.tensor(chosen, device=model.device)[:, None])[:, 0]
    below: list[float] = ((logits.max(1).values - picked) / logits.std(1)).tolist()
    return below
