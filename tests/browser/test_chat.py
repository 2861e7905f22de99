"""Chatting on the page."""

from __future__ import annotations

import json
import re

import httpx
import pytest

pytestmark = pytest.mark.slow

# Where a model's words would do something if they were taken for markup.
MARKUP = '<img src=x onerror="document.title=1"><b>bold</b><script>document.title=2</script>'


@pytest.fixture(scope="module")
def server(make_server):
    return make_server(served_model_name=("tiny", "also-tiny"))


@pytest.fixture
def screen(open_page, server):
    return open_page(server).connected()


def sent(screen, text):
    """What the page sends for a message."""
    with screen.page.expect_request("**/v1/chat/completions") as found:
        screen.ask(text)
    return json.loads(found.value.post_data)


def expected(server, messages, **fields):
    """What the server answers to the same without a page."""
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json={"messages": messages, **fields}).json()
    return answer["choices"][0]["message"]["content"]


def test_an_answer_is_streamed_and_measured(screen, server):
    screen.set(max_tokens="40")
    body = sent(screen, "Hello")
    assert body["model"] == "tiny" and body["stream"] and body["max_tokens"] == 40
    assert set(body) == {"model", "messages", "stream", "stream_options", "max_tokens"}, "what is empty is not sent"
    answer = screen.answer()
    text = screen.page.evaluate("document.querySelector('article.assistant .text').textContent")
    assert text == expected(server, [{"role": "user", "content": "Hello"}], max_tokens=40)
    assert re.match(
        r"40 tokens · \d+\.\d tokens/s · first token after [\d.]+ m?s · .*cut off at the limit of tokens",
        answer.locator(".stats").inner_text(),
    )
    assert answer.get_attribute("aria-busy") == "false"


def test_settings_are_sent_kept_and_taken_back(screen):
    values = {"temperature": "0.5", "top_p": "0.9", "top_k": "7", "max_tokens": "5", "seed": "11"}
    screen.set(system="Be brief.", repetition_penalty="1.1", min_p="0.01", **values)
    screen.find("#model").select_option("also-tiny")
    body = sent(screen, "Hello")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: str(body[name]) for name in values} == values
    assert body["repetition_penalty"] == 1.1 and body["min_p"] == 0.01 and body["model"] == "also-tiny"
    assert "system prompt" in screen.find("#settings-summary").inner_text()
    screen.page.reload()
    screen.connected()
    screen.expect("#temperature").to_have_value("0.5")
    assert len(screen.find("article").all()) == 2, "the conversation stays, too"
    screen.set()
    screen.find("#reset").click()
    screen.expect("#system").to_have_value("")
    screen.set(max_tokens="5")
    body = sent(screen, "And now?")
    assert not {"temperature", "top_p", "top_k", "seed"} & set(body)


def test_a_value_that_cannot_be_is_not_sent(screen):
    screen.set(top_p="1.5")
    screen.send("Hello")
    assert screen.find("#top_p").evaluate("node => node.matches(':invalid')")
    assert not screen.find("article").all()
    screen.set(top_p="")


def test_stop_keeps_what_has_come_and_ends_the_request(screen, server):
    screen.send("Go on and on")
    screen.expect("article.assistant .text").not_to_have_text("")
    screen.answer("streaming")
    screen.find("#stop").click()
    answer = screen.answer("stopped")
    assert answer.locator(".text").inner_text() and "stopped" in answer.locator(".stats").inner_text()
    screen.expect("#stop").to_be_hidden()
    screen.expect("#figure-running").to_have_text("0")
    assert server.service.engine.engine.live.block_manager.num_blocks_held == 0


def test_an_answer_can_be_asked_for_again(screen):
    screen.set(max_tokens="12", temperature="1")
    screen.ask("Hello")
    body = None
    with screen.page.expect_request("**/v1/chat/completions") as found:
        screen.find("button.again").click()
    body = json.loads(found.value.post_data)
    assert [message["content"] for message in body["messages"]] == ["Hello"]
    screen.answer()
    assert len(screen.find("article").all()) == 2
    body = sent(screen, "And then?")
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert len(screen.find("button.again").all()) == 1, "only the last answer can"


