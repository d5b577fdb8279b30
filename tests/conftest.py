"""Shared fixtures: the location of the MNIST files, a working directory, and the command line run in this process."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from tiers import mark_combinations, mark_spread

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

    from instrument import Run

# These settings apply to this process and all processes started by tests. They are set before torch and transformers
# are imported. Each process uses one thread by default, because `make test` runs several processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Write bytecode, so that test modules are compiled once: rewriting their assertions takes longer than their imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so it is in a process that a shell started in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A garbage collection visits everything that PyTorch and transformers have imported, which takes a third of a second. It is
# off while pytest collects the tests, and rare later, also after compilations.
gc.disable()
gc.set_threshold(100_000)
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
os.environ["HF_HUB_OFFLINE"] = "1"  # Tests create their models and download none.
IS_SECOND_PROCESS = os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
if IS_SECOND_PROCESS:
    # In a new environment, this process compiles other packages while the first one compiles PyTorch.
    for package in ("scipy.stats", "pandas", "matplotlib.pyplot", "networkx", "polars", "sklearn.datasets", "duckdb"):
        import_module(package)
KERNEL_DEVICE = "cuda" if Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists() else "cpu"
if KERNEL_DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's interpreter runs the kernels of a GPU on the CPU.

# The examples are the same in every run, and a slow example is not an error.
SAME_EXAMPLES = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow], max_examples=200
)
# Hypothesis would read the numbers and texts in the source of all imported modules, for examples that change with them.
providers._get_local_constants = lambda: providers._local_constants
settings.register_profile("all", SAME_EXAMPLES)
settings.register_profile("quick", SAME_EXAMPLES, max_examples=25)

pytest_plugins = ("report_fixtures", "buckets")

# These modules take 10 to 25 seconds each, or have slow tests that take more than a minute: one that starts last delays the end.
LONGEST = {
    *("test_browser", "test_cli", "test_conf", "test_distributed_resume", "test_distributed_runs", "test_features"),
    *("test_fuzz", "test_healthy_programs", "test_install", "test_large_analyses_page", "test_launchers"),
    *("test_long_runs", "test_measure", "test_pages", "test_report", "test_report_details", "test_resume"),
    *("test_run_upload", "test_sweep"),
    *("test_trackers", "test_training_library_pages", "test_trap_in_place", "test_verification"),
}
# What takes seconds to start or to import, and the text of the modules that use it. `make test` runs them in one process.
EXPENSIVE = {
    "processes": re.compile("fork_server|distributed_runs"),
    "browser": re.compile("playwright|new_page"),
    "libraries": re.compile(r"transformers|timm|lightning|torch\.testing\._internal"),
    "trackers": re.compile("tracker_files"),
    "search": re.compile("sweeper=search"),
    "buckets": re.compile(r"\bbucket: str"),
}
REPOSITORY = Path(__file__).parents[1]
MNIST_FOLDERS = (os.environ.get("INSTRUMENT_DATA"), REPOSITORY.parent / "shared" / "mnist")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples of hypothesis: fewer without the slow tests."""
    settings.load_profile("quick" if config.getoption("markexpr") else "all")


