"""The `pip install` commands that errors about missing packages suggest."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError

import pytest
from conftest import REPOSITORY
from packaging.requirements import Requirement

from instrument.fields import pip_extras

EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name not in ("bench", "dev")])
def test_pip_command_installs_the_packages_of_the_extra(extra: str) -> None:
    *start, packages = pip_extras.pip_command(extra).split(maxsplit=2)
    assert start == ["pip", "install"]
    names = {Requirement(each.strip("'")).name for each in packages.split("' '")}
    wanted = {Requirement(line).name for line in EXTRAS[extra]}
    if "instrument" in wanted:
        wanted = (wanted - {"instrument"}) | {Requirement(line).name for line in EXTRAS["remote"]}
    assert names == wanted


def test_pip_command_without_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(pip_extras, "requires", not_installed)
    assert pip_extras.pip_command("sql") == "pip install -e '.[sql]'"
