"""`generate` with a cache that the caller brings: goes on from there, and computes nothing twice."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_paged import PagedCache
from hf_paged.compat import cache_argument, output_cache
from tests.families import tiny_model
from tests.paged_models import assert_idle, paged

PROMPT = torch.tensor([[5, 17, 33, 8, 61, 90, 4, 33, 8, 61, 7, 150, 9, 12, 13, 14, 15, 16, 3, 2]])
TURNS = [torch.tensor([[44, 51, 9]]), torch.tensor([[120, 7]]), torch.tensor([[9, 9, 9, 31]])]
CACHES = {"paged": lambda model: PagedCache(model.config), "dynamic": lambda model: DynamicCache(config=model.config)}


@pytest.fixture(scope="module")
def stock():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def shared():
    return paged(max_num_seqs=8, num_blocks=100, block_size=8)


@pytest.fixture
def model(shared):
    yield shared
    assert_idle(shared.engine)


@contextlib.contextmanager
def counted(model):
    """The number of token positions that the model computes meanwhile, wherever it is called from."""
    lengths: list[int] = []
    layer = model.model.layers[0]
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append((args[0] if args else kwargs["hidden_states"]).shape[:2].numel()),
        with_kwargs=True,
    )
    try:
        yield lengths
    finally:
        hook.remove()


def given(model, cache) -> dict:
    return {cache_argument(model): cache}


@torch.no_grad()
def prefilled(model, tokens, cache, **kwargs):
    model(tokens, use_cache=True, **given(model, cache), **kwargs)
    return cache


@pytest.mark.parametrize("kind", [*CACHES, "returned"])
def test_turns_with_one_cache_equal_turns_without(model, stock, kind):
    """huggingface/transformers#24841: each turn computes its own tokens, not those of the turns before."""
    cache = CACHES[kind](model) if kind in CACHES else None
    ours = theirs = PROMPT[:, :0]
    cached = 0
    for turn in TURNS:
        theirs = stock.generate(torch.cat([theirs, turn], dim=1), max_new_tokens=6)
        prompt = torch.cat([ours, turn], dim=1)
        with counted(model) as lengths:
            brought = {} if cache is None else given(model, cache)
            output = model.generate(prompt, max_new_tokens=6, return_dict_in_generate=True, **brought)
        if kind == "returned":
            cache = output_cache(output)
        ours = output.sequences
        assert torch.equal(ours, theirs)
        assert output_cache(output) is cache and cache.get_seq_length() == ours.shape[1] - 1  # changed in place
        assert sum(lengths) == ours.shape[1] - 1 - cached
        cached = ours.shape[1] - 1


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_cache_is_taken_under_either_name(model, stock, name):
    if name == "cache" and cache_argument(model) != "cache":
        pytest.skip("this Transformers knows only the other name")
    cache = prefilled(model, PROMPT[:, :11], PagedCache(model.config))
    answer = model.generate(PROMPT, max_new_tokens=5, **{name: cache})
    assert torch.equal(answer, stock.generate(PROMPT, max_new_tokens=5))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("known", [10, 19])
def test_part_of_the_prompt_in_a_cache_is_not_computed_again(model, stock, kind, known):
    """huggingface/transformers#36151 and #35707: a given cache led to an empty position and an IndexError."""
    cache = prefilled(model, PROMPT[:, :known], CACHES[kind](model))
    with counted(model) as lengths:
        answer = model.generate(PROMPT, max_new_tokens=6, **given(model, cache))
    assert torch.equal(answer, stock.generate(PROMPT, max_new_tokens=6))
    assert lengths == [20 - known, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("kind", CACHES)
def test_embeddings_go_on_from_a_cache_as_in_transformers(model, stock, kind):
    """huggingface/transformers#36151: the same with `inputs_embeds`."""
    embeds = stock.get_input_embeddings()(PROMPT).detach()
    results = []
    for each in (stock, model):
        cache = prefilled(each, PROMPT[:, :10], CACHES[kind](each))
        mask = torch.ones_like(PROMPT)
        call = {"inputs_embeds": embeds[:, 10:], "attention_mask": mask, "max_new_tokens": 6, **given(each, cache)}
        results.append(each.generate(**call)[:, -6:])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], stock.generate(PROMPT, max_new_tokens=6)[:, -6:])


@pytest.mark.parametrize("with_cache", [False, True])
def test_max_length_counts_embeddings_as_transformers_does(model, stock, with_cache):
    """huggingface/transformers PR#28994: the same number of new tokens by ids and by embeddings."""
    embeds = stock.get_input_embeddings()(PROMPT).detach()
    tails = []
    for each in (stock, model):
        for inputs in ({"input_ids": PROMPT}, {"inputs_embeds": embeds}):
            brought = given(each, PagedCache(each.config)) if with_cache else {}
            tails.append(each.generate(**inputs, max_length=27, **brought)[:, -7:].tolist())
    assert tails[0] == tails[1] == tails[2] == tails[3] and len(tails[0][0]) == 7


def test_max_length_counts_the_cached_prompt(model, stock):
    for kind in CACHES.values():
        cache = prefilled(model, PROMPT[:, :15], kind(model))
        assert torch.equal(
            model.generate(PROMPT, max_length=24, **given(model, cache)), stock.generate(PROMPT, max_length=24)
        )


