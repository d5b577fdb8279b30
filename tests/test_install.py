"""The wheel: its contents, and its use without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=1", "hooks=activations")


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "INSTRUMENT_DATA")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the wheel, built from the source distribution of a copy, so that the checkout stays unchanged."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for name in ("instrument", "conf"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert '"-O3"' in project
    (source / "pyproject.toml").write_text(project.replace('"-O3"', '"-O0"'))  # Optimized code takes 15 s to compile.
    build = (
        "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"  # as pip does
    )
    call(sys.executable, "-c", build, "build_sdist", folder, cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    call(sys.executable, "-c", build, "build_wheel", folder, cwd=folder / archive.name.removesuffix(".tar.gz"))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts folder of a new environment with the wheel. The dependencies come from the current environment."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    packages = Path(paths["purelib"])
    packages.joinpath("dependencies.pth").write_text(
        sysconfig.get_path("purelib")
    )  # added to the path; .pth files in it are not read
    python = home / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-compile", "-q", wheel, cwd=home)
    return home / "bin"


@pytest.mark.slow
def test_wheel_contains_all_modules_configurations_and_py_typed(wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(file.relative_to(REPOSITORY)) for file in REPOSITORY.glob("instrument/**/*.py")}
    yaml = {f"instrument/{file.relative_to(REPOSITORY)}" for file in REPOSITORY.glob("conf/**/*.yaml")}
    assert len(yaml) > 20
    expected = modules | yaml | {"instrument/py.typed", "instrument/conf/schema.json"}
    assert expected - names == set()
    assert {name.split("/")[0] for name in names} == {
        "instrument",
        next(n for n in names if "dist-info" in n).split("/")[0],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["instrument"], pytest.param(["python", "-m", "instrument"], marks=pytest.mark.slow)], ids=" ".join
)
def test_installed_command_runs_with_a_local_model(installed: Path, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "conf" / "exp").mkdir(parents=True)
    (tmp_path / "conf" / "exp" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /data: digits\n  - _self_\n"
        "model: {_target_: nearby.Net}\ntrain: {steps: 1}\n"
    )
    (tmp_path / "nearby.py").write_text(
        "import instrument\nimport torch\n\nprint(instrument.__file__)\n\n\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    program, *rest = command
    done = call(installed / program, *rest, "+exp=mine", "hooks=activations", "hydra.run.dir=out", cwd=tmp_path)
    assert f"{installed.parent}/" in done.stdout  # where the module `instrument` is
    assert "Net with 650 trainable parameters" in done.stdout
    assert done.stderr == ""
    assert (tmp_path / "out" / "stats").is_dir()


@pytest.mark.slow
def test_installed_command_uses_its_own_configurations(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "conf", tmp_path / "conf")
    done = call(installed / "instrument", *TINY, "hydra.run.dir=out", cwd=tmp_path)
    assert "step 1/1" in done.stdout
    assert done.stderr == ""
    (tmp_path / "conf" / "exp" / "mnist_hooks.yaml").write_text("# @package _global_\nname: changed\n")
    done = call(installed / "python", "-m", "instrument", "+exp=mnist_hooks", "--cfg", "job", cwd=tmp_path)
    assert "name: mnist_hooks" in done.stdout
    assert done.stderr.count("warning") == 1
    assert "conf/exp/mnist_hooks.yaml is ignored" in done.stderr
