"""Requests that are made to hurt: each is refused in time, nobody else's answer changes, and the server goes on."""

from __future__ import annotations

import itertools
import random
import threading
import time
from typing import Any

import psutil
import pytest
import torch

from hf_paged.serving.parser_choice import choose_parsers
from tests.paged_models import broken_forward
from tests.serving.attacks import (
    ANSWERED,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Target,
    assert_well,
    attack,
    bystander,
    padded_checkpoint,
)
from tests.serving.servers import chat
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def target(tiny_checkpoint, tmp_path_factory):  # noqa: F811
    """A server whose model's logits are wider than its tokenizer."""
    folder = padded_checkpoint(tiny_checkpoint, tmp_path_factory.mktemp("padded") / "model")
    with Target(folder, enable_auto_tool_choice=True, tool_call_parser="hermes", read_timeout=5.0) as target:
        yield target


SAY = [{"role": "user", "content": "a"}]


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "Hello", "max_tokens": 4, **fields}


def with_form(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, chat(max_tokens=12, temperature=0.8, seed=2, **fields)


# ---------------------------------------------------------------------- too much


def test_long_texts_that_are_only_counted_hold_up_nobody(target):
    body = {"prompt": "a" * 500_000, "return_token_strs": True}
    [answer] = attack(target, [("/tokenize", body)], statuses=frozenset({200}), seconds=30)
    assert answer.json()["count"] > answer.json()["max_model_len"]


def test_counts_without_end_are_capped_cve_2026_34756(target):
    attack(
        target,
        [
            completion(n=10**9),
            (CHAT, chat(n=10**9)),
            completion(n=129),
            completion(best_of=10**9),
            completion(prompt=["x"] * 100_000),
            completion(prompt=[[5]] * 50_000),
            completion(prompt=["x " * 2000] * 1024, max_tokens=4000),
            completion(stop=[f"s{i}" for i in range(10_000)]),
            completion(stop="x" * 10**6),
            completion(bad_words=[f"w{i}" for i in range(10_000)]),
            completion(logit_bias={str(i): 1 for i in range(2000)}),
            completion(stop_token_ids=[5] * 100_000),
            completion(allowed_token_ids=[5] * 100_000),
            completion(logprobs=10**9),
            completion(prompt_logprobs=10**9),
            (CHAT, chat(logprobs=True, top_logprobs=10**9)),
            (CHAT, chat(tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(10_000)])),
            (CHAT, {"messages": [{"role": "user", "content": "a"}] * 20_000}),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]}),
            (RESPONSES, {"input": [{"role": "user", "content": "a"}] * 20_000}),
            (RESPONSES, {"input": "a", "metadata": {str(i): "x" for i in range(10_000)}}),
            (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}] * 20_000}),
            (CHAT, chat("a" * 2_000_000)),
            completion(prompt=[5] * 100_000),
        ],
    )


def test_names_without_end_hold_up_nobody(target):
    """Each unknown field and each argument of the template was looked up by itself, which took the event loop 14 s."""
    names = {f"name_{i}": i for i in range(100_000)}
    answers = attack(
        target,
        [(CHAT, chat(chat_template_kwargs=names)), completion(**names), completion(**{"n" * 10**6: 1})],
        statuses=ANSWERED,
        seconds=3,
    )
    assert {answer.status_code for answer in answers} == {200}


def test_hundreds_of_prompts_hold_up_nobody(target):
    slowest, over = [0.0], threading.Event()

    def probe() -> None:
        with target.client() as client:
            while not over.is_set():
                started = time.monotonic()
                assert client.get("/health").status_code == 200
                slowest[0] = max(slowest[0], time.monotonic() - started)
                time.sleep(0.02)

    thread = threading.Thread(target=probe, daemon=True)
    with bystander(target):
        thread.start()
        answer = target.send(*completion(prompt=[[5 + i % 7] * 10 for i in range(400)], max_tokens=1))
        over.set()
        thread.join(30)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 400
    assert slowest[0] < 2
    assert_well(target)


# ---------------------------------------------------------------------- tokens


