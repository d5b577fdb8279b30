"""What tests share: where real MNIST is, and the command line run in this very process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# What holds for this process and all that tests start, said before torch and transformers are imported.
# Each computes in one thread, where the environment says no other number: `make test` runs as many processes as fit.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Test modules are compiled once; rewriting their assertions takes longer than all that is imported for them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["HF_HUB_OFFLINE"] = "1"  # models are made, not downloaded

# Which examples are drawn does not change from run to run, and how long one takes is no fault of it.
settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

pytest_plugins = ("reported", "buckets")

REPOSITORY = Path(__file__).parents[1]
MNIST_FOLDERS = (os.environ.get("INSTRUMENT_DATA"), REPOSITORY.parent / "shared" / "mnist")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none."""
    missing = [item for item in items if item.get_closest_marker("gpu")]
    if missing:
        import torch

        if not torch.cuda.is_available():
            for item in missing:
                item.add_marker(pytest.mark.skip(reason="there is no GPU on this machine"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random tensors are the same in each test, whichever came before it in this process.

    Python's random numbers are left alone: Weights & Biases names runs with them, and takes one name for one run.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@dataclass(frozen=True)
class Answer:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def mnist_root() -> Path | None:
    """The folder with real MNIST in torchvision's layout; None where there is none."""
    found = [Path(folder) for folder in MNIST_FOLDERS if folder and (Path(folder) / "MNIST" / "raw").is_dir()]
    return found[0].resolve() if found else None


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, with no data configured.

    Modules that were imported from it are forgotten afterwards: those of another test may have the same names.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INSTRUMENT_DATA", raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def fresh_workers() -> Iterator[None]:
    """joblib's processes outlive a sweep, and still print to where the test that they were started in listened."""
    yield
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True, kill_workers=True)


@pytest.fixture
def few_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan makes as many passes over the steps as have their rows kept, and not those that only its times need."""
    from instrument.run import visits

    monkeypatch.setattr(visits, "LEAST", visits.KEPT)
    monkeypatch.setattr(visits, "MOST", visits.KEPT)


@pytest.fixture
def cli(
    workdir: Path,
    few_visits: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., Answer]:
    """`python -m instrument` with these arguments, in this process and in an empty working directory."""

    def run(*arguments: str) -> Answer:
        capfd.readouterr()
        code = _exit_code(monkeypatch, arguments)
        return Answer(code, *capfd.readouterr())

    return run


def run_in(folder: Path, *arguments: str) -> Answer:
    """`python -m instrument` with these arguments, in this process and in a folder: for what several tests share."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
        patched.chdir(folder)
        patched.delenv("INSTRUMENT_DATA", raising=False)
        code = _exit_code(patched, arguments)
    return Answer(code, out.getvalue(), err.getvalue())


def _exit_code(monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> int:
    from instrument.__main__ import main

    monkeypatch.setattr(sys, "argv", ["instrument", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
        assert isinstance(code, int)
        return code
    return 0
