"""The extras of `pyproject.toml`, and the `pip install` commands that errors about missing packages suggest."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest
from conftest import REPOSITORY

from instrument.errors import ConfigError, InstrumentError
from instrument.fields import pip_extras
from instrument.fields.targets import locate

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_every_extra_in_an_error_exists() -> None:
    sources = [file.read_text() for file in REPOSITORY.glob("instrument/**/*.py")]
    named = {name for text in sources for name in re.findall(r"(?:pip_command|packages_of)\(['\"](\w+)", text)}
    assert {"run", "analysis", "report", "sql"} <= named
    assert named <= set(PROJECT["optional-dependencies"])


def test_pip_command_names_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PROJECT["name"] == pip_extras.DISTRIBUTION
    monkeypatch.setattr(
        pip_extras, "installed_version", lambda package: "0.3.0" if package == PROJECT["name"] else None
    )
    assert pip_extras.pip_command("sql") == f"pip install '{PROJECT['name']}[sql]'"


def test_pip_command_without_installed_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pip_extras, "installed_version", lambda package: None)
    assert pip_extras.pip_command("sql") == "pip install -e '.[sql]'"


def test_target_in_a_missing_package_is_reported_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # importing it fails
    with pytest.raises(ConfigError) as refused:
        locate("torchvision.models.resnet18", "model")
    (problem,) = refused.value.problems
    assert (problem.where, problem.fix) == ("model", pip_extras.pip_command("run"))


def test_packages_of_run_are_those_of_the_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    packages = {re.split(r"\W*[>=\[]", name)[0] for extra in ("run", "analysis") for name in extras[extra]}
    of_distribution = {"hydra": "hydra-core", "omegaconf": "hydra-core", "sklearn": "scikit-learn"}
    assert {of_distribution.get(name, name) for name in pip_extras.PACKAGES_OF_RUN} <= packages


def test_missing_package_names_the_feature_and_the_extra() -> None:
    with pytest.raises(InstrumentError) as error, pip_extras.packages_of("sql", "run.sql"):
        import not_installed  # noqa: F401
    assert str(error.value) == f"run.sql requires not_installed: {pip_extras.pip_command('sql')}"
