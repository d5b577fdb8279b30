"""The pages of the documentation that a reader follows: every code block is executed, from top to bottom of a page.

Those of the pages in `SERIES` are executed in test_published_results.py, and those in `RESULTS` in the folder published_results.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY, Answer
from page_blocks import BLOCK, DOCS, PAGES, RESULTS, SERIES, run_blocks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # raised by Lightning with this version of PyTorch
@pytest.mark.filterwarnings(
    "ignore:.gradient_checkpointing.* is deprecated:FutureWarning"
)  # by TRL, with transformers 5.23
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=str(page.relative_to(REPOSITORY)), marks=pytest.mark.slow if page.parent.parent == DOCS else ()
        )
        for page in PAGES
        if page not in (*SERIES, *RESULTS)
    ],
)
def test_blocks_of_a_page_run(
    page: Path, cli: Callable[..., Answer], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(workdir))
    run_blocks(page, cli, workdir)


def test_code_blocks_of_the_pages_are_found() -> None:
    languages = [language for page in PAGES for _, language, _ in BLOCK.findall(page.read_text())]
    assert languages.count("python") > 20
    assert languages.count("sh") > 5
