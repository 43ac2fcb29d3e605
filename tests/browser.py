"""A real browser for tests of the live page: Debian's chromium, headless, driven by playwright.

    page = tab(browser, url)

Where chromium is missing the test is skipped and says so, or fails if FEDQUEUE_REQUIRE_BROWSER is set. What a page
looked like lies under FEDQUEUE_SCREENSHOTS, if that names a folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Dialog, Page, sync_playwright

from tests.waiting import LONGEST, wait_for

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@contextmanager
def chromium() -> Iterator[Browser]:
    found = shutil.which("chromium")
    if found is None:
        reason = "needs Debian's chromium: apt-get install chromium"
        if os.environ.get("FEDQUEUE_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as driver:
        # Root has no sandbox of its own; a container has little shared memory.
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


class Tab:
    """A page, and all that it complained of or loaded meanwhile."""

    def __init__(self, browser: Browser, url: str, **look: Any) -> None:
        self.context = browser.new_context(viewport=look.pop("viewport", DESKTOP), **look)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(1000 * LONGEST)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._bytes: dict[str, int] = {}  # of each request
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._alerted)
        self.page.on("request", lambda request: self.asked.append(request.url))
        wire = self.context.new_cdp_session(self.page)
        wire.send("Network.enable")
        wire.on("Network.dataReceived", self._received)
        wire.on("Network.loadingFinished", self._finished)
        self.page.goto(url)

    def _alerted(self, dialog: Dialog) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _received(self, event: dict[str, Any]) -> None:
        """So far, of one that goes on."""
        request = event["requestId"]
        self._bytes[request] = self._bytes.get(request, 0) + int(event["dataLength"])

    def _finished(self, event: dict[str, Any]) -> None:
        self._bytes[event["requestId"]] = int(event["encodedDataLength"])

    @property
    def bytes(self) -> int:
        return sum(self._bytes.values())

    def shows(self, selector: str, text: str = "") -> None:
        """Waits for it."""
        script = """([selector, text]) => [...document.querySelectorAll(selector)].some(
            (one) => one.checkVisibility() && one.textContent.includes(text))"""
        self._wait(lambda: self.page.evaluate(script, [selector, text]), f"{text!r} in {selector}")

    def true(self, script: str) -> None:
        """Waits until it is. playwright's own waiting has the page evaluate text, which its policy forbids."""
        self._wait(lambda: self.page.evaluate(script), script)

    def _wait(self, true: Callable[[], Any], what: str) -> None:
        wait_for(lambda: bool(true()), what, lambda: f"{self.complaints}\n{self.page.inner_text('body')}", every=0.05)

    def is_ready(self) -> None:
        self.true("document.querySelector('#log tbody tr') && fedqueue.timeline.data !== null")

    def violations(self) -> list[str]:
        """Of the rules of accessibility, by axe."""
        found = Axe().run(self.page).response["violations"]
        return [f"{one['id']}: {[node['html'][:120] for node in one['nodes']]}" for one in found]

    def rows(self, table: str) -> list[list[str]]:
        """The cells of each row."""
        script = "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
        found: list[list[str]] = self.page.eval_on_selector_all(f"{table} tbody tr", script)
        return found

    def keep(self, name: str) -> None:
        folder = os.environ.get("FEDQUEUE_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)

    def close(self) -> None:
        self.context.close()


@contextmanager
def tab(browser: Browser, url: str, *, complains: bool = False, **look: Any) -> Iterator[Tab]:
    """`complains`: connections are lost on purpose."""
    made = Tab(browser, url, **look)
    try:
        yield made
        assert complains or not made.complaints, made.complaints
    finally:
        made.close()
