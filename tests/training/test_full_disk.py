"""The disk is full, the folder goes, the process is told to end: a clear error with what was saved, and never a hang."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from forked import Command
from waiting import until_it_trains

import instrument
from instrument.capture.tables import TABLES

SOME_STEPS = ["train.steps=300"]
ENDLESS = ["train.steps=10000000"]
RUN = [
    "model=mlp",
    "model.sizes=[64,16,10]",
    "data=digits",
    "hooks=activations",
    "hooks.activations.every=1",
    "+hooks.kept={layers: '*', kind: forward, action: record, stats: none, tensors: true, every: 5}",
    "+data.slice.stop=64",
    "+data.eval_slice.stop=32",
    "hydra.run.dir=out",
]
NUMBERS = itertools.count()
LIMITED = Path(__file__).with_name("limited.py")


def start(*arguments: str, place: Path | None = None, limit: int = 0, user: int = 0) -> Command:
    place = place or Path.cwd()
    environment = {"OMP_NUM_THREADS": "1", "HOME": str(place)}
    return Command(place, LIMITED, [str(limit), str(user), *RUN, *arguments], environment, f"process{next(NUMBERS)}")


def ended(process: Command) -> tuple[int, str, str]:
    done = process.wait()
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def whole_steps(run: instrument.Run) -> int:
    """How many steps are there without a gap, each with all of its statistics."""
    steps = run.metrics[run.metrics.phase == "train"].step.tolist()
    assert steps == list(range(len(steps)))
    counts = run.stats.groupby("step").size()
    assert all(counts[step] == counts[0] for step in steps)
    return len(steps)


def saved(error: str) -> int:
    """How many steps the message says are saved."""
    return int(error.split("steps up to ")[1].split(" are saved", maxsplit=1)[0]) + 1


def test_a_full_disk_stops_the_run_with_what_was_saved(workdir: Path) -> None:
    code, _, err = ended(start(*SOME_STEPS, limit=100_000))
    assert code == 1
    assert "out cannot be written any more: File too large; steps up to " in err
    assert "what was recorded so far is in out" in err
    run = instrument.load("out")
    assert run.info["status"] == "failed"
    assert whole_steps(run) == saved(err) > 20
    assert list(run.events[run.events.rule == "recording"].severity) == ["error"]
    assert run.problems == []


def test_where_it_is_to_continue_the_training_goes_on_without_recording_and_says_so(workdir: Path) -> None:
    code, out, err = ended(start(*SOME_STEPS, "sink.on_error=continue", limit=100_000))
    assert code == 0, err
    assert out.count("RECORDING STOPPED") == 2  # when it happens, and at the end
    assert "step 300/300  evaluation" in out
    run = instrument.load("out")
    assert run.info["status"] == "done"
    assert run.info["metrics"]["loss"] > 0
    assert "File too large" in run.info["recording_stopped"]
    assert 20 < whole_steps(run) < 300
    (event,) = run.events[run.events.rule == "recording"].itertuples()
    assert event.severity == "error"
    assert event.step == whole_steps(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system takes a privilege that this process does not have")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize(
    "arguments", [[], ["hooks.kept=null"], pytest.param(["sink.tensors=bytes"], marks=pytest.mark.slow)], ids=str
)
def test_a_disk_without_room_stops_the_run_and_has_room_to_say_so(
    tmp_path: Path, small_disk: Path, arguments: list[str]
) -> None:
    process = start(*ENDLESS, f"hydra.run.dir={small_disk}/out", *arguments, place=tmp_path)
    code, _, err = ended(process)
    assert code == 1
    assert "No space left on device; steps up to " in err
    run = instrument.load(small_disk / "out")
    assert run.info["status"] == "failed"
    assert "No space left" in run.info["error"]
    assert whole_steps(run) == saved(err)
    assert (run.events.rule == "recording").sum() == 1


def test_a_folder_that_is_removed_is_noticed_at_once(workdir: Path) -> None:
    process = start(*ENDLESS)
    until_it_trains(process)
    Path("out").rename("gone")  # in one go: new files may not come while it is emptied
    shutil.rmtree("gone")
    code, _, err = ended(process)
    assert code == 1
    assert "out cannot be written any more" in err
    assert "the folder is gone: nothing is saved there" in err
    assert "nothing is saved: out is gone" in err
    assert "steps up to" not in err
    assert "what was recorded so far" not in err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody who is kept from writing")
def test_a_folder_that_becomes_read_only_keeps_what_was_recorded(workdir: Path) -> None:
    nobody = 65534
    for path in [workdir, *workdir.parents]:
        if path.stat().st_uid == 0 and path != path.parent and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o055)
    workdir.chmod(0o777)
    Path("waits.py").write_text(
        "import pathlib, time\n\n\ndef wait(tensor, context):\n"
        "    while context.step == 9 and not pathlib.Path('go').exists():\n        time.sleep(0.01)\n    return tensor\n"
    )
    waits = "+hooks.waits={layers: ., kind: forward, action: modify, fn: {_target_: waits.wait}}"
    process = start("train.steps=60", waits, user=nobody)
    until_it_trains(process)
    for place in (Path("out"), *(path for path in Path("out").rglob("*") if path.is_dir())):
        place.chmod(0o555)
    Path("go").touch()
    code, _, err = ended(process)
    assert code == 1
    assert "out cannot be written any more: Permission denied; steps up to 59 are saved" in err
    assert whole_steps(instrument.load("out")) == 60


def test_sigterm_closes_the_files_and_ends_with_exit_code_1(workdir: Path) -> None:
    process = start(*ENDLESS)
    until_it_trains(process)
    process.send(signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 1
    assert "terminated by SIGTERM: what was recorded so far is in out" in err
    run = instrument.load("out")
    assert (run.info["status"], run.info["error"]) == ("interrupted", "Terminated: terminated by SIGTERM")
    assert whole_steps(run) > 0
    assert not run.coverage.empty
    assert list(run.events.rule) == ["interrupted"]
    for name in TABLES:
        pd.read_parquet(f"out/{name}")


def test_a_second_process_is_refused_the_folder_while_the_first_runs_and_afterwards(workdir: Path) -> None:
    first = start(*ENDLESS)
    until_it_trains(first)
    code, _, err = ended(start(*SOME_STEPS))
    assert code == 2
    assert "there is a run in this folder already" in err
    first.send(signal.SIGKILL)
    assert first.wait().returncode == -signal.SIGKILL
    assert ended(start(*SOME_STEPS))[0] == 2
    assert json.loads(Path("out/run.json").read_text())["status"] == "running"
    assert instrument.load("out").info["status"] == "killed"


def test_of_two_processes_that_begin_at_once_one_is_refused(workdir: Path) -> None:
    both = [start("train.steps=20") for _ in range(2)]
    codes = sorted(ended(process)[0] for process in both)
    assert codes == [0, 2]
    assert whole_steps(instrument.load("out")) == 20
