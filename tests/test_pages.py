"""The pages of the documentation that a reader follows: every code block is executed, from top to bottom of a page."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, Answer, replay_in

DOCS = REPOSITORY / "docs"
PAGES = [
    *(DOCS / f"{name}.md" for name in ("index", "start", "concepts", "hooks")),
    *sorted((DOCS / "guides").glob("*.md")),
]
ATTENTION = DOCS / "guides" / "attention.md"
# These pages use the model that the first one trains.
SERIES = [DOCS / "guides" / f"{name}.md" for name in ("induction", "causal_tracing", "linear_steering")]
BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", re.M | re.S)
FILE = re.compile(r"\A(?:# @package _global_\n)?# ([\w./-]+\.(?:py|yaml))$", re.M)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # raised by Lightning with this version of PyTorch
@pytest.mark.parametrize(
    "pages",
    [
        *([page] for page in PAGES if page not in (*SERIES, ATTENTION)),
        *(pytest.param(pages, marks=pytest.mark.slow) for pages in ([ATTENTION], SERIES)),
    ],
    ids=lambda pages: str(pages[0].relative_to(DOCS)),
)
def test_blocks_of_a_page_run(
    pages: Sequence[Path], cli: Callable[..., Answer], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(workdir))
    for page in pages:
        run_blocks(page, cli, workdir)


def run_blocks(page: Path, cli: Callable[..., Answer], workdir: Path) -> None:
    namespace: dict[str, object] = {"__name__": "page"}
    for _, language, text in BLOCK.findall(page.read_text()):
        if file := FILE.match(text):
            path = workdir / file[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif language == "python":
            with contextlib.redirect_stdout(None):
                exec(compile(text, str(page), "exec", dont_inherit=True), namespace)
        elif language == "yaml":
            yaml.safe_load(text)
        elif language == "sh":
            for line in re.sub(r" \\\n\s*", " ", text).splitlines():
                if line.startswith("python -m instrument "):
                    answer = cli(*shlex.split(line, comments=True)[3:])
                elif line.startswith("python -m instrument.replay "):
                    answer = replay_in(workdir, *shlex.split(line, comments=True)[3:])
                else:
                    continue
                assert answer.code == 0, (line, answer.err)


def test_code_blocks_of_the_pages_are_found() -> None:
    languages = [language for page in PAGES for _, language, _ in BLOCK.findall(page.read_text())]
    assert languages.count("python") > 20
    assert languages.count("sh") > 5
