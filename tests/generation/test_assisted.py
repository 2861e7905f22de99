"""Assisted decoding, decoding loops of the caller's, and caches chosen by name: on a paged model as on a stock one."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from hf_paged import PagedCache
from hf_paged.compat import cache_argument, output_cache
from tests.families import tiny_model
from tests.paged_models import assert_idle, paged
from tests.tokenizers_for_tests import VOCAB_SIZE, tiny_tokenizer

# Repeats, so that looking up the prompt finds something.
PROMPT = torch.tensor([[5, 17, 33, 8, 61, 90] * 4])
FAMILIES = ["llama", "mistral", "gemma2", "gpt2", "deepseek_v3"]


@contextlib.contextmanager
def heard():
    """What hf_paged logs meanwhile, for those who listen."""
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_paged")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def draft(family: str = "llama", **overrides):
    """A model that guesses right at times: the first layer of the other."""
    return tiny_model(family, num_hidden_layers=1, **overrides)


def pair(family: str = "llama", **overrides):
    return tiny_model(family, **overrides), paged(family, overrides=overrides, block_size=8, num_blocks=64)


@pytest.fixture(scope="module")
def llamas():
    return pair()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["assistant", "paged assistant", "itself", "lookup"])
def test_assisted_greedy_search_finds_the_greedy_text(family, way):
    stock, model = pair(family)
    overrides = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    helpers = {
        "assistant": lambda: {"assistant_model": tiny_model(family, **overrides)},
        "paged assistant": lambda: {"assistant_model": paged(family, overrides=overrides, num_blocks=64)},
        "itself": lambda: {"assistant_model": model},
        "lookup": lambda: {"prompt_lookup_num_tokens": 3},
    }
    expected = stock.generate(PROMPT, max_new_tokens=14)
    answer = model.generate(PROMPT, max_new_tokens=14, **helpers[way]())
    assert torch.equal(answer, expected)
    assert_idle(model.engine)


@pytest.mark.parametrize("way", ["assistant", "lookup"])
def test_results_are_those_of_transformers(llamas, way):
    outputs = []
    for model in llamas:
        helper = {"assistant_model": draft()} if way == "assistant" else {"prompt_lookup_num_tokens": 3}
        outputs.append(
            model.generate(PROMPT, max_new_tokens=9, return_dict_in_generate=True, output_scores=True, **helper)
        )
    theirs, ours = outputs
    assert type(ours) is type(theirs) and set(ours) == set(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert output_cache(ours).get_seq_length() == output_cache(theirs).get_seq_length()
    for left, right in zip(ours.scores, theirs.scores, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_assisted_sampling_with_a_seed_is_that_of_transformers(llamas):
    answers = []
    for model in llamas:
        torch.manual_seed(11)
        answers.append(
            model.generate(PROMPT, max_new_tokens=12, assistant_model=draft(), do_sample=True, temperature=1.5)
        )
    assert torch.equal(answers[0], answers[1])


@pytest.mark.parametrize("kind", ["paged", "dynamic", "returned"])
@pytest.mark.parametrize("known", [10, 23])
@pytest.mark.parametrize("way", ["assistant", "lookup", "itself", "early exit"])
def test_assisted_search_goes_on_from_a_cache(llamas, kind, known, way):
    """Transformers' loop computes the whole prompt again, behind what the cache holds: another text."""
    stock, model = llamas
    helper = {
        "assistant": {"assistant_model": draft()},
        "lookup": {"prompt_lookup_num_tokens": 3},
        "itself": {"assistant_model": model},
        "early exit": {"assistant_early_exit": 1},
    }[way]
    name, tokens = cache_argument(model), PROMPT
    if kind == "returned":
        output = model.generate(PROMPT[:, :known], max_new_tokens=3, return_dict_in_generate=True)
        tokens = torch.cat([output.sequences, PROMPT[:, :5]], dim=1)
        cache = output_cache(output)
    else:
        cache = PagedCache(model.config, block_size=4) if kind == "paged" else DynamicCache(config=model.config)
        with torch.no_grad():
            model(PROMPT[:, :known], use_cache=True, **{name: cache})
    lengths: list[int] = []
    held = cache.get_seq_length()
    layer = model.model.layers[-1].self_attn  # an early exit does not come here, nor does the other assistant
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["hidden_states"].shape[1]), with_kwargs=True
    )
    try:
        answer = model.generate(tokens, max_new_tokens=12, **helper, **{name: cache})
    finally:
        hook.remove()
    assert torch.equal(answer, stock.generate(tokens, max_new_tokens=12))
    if way != "itself":  # the assistant has a cache of its own to fill
        assert lengths[0] <= tokens.shape[1] - held + 20  # what is new, and candidates
        assert lengths[0] >= tokens.shape[1] - held
    if kind == "paged":
        assert cache.num_blocks_held == -(-cache.get_seq_length() // 4)  # rejected tokens gave their blocks back


def test_assisted_search_with_a_padded_prompt_goes_on_from_a_cache(llamas):
    stock, model = llamas
    tokens = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
    mask = (tokens != 0).long()
    cache = PagedCache(model.config)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, :12]
        model(
            tokens[:, :12],
            attention_mask=mask[:, :12],
            position_ids=positions,
            use_cache=True,
            **{cache_argument(model): cache},
        )
    answer = model.generate(
        tokens, attention_mask=mask, max_new_tokens=9, prompt_lookup_num_tokens=2, **{cache_argument(model): cache}
    )
    assert torch.equal(answer[:, 3:], stock.generate(PROMPT, max_new_tokens=9))


