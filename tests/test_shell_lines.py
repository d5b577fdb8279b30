"""Shell commands in docs and docstrings: bash splits them into the same words as they are written."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
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


def words_in_bash(line: str, folder: Path) -> list[str] | str:
    """Return the words that bash passes to a command, or the error text if bash refuses the line."""
    answer = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    return answer.stderr if answer.returncode else answer.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    "file", [file for file in FILES if any(lines_of(file))], ids=lambda file: str(file.relative_to(REPOSITORY))
)
def test_bash_passes_command_words_unchanged(file: Path, tmp_path: Path) -> None:
    for line in lines_of(file):
        command = VARIABLE.sub(r"\\$", re.split(r" \|\| | && | # ?", line)[0].strip())
        if file.suffix == ".py" and any(sign in command for sign in SYNOPSIS):
            continue
        assert words_in_bash(command, tmp_path) == shlex.split(command), line


def test_commands_of_the_pages_are_found() -> None:
    assert sum(len(list(lines_of(file))) for file in FILES if file.suffix == ".md") > 80


@pytest.mark.parametrize("line", ["make seed=range(0,8)", "make hooks.a={x:1,y:2}", "make 'seed=1"])
def test_missing_quotes_are_detected(line: str, tmp_path: Path) -> None:
    words = words_in_bash(line, tmp_path)
    assert isinstance(words, str) or words != line.split()
