"""The calls that are compared: one for every field of `GenerationConfig` and argument of `generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

from hf_paged.compat import cache_argument, output_cache
from tests.families import tiny_model
from tests.parity.world import NEW_TOKENS, Collector, EndsAt, SetScore, World, own_loop
from tests.tokenizers_for_tests import VOCAB_SIZE, tiny_tokenizer

# Makes arguments for one of the two models; `None` takes an argument of the base away.
Make = Callable[[World, Any], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A field beside others that give it a meaning.

    Args:
        base (`Make`):
            Arguments without the field.
        field (`Make`):
            The field, and what has to change with it.
        bites (`bool`, defaults to `True`):
            Whether the field changes what Transformers returns: tokens, scores, what else there is, or an error.
    """

    base: Make
    field: Make
    bites: bool = True

    def arguments(self, world: World, model: Any) -> dict[str, Any]:
        """Returns the arguments of the call.

        Args:
            world (`World`):
                The models and prompts.
            model (`PreTrainedModel`):
                The one that is called.
        """
        return self.base(world, model) | self.field(world, model)


def greedy(world: World, model: Any) -> dict[str, Any]:
    """Three rows of unequal length, padded on the left."""
    return {**world.prompts, "do_sample": False, "max_new_tokens": NEW_TOKENS}


def one_row(world: World, model: Any) -> dict[str, Any]:
    """One row, whose beginning repeats."""
    return greedy(world, model) | world.rows(1)


def sample(world: World, model: Any) -> dict[str, Any]:
    """Two rows, drawn from all tokens."""
    return greedy(world, model) | world.rows(0, 2) | {"do_sample": True, "top_k": 0, "max_new_tokens": 3}


def beams(world: World, model: Any) -> dict[str, Any]:
    """Two rows with three beams each, some of which end."""
    ends = [world.answer(0, 1), world.answer(1, 2)]
    return greedy(world, model) | world.rows(0, 1) | {"num_beams": 3, "eos_token_id": ends}


def ending(world: World, model: Any) -> dict[str, Any]:
    """Three rows, two of which end early."""
    return greedy(world, model) | {"eos_token_id": [world.answer(0, 1), world.answer(1, 2)]}


def static(world: World, model: Any) -> dict[str, Any]:
    """Three rows on a static cache."""
    return greedy(world, model) | {"cache_implementation": "static"}


def lookup(world: World, model: Any) -> dict[str, Any]:
    """Guesses from the prompt."""
    return one_row(world, model) | {"prompt_lookup_num_tokens": 3}


def assisted(world: World, model: Any) -> dict[str, Any]:
    """Guesses from the first two layers."""
    return one_row(world, model) | {"assistant_model": world.assistant}


def translated(world: World, model: Any) -> dict[str, Any]:
    """Guesses from a model with another tokenizer."""
    return one_row(world, model) | {
        "assistant_model": tiny_model("llama", vocab_size=VOCAB_SIZE),
        "tokenizer": world.tokenizer,
        "assistant_tokenizer": tiny_tokenizer(),
    }


def guided(world: World, model: Any) -> dict[str, Any]:
    """Away from what an empty prompt would be answered."""
    return greedy(world, model) | {"guidance_scale": 1.5}


def cut_link(world: World, model: Any) -> dict[str, Any]:
    """A prompt that ends in the middle of what is one token otherwise."""
    return greedy(world, model) | dict(world.tokenizer('The link is <a href="http:', return_tensors="pt"))


def from_nothing(world: World, model: Any) -> dict[str, Any]:
    """No prompt at all."""
    return {"do_sample": False, "max_new_tokens": NEW_TOKENS}


def continued(world: World, model: Any) -> dict[str, Any]:
    """A cache of an earlier call, which computed other tokens than it is said to hold."""
    arguments = one_row(world, model) | {"return_dict_in_generate": True}
    first = model.generate(**arguments | world.rows(2))
    tokens = torch.cat(
        [world.rows(1)["input_ids"][:, :1].expand(1, first.sequences.shape[1] - 1), first.sequences[:, -1:]], 1
    )
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        cache_argument(model): output_cache(first),
    }


def embedded(world: World, model: Any) -> dict[str, Any]:
    """The prompt as embeddings, a little off."""
    row = world.rows(1)
    embeddings = model.get_input_embeddings()(row["input_ids"]).detach() * 1.1
    return {"inputs_embeds": embeddings, "input_ids": None}


