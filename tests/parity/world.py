"""The same model twice, one of them paged, with the prompts that both are given."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_paged import AutoPagedModelForCausalLM, PagedConfig

TEXTS = ("The capital of France is", "One, two, three, one, two, three, one,", "My favourite colour has always been")
NEW_TOKENS = 4


class World:
    """Two copies of a model, and what plain greedy search answers to three prompts of unequal length.

    Args:
        path (`str`):
            Folder of the model.
        num_hidden_layers (`int`, *optional*):
            Keep only so many layers: faster, for trying things out.
    """

    def __init__(self, path: str, num_hidden_layers: int | None = None):
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.stock = _load(path, num_hidden_layers)
        # The pool is small enough for its blocks to be handed out again and again.
        config = PagedConfig(num_blocks=128, block_size=8)
        self.paged: Any = AutoPagedModelForCausalLM.from_model(_load(path, num_hidden_layers), paged_config=config)
        self.assistant = _load(path, 2)
        batch = self.tokenizer(list(TEXTS), return_tensors="pt", padding=True)
        self.prompts = {name: batch[name] for name in ("input_ids", "attention_mask")}
        self.width = self.prompts["input_ids"].shape[1]
        self._greedy = self.stock.generate(**self.prompts, do_sample=False, max_new_tokens=NEW_TOKENS)

    def rows(self, *which: int) -> dict[str, torch.Tensor]:
        """Returns some of the prompts, without the columns in which all of them have padding.

        Args:
            which (`int`):
                Their numbers.
        """
        kept = {name: value[list(which)] for name, value in self.prompts.items()}
        start = int(kept["attention_mask"].argmax(dim=1).min())
        return {name: value[:, start:] for name, value in kept.items()}

    def answer(self, row: int, place: int) -> int:
        """Returns a token of plain greedy search's answer.

        Args:
            row (`int`):
                Number of the prompt.
            place (`int`):
                Place in the answer.
        """
        return int(self._greedy[row, self.width + place])


def _load(path: str, num_hidden_layers: int | None) -> Any:
    fewer = {} if num_hidden_layers is None else {"num_hidden_layers": num_hidden_layers}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **fewer).eval()


class SetScore(LogitsProcessor):
    """Gives a token a score.

    Args:
        token (`int`):
            The token.
        value (`float`):
            The score.
    """

    def __init__(self, token: int, value: float):
        self.token, self.value = token, value

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Returns the scores with one token's changed."""
        scores = scores.clone()
        scores[:, self.token] = self.value
        return scores


class EndsAt(StoppingCriteria):
    """Ends rows at a length.

    Args:
        length (`int`):
            Prompt and answer together.
    """

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        """Returns whether each row ends."""
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)  # type: ignore[return-value]


class Collector(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.parts: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        """Keeps tokens."""
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        """Keeps that it is over."""
        self.parts.append([])


def own_loop(model: Any, input_ids: torch.Tensor, logits_processor: Any, **kwargs: Any) -> torch.Tensor:
    """A decoding loop of somebody's own: two greedy tokens.

    Args:
        model (`PreTrainedModel`):
            The model.
        input_ids (`torch.Tensor`):
            `[batch, length]`.
        logits_processor (`LogitsProcessorList`):
            What `generate` made.
        kwargs (`Any`):
            What else `generate` hands to a loop.
    """
    for _ in range(2):
        logits = model(input_ids, use_cache=False).logits[:, -1]
        input_ids = torch.cat([input_ids, logits_processor(input_ids, logits).argmax(-1, keepdim=True)], dim=1)
    return input_ids
