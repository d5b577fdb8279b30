"""Remote copies: runs are uploaded to a folder in memory, or to a bucket on a local S3 server, while they run."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_runs import forward_steps
from buckets import KEY, NO_ANSWER, SECRET, new_clients
from conftest import run_in
from run_folders import write_run
from tiers import tiered
from training_runs import compose, train_here

import instrument
from instrument import ConfigError, InstrumentWarning
from instrument.commands.upload import main
from instrument.config.experiment import SinkConfig
from instrument.storage import remote_transfer, run_upload
from instrument.storage.parts import Part, new_part
from instrument.storage.remote_folder import RemoteFolder
from instrument.storage.remote_transfer import send_all
from instrument.storage.run_search import report_command
from instrument.storage.run_upload import RemoteCopy
from instrument.tables.schemas import TABLES
from instrument.training.checkpoint import Checkpoints
from instrument.training.sweep_jobs import jobs_in

Cli = Callable[..., Any]
TINY = ["model=mlp", "model.sizes=[64,16,10]", "data=digits", "hooks=activations", "train.steps=6"]


def info_at(address: str) -> dict[str, Any]:
    return json.loads(RemoteFolder(address, "").read("run.json") or b"")  # type: ignore[no-any-return]


def names(address: str) -> set[str]:
    return set(RemoteFolder(address, "").sizes())


def local(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def assert_bit_identical(one: Path, other: Path) -> None:
    """Assert that two runs of TINY with a checkpoint at every second step are bit-identical."""
    states = [Checkpoints(folder, 2).load() for folder in (one, other)]
    assert repr(states[0]["random"]) == repr(states[1]["random"])
    for name, weights in states[0]["model"].items():
        assert torch.equal(weights, states[1]["model"][name])
    assert instrument.load(one).metrics.loss.tolist() == instrument.load(other).metrics.loss.tolist()


@pytest.fixture(params=tiered(["memory", "s3"], ["memory"]))
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of an empty remote folder, for what does not depend on the storage."""
    return request.getfixturevalue("bucket") if request.param == "s3" else f"memory:/{tmp_path}/there"


TOKEN = "session/token+that/is+not/written"


