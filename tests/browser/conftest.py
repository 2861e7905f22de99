"""The page in headless Chromium, beside a served tiny model. Screenshots for people go to build/screenshots.

chromium    the browser, for a module at a time: while it runs, the thread has an event loop of its own
server      a server on a socket, for a module
open_page   opens the page in a new, empty profile; at the end no script may have failed
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.servers import ROOT, ServerThread, chat, make_tiny_service
from tests.tools.tiny_checkpoint import tiny_checkpoint  # noqa: F401

SCREENSHOTS = ROOT / "build" / "screenshots"
# Without these Chromium asks its maker's hosts for news.
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no chromium on this machine")
    playwright.expect.set_options(timeout=60_000)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-quic", *QUIET]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def make_server(tiny_checkpoint: Path) -> Iterator[Callable[..., ServerThread]]:  # noqa: F811
    """Starts servers with settings of one's own."""
    with contextlib.ExitStack() as stack:

        def make(port: int = 0, **settings: Any) -> ServerThread:
            return stack.enter_context(ServerThread(calm(make_tiny_service(tiny_checkpoint, **settings)), port))

        yield make


@pytest.fixture(scope="module")
def server(make_server: Callable[..., ServerThread]) -> ServerThread:
    return make_server()


def calm(service: Any) -> Any:
    """Has a service write the same answers each time, without an end of their own, and no faster than one can watch."""
    service.engine.model.generation_config.temperature = 0.0
    service.engine.model.generation_config.eos_token_id = service.tokenizer.eos_token = None
    step = service.engine.engine.step

    def calm_step() -> bool:
        time.sleep(0.004)
        return step()

    service.engine.engine.step = calm_step
    return service


class Screen:
    """A page, and what a person does with it."""

    def __init__(self, page: Any, url: str):
        self.page = page
        self.errors: list[str] = []
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._note)
        page.goto(url)

    def _note(self, message: Any) -> None:
        # That a request was refused or not answered is what some tests are about.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def find(self, selector: str, **options: Any) -> Any:
        return self.page.locator(selector, **options)

    def expect(self, selector: str, **options: Any) -> Any:
        from playwright.sync_api import expect

        return expect(self.find(selector, **options))

    def connected(self) -> Screen:
        self.expect("#connection").to_have_attribute("data-state", "connected")
        self.expect("#figure-running").not_to_have_text("–")
        return self

    def set(self, **settings: str) -> None:
        """Fills in settings by their ids."""
        if not self.find("#settings").get_attribute("open"):
            self.find("#settings").evaluate("node => { node.open = true; }")
        for name, value in settings.items():
            if name == "schema":
                self.find("#schema-on").check()
            self.find(f"#{name}").fill(value)

    def send(self, text: str) -> None:
        self.find("#message").fill(text)
        self.find("#message").press("Enter")

    def answer(self, state: str = "done") -> Any:
        """The last answer, once it is in a state."""
        last = self.find("article.assistant").last
        self.expect("article.assistant >> nth=-1").to_have_attribute("data-state", state)
        return last

    def ask(self, text: str) -> str:
        self.send(text)
        return self.answer().locator(".text").inner_text()

    def shoot(self, name: str, **options: Any) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", **options)


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Screen]]:
    screens: list[Screen] = []

    def open_(server: ServerThread, path: str = "/", **options: Any) -> Screen:
        context = chromium.new_context(**{"viewport": {"width": 1360, "height": 900}, **options})
        screens.append(Screen(context.new_page(), server.url + path))
        return screens[-1]

    yield open_
    errors = [error for screen in screens for error in screen.errors]
    for screen in screens:
        screen.page.context.close()
    assert not errors, f"the page's scripts failed: {errors}"


@contextlib.contextmanager
def crowd(server: ServerThread, count: int, name: str = "crowd", **fields: Any) -> Iterator[list[threading.Thread]]:
    """Requests of others with a common beginning, whose answers go on for as long as they may."""

    def read(number: int) -> None:
        body = chat("We all begin alike. " * 12 + f"I am {number}.", max_tokens=2000, ignore_eos=True, stream=True)
        headers = {"X-Request-Id": f"{name}-{number}"}
        with (
            server.client(headers=headers) as client,
            client.stream("POST", "/v1/chat/completions", json={**body, **fields}) as answer,
        ):
            for _ in answer.iter_bytes():
                if over.is_set():
                    return

    over = threading.Event()
    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
