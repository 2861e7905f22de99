"""Answers of a model that writes anything have the form that was asked for, whatever runs beside them."""

from __future__ import annotations

import json
import re
import time
from typing import Literal

import pytest

from hf_paged import (
    LLM,
    EngineError,
    InvalidRequestError,
    NotSupportedError,
    PagedConfig,
    SamplingParams,
    StructuredOutputsParams,
)
from hf_paged.generation.request import RequestExtras
from hf_paged.generation.structured.cache import GrammarCache
from hf_paged.generation.structured.compiler import compiler
from hf_paged.generation.structured.matcher import Matcher
from tests.paged_models import assert_idle

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{1,5}@[a-z]{1,5}$"}]},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n\"'", "ä€"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "mail", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
LARK = 'start: sum\nsum: NUMBER ("+" NUMBER)~0..3\nNUMBER: /[1-9][0-9]{0,2}/'
GBNF = 'root ::= "<" [a-c]{1,4} ("," [0-9])? ">"'
DIGITS = {"regex": r"\d{8}"}
PROMPTS = ["Hello", "What is the time?", "x" * 50, "Tell me more about it, please."]


def params(structured=None, **kwargs) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 400, "temperature": 1.0, "structured_outputs": structured, **kwargs})


def texts(llm, structured, count: int = 8, **kwargs) -> list[str]:
    outputs = llm.generate(
        ["Go: "] * count, [params(structured, seed=i, **kwargs) for i in range(count)], use_tqdm=False
    )
    assert {o.outputs[0].finish_reason for o in outputs} == {"stop"}
    return [o.outputs[0].text for o in outputs]


def completions(llm, prompts, sampling) -> list[tuple]:
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [(tuple(a.token_ids), a.text, a.finish_reason) for output in outputs for a in output.outputs]


CASES = [({}, TREE), *(({name: value}, PERSON) for name, value in [
    ("temperature", 1), ("temperature", 0), ("top_k", 3), ("top_p", 0.4), ("repetition_penalty", 1.3)
])]  # fmt: skip


@pytest.mark.parametrize("kwargs, schema", CASES)
def test_json_is_valid_against_its_schema(llm, schema, kwargs):
    jsonschema = pytest.importorskip("jsonschema")
    for text in texts(llm, {"json": schema}, max_tokens=1000, **kwargs):
        value = json.loads(text)
        jsonschema.validate(value, schema)
        assert text == json.dumps(value, separators=(",", ":"), ensure_ascii=False) or "\\u" in text or "\\/" in text


def test_json_may_be_given_as_text_or_a_pydantic_class(llm):
    pydantic = pytest.importorskip("pydantic")

    class Point(pydantic.BaseModel):
        x: bool
        y: bool

    for given in (Point, json.dumps(Point.model_json_schema())):
        for text in texts(llm, {"json": given, "disable_additional_properties": True}, count=3):
            Point.model_validate_json(text)


def test_unions_of_pydantic_models_are_followed(llm):
    pydantic = pytest.importorskip("pydantic")

    class Cat(pydantic.BaseModel):
        kind: Literal["cat"]
        purrs: bool

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"]
        barks: bool

    class Pet(pydantic.BaseModel):
        pet: Cat | Dog = pydantic.Field(discriminator="kind")

    Pet.model_rebuild(_types_namespace={"Cat": Cat, "Dog": Dog})
    pets = texts(llm, {"json": Pet, "disable_additional_properties": True})
    assert len({type(Pet.model_validate_json(text).pet) for text in pets}) == 2


