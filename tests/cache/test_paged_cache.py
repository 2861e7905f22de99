"""`PagedCache` in the user's own loop, and in Transformers' loops: always the same numbers as `DynamicCache`."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import DynamicCache

from hf_paged import ConfigurationError, PagedCache, UnsupportedModelError
from hf_paged.compat import cache_argument
from tests.families import tiny_model
from tests.paged_models import paged

# A plain one, a sliding window, a soft cap beside it, sinks, absolute positions, partial rotary, a cached latent.
HAND_FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss", "gpt2", "opt", "gpt_neox", "deepseek_v3"]


@torch.no_grad()
def forward(model, tokens, cache, **kwargs):
    return model(input_ids=torch.as_tensor(tokens), use_cache=True, **{cache_argument(model): cache}, **kwargs).logits


def tokens_of(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 199, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", HAND_FAMILIES)
def test_hand_written_loop_with_left_padding_equals_dynamic_cache(family):
    """huggingface/transformers#18478: padding must not change a row, neither in the prompt nor later."""
    model = tiny_model(family)
    tokens, lengths = tokens_of(3, 27), [27, 21, 3]
    mask = torch.stack([torch.tensor([0] * (27 - n) + [1] * n) for n in lengths])
    logits = []
    for cache in (DynamicCache(config=model.config), PagedCache(model.config, block_size=8)):
        seen = []
        for start, end in ((0, 5), (5, 22), (22, 23), (23, 24), (24, 27)):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
            seen.append(
                forward(model, tokens[:, start:end], cache, attention_mask=mask[:, :end], position_ids=positions)
            )
        logits.append(torch.cat(seen, dim=1))
    real = mask.bool()
    torch.testing.assert_close(logits[1][real], logits[0][real], atol=1e-5, rtol=1e-5)


def test_works_with_a_paged_model_beside_its_engine():
    model = paged(block_size=4, num_blocks=16)
    tokens = tokens_of(2, 30)
    expected = forward(tiny_model("llama"), tokens, DynamicCache())
    cache = PagedCache(model.config)
    model.generate(tokens[:1, :9], max_new_tokens=3)
    torch.testing.assert_close(forward(model, tokens[:, :13], cache), expected[:, :13], atol=1e-5, rtol=1e-5)
    model.generate(tokens[1:, :9], max_new_tokens=3)
    torch.testing.assert_close(forward(model, tokens[:, 13:], cache), expected[:, 13:], atol=1e-5, rtol=1e-5)


