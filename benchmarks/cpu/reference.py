"""First tokens of W1 in float32: `python -m benchmarks.cpu.reference JOB OUTPUT`, on stock Transformers.

Long bf16 texts of two engines part at some near tie, so only first tokens are compared. A bf16 engine may choose any
token whose float32 logit is within `NEAR_TIE` of the largest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NEAR_TIE = 0.25
TOP = 8


def main() -> None:
    """Writes the largest logits after each prompt of the job's W1."""
    import torch
    from transformers import AutoModelForCausalLM

    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    tops = []
    with torch.inference_mode():
        for prompt in job["workloads"]["W1"]["prompts"]:
            logits, ids = model(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1].topk(TOP)
            tops.append({"ids": ids.tolist(), "logits": logits.tolist()})
    Path(sys.argv[2]).write_text(json.dumps({"W1": tops}), encoding="utf-8")


def agreement(first_tokens: list[int], tops: list[dict[str, Any]]) -> dict[str, int]:
    """Returns how many first tokens are the reference's, how many a near tie of it, and how many neither.

    Args:
        first_tokens (`list[int]`):
            What an engine said, in the order of the prompts.
        tops (`list[dict[str, Any]]`):
            The reference's largest logits for each prompt.
    """
    counts = {"same": 0, "near_tie": 0, "other": 0}
    for token, top in zip(first_tokens, tops, strict=True):
        close = [i for i, logit in zip(top["ids"], top["logits"], strict=True) if top["logits"][0] - logit <= NEAR_TIE]
        counts["same" if token == top["ids"][0] else "near_tie" if token in close else "other"] += 1
    return counts


if __name__ == "__main__":
    main()
