from __future__ import annotations

import json

import pytest

from hf_paged.serving.errors import ApiError
from hf_paged.serving.tool_choice import ToolPlan, plan_tools
from hf_paged.serving.tool_parsers import NamedToolParser, RequiredToolParser, get_tool_parser

HERMES = get_tool_parser("hermes")
TREE = {
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/T"}, "child": {"$ref": "#"}, "$ref": {"enum": ["#/x"]}},
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"T": {"type": "integer"}},
}


def _tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def _named(name):
    return {"type": "function", "function": {"name": name}}


def _allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_named(name) for name in names]}}


@pytest.mark.parametrize(
    ("tools", "choice"), [(None, None), ([], None), (None, "none"), (None, "auto"), ([_tool()], "none"), ([], "auto")]
)
def test_nothing_is_read_without_tools_or_with_none(tools, choice):
    plan = plan_tools(tools, choice, parser=HERMES)
    assert plan.choice == "none"
    assert plan.make_parser() is None
    assert plan.structured_outputs is None


@pytest.mark.parametrize("choice", [None, "auto", _allowed("auto", "f")])
def test_auto_is_read_by_the_models_parser(choice):
    plan = plan_tools([_tool(), _tool("g")], choice, parser=HERMES)
    assert plan.choice == "auto"
    assert plan.structured_outputs is None
    assert isinstance(plan.make_parser(), HERMES)
    assert plan.make_parser() is not plan.make_parser()


def test_auto_without_a_parser_says_what_to_do():
    with pytest.raises(ApiError, match="--enable-auto-tool-choice --tool-call-parser") as raised:
        plan_tools([_tool()])
    assert (raised.value.status, raised.value.param) == (400, "tool_choice")


def test_a_named_function_forces_its_arguments():
    plan = plan_tools([_tool(parameters=TREE), _tool("g")], _named("f"))
    assert plan.structured_outputs.json == TREE
    assert isinstance(plan.make_parser(), NamedToolParser)


@pytest.mark.parametrize("name", ["default", "const", "enum", "examples", "properties", "$defs"])
@pytest.mark.parametrize("choice", ["required", _named("f")])
def test_an_argument_may_be_named_as_a_word_of_schemas(allows, choice, name):
    parameters = {
        "type": "object",
        "properties": {name: {"$ref": "#/$defs/T"}},
        "required": [name],
        "$defs": {"T": {"type": "integer"}},
    }
    plan = plan_tools([_tool(parameters=parameters)], choice)
    text = '{"name":"f","parameters":%s}'
    form = f"[{text}]" if choice == "required" else "%s"
    assert allows(plan, form % f'{{"{name}":1}}')
    assert not allows(plan, form % f'{{"{name}":"x"}}')


def test_a_function_without_parameters_takes_an_empty_object(allows):
    plan = plan_tools([_tool()], _named("f"))
    assert allows(plan, "{}")
    assert not allows(plan, '{"a":1}')


@pytest.mark.parametrize("further", [{}, {"additionalProperties": True}, {"anyOf": [{"required": ["a"]}]}])
@pytest.mark.parametrize("choice", ["required", _named("f")])
def test_arguments_that_a_function_does_not_declare_are_not_made_up_unless_it_takes_them(allows, choice, further):
    inner = {"type": "object"}
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "free": inner}, **further}
    plan = plan_tools([_tool(parameters=parameters)], choice)

    def call(arguments: str) -> str:
        return f'[{{"name":"f","parameters":{arguments}}}]' if choice == "required" else arguments

    assert allows(plan, call('{"a":1}'))
    assert allows(plan, call('{"a":1,"b":2}')) == bool(further)
    assert allows(plan, call('{"a":1,"free":{"b":2}}'))