def test_whitespace_is_free_only_if_asked_for_and_never_without_end(llm):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    space = [token for token in range(600) if llm.tokenizer.decode([token]).isspace()]
    bias = dict.fromkeys(space, 100.0)
    assert all(re.fullmatch(r"\[\w+,\w+\]", text) for text in texts(llm, {"json": schema}, logit_bias=bias))
    loose = texts(llm, {"json": schema, "disable_any_whitespace": False}, logit_bias=bias, max_tokens=1000)
    assert any(re.search(r"\s", text) for text in loose)
    assert all(len(json.loads(text)) == 2 and not re.search(r"\s{65}", text) for text in loose)
    spaced = texts(llm, {"json": schema, "whitespace_pattern": " ?"}, logit_bias=bias)
    assert any(" " in text for text in spaced) and not any("  " in text or "\n" in text for text in spaced)


@pytest.mark.parametrize(
    "regex", [r"^[a-z]{2,5}-\d+(\.\d)?$", r"(yes|no)(, (yes|no)){0,3}", r"\w{1,9}@[^@\s]{1,9}|x{3}"]
)
def test_regex_matches_the_whole_answer(llm, regex):
    for text in texts(llm, {"regex": regex}, max_tokens=900):
        assert re.fullmatch(regex, text), text


def test_choice_is_one_of_the_choices(llm):
    choices = ["yes", "yes, but", "n(o|pe)", "perhaps\n", "[a-z]{3}", "ä€ 'x' \"y\" \\d /", "#&~-"]
    found = {text for seed in range(5) for text in texts(llm, {"choice": choices}, count=12, stop_token_ids=None)}
    assert found <= set(choices) and len(found) > 2
    for choice in choices:
        assert texts(llm, {"choice": [choice]}, count=1) == [choice]


def test_grammars_of_both_syntaxes_are_followed(llm):
    for text in texts(llm, {"grammar": LARK}):
        assert re.fullmatch(r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){0,3}", text), text
    for text in texts(llm, {"grammar": GBNF}):
        assert re.fullmatch(r"<[a-c]{1,4}(,\d)?>", text), text


def test_json_object_is_an_object(llm):
    outputs = llm.generate(["Go"] * 6, [params({"json_object": True}, seed=i) for i in range(6)], use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].text.startswith("{")
        if output.outputs[0].finish_reason == "stop":
            assert isinstance(json.loads(output.outputs[0].text), dict)


def accepts(llm, structured, text: str) -> bool:
    matcher = Matcher(llm.engine.grammars.compile(structured), [llm.tokenizer.eos_token_id])
    try:
        matcher.advance(llm.tokenizer.encode(text, add_special_tokens=False))
    except (InvalidRequestError, EngineError):
        return False
    return matcher.is_accepting


@pytest.mark.parametrize("trigger", ["<f=", "<|user|>"])
def test_structural_tags_constrain_only_what_is_inside(llm, trigger):
    begin = trigger + "add>"
    inside = {"type": "array", "items": {"type": "boolean"}}
    tag = {"triggers": [trigger], "structures": [{"begin": begin, "schema": inside, "end": "</f>"}]}
    for text in ("anything", "", f"so {begin}[true]</f>", f"{begin}[]</f>\nor {begin}[true,false]</f> and [true, 1"):
        assert accepts(llm, {"structural_tag": tag}, text), text
        assert accepts(llm, {"structural_tag": json.dumps(tag)}, text), text
    for text in (f"so {begin}[1]</f>", f"{begin}[true]", f"{begin}[true, false]</f>", f"{trigger}sub>[]</f>"):
        assert not accepts(llm, {"structural_tag": tag}, text), text


def test_constrained_and_free_requests_do_not_see_each_other(llm):
    free = [params(max_tokens=20, seed=i, temperature=t) for i, t in enumerate([0, 1, 0.7, 0])]
    forms = [{"json": PERSON}, {"regex": r"\d{5,9}"}, {"choice": ["a", "bb"]}, {"grammar": LARK}]
    bound = [params(form, seed=i, max_tokens=300) for i, form in enumerate(forms)]
    alone = [completions(llm, [p], [s])[0] for p, s in zip(PROMPTS * 2, free + bound, strict=True)]
    order = [0, 4, 5, 1, 2, 6, 3, 7]
    mixed = completions(llm, [(PROMPTS * 2)[i] for i in order], [(free + bound)[i] for i in order])
    assert mixed == [alone[i] for i in order]