def test_layers_appear_as_the_model_asks_for_them():
    model, tokens = tiny_model("llama"), tokens_of(1, 12)
    cache = PagedCache()
    assert cache.get_seq_length() == 0
    split = torch.cat([forward(model, tokens[:, :7], cache), forward(model, tokens[:, 7:], cache)], dim=1)
    torch.testing.assert_close(split, forward(model, tokens, DynamicCache()), atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 12 and len(cache.layers) == 2


def test_blocks_are_taken_as_tokens_need_them():
    model, cache = tiny_model("llama"), PagedCache(tiny_model("llama").config, block_size=16)
    held = []
    for length in (1, 14, 1, 1, 30):
        forward(model, tokens_of(2, length), cache)
        held.append(cache.num_blocks_held)
    assert held == [2, 2, 2, 4, 6]  # two rows of 1, 15, 16, 17 and 47 tokens


def test_repeated_rows_share_blocks_and_copy_the_partial_one_when_they_part():
    model, tokens = tiny_model("llama"), tokens_of(1, 40)
    cache, reference = PagedCache(model.config), DynamicCache()
    for each in (cache, reference):
        forward(model, tokens, each)
        each.batch_repeat_interleave(4)
    assert cache.num_blocks_held == 3 and cache.batch_size == 4
    for step in range(12):  # over a block's end
        different = tokens_of(4, 1, seed=step)
        torch.testing.assert_close(
            forward(model, different, cache), forward(model, different, reference), atol=1e-5, rtol=1e-5
        )
        # Two full blocks of the prompt stay shared; the one of 8 tokens was copied for all rows but the last.
        assert cache.num_blocks_held == 2 + 4 * (1 + (step >= 8))


def test_reordered_rows_share_blocks_and_stay_apart():
    model, tokens = tiny_model("llama"), tokens_of(3, 20)
    cache, reference = PagedCache(model.config), DynamicCache()
    for each in (cache, reference):
        forward(model, tokens, each)
        each.reorder_cache(torch.tensor([2, 2, 0]))
    assert cache.num_blocks_held == 4  # what row 1 was is free
    for step in range(3):
        different = tokens_of(3, 1, seed=step)
        torch.testing.assert_close(
            forward(model, different, cache), forward(model, different, reference), atol=1e-5, rtol=1e-5
        )
    assert cache.num_blocks_held == 5
    for left, right in zip(cache.layers, reference.layers, strict=True):
        torch.testing.assert_close(left.keys, right.keys)
        torch.testing.assert_close(left.values, right.values)


@pytest.mark.parametrize("indices", [torch.tensor([2, 0]), torch.tensor([True, False, True])])
def test_selected_rows_continue_and_the_others_are_freed(indices):
    model, tokens = tiny_model("llama"), tokens_of(3, 20)
    cache, reference = PagedCache(model.config), DynamicCache()
    for each in (cache, reference):
        forward(model, tokens, each)
        each.batch_select_indices(indices)
    assert cache.num_blocks_held == 4 and cache.batch_size == 2
    torch.testing.assert_close(
        forward(model, tokens_of(2, 5), cache), forward(model, tokens_of(2, 5), reference), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("argument", "keep"), [(-1, 39), (-8, 32), (-40, 0), (-100, 0), (33, 33), (40, 40), (60, 40)])
def test_crop_frees_blocks_and_the_rest_continues(argument, keep):
    """A positive number is the length to keep, as in Transformers before 5.24; a negative one is taken off."""
    model, tokens = tiny_model("mistral"), tokens_of(2, 45)
    cache = PagedCache(model.config)
    forward(model, tokens[:, :40], cache)
    cache.crop(torch.tensor(argument) if argument == -8 else argument)  # Transformers gives a tensor at times
    assert cache.get_seq_length() == keep and isinstance(cache.get_seq_length(), int)
    assert cache.num_blocks_held == 2 * -(-keep // 16)
    again = forward(model, tokens[:, keep:], cache)
    torch.testing.assert_close(again, forward(model, tokens, DynamicCache())[:, keep:], atol=1e-5, rtol=1e-5)


def test_crop_of_a_shared_row_leaves_the_other_alone():
    model, tokens = tiny_model("llama"), tokens_of(1, 24)
    cache = PagedCache(model.config)
    forward(model, tokens, cache)
    cache.batch_repeat_interleave(2)
    cache.crop(-4)
    logits = forward(model, torch.cat([tokens[:, 20:], tokens[:, 20:] + 1]).remainder(199), cache)
    expected = forward(model, tokens, DynamicCache())
    torch.testing.assert_close(logits[:1], expected[:, 20:], atol=1e-5, rtol=1e-5)


def test_pool_grows_past_its_first_slab():
    model, tokens = tiny_model("llama"), tokens_of(3, 150)
    cache, reference = PagedCache(model.config, block_size=4), DynamicCache()
    first = cache.num_blocks
    for start in range(0, 150, 30):
        chunk = tokens[:, start : start + 30]
        torch.testing.assert_close(forward(model, chunk, cache), forward(model, chunk, reference), atol=1e-5, rtol=1e-5)
    assert cache.num_blocks > first
    assert cache.num_blocks_held == 3 * 38


def test_reset_frees_all_blocks_and_the_cache_starts_anew():
    model = tiny_model("llama")
    cache = PagedCache(model.config, block_size=1)
    first = cache.num_blocks
    forward(model, tokens_of(2, 100), cache)
    cache.reset()
    assert cache.num_blocks_held == 0 and cache.get_seq_length() == 0
    assert cache.num_blocks == first and not any(layer.is_initialized for layer in cache.layers)
    again = forward(model, tokens_of(1, 9), cache)  # another number of rows
    torch.testing.assert_close(again, forward(model, tokens_of(1, 9), DynamicCache()), atol=1e-5, rtol=1e-5)


def test_another_number_of_rows_is_refused():
    model = tiny_model("llama")
    cache = PagedCache(model.config)
    forward(model, tokens_of(2, 4), cache)
    with pytest.raises(ConfigurationError, match="holds 2 rows but was given keys of 3"):
        forward(model, tokens_of(3, 1), cache)


def test_keys_of_another_model_are_refused():
    cache = PagedCache()
    forward(tiny_model("llama"), tokens_of(1, 4), cache)
    with pytest.raises(ConfigurationError, match=r"holds keys of 2 heads of 16 .* was given 2 heads of 24"):
        forward(tiny_model("qwen3"), tokens_of(1, 1), cache)
    with pytest.raises(ConfigurationError, match=r"torch.float32 .*torch.bfloat16"):
        forward(tiny_model("llama", torch.bfloat16), tokens_of(1, 1), cache)


def test_keys_that_a_user_reads_do_not_change_later():
    model, cache = tiny_model("llama"), PagedCache()
    forward(model, tokens_of(1, 9), cache)
    keys = cache.layers[0].keys
    before = keys.clone()
    cache.crop(-4)
    forward(model, tokens_of(1, 4, seed=1), cache)
    assert torch.equal(keys, before) and not torch.equal(cache.layers[0].keys, before)


def test_row_in_one_piece_is_read_without_a_copy():
    cache = PagedCache(block_size=4)
    new = torch.randn(1, 2, 300, 8)
    with torch.no_grad():
        for start in range(0, 300, 3):
            keys, _ = cache.update(*[new[:, :, start : start + 3]] * 2, 0)
            assert torch.equal(keys, new[:, :, : start + 3])
        blocks = cache.layers[0].tables.store.layers[0][0]
        assert keys.untyped_storage().data_ptr() == blocks.untyped_storage().data_ptr()
        again, _ = cache.update(*[new[:, :, :1]] * 2, 0)
    copied, _ = cache.update(*[new[:, :, :1]] * 2, 0)  # gradients may be wanted
    assert again.untyped_storage().data_ptr() == blocks.untyped_storage().data_ptr()
    assert copied.untyped_storage().data_ptr() != blocks.untyped_storage().data_ptr()


@pytest.mark.parametrize("block_size", [0, -1, True, 1.5, None])
def test_block_size_must_be_a_positive_whole_number(block_size):
    with pytest.raises(ConfigurationError, match="block_size"):
        PagedCache(block_size=block_size)


@pytest.mark.parametrize("name", ["Mamba2Config", "MambaConfig", "RwkvConfig", "Qwen3NextConfig", "JambaConfig"])
def test_recurrent_layers_are_refused(name):
    with pytest.raises(UnsupportedModelError, match=r"state|Layer 0"):
        PagedCache(getattr(transformers, name)())


def test_copy_continues_on_its_own():
    """A prompt's cache is computed once and copied for each continuation, as Transformers' documentation shows."""
    model, tokens = tiny_model("llama"), tokens_of(1, 21)
    cache = PagedCache(model.config)
    forward(model, tokens, cache)
    twin = copy.deepcopy(cache)
    changed = forward(model, tokens_of(1, 6, seed=1), twin)
    original = forward(model, tokens_of(1, 6, seed=2), cache)
    for logits, seed in ((changed, 1), (original, 2)):
        whole = torch.cat([tokens, tokens_of(1, 6, seed=seed)], dim=1)
        torch.testing.assert_close(logits, forward(model, whole, DynamicCache())[:, 21:], atol=1e-5, rtol=1e-5)


def test_cache_of_an_inference_mode_prompt_continues_outside_of_it():
    model, tokens = tiny_model("llama"), tokens_of(1, 20)
    cache = PagedCache(model.config)
    with torch.inference_mode():
        forward(model, tokens[:, :9], cache)
    logits = forward(model, tokens[:, 9:], cache)
    torch.testing.assert_close(logits, forward(model, tokens, DynamicCache())[:, 9:], atol=1e-5, rtol=1e-5)


def test_gradients_flow_through_cached_keys():
    tokens, gradients = tokens_of(2, 20), []
    for make in (DynamicCache, PagedCache):
        model = tiny_model("llama")
        cache = make()
        name = cache_argument(model)
        model(input_ids=tokens[:, :11], **{name: cache})
        model(input_ids=tokens[:, 11:], **{name: cache}).logits.square().mean().backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-4)


def test_gradients_of_queries_alone_survive_later_steps():
    """Attention keeps its keys for the backward pass; a later token must not change them."""
    tokens, gradients = tokens_of(1, 12), []
    for make in (DynamicCache, PagedCache):
        model = tiny_model("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
        cache = make()
        losses = [
            model(input_ids=tokens[:, i : i + 4], **{cache_argument(model): cache}).logits.square().mean()
            for i in range(0, 12, 4)
        ]
        sum(losses).backward()
        gradients.append(model.model.layers[1].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 7},
        {"num_beams": 2, "do_sample": True},
    ],
    ids=lambda mode: next(iter(mode)) + ("_sample" if mode.get("do_sample") else ""),
)
def test_other_ways_to_generate_give_the_same_tokens(family, mode):
    model = tiny_model(family)
    tokens = tokens_of(1, 6).repeat(1, 4)  # repeats, so that looking up the prompt finds something
    answers = []
    for cache in (None, PagedCache(model.config, block_size=8)):
        torch.manual_seed(3)
        given = {} if cache is None else {cache_argument(model): cache}
        answers.append(model.generate(tokens, max_new_tokens=14, **mode, **given))
    assert torch.equal(answers[0], answers[1])


def test_beams_of_a_long_prompt_share_its_blocks():
    """vllm-project/vllm#6226: beam search needs a cache whose rows can be reordered without copying them."""
    model = tiny_model("llama")
    cache = PagedCache(model.config)
    model.generate(tokens_of(1, 160), max_new_tokens=10, num_beams=4, **{cache_argument(model): cache})
    assert cache.num_blocks_held <= 10 + 4  # not 44: ten of the prompt, at most one more for each beam


def test_cache_is_used_by_an_assistant_model():
    model, assistant = tiny_model("llama"), tiny_model("llama", num_hidden_layers=1)
    tokens = tokens_of(1, 12)
    expected = model.generate(tokens, max_new_tokens=12)
    cache = PagedCache(model.config, block_size=4)
    answer = model.generate(tokens, max_new_tokens=12, assistant_model=assistant, **{cache_argument(model): cache})
    assert torch.equal(answer, expected)
