"""Runs in this process without the command line: Hydra composes the configuration, but starts no job."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from hydra.types import RunMode

import instrument
from instrument.commands.job import report_writer
from instrument.commands.validated_config import read_config
from instrument.config.experiment import RunConfig
from instrument.config.parse import parse_config
from instrument.config.search_path import config_loader
from instrument.training.runner import run
from instrument.training.terminal import Terminal


def compose(*arguments: str) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration of a command, validated and as a dictionary.

    Args:
        arguments: Arguments of the command line.
    """
    return read_config(config_loader().load_configuration("config", [*arguments], RunMode.RUN))


def train_here(folder: Path, *arguments: str) -> instrument.Run:
    """Train in this process, and load the run.

    Args:
        folder: Folder of the run. Its parent is the working directory.
        arguments: Arguments of the command line.
    """
    with contextlib.chdir(folder.parent):
        config, raw = compose(*arguments)
        here = Path(folder.name)
        make_report = report_writer(config, here)
        run(config, here, Terminal(quiet=True), raw=raw, overrides={}, make_report=make_report)
    return instrument.load(folder)


def resume_here(folder: Path) -> instrument.Run:
    """Resume a run in this process, and load it.

    Args:
        folder: Folder of the run. Its parent is the working directory.
    """
    raw = {**instrument.load(folder).info["config"], "resume": folder.name}
    with contextlib.chdir(folder.parent):
        run(parse_config(raw), Path(folder.name), Terminal(quiet=True), raw=raw, overrides={})
    return instrument.load(folder)