def test_branches_differ_each_with_its_own_state(llm):
    one = completions(llm, ["Go: "], [params({"json": PERSON}, n=4, seed=5, max_tokens=600)])
    assert len(one) == 4 and len({text for _, text, _ in one}) > 1
    for _, text, reason in one:
        assert reason == "stop" and set(json.loads(text)) == set(PERSON["properties"])
    assert one == completions(llm, ["Go: "], [params({"json": PERSON}, n=4, seed=5, max_tokens=600)])


def test_preemption_keeps_the_place_in_the_grammar(tiny_checkpoint, llm):
    sampling = [params({"json": PERSON}, seed=i, max_tokens=250) for i in range(8)]
    roomy = completions(llm, ["Go: "] * 8, sampling)
    with LLM(str(tiny_checkpoint), block_size=8, num_blocks=36, max_num_seqs=8, max_model_len=272) as small:
        assert completions(small, ["Go: "] * 8, sampling) == roomy
        assert small.engine.stats().num_preemptions > 0
        assert_idle(small.engine)


def test_steps_run_ahead_only_without_a_grammar(tiny_checkpoint, llm):
    mixed = [params({"json": PERSON}, seed=1), params(max_tokens=40, seed=2), params({"choice": ["x", "yy"]}, seed=3)]
    expected = completions(llm, PROMPTS[:3], mixed)
    with LLM(str(tiny_checkpoint), block_size=16, num_blocks=200, async_scheduling=True) as ahead:
        assert completions(ahead, PROMPTS[:3], mixed) == expected


def test_the_answer_ends_where_the_grammar_does_or_at_the_limit(llm):
    ((tokens, text, reason),) = completions(llm, ["Go"], [params(DIGITS, ignore_eos=True)])
    assert re.fullmatch(r"\d{8}", text) and reason == "stop" and llm.tokenizer.eos_token_id not in tokens
    ((_, text, reason),) = completions(llm, ["Go"], [params(DIGITS, max_tokens=2)])
    assert reason == "length" and re.fullmatch(r"\d{1,7}", text)
    eos = llm.tokenizer.eos_token_id
    ((_, text, reason),) = completions(llm, ["Go"], [params({"regex": "a{3,}"}, logit_bias={eos: 100})])
    assert (text, reason) == ("aaa", "stop")
    ((tokens, text, reason),) = completions(
        llm, ["Go"], [params({"regex": "a{3,}"}, logit_bias={eos: 100}, ignore_eos=True, max_tokens=30)]
    )
    assert reason == "length" and len(tokens) == 30 and set(text) == {"a"}
    ((tokens, text, reason),) = completions(
        llm, ["Go"], [params({"regex": "a{3,}"}, logit_bias={eos: 100}, min_tokens=25, max_tokens=30)]
    )
    assert reason == "stop" and len(tokens) == 26 and set(text) == {"a"}
    ((_, text, reason),) = completions(llm, ["Go"], [params({"choice": ["abc"]}, min_tokens=25)])
    assert (text, reason) == ("abc", "stop")


