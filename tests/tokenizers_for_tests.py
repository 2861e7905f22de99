"""A byte-level tokenizer with a small vocabulary, made on the spot."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Tokens of several characters, so that stop strings begin and end inside of them.
_MERGES = ["t h", "th e", "Ġ the", "i n", "Ġ a", "a n", "an d", "Ġ and", "o n", "Ġ o", "e r", "l l", "h e", "he ll"]
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if not (loop.last and continue_final_message) %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, a few merges, `<pad>` at 0 and `<|end|>` as the end of a text; no beginning-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split(" ")) for merge in _MERGES]
    tokens = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", *alphabet]
    tokens += ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:5])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|end|>", padding_side="left"
    )
    fast.chat_template = _TEMPLATE
    return fast


VOCAB_SIZE = 5 + 256 + len(_MERGES)
EOS = 1