def _is(base: Make = greedy, bites: bool = True, **settings: Any) -> Case:
    return Case(base, lambda world, model: dict(settings), bites)


def _made(make: Callable[[World], dict[str, Any]], base: Make = greedy, bites: bool = True) -> Case:
    return Case(base, lambda world, model: make(world), bites)


CASES: dict[str, Case] = {
    # Lengths and ends.
    "max_length": _made(lambda w: {"max_length": w.width + 2, "max_new_tokens": None}),
    "max_new_tokens": _is(max_new_tokens=2),
    "min_length": _made(lambda w: {"min_length": w.width + 4}, ending),
    "min_new_tokens": _is(ending, min_new_tokens=4),
    "eos_token_id": _made(lambda w: {"eos_token_id": [w.answer(0, 1), w.answer(1, 2)]}),
    "pad_token_id": _is(ending, pad_token_id=77),
    "bos_token_id": _is(from_nothing, bos_token_id=9),
    "max_time": _is(max_time=0.0),
    "stop_strings": _made(lambda w: {"stop_strings": [w.tokenizer.decode([w.answer(0, 1)])], "tokenizer": w.tokenizer}),
    "token_healing": _made(lambda w: {"token_healing": True, "tokenizer": w.tokenizer}, cut_link),
    "prefill_chunk_size": _is(bites=False, prefill_chunk_size=4),
    # Results.
    "num_return_sequences": _is(beams, num_return_sequences=2),
    "return_dict_in_generate": _is(return_dict_in_generate=True, output_scores=False),
    "output_scores": Case(lambda w, m: greedy(w, m) | {"output_scores": False}, lambda w, m: {"output_scores": True}),
    "output_logits": _is(output_logits=True),
    "output_hidden_states": _is(one_row, output_hidden_states=True),
    "output_attentions": _is(one_row, output_attentions=True),
    # Processors.
    "repetition_penalty": _is(repetition_penalty=1.4),
    "encoder_repetition_penalty": _is(encoder_repetition_penalty=1.5),
    "no_repeat_ngram_size": _is(no_repeat_ngram_size=2),
    "encoder_no_repeat_ngram_size": _is(encoder_no_repeat_ngram_size=1),
    "bad_words_ids": _made(lambda w: {"bad_words_ids": [[w.answer(0, 0)], [w.answer(1, 0), w.answer(1, 1)]]}),
    "sequence_bias": _made(lambda w: {"sequence_bias": [[[w.answer(0, 0)], -9.0], [[30, 40], 2.0]]}),
    "forced_bos_token_id": Case(from_nothing, lambda w, m: {"forced_bos_token_id": 30}),
    "forced_eos_token_id": _is(forced_eos_token_id=2),
    "exponential_decay_length_penalty": _is(eos_token_id=30, exponential_decay_length_penalty=(1, 1.5)),
    "suppress_tokens": _made(lambda w: {"suppress_tokens": [w.answer(0, 0), w.answer(1, 1)]}),
    "begin_suppress_tokens": _made(lambda w: {"begin_suppress_tokens": [w.answer(0, 0), w.answer(1, 0)]}),
    "remove_invalid_values": Case(
        lambda w, m: greedy(w, m) | {"bad_words_ids": [[w.answer(0, 0)]]},
        lambda w, m: {"remove_invalid_values": True},
    ),
    "renormalize_logits": _is(renormalize_logits=True),
    "guidance_scale": _is(guidance_scale=1.5),
    "watermarking_config": _made(lambda w: {"watermarking_config": WatermarkingConfig(bias=3.0)}),
    # Sampling.
    "do_sample": _is(do_sample=True),
    "temperature": _is(sample, temperature=0.6),
    "top_k": _is(sample, top_k=7),
    "top_p": _is(sample, top_p=0.7),
    "min_p": _is(sample, min_p=0.05),
    "top_h": _is(sample, top_h=0.5),
    "typical_p": _is(sample, typical_p=0.6),
    "epsilon_cutoff": _is(sample, epsilon_cutoff=0.01),
    "eta_cutoff": _is(sample, eta_cutoff=0.02),
    # Beams.
    "num_beams": _is(num_beams=3),
    "early_stopping": _is(beams, bites=False, early_stopping="never"),
    "length_penalty": _is(beams, length_penalty=3.0),
    # Assisted decoding, which is not to change any token.
    "assistant_model": _made(lambda w: {"assistant_model": w.assistant}, one_row, bites=False),
    "assistant_tokenizer": Case(one_row, translated, bites=False),
    "assistant_early_exit": _is(one_row, bites=False, assistant_early_exit=1),
    "prompt_lookup_num_tokens": _is(one_row, bites=False, prompt_lookup_num_tokens=3),
    "max_matching_ngram_size": _is(lookup, bites=False, max_matching_ngram_size=3),
    "num_assistant_tokens": _is(assisted, bites=False, num_assistant_tokens=2),
    "num_assistant_tokens_schedule": _is(assisted, bites=False, num_assistant_tokens_schedule="heuristic"),
    "assistant_confidence_threshold": _is(assisted, bites=False, assistant_confidence_threshold=0.1),
    "assistant_ensemble_weight": _is(assisted, bites=False, assistant_ensemble_weight=0.5),
    "assistant_lookbehind": _is(translated, bites=False, assistant_lookbehind=4),
    "target_lookbehind": _is(translated, bites=False, target_lookbehind=4),
    "is_assistant": _is(bites=False, is_assistant=True),
    "speculation_type": _is(assisted, speculation_type="dflash"),
    "use_mtp": _is(one_row, use_mtp=True),
    # Caches.
    "use_cache": _is(bites=False, use_cache=False),
    "cache_implementation": _is(bites=False, cache_implementation="static"),
    "cache_config": _is(cache_implementation="quantized", cache_config={"backend": "quanto", "nbits": 4}),
    "max_cache_len": _is(static, bites=False, max_cache_len=64),
    "compile_config": _is(static, bites=False, compile_config=CompileConfig()),
    "disable_compile": _is(bites=False, disable_compile=True),
    "past_key_values": Case(one_row, continued),
    # What is refused, or not read.
    "constraints": _is(constraints=["anything"]),
    "force_words_ids": _is(beams, force_words_ids=[[5]]),
    "dola_layers": _is(dola_layers="low"),
    "num_beam_groups": _is(beams, num_beam_groups=3),
    "diversity_penalty": Case(
        lambda w, m: beams(w, m) | {"num_beam_groups": 3}, lambda w, m: {"diversity_penalty": 0.5}, bites=False
    ),
    "penalty_alpha": _is(penalty_alpha=0.6, top_k=4),
    "low_memory": _is(beams, low_memory=True),
    "decoder_start_token_id": _is(bites=False, decoder_start_token_id=5),
    "transformers_version": _is(bites=False, transformers_version="4.0.0"),
    "continuous_batching_config": _is(bites=False, continuous_batching_config={"num_blocks": 2}),
    # Arguments.
    "inputs": _made(lambda w: {"inputs": w.rows(1)["input_ids"]}, from_nothing),
    "input_ids": _made(lambda w: {"input_ids": w.rows(1)["input_ids"]}, from_nothing),
    "inputs_embeds": Case(one_row, embedded),
    "attention_mask": _made(lambda w: {"attention_mask": torch.ones_like(w.prompts["attention_mask"])}),
    "position_ids": _made(lambda w: {"position_ids": torch.arange(w.width).expand(3, -1) * 2}),
    "generation_config": _made(
        lambda w: {"generation_config": GenerationConfig(max_new_tokens=2, num_beams=2), "max_new_tokens": None}
    ),
    "logits_processor": _made(lambda w: {"logits_processor": [SetScore(w.answer(0, 0), -9.0)]}),
    "stopping_criteria": _made(lambda w: {"stopping_criteria": [EndsAt(w.width + 2)]}),
    "prefix_allowed_tokens_fn": _made(lambda w: {"prefix_allowed_tokens_fn": lambda row, ids: [30 + row, 40, 50]}),
    "negative_prompt_ids": _made(lambda w: {"negative_prompt_ids": w.prompts["input_ids"].flip(0)}, guided),
    "negative_prompt_attention_mask": Case(
        lambda w, m: guided(w, m) | {"negative_prompt_ids": w.prompts["input_ids"].flip(0)},
        lambda w, m: {"negative_prompt_attention_mask": w.prompts["attention_mask"].flip(0)},
    ),
    "streamer": Case(one_row, lambda w, m: {"streamer": Collector()}, bites=False),
    "synced_gpus": _is(synced_gpus=True),
    "custom_generate": _is(one_row, custom_generate=own_loop),
    "trust_remote_code": _is(bites=False, trust_remote_code=False),
    "tokenizer": _made(lambda w: {"tokenizer": w.tokenizer}, bites=False),
}