def test_stop_tokens_and_stop_strings_end_a_constrained_answer(llm):
    ((_, text, reason),) = completions(llm, ["Go"], [params({"regex": "[ab]{300}"}, stop="ab", seed=1)])
    assert reason == "stop" and "ab" not in text and len(text) < 300
    stop = llm.tokenizer.convert_tokens_to_ids("<|user|>")
    sampling = params({"regex": "a{3,}"}, stop_token_ids=[stop], ignore_eos=True, logit_bias={stop: 100})
    output = llm.generate(["Go"], sampling, use_tqdm=False)[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("aaa", "stop", stop)


def test_log_probabilities_are_those_of_the_model(llm):
    output = llm.generate(["Go"], params({"choice": ["yes"]}, logprobs=0, temperature=0), use_tqdm=False)[0].outputs[0]
    free = params(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt = llm.tokenizer.encode("Go")
    again = llm.generate([[*prompt, *output.token_ids]], free, use_tqdm=False)[0]
    for place, token in enumerate(output.token_ids):
        there = again.prompt_logprobs[len(prompt) + place][token].logprob
        assert output.logprobs[place][token].logprob == pytest.approx(there, abs=1e-4)
        assert there < -1, "a random model is not sure of anything"


@pytest.mark.parametrize(
    "kwargs", [{"allowed_token_ids": [5, 6]}, {"bad_words": ["y", "ye", "yes", "n", "no"]}, {"allowed_token_ids": [0]}]
)
def test_a_request_that_has_nothing_left_to_choose_fails_alone(llm, kwargs):
    with llm.engine.requests() as states:
        prompt = llm.tokenizer.encode("Go")
        states.append(llm.engine.add_request(prompt, params({"choice": ["yes", "no"]}, **kwargs)))
        states.append(llm.engine.add_request(prompt, params(max_tokens=5, seed=1)))
        list(llm.engine.as_settled(states))
        assert isinstance(states[0].error, InvalidRequestError) and "no token left" in str(states[0].error)
        assert states[1].error is None and len(states[1].output().outputs[0].token_ids) == 5


def test_a_processor_cannot_bring_back_what_the_grammar_forbids(llm):
    def tempt(input_ids, scores):
        scores[:] = 0
        scores[:, 17] = 50
        return scores

    with llm.engine.requests() as states:
        extras = RequestExtras(logits_processor=[tempt])
        states.append(llm.engine.add_request([5, 6], params(DIGITS, seed=3), extras=extras))
        list(llm.engine.as_finished(states))
        assert re.fullmatch(r"\d{8}", states[0].output().outputs[0].text)


def test_an_aborted_request_leaves_nothing(llm):
    with llm.engine.requests() as states:
        states.append(llm.engine.add_request([5, 6], params({"regex": "a{300}"})))
        for _ in range(5):
            llm.engine.step()
        llm.engine.abort(states[0].request_id)
        list(llm.engine.as_settled(states))
        assert states[0].output().outputs[0].finish_reason == "abort"
        assert states[0].group.requests[0].matcher is None
    assert_idle(llm.engine)


@pytest.mark.parametrize(
    "structured, reason",
    [
        ({"json": '{"type": '}, "not valid JSON"),
        ({"json": 7}, "JSON schema"),
        ({"json": {"type": "string", "x": float("nan")}}, "cannot be written as JSON"),
        ({"regex": ""}, "non-empty string"),
        ({"choice": []}, "non-empty list"),
        ({"choice": "yes"}, "non-empty list"),
        ({"choice": ["a", 1]}, "non-empty list"),
        ({"grammar": 3}, "non-empty string"),
        ({"regex": "a", "choice": ["b"]}, "`regex` and `choice`"),
        ({}, "got none"),
        ({"jsn": {}}, "'jsn'"),
        ("yes", "StructuredOutputsParams"),
        ({"regex": "a" * 2**20 + "b"}, "1048577 characters"),
        ({"json_object": 3}, "json_object"),
        ({"regex": "a", "disable_any_whitespace": None}, "disable_any_whitespace"),
        ({"json": {}, "whitespace_pattern": 3}, "whitespace_pattern"),
        (
            {"structural_tag": {"triggers": ["<a"], "structures": [{"begin": "<b", "end": ""}]}},
            "none of the `triggers`",
        ),
    ],
)
def test_malformed_forms_are_refused_when_they_are_made(structured, reason):
    with pytest.raises(InvalidRequestError, match=re.escape(reason)):
        SamplingParams(structured_outputs=structured)


def test_older_names_of_vllm_are_refused_with_a_word_about_the_new_ones():
    with pytest.raises(InvalidRequestError, match="give `structured_outputs`"):
        SamplingParams(guided_decoding={"regex": "a"})
    assert SamplingParams(guided_decoding=None) == SamplingParams()
    with pytest.raises(ImportError, match="StructuredOutputsParams"):
        from hf_paged import GuidedDecodingParams  # noqa: F401


@pytest.mark.parametrize(
    ("structured", "said"),
    [
        ({"regex": "(("}, "`structured_outputs.regex` '((' is refused: unclosed group, at '('."),
        ({"regex": r"(a)/\1"}, r"is refused: backreferences are not supported, at '\\1'."),
        ({"regex": r"\bfoo"}, r"is refused: `\b`, and `^` and `$` within an expression, are not supported."),
        ({"json": {"type": "string", "pattern": "a(?=b)"}}, "is not supported, at '(?=b)'."),
        ({"grammar": "start: /((/"}, "is refused: at 1(8): unclosed group, at '('."),
        ({"grammar": "start: foo"}, """is refused: at 1(8): unknown name: "foo"."""),
    ],
)
def test_an_error_says_what_is_wrong_and_where_without_internals(llm, structured, said):
    with pytest.raises(InvalidRequestError) as caught:
        llm.engine.grammars.compile(structured)
    assert str(caught.value).endswith(said)


def test_a_compiled_grammar_is_shown_in_a_line(llm):
    shown = repr(llm.engine.grammars.compile({"regex": "abc" * 100}))
    assert shown.startswith("CompiledGrammar('regex', 'abcabc") and len(shown) < 120
    tokenizer = repr(llm.engine.grammars.compile(DIGITS).tokenizer)
    assert tokenizer.startswith("GrammarTokenizer(") and len(tokenizer) < 120


@pytest.mark.parametrize(
    "structured",
    [
        {"regex": "[[x"},
        {"regex": r"(a)\1"},
        {"regex": "(?=a)b"},
        {"json": {"type": "nonsense"}},
        {"json": {"type": "string", "pattern": "[["}},
        {"json": {"$ref": "#/$defs/nowhere"}},
        {"json": {"$ref": "https://example.com/schema.json"}},
        {"grammar": "start: nowhere"},
        {"grammar": "no grammar at all"},
        {"grammar": "root ::= ("},
        {"grammar": "start: start"},
        {"json": {"type": "string"}, "whitespace_pattern": "[["},
    ],
    ids=str,
)
def test_what_does_not_compile_fails_its_request_alone_and_at_once_the_next_time(llm, structured, monkeypatch):
    monkeypatch.setattr(compiler(), "cache", GrammarCache())  # other tests may have tried the same
    sampling = params(structured)
    with llm.engine.requests() as states:
        states.append(llm.engine.add_request([5], sampling))
        states.append(llm.engine.add_request([6], params(max_tokens=3)))
        list(llm.engine.as_settled(states))
        assert isinstance(states[0].error, InvalidRequestError)
        assert states[1].error is None
    with pytest.raises(InvalidRequestError, match="is refused"):
        llm.engine.add_request([5], sampling)
    with pytest.raises(InvalidRequestError, match="is refused"):
        llm.engine.grammars.compile(structured)


def test_a_compiled_grammar_starts_its_request_at_once(llm):
    structured = {"regex": "b{5}"}
    compiled = llm.engine.grammars.compile(structured)
    with llm.engine.requests() as states:
        states.append(llm.engine.add_request([5], params(structured)))
        assert states[0].group.requests[0].grammar is compiled and states[0].group.requests[0].ready
        list(llm.engine.as_finished(states))
        assert states[0].output().outputs[0].text == "bbbbb"


def test_a_tokenizer_is_needed(tiny_checkpoint):
    from hf_paged import AutoPagedModelForCausalLM

    model = AutoPagedModelForCausalLM.from_pretrained(str(tiny_checkpoint), paged_config=PagedConfig(num_blocks=50))
    with pytest.raises(InvalidRequestError, match="`structured_outputs` needs a tokenizer"):
        model.engine.add_request([5], params(DIGITS))
    with pytest.raises(NotSupportedError, match="fast tokenizer"):
        model.engine.add_request([5], params(DIGITS), tokenizer="slow")


def test_a_missing_library_is_named(llm, monkeypatch):
    import importlib.util

    from hf_paged import MissingDependencyError

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "llguidance" else find(name, *args)
    )
    with pytest.raises(MissingDependencyError, match=r"pip install hf-paged\[structured\]"):
        llm.engine.add_request([5], params(DIGITS))


def test_logits_wider_and_narrower_than_the_tokenizer(tiny_checkpoint):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_paged import AutoPagedModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_checkpoint))
    for vocab_size in (len(tokenizer) + 37, len(tokenizer) - 7):
        stock = AutoModelForCausalLM.from_pretrained(str(tiny_checkpoint))
        torch.manual_seed(0)
        stock.resize_token_embeddings(vocab_size, mean_resizing=False)
        model = AutoPagedModelForCausalLM.from_model(stock, paged_config=PagedConfig(num_blocks=50))
        with model.engine.requests() as states:
            for i in range(6):
                states.append(model.engine.add_request([5], params(DIGITS, seed=i), tokenizer=tokenizer))
            list(model.engine.as_finished(states))
            assert all(re.fullmatch(r"\d{8}", state.output().outputs[0].text) for state in states)


