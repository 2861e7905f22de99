"""Forms that are made to hurt: each ends soon, and nobody else notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from hf_paged import InvalidRequestError, SamplingParams
from hf_paged.generation.structured import cache as cache_module
from hf_paged.generation.structured import compiler as compiler_module
from hf_paged.generation.structured import proving
from hf_paged.generation.structured.cache import CompiledGrammar, GrammarCache
from hf_paged.generation.structured.compiler import GrammarCompiler, compiler
from hf_paged.generation.structured.params import GrammarSource, StructuredOutputsParams


def chain(count: int, link) -> dict:
    """A schema whose definitions refer to each other, one after the other."""
    definitions = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(count)}
    return {"$defs": {**definitions, f"a{count}": {"type": "string"}}, "$ref": "#/$defs/a0"}


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def lines(count: int, rule: str, last: str, letter: str = "t") -> str:
    """A grammar whose rules, or terminals, refer to each other."""
    names = [f"{letter}{i}" for i in range(count + 1)]
    rules = [rule.format(name, successor) for name, successor in zip(names, names[1:], strict=False)]
    return "\n".join([rule.format("start", names[0]), *rules, last.replace("t", letter)])


HOSTILE = {
    "exponential automaton": {"regex": r"[ab]*a[ab]{12}"},
    "larger exponential automaton": {"regex": r"(.|\n)*a(.|\n){60}"},
    "nested repetition": {"regex": r"(x{1,300}){1,300}"},
    "deeper nested repetition": {"regex": r"((a{1,100}){1,100}){1,100}"},
    "optional then required": {"regex": r"(a?){5000}a{5000}"},
    "long repetition": {"regex": r"a{1000000000}"},
    "deep parentheses": {"regex": "(" * 20000 + "a" + ")" * 20000},
    "many alternatives": {"regex": "a|" * 200000 + "b"},
    "deep schema": {"json": nested(100)},
    "chain of references": {"json": chain(20000, lambda reference: reference)},
    "chain of arrays": {"json": chain(8000, lambda reference: {"type": "array", "items": reference})},
    "exponential references": {"json": chain(40, lambda reference: {"anyOf": [reference, reference]})},
    "reference to itself": {"json": {"$ref": "#"}},
    "many required properties": {
        "json": {
            "type": "object",
            "properties": {f"p{i:010}": {"type": "string"} for i in range(20000)},
            "required": [f"p{i:010}" for i in range(20000)],
        }
    },
    "many optional properties": {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}},
    "long enumeration": {"json": {"enum": [f"v{i:020}" for i in range(40000)]}},
    "long constant": {"json": {"const": "x" * 900000}},
    "hostile pattern": {"json": {"type": "string", "pattern": "^(x{1,300}){1,300}$", "maxLength": 10**6}},
    "large multiple": {"json": {"type": "integer", "multipleOf": 99991}},
    "left recursion": {"grammar": 'start: start "a" | "a"'},
    "nothing but recursion": {"grammar": "start: a\na: start"},
    "ambiguity": {"grammar": 'start: start start | "a" |'},
    "chain of rules": {"grammar": lines(20000, '{}: {} "x"', 't20000: "y"')},
    "chain of terminals": {"grammar": lines(20000, '{}: {} "x"', 't20000: "y"', "T")},
    "exponential rules": {"grammar": lines(40, "{0}: {1} {1}", 't40: "x"')},
    "exponential terminals": {"grammar": lines(40, "{0}: {1} {1}", 't40: "x"', "T")},
    "exponential GBNF": {"grammar": lines(40, "{0} ::= {1} {1}", 't40 ::= "x"').replace("start", "root")},
    "deep GBNF": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
}  # fmt: skip


def params(structured=None, **kwargs) -> SamplingParams:
    given = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "structured_outputs": structured}
    return SamplingParams(**{**given, **kwargs})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_ends_soon_and_others_do_not_notice(llm, name):
    started = time.monotonic()
    with llm.engine.requests() as states:
        states.append(llm.engine.add_request([5], params(HOSTILE[name])))
        states.append(llm.engine.add_request([7], params(max_tokens=40)))
        list(llm.engine.as_settled(states))
        seconds = time.monotonic() - started
        bad, good = states
        assert bad.error is None or isinstance(bad.error, InvalidRequestError), bad.error
        assert good.error is None
        alone = llm.generate([[7]], params(max_tokens=40), use_tqdm=False)[0].outputs[0]
        assert good.output().outputs[0].token_ids == alone.token_ids
    assert seconds < 6


def test_a_compile_that_takes_too_long_is_given_up(llm, monkeypatch):
    monkeypatch.setattr(proving, "COMPILE_SECONDS", 0.2)
    slow = {"grammar": "start: " + " | ".join(f'"v{i}"' for i in range(60000))}
    started = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"longer than 0\.2 seconds"):
        llm.engine.grammars.compile(slow)
    assert time.monotonic() - started < 3
    monkeypatch.undo()
    assert llm.generate("Go", params({"choice": ["after that"]}), use_tqdm=False)[0].outputs[0].text == "after that"


def test_a_grammar_that_ends_the_other_process_ends_nothing_else(llm):
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        llm.engine.grammars.compile({"json": chain(6000, lambda reference: reference)})
    assert llm.generate("Go", params({"choice": ["still here"]}), use_tqdm=False)[0].outputs[0].text == "still here"


def test_the_other_process_may_be_killed_at_any_time(llm):
    llm.engine.grammars.compile({"regex": "k{3}"})
    for child in psutil.Process().children():
        if any("grammar_process" in part for part in child.cmdline()):
            child.kill()
    assert llm.generate("Go", params({"regex": "k{4}"}), use_tqdm=False)[0].outputs[0].text == "kkkk"


def test_equal_grammars_are_compiled_once(llm, monkeypatch):
    proved = []
    prove = proving.GrammarProcess.prove
    monkeypatch.setattr(proving.GrammarProcess, "prove", lambda *args: proved.append(args[1]) or prove(*args))
    structured = {"choice": ["once", "and only once"]}
    outputs = llm.generate(["Go"] * 10, params(structured), use_tqdm=False)
    outputs += llm.generate(["Go"] * 3, params(structured), use_tqdm=False)
    assert len(proved) == 1 and len(outputs) == 13


def test_nobody_can_cancel_what_others_wait_for(llm):
    first, second = (llm.engine.grammars.submit({"choice": ["slow", *map(str, range(3000))]}) for _ in range(2))
    assert not first.cancel()
    assert second.result().start is first.result().start


def cached(source: GrammarSource, num_bytes: int, tokenizer) -> CompiledGrammar:
    return CompiledGrammar(source, tokenizer, None, num_bytes)


def test_the_cache_is_bounded_and_keeps_what_was_used_last():
    class Tokenizer:
        name = "t"

    cache, tokenizer = GrammarCache(max_entries=3, max_bytes=1000), Tokenizer()
    sources = [GrammarSource("regex", "abcde"[i]) for i in range(5)]
    for source in sources[:3]:
        cache.put(tokenizer, source, cached(source, 100, tokenizer))
    assert cache.get(tokenizer, sources[0]) is not None
    cache.put(tokenizer, sources[3], "`x` is refused")
    assert cache.get(tokenizer, sources[1]) is None and cache.get(tokenizer, sources[0]) is not None
    with pytest.raises(InvalidRequestError, match="is refused"):
        cache.get(tokenizer, sources[3])
    cache.put(tokenizer, sources[4], cached(sources[4], 990, tokenizer))
    assert len(cache) == 1 and cache.num_bytes == 992
    cache.put(tokenizer, sources[4], cached(sources[4], 10, tokenizer))
    assert len(cache) == 1 and cache.num_bytes == 12
    cache.put(tokenizer, sources[0], cached(sources[0], 5000, tokenizer))
    assert len(cache) == 0 and cache.num_bytes == 0, "what is larger than the cache is not kept"


def test_a_grammar_that_grew_with_its_answers_is_compiled_anew(llm, monkeypatch):
    structured = {"regex": "[ab]{20}"}
    first = llm.engine.grammars.compile(structured)
    llm.generate("Go", params(structured), use_tqdm=False)
    assert llm.engine.grammars.compile(structured) is first
    monkeypatch.setattr(cache_module, "MAX_GROWTH", 1000)
    llm.generate("Go", params(structured), use_tqdm=False)
    assert llm.engine.grammars.compile(structured) is not first


def test_a_grammar_that_became_too_large_does_not_stay_so(llm):
    structured = {"regex": r"((a{1,99}){1,99}){1,99}"}
    lengths = []
    for _ in range(2):
        grammar = llm.engine.grammars.compile(structured)
        with llm.engine.requests() as states:
            states.append(llm.engine.add_request([5], params(structured, max_tokens=1000, ignore_eos=True)))
            list(llm.engine.as_settled(states))
            assert isinstance(states[0].error, InvalidRequestError)
            lengths.append(len(states[0].output().outputs[0].token_ids))
        assert llm.engine.grammars.compile(structured) is not grammar
    assert lengths[0] == lengths[1] > 0, "the second was in the way of the first"


def test_too_many_waiting_grammars_are_refused(llm, monkeypatch):
    from hf_paged import QueueFullError

    monkeypatch.setattr(compiler_module, "MAX_QUEUED", 0)
    with pytest.raises(QueueFullError, match="wait to be compiled"):
        llm.engine.grammars.compile({"regex": "never seen before"})
    with llm.engine.requests() as states:
        states.append(llm.engine.add_request([5], params({"regex": "nor this"})))
        list(llm.engine.as_settled(states))
        assert isinstance(states[0].error, QueueFullError)


def test_a_closed_compiler_leaves_no_process(llm):
    own = GrammarCompiler()
    spec = llm.engine.grammars._spec(None)
    own.submit(StructuredOutputsParams(regex="a").source, spec).result()
    before = {child.pid for child in psutil.Process().children()}
    own.close()
    assert len({child.pid for child in psutil.Process().children()}) == len(before) - 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_compiles_by_itself(tiny_checkpoint):
    """In a process of its own, since forking one with many threads is asking for trouble."""
    code = f"""
