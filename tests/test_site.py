"""The built site, as a reader sees it in Chromium: nothing is wider than the window.

apt-get install chromium; python -m pytest tests/test_site.py     # marked night
SITE_SCREENSHOTS=FOLDER ...                                        # keeps the pictures
"""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.documents import ROOT

pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: the site is not shown"),
]
# What lies in a box that scrolls by itself may be wider than it.
SCROLLS = ".md-typeset__scrollwrap, pre, .formula, .tabbed-labels"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = ["bash", "docs/build.sh", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    serve = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def pages(site: Path) -> list[str]:
    return sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))


@pytest.mark.parametrize("width", [500, 1300])
def test_no_page_is_wider_than_the_window(site, address, browser, tmp_path, width) -> None:
    kept = os.environ.get("SITE_SCREENSHOTS")
    folder = Path(kept) if kept else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    wide = {}
    for page in pages(site):
        browser.show(f"{address}/{page}", width, dark=page.startswith("api/"))
        browser.run("document.querySelectorAll('details').forEach(each => each.open = true)")
        picture = folder / f"{page.removesuffix('.html').replace('/', '-')}-{width}.png"
        picture.write_bytes(browser.screenshot())
        assert picture.stat().st_size > 10_000, f"{page}: an empty picture"
        inside, outside = browser.run(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        # Material hides what its column cannot hold: a cut word is not in scrollWidth.
        cut = browser.run(
            f"""[...document.querySelectorAll('.md-content__inner *')].filter(each =>
                !each.closest('{SCROLLS}') && each.getClientRects().length
                && each.getBoundingClientRect().right > innerWidth + 1
                ).map(each => each.outerHTML.slice(0, 90))"""
        )
        # On a wide window even a table fits, and nothing is hidden behind a scroll bar.
        scrolling = browser.run(
            """[...document.querySelectorAll('.md-typeset__scrollwrap')].filter(each =>
                each.scrollWidth > each.clientWidth).map(each => each.innerText.slice(0, 60))"""
        )
        if inside > outside or cut or (scrolling and width > 1000):
            wide[page] = inside, outside, cut[:3], scrolling
    assert len(pages(site)) > 30
    assert wide == {}


def test_a_wide_page_would_be_noticed(address, browser) -> None:
    browser.show(f"{address}/index.html", 500)
    browser.run("document.querySelector('article').style.width = '900px'")
    assert browser.run(
        "document.documentElement.scrollWidth > 500 || "
        "document.querySelector('article').getBoundingClientRect().right > 501"
    )
