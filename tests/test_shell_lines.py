"""Shell commands in docs and docstrings: bash splits them into the same words as they are written."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import REPOSITORY
from waiting import TIMEOUT

FILES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "conf").rglob("*.yaml")),
    *sorted((REPOSITORY / "instrument").rglob("*.py")),
]
START = r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:python -m |torchrun |ray |pip |make |source \.)"
LINE = re.compile(rf"^(?:#\s+| {{4,}})?({START}.*)$", re.MULTILINE)
IN_TEXT = re.compile(rf"`((?:[+~]{{0,2}}'?[a-z_][\w./]*=\S[^`\s]*)|~[\w.]+|{START}[^`\n]+)`")
VARIABLE = re.compile(r"\$(?=\w)")
SYNOPSIS = ("[", "...", "|")  # marks a usage line, such as `[--out FOLDER]`


def lines_of(file: Path) -> Iterator[str]:
    text = re.sub(r" \\\n\s+", " ", file.read_text())
    if file.suffix == ".py":
        yield from (line for line in LINE.findall(text) if "python -m" in line or "torchrun" in line)
        return
    yield from LINE.findall(text)
    if file.suffix == ".md":
        yield from IN_TEXT.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def words_in_bash(lines: Sequence[str], folder: Path) -> list[list[str]]:
    """Return the words that bash passes to the command of each line; no words if bash refuses the line."""
    script = r'for line; do eval "printf \"%s\\0\" $line"; printf "\\n\\0"; done'
    command = ["bash", "-c", script, "bash", *lines]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    return [text.split("\0")[:-1] for text in answer.stdout.split("\n\0")[:-1]]


@pytest.mark.spread(16)
@pytest.mark.parametrize(
    "file", [file for file in FILES if any(lines_of(file))], ids=lambda file: str(file.relative_to(REPOSITORY))
)
def test_bash_passes_command_words_unchanged(file: Path, tmp_path: Path) -> None:
    commands = [VARIABLE.sub(r"\\$", re.split(r" \|\| | && | # ?", line)[0].strip()) for line in lines_of(file)]
    if file.suffix == ".py":
        commands = [command for command in commands if not any(sign in command for sign in SYNOPSIS)]
    assert words_in_bash(commands, tmp_path) == [shlex.split(command) for command in commands]


def test_each_command_of_a_page_has_its_own_line() -> None:
    pages = "".join(file.read_text() for file in FILES if file.suffix == ".md")
    assert not re.findall(r"^ {4,}.*[a-z,:] +(?:make|python) [a-z].*$", pages, re.MULTILINE)


def test_commands_of_the_pages_are_found() -> None:
    assert sum(len(list(lines_of(file))) for file in FILES if file.suffix == ".md") > 80


@pytest.mark.parametrize("line", ["make seed=range(0,8)", "make hooks.a={x:1,y:2}", "make 'seed=1"])
def test_missing_quotes_are_detected(line: str, tmp_path: Path) -> None:
    words, following = words_in_bash([line, "make seed=1"], tmp_path)
    assert words != line.split()
    assert following == ["make", "seed=1"]