def test_a_question_that_failed_is_not_sent_again_with_the_next(screen):
    screen.set(max_tokens="5")
    first = screen.ask("Hello")
    error = {"error": {"message": "No."}}
    screen.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    screen.send("Invent")
    screen.answer("failed")
    screen.page.unroute("**/v1/chat/completions")
    turns = [(message["role"], message["content"]) for message in sent(screen, "And then?")["messages"]]
    assert turns == [("user", "Hello"), ("assistant", first), ("user", "And then?")]


def test_an_answer_whose_page_was_left_is_kept_and_says_so(screen):
    screen.send("Go on and on")
    screen.answer("streaming")
    screen.expect("article.assistant .text").not_to_have_text("")
    screen.page.reload()
    screen.connected()
    answer = screen.answer("failed")
    assert answer.locator(".text").inner_text()
    assert answer.locator(".problem").inner_text() == "The page was left before the answer was complete."


def test_a_conversation_can_be_cleared(screen):
    screen.set(max_tokens="5")
    screen.ask("Hello")
    screen.find("#clear").click()
    assert not screen.find("article").all()
    screen.expect("#welcome").to_be_visible()
    assert len(sent(screen, "Hello again")["messages"]) == 1


def test_what_was_kept_of_a_visit_and_is_damaged_is_left_out(screen):
    good = {"role": "user", "content": "Still here"}
    damaged = [None, 5, {"role": "user", "content": 5}, {"role": "x", "content": "x"}, {**good, "stats": None}]
    for kept, articles in (('{"a":1}', 0), ("5", 0), ("[", 0), (json.dumps([*damaged, good]), 1)):
        screen.page.evaluate("kept => sessionStorage.setItem('hf_paged.messages', kept)", kept)
        screen.page.evaluate("kept => sessionStorage.setItem('hf_paged.key', kept)", '{"a":1}')
        screen.page.reload()
        screen.connected()
        assert screen.find("article").count() == articles, kept
    assert screen.find("article .text").inner_text() == "Still here"


def test_a_schema_makes_an_answer_json(screen):
    properties = {"n": {"enum": [1, 22, 333]}}
    schema = {"type": "object", "properties": properties, "required": ["n"], "additionalProperties": False}
    screen.set(schema=json.dumps(schema), max_tokens="60")
    text = screen.ask("A number")
    found = json.loads(text)
    assert found["n"] in (1, 22, 333) and len(found) == 1
    screen.find("#schema").fill("{not json")
    assert "not JSON" in screen.find("#schema-error").inner_text()
    screen.send("Hello")
    assert len(screen.find("article").all()) == 2, "nothing is sent"


def test_a_schema_that_the_server_refuses_is_shown_in_its_words(screen, server):
    schema = {"type": "nonsense"}
    screen.set(schema=json.dumps(schema))
    screen.send("Hello")
    problem = screen.answer("failed").locator(".problem").inner_text()
    body = {"messages": [{"role": "user", "content": "Hello"}], "model": "tiny"}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "response_format": form}, timeout=60)
    assert refused.status_code == 400 and problem == refused.json()["error"]["message"]
    screen.shoot("error")
    screen.find("#schema-on").uncheck()
    screen.set(max_tokens="5")
    screen.find("button.again", has_text="Try again").click()
    screen.answer()


def test_a_busy_server_is_asked_again_when_it_says(screen):
    refused = []

    def refuse(route):
        refused.append(route.request)
        if len(refused) > 2:
            return route.fallback()
        body = {"error": {"message": "9 requests are waiting; try again later.", "code": "queue_full"}}
        return route.fulfill(status=503, headers={"Retry-After": "1"}, json=body)

    screen.page.route("**/v1/chat/completions", refuse)
    screen.set(max_tokens="5")
    screen.send("Hello")
    screen.expect("article.assistant .stats").to_contain_text("9 requests are waiting")
    screen.expect("article.assistant .stats").to_contain_text("Trying again in 1 s")
    screen.answer()
    assert len(refused) == 3


def test_waiting_for_a_busy_server_can_be_stopped(screen):
    error = {"error": {"message": "Full."}}
    screen.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=503, headers={"Retry-After": "60"}, json=error)
    )
    screen.send("Hello")
    screen.expect("article.assistant .stats").to_contain_text("Trying again in 60 s")
    screen.page.keyboard.press("Escape")
    screen.answer("stopped")
    screen.expect("#send").to_be_enabled()