@pytest.fixture(scope="module")
def allows(real_tokenizer):
    """Whether a plan's constraint allows exactly this answer."""
    llguidance = pytest.importorskip("llguidance")
    from llguidance.hf import from_tokenizer

    tokenizer = from_tokenizer(real_tokenizer)

    def check(plan: ToolPlan, text: str) -> bool:
        source = plan.structured_outputs.source
        grammar = llguidance.LLMatcher.grammar_from_json_schema(source.text, overrides=dict(source.options))
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(real_tokenizer.encode(text)) and matcher.is_accepting()

    return check


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('[{"name":"f","parameters":{"value":1,"child":{"value":2}}}]', True),
        ('[{"name":"g","parameters":{}},{"name":"f","parameters":{"value":1}}]', True),
        ('[{"name":"f","parameters":{"value":"x"}}]', False),
        ('[{"name":"f","parameters":{"value":1,"child":{"value":"x"}}}]', False),
        ('[{"name":"h","parameters":{}}]', False),
        ("[]", False),
        ("Well", False),
    ],
)
def test_required_forces_calls_of_the_declared_functions(text, is_allowed, allows):
    plan = plan_tools([_tool(parameters=TREE), _tool("g")], "required")
    assert isinstance(plan.make_parser(), RequiredToolParser)
    assert allows(plan, text) == is_allowed


def test_one_call_at_a_time(allows):
    plan = plan_tools([_tool()], "required", parallel_tool_calls=False)
    call = '{"name":"f","parameters":{}}'
    assert plan.max_calls == 1
    assert allows(plan, f"[{call}]")
    assert not allows(plan, f"[{call},{call}]")


def test_required_among_some_of_the_tools(allows):
    plan = plan_tools([_tool(), _tool("g")], _allowed("required", "g"))
    assert set(plan.functions) == {"g"}
    assert allows(plan, '[{"name":"g","parameters":{}}]')
    assert not allows(plan, '[{"name":"f","parameters":{}}]')


def test_128_tools_are_taken(allows):
    tools = [
        _tool(f"tool_{i}", parameters={"type": "object", "properties": {"a": {"type": "string"}}}) for i in range(128)
    ]
    assert allows(plan_tools(tools, "required"), '[{"name":"tool_127","parameters":{"a":"b"}}]')


def test_the_style_of_ids_is_the_parsers():
    assert plan_tools([_tool()], "required", parser=get_tool_parser("mistral")).id_style == "mistral"
    assert plan_tools([_tool()], "required").id_style == "openai"


DEEP = json.loads('{"items":' * 900 + "{}" + "}" * 900)


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([_tool(f"t{i}") for i in range(129)], None, "tools"),
        ([_tool(), _tool()], None, "tools[1].function.name"),
        (["f"], None, "tools[0]"),
        ([{"type": "retrieval"}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].type"),
        ([{"type": "function", "function": {}}], None, "tools[0].function.name"),
        ([_tool("")], None, "tools[0].function.name"),
        ([_tool("a b")], None, "tools[0].function.name"),
        ([_tool("f\n")], None, "tools[0].function.name"),
        ([_tool("x" * 129)], None, "tools[0].function.name"),
        ([_tool(3)], None, "tools[0].function.name"),
        ([_tool(parameters=[])], None, "tools[0].function.parameters"),
        ([_tool(parameters={"type": "string"})], None, "tools[0].function.parameters.type"),
        ([_tool(parameters={"type": "object", "properties": DEEP})], "required", "tools"),
        (None, "required", "tool_choice"),
        (None, _named("f"), "tool_choice"),
        ([_tool()], "any", "tool_choice"),
        ([_tool()], 3, "tool_choice"),
        ([_tool()], {"type": "custom"}, "tool_choice"),
        ([_tool()], {}, "tool_choice.function.name"),
        ([_tool()], {"type": "function", "function": "f"}, "tool_choice.function.name"),
        ([_tool()], _named("g"), "tool_choice.function.name"),
        ([_tool()], {"type": "allowed_tools"}, "tool_choice.allowed_tools.mode"),
        ([_tool()], _allowed("none", "f"), "tool_choice.allowed_tools.mode"),
        ([_tool()], _allowed("auto"), "tool_choice.allowed_tools.tools"),
        ([_tool()], _allowed("auto", "g"), "tool_choice.allowed_tools.tools[0].function.name"),
    ],
)
def test_what_is_malformed_is_refused_by_name(tools, choice, param):
    with pytest.raises(ApiError) as raised:
        plan_tools(tools, choice, parser=HERMES)
    assert (raised.value.status, raised.value.param) == (400, param)
    assert len(raised.value.message) < 1000
