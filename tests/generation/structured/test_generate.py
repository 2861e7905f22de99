"""`structured_outputs` as an argument of `generate` and `generate_batch`, also where Transformers' own loop runs."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from hf_paged import AutoPagedModelForCausalLM, InvalidRequestError, NotSupportedError, PagedConfig
from tests.paged_models import assert_idle

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
JSON = {"json": SCHEMA}


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(str(tiny_checkpoint), padding_side="left")


@pytest.fixture(scope="module")
def shared(tiny_checkpoint):
    config = PagedConfig(block_size=16, num_blocks=200)
    return AutoPagedModelForCausalLM.from_pretrained(str(tiny_checkpoint), paged_config=config)


@pytest.fixture
def model(shared):
    torch.manual_seed(0)
    yield shared
    assert_idle(shared.engine)


def answers(model, tokenizer, prompts=("Go", "Hello there"), **kwargs) -> list[str]:
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, return_token_type_ids=False)
    rows = model.generate(**inputs, tokenizer=tokenizer, **{"max_new_tokens": 60, **kwargs})
    rows = getattr(rows, "sequences", rows)
    return tokenizer.batch_decode(rows[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "several answers": {"do_sample": True, "num_return_sequences": 3},
    "returned as a dict": {"return_dict_in_generate": True},
    "beams": {"num_beams": 4},
    "sampled beams": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "stop strings": {"stop_strings": ["never said"]},
    "another processor": {"logits_processor": [lambda input_ids, scores: scores]},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_row_has_the_form(model, tokenizer, way):
    texts = answers(model, tokenizer, structured_outputs=JSON, **WAYS[way])
    assert len(texts) == 2 * WAYS[way].get("num_return_sequences", 1)
    for text in texts:
        value = json.loads(text)
        assert isinstance(value["ok"], bool) and 0 <= value["n"] < 100 and len(value) == 2


def test_the_loop_chooses_what_the_engine_does(model, tokenizer):
    by_engine = answers(model, tokenizer, structured_outputs=JSON)
    by_loop = answers(model, tokenizer, structured_outputs=JSON, logits_processor=[lambda _, scores: scores])
    assert by_engine == by_loop


def test_prompt_lookup_follows_the_form(model, tokenizer):
    (text,) = answers(model, tokenizer, ['{"ok":true,"n":5}'], structured_outputs=JSON, prompt_lookup_num_tokens=3)
    assert set(json.loads(text)) == {"ok", "n"}


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 2}])
def test_another_end_token_ends_an_answer(model, tokenizer, kwargs):
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    inputs = tokenizer(["Go"], return_tensors="pt", return_token_type_ids=False)
    form = {"structured_outputs": {"regex": "ab?"}, "tokenizer": tokenizer}
    rows = model.generate(**inputs, **form, eos_token_id=end, max_new_tokens=9, **kwargs)
    new = rows[0, inputs["input_ids"].shape[1] :].tolist()
    assert re.fullmatch("ab?", tokenizer.decode(new, skip_special_tokens=True))
    assert set(new) <= {*tokenizer.encode("ab a b"), end, *tokenizer.encode("ab"), *tokenizer.encode("a")}


def test_generate_batch_takes_it_for_all_prompts(model, tokenizer):
    prompts = [tokenizer.encode(text) for text in ("Go", "Hello there", "x")]
    config = GenerationConfig(max_new_tokens=60, do_sample=True)
    for kwargs in ({}, {"num_beams": 2, "do_sample": False}):
        results = model.generate_batch(
            prompts, config, tokenizer=tokenizer, structured_outputs=JSON, progress_bar=False, **kwargs
        )
        for output in results.values():
            assert output.error is None
            text = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
            assert set(json.loads(text)) == {"ok", "n"}


@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 2}])
def test_mistakes_are_named(model, tokenizer, kwargs):
    tokens = torch.tensor([[5, 6]])
    with pytest.raises(InvalidRequestError, match="pass `tokenizer=`"):
        model.generate(tokens, structured_outputs=JSON, **kwargs)
    with pytest.raises(InvalidRequestError, match="is refused"):
        model.generate(tokens, structured_outputs={"regex": "[["}, tokenizer=tokenizer, **kwargs)
    with pytest.raises(InvalidRequestError, match="exactly one"):
        model.generate(tokens, structured_outputs={}, tokenizer=tokenizer, **kwargs)
    with pytest.raises(NotSupportedError, match="fast tokenizer"):
        model.generate(tokens, structured_outputs=JSON, tokenizer="no tokenizer", **kwargs)
    with pytest.raises(InvalidRequestError, match="pass `tokenizer=`"):
        model.generate_batch([[5, 6]], structured_outputs=JSON, progress_bar=False)
    with pytest.raises(InvalidRequestError, match="is refused"):
        model.generate_batch([[5, 6]], structured_outputs={"regex": "(("}, tokenizer=tokenizer, progress_bar=False)
