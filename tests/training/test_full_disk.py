"""Full disks, removed folders and SIGTERM: a clear error, readable saved data, and no hang."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from conftest import Answer, run_in
from fork_server import Command
from tiers import tiered
from waiting import wait_until, wait_until_training

import instrument
from instrument.tables.schemas import TABLES

FEW_STEPS = ["train.steps=60"]
MANY_STEPS = ["train.steps=10000000"]
RUN = [
    *("model=mlp", "model.sizes=[64,16,10]", "data=digits", "hooks=activations", "hooks.activations.every=1"),
    "+hooks.kept={layers: '*', kind: forward, action: record, stats: none, tensors: true, every: 5}",
    *("+data.slice.stop=64", "+data.eval_slice.stop=32", "hydra.run.dir=out"),
]
NUMBERS = itertools.count()
SCRIPT = Path(__file__).with_name("run_with_limits.py")


def start(*arguments: str, folder: Path | None = None, limit: int = 0, user: int = 0) -> Command:
    folder = folder or Path.cwd()
    environment = {"OMP_NUM_THREADS": "1", "HOME": str(folder)}
    return Command(folder, SCRIPT, [str(limit), str(user), *RUN, *arguments], environment, f"process{next(NUMBERS)}")


def result_of(process: Command) -> Answer:
    done = process.wait()
    assert "Traceback" not in done.stderr, done.stderr
    return Answer(done.returncode, done.stdout, done.stderr)


def complete_steps(run: instrument.Run) -> int:
    """Return the number of recorded steps; assert that there is no gap and that every step is complete."""
    steps = run.metrics[run.metrics.phase == "train"].step.tolist()
    assert steps == list(range(len(steps)))
    counts = run.stats.groupby("step").size()
    assert all(counts[step] == counts[0] for step in steps)
    return len(steps)


def saved_steps(error: str) -> int:
    """Return the number of saved steps according to an error message."""
    return int(error.split("steps up to ")[1].split(" were written", maxsplit=1)[0]) + 1


@pytest.mark.slow
def test_full_disk_stops_the_run_and_reports_the_saved_steps(workdir: Path) -> None:
    err = result_of(start(*FEW_STEPS, limit=130_000)).expect(1).err
    assert "cannot write to out: File too large; steps up to " in err
    assert "the data recorded so far is in out" in err
    run = instrument.load("out")
    assert run.info["status"] == "failed"
    assert complete_steps(run) == saved_steps(err) > 20
    assert list(run.events[run.events.rule == "recording"].severity) == ["error"]
    assert run.problems == []


@pytest.mark.slow
def test_on_error_continue_trains_without_recording(workdir: Path) -> None:
    out = result_of(start(*FEW_STEPS, "sink.on_error=continue", limit=130_000)).expect(0).out
    assert out.count("RECORDING STOPPED") == 2  # immediately, and at the end
    assert "step 60/60  evaluation" in out
    run = instrument.load("out")
    assert run.info["status"] == "done"
    assert run.info["metrics"]["loss"] > 0
    assert "File too large" in run.info["recording_stopped"]
    assert 20 < complete_steps(run) < 60
    (event,) = run.events[run.events.rule == "recording"].itertuples()
    assert event.severity == "error"
    assert event.step == complete_steps(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of 400 kilobytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system takes a privilege that this process does not have")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", tiered([(), ("hooks.kept=null",), ("sink.tensors=bytes",)], quick=[()]))
def test_full_file_system_stops_the_run_with_an_event(
    tmp_path: Path, small_disk: Path, arguments: tuple[str, ...]
) -> None:
    err = result_of(start(*MANY_STEPS, f"hydra.run.dir={small_disk}/out", *arguments, folder=tmp_path)).expect(1).err
    assert "No space left on device; steps up to " in err
    run = instrument.load(small_disk / "out")
    assert run.info["status"] == "failed"
    assert "No space left" in run.info["error"]
    # Tables are written one after the other. A step is not saved if only its rows of the last table do not fit.
    last = run.metrics.step.max()
    is_last_partial = last in set(run.tensors().step) - set(run.samples.step)
    assert complete_steps(run) == saved_steps(err) + is_last_partial
    assert (run.events.rule == "recording").sum() == 1


@pytest.mark.slow
def test_removed_folder_stops_the_run(workdir: Path) -> None:
    process = start(*MANY_STEPS)
    wait_until_training(process)
    Path("out").rename("gone")  # atomic, so that no new files appear during removal
    shutil.rmtree("gone")
    err = result_of(process).expect(1).err
    assert "cannot write to out: " in err
    assert "the folder does not exist any more: nothing is saved" in err
    assert "nothing is saved: out no longer exists" in err
    assert "steps up to" not in err
    assert "the data recorded so far" not in err


@pytest.fixture
def public_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Working directory that all users can write to.

    It is not below `tmp_path`, whose parent becomes inaccessible for other users whenever pytest starts.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        monkeypatch.chdir(folder)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to an unprivileged user")
def test_read_only_folder_keeps_the_recorded_steps(public_folder: Path) -> None:
    nobody = 65534
    Path("waits.py").write_text(
        "import pathlib, time\n\n\ndef wait(tensor, context):\n"
        "    while context.step == 9 and not pathlib.Path('go').exists():\n"
        "        pathlib.Path('waiting').touch()\n        time.sleep(0.01)\n    return tensor\n"
    )
    waits = "+hooks.waits={layers: ., kind: forward, action: modify, fn: {_target_: waits.wait}}"
    process = start("train.steps=20", waits, user=nobody)
    wait_until(Path("waiting").exists)
    for folder in (Path("out"), *(path for path in Path("out").rglob("*") if path.is_dir())):
        folder.chmod(0o555)
    Path("go").touch()
    err = result_of(process).expect(1).err
    assert "cannot write to out: Permission denied; steps up to 19 were written" in err
    assert complete_steps(instrument.load("out")) == 20


@pytest.mark.slow
def test_sigterm_closes_files_and_exits_with_code_1(workdir: Path) -> None:
    process = start(*MANY_STEPS)
    wait_until_training(process)
    process.send(signal.SIGTERM)
    err = result_of(process).expect(1).err
    assert "terminated by SIGTERM: the data recorded so far is in out" in err
    run = instrument.load("out")
    assert (run.info["status"], run.info["error"]) == ("interrupted", "Terminated: terminated by SIGTERM")
    assert complete_steps(run) > 0
    assert not run.coverage.empty
    assert list(run.events.rule) == ["interrupted"]
    for name in TABLES:
        pd.read_parquet(f"out/{name}")


@pytest.mark.slow
def test_folder_of_a_running_or_killed_run_is_refused(workdir: Path) -> None:
    first = start(*MANY_STEPS)
    wait_until_training(first)
    refused = run_in(workdir, *RUN).expect(2)
    assert "the folder already contains a run" in refused.err
    first.send(signal.SIGKILL)
    assert first.wait().returncode == -signal.SIGKILL
    assert run_in(workdir, *RUN).code == 2
    assert json.loads(Path("out/run.json").read_text())["status"] == "running"
    assert instrument.load("out").info["status"] == "killed"


@pytest.mark.slow
def test_one_of_two_simultaneous_runs_in_a_folder_is_refused(workdir: Path) -> None:
    both = [start("train.steps=20") for _ in range(2)]
    codes = sorted(result_of(process).code for process in both)
    assert codes == [0, 2]
    assert complete_steps(instrument.load("out")) == 20
