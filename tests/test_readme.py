"""The README: its code blocks run, and its shown output matches the real output."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY, Answer
from training_runs import compose

from instrument.commands import verify
from instrument.commands.report import main as report
from instrument.training.experiment import Experiment

README = (REPOSITORY / "README.md").read_text()
BLOCKS = [(language, text) for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", README, re.M | re.S)]
EXAMPLE_RUN = "runs/mnist_hooks/2026-11-21_09-00-00-000000"


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCKS if found == language]


def instrument_commands() -> list[str]:
    return [line for text in blocks("sh") for line in text.splitlines() if line.startswith("python -m instrument")]


@pytest.fixture
def follow(
    cli: Callable[..., Answer], mnist_root: Path | None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Answer]:
    """Function that runs a command of the README, on MNIST if its files are available, without downloading."""
    if mnist_root is not None:
        monkeypatch.setenv("INSTRUMENT_DATA", str(mnist_root))

    def run(command: str) -> Answer:
        if command.startswith("python -m instrument.report "):
            monkeypatch.setattr("webbrowser.open", lambda url: Path(url.removeprefix("file://")).exists())
            return Answer(report(shlex.split(command)[3:]), "", "")
        wants_mnist = "+exp=mnist" in command and "data=" not in command
        offline = ["data.dataset.download=false"] if wants_mnist and mnist_root is None else []
        if command.startswith("python -m instrument.verify "):
            monkeypatch.setattr("instrument.commands.hydra_main.command", lambda job: verify.main())
            command = command.replace("instrument.verify", "instrument", 1)
        # The 10,000 test images of MNIST would take most of the time.
        few = ["data.eval_slice.stop=500"] if wants_mnist else []
        return cli(*shlex.split(command.removeprefix("python -m instrument")), *offline, *few)

    return run


def test_make_commands_of_the_readme_are_targets() -> None:
    commands = [line for text in blocks("sh") for line in text.splitlines() if line.startswith("make")]
    assert commands == ["make demo", "make test"]
    for command in commands:
        dry = subprocess.run([*command.split(), "-n"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert dry.returncode == 0, dry.stderr
        assert ("-m instrument +exp=mnist_hooks" if "demo" in command else "-m pytest") in dry.stdout


@pytest.mark.slow
def test_commands_and_code_of_the_readme_run(
    follow: Callable[[str], Answer], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    for language, text in BLOCKS:
        if language == "sh":
            for line in [line for line in text.splitlines() if line.startswith("python -m instrument")]:
                answer = follow(with_newest(line))
                assert answer.code == 0, (line, answer.out, answer.err)
                done.append(line)
        elif named := re.search(r"^# (conf/exp/mine\.yaml)$", text, re.M):
            file = workdir / named[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        elif language == "text":
            answer = follow("python -m instrument +exp=mine hooks.tame.layers=layer.2")
            assert answer.code == 2
            assert text in answer.err
        elif language == "python":
            with contextlib.redirect_stdout(None):
                exec(compile(with_newest(text), "README.md", "exec"), {})
    assert done == instrument_commands()
    assert len(done) == 6
    blocks = re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / "docs" / "report.md").read_text(), re.M | re.S)
    exec(compile(with_newest("\n".join(blocks)), "report.md", "exec"), {})
    assert (workdir / "flow.svg").exists()
    assert (workdir / "gpt2.png").exists()


def with_newest(text: str) -> str:
    """Replace the run that a text names by the newest run."""
    if EXAMPLE_RUN not in text:
        return text
    return text.replace(EXAMPLE_RUN, str(max(Path("runs/mnist_hooks").glob("2*/run.json")).parent))


def test_readme_has_at_most_1200_words() -> None:
    assert len(README.split()) <= 1200


@pytest.mark.slow
def test_overrides_named_in_the_readme_are_accepted(workdir: Path) -> None:
    named = re.findall(r"`((?:\+|~)?hooks[.=][^`]+)`", README)
    assert len(named) >= 6
    for override in named:
        base = ["model=mlp"] if override.startswith("hooks=") else ["+exp=mnist_hooks", "model=mnist_cnn"]
        assert Experiment(compose(*base, "data=random", "train.batch_size=4", override)[0]).plan.sites, override
