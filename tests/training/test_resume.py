"""Resuming: a killed and resumed run equals a run that was never stopped; invalid checkpoints are refused."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import run_in
from fork_server import Command
from state_comparison import assert_same_tables, identical
from tiers import portions
from training_runs import CONFIG, DIGITS, failing_after, resume_here

import instrument
from instrument import ConfigError
from instrument.config.parse import parse_config
from instrument.hooks.attached_hook import AttachedHook
from instrument.storage import run_folder, table_writer
from instrument.storage.lock import is_locked
from instrument.storage.run_folder import RunFolder
from instrument.storage.run_upload import RemoteCopy
from instrument.tables.kinds import KINDS
from instrument.tables.reasons import CHECKPOINT
from instrument.training.checkpoint import Checkpoints
from instrument.training.runner import run
from instrument.training.terminal import Terminal

Cli = Callable[..., Any]
TINY = [
    *("model=mlp", "model.sizes=[64,16,10]", "data=digits", "hooks=activations", "train.steps=12"),
    *("train.checkpoint.every=5", "hydra.run.dir=out"),
]


@pytest.fixture(scope="module", params=portions(1, 12, 6))
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    """Folders of uninterrupted runs, and of equal runs that were killed several times."""
    numbers: range = request.param
    folder, here = tmp_path_factory.mktemp("resumed"), Path(__file__).parent
    arguments = [str(folder), str(numbers.start), str(numbers.stop)]
    done = Command(folder, here / "resume_runs.py", arguments, {"OMP_NUM_THREADS": "1"}, "process").wait()
    assert done.returncode == 0, done.stderr
    return [(folder / f"{number}-whole", folder / f"{number}-killed") for number in numbers]


def test_resumed_run_equals_an_uninterrupted_run(pairs: list[tuple[Path, Path]]) -> None:
    for pair in pairs:
        check_equal(*map(instrument.load, pair))


def check_equal(uninterrupted: instrument.Run, killed: instrument.Run) -> None:
    assert (uninterrupted.info["status"], killed.info["status"]) == ("done", "done")
    assert_same_tables(uninterrupted, killed, "stats", "effects", "coverage", "layers", "samples", "metrics")
    one, other = uninterrupted.tensors(), killed.tensors()
    assert [values.tobytes() for values in one["values"]] == [values.tobytes() for values in other["values"]]
    pd.testing.assert_frame_equal(one.drop(columns="values"), other.drop(columns="values"))
    assert list(killed.events[killed.events.rule != "resumed"].message) == list(uninterrupted.events.message)
    assert len(killed.events[killed.events.rule == "resumed"]) >= 1

    states = [Checkpoints(run.path, 1).load() for run in (uninterrupted, killed)]
    assert states[0]["step"] == states[1]["step"] == uninterrupted.info["config"]["train"]["steps"]
    for name in ("model", "buffers", "optimizer", "random", "batches", "probe"):
        assert identical(states[0][name], states[1][name]), name
    weights = killed.metrics[killed.metrics.phase == "train"].loss
    assert weights.iloc[-1] < weights.iloc[0], "the loss should decrease"


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that failed at step 8."""
    folder = tmp_path_factory.mktemp("failed")
    with failing_after(8):
        assert run_in(folder, *TINY).code == 1
    return folder / "out"


@pytest.fixture
def out(workdir: Path, failed: Path) -> Path:
    """Copy of the fixture `failed` in the working directory, to be resumed."""
    return Path(shutil.copytree(failed, workdir / "out"))


@pytest.mark.slow
def test_resume_needs_only_the_folder_of_an_unfinished_run(cli: Cli, out: Path) -> None:
    before = instrument.load("out")
    assert (before.info["status"], len(before.metrics)) == ("failed", 8)
    assert [file.name for file in Path("out/checkpoints").iterdir()] == ["step-00000005.pt"]
    hydra = {file: file.read_bytes() for file in Path("out/.hydra").iterdir()}
    assert "step 12/12" in cli("resume=out").expect(0).out
    run = instrument.load("out")
    assert run.info["status"] == "done"
    assert run.info["error"] is None
    assert run.info["overrides"] == before.info["overrides"]
    assert len(run.info["resumed"]) == 1
    assert list(run.metrics.step) == [*range(12), 12]
    assert list(run.events[run.events.rule == "resumed"].message) == ["training continues after 5 steps"]
    assert not (run.events.rule == "error").any(), "events of removed steps should be removed"
    assert {file: file.read_bytes() for file in Path("out/.hydra").iterdir()} == hydra
    assert [file.name for file in Path("out/checkpoints").iterdir()] == ["step-00000012.pt"]
    assert "the run is already done" in cli("resume=out").expect(2).err
    sweep = str(Path().absolute())
    problem = f"resume: the folder contains folders of runs: pass one of them, such as {sweep}/out\n"
    assert problem in cli(f"resume={sweep}").expect(2).err


