"""Keys, and servers that go and come back."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.slow

STORED = "[sessionStorage.getItem('hf_paged.key'), localStorage.getItem('hf_paged.key')]"


@pytest.fixture(scope="module")
def guarded(make_server):
    return make_server(api_key=("sk-right",))


def type_key(screen, key, keep=False):
    screen.expect("#key-dialog").to_be_visible()
    screen.find("#key").fill(key)
    screen.find("#key-keep").set_checked(keep)
    screen.find("#key").press("Enter")


def test_a_wrong_key_is_refused_and_the_right_one_typed_once_is_enough(open_page, guarded):
    screen = open_page(guarded)
    requests = []
    screen.page.on("request", lambda request: requests.append(request))
    screen.expect("#key-title").to_have_text("This server needs a key")
    screen.expect("#key-problem").to_be_hidden()
    type_key(screen, "sk-wrong")
    screen.expect("#key-problem").to_contain_text("refused this key")
    screen.shoot("wrong-key")
    type_key(screen, "sk-right")
    screen.connected()
    screen.expect("#key-dialog").to_be_hidden()
    screen.set(max_tokens="5")
    assert screen.ask("Hello")
    assert screen.page.evaluate(STORED) == ['"sk-right"', None]
    assert not any("sk-" in request.url for request in requests) and "sk-" not in screen.page.url
    screen.page.reload()
    screen.connected()


def test_a_key_is_kept_only_if_that_is_wished(open_page, guarded):
    screen = open_page(guarded)
    type_key(screen, "sk-right", keep=True)
    screen.connected()
    assert screen.page.evaluate(STORED) == ['"sk-right"'] * 2
    screen.find("#key-button").click()
    type_key(screen, "sk-right", keep=False)
    screen.expect("#key-dialog").to_be_hidden()
    assert screen.page.evaluate(STORED) == ['"sk-right"', None]
    screen.connected()


def test_without_a_key_the_page_says_what_is_missing_and_can_be_helped(open_page, guarded):
    screen = open_page(guarded)
    screen.expect("#key-dialog").to_be_visible()
    screen.page.keyboard.press("Escape")
    screen.expect("#connection").to_have_text("A key is needed")
    screen.expect("#engine-problem").to_contain_text("Type the key in")
    screen.send("Hello")
    screen.expect("#key-dialog").to_be_visible()
    screen.find("#key-cancel").click()
    assert "needs a key" in screen.answer("failed").locator(".problem").inner_text()
    screen.find("#key-button").click()
    type_key(screen, "sk-right")
    screen.connected()
    screen.set(max_tokens="5")
    screen.find("button.again").click()
    screen.answer()


def test_a_key_that_the_chat_asked_for_unlocks_the_whole_page_and_typing_it_is_not_timed(open_page, guarded):
    screen = open_page(guarded)
    type_key(screen, "sk-wrong")
    screen.expect("#key-problem").to_contain_text("refused this key")
    screen.find("#key-cancel").click()
    screen.expect("#connection").to_have_text("A key is needed")
    screen.set(max_tokens="5")
    screen.send("Hello")
    screen.expect("#key-dialog").to_be_visible()
    screen.page.evaluate("const now = performance.now.bind(performance); performance.now = () => now() + 1e6")
    type_key(screen, "sk-right")
    stats = screen.answer().locator(".stats").inner_text()
    [(number, unit)] = re.findall(r"first token after ([\d.]+) (m?s)", stats)
    assert unit == "ms" or float(number) < 900, "the clock went on by 1000 s while the key was typed"
    screen.connected()
    screen.expect("#engine-problem").to_be_hidden()
    screen.expect("#model").to_have_value("tiny")


def test_a_restart_is_said_and_survived_even_with_another_key_and_model(open_page, make_server):
    first = make_server()
    screen = open_page(first).connected()
    screen.set(max_tokens="5")
    screen.ask("Hello")
    first.__exit__()
    screen.expect("#connection").to_have_text("Connection lost, reconnecting…")
    screen.expect("#engine-problem").to_be_hidden()
    screen.send("Are you there?")
    assert "cannot be reached" in screen.answer("failed").locator(".problem").inner_text()
    screen.shoot("connection-lost")
    make_server(first.port, api_key=("sk-new",), served_model_name=("other",), num_blocks=100)
    type_key(screen, "sk-new")
    screen.connected()
    screen.expect("#model").to_have_value("other")
    screen.expect("#total-0").to_have_text("100")
    screen.find("button.again").click()
    screen.answer()
    assert screen.find("article").count() == 4, "the conversation went on"


def test_an_answer_that_breaks_off_with_its_server_is_kept(open_page, make_server):
    server = make_server()
    screen = open_page(server).connected()
    screen.send("Go on and on")
    screen.answer("streaming")
    server.__exit__()
    answer = screen.answer("failed")
    assert "broke off" in answer.locator(".problem").inner_text()
    assert answer.locator(".text").inner_text()
    screen.expect("#connection").to_have_attribute("data-state", "lost")
    make_server(server.port)
    screen.connected()


def test_a_server_without_events_is_told_apart_from_one_that_is_gone(open_page, make_server):
    server = make_server()
    screen = open_page(server)
    screen.page.route("**/engine/events", lambda route: route.fulfill(status=404, json={"error": {"message": "No."}}))
    screen.page.reload()
    screen.expect("#connection").to_have_text("Connected")
    screen.expect("#engine-problem").to_contain_text("does not show its engine")
    screen.expect("#model").to_have_value("tiny")


def test_the_page_works_behind_a_prefix(open_page, make_server):
    server = make_server(root_path="/api")
    for path in ("/api/", "/api", "/"):
        screen = open_page(server, path).connected()
        paths = []
        screen.page.on("request", lambda request, paths=paths: paths.append(request.url.removeprefix(server.url)))
        screen.set(max_tokens="5")
        assert screen.ask("Hello")
        assert f"{path.rstrip('/')}/v1/chat/completions" in paths