def test_token_ids_that_are_none_are_refused_cve_2026_116181_cve_2026_93840_cve_2026_93989(target):
    vocabulary = target.service.engine.engine.limits.vocab_size
    wrong: list[Any] = [-1, vocabulary, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, 1.5, True, None, "5", [5]]
    requests = []
    for token in wrong:
        if token not in ("5", [5]):  # those are texts, or a list of prompts
            requests.append(completion(prompt=[5, token]))
        requests.append(completion(prompt=[[5], [5, token]]))
        requests.append(("/detokenize", {"tokens": [5, token]}))
        if token != "5":
            requests.append(completion(logit_bias={str(token): 1}))
        if not isinstance(token, (str, bool)):  # pydantic takes "5" and true for numbers; they are tokens of this model
            requests.append(completion(stop_token_ids=[token]))
            requests.append(completion(allowed_token_ids=[token]))
    requests += [completion(logit_bias={name: 1}) for name in ("\u00b2", "\u0663", "1" * 5000, "0x5", "5.0", " 5", "")]
    attack(target, [request for request in requests if not _is_truth(request)])


def _is_truth(request: tuple[str, dict[str, Any]]) -> bool:
    """Whether its only mistake is `true` for a number, which pydantic takes in lists."""
    return any(True in value for value in request[1].values() if isinstance(value, list)) or any(
        isinstance(value, list) and any(isinstance(part, list) and True in part for part in value)
        for value in request[1].values()
    )


def test_tokens_without_a_text_are_tokens_like_others(target):
    """Between the tokenizer's length and the logits' width: prompts, biases, stops and log-probabilities take them."""
    nameless = len(target.service.tokenizer) + 7
    assert nameless < target.service.engine.engine.limits.vocab_size
    answers = attack(
        target,
        [
            completion(prompt=[5, nameless], logprobs=3, echo=True, return_token_ids=True),
            completion(logit_bias={str(nameless): 100}, logprobs=5, return_token_ids=True),
            completion(allowed_token_ids=[nameless], return_token_ids=True),
            completion(stop_token_ids=[nameless]),
            completion(logit_bias={str(nameless): 100}, stop=["zz"], stream=True, logprobs=2),
            (CHAT, chat(logit_bias={str(nameless): 100}, logprobs=True, top_logprobs=5)),
            (CHAT, chat(logit_bias={str(nameless): 100}, response_format={"type": "json_object"})),
            (RESPONSES, {"input": "a", "max_output_tokens": 4, "logit_bias": {str(nameless): 100}}),
            (MESSAGES, {"messages": SAY, "max_tokens": 4, "logit_bias": {str(nameless): 9}}),
            ("/detokenize", {"tokens": [5, nameless]}),
        ],
        statuses=frozenset({200}),
        seconds=3,
    )  # fmt: skip
    assert answers[1].json()["choices"][0]["token_ids"] == [nameless] * 4
    assert answers[2].json()["choices"][0]["token_ids"] == [nameless] * 4


def test_lengths_beyond_every_limit_cve_2026_114051(target):
    refused = [
        completion(min_tokens=2**31),
        completion(min_tokens=2**31, max_tokens=2**31),
        completion(min_tokens=5000, max_tokens=None),
        completion(max_tokens=2**31),
        completion(max_tokens=2**64),
        completion(max_tokens=10**30),
        (CHAT, chat(max_tokens=2**31)),
        (CHAT, chat(max_tokens=0)),
        (CHAT, chat(min_tokens=2**31, max_tokens=None)),
        completion(truncate_prompt_tokens=2**31),
        completion(prompt=[5] * 4096),
    ]
    attack(target, refused)
    answers = attack(target, [completion(max_tokens=None), completion(max_tokens=1, min_tokens=1)], statuses={200})
    assert answers[0].json()["usage"]["completion_tokens"] <= 16


# ---------------------------------------------------------------------- sampling

EXTREMES: dict[str, list[Any]] = {
    "n": [2],
    "temperature": [0, 1e-30, 1e30],
    "top_p": [1e-30, 1],
    "top_k": [-1, 1, 10**9],
    "min_p": [0, 1, 1e-30],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [1e-6, 1e6, 1e-320, 1e308],
    "seed": [-(2**63), 2**64 - 1],
    "stop": [["e"], "\u0000", "x" * 1024],
    "stop_token_ids": [[0], list(range(600))],
    "bad_words": [["a"], [chr(97 + i) for i in range(26)]],
    "allowed_token_ids": [[5], [0]],
    "logit_bias": [{"5": -100, "6": 100}, {str(i): -100 for i in range(600)}],
    "min_tokens": [3],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "echo": [True],
    "ignore_eos": [True],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "truncate_prompt_tokens": [1, -1],
    "request_timeout": [1e-320, 30],
    "structured_outputs": [{"regex": "[a-z]{1,9}"}, {"json": {"type": "object"}}],
}