def test_assistant_with_another_tokenizer():
    """Universal assisted decoding: the assistant reads and writes text, in a vocabulary of its own."""
    target, assistant = tiny_tokenizer(), _reversed_tokenizer()
    stock, model = pair(vocab_size=VOCAB_SIZE)
    inputs = target(["the hello and in the on"], return_tensors="pt")
    expected = stock.generate(**inputs, max_new_tokens=10)
    for each in (stock, model):
        answer = each.generate(
            **inputs,
            max_new_tokens=10,
            assistant_model=draft(vocab_size=len(assistant)),
            tokenizer=target,
            assistant_tokenizer=assistant,
        )
        assert torch.equal(answer, expected)


def _reversed_tokenizer():
    """The same text in other numbers, and one token more."""
    import json

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    last = VOCAB_SIZE - 1
    state["model"]["vocab"] = {token: (i if i < 5 else last + 5 - i) for token, i in state["model"]["vocab"].items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), pad_token="<pad>", eos_token="<|end|>"
    )
    tokenizer.add_tokens(["hellooo"])
    return tokenizer


def test_early_exit_of_the_model_itself(llamas):
    stock, model = llamas
    expected = stock.generate(PROMPT, max_new_tokens=10)
    for each in llamas:
        assert torch.equal(each.generate(PROMPT, max_new_tokens=10, assistant_early_exit=1), expected)
        assert each.config.num_hidden_layers == 2


def outcome(model, **call):
    """What a call gives: its tokens, or the kind of its error and what it says."""
    try:
        return model.generate(**call).tolist()
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    "call",
    [
        {"use_mtp": True},
        {"prompt_lookup_num_tokens": 3, "num_return_sequences": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3, "use_cache": False},
        {"prompt_lookup_num_tokens": 3, "inputs": PROMPT.repeat(2, 1)},
        {"assistant_model": "wide"},
    ],
    ids=lambda call: ", ".join(call),
)
def test_what_transformers_refuses_is_refused_with_its_words(llamas, call):
    call = {"inputs": PROMPT, "max_new_tokens": 4, **call}
    if call.get("assistant_model") == "wide":
        call["assistant_model"] = draft(vocab_size=250)
    theirs, ours = (outcome(model, **call) for model in llamas)
    assert isinstance(theirs, tuple) and ours == theirs


# --------------------------------------------------------------------------------------- loops of the caller's


def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """A greedy loop by hand, as Transformers' documentation shows it."""
    name = cache_argument(model)
    finished = torch.zeros(len(input_ids), dtype=torch.bool)
    while not finished.all():
        cache = model_kwargs.get(name)
        known = cache.get_seq_length() if cache is not None else 0
        outputs = model(input_ids[:, known:], use_cache=True, **{name: cache})
        model_kwargs[name] = output_cache(outputs)
        scores = logits_processor(input_ids, outputs.logits[:, -1].float())
        input_ids = torch.cat([input_ids, scores.argmax(-1)[:, None]], dim=1)
        finished |= stopping_criteria(input_ids, None)
    return input_ids, model_kwargs[name]


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_loop_of_the_callers_gets_a_paged_cache(llamas, rows):
    stock, model = llamas
    tokens = PROMPT.repeat(rows, 1) + torch.arange(rows)[:, None]
    call = {"max_new_tokens": 8, "no_repeat_ngram_size": 2}
    expected = stock.generate(tokens, **call)
    answer, cache = model.generate(tokens, custom_generate=loop, **call)
    assert torch.equal(answer, expected)
    assert isinstance(cache, PagedCache) and cache.get_seq_length() == expected.shape[1] - 1
    answer, given = model.generate(tokens, custom_generate=loop, **call, **{cache_argument(model): DynamicCache()})
    assert torch.equal(answer, expected) and type(given) is DynamicCache


# --------------------------------------------------------------------------------------- caches chosen by name

CHOICES = {"dynamic": DynamicCache, "static": StaticCache}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("where", ["argument", "config", "model"])
def test_cache_chosen_by_name_is_used_as_in_transformers(llamas, name, where):
    outputs = []
    for model in llamas:
        before = model.generation_config
        call = {"max_new_tokens": 6, "return_dict_in_generate": True, "disable_compile": True}
        with heard() as messages:
            if where == "argument":
                outputs.append(model.generate(PROMPT, cache_implementation=name, **call))
            elif where == "config":
                config = GenerationConfig(cache_implementation=name, pad_token_id=0, **call)
                outputs.append(model.generate(PROMPT, generation_config=config))
            else:
                try:
                    model.generation_config = GenerationConfig(cache_implementation=name, pad_token_id=0)
                    outputs.append(model.generate(PROMPT, **call))
                finally:
                    model.generation_config = before
    theirs, ours = outputs
    assert torch.equal(ours.sequences, theirs.sequences)
    assert type(output_cache(ours)) is type(output_cache(theirs)) is CHOICES[name]
    assert [m for m in messages if "Transformers" in m and repr(name) in m and "not a paged one" in m], messages


def test_unknown_cache_name_is_refused_as_in_transformers(llamas):
    theirs, ours = (outcome(model, inputs=PROMPT, cache_implementation="paperd") for model in llamas)
    assert isinstance(theirs, tuple) and ours == theirs


def test_paged_by_name_is_the_engine(llamas):
    """Transformers runs its own continuous batching for this name, which drops the attention mask."""
    stock, model = llamas
    tokens = torch.cat([torch.zeros(1, 4, dtype=torch.long), PROMPT], dim=1)
    with heard() as messages:
        answer = model.generate(
            tokens, attention_mask=(tokens != 0).long(), max_new_tokens=6, cache_implementation="paged"
        )
    assert torch.equal(answer[:, 4:], stock.generate(PROMPT, max_new_tokens=6))
    assert any("changes nothing" in message for message in messages)