MOVES = """
import os
from instrument.training.models import MLP

def net(**options):
    os.chdir("/")
    return MLP(**options)

def move(tensor, context):
    os.chdir("/" if context.step % 2 else os.environ["ELSEWHERE"])
"""


def test_custom_code_that_changes_the_working_directory(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("moves.py").write_text(MOVES)
    Path("elsewhere").mkdir()
    monkeypatch.setenv("ELSEWHERE", str(Path("elsewhere").absolute()))
    hook = "+hooks.moves={layers: layers.0, kind: forward, action: call, fn: {_target_: moves.move}}"
    with failing_after(8):
        answer = cli(*TINY, "model._target_=moves.net", "train.save=true", "sink.tensorboard=true", hook).expect(1)
    expected = "the data recorded so far is in out; to continue from its last checkpoint, pass this folder to resume\n"
    assert expected in answer.err
    cli("resume=out", "report=true").expect(0)
    run = instrument.load("out")
    assert (run.info["status"], run.problems) == ("done", [])
    assert list(run.metrics.step) == [*range(12), 12]
    assert list(run.events[run.events.rule == "resumed"].message) == ["training continues after 5 steps"]
    assert Path("out/report.html").exists()
    assert list(Path("out").glob("**/events.out.tfevents.*"))
    assert sorted(path.name for path in Path().iterdir() if path.name != "__pycache__") == [
        "elsewhere",
        "moves.py",
        "out",
    ]
    assert not list(Path("elsewhere").iterdir())
    assert not [name for name in ("out", ".lock", "run.json") if Path("/", name).exists()]


def test_resume_without_a_checkpoint_is_refused(workdir: Path) -> None:
    run_until_failure(every=0)
    with pytest.raises(ConfigError, match=r"the run has no checkpoint: train\.checkpoint\.every was 0"):
        run_tiny("out", resume="out", every=0)
    assert instrument.load("out").info["status"] == "failed"
    assert len(instrument.load("out").metrics) == 3, "no rows should be removed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resume=nowhere"], "the folder does not exist"),
        (["resume=out", "train.steps=50"], "a run is resumed with its original configuration"),
        (["resume=out", "+exp=mnist_hooks"], "a run is resumed with its original configuration"),
        (["-m", "resume=out", "seed=1,2"], "only single runs can be resumed\n    given    out\n    fix      remove -m"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_resume_is_reported_and_keeps_the_rows(cli: Cli, out: Path, arguments: list[str], message: str) -> None:
    answer = cli(*arguments).expect(2)
    assert message in answer.err
    assert "Traceback" not in answer.err
    assert len(instrument.load("out").metrics) == 8


def test_resume_of_a_run_of_attach_is_refused(cli: Cli, out: Path) -> None:
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**record, "config": {"hooks": record["config"]["hooks"]}}))
    err = cli("resume=out").expect(2).err
    assert "resume: the run was started with instrument.attach" in err
    assert "model: no model is configured" not in err


