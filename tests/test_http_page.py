"""The page at `/`: static, without anything from outside, and at work in a real browser."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

import mainspring.web
from browser import BINARY, Browser
from daemons import short_folder
from http_servers import HttpServer
from mainspring.web.page import Page

PAGE = (Path(mainspring.web.__file__).parent / "page.html").read_text()


def test_the_page_has_nothing_from_outside_and_writes_only_text() -> None:
    assert not re.search(r"https?:|//cdn|@import|src=|\burl\(", PAGE)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE)
    policy = dict(Page()._headers)[b"content-security-policy"].decode()
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[HttpServer]:
    (folder / "keys").write_text("sk-one one\n")
    started = HttpServer(folder, "--api-key-file", str(folder / "keys"), "--served-model-name", "spring").wait_ready()
    yield started
    started.end()


@pytest.fixture
def browser(folder: Path, tmp_path: Path) -> Iterator[Browser]:
    if BINARY is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    started = Browser(tmp_path / "profile")
    yield started
    started.end()


@pytest.mark.slow
def test_the_page_needs_no_key_but_shows_nothing_without_one(server: HttpServer) -> None:
    answer = httpx.get(server.url)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.text == PAGE
    assert httpx.get(f"{server.url}/metrics").status_code == 401


@pytest.mark.slow
def test_a_talk_and_the_status_in_a_browser(server: HttpServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.until("!document.getElementById('key').hidden")  # the server wants a key
    browser.run("""
        document.getElementById('key').value = 'sk-one';
        document.getElementById('key').dispatchEvent(new Event('change'));
    """)
    assert browser.until("document.getElementById('model').value")
    browser.until("before !== null")  # the page has counted tokens once: what follows shows as a rate
    ask = """
        document.getElementById('text').value = %r;
        document.getElementById('ask').requestSubmit();
    """
    browser.run(ask % "What is the capital of France?")
    browser.until("document.getElementById('send').textContent === 'Send' && messages.length === 2")
    assert browser.run("document.querySelectorAll('.turn .content')[1].textContent") == "Paris"
    browser.run(ask % "Tell me a story about a fox. <b>x</b>")
    browser.until("document.querySelector('.speed')?.textContent.includes('per second')")
    browser.until("messages.length === 4")
    assert browser.run("document.querySelectorAll('.turn .content b').length") == 0
    assert browser.run("document.querySelectorAll('.turn .content')[2].textContent").endswith("<b>x</b>")
    assert len(browser.run("messages[3].content")) > 5
    browser.until("Number(document.getElementById('rate').textContent) > 0 || rates.some((one) => one > 0)")
    shown = browser.run("""Object.fromEntries(['state', 'running', 'waiting', 'cache', 'restarts'].map(
        (id) => [id, document.getElementById(id).textContent]))""")
    assert shown == {"state": "serves", "running": "0", "waiting": "0", "cache": shown["cache"], "restarts": "0"}
    assert re.fullmatch(r"\d+\.\d %", shown["cache"])
    # Before it had the key, the server answered with status 401.
    assert [problem for problem in browser.problems if "401 (Unauthorized)" not in problem] == []
    browser.run("document.getElementById('clear').click()")
    browser.run("""
        const lengths = new Set();
        new MutationObserver(() => lengths.add(document.getElementById('talk').textContent.length)).observe(
            document.getElementById('talk'), { childList: true, subtree: true });
    """)
    browser.run(ask % "Tell me a long story about a fox.")
    browser.until("messages.length === 2 && !!document.querySelector('.speed')")
    assert browser.run("document.querySelectorAll('.turn').length") == 2
    assert browser.run("lengths.size") > 10  # it was shown as it came
    if path := os.environ.get("MAINSPRING_SCREENSHOT"):  # for docs/serving.md
        browser.screenshot(Path(path))


@pytest.mark.slow
def test_an_answer_is_stopped(server: HttpServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.run("sessionStorage.setItem('key', 'sk-one')")
    browser.open(f"{server.url}/?again")
    browser.until("document.getElementById('model').value")
    browser.run("""
        document.getElementById('text').value = 'Tell me a story about a fox.';
        document.getElementById('ask').requestSubmit();
    """)
    browser.until("document.querySelectorAll('.turn .content')[1]?.textContent.length > 5")
    if browser.run("document.getElementById('send').textContent") == "Stop":
        browser.run("document.getElementById('ask').requestSubmit()")
    browser.until("document.getElementById('send').textContent === 'Send'")
    assert browser.run("document.querySelector('.error')") is None