def test_waiting_for_grammars_takes_no_seat(llm, monkeypatch):
    """Requests whose grammars compile forever, more than may run: others pass them by."""
    from concurrent.futures import Future

    from hf_paged.generation.structured import compiler as module

    pending: list[Future] = []

    def submit(self, source, spec):
        pending.append(Future())
        return pending[-1]

    monkeypatch.setattr(module.GrammarCompiler, "submit", submit)
    engine = llm.engine
    with engine.requests() as states:
        for i in range(engine.plan.max_num_seqs + 3):
            states.append(engine.add_request([5, 6], params({"regex": f"q{{{i + 1}}}"})))
        free = engine.add_request([7], params(max_tokens=4))
        states.append(free)
        engine.wait(free)
        assert free.error is None and len(pending) == engine.plan.max_num_seqs + 3
        engine.abort(states[0].request_id)
        pending[1].set_exception(InvalidRequestError("no"))
        monkeypatch.undo()
        pending[2].set_result(engine.grammars.compile({"regex": "q{3}"}))
        engine.run_until(lambda: all(states[i].finished for i in range(3)))
        assert [states[i].output().outputs[0].finish_reason for i in range(3)] == ["abort", "error", "stop"]
        assert states[2].output().outputs[0].text == "qqq"
    assert_idle(engine)
    pending[4].set_result(None)  # long after its request was aborted
    engine.step()


def test_an_engine_thread_never_waits_for_a_grammar(llm):
    """While a grammar compiles, steps of others go on as fast as before."""
    slow = {"choice": [f"w{i}" for i in range(20000)]}
    with llm.engine.requests() as states:
        states.append(llm.engine.add_request([5], params(slow)))
        longest, steps = 0.0, 0
        deadline = time.monotonic() + 20
        while not states[0].group.requests[0].ready and time.monotonic() < deadline:
            started = time.perf_counter()
            llm.engine.step()
            longest, steps = max(longest, time.perf_counter() - started), steps + 1
            time.sleep(0.001)
        assert states[0].group.requests[0].ready and steps > 1
        assert longest < 1.0
        list(llm.engine.as_finished(states))
        assert states[0].output().outputs[0].text in slow["choice"]


def test_params_know_what_they_are_made_of():
    plain = StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {}}}, disable_additional_properties=True
    )
    assert json.loads(plain.source.text)["additionalProperties"] is False
    assert plain.source == StructuredOutputsParams.of(plain).source
    assert SamplingParams(structured_outputs={"regex": "a"}).structured_outputs == StructuredOutputsParams(regex="a")
    assert SamplingParams().structured_outputs is None
