"""The commands in `--help`, the docs and the headers of configuration files.

Each command is run. Commands that need torchrun, a cluster or a bucket are only composed and checked.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from page_blocks import PAGES as EXECUTED

from instrument.commands import compact, export, findings, recover, sweep
from instrument.commands.report import main as report
from instrument.config.hydra_internals import BASIC_SWEEPER, config_loader
from instrument.config.parse import parse_config
from instrument.training.sweep_jobs import expand_sweep
from instrument.training.sweep_objective import read_objective

Cli = Callable[..., Any]
PAGES = [
    REPOSITORY / "README.md",
    *(page for page in sorted((REPOSITORY / "docs").rglob("*.md")) if page not in EXECUTED),
    *sorted((REPOSITORY / "conf").rglob("*.yaml")),
]
HELP = yaml.safe_load((REPOSITORY / "conf" / "config.yaml").read_text())["hydra"]["help"]["header"]
COMMAND = re.compile(r"(?:python -m|-m) (instrument(?:\.\w+)?)(?=[ `\n])([^`\n#]*)")
# One step on data that is always available; MNIST is not on every machine.
SHORT = ("data=digits", "data.slice.stop=64", "data.eval_slice.stop=32", "train.steps=1", "quiet=true")
OF_MNIST = ("data.dataset.size=28", "hooks.digit_maps.steps=[0]")


def commands_in(text: str) -> list[tuple[str, list[str]]]:
    """Return the module and arguments of each command. A description may follow after two spaces."""
    joined = re.sub(r" \\\n\s*", " ", text)
    found = [(name, re.split(r" \|\| |  ", line.strip())[0]) for name, line in COMMAND.findall(joined)]
    return [(name, shlex.split(line)) for name, line in found]


def runs() -> list[list[str]]:
    """Return the distinct arguments of `python -m instrument` and `python -m instrument.verify`."""
    found = [
        arguments
        for page in PAGES
        for name, arguments in commands_in(page.read_text())
        if name in ("instrument", "instrument.verify") and "=" in str(arguments) and "--cfg" not in arguments
    ]
    return [list(arguments) for arguments in dict.fromkeys(map(tuple, found))]


def test_commands_of_the_pages_are_found() -> None:
    assert len(runs()) > 25
    names = {name for page in PAGES for name, _ in commands_in(page.read_text())}
    assert names >= {
        f"instrument.{tool}"
        for tool in ("report", "export", "recover", "compact", "upload", "sweep", "findings", "verify")
    }


def checked(config: DictConfig) -> None:
    parsed = parse_config(
        {
            key: OmegaConf.to_container(config[key], resolve=True) if OmegaConf.is_config(config[key]) else config[key]
            for key in config
            if key not in ("hydra", "resume")
        }
    )
    read_objective(parsed.objective)


@pytest.mark.slow
def test_runs_of_the_pages_can_be_composed(workdir: Path) -> None:
    setup_globals()
    loader = config_loader()
    for arguments in runs():
        overrides = [argument.replace("$norm", "0.1") for argument in arguments if argument != "-m"]
        if "+exp=mine" in overrides or any(override.startswith("resume=") for override in overrides):
            continue  # These need a file that the README writes, or an existing run.
        if "-m" not in arguments:
            checked(loader.load_configuration("config", overrides, RunMode.RUN))
            continue
        asked = loader.load_configuration("config", overrides, RunMode.MULTIRUN)
        if asked.hydra.sweeper["_target_"] != BASIC_SWEEPER:  # Optuna chooses the values; use the first of each.
            values = [re.sub(r"=(?:tag\(log,)?(?:interval|choice)\(([^,]+),.*", r"=\1", each) for each in overrides]
            jobs = [tuple(value for value in values if not value.startswith("hydra"))]
        else:
            jobs = expand_sweep(asked.hydra)
        checked(loader.load_sweep_config(asked, list(jobs[-1])))


@pytest.mark.slow
def test_commands_of_the_help_work(cli: Cli) -> None:
    commands = [arguments for _, arguments in commands_in(HELP)]
    assert [words[-1].partition("=")[0] for words in commands] == ["+exp", "plan", "hooks.tame.norm", "hooks", "resume"]
    for words in commands[:-1]:
        more = [*SHORT, *OF_MNIST] if "+exp=mnist_hooks" in words else SHORT
        answer = cli(*words, *(override for override in more if override.partition("=")[0] not in str(words)))
        assert answer.code == 0, (words, answer.err)
    Path("stopping.py").write_text(
        "def fail(tensor, context):\n    if context.step == 1 and open('broken').read() == 'yes':\n"
        "        raise ValueError\n    return tensor * 1\n"
    )
    Path("broken").write_text("yes")
    fails = "+hooks.fail={layers:encoder,kind:forward,action:modify,fn:{_target_:stopping.fail}}"
    kept = ("train.steps=2", "train.checkpoint.every=1", "hydra.run.dir=out")
    stopped = cli("+exp=mnist_hooks", *SHORT[:3], *OF_MNIST, *kept, fails)
    assert stopped.code == 1, stopped.err
    Path("broken").write_text("no")
    assert cli("resume=out").code == 0


@pytest.mark.slow
def test_all_tools_work_on_a_sweep(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    small = ("model=mlp", "hooks=activations", *SHORT)
    assert cli("-m", *small, "seed=1,2", "hydra.sweep.dir=out").code == 0
    assert sweep.main(["out"]) == 0
    assert sweep.main(["out", "--rerun"]) == 0
    assert compact.main(["out"]) == 0
    assert recover.main(["out/0"]) == 0
    assert findings.main(["out/0"]) == 0
    assert report(["out"]) == 0
    assert report(["out/0", "--out", "page.html"]) == 0
    assert export.main(["out/0", "--to", "tensorboard"]) == 0
    assert export.main(["out", "--to", "csv", "--out", "tables"]) == 0
    assert "2 jobs in out: 2 done" in capfd.readouterr().out