@pytest.mark.parametrize("kind", [*CACHES, "returned"])
def test_padded_rows_go_on(model, stock, kind):
    """huggingface/transformers#18478: padding must not change a row, now or in the next turn."""
    rows = [[7, 150, 9], [5, 17, 33, 8, 61, 90, 4], list(range(3, 14))]
    width = max(map(len, rows))
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    cache = CACHES[kind](model) if kind in CACHES else None
    texts, starts = [list(row) for row in rows], [width - len(row) for row in rows]
    for turn in TURNS:
        turn = turn.expand(3, -1)
        tokens, mask = torch.cat([tokens, turn], dim=1), torch.cat([mask, torch.ones_like(turn)], dim=1)
        brought = {} if cache is None else given(model, cache)
        output = model.generate(tokens, attention_mask=mask, max_new_tokens=4, return_dict_in_generate=True, **brought)
        cache, tokens = output_cache(output), output.sequences
        mask = torch.cat([mask, mask.new_ones(3, 4)], dim=1)
        for row, text, start in zip(tokens, texts, starts, strict=True):
            text += turn[0].tolist()
            text += stock.generate(torch.tensor([text]), max_new_tokens=4)[0, len(text) :].tolist()
            assert row[start:].tolist() == text


@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"do_sample": True, "top_k": 5},
    ],
    ids=lambda mode: next(iter(mode)),
)
def test_modes_go_on_from_a_cache_as_in_transformers(model, stock, mode):
    answers = []
    for each, kind in ((stock, "dynamic"), (model, "dynamic"), (model, "paged")):
        cache = prefilled(each, PROMPT[:, :-1], CACHES[kind](each))
        if "num_beams" in mode:
            cache.batch_repeat_interleave(mode["num_beams"])
        torch.manual_seed(5)
        answer = each.generate(PROMPT, max_new_tokens=7, **mode, **given(each, cache))
        answers.append(answer if torch.is_tensor(answer) else answer.sequences)
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])


def test_static_cache_is_used_as_in_transformers(model, stock):
    answers = []
    for each in (stock, model):
        cache = StaticCache(config=each.config, max_cache_len=64)
        answers.append(each.generate(PROMPT, max_new_tokens=5, disable_compile=True, **given(each, cache)))
        assert int(cache.get_seq_length()) == 24
    assert torch.equal(answers[0], answers[1])


def test_forks_of_one_prompt_go_on_with_generate(model, stock):
    """A system prompt is computed once; each question continues from a fork of it."""
    prefix = prefilled(model, PROMPT, PagedCache(model.config, block_size=4))
    for turn, fork in zip(TURNS, prefix.fork(3), strict=True):
        prompt = torch.cat([PROMPT, turn], dim=1)
        with counted(model) as lengths:
            answer = model.generate(prompt, max_new_tokens=5, **given(model, fork))
        assert torch.equal(answer, stock.generate(prompt, max_new_tokens=5))
        assert lengths[0] == turn.shape[1]
    assert prefix.get_seq_length() == 20


def test_returned_cache_can_be_forked_copied_and_saved(model, stock, tmp_path):
    output = model.generate(PROMPT, max_new_tokens=5, return_dict_in_generate=True)
    cache = output_cache(output)
    cache.save(tmp_path / "cache")
    expected = stock.generate(PROMPT, max_new_tokens=12)
    for each in (*cache.fork(2), copy.deepcopy(cache), PagedCache.load(tmp_path / "cache"), cache):
        with counted(model) as lengths:
            answer = model.generate(output.sequences, max_new_tokens=7, **given(model, each))
        assert torch.equal(answer, expected) and lengths == [1] * 7


def test_cropped_cache_lets_a_turn_be_asked_again(model, stock):
    """huggingface/transformers documents `crop` for it: go back to where the answer began."""
    output = model.generate(PROMPT, max_new_tokens=9, return_dict_in_generate=True)
    cache = output_cache(output)
    cache.crop(-(cache.get_seq_length() - PROMPT.shape[1]))
    prompt = torch.cat([PROMPT, TURNS[0]], dim=1)
    with counted(model) as lengths:
        answer = model.generate(prompt, max_new_tokens=4, **given(model, cache))
    assert torch.equal(answer, stock.generate(prompt, max_new_tokens=4)) and lengths[0] == 3


def test_cache_beside_cache_implementation_is_refused_as_in_transformers(model, stock):
    messages = []
    for each in (stock, model):
        with pytest.raises(ValueError, match="Passing both `cache_implementation`") as caught:
            each.generate(PROMPT, max_new_tokens=3, cache_implementation="dynamic", **given(each, DynamicCache()))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_conversation_of_the_real_model_resumes_each_turn(real_model, real_tokenizer, tmp_path):
    """huggingface/transformers#24841 on real text: with a cache that is kept, restored and forked between turns."""
    messages: list[dict[str, str]] = []
    cache, cached, name = None, 0, cache_argument(real_model)
    for question in ("Name a colour.", "And another one?", "Which of them is darker?"):
        messages.append({"role": "user", "content": question})
        prompt = real_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        prompt = prompt["input_ids"]
        call = {"max_new_tokens": 6, "do_sample": False}
        expected = real_model.generate(prompt, **call)
        brought = {name: cache} if cache is not None else {}
        with counted(real_model) as lengths:
            output = real_model.generate(prompt, return_dict_in_generate=True, **call, **brought)
        assert torch.equal(output.sequences, expected)
        if cache is not None:
            assert lengths[0] == prompt.shape[1] - cached
        answer = expected[0, prompt.shape[1] :]
        messages.append({"role": "assistant", "content": real_tokenizer.decode(answer, skip_special_tokens=True)})
        # What the template makes of the answer may be other tokens; the prompt stays.
        cache, cached = output_cache(output), prompt.shape[1]
        cache.crop(-(cache.get_seq_length() - cached))
        cache.save(tmp_path / "cache")
        (cache,) = PagedCache.load(tmp_path / "cache").fork()
