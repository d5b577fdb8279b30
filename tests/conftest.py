"""What tests share: where real MNIST is, and the command line run in this very process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

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
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with no data configured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INSTRUMENT_DATA", raising=False)
    return tmp_path


@pytest.fixture
def fresh_workers() -> Iterator[None]:
    """joblib's processes outlive a sweep, and still print to where the test that they were started in listened."""
    yield
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True, kill_workers=True)


@pytest.fixture
def cli(workdir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`python -m instrument` with these arguments, in this process and in an empty working directory."""
    from instrument.__main__ import main

    def run(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["instrument", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        capfd.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capfd.readouterr()
        assert isinstance(code, int)
        return Answer(code, out, err)

    return run
