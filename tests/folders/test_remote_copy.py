"""Runs that are sent to a bucket on a local S3 server while they go on."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from buckets import KEY, NO_ANSWER, SECRET, new_clients
from conftest import run_in
from swept import job as made
from waiting import HANGS

import instrument
from instrument import ConfigError, InstrumentWarning
from instrument.capture.tables import TABLES
from instrument.folders.remote_copy import RemoteCopy
from instrument.report import command_for
from instrument.report.__main__ import main as report
from instrument.sinks import transfer, upload
from instrument.sinks.parts import Part, new_part
from instrument.sinks.remote import RemoteFolder
from instrument.sinks.transfer import send_all
from instrument.spec.config import SinkConfig
from instrument.sweeps.lookup import jobs_in
from instrument.training import remote_copy
from instrument.training.checkpoint import Checkpoints
from instrument.upload import main

Cli = Callable[..., Any]
TINY = ["model=mlp", "model.sizes=[64,16,10]", "data=digits", "hooks=activations", "train.steps=6"]


def names(address: str) -> set[str]:
    return set(RemoteFolder(address, "").sizes())


def local(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def assert_same_to_the_bit(one: Path, other: Path) -> None:
    """Both were trained with TINY and a checkpoint at every second step."""
    states = [Checkpoints(folder, 2).load() for folder in (one, other)]
    assert repr(states[0]["random"]) == repr(states[1]["random"])
    for name, weights in states[0]["model"].items():
        assert torch.equal(weights, states[1]["model"][name])
    assert instrument.load(one).metrics.loss.tolist() == instrument.load(other).metrics.loss.tolist()


def test_a_run_is_there_when_it_is_over_and_the_same_to_the_bit(cli: Cli, bare: tuple[Path, str], bucket: str) -> None:
    answer = cli(*TINY, "train.checkpoint.every=2", f"sink.remote={bucket}/some", "hydra.run.dir=runs/tiny/one")
    assert (answer.code, answer.err) == (0, "")
    assert f"remote      {bucket}/some/tiny/one" in answer.out
    assert names(f"{bucket}/some/tiny/one") == local(Path("runs/tiny/one")) - {".lock"}
    info = json.loads(RemoteFolder(f"{bucket}/some/tiny/one", "").read("run.json") or b"")
    assert (info["status"], info["remote"]) == ("done", f"{bucket}/some/tiny/one")
    assert_same_to_the_bit(bare[0], Path("runs/tiny/one"))


def test_a_run_without_a_remote_folder_says_so(bare: tuple[Path, str]) -> None:
    assert json.loads((bare[0] / "run.json").read_text())["remote"] is None


def test_jobs_of_a_sweep_lie_there_as_they_do_here(cli: Cli, bucket: str) -> None:
    answer = cli("-m", *TINY, f"sink.remote={bucket}", "seed=1,2", "hydra.sweep.dir=runs/tiny/sweep_1")
    assert answer.code == 0, answer.err
    assert {name for name in names(bucket) if name.endswith("run.json")} == {
        "tiny/sweep_1/0/run.json",
        "tiny/sweep_1/1/run.json",
    }
    address = f"{bucket}/tiny/sweep_1"
    assert f"remote      {address}\n" in answer.out
    assert [(job.name, job.status) for job in jobs_in(address).jobs()] == [("0", "done"), ("1", "done")]
    RemoteFolder(f"{address}/0", "").remove("run.json")
    assert [(job.name, job.status) for job in jobs_in(address).jobs()] == [("0", "missing"), ("1", "done")]


def test_secrets_are_nowhere_also_where_everything_is_logged(
    cli: Cli, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = upload.Upload.begin

    def logged(self: upload.Upload) -> None:
        logging.getLogger("some.client").debug("everything is logged")
        begin(self)

    monkeypatch.setattr(upload.Upload, "begin", logged)
    token = "session/token+that/nobody/writes/down"
    more = ("train.checkpoint.every=3", "hydra.run.dir=out", "report=true", "hydra.verbose=true")
    with new_clients(AWS_SESSION_TOKEN=token):
        answer = cli(*TINY, f"sink.remote={bucket}", *more)
    assert answer.code == 0, answer.err
    assert "everything is logged" in Path("out/instrument.log").read_text()
    written = [file.read_bytes() for file in Path("out").rglob("*") if file.is_file()]
    sent = RemoteFolder(f"{bucket}/out", "")
    written += [sent.read(name) or b"" for name in sent.sizes()]
    assert len(written) > 20
    for secret in (KEY, SECRET, token):
        assert not [content for content in written if secret.encode() in content]
        assert secret not in answer.out + answer.err


@pytest.mark.parametrize("more", [[], ["-m", "seed=1,2"], ["-m", "sink.remote=memory://x,s3://k:hushhush@b"]])
def test_credentials_in_the_address_stop_it_before_anything_is_written(cli: Cli, more: list[str]) -> None:
    remote = [] if any("remote" in argument for argument in more) else ["sink.remote=s3://k:hushhush@b"]
    answer = cli(*more, *TINY, *remote)
    assert answer.code == 2
    assert "sink.remote: an address is written into run.json" in answer.err
    assert "hushhush" not in answer.out + answer.err
    assert not [file for file in Path().rglob("*") if file.is_file() and b"hushhush" in file.read_bytes()]
    assert not list(Path().rglob("run.json"))


def test_credentials_in_an_experiment_s_file_stop_it_too(cli: Cli) -> None:
    Path("conf/exp").mkdir(parents=True)
    Path("conf/exp/mine.yaml").write_text("# @package _global_\nsink: {remote: 's3://k:hushhush@b'}\n")
    for more in ([], ["-m", "seed=1,2"]):
        answer = cli(*more, *TINY, "+exp=mine")
        assert (answer.code, "hushhush" in answer.out + answer.err) == (2, False)
    assert not list(Path().rglob("run.json"))


def test_a_bucket_that_is_not_there_costs_no_step(cli: Cli, bucket: str) -> None:
    answer = cli(*TINY, "sink.remote=s3://elsewhere", "hydra.run.dir=out")
    assert answer.code == 2
    assert "sink.remote: this place cannot be written: FileNotFoundError" in answer.err
    assert not Path("out").exists()


def test_a_run_is_not_written_to_an_address(cli: Cli) -> None:
    answer = cli(*TINY, "hydra.run.dir=s3://bucket/out")
    assert answer.code == 2
    assert "hydra.run.dir: a run is written to a folder of this machine" in answer.err
    assert not list(Path().iterdir())


def test_another_run_s_place_is_refused(cli: Cli, bucket: str) -> None:
    made(Path("a/out"))
    assert send_all(Path("a/out"), RemoteFolder(f"{bucket}/out", "")).missing == {}
    answer = cli(*TINY, f"sink.remote={bucket}", "hydra.run.dir=b/out", "seed=1")
    assert answer.code == 2
    assert "holds another run already, and none is ever overwritten" in answer.err


def test_a_run_goes_on_where_nobody_answers_as_if_there_were_none_and_is_sent_later(
    cli: Cli, bare: tuple[Path, str], bucket: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transfer, "PAUSES", (0.01,))
    with new_clients(AWS_ENDPOINT_URL=NO_ANSWER):
        answer = cli(*TINY, "train.checkpoint.every=2", f"sink.remote={bucket}", "hydra.run.dir=out")
    assert answer.code == 0
    assert_same_to_the_bit(bare[0], Path("out"))
    told = re.sub(r"\s+", " ", answer.out)
    assert f"warning {bucket}/out: EndpointConnectionError" in told
    assert "what is missing is sent by: python -m instrument.upload out" in told
    (event,) = instrument.load("out").events.query("rule == 'remote'").message
    assert event.endswith("it is tried again, all is in out")

    assert main(["out"]) == 0
    assert names(f"{bucket}/out") == local(Path("out")) - {".lock"}
    assert "files sent, " in capfd.readouterr().out
    assert main(["out"]) == 0
    assert "all is there already" in capfd.readouterr().out


def test_a_failed_run_is_sent_and_goes_on_only_where_its_rows_are_taken_back_there_too(
    cli: Cli, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails two steps behind its last checkpoint."""
    save = Checkpoints.save

    def fail(self: Checkpoints, experiment: Any, probe: Any, *rest: Any) -> None:
        if probe.step == 6:
            raise RuntimeError("broken")
        save(self, experiment, probe, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", fail)
        remote = ["train.checkpoint.every=2", f"sink.remote={bucket}", "hydra.run.dir=out"]
        assert cli(*TINY, *remote).code == 1
    broken = RemoteFolder(f"{bucket}/out", "")
    assert json.loads(broken.read("run.json") or b"")["status"] == "failed"
    assert names(f"{bucket}/out") == local(Path("out")) - {".lock"}

    rows = len(instrument.load("out").metrics)
    with new_clients(AWS_ENDPOINT_URL=NO_ANSWER):
        answer = cli("resume=out")
    assert answer.code == 2
    assert "rows of steps that are done again cannot be taken back there: EndpointConnectionError" in answer.err
    assert len(instrument.load("out").metrics) == rows

    before = {name: broken.read(name) for name in broken.sizes() if name.startswith("metrics/")}
    answer = cli("resume=out")
    assert answer.code == 0, answer.err
    parts = {name for name in local(Path("out")) if name.endswith(".parquet")}
    assert {name for name in broken.sizes() if name.endswith(".parquet")} == parts
    after = {name: broken.read(name) for name in broken.sizes() if name.startswith("metrics/")}
    assert after == {name: (Path("out") / name).read_bytes() for name in after}
    assert before != after


def test_a_run_that_was_interrupted_is_sent(cli: Cli, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("instrument.training.runner._Training._keep", stop)
    assert cli(*TINY, f"sink.remote={bucket}", "hydra.run.dir=out").code == 130
    assert json.loads(RemoteFolder(f"{bucket}/out", "").read("run.json") or b"")["status"] == "interrupted"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run without a remote one, and what it printed."""
    place = tmp_path_factory.mktemp("bare")
    answer = run_in(place, *TINY, "train.checkpoint.every=2", "hydra.run.dir=out")
    assert answer.code == 0, answer.err
    return place / "out", answer.out


def test_a_run_larger_than_the_disk_is_there_and_not_here(cli: Cli, bare: tuple[Path, str], bucket: str) -> None:
    whole, printed = bare
    more = [f"sink.remote={bucket}", "sink.keep_local=false", "report=true", "hydra.run.dir=out"]
    answer = cli(*TINY, "train.checkpoint.every=2", *more)
    assert answer.code == 0, answer.err
    assert not [name for name in local(Path("out")) if name.endswith(".parquet")]
    assert {name for name in names(f"{bucket}/out") if name.endswith(".parquet")} == {
        name for name in local(whole) if name.endswith(".parquet")
    }
    assert "report.html" in names(f"{bucket}/out")
    tables = answer.out[answer.out.index("Recorded") : answer.out.index("Findings")]
    assert tables == printed[printed.index("Recorded") : printed.index("Findings")]
    with pytest.warns(InstrumentWarning, match=f"its parts are moved to {bucket}/out: open that"):
        assert instrument.load("out").info["status"] == "done"
    assert len(instrument.load(f"{bucket}/out").metrics) == len(instrument.load(whole).metrics)

    command = command_for(instrument.load(f"{bucket}/out").path)
    assert shlex.split(command)[:2] == ["python", "-m"]
    assert report(shlex.split(command)[3:]) == 0, "what the end of a run says is to be typed works"
    assert Path("report.html").exists()


def test_parts_are_not_removed_where_nobody_keeps_them(cli: Cli) -> None:
    answer = cli(*TINY, "sink.keep_local=false")
    assert answer.code == 2
    assert "there is no 'remote' folder" in answer.err


def test_processes_send_their_own_parts_and_the_first_one_all_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "LOOK", 0.01)
    folder, voice, told = made(tmp_path / "run"), SimpleNamespace(warn=pytest.fail), list[str]()
    voice.sent = lambda address, size: told.append(address)
    sink = SinkConfig(remote=f"memory:/{tmp_path}/there")
    copies = []
    for rank in (0, 1):
        monkeypatch.setattr(remote_copy, "own_rank", lambda rank=rank: rank)
        copies.append(RemoteCopy(folder, sink, voice))
        copies[rank].begin()
        with new_part(folder, TABLES["stats"], Part(rank, 0)):
            pass
    for rank in (1, 0):
        monkeypatch.setattr(remote_copy, "own_rank", lambda rank=rank: rank)
        with copies[rank]:
            pass
        assert f"stats/part-000{rank}-000000.parquet" in names(copies[rank].address)
    assert names(copies[0].address) == local(folder)
    assert told == [f"memory:/{tmp_path}/there/run"]


@pytest.mark.slow
def test_processes_of_one_run_send_all_of_their_parts(workdir: Path, bucket: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "instrument"]
    done = subprocess.run(
        [*launcher, *TINY, "train.parallel=ddp", f"sink.remote={bucket}", "hydra.run.dir=out"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"remote      {bucket}/out") == 1
    there = names(f"{bucket}/out")
    assert {name for name in there if name.startswith("stats/")} == {
        f"stats/part-000{rank}-000000.parquet" for rank in (0, 1)
    }
    assert there == {name for name in local(Path("out")) if not Path(name).name.startswith(".lock")}
    run = instrument.load(f"{bucket}/out")
    assert (run.info["status"], sorted(run.stats["rank"].unique())) == ("done", [0, 1])
    assert SECRET not in done.stdout + done.stderr


def test_ctrl_c_ends_the_sending_too(cli: Cli, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: upload.Upload) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(upload.Upload, "end", stop)
        answer = cli(*TINY, f"sink.remote={bucket}", "hydra.run.dir=out")
    assert answer.code == 130
    assert "(interrupted); what is missing is sent by: python -m instrument.upload out" in re.sub(
        r"\s+", " ", answer.out
    )
    assert json.loads(Path("out/run.json").read_text())["status"] == "done"
    assert main(["out"]) == 0
    assert json.loads(RemoteFolder(f"{bucket}/out", "").read("run.json") or b"")["status"] == "done"


def own_loop(out: Path | None, remote: str) -> None:
    model = torch.nn.Linear(3, 2)
    with instrument.attach(
        model, {"out": {"layers": "**", "kind": "forward", "action": "record"}}, out=out, remote=remote
    ) as probe:
        for _ in range(3):
            probe.end_step(loss=model(torch.randn(4, 3)).sum())


def test_a_loop_of_one_s_own_sends_its_rows_too(bucket: str, tmp_path: Path) -> None:
    own_loop(tmp_path / "runs" / "mine", bucket)
    run = instrument.load(f"{bucket}/mine")
    assert (run.info["status"], len(run.stats)) == ("done", 3)
    assert run.info["remote"] == f"{bucket}/mine"


def test_a_loop_of_one_s_own_goes_on_where_nobody_answers(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PAUSES", (0.01,))
    told = pytest.warns(InstrumentWarning, match="what is missing is sent by: python -m instrument.upload")
    with new_clients(AWS_ENDPOINT_URL=NO_ANSWER), told:
        own_loop(tmp_path / "mine", bucket)
    run = instrument.load(tmp_path / "mine")
    assert (len(run.stats), run.events.rule.tolist()) == (3, ["remote"])


def test_a_loop_of_one_s_own_is_told_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no files to send"):
        own_loop(None, "s3://bucket")
    with pytest.raises(ConfigError, match="remote: an address is written into") as refused:
        own_loop(tmp_path / "mine", "s3://key:hushhush@bucket")
    assert "hushhush" not in str(refused.value)
    assert not (tmp_path / "mine").exists()


def test_what_a_job_left_that_is_done_again_is_put_aside_there_too(cli: Cli, bucket: str) -> None:
    left = made(Path("runs/sweep/.aside/3.1"), used={"started": "before"}, rows={"metrics": [{"loss": 1.0}]})
    assert send_all(left, RemoteFolder(f"{bucket}/sweep/3", "")).missing == {}
    before = names(f"{bucket}/sweep/3")
    answer = cli(*TINY, f"sink.remote={bucket}", "hydra.run.dir=runs/sweep/3")
    assert answer.code == 0, answer.err
    assert names(f"{bucket}/sweep/.aside/3.1") == before
    run = instrument.load(f"{bucket}/sweep")
    assert (len(run.folders), run.info["status"]) == (1, "done")