def pairs(seed: int, times: int) -> list[tuple[str, dict[str, Any]]]:
    """Every sampling parameter with every other, at the ends of their ranges, `times` times with others of them."""
    source = random.Random(seed)
    return [
        completion(max_tokens=3, **{first: source.choice(EXTREMES[first]), second: source.choice(EXTREMES[second])})
        for first, second in itertools.combinations(EXTREMES, 2)
        for _ in range(times)
    ]


def test_every_sampling_parameter_with_every_other_cve_2026_44223(target):
    answers = attack(target, pairs(0, 1), statuses=ANSWERED, seconds=3)
    assert {answer.status_code for answer in answers} <= {200, 400, 408}
    assert sum(answer.status_code == 200 for answer in answers) > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_more_pairs_of_sampling_parameters_cve_2026_44223(target, seed):
    answers = attack(target, pairs(seed, 4), statuses=ANSWERED, seconds=6)
    assert {answer.status_code for answer in answers} <= {200, 400, 408}


def test_what_leaves_no_token_is_the_requests_own_mistake(target):
    word = target.service.tokenizer.decode([5])
    answers = attack(
        target,
        [
            completion(allowed_token_ids=[5], bad_words=[word]),
            completion(allowed_token_ids=[5], bad_words=[word * 2], temperature=0),
            completion(allowed_token_ids=[0], min_tokens=3),
            (CHAT, chat(allowed_token_ids=[0], min_tokens=3, seed=1)),
        ],
    )
    assert all("no token left to choose" in answer.json()["error"]["message"] for answer in answers)


# ---------------------------------------------------------------------- forms


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "exponential automaton": {"structured_outputs": {"regex": "[ab]*a[ab]{12}"}},
    "nested repetition": {"structured_outputs": {"regex": "(x{1,300}){1,300}"}},
    "deeper repetition": {"structured_outputs": {"regex": "((a{1,100}){1,100}){1,100}"}},
    "huge repetition": {"guided_regex": "a{1000000000}"},
    "deep parentheses": {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
    "deep schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": nested(40)}}},
    "exponential references": {
        "guided_json": {
            "$defs": {
                **{f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)},
                "a40": {"type": "string"},
            },
            "$ref": "#/$defs/a0",
        }
    },
    "endless reference": {"guided_json": {"$ref": "#"}},
    "hostile pattern": {"guided_json": {"type": "string", "pattern": "^(x{1,300}){1,300}$"}},
    "many properties": {"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}},
    "left recursion": {"structured_outputs": {"grammar": 'start: start "a" | "a"'}},
    "nothing but recursion": {"guided_grammar": "start: start"},
    "ambiguity": {"guided_grammar": 'start: start start | "a" |'},
    "bomb in a tool": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": {"type": "string", "pattern": "(x{1,300}){1,300}"}},
        }}}],
        "tool_choice": "required",
    },
}  # fmt: skip


COMMON_BOMBS = ("exponential automaton", "nested repetition", "deep schema", "left recursion", "bomb in a tool")