class LastFirst(pytest.Dir):
    """A folder whose files are imported from the last one on."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return [*super().collect()][::-1]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """In the second process, compile the last test modules of a new environment while the first process compiles the first ones."""
    return LastFirst.from_parent(parent, path=path) if IS_SECOND_PROCESS else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most parameters as slow, move the longest tests to the front, and skip tests marked `gpu` without CUDA.

    Long work comes first, so that the processes end at the same time.
    """
    items.sort(key=lambda item: item.path)  # the same in both processes
    mark_combinations(items)
    mark_spread(items)
    items.sort(key=lambda item: (_scope(_module(item.nodeid)) not in EXPENSIVE, item.path.stem not in LONGEST))
    missing = [item for item in items if item.get_closest_marker("gpu")]
    if missing:
        import torch

        if not torch.cuda.is_available():
            for item in missing:
                item.add_marker(pytest.mark.skip(reason="CUDA is not available"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """Keep the modules together that share something expensive, with `--dist loadscope`."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        """Scheduling by module or by what modules share."""

        def _split_scope(self, nodeid: str) -> str:
            return _scope(_module(nodeid))

    return Scheduling(config, log)


def _module(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@functools.cache
def _scope(module: str) -> str:
    text = (REPOSITORY / module).read_text()
    return next((name for name, pattern in EXPENSIVE.items() if pattern.search(text)), module)


def pytest_collection_finish() -> None:
    """Exclude what was imported so far from the garbage collections of the tests."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Collect garbage once, for the warnings that it raises. Pytest collects it five times, and each takes a second."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed PyTorch before each test, so that the order of tests does not change random tensors.

    The `random` module is not seeded: Weights & Biases uses it for run names, which have to be unique. Before CUDA is
    initialized, `torch.manual_seed` stores a traceback at each call, which takes a millisecond.
    """
    if (torch := sys.modules.get("torch")) is not None:
        seed = torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed
        seed(0)


@pytest.fixture(scope="session", autouse=True)
def composes_fast() -> Iterator[None]:
    """Let Hydra compose fast."""
    from fast_composition import composition

    with composition(fast=True):
        yield


@dataclass(frozen=True)
class Answer:
    """The exit code of a command, and the texts printed to stdout and stderr."""

    code: int
    out: str
    err: str

    def expect(self, code: int) -> Answer:
        """Assert the exit code, and return this result."""
        assert self.code == code, self.out + self.err
        return self


Call = Callable[..., Answer]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Function that calls the `main` of a command with its arguments."""

    def run(main: Callable[[list[str]], int], *arguments: object) -> Answer:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Answer(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def mnist_root() -> Path | None:
    """Folder with the MNIST files in the layout of torchvision; None if it is missing."""
    folders = [Path(folder) for folder in MNIST_FOLDERS if folder and (Path(folder) / "MNIST" / "raw").is_dir()]
    return folders[0].resolve() if folders else None


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make a folder the working directory, without a configured data folder.

    Modules imported from it are removed from `sys.modules` afterwards, because other tests may use the same names.
    """
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("INSTRUMENT_DATA", raising=False)
        yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(folder):
            del sys.modules[name]


@pytest.fixture
def workdir(tmp_path: Path) -> Iterator[Path]:
    """Empty working directory."""
    with working_in(tmp_path):
        yield tmp_path


def write(path: str, text: str) -> None:
    """Write a file in the working directory, in a new folder if it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def contents(folder: str | Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder by path."""
    return {str(file): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


def load_module(name: str, file: Path) -> ModuleType:
    """Import a file as a module of this name."""
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fresh_workers() -> Iterator[None]:
    """Stop the worker processes of joblib after the test.

    The workers outlive a sweep, and would still print to the captured streams of the test that started them.
    """
    yield
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True, kill_workers=True)


@pytest.fixture
def few_objects() -> None:
    """Exclude the objects of earlier tests and of imported packages from garbage collections and `gc.get_objects`, for speed."""
    gc.collect()  # Garbage that is frozen is never collected, and raises no warnings.
    gc.freeze()


@pytest.fixture
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the dry run of a plan to two passes: one whose durations are not used, and one."""
    from instrument.training import dry_run as profiling

    monkeypatch.setattr(profiling, "MIN_REPEATS", 1)
    monkeypatch.setattr(profiling, "MAX_REPEATS", 1)


@pytest.fixture
def cli(
    workdir: Path, few_repeats: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Function that runs `python -m instrument` with its arguments, in this process and an empty working directory."""

    def run(*arguments: str) -> Answer:
        capfd.readouterr()
        code = _exit_code(monkeypatch, "instrument.__main__", arguments)
        return Answer(code, *capfd.readouterr())

    return run


def run_in(folder: Path, *arguments: str) -> Answer:
    """Run `python -m instrument` in this process and in a folder, for fixtures that several tests share."""
    return _run_in(folder, "instrument.__main__", arguments)


def finished(folder: Path, *arguments: str) -> Run:
    """Run `python -m instrument` in the parent of a folder, assert that it succeeds, and load the folder: a run or a sweep."""
    import instrument

    kind = "sweep" if "-m" in arguments else "run"
    run_in(folder.parent, *arguments, f"hydra.{kind}.dir={folder.name}").expect(0)
    return instrument.load(folder)


def replay_in(folder: Path, *arguments: str) -> Answer:
    """Run `python -m instrument.replay` in this process and in a folder."""
    return _run_in(folder, "instrument.commands.replay", arguments)


def _run_in(folder: Path, module: str, arguments: Sequence[str]) -> Answer:
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
        patched.chdir(folder)
        patched.delenv("INSTRUMENT_DATA", raising=False)
        code = _exit_code(patched, module, arguments)
    return Answer(code, out.getvalue(), err.getvalue())


def _exit_code(monkeypatch: pytest.MonkeyPatch, module: str, arguments: Sequence[str]) -> int:
    name = "replay.py" if module.endswith(".replay") else "instrument"
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which the command replaces
    try:
        code = import_module(module).main() or 0
    except SystemExit as stop:
        code = stop.code or 0
    assert isinstance(code, int)
    return code
