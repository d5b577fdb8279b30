"""Execution of the code blocks of a page of the documentation, from top to bottom."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, Answer, replay_in, run_in, working_in

from instrument.commands.convert import main as convert
from instrument.commands.diff import main as diff

DOCS = REPOSITORY / "docs"
OWN_TESTS = (
    "large_analyses",
    "megatron",
    "torchtitan",
)  # guides whose code needs other packages; each has a test of its own
# The home page has code of the README, which test_readme.py runs.
PAGES = [
    REPOSITORY / "AGENTS.md",
    *(DOCS / f"{name}.md" for name in ("start", "concepts", "hooks")),
    *sorted(page for page in (DOCS / "guides").glob("*.md") if page.stem not in OWN_TESTS),
    *sorted((DOCS / "gallery").glob("*.md")),
]
# These pages use the model that the first one trains.
SERIES = [DOCS / "guides" / f"{name}.md" for name in ("induction", "causal_tracing", "linear_steering")]
# Each of these pages describes the runs with seed 0 of the test that is named after it.
RESULTS = [page for page in PAGES if (REPOSITORY / f"tests/published_results/test_{page.stem}.py").exists()]
BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", re.M | re.S)
FILE = re.compile(r"\A(?:# @package _global_\n)?# ([\w./-]+\.(?:py|yaml))$", re.M)


def run_blocks(page: Path, cli: Callable[..., Answer], folder: Path, done: Collection[str] = ()) -> None:
    """Execute the blocks of a page: write files, run Python, parse YAML and run the commands of this package.

    Commands with arguments in `done` have run already.
    """
    namespace: dict[str, object] = {"__name__": "page"}
    for _, language, text in BLOCK.findall(page.read_text()):
        if file := FILE.match(text):
            path = folder / file[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif language == "python":
            with contextlib.redirect_stdout(None):
                exec(compile(text, str(page), "exec", dont_inherit=True), namespace)
        elif language == "yaml":
            yaml.safe_load(text)
        elif language == "sh":
            for line in re.sub(r" \\\n\s*", " ", text).splitlines():
                arguments = line.removeprefix("python -m instrument ")
                if arguments not in (line, *done):
                    answer = cli(*shlex.split(arguments, comments=True))
                    assert answer.code == 0, (line, answer.err)
                elif line.startswith("python -m instrument.convert "):
                    assert convert(shlex.split(line)[3:]) == 0
                elif line.startswith("python -m instrument.diff "):
                    assert diff(shlex.split(line)[3:]) in (0, 1), line
                elif line.startswith("python -m instrument.replay "):
                    answer = replay_in(folder, *shlex.split(line)[3:])
                    assert answer.code == 0, (line, answer.err)


def run_gallery_page(name: str, folder: Path) -> Path:
    """Execute the blocks of a page of the gallery in a folder, and return the folder of its runs, which have seed 0."""
    with working_in(folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        run_blocks(DOCS / "gallery" / f"{name}.md", partial(run_in, folder), folder)
    return folder / "runs"