def test_grammars_that_explode_are_given_up_in_time_cve_2026_55574(target):
    attack(target, [with_form(**BOMBS[name]) for name in COMMON_BOMBS], statuses=ANSWERED, seconds=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_each_grammar_that_explodes_is_given_up_in_time_cve_2026_55574(target, name):
    attack(target, [with_form(**BOMBS[name])], statuses=ANSWERED, seconds=6)


def test_malformed_forms_are_refused_cve_2025_48942_cve_2025_48943(target):
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strin"}}}
    answers = attack(
        target,
        [
            with_form(guided_regex="("),
            with_form(guided_regex="[a"),
            with_form(guided_regex="a{3,1}"),
            with_form(guided_regex=r"\p{Nope}"),
            with_form(structured_outputs={"regex": "*"}),
            with_form(structured_outputs={"json": "{"}),
            with_form(structured_outputs={"json": {"type": "nope"}}),
            with_form(structured_outputs={"json": {"type": "object", "properties": 5}}),
            with_form(structured_outputs={"json": {"$ref": "#/nowhere"}}),
            with_form(structured_outputs={"json": {"$ref": "http://127.0.0.1/schema"}}),
            with_form(structured_outputs={"json": {"$ref": "file:///etc/passwd"}}),
            with_form(structured_outputs={"grammar": "start: nowhere"}),
            with_form(structured_outputs={"grammar": "\u0000"}),
            with_form(structured_outputs={"choice": []}),
            with_form(structured_outputs={}),
            with_form(structured_outputs={"regex": "a", "choice": ["a"]}),
            with_form(response_format=schema),
            with_form(response_format={"type": "json_schema"}),
            with_form(response_format={"type": "json_schema", "json_schema": {"name": "n"}}),
            with_form(response_format={"type": "yaml"}),
            with_form(response_format="json"),
            (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": 5}}}}),
        ],
        seconds=2,
    )  # fmt: skip
    assert {answer.status_code for answer in answers} == {400}


def different_schemas(target: Target, first: int, count: int) -> None:
    for i in range(first, first + count):
        schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"}, "q": {"enum": [i, "x"]}}}
        response = target.send(*completion(max_tokens=1, guided_json=schema))
        assert response.status_code == 200, response.text


def test_many_schemas_beside_somebody_else(target):
    with bystander(target):
        different_schemas(target, 0, 60)
    assert_well(target)


@pytest.mark.slow
def test_memory_is_flat_over_thousands_of_schemas_cve_2025_29770(target):
    def megabytes() -> float:
        here = psutil.Process()
        return sum(process.memory_info().rss for process in [here, *here.children(recursive=True)]) / 2**20

    different_schemas(target, 1000, 1500)
    before = megabytes()
    different_schemas(target, 2500, 2500)
    assert megabytes() - before < 25
    assert_well(target)


# ---------------------------------------------------------------------- templates

SLOW_TEMPLATE = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].getcwd() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ messages.append(1) }}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
    "{{ '%s' | format(messages.__class__) }}",
    "{{ ''.format_map }}",
]

NOT_FOR_REQUESTS = [
    *("chat_template", "messages", "tools", "tokenize", "conversation", "return_dict", "__class__", "range"),
    *("raise_exception", "self", "max_length"),
]


def test_templates_of_requests_are_refused_by_default_cve_2025_62426_cve_2026_5760(target):
    messages = [{"role": "user", "content": "{{ 7 * 7 }} {% for a in range(10**9) %}{% endfor %}"}]
    attack(
        target,
        [
            *[(CHAT, chat(chat_template=template)) for template in [SLOW_TEMPLATE, *ESCAPES]],
            *[(CHAT, chat(chat_template_kwargs={name: "{{ 7 * 7 }}"})) for name in NOT_FOR_REQUESTS],
            (RESPONSES, {"input": "a", "chat_template_kwargs": {"tokenize": True}}),
            ("/tokenize", {"messages": messages, "chat_template": SLOW_TEMPLATE}),
        ],
    )  # fmt: skip
    answer = target.send("/tokenize", {"messages": messages, "return_token_strs": True}).json()
    assert "49" not in "".join(answer["token_strs"]), "what is in a message is a text"


@pytest.mark.slow
def test_templates_of_requests_cannot_leave_their_sandbox_nor_run_for_ever_cve_2025_62426(tiny_checkpoint):  # noqa: F811
    with Target(tiny_checkpoint, trust_request_chat_template=True) as trusting:
        assert trusting.send(CHAT, chat(chat_template="{{ messages[0].content }}")).status_code == 200
        for template in ESCAPES:
            answer = attack(trusting, [(CHAT, chat(chat_template=template))], statuses=ANSWERED, seconds=6)[0]
            assert "root:" not in answer.text and "posix" not in answer.text
        for template in (SLOW_TEMPLATE, "{{ 'x' * 10**10 }}", "{{ range(10**9) | list }}"):
            answers = attack(trusting, [(CHAT, chat(chat_template=template))], seconds=9)
            assert answers[0].status_code == 400


# ---------------------------------------------------------------------- caches


def test_prompts_are_shared_within_a_salt_only_cve_2025_46570_cve_2025_25183_cve_2026_105756(target):
    prompt = "A secret that only one tenant knows. " * 12

    def cached(**fields: Any) -> int:
        response = target.send(CHAT, chat(prompt, max_tokens=1, **fields))
        assert response.status_code == 200
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with bystander(target):
        assert cached(cache_salt="a") == 0
        assert cached(cache_salt="b") == 0
        assert cached() == 0
        assert cached(cache_salt="a ") == 0 == cached(cache_salt="A") == cached(cache_salt="a\u0000")
        assert cached(cache_salt="a") > 0 and cached() > 0
    assert_well(target)
    wrong = ["", "x" * 1025, 5, True, [], {}, ["a"], {"a": 1}, 1.5]
    attack(target, [(path, {**body, "cache_salt": salt}) for salt in wrong for path, body in _EVERY_API])
    lone = b'{"messages": [{"role": "user", "content": "a"}], "cache_salt": "\\ud800"}'
    attack(target, [(CHAT, lone)])