@pytest.mark.slow
def test_finished_run_is_uploaded_and_bit_identical(
    cli: Cli, baseline: tuple[Path, str], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run logs everything, and no credentials are in its output and its files."""
    begin = run_upload.Upload.begin

    def logged(self: run_upload.Upload) -> None:
        logging.getLogger("some.client").debug("everything is logged")
        begin(self)

    monkeypatch.setattr(run_upload.Upload, "begin", logged)
    out, address = Path("runs/tiny/one"), f"{bucket}/some/tiny/one"
    more = (f"sink.remote={bucket}/some", f"hydra.run.dir={out}", "report=true", "hydra.verbose=true")
    with new_clients(AWS_SESSION_TOKEN=TOKEN):
        answer = cli(*TINY, "train.checkpoint.every=2", *more)
    assert (answer.code, answer.err) == (0, "")
    assert f"remote      {address}" in answer.out
    there = RemoteFolder(address, "")
    sent = {name: there.read(name) or b"" for name in there.sizes()}
    assert set(sent) == local(out) - {".lock"}
    info = json.loads(sent["run.json"])
    assert (info["status"], info["remote"]) == ("done", address)
    assert_bit_identical(baseline[0], out)
    assert json.loads((baseline[0] / "run.json").read_text())["remote"] is None

    assert "everything is logged" in (out / "instrument.log").read_text()
    written = [(out / name).read_bytes() for name in local(out)] + [*sent.values()]
    assert len(written) > 20
    for secret in (KEY, SECRET, TOKEN):
        assert not [content for content in written if secret.encode() in content]
        assert secret not in answer.out


@pytest.mark.slow
def test_remote_sweep_has_the_layout_of_the_local_sweep(cli: Cli, remote: str) -> None:
    answer = cli("-m", *TINY, f"sink.remote={remote}", "seed=1,2", "hydra.sweep.dir=runs/tiny/sweep_1")
    assert answer.code == 0, answer.err
    records = {name for name in names(remote) if name.endswith("run.json")}
    assert records == {"tiny/sweep_1/0/run.json", "tiny/sweep_1/1/run.json"}
    address = f"{remote}/tiny/sweep_1"
    assert f"remote      {address}\n" in answer.out
    assert [(job.name, job.status) for job in jobs_in(address).jobs()] == [("0", "done"), ("1", "done")]
    RemoteFolder(f"{address}/0", "").remove("run.json")
    assert [(job.name, job.status) for job in jobs_in(address).jobs()] == [("0", "missing"), ("1", "done")]


@pytest.mark.spread(1)
@pytest.mark.parametrize("more", [[], ["-m", "seed=1,2"], ["-m", "sink.remote=memory://x,s3://k:hushhush@b"]])
def test_address_with_credentials_is_refused(cli: Cli, more: list[str]) -> None:
    remote = [] if any("remote" in argument for argument in more) else ["sink.remote=s3://k:hushhush@b"]
    answer = cli(*more, *TINY, *remote)
    assert answer.code == 2
    assert "sink.remote: the address must not contain a password, key or query" in answer.err
    assert "hushhush" not in answer.out + answer.err
    assert not [file for file in Path().rglob("*") if file.is_file() and b"hushhush" in file.read_bytes()]
    assert not list(Path().rglob("run.json"))


@pytest.mark.slow
def test_address_with_credentials_in_a_file_is_refused(cli: Cli) -> None:
    Path("conf/exp").mkdir(parents=True)
    Path("conf/exp/mine.yaml").write_text("# @package _global_\nsink: {remote: 's3://k:hushhush@b'}\n")
    for more in ([], ["-m", "seed=1,2"]):
        answer = cli(*more, *TINY, "+exp=mine")
        assert (answer.code, "hushhush" in answer.out + answer.err) == (2, False)
    assert not list(Path().rglob("run.json"))


@pytest.mark.slow
def test_missing_bucket_is_reported_before_training(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sink\.remote: cannot write to the remote folder: FileNotFoundError"):
        train_here(tmp_path / "out", *TINY, "sink.remote=s3://elsewhere")
    assert not (tmp_path / "out").exists()


def test_remote_run_folder_is_refused(cli: Cli) -> None:
    answer = cli(*TINY, "hydra.run.dir=s3://bucket/out")
    assert answer.code == 2
    assert "hydra.run.dir: the folder of a run must be local" in answer.err
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_run_continues_without_a_connection_and_is_uploaded_later(
    cli: Cli,
    baseline: tuple[Path, str],
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(remote_transfer, "PAUSES", (0.01,))
    with new_clients(AWS_ENDPOINT_URL=NO_ANSWER):
        answer = cli(*TINY, "train.checkpoint.every=2", f"sink.remote={bucket}", "hydra.run.dir=out")
    assert answer.code == 0
    assert_bit_identical(baseline[0], Path("out"))
    warning = re.sub(r"\s+", " ", answer.out)
    assert f"warning {bucket}/out: EndpointConnectionError" in warning
    assert "upload the missing files with: python -m instrument.upload out" in warning
    (event,) = instrument.load("out").events.query("rule == 'remote'").message
    assert event.endswith("the upload is retried, all files are in out")

    assert main(["out"]) == 0
    assert names(f"{bucket}/out") == local(Path("out")) - {".lock"}
    assert " files uploaded to " in capfd.readouterr().out
    assert main(["out"]) == 0
    assert "no new files uploaded to " in capfd.readouterr().out


def test_failed_run_is_uploaded_and_resume_removes_remote_rows(
    cli: Cli, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run fails two steps after its last checkpoint."""
    save = Checkpoints.save

    def fail(self: Checkpoints, experiment: Any, probe: Any, *rest: Any) -> None:
        if probe.step == 6:
            raise RuntimeError("broken")
        save(self, experiment, probe, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", fail)
        assert cli(*TINY, "train.checkpoint.every=2", f"sink.remote={remote}", "hydra.run.dir=out").code == 1
    broken = RemoteFolder(f"{remote}/out", "")
    assert info_at(f"{remote}/out")["status"] == "failed"
    assert names(f"{remote}/out") == local(Path("out")) - {".lock"}

    rows = len(instrument.load("out").metrics)

    def unreachable(*arguments: object) -> None:
        raise ConnectionError

    with monkeypatch.context() as patched:
        patched.setattr(run_upload, "remove_parts_after", unreachable)
        answer = cli("resume=out")
    assert answer.code == 2
    assert "cannot remove the rows of repeated steps from the remote folder: ConnectionError" in answer.err
    assert len(instrument.load("out").metrics) == rows

    before = {name: broken.read(name) for name in broken.sizes() if name.startswith("metrics/")}
    answer = cli("resume=out")
    assert answer.code == 0, answer.err
    parts = {name for name in local(Path("out")) if name.endswith(".parquet")}
    assert {name for name in broken.sizes() if name.endswith(".parquet")} == parts
    after = {name: broken.read(name) for name in broken.sizes() if name.startswith("metrics/")}
    assert after == {name: (Path("out") / name).read_bytes() for name in after}
    assert before != after


@pytest.mark.slow
def test_interrupted_run_is_uploaded(cli: Cli, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("instrument.training.runner._Training._end_step", stop)
    assert cli(*TINY, f"sink.remote={bucket}", "hydra.run.dir=out").code == 130
    assert info_at(f"{bucket}/out")["status"] == "interrupted"


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of a run without a remote folder."""
    place = tmp_path_factory.mktemp("bare")
    answer = run_in(place, *TINY, "train.checkpoint.every=2", "hydra.run.dir=out")
    assert answer.code == 0, answer.err
    return place / "out", answer.out


@pytest.mark.slow
def test_keep_local_false_moves_the_rows(cli: Cli, baseline: tuple[Path, str], remote: str) -> None:
    whole, printed = baseline
    more = [f"sink.remote={remote}", "sink.keep_local=false", "report=true", "hydra.run.dir=out"]
    answer = cli(*TINY, "train.checkpoint.every=2", *more)
    assert answer.code == 0, answer.err
    assert not [name for name in local(Path("out")) if name.endswith(".parquet")]
    assert {name for name in names(f"{remote}/out") if name.endswith(".parquet")} == {
        name for name in local(whole) if name.endswith(".parquet")
    }
    assert "report.html" in names(f"{remote}/out")
    tables = answer.out[answer.out.index("Recorded") : answer.out.index("Findings")]
    assert tables == printed[printed.index("Recorded") : printed.index("Findings")]
    with pytest.warns(InstrumentWarning, match=f"files were moved to {remote}/out: load this address"):
        assert instrument.load("out").info["status"] == "done"
    assert len(instrument.load(f"{remote}/out").metrics) == len(instrument.load(whole).metrics)

    command = report_command(instrument.load(f"{remote}/out").path)
    assert command == f"python -m instrument.report {remote}/out --out report.html"


def test_keep_local_false_without_a_remote_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires 'remote'"):
        compose(*TINY, "sink.keep_local=false")


def test_ranks_upload_their_parts_and_rank_0_the_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_upload, "CHECK_SECONDS", 0.01)
    folder, uploaded = write_run(tmp_path / "run"), list[str]()
    sink = SinkConfig(remote=f"memory:/{tmp_path}/there")
    copies = []
    for rank in (0, 1):
        monkeypatch.setattr(run_upload, "own_rank", lambda rank=rank: rank)
        copies.append(RemoteCopy(folder, sink, pytest.fail, lambda address, size: uploaded.append(address)))
        copies[rank].begin()
        with new_part(folder, TABLES["stats"], Part(rank, 0)):
            pass
    for rank in (1, 0):
        monkeypatch.setattr(run_upload, "own_rank", lambda rank=rank: rank)
        with copies[rank]:
            pass
        assert f"stats/part-000{rank}-000000.parquet" in names(copies[rank].address)
    assert names(copies[0].address) == local(folder)
    assert uploaded == [f"memory:/{tmp_path}/there/run"]


def test_ctrl_c_interrupts_the_upload(cli: Cli, remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: run_upload.Upload) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run_upload.Upload, "end", stop)
        answer = cli(*TINY, f"sink.remote={remote}", "hydra.run.dir=out")
    assert answer.code == 130
    assert "(interrupted); upload the missing files with: python -m instrument.upload out" in re.sub(
        r"\s+", " ", answer.out
    )
    assert json.loads(Path("out/run.json").read_text())["status"] == "done"
    assert main(["out"]) == 0
    assert info_at(f"{remote}/out")["status"] == "done"


def custom_loop(out: Path | None, remote: str) -> None:
    hooks = {"out": {"layers": "**", "kind": "forward", "action": "record"}}
    forward_steps(torch.nn.Linear(3, 2), hooks, torch.randn(3, 4, 3), out=out, remote=remote)


def test_custom_loop_uploads_its_rows(remote: str, tmp_path: Path) -> None:
    custom_loop(tmp_path / "runs" / "mine", remote)
    run = instrument.load(f"{remote}/mine")
    assert (run.info["status"], len(run.stats)) == ("done", 3)
    assert run.info["remote"] == f"{remote}/mine"


@pytest.mark.slow
def test_custom_loop_continues_without_a_connection(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_transfer, "PAUSES", (0.01,))
    warning = pytest.warns(InstrumentWarning, match="upload the missing files with: python -m instrument.upload")
    with new_clients(AWS_ENDPOINT_URL=NO_ANSWER), warning:
        custom_loop(tmp_path / "mine", bucket)
    run = instrument.load(tmp_path / "mine")
    assert (len(run.stats), run.events.rule.tolist()) == (3, ["remote"])


def test_custom_loop_with_an_invalid_remote_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no files to upload"):
        custom_loop(None, "s3://bucket")
    with pytest.raises(ConfigError, match="remote: the address must not contain a password") as refused:
        custom_loop(tmp_path / "mine", "s3://key:hushhush@bucket")
    assert "hushhush" not in str(refused.value)
    assert not (tmp_path / "mine").exists()


def test_address_of_another_run_is_refused(remote: str, tmp_path: Path) -> None:
    assert send_all(write_run(tmp_path / "a/out"), RemoteFolder(f"{remote}/out", "")).failed == {}
    with pytest.raises(ConfigError, match="already contains another run, and runs are never overwritten"):
        custom_loop(tmp_path / "b/out", remote)


def test_rerun_moves_the_remote_copy_of_the_old_run_aside(remote: str, tmp_path: Path) -> None:
    old_run = tmp_path / "runs/sweep/.aside/3.1"
    write_run(old_run, used={"started": "before"}, rows={"metrics": [{"loss": 1.0}]})
    assert send_all(old_run, RemoteFolder(f"{remote}/sweep/3", "")).failed == {}
    before = names(f"{remote}/sweep/3")
    custom_loop(tmp_path / "runs/sweep/3", remote)
    assert names(f"{remote}/sweep/.aside/3.1") == before
    run = instrument.load(f"{remote}/sweep")
    assert (len(run.folders), run.info["status"]) == (1, "done")
