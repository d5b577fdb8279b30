"""`python -m instrument.sweep`: the list of jobs of a sweep, and `--rerun` of unfinished jobs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Call, run_in
from omegaconf import OmegaConf
from run_folders import write_run
from state_comparison import assert_same_tables
from tiers import tiered

import instrument
from instrument.commands.sweep import main
from instrument.storage import lock as lock_module
from instrument.storage.lock import FolderLock
from instrument.training.sweep_jobs import Sweep, SweepJob, grouped_lines, print_summary

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "device=cpu")
TOUCHY = """from pathlib import Path


def touch(tensor, context, at):
    if context.step == at and Path("broken").exists():
        raise ValueError(f"broken at {at}")
    return 2 * tensor
"""
HOOK = "+hooks.mine={layers:layers.0,kind:forward,action:modify,fn:{_target_:touchy.touch,at:9}}"


def rows_of(out: str, begins: str = r"\d") -> list[list[str]]:
    table = out[out.index("job ") :].partition("\n\n")[0]
    return [line.split() for line in table.splitlines() if re.match(begins, line)]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory of a sweep of four jobs.

    Job 0 failed at its second step, job 1 at its third (after a checkpoint), job 2 is done, and job 3 is missing.
    """
    folder = tmp_path_factory.mktemp("swept")
    (folder / "touchy.py").write_text(TOUCHY)
    (folder / "broken").touch()
    steps = ("train.steps=4", "train.checkpoint.every=2", "seed=${hydra:job.num}")
    jobs = ("hooks=activations", "hooks.mine.fn.at=1,2,99", "hydra.sweep.dir=out")
    assert run_in(folder, "-m", *TINY, HOOK, *steps, *jobs).code == 1
    rewrite(folder / "out" / "multirun.yaml", "at=1,2,99", "at=1,2,99,100")
    (folder / "broken").unlink()
    return folder


@pytest.fixture
def swept(broken: Path, workdir: Path) -> Path:
    """Copy of the fixture `broken` in the working directory, with all paths changed to it."""
    shutil.copytree(broken, workdir, dirs_exist_ok=True)
    for file in workdir.rglob("*"):
        if file.suffix in (".yaml", ".json"):
            file.write_text(file.read_text().replace(str(broken), str(workdir)))
    return Path("out")


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a sweep of two jobs; the second was refused."""
    folder = tmp_path_factory.mktemp("refusing")
    assert run_in(folder, "-m", *TINY, "train.steps=1", "seed=1,-2", "hydra.sweep.dir=out").code == 2
    return folder / "out"


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory of a finished sweep of three jobs, in `out` with a remote copy in `there/out`."""
    folder = tmp_path_factory.mktemp("seeds")
    sent = f"sink.remote=file://{folder}/there"
    answer = run_in(folder, "-m", *TINY, "train.steps=1", "seed=1,2,3", sent, "hydra.sweep.dir=out").expect(0)
    assert f"remote      file://{folder}/there/out\n" in answer.out
    return folder


def rewrite(record: Path, values: str, others: str) -> None:
    """Replace the values of an override in the record of a sweep."""
    text = record.read_text()
    assert values in text
    record.write_text(text.replace(values, others))


def test_jobs_are_listed_with_their_status(swept: Path, call: Call) -> None:
    out = call(main, "out").expect(1).out
    assert [row[:3] for row in rows_of(out)] == [
        ["0", "failed", "hooks.mine.fn.at=1"],
        ["1", "failed", "hooks.mine.fn.at=2"],
        ["2", "done", "hooks.mine.fn.at=99"],
        ["3", "missing", "hooks.mine.fn.at=100"],
    ]
    assert [row[3:] for row in rows_of(out) if row[1] == "done"] == [["0"]]  # warnings
    assert "broken at 1" in out
    assert out.splitlines()[-1] == "4 jobs in out: 1 done, 2 failed, 1 missing"


