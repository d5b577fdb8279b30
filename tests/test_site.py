"""The documentation site: it builds in strict mode, requests nothing from other hosts, and its search has every page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import REPOSITORY
from waiting import TIMEOUT

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_site_requests_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=[\"']?(https?:[^\"' >]+)", page.read_text())
        loaded += re.findall(
            r"<link[^>]+rel=[\"']?(?:stylesheet|preconnect|icon)[^>]+href=[\"']?(https?:[^\"' >]+)", page.read_text()
        )
        assert loaded == [], page


@pytest.mark.slow
def test_search_works_from_a_folder(site: Path, browser: Browser) -> None:
    requests: list[str] = []
    with browser.new_page(viewport={"width": 1400, "height": 900}) as page:
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / "start.html").as_uri())
        page.fill(".md-search__input", "saturated_fraction")
        page.locator(".md-search-result__item").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 1400
    assert [url for url in requests if not url.startswith("file:")] == []


def test_search_index_has_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"404.html"}
    assert {page for page in pages if page not in found and page != "index.html"} == set()


def test_reference_has_every_public_name(site: Path) -> None:
    text = (site / "reference" / "api.html").read_text()
    for name in ("attach", "Probe.end_step", "load", "Run.tensors", "Context.generator", "plot.heatmap"):
        assert name in text, name