import os, sys
from hf_paged import LLM, SamplingParams
first = LLM({str(tiny_checkpoint)!r}, num_blocks=50)
def ask(llm, regex):
    return llm.generate("Go", SamplingParams(structured_outputs={{"regex": regex}}), use_tqdm=False)[0].outputs[0].text
assert ask(first, "a{{3}}") == "aaa"
child = os.fork()
if child == 0:
    second = LLM({str(tiny_checkpoint)!r}, num_blocks=50)
    assert ask(second, "b{{3}}") == "bbb"
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert ask(first, "c{{3}}") == "ccc"
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


@pytest.mark.slow
def test_memory_stays_flat_over_ten_thousand_schemas(llm):
    def schema(i: int) -> dict:
        return {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"}, "q": {"enum": [i, "x"]}}}}

    def megabytes() -> float:
        return psutil.Process().memory_info().rss / 2**20

    seen = []
    for i in range(10000):
        llm.engine.grammars.compile(schema(i))
        if i % 1000 == 999:
            seen.append(megabytes())
    assert len(compiler().cache) <= cache_module.MAX_ENTRIES
    assert compiler().cache.num_bytes <= cache_module.MAX_BYTES
    assert seen[-1] - seen[1] < 40, seen  # the cache was full after two thousand
    assert json.dumps(schema(1))