_EVERY_API = [
    (CHAT, chat()),
    completion(),
    (RESPONSES, {"input": "a", "max_output_tokens": 2}),
    (MESSAGES, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
]


# ---------------------------------------------------------------------- what would be fetched


def test_nothing_is_fetched_for_a_message_cve_2025_6242(target):
    fetched = []
    with httpx_listener(fetched) as url:
        parts = [
            {"type": "image_url", "image_url": {"url": f"{url}/a.png"}},
            {"type": "image_url", "image_url": {"url": f"{url}/redirect?to=http://169.254.169.254/"}},
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            {"type": "image_url", "image_url": f"{url}/b.png"},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "file", "file": {"file_id": url}},
            {"type": "image", "source": {"type": "url", "url": url}},
            {"type": "input_image", "image_url": url},
            {"type": "text", "image_url": {"url": url}},
            {"type": url},
        ]
        requests: list[tuple[str, Any]] = []
        for part in parts:
            message = {"role": "user", "content": [part]}
            requests += [
                (CHAT, {"messages": [message]}),
                (RESPONSES, {"input": [message]}),
                (MESSAGES, {"messages": [message], "max_tokens": 1}),
                ("/tokenize", {"messages": [message]}),
            ]
        requests.append((RESPONSES, {"input": "a", "tools": [{"type": "mcp", "server_url": url, "server_label": "x"}]}))
        answers = attack(target, requests)
        assert {answer.status_code for answer in answers} == {400}
    assert not fetched


class httpx_listener:  # noqa: N801 - used like a function
    """Somebody who would notice being asked."""

    def __init__(self, fetched: list[str]):
        from http.server import BaseHTTPRequestHandler, HTTPServer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fetched.append(self.path)
                self.send_response(302)
                self.send_header("Location", "/again")
                self.end_headers()

        self._server = HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


# ---------------------------------------------------------------------- the engine


OUT_OF_MEMORY = torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("cause", [RuntimeError("the eleventh"), OUT_OF_MEMORY], ids=["exception", "memory"])
def test_a_step_that_fails_once_is_run_again_and_nobody_notices(target, cause):
    with broken_forward(target.service.engine.model, cause, at=11), bystander(target):
        answers = [target.send(*completion(max_tokens=20)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert_well(target)


@pytest.mark.parametrize("cause", [RuntimeError("poison"), OUT_OF_MEMORY], ids=["exception", "memory"])
def test_whoever_makes_every_step_fail_fails_alone(target, cause):
    def poisoned(forward: Any, kwargs: dict[str, Any]) -> Any:
        if (kwargs["input_ids"] == 597).any():
            raise cause
        return forward()

    with broken_forward(target.service.engine.model, poisoned, times=10**6), bystander(target):
        answers = [target.send(*completion(prompt=[5, 597, 6])) for _ in range(3)]
        good = target.send(*completion(prompt=[5, 6]))
    assert {answer.status_code for answer in answers} <= {500, 503} and good.status_code == 200
    assert all(answer.json()["error"]["message"] for answer in answers)
    assert_well(target)


# ---------------------------------------------------------------------- parsers


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "pythonic", "mistral"])
def test_answers_that_look_like_calls_without_end_hold_up_nobody_cve_2025_71379_cve_2025_48887(
    target, monkeypatch, name
):
    """The answer is forced by a regular expression: beginnings of calls, each of which comes to nothing."""
    monkeypatch.setattr(target.service, "parsers", choose_parsers(target.service.tokenizer, tool_call_parser=name))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    texts = {
        "hermes": r"(<tool_call>\{){20}",
        "llama3_json": r"(\{\"name\": \"f\", \"parameters\": \{){12}",
        "pythonic": r"\[f\(a=(\[){150}",
        "mistral": r"(\[TOOL_CALLS\]\[\{){20}",
    }
    body = chat(tools=tools, structured_outputs={"regex": texts[name]}, max_tokens=600, temperature=0)
    for stream in (False, True):
        attack(target, [(CHAT, {**body, "stream": stream})], statuses=frozenset({200}), seconds=20)
