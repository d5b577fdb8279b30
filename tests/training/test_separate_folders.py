"""Processes on machines without a shared file system: each writes to a local folder and uploads it, and rank 0 completes the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from buckets import SECRET
from distributed_runs import RUN, run_processes
from state_comparison import assert_same_tables

import instrument
from instrument.commands.upload import main
from instrument.storage.remote_folder import RemoteFolder

TRAINING = ("model=mlp", "model.sizes=[64,16,10]", "data=digits", "hooks=activations", "train.steps=4", "quiet=true")
OUT = "hydra.run.dir=runs/both"


@pytest.mark.slow
def test_separate_folders_give_the_run_of_a_shared_one(tmp_path: Path, bucket: str) -> None:
    arguments = (*TRAINING, "train.parallel=ddp", OUT)
    done = run_processes(tmp_path, *arguments, f"sink.remote={bucket}", processes=2, machines=True)
    assert done.returncode == 0, done.stderr
    loud = [each for each in arguments if each != "quiet=true"]
    shared = run_processes(tmp_path / "shared", *loud, f"sink.remote={bucket}/shared", processes=2)
    assert shared.returncode == 0, shared.stderr
    run, expected = instrument.load(f"{bucket}/both"), instrument.load(tmp_path / "shared/runs/both")
    assert (run.info["status"], run.info["ranks"], run.info["shared_folder"]) == ("done", 2, False)
    assert not run.problems
    assert_same_tables(run, expected, "stats", "metrics", "coverage")
    assert sorted(run.stats["rank"].unique()) == [0, 1]
    assert run.info["fingerprint"] == expected.info["fingerprint"]
    for rank in (0, 1):
        folder = tmp_path / f"rank{rank}/runs/both"
        own = instrument.load(folder)
        assert own.stats["rank"].unique().tolist() == [rank]
        assert own.problems == [
            f"run.json: files of other machines are in {bucket}/both: load this address to read all rows"
        ]
        assert main([str(folder)]) == 0  # nothing is missing, and the copy of run.json replaces nothing
    assert json.loads(RemoteFolder(f"{bucket}/both", "").read("run.json") or b"").get("rank") is None

    uploaded = set(RemoteFolder(f"{bucket}/shared/both", "").sizes())  # by both processes
    files = [file.relative_to(expected.path).as_posix() for file in expected.path.rglob("*") if file.is_file()]
    assert uploaded == {file for file in files if not Path(file).name.startswith(".lock")}
    assert {name for name in uploaded if name.startswith("stats/")} == {
        f"stats/part-000{rank}-000000.parquet" for rank in (0, 1)
    }
    assert shared.stdout.count(f"remote      {bucket}/shared/both") == 1
    copy = instrument.load(f"{bucket}/shared/both")
    assert (copy.info["status"], sorted(copy.stats["rank"].unique())) == ("done", [0, 1])
    assert SECRET not in shared.stdout + shared.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("seed=1", r"hydra.run.dir: rank 1 on \S+ does not see the folder of rank 0"),
        ("train.checkpoint.every=2", r"train.checkpoint.every: rank 1 on .* require a common folder\n +given +2\n"),
    ],
)
def test_separate_folders_are_refused_before_training(tmp_path: Path, more: str, message: str) -> None:
    remote = () if more == "seed=1" else (f"sink.remote=file://{tmp_path}/there",)
    done = run_processes(tmp_path, *TRAINING, "train.parallel=ddp", OUT, more, *remote, processes=2, machines=True)
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr)
    assert done.stderr.count("    fix  ") == 1
    assert not [*tmp_path.glob("rank*/runs/both"), *tmp_path.glob("there/*")]


@pytest.mark.slow
def test_failed_rank_of_another_machine_leaves_its_rows(tmp_path: Path, bucket: str) -> None:
    model = "{_target_: failing_model.FailingModel, rank: 1, how: kill, after: 5, passes: 2}"
    hook = "+hooks.seen={layers: '*', kind: forward, action: record}"
    arguments = (
        "data=digits",
        "quiet=true",
        "train.parallel=ddp",
        f"model={model}",
        hook,
        OUT,
        f"sink.remote={bucket}",
    )
    done = run_processes(tmp_path, *arguments, processes=2, machines=True)
    assert done.returncode != 0
    assert instrument.load(f"{bucket}/both").info["status"] == "failed"
    assert main([str(tmp_path / "rank1/runs/both")]) == 0  # converts the journals of the killed process
    run = instrument.load(f"{bucket}/both")
    assert (run.info["status"], run.info["failed_rank"]) == ("failed", 0)
    assert run.stats.groupby("rank")["step"].max()[1] == 4
    assert instrument.load(tmp_path / "rank1/runs/both").info["status"] == "killed"


def test_custom_loop_in_separate_folders(tmp_path: Path, bucket: str) -> None:
    done = run_processes(tmp_path, bucket, processes=2, machines=True, module=RUN / "separate_loop.py")
    assert done.returncode == 0, done.stderr
    run = instrument.load(f"{bucket}/mine")
    assert (run.info["status"], run.info["shared_folder"], sorted(run.stats["rank"].unique())) == (
        "done",
        False,
        [0, 1],
    )


@pytest.mark.slow
def test_some_processes_of_a_custom_loop_record(tmp_path: Path) -> None:
    done = run_processes(tmp_path, processes=3, module=RUN / "separate_loop.py")
    assert done.returncode == 0, done.stderr
    run = instrument.load(tmp_path / "runs/mine")
    assert (run.info["status"], sorted(run.stats["rank"].unique())) == ("done", [0, 2])
    assert "shared_folder" not in run.info
    assert not run.problems
