"""What is said where a package is missing installs that package, and nothing of another name."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError

import pytest
from conftest import REPOSITORY
from packaging.requirements import Requirement

from instrument import extras

EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name not in ("bench", "dev")])
def test_the_command_installs_what_the_extra_needs(extra: str) -> None:
    *start, told = extras.pip_command(extra).split(maxsplit=2)
    assert start == ["pip", "install"]
    names = {Requirement(each.strip("'")).name for each in told.split("' '")}
    wanted = {Requirement(line).name for line in EXTRAS[extra]}
    if "instrument" in wanted:
        wanted = (wanted - {"instrument"}) | {Requirement(line).name for line in EXTRAS["remote"]}
    assert names == wanted


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", nothing)
    assert extras.pip_command("sql") == "pip install -e '.[sql]'"
