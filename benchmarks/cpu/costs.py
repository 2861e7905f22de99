"""What a model costs: bytes of its weights and operations of its products, from its config.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """Costs of a plain decoder with gated MLPs; a multiplication and an addition are two operations.

    Args:
        weight_bytes (`int`):
            Bytes of all weights.
        layer_operations (`float`):
            Operations of one token in the linear layers.
        head_operations (`float`):
            Operations of one row of logits.
        attention_operations (`float`):
            Operations of one token for each token that it sees.
        kv_bytes (`int`):
            Bytes of K/V of one token, in bf16.
    """

    weight_bytes: int
    layer_operations: float
    head_operations: float
    attention_operations: float
    kv_bytes: int

    def prefill_operations(self, lengths: Sequence[int]) -> float:
        """Returns the operations until the first token of prompts.

        Args:
            lengths (`Sequence[int]`):
                Their tokens.
        """
        seen = sum(length * (length + 1) / 2 for length in lengths)
        linear = sum(lengths) * self.layer_operations + len(lengths) * self.head_operations
        return linear + seen * self.attention_operations

    def step_operations(self, requests: float, context: float) -> float:
        """Returns the operations of a step of decoding requests.

        Args:
            requests (`float`):
                How many.
            context (`float`):
                Tokens that each sees.
        """
        return requests * (self.layer_operations + self.head_operations + context * self.attention_operations)

    def step_bytes(self, requests: float, context: float) -> float:
        """Returns the bytes that a step of decoding requests must read.

        Args:
            requests (`float`):
                How many.
            context (`float`):
                Tokens that each sees.
        """
        return self.weight_bytes + requests * context * self.kv_bytes


def model_costs(model: Path) -> ModelCosts:
    """Returns the costs of a model.

    Args:
        model (`Path`):
            A Transformers folder.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, layers, heads = (config[n] for n in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * (2 * heads + 2 * kv_heads) * head_dim
    return ModelCosts(
        weight_bytes=sum(file.stat().st_size for file in model.glob("*.safetensors")),
        layer_operations=2.0 * layers * (attention + 3 * hidden * config["intermediate_size"]),
        head_operations=2.0 * config["vocab_size"] * hidden,
        attention_operations=4.0 * layers * heads * head_dim,
        kv_bytes=layers * 2 * kv_heads * head_dim * 2,
    )
