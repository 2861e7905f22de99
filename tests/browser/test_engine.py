"""The engine view beside the chat."""

from __future__ import annotations

import base64
import json
import re

import pytest

from tests.browser.conftest import crowd
from tests.serving.servers import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(make_server):
    return make_server(num_blocks=600, max_num_seqs=6)


@pytest.fixture
def screen(open_page, server):
    return open_page(server).connected()


def number(screen, name):
    return int(screen.find(f"#{name}").inner_text().replace(",", ""))


def totals(screen):
    return [number(screen, f"total-{kind}") for kind in range(4)]


def picture(screen):
    return screen.find("canvas.pool").evaluate("canvas => canvas.toDataURL()")


def test_the_picture_of_the_pool_moves_under_load_and_comes_to_rest(screen, server):
    blocks = server.service.engine.engine.live.block_manager
    before = picture(screen)
    assert totals(screen)[2:] == [0, 0] and sum(totals(screen)) == 600
    with crowd(server, 9, max_tokens=400):
        screen.expect("#figure-running").to_have_text("6")
        screen.expect("#figure-waiting").to_have_text("3")
        wait_until(lambda: totals(screen)[2] > 0 and totals(screen)[3] > 0)
        during = picture(screen)
        assert during != before
        wait_until(lambda: picture(screen) != during)
        assert sum(totals(screen)) == 600
        rows = screen.find("#requests li")
        assert rows.count() == 9
        texts = rows.all_inner_texts()
        assert sum("waiting" in text for text in texts) == 3
        assert all(re.search(r"crowd-\d", text) for text in texts)
        assert re.search(r"prompt \d+/\d+ · answer \d+/400", texts[0])
        screen.send("Hello")
        screen.expect("#requests").to_contain_text("this page’s")
        screen.shoot("under-load")
        screen.page.keyboard.press("Escape")
    screen.expect("#figure-running").to_have_text("0")
    screen.expect("#requests-more").to_have_text("None now.")
    wait_until(lambda: totals(screen)[2:] == [0, 0])
    assert totals(screen)[1] == len(blocks.indexes[0])
    assert number(screen, "figure-preemptions") == server.service.metrics.stats.num_preemptions


def test_pointing_at_a_block_names_its_request_and_how_full_it_is(screen, server):
    with crowd(server, 2, "seen"):
        screen.expect("#figure-running").to_have_text("2")
        manager = server.service.engine.engine.live.block_manager
        wait_until(lambda: all(len(blocks) > 21 for _, (blocks,) in manager.tables()))
        wait_until(lambda: totals(screen)[2] > 20)
        canvas, info = screen.find("canvas.pool"), screen.find("#block-info")
        box = canvas.bounding_box()
        columns, step = (int(canvas.get_attribute(f"data-{name}")) for name in ("columns", "step"))

        def said_of(block):
            x, y = (block % columns + 0.5) * step, (block // columns + 0.5) * step
            screen.page.mouse.move(box["x"] + x, box["y"] + y)
            return info.inner_text()

        [(one, (blocks,)), (other, _)] = manager.tables()
        shared = said_of(blocks[0])
        names = {one.request_id, other.request_id}
        assert shared.startswith(f"Block {blocks[0]}: shared by 2 requests (")
        assert names == set(re.findall(r"chatcmpl-seen-\d-\w{8}", shared))
        assert screen.find("#requests li.chosen").count() == 2
        full = said_of(blocks[20])
        assert full == f"Block {blocks[20]}: held by {one.request_id}, its tokens from 320 on, 16 of 16 slots filled."
        assert screen.find("#requests li.chosen").inner_text().startswith(one.request_id)
        screen.shoot("block")


def test_the_keyboard_goes_from_block_to_block(screen):
    canvas, info = screen.find("canvas.pool"), screen.find("#block-info")
    canvas.focus()
    for key, block in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 599)):
        canvas.press(key)
        assert info.inner_text().startswith(f"Block {block}:")
    canvas.press("ArrowUp")
    assert not info.inner_text().startswith("Block 599:")
    assert re.search("free|Free|cached|Cached", info.inner_text())


@pytest.mark.parametrize(("width", "num_used"), [(1360, 3), (390, 3), (390, 3000), (1360, 13_399)])
def test_of_a_large_pool_what_was_used_is_drawn_in_squares_that_can_be_pointed_at(open_page, server, width, num_used):
    def answer(route):
        """Tells once of a pool whose first blocks are cached, three of them held; a page that asks again waits."""
        if answered:
            return
        answered.append(route)
        with server.client() as client, client.stream("GET", "/engine/events") as events:
            told = json.loads(next(line for line in events.iter_lines() if line.startswith("data: "))[6:])
        bits = "".join("1" if block < num_used else "0" for block in range(13_400))
        told["marks"] = [base64.b64encode(int(bits, 2).to_bytes(len(bits) // 8)).decode()]
        told["about"]["num_blocks"], told["tables"] = [13_399], {"one": [0, [[0, 1, num_used - 1]]]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(told)}\n\n")

    answered = []
    screen = open_page(server, viewport={"width": width, "height": 844}).connected()
    screen.page.route("**/engine/events", answer)
    screen.page.reload()
    if width == 390:
        screen.find("#engine-button").click()
    screen.expect("#figure-held").to_have_text("0.02 %")
    assert totals(screen) == [13_399 - num_used, num_used - 3, 3, 0]
    canvas, info = screen.find("canvas.pool"), screen.find("#block-info")
    columns, step = (int(canvas.get_attribute(f"data-{name}")) for name in ("columns", "step"))
    assert step >= 8 and columns * step <= canvas.bounding_box()["width"]
    canvas.hover(position={"x": 2.5 * step, "y": step / 2})
    screen.expect("#block-info").to_contain_text("Block 2:")
    canvas.press("End")
    last = int(re.match(r"Block (\d+):", info.inner_text())[1])
    assert max(500, num_used) <= last + 1 <= 13_399
    more = screen.find("#pools .hint").inner_text()
    assert more == (f"… and {13_398 - last:,} more free blocks" if last < 13_398 else "")
    screen.shoot(f"large-pool-{width}-{num_used}")


def test_latencies_are_drawn(screen, server):
    with crowd(server, 1, max_tokens=300) as threads:
        threads[0].join(60)
    for title in ("Time to first token", "Between two tokens"):
        chart = screen.find("figure.chart", has_text=title)
        label = re.compile(rf"{title}: median [\d.]+ m?s, 99 % within [\d.]+ m?s")
        screen.expect(f"figure.chart:has-text('{title}') svg").to_have_attribute("aria-label", label)
        assert chart.locator("polyline, circle").count() >= 2


def test_a_full_house_is_said_and_the_chat_goes_on(screen, server, open_page):
    watchers = server.app.state.watchers
    limit, watchers._limit = watchers._limit, len(watchers)
    try:
        other = open_page(server)
        other.expect("#engine-problem").to_contain_text("pages watch the engine already")
        other.expect("#connection").to_have_attribute("data-state", "connected")
        other.set(max_tokens="5")
        other.ask("Hello")
    finally:
        watchers._limit = limit
    other.connected()
    other.expect("#engine-problem").to_be_hidden()


def test_a_page_that_nobody_sees_does_not_watch(screen, server):
    assert len(server.app.state.watchers) == 1
    script = """hidden => {
        Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    screen.page.evaluate(script, True)
    wait_until(lambda: len(server.app.state.watchers) == 0)
    screen.page.evaluate(script, False)
    wait_until(lambda: len(server.app.state.watchers) == 1)
    screen.expect("#connection").to_have_attribute("data-state", "connected")
