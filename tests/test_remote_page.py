"""docs/remote.md: its commands and code run on a local S3 server."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

from instrument.commands.upload import main
from instrument.storage import remote_transfer

PAGE = (REPOSITORY / "docs" / "remote.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.M | re.S)
STAMP = "2026-11-21_09-00-00-000000"


@pytest.mark.slow
def test_commands_of_the_page_run(cli: Callable[..., Any], bucket: str) -> None:
    done = []
    for language, text in BLOCKS:
        newest = (
            max((path.name for path in Path("runs/run").glob("*")), default="") if Path("runs/run").exists() else ""
        )
        text = text.replace(STAMP, newest)  # noqa: PLW2901
        if language == "python":
            exec(text, {})
        elif text.startswith("python -m instrument.upload "):
            assert main(shlex.split(text)[3:]) == 0
        elif text.startswith("python -m instrument "):
            assert cli(*shlex.split(text)[3:], "train.steps=2").code == 0
        else:
            assert text.startswith("pip install -e '.[s3]'")
        done.append(language)
    assert done == ["sh", "sh", "sh", "python"]


def test_page_has_the_retry_intervals() -> None:
    pauses = [f"{pause:.0f}" for pause in remote_transfer.PAUSES]
    assert f"{', '.join(pauses[:-1])} and then every {pauses[-1]} seconds" in " ".join(PAGE.split())
