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

import instrument

if TYPE_CHECKING:
    from playwright.sync_api import Browser


# A site of two pages, with the theme, the plugins and the search of the whole one.
SMALL = f"""
INHERIT: {REPOSITORY / "mkdocs.yml"}
docs_dir: {REPOSITORY / "docs"}
theme: {{custom_dir: {REPOSITORY / "docs" / "theme"}}}
hooks: [{REPOSITORY / "docs" / "theme" / "search_order.py"}]
exclude_docs: "*\\n!/index.md\\n!/start.md\\n!/assets/"
nav: [index.md, start.md]
validation: {{links: {{not_found: info}}}}
"""


@pytest.fixture(scope="module", params=["small", pytest.param("whole", marks=pytest.mark.slow)])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    if request.param == "whole":
        return build(REPOSITORY / "mkdocs.yml", folder)
    configuration = tmp_path_factory.mktemp("configuration") / "mkdocs.yml"
    configuration.write_text(SMALL)
    return build(configuration, folder)


def build(configuration: Path, folder: Path) -> Path:
    """Build a site in strict mode, in which a warning is an error."""
    options = ("--strict", "--quiet", "-f", configuration, "--site-dir", folder)
    command = [sys.executable, "-m", "mkdocs", "build", *options]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_site_requests_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=[\"']?(https?:[^\"' >]+)", page.read_text())
        loaded += re.findall(
            r"<link[^>]+rel=[\"']?(?:stylesheet|preconnect|icon)[^>]+href=[\"']?(https?:[^\"' >]+)", page.read_text()
        )
        assert loaded == [], page


@pytest.mark.slow
@pytest.mark.parametrize("site", ["whole"], indirect=True)
def test_search_works_from_a_folder(site: Path, browser: Browser) -> None:
    requests: list[str] = []
    with browser.new_page(viewport={"width": 1400, "height": 900}) as page:
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / "start.html").as_uri())
        page.fill(".md-search__input", "saturated_fraction")
        page.locator(".md-search-result__item").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 1400
    assert [url for url in requests if not url.startswith("file:")] == []


def indexed(site: Path) -> dict[str, float]:
    """Return the factor of the score of each page in the search."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    return {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in index["docs"]}


@pytest.mark.slow
def test_search_index_has_every_page_and_prefers_guides(site: Path) -> None:
    found = indexed(site)
    assert found["start.html"] > 1
    if "changelog.html" in found:
        assert found["sweeps.html"] == found["guides/nan.html"] == found["start.html"]
        assert found["reference/actions.html"] == 1
        assert 1 > found["gallery/he_init.html"] == found["architecture.html"] == found["changelog.html"]
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"404.html"}
    assert "start.html" in pages
    assert {page for page in pages if page not in found and page != "index.html"} == set()


@pytest.mark.slow
@pytest.mark.parametrize("site", ["whole"], indirect=True)
def test_no_page_is_wider_than_a_phone(site: Path, browser: Browser) -> None:
    with browser.new_page(viewport={"width": 400, "height": 800}) as page:
        for file in sorted(site.rglob("*.html")):
            page.goto(file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, file


@pytest.mark.slow
@pytest.mark.parametrize("site", ["whole"], indirect=True)
def test_whole_site_has_every_page_and_member(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 25
    text = (site / "reference" / "api.html").read_text()
    for name in ("attach", "Probe.end_step", "load", "Run.tensors", "Context.generator", "plot.heatmap"):
        assert name in text, name


def test_reference_has_every_public_name() -> None:
    named = re.findall(r"^::: ([\w.]+)$", (REPOSITORY / "docs" / "reference" / "api.md").read_text(), re.M)
    of_errors = {name for name in instrument.__all__ if name.endswith(("Error", "Warning"))}
    assert set(instrument.__all__) - of_errors <= {part for name in named for part in name.split(".")}
    assert "instrument.errors" in named
