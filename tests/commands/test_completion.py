"""Shell completion of `instrument`: verbs, options, choices and overrides."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import tiered

from instrument.commands import completion
from instrument.commands.completion import SCRIPTS

BASH = """
source completion
COMP_LINE=$1 COMP_POINT=${#1}
_instrument
echo ${#COMPREPLY[@]}
printf '%s\\n' "${COMPREPLY[@]}"
"""
CASES = {
    "instrument re": ["report", "reference", "replay", "recover"],
    "instrument diff runs/a runs/b --st": ["--steps"],
    "instrument export runs/a --to te": ["tensorboard"],
    "instrument report runs/a ": [],  # the shell completes files
    "instrument reference ": ["make", "show", "check"],
    "instrument completion ": ["bash", "zsh", "fish"],
    "instrument +exp=mnist_ho": ["+exp=mnist_hooks"],
    "instrument plan model=mlp +exp=mnist_ho": ["+exp=mnist_hooks"],
    "instrument run -m model=mlp train.ste": ["train.steps="],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the script of each shell, and a command `instrument` on the PATH."""
    for shell, script in SCRIPTS.items():
        (tmp_path / shell).write_text(script)
    command = tmp_path / "instrument"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m instrument "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    return tmp_path


def printed(folder: Path, *command: str) -> list[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_only_the_shells_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        completion.main(["tcsh"])
    assert "invalid choice: 'tcsh' (choose from 'bash', 'zsh', 'fish')" in capsys.readouterr().err


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "line",
    tiered(CASES, [line for line in CASES if line not in ("instrument completion ", "instrument +exp=mnist_ho")]),
)
def test_bash_completes(folder: Path, line: str) -> None:
    count, *words = printed(folder, "bash", "-c", BASH.replace("completion", "bash", 1), "bash", line)
    prefix = "" if "=" not in line.rsplit(maxsplit=1)[-1] else line.rsplit(maxsplit=1)[-1].partition("=")[0] + "="
    assert [prefix + word for word in words] == CASES[line]
    assert int(count) == len(words)  # without candidates, Bash completes files


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fish") is None, reason="requires fish")
@pytest.mark.parametrize("line", ["instrument diff runs/a runs/b --st", "instrument plan model=mlp +exp=mnist_ho"])
def test_fish_completes(folder: Path, line: str) -> None:
    assert printed(folder, "fish", "-c", f"source fish; complete -C '{line}'") == CASES[line]


@pytest.mark.spread(1)
@pytest.mark.skipif(shutil.which("zsh") is None, reason="requires zsh")
@pytest.mark.parametrize("line", ["instrument re", "instrument run -m model=mlp train.ste"])
def test_zsh_completes(folder: Path, line: str) -> None:
    stubs = "compdef() { :; }; compadd() { print -l $names; }; source ./zsh"
    assert printed(folder, "zsh", "-fc", f"{stubs}; words=({line}); CURRENT=$#words; _instrument") == CASES[line]
