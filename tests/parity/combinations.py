"""Random calls of `generate` that use several fields at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from transformers import WatermarkingConfig

from tests.parity.cases import Case
from tests.parity.world import EndsAt, SetScore, World

Draw = Callable[[random.Random, World], dict[str, Any]]

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "beam_sample": {"do_sample": True, "num_beams": 2},
}


def _token(source: random.Random, world: World) -> int:
    """A token that is likely to matter: one of plain greedy search's answers."""
    return world.answer(source.randrange(3), source.randrange(3))


# Fields for every mode.
ANY: dict[str, Draw] = {
    "repetition_penalty": lambda r, w: {"repetition_penalty": r.choice([0.8, 1.2, 1.7])},
    "encoder_repetition_penalty": lambda r, w: {"encoder_repetition_penalty": r.choice([0.9, 1.3])},
    "no_repeat_ngram_size": lambda r, w: {"no_repeat_ngram_size": r.choice([1, 2, 3])},
    "encoder_no_repeat_ngram_size": lambda r, w: {"encoder_no_repeat_ngram_size": r.choice([1, 2])},
    "bad_words_ids": lambda r, w: {"bad_words_ids": [[_token(r, w)], [_token(r, w), _token(r, w)]]},
    "sequence_bias": lambda r, w: {"sequence_bias": [[[_token(r, w)], r.uniform(-9, 9)], [[30, 40], 2.0]]},
    "eos_token_id": lambda r, w: {"eos_token_id": [_token(r, w), 2]},
    "pad_token_id": lambda r, w: {"pad_token_id": r.choice([0, 2, 77])},
    "min_new_tokens": lambda r, w: {"min_new_tokens": r.choice([1, 2, 3]), "eos_token_id": _token(r, w)},
    "forced_eos_token_id": lambda r, w: {"forced_eos_token_id": r.choice([2, [2, 0]])},
    "exponential_decay_length_penalty": lambda r, w: {
        "exponential_decay_length_penalty": (r.choice([1, 2]), r.uniform(1.05, 2)),
        "eos_token_id": _token(r, w),
    },
    "suppress_tokens": lambda r, w: {"suppress_tokens": [_token(r, w), _token(r, w)]},
    "begin_suppress_tokens": lambda r, w: {"begin_suppress_tokens": [_token(r, w)]},
    "remove_invalid_values": lambda r, w: {"remove_invalid_values": True},
    "renormalize_logits": lambda r, w: {"renormalize_logits": True},
    "guidance_scale": lambda r, w: {"guidance_scale": r.choice([1.2, 1.6])},
    "watermarking_config": lambda r, w: {
        "watermarking_config": WatermarkingConfig(
            bias=r.uniform(1, 4), seeding_scheme=r.choice(["lefthash", "selfhash"])
        )
    },
    "logits_processor": lambda r, w: {"logits_processor": [SetScore(_token(r, w), r.uniform(-20, 5))]},
    "stopping_criteria": lambda r, w: {"stopping_criteria": [EndsAt(w.width + 2)]},
    "prefix_allowed_tokens_fn": lambda r, w: {"prefix_allowed_tokens_fn": lambda row, ids: [30 + row, 40, 50, 60]},
    "stop_strings": lambda r, w: {"stop_strings": [w.tokenizer.decode([_token(r, w)])], "tokenizer": w.tokenizer},
    "output_logits": lambda r, w: {"output_logits": True},
    "output_hidden_states": lambda r, w: {"output_hidden_states": True},
    "output_attentions": lambda r, w: {"output_attentions": True},
    "prefill_chunk_size": lambda r, w: {"prefill_chunk_size": r.choice([3, 4])},
    "use_cache": lambda r, w: {"use_cache": False},
}
SAMPLING: dict[str, Draw] = {
    "temperature": lambda r, w: {"temperature": r.uniform(0.5, 1.5)},
    "top_k": lambda r, w: {"top_k": r.choice([0, 5, 40])},
    "top_p": lambda r, w: {"top_p": r.uniform(0.6, 0.95)},
    "min_p": lambda r, w: {"min_p": r.uniform(0.01, 0.1)},
    "top_h": lambda r, w: {"top_h": r.uniform(0.3, 0.8)},
    "typical_p": lambda r, w: {"typical_p": r.uniform(0.4, 0.9)},
    "epsilon_cutoff": lambda r, w: {"epsilon_cutoff": r.uniform(0.001, 0.02)},
    "eta_cutoff": lambda r, w: {"eta_cutoff": r.uniform(0.001, 0.02)},
}
BEAMS: dict[str, Draw] = {
    "length_penalty": lambda r, w: {"length_penalty": r.choice([-1.0, 0.5, 2.0])},
    "early_stopping": lambda r, w: {"early_stopping": r.choice([True, "never"])},
    "num_return_sequences": lambda r, w: {"num_return_sequences": 2},
}


def combination(number: int) -> tuple[str, Case]:
    """Returns the name and the call of a combination; the same for the same number.

    Args:
        number (`int`):
            Seed of everything that is drawn.
    """
    source = random.Random(number)
    mode = source.choice([*MODES, "greedy", "sample"])
    pool = ANY | (SAMPLING if "sample" in mode else {}) | (BEAMS if "beam" in mode else {})
    fields = source.sample(sorted(pool), source.randint(2, 5))
    rows = sorted(source.sample(range(3), source.randint(1, 3)))
    new_tokens = source.randint(2, 4)
    seed = source.random()

    def base(world: World, model: Any) -> dict[str, Any]:
        return {**MODES[mode], **world.rows(*rows), "max_new_tokens": new_tokens}

    def drawn(world: World, model: Any) -> dict[str, Any]:
        again = random.Random(seed)  # both models are given the same
        return {name: value for field in fields for name, value in pool[field](again, world).items()}

    return f"{number}: {mode}, {', '.join(fields)}", Case(base, drawn)