def test_resume_of_a_running_run_is_refused(cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.reopen(Path("out"))
    monkeypatch.setattr("instrument.storage.lock.LOCK_TIMEOUT", 0.1)
    assert "the run is in progress in another process" in cli("resume=out").expect(2).err
    folder.finish("failed", RuntimeError("over"))


def test_interrupt_while_a_run_is_reopened(cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, states = run_folder.write_json, []

    def write(path: Path, record: Any) -> None:
        original(path, record)
        states.append(record["status"])
        if len(states) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "write_json", write)
    cli("resume=out").expect(130)
    assert states == ["running", "interrupted"]
    assert instrument.load("out").info["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["new", "out"])
def test_interrupt_before_a_run_begins_restores_its_folder(
    cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    def contents() -> dict[Path, bytes]:
        files = (file for file in Path(folder).rglob("*") if file.is_file() and ".hydra" not in file.parts)
        return {file: file.read_bytes() for file in files if file.suffix != ".log"}

    def interrupt(copy: RemoteCopy) -> None:
        raise KeyboardInterrupt

    before = contents()
    monkeypatch.setattr(RemoteCopy, "__enter__", interrupt)
    arguments = ["resume=out"] if folder == "out" else [*TINY, "hydra.run.dir=new"]
    cli(*arguments).expect(130)
    assert contents() == before
    assert not is_locked(Path(folder))


@pytest.mark.slow
def test_resume_in_a_read_only_folder_is_refused(cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_read_only(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", raise_read_only)
        answer = cli("resume=out").expect(2)
    assert "resume: the folder is not writable: Read-only file system\n    given    out" in answer.err
    resume_here(Path("out"))


class Bomb:
    """An object whose unpickling moves the folder `out`."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return os.rename, ("out", "exploded")


def change_checkpoint(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return rewrite


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b""), "the checkpoint cannot be loaded with weights_only=True"),
        (lambda path: path.write_bytes(b"no checkpoint"), "the checkpoint cannot be loaded with weights_only=True"),
        (lambda path: torch.save({"version": 1, "bomb": Bomb()}, path), "cannot be loaded with weights_only=True"),
        (change_checkpoint(lambda state: state.update(version=2)), "must have version 7, but has version 2"),
        (change_checkpoint(lambda state: state["probe"].pop("phases")), "does not match this experiment"),
        (change_checkpoint(lambda state: state["probe"]["hooks"].pop()), "does not match this experiment"),
    ],
    ids=["empty", "text", "pickled", "version", "phases", "hooks"],
)
def test_invalid_checkpoint_is_refused_without_unpickling(
    out: Path, write: Callable[[Path], object], message: str
) -> None:
    (path,) = Path("out/checkpoints").iterdir()
    write(path)
    record = Path("out/run.json").read_text()
    with pytest.raises(ConfigError, match=re.escape(message)):
        resume_here(Path("out"))
    assert Path("out/run.json").read_text() == record
    assert len(instrument.load("out").metrics) == 8


@pytest.mark.slow
def test_plan_of_a_resumed_run_uses_its_configuration(cli: Cli, out: Path) -> None:
    assert "activations" in cli("resume=out", "plan=true").expect(0).out
    assert instrument.load("out").info["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra_state", "message"),
    [
        (Path("somewhere"), "the checkpoint cannot be loaded with weights_only=True"),
        (lambda rate: rate, "step-00000005.pt cannot be written: Can't"),
    ],
)
def test_unloadable_state_is_reported_at_the_first_checkpoint(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, extra_state: object, message: str
) -> None:
    keep = torch.optim.SGD.state_dict
    monkeypatch.setattr(torch.optim.SGD, "state_dict", lambda self: {**keep(self), "odd": extra_state})
    answer = cli(*TINY).expect(1)
    assert message in answer.err
    assert "Traceback" not in answer.err
    assert not list(Path("out/checkpoints").glob("*.pt"))


class Versioned(torch.nn.Module):
    """A module whose first version stored its weight transposed."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(100.0).reshape(10, 10) / 100)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
        if local_metadata.get("version") != 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores @ self.weight


@pytest.mark.slow
def test_states_keep_their_types_and_versions(workdir: Path) -> None:
    layers = [{"_target_": "torch.nn.Flatten"}, LINEAR, {"_target_": "test_resume.Versioned"}]
    changes = {
        "model": {"_target_": "torch.nn.Sequential", "_args_": layers},
        "scheduler": {"_target_": "test_resume.warm_then_steps"},
    }
    run_tiny("whole", **changes)
    run_until_failure(**changes)
    run_tiny("out", resume="out", **changes)
    one, other = (Checkpoints(Path(name)).load() for name in ("whole", "out"))
    assert identical(one["model"], other["model"])
    assert identical(one["scheduler"], other["scheduler"])


def warm_then_steps(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    schedules = torch.optim.lr_scheduler
    parts = [schedules.LinearLR(optimizer, 0.5, total_iters=3), schedules.MultiStepLR(optimizer, [1], 0.1)]
    return schedules.SequentialLR(optimizer, parts, [3])


def test_resume_needs_the_folder_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"run\.json was not written by this package"):
        RunFolder.reopen(tmp_path)


def raise_disk_full(state: object, file: object) -> None:
    raise OSError(28, "No space left on device")


def raise_error_of_pytorch(state: object, file: object) -> None:
    try:
        raise_disk_full(state, file)
    except OSError:
        raise RuntimeError("[enforce fail at inline_container.cc:679] . unexpected pos 128")  # noqa: B904


@pytest.mark.slow
def test_full_disk_keeps_the_previous_checkpoint(cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path("out/checkpoints/step-00000005.pt").read_bytes()
    for save in (raise_disk_full, raise_error_of_pytorch):
        with monkeypatch.context() as patch:
            patch.setattr("instrument.training.checkpoint.torch.save", save)
            answer = cli("resume=out")
        assert answer.code == 1
        assert "step-00000010.pt cannot be written: No space left on device" in answer.err
        assert Path("out/checkpoints/step-00000005.pt").read_bytes() == before
        assert [file.name for file in Path("out/checkpoints").iterdir()] == ["step-00000005.pt"]
    assert resume_here(Path("out")).info["status"] == "done"


class InterruptedFile(io.BytesIO):
    """A file whose second write is interrupted."""

    def write(self, content: Any) -> int:
        if self.tell():
            raise KeyboardInterrupt
        return super().write(content)


def test_interrupt_in_a_write_of_a_checkpoint_is_no_failure(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.training.checkpoint.open", lambda *_: InterruptedFile(), raising=False)
    with pytest.raises(KeyboardInterrupt):
        run_tiny("out")
    assert instrument.load("out").info["status"] == "interrupted"
    assert not list(Path("out/checkpoints").iterdir())


CHANGES = {
    "clip": {"action": "clip", "value": 0.01},
    "scale": {"action": "scale", "factor": 2.0},
    "round": {"action": "modify", "fn": "quantize"},
}


def state_dict_hooks() -> dict[str, dict[str, Any]]:
    """Return hooks of all state-dict kinds and supported actions, on model and optimizer."""
    return {
        f"{kind.name}_{name}_{role.partition('.')[0]}": {"layers": "**", "kind": kind.name, "role": role, **action}
        for kind in KINDS.values()
        for name, action in {"seen": {"action": "record"}, **CHANGES}.items()
        for role in ("entry", "state.exp_avg")
        if kind.family == "state_dict" and (name == "seen" or kind.can_change(role))
    }


def run_tiny(folder: str, resume: str | None = None, every: int = 2, **changes: Any) -> None:
    """Train for a few steps, with a checkpoint at every second step by default."""
    raw = {
        **CONFIG,
        "name": "tiny",
        "model": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.Flatten"}, LINEAR]},
        "data": {"dataset": DIGITS, "eval_slice": {"split": "test", "stop": 8}},
        "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01},
        "train": {"steps": 5, "batch_size": 8, "checkpoint": {"every": every}},
        **changes,
    }
    run(parse_config({**raw, "resume": resume}), Path(folder), Terminal(quiet=True), raw=raw, overrides={})


def run_until_failure(calls: int = 3, function: str = "loop.gradient_norm", **options: Any) -> None:
    """Run in the folder `out` until a function fails (see `failing_after`): by default, at step 3."""
    with failing_after(calls, function), pytest.raises(RuntimeError, match="stopped here"):
        run_tiny("out", **options)


LINEAR = {"_target_": "torch.nn.Linear", "in_features": 64, "out_features": 10}


@pytest.mark.slow
def test_checkpoints_have_unmodified_values_with_state_dict_hooks(workdir: Path) -> None:
    """A resumed run, an uninterrupted run and a run without these hooks end in the same state."""
    hooks = state_dict_hooks()
    run_tiny("baseline")
    run_tiny("whole", hooks=hooks)
    run_until_failure(hooks=hooks)
    run_tiny("out", resume="out", hooks=hooks)
    baseline, uninterrupted, resumed = (Checkpoints(Path(name)).load() for name in ("baseline", "whole", "out"))
    for name in ("step", "model", "buffers", "optimizer", "random"):
        assert identical(baseline[name], uninterrupted[name]), name
        assert identical(baseline[name], resumed[name]), name
    one, other = instrument.load("whole"), instrument.load("out")
    assert_same_tables(one, other, "stats", "effects", "coverage")
    assert one.effects.empty

    coverage = one.coverage.set_index("hook")
    saved = coverage[coverage.index.str.fullmatch("state_dict_(pre|post)_seen_(entry|state)")]
    assert set(zip(saved.expected, saved.fired, saved.cause, strict=True)) == {(3, 3, "")}, (
        "hooks should fire after 2, 4 and 5 steps"
    )
    changed = coverage[coverage.index.str.match("state_dict_post_(clip|scale|round)")]
    assert set(zip(changed.expected, changed.fired, changed.cause, strict=True)) == {(0, 0, CHECKPOINT)}
    assert sum(CHECKPOINT in message for message in one.events.message) == 2 * len(CHANGES)


@pytest.mark.slow
def test_several_resumes_count_like_an_uninterrupted_run(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that a budget samples at every second scheduled step keeps its steps."""
    hooks = {
        "sampled": {"layers": "1", "kind": "forward", "action": "record"},
        "saved": {"layers": "1", "kind": "state_dict_post", "action": "record"},
        "tests": {"layers": "1", "kind": "forward", "action": "record", "phase": "eval"},
    }
    original = AttachedHook.__init__

    def sample(attached: AttachedHook, *args: Any, **options: Any) -> None:
        original(attached, *args, **options)
        attached.subsampling = 2 if attached.site.spec.name == "sampled" else 1

    monkeypatch.setattr(AttachedHook, "__init__", sample)
    run_tiny("whole", hooks=hooks)
    run_until_failure(hooks=hooks)  # it resumes after 2 steps, and then after 4 steps
    run_until_failure(2, resume="out", hooks=hooks)
    run_tiny("out", resume="out", hooks=hooks)
    one, other = instrument.load("whole"), instrument.load("out")
    for recorded in (one, other):
        coverage = recorded.coverage.groupby("hook").expected.max().to_dict()
        assert coverage == {"sampled": 3, "saved": 3, "tests": 1}, "steps 0, 2, 4; after 2, 4 and 5 steps; at the end"
        assert list(recorded.stats[recorded.stats.hook == "sampled"].step) == [0, 2, 4]
    pd.testing.assert_frame_equal(one.coverage, other.coverage)
    assert list(other.events.rule).count("resumed") == 2
    states = [Checkpoints(recorded.path).load()["probe"] for recorded in (one, other)]
    assert states[0] == states[1]


def test_interrupt_between_the_parts_of_a_checkpoint(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = {"seen": {"layers": "1", "kind": "forward", "action": "record"}}
    original, handler = table_writer.convert_journal, signal.signal(signal.SIGINT, signal.default_int_handler)

    def convert(*args: Any, **options: Any) -> Any:
        converted = original(*args, **options)
        if Path("out/checkpoints").exists():  # in the second one, after 4 steps
            signal.raise_signal(signal.SIGINT)
        return converted

    with monkeypatch.context() as patch:
        patch.setattr(table_writer, "convert_journal", convert)
        with pytest.raises(KeyboardInterrupt):
            run_tiny("out", hooks=hooks)
    signal.signal(signal.SIGINT, handler)
    run = instrument.load("out")
    assert (run.info["status"], run.problems) == ("interrupted", [])
    assert list(run.stats.step) == [0, 1, 2, 3]
    run_tiny("out", resume="out", hooks=hooks)
    assert list(instrument.load("out").stats.step) == [0, 1, 2, 3, 4]


def test_events_at_the_step_of_a_checkpoint_are_kept(workdir: Path) -> None:
    """A budget changes rates after the rows of a step are written. One row of 70 bytes per step exceeds 200 bytes in 5 steps."""
    options: dict[str, Any] = {"every": 1, "budget": {"bytes": 200}}
    options["hooks"] = {"seen": {"layers": "1", "kind": "forward", "action": "record"}}
    with failing_after(1), pytest.raises(RuntimeError, match="stopped here"):
        run_tiny("out", **options)
    run_tiny("out", resume="out", **options)
    run = instrument.load("out")
    (event, _) = run.events[run.events.rule == "budget"].message
    assert event == "70 bytes are recorded, the budget is 200: hook 'seen' on 1 is sampled once in 4 scheduled steps"
    assert list(run.stats.step) == [0, 4]


@pytest.mark.slow
def test_resumed_forward_run_counts_like_an_uninterrupted_run(workdir: Path) -> None:
    options: dict[str, Any] = {
        "mode": "forward",
        "data": {"dataset": DIGITS, "slice": {"split": "train", "stop": 40}},
        "train": {"steps": 5, "batch_size": 8, "checkpoint": {"every": 2}},
        "hooks": {"seen": {"layers": "1", "kind": "forward", "action": "record"}},
    }
    run_tiny("whole", **options)
    run_until_failure(function="loop.forward_step", **options)
    run_tiny("out", resume="out", **options)
    states = [Checkpoints(Path(name)).load()["probe"] for name in ("whole", "out")]
    assert [hook["expected"] for hook in states[0]["hooks"]] == [5]
    assert states[0] == states[1]