@pytest.mark.parametrize("elsewhere", tiered([False, True], [True]))
def test_rerun_keeps_the_numbers_of_unfinished_jobs(
    swept: Path, cli: Cli, call: Call, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    before = (swept / "2" / "run.json").read_bytes()
    here = Path.cwd()
    if elsewhere:
        (here / "elsewhere").mkdir()
        monkeypatch.chdir(here / "elsewhere")
    answer = call(main, Path(os.path.relpath(here)) / "out", "--rerun").expect(0)
    out = answer.out
    monkeypatch.chdir(here)
    assert "warning" not in answer.err
    assert "3 jobs rerun" in out
    assert [f"hooks.mine.fn.at={step}  loss" in out for step in (1, 2, 99, 100)] == [True, True, False, True]
    assert out.splitlines()[-1].endswith("out: 4 done")
    sweep = instrument.load("out")
    assert sweep.runs.run.tolist() == ["0", "1", "2", "3"]
    assert [info["config"]["seed"] for info in sweep.infos] == [0, 1, 2, 3]  # each job keeps its number
    assert sweep.runs["hooks.mine.fn.at"].tolist() == [1, 2, 99, 100]
    assert (swept / "2" / "run.json").read_bytes() == before
    assert "resumed" in sweep.infos[1]  # from its checkpoint
    assert [path.name for path in (swept / ".aside").iterdir()] == ["0.1"]
    assert instrument.load(swept / ".aside" / "0.1").info["status"] == "failed"
    for job in (1, 3):
        seed = f"seed={job}"
        common = (*TINY, HOOK, "train.steps=4", "train.checkpoint.every=2", "hooks=activations")
        assert cli(*common, seed, f"hydra.run.dir=alone_{job}").code == 0
        one, other = instrument.load(swept / str(job)), instrument.load(f"alone_{job}")
        assert_same_tables(one, other, "stats", "effects", "metrics")


@pytest.mark.slow
def test_rerun_continues_after_a_job_fails_again(swept: Path, call: Call) -> None:
    Path("broken").touch()
    for attempt in (1, 2):
        answer = call(main, "out", "--rerun").expect(1)
        assert "broken at 1" in answer.err
        assert answer.out.splitlines()[-1] == "4 jobs in out: 2 done, 2 failed"
        assert len(list((swept / ".aside").glob("0.*"))) == attempt
    assert len(instrument.load("out").folders) == 4


@pytest.mark.slow
def test_rerun_does_not_change_a_finished_sweep(seeds: Path, call: Call) -> None:
    before = {file: file.stat().st_mtime_ns for file in seeds.rglob("*") if file.is_file()}
    out = call(main, str(seeds / "out"), "--rerun").expect(0).out
    assert "no jobs to rerun" in out
    assert {file: file.stat().st_mtime_ns for file in seeds.rglob("*") if file.is_file()} == before


def test_rerun_uses_the_launcher_of_the_sweep(cli: Cli, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `n_jobs=1`, joblib starts no process."""
    launcher = ("hydra/launcher=processes", "hydra.launcher.n_jobs=1")
    assert cli("-m", *TINY, "train.steps=1", "seed=2", "hydra.sweep.dir=out", *launcher).code == 0
    record = Path("out/0/run.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "status": "running"}))  # simulates a killed job
    assert [row[:2] for row in rows_of(call(main, "out").out)] == [["0", "killed"]]
    # Hydra imports its plugins again when it searches for them, so the class is only available now.
    from hydra_plugins.hydra_joblib_launcher.joblib_launcher import JoblibLauncher

    launched, launch = [], JoblibLauncher.launch

    def record_launch(self: JoblibLauncher, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> Any:
        launched.append([list(job)[-1] for job in jobs])
        return launch(self, jobs, initial_job_idx)

    monkeypatch.setattr(JoblibLauncher, "launch", record_launch)
    out = call(main, "out", "--rerun").expect(0).out
    assert launched == [["hydra.sweep.subdir=0"]]
    assert "\n1 job rerun\n" in out
    assert [row[:2] for row in rows_of(out)] == [["0", "done"]]
    assert instrument.load("out").runs.seed.tolist() == [2]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_workers")
def test_rerun_of_a_sweep_with_a_killed_worker(cli: Cli, call: Call) -> None:
    Path("killing.py").write_text(
        "import os, pathlib, signal\n\n\ndef kill(tensor, context, at):\n"
        "    if context.step == at and not pathlib.Path('mended').exists():\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n    return tensor\n"
    )
    hook = "+hooks.mine={layers:layers.0,kind:forward,action:modify,fn:{_target_:killing.kill,at:9}}"
    launcher = ("hydra/launcher=processes", "hydra.launcher.n_jobs=2", "hydra.launcher.pre_dispatch=1")
    answer = cli("-m", *TINY, "train.steps=2", hook, "hooks.mine.fn.at=9,1,8", "hydra.sweep.dir=out", *launcher)
    assert answer.code == 1
    assert "hydra_joblib_launcher failed: TerminatedWorkerError" in answer.err
    assert "Traceback" not in answer.err
    assert "1 killed" in answer.err
    out = call(main, "out").expect(1).out
    assert [row[:2] for row in rows_of(out)] == [["0", "done"], ["1", "killed"], ["2", "missing"]]
    Path("mended").touch()
    out = call(main, "out", "--rerun").expect(0).out
    assert [row[:2] for row in rows_of(out)] == [["0", "done"], ["1", "done"], ["2", "done"]]
    assert len(instrument.load("out").folders) == 3


def test_refused_job_is_listed_with_its_error(refusing: Path, call: Call) -> None:
    out = call(main, str(refusing)).out
    assert "seed: must be greater than or equal to 0" in out
    assert rows_of(out)[1][:3] == ["1", "failed", "seed=-2"]


@pytest.mark.slow
def test_sweep_of_shuffled_values_lists_existing_jobs(seeds: Path, tmp_path: Path, call: Call) -> None:
    """Each expansion has another order, so the missing jobs are not known."""
    out = shutil.copytree(seeds / "out", tmp_path / "out")
    rewrite(out / "multirun.yaml", "seed=1,2,3", "seed=shuffle(range(1,4))")
    shutil.rmtree(out / "1")
    assert [row[:2] for row in rows_of(call(main, str(out)).out)] == [["0", "done"], ["2", "done"]]
    assert "their values are shuffled" in call(main, str(out), "--rerun").err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ("scheduler=glob(*)", ["scheduler=cosine", "scheduler=none", "scheduler=step"]),
        (
            "+hooks.a={layers:x,factor:0.5},{layers:x,factor:2},null",
            ["hooks.a.factor=0.5", "hooks.a.factor=2", "hooks.a=null"],  # the fields that differ
        ),
        ({"seed": "1,2"}, ["seed=1", "seed=2"]),  # of a file, and not of the command line
    ],
)
def test_missing_jobs_are_listed(seeds: Path, tmp_path: Path, values: str | dict[str, str], labels: list[str]) -> None:
    record = OmegaConf.load(seeds / "out" / "multirun.yaml")
    record.hydra.overrides.task.remove("seed=1,2,3")
    if isinstance(values, str):
        record.hydra.overrides.task.append(values)
    else:
        record.hydra.sweeper.params = values
    OmegaConf.save(record, tmp_path / "multirun.yaml")
    sweep = Sweep(tmp_path)
    assert [sweep.label(job) for job in sweep.jobs()] == labels


def test_rerun_of_a_running_sweep_is_refused(swept: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "LOCK_TIMEOUT", 0.0)
    lock = FolderLock(swept.resolve())
    assert lock.acquire()
    try:
        answer = call(main, "out", "--rerun").expect(2)
    finally:
        lock.release()
    assert "the sweep is in progress in another process" in answer.err
    assert not (swept / ".aside").exists()


@pytest.mark.slow
def test_trials_of_a_search_are_listed_and_cannot_be_rerun(cli: Cli, call: Call) -> None:
    search = ("hydra/sweeper=search", "hydra.sweeper.n_trials=1", "hydra.sweep.dir=out")
    assert cli("-m", *TINY, "train.steps=1", "optimizer.lr=interval(0.1,1)", *search).code == 0
    out = call(main, "out").expect(0).out
    assert [row[1] for row in rows_of(out)] == ["done"]
    assert all(row[2].startswith("optimizer.lr=0.") for row in rows_of(out))
    err = call(main, "out", "--rerun").expect(2).err
    assert "OptunaSweeper" in err
    assert "hydra.sweeper.storage=sqlite:///" in err


def test_jobs_in_nested_folders_are_listed_without_rerun(cli: Cli, call: Call) -> None:
    folder = ("hydra.sweep.dir=out", "hydra.sweep.subdir=${name}/seed_${seed}")
    assert cli("-m", *TINY, "train.steps=1", "name=a", "seed=1,-2", *folder).code == 2
    out = call(main, "out").expect(1).out
    assert [row[:2] for row in rows_of(out, "a/")] == [["a/seed_1", "done"], ["a/seed_-2", "failed"]]
    err = call(main, "out", "--rerun").expect(2).err
    assert "hydra.sweep.subdir" in err


@pytest.mark.spread(1)
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(130)])
def test_interrupted_rerun_lists_the_remaining_jobs(
    swept: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    """The exception is raised by a launcher or by a job."""

    def interrupted(sweep: Sweep) -> int:
        raise stop

    monkeypatch.setattr("instrument.commands.sweep.rerun", interrupted)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["out", "--rerun"])
    assert ended.value.code == 130
    err = capfd.readouterr().err
    assert "4 jobs in out: 1 done, 2 failed, 1 missing" in err
    assert err.splitlines()[-1] == "rerun        python -m instrument.sweep out --rerun"


def test_runs_without_a_sweep_are_listed_locally_and_remotely(tmp_path: Path, call: Call) -> None:
    for name, norm, status in (("10", 10, "failed"), ("9", 0.1, "done"), ("a/b", None, "interrupted")):
        overrides = {"hooks.tame.norm": norm, "model": "mlp"}
        config = {"sink": {"keep_local": False}}
        error = {"failed": "HookError: broken\nat step 3", "interrupted": "KeyboardInterrupt: "}.get(status)
        used = {"error": error, "remote": "memory://there"}
        write_run(tmp_path / "by_hand" / name, overrides=overrides, config=config, status=status, used=used)
    for folder in (str(tmp_path / "by_hand"), f"file://{tmp_path}/by_hand"):
        answer = call(main, folder).expect(1)
        out = answer.out
        assert answer.err == ""
        assert rows_of(out, "[0-9a]") == [
            ["9", "done", "hooks.tame.norm=0.1"],
            ["10", "failed", "hooks.tame.norm=10", "HookError:", "broken"],
            ["a/b", "interrupted", "hooks.tame.norm=null", "KeyboardInterrupt"],
        ]
        assert out.splitlines()[-2:] == [
            f"3 jobs in {folder}: 1 done, 1 failed, 1 interrupted",
            "this folder has no record of a sweep: missing jobs are not listed",
        ]
        err = call(main, folder, "--rerun").expect(2).err
        assert ("multirun.yaml" in err) == ("://" not in folder)


@pytest.mark.slow
def test_remote_sweep_lists_its_missing_jobs(seeds: Path, tmp_path: Path, call: Call) -> None:
    remote = shutil.copytree(seeds / "there" / "out", tmp_path / "out")
    assert (remote / "multirun.yaml").read_text() == (seeds / "out" / "multirun.yaml").read_text()
    shutil.rmtree(remote / "1")
    answer = call(main, f"file://{remote}").expect(1)
    out = answer.out
    assert answer.err == ""
    assert rows_of(out) == [["0", "done", "seed=1", "0"], ["1", "missing", "seed=2"], ["2", "done", "seed=3", "0"]]
    assert out.splitlines()[-1] == f"3 jobs in file://{remote}: 2 done, 1 missing"
    assert call(main, f"file://{remote}", "--rerun").code == 2


@pytest.mark.slow
def test_remote_sweep_of_shuffled_values_lists_existing_jobs(seeds: Path, tmp_path: Path, call: Call) -> None:
    remote = shutil.copytree(seeds / "there" / "out", tmp_path / "out")
    rewrite(remote / "multirun.yaml", "seed=1,2,3", "seed=shuffle(range(1,4))")
    shutil.rmtree(remote / "1")
    out = call(main, f"file://{remote}").out
    assert [row[:2] for row in rows_of(out)] == [["0", "done"], ["2", "done"]]


@pytest.mark.slow
def test_existing_remote_sweep_is_not_overwritten(seeds: Path, cli: Cli) -> None:
    remote = shutil.copytree(seeds / "there", Path("there").resolve())
    before = (remote / "out" / "multirun.yaml").read_text()
    swept = ("-m", *TINY, "train.steps=1", "seed=1", f"sink.remote=file://{remote}")
    answer = cli(*swept, "hydra.sweep.dir=elsewhere/out").expect(2)
    assert answer.err.count("sink.remote: the folder already contains a sweep") == 1
    assert (remote / "out" / "multirun.yaml").read_text() == before
    assert not Path("elsewhere", "out").exists()


@pytest.mark.slow
def test_jobs_with_different_addresses_have_no_common_remote(cli: Cli) -> None:
    swept = f"sink.remote=file://{Path('one').resolve()},file://{Path('two').resolve()}"
    assert "remote  " not in cli("-m", *TINY, "train.steps=1", swept, "hydra.sweep.dir=out").expect(0).out
    assert Path("two/out/1/run.json").exists()
    assert not Path("two/out/multirun.yaml").exists()


def test_sweep_runs_if_its_record_cannot_be_sent(cli: Cli) -> None:
    Path("there").write_text("a file, no folder")
    answer = cli("-m", *TINY, "train.steps=1", "seed=1", f"sink.remote=file://{Path('there').resolve()}/x")
    assert "warning: multirun.yaml was not uploaded to file://" in answer.err
    assert "1 job in" in answer.out + answer.err


def test_single_run_is_refused(swept: Path, call: Call) -> None:
    err = call(main, "out/2").expect(2).err
    assert "this is the folder of a single run, not of a sweep" in err
    assert "similar  out\n" in err


def test_jobs_with_equal_results_are_grouped() -> None:
    errors = {3: "HookError: a", 7: "HookError: a", 8: "HookError: a", 9: "HookError: b", 20: "HookError: a"}
    left = [
        SweepJob(str(number), Path(str(number)), (), "failed" if number in errors else "missing", errors.get(number))
        for number in (*errors, *range(100, 120))
    ]
    assert grouped_lines(left) == [
        "20 missing  100, 101, 102, 103, 104, 105, 106, 107, ...",
        "4 failed  3, 7, 8, 20  HookError: a",
        "1 failed  9  HookError: b",
    ]
    assert grouped_lines(left[:20]) == []
    scattered = [SweepJob(f"job_{number}", Path(), (), "killed", None) for number in range(30)]
    assert grouped_lines(scattered) == [f"30 killed  {', '.join(f'job_{number}' for number in range(8))}, ..."]
    unlike = [SweepJob(str(number), Path(), (), "failed", str(number)) for number in range(30)]
    assert grouped_lines(unlike)[-1] == "and 10 more"
    assert len(grouped_lines(unlike)) == 21


def test_long_job_list_ends_with_a_short_summary(
    refusing: Path, workdir: Path, call: Call, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(refusing, "out")
    rewrite(Path("out/multirun.yaml"), "seed=1,-2", "seed=range(1,61)")
    out = call(main, "out").expect(1).out
    assert len(rows_of(out)) == 60
    assert out.splitlines()[-4:] == [
        *("", "58 missing  2, 3, 4, 5, 6, 7, 8, 9, ...", "1 failed  1  seed: must be greater than or equal to 0"),
        "60 jobs in out: 1 done, 1 failed, 58 missing",
    ]
    print_summary(Path("out"))
    err = capfd.readouterr().err
    assert "58 missing  2, 3, 4, 5, 6, 7, 8, 9, ..." in err
    assert "out/2  missing" not in err


def test_unreadable_run_json_is_listed_as_the_error_of_the_job(swept: Path, call: Call) -> None:
    (swept / "2" / "run.json").write_text("{")
    answer = call(main, "out")
    out, err = answer.out, answer.err
    assert rows_of(out)[2][:4] == ["2", "unknown", "hooks.mine.fn.at=99", "run.json:"]
    assert err == ""


@pytest.mark.parametrize("text", ["", "[", "name: run\n", "hydra: 3\n", b"\xff\xfe\x00"])
def test_invalid_sweep_record_is_reported(workdir: Path, call: Call, text: str | bytes) -> None:
    Path("out").mkdir()
    Path("out/multirun.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    err = call(main, "out").expect(2).err
    assert "cannot read multirun.yaml in this folder" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("folder", "error"),
    [("out", "no run.json in or below out"), ("file", "not a folder: file"), ("away", "folder not found: away")],
)
def test_folder_without_a_sweep_is_reported(workdir: Path, call: Call, folder: str, error: str) -> None:
    Path("out").mkdir()
    Path("file").touch()
    err = call(main, folder).expect(2).err
    assert f"no sweep found: {error}" in err