def test_an_error_within_a_stream_is_shown_and_what_came_before_stays(screen):
    chunks = [
        {"id": "chatcmpl-1", "choices": [{"delta": {"content": "Half an"}, "finish_reason": None}]},
        {"error": {"message": "The step failed."}},
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    screen.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    screen.send("Hello")
    answer = screen.answer("failed")
    assert answer.locator(".text").inner_text() == "Half an"
    assert answer.locator(".problem").inner_text() == "The answer broke off. The step failed."


def test_an_event_that_is_no_piece_of_an_answer_is_a_problem_in_words(screen):
    events = {
        "null": "The server sent an event that is no JSON object: null",
        "5": "The server sent an event that is no JSON object: 5",
        "{": "The server sent an event that is no JSON object: {",
        '{"error":"x"}': "x",
        '{"error":{"message":""}}': "The server told of an error, and not of which.",
        '{"choices":5}': "The server did not answer as OpenAI does; `choices`: 5",
        '{"choices":["a"]}': 'The server did not answer as OpenAI does; `choices`: ["a"]',
        '{"choices":[{"delta":{"content":{}}}]}': "The server did not answer as OpenAI does; "
        '`choices`: [{"delta":{"content":{}}}]',
    }
    bodies = iter([f"data: {event}\n\n" for event in events])
    screen.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=next(bodies))
    )
    for problem in events.values():
        screen.send("Hello")
        assert screen.answer("failed").locator(".problem").inner_text() == problem
        screen.find("#clear").click()


def test_what_a_model_or_a_person_writes_is_never_markup(screen):
    title = screen.page.title()
    screen.set(schema=json.dumps({"enum": [MARKUP]}), max_tokens="300")
    text = screen.ask(MARKUP)
    assert json.loads(text) == MARKUP
    screen.find("#schema-on").uncheck()
    words = f"**{MARKUP}** `{MARKUP}`\n```html\n{MARKUP}\n```\n{MARKUP}"
    chunk = {"id": "1", "choices": [{"delta": {"content": words}, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    screen.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    screen.send("More")
    answer = screen.answer()
    assert answer.locator(".text").inner_text().count(MARKUP) == 4
    assert answer.locator("pre code").inner_text() == MARKUP
    assert answer.locator("strong").count() == answer.locator(".text > code").count() == 1
    assert screen.find("article img, article b, article script").count() == 0
    assert screen.page.title() == title


def test_a_very_long_answer_is_shown_as_it_was_written(screen):
    words = "**b** `c` " * 100_000
    chunk = {"id": "1", "choices": [{"delta": {"content": words}, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    screen.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    screen.send("Go on")
    answer = screen.answer()
    assert answer.locator(".text").evaluate("node => node.textContent") == words
    assert answer.locator(".text *").count() == 0
    assert "shown as it was written" in answer.locator(".stats").inner_text()


def test_thinking_is_shown_apart(screen):
    chunks = [
        {"id": "1", "choices": [{"delta": {"reasoning_content": "Hm, "}, "finish_reason": None}]},
        {"id": "1", "choices": [{"delta": {"reasoning_content": "well."}, "finish_reason": None}]},
        {"id": "1", "choices": [{"delta": {"content": "Yes."}, "finish_reason": "stop"}]},
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    screen.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    assert screen.ask("Hello") == "Yes."
    screen.find("article details summary").click()
    assert screen.find("article details pre").inner_text() == "Hm, well."


def test_the_keyboard_is_enough(screen):
    press, page = screen.page.keyboard.press, screen.page

    def focused():
        return page.evaluate("document.activeElement.id || document.activeElement.className")

    screen.set(max_tokens="5")
    screen.ask("Hello")
    screen.find("#message").focus()
    seen = []
    while "skip" not in seen:
        press("Shift+Tab")
        seen.append(focused())
        outlined = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outlined != "none", f"{seen[-1]} does not show that it has the focus"
        assert len(seen) < 60
    assert {"again", "conversation", "engine-button", "theme-button", "model"} <= set(seen)
    press("Enter")
    page.keyboard.type("One line")
    assert focused() == "message"
    press("Shift+Enter")
    page.keyboard.type("and another")
    screen.expect("#message").to_have_value("One line\nand another")
    screen.find("#max_tokens").fill("")
    screen.find("#message").focus()
    press("Enter")
    screen.answer("streaming")
    press("Escape")
    screen.answer("stopped")
    assert focused() == "message"
