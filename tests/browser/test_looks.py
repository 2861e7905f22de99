"""How the page looks: contrast and labels, narrow screens, dark and light. The pictures are for people to look at."""

from __future__ import annotations

import pytest

from tests.browser.conftest import crowd

pytestmark = pytest.mark.slow

PHONE = {"width": 390, "height": 844}


@pytest.fixture
def axe():
    module = pytest.importorskip("axe_playwright_python.sync_playwright")

    def check(screen):
        found = module.Axe().run(screen.page, options={"resultTypes": ["violations"]}).response["violations"]
        told = [f"{v['id']} ({v['impact']}): {node['html'][:150]}" for v in found for node in v["nodes"]]
        assert not told, "\n".join(told)

    return check


def talk(screen):
    screen.set(max_tokens="30", temperature="0.8", system="Be brief.")
    screen.ask("Hello")
    screen.set(top_p="1")
    screen.page.evaluate("document.getElementById('settings').open = false")


def overflow(screen):
    return screen.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_labels_are_right(open_page, server, axe, scheme):
    screen = open_page(server, color_scheme=scheme, bypass_csp=True).connected()
    talk(screen)
    with crowd(server, 4):
        screen.expect("#figure-running").to_have_text("4")
        axe(screen)
        screen.shoot(f"desktop-{scheme}")
    screen.page.route("**/v1/chat/completions", lambda route: route.abort())
    screen.send("Hello")
    screen.answer("failed")
    screen.find("#settings summary").click()
    screen.find("#schema-on").check()
    screen.find("#schema").fill("{")
    axe(screen)
    screen.shoot(f"settings-{scheme}")
    screen.expect("#key-button").to_be_hidden()  # nobody asked for a key
    screen.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=401, json={}))
    screen.find("#schema-on").uncheck()
    screen.send("Hello")
    screen.expect("#key-dialog").to_be_visible()
    screen.expect("#key-button").to_be_visible()
    axe(screen)


@pytest.mark.parametrize("width", [390, 320])
def test_a_phone_shows_one_column_without_scrolling_sideways(open_page, server, axe, width):
    screen = open_page(server, viewport={**PHONE, "width": width}, bypass_csp=True).connected()
    screen.expect("#engine").to_be_hidden()
    assert overflow(screen) <= 0
    talk(screen)
    screen.shoot(f"phone-{width}")
    screen.set()
    assert overflow(screen) <= 0
    screen.find("#settings summary").click()
    screen.find("#engine-button").click()
    screen.expect("#engine").to_be_visible()
    assert overflow(screen) <= 0
    if width == PHONE["width"]:
        axe(screen)
    screen.shoot(f"phone-{width}-engine", full_page=True)
    boxes = [screen.find(name).bounding_box() for name in ("#engine", "main")]
    assert boxes[0]["x"] == boxes[1]["x"] == 0, "one below the other"


def test_the_theme_can_be_chosen_and_is_kept(open_page, server):
    screen = open_page(server, color_scheme="light").connected()

    def background():
        return screen.page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    screen.find("#theme-button").click()
    assert screen.find("#theme-button").inner_text() == "Theme: light" and background() == light
    screen.find("#theme-button").click()
    assert screen.find("#theme-button").inner_text() == "Theme: dark" and background() != light
    screen.page.reload()
    assert background() != light
    screen.find("#theme-button").click()
    assert background() == light


def test_nothing_moves_for_those_who_do_not_want_it(open_page, server):
    screen = open_page(server, reduced_motion="reduce").connected()
    screen.send("Go on")
    screen.answer("streaming")
    animation = "getComputedStyle(document.querySelector('article.assistant .text'), '::after').animationName"
    assert screen.page.evaluate(animation) == "none"
    screen.page.keyboard.press("Escape")


def test_the_first_look(open_page, server):
    screen = open_page(server).connected()
    screen.expect("#welcome").to_be_visible()
    screen.shoot("first")
    screen.find("#engine-button").click()
    screen.expect("#engine").to_be_hidden()
    screen.find("#suggestions button").first.click()
    screen.answer("streaming")
    screen.page.keyboard.press("Escape")
    screen.answer("stopped")
