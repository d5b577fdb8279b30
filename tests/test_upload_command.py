"""`python -m instrument.upload`: uploads of finished, killed and running runs to a remote folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import Call

import instrument
from instrument.commands.upload import main

HOOKS = {"out": {"layers": "**", "kind": "forward", "action": "record"}}


def train(out: Path, copy: Path | None = None) -> None:
    """Record a run. With `copy`, also copy the unfinished run, as a kill would leave it."""
    model = torch.nn.Linear(3, 2)
    with instrument.attach(model, HOOKS, out=out) as probe:
        for _ in range(3):
            probe.end_step(loss=model(torch.randn(4, 3)).sum())
        if copy is not None:
            shutil.copytree(out, copy, ignore=shutil.ignore_patterns(".lock*"))


@pytest.mark.slow
def test_upload_keeps_the_folder_layout_below_runs(tmp_path: Path, call: Call) -> None:
    for name in ("a", "b"):
        train(tmp_path / "runs" / "sweep" / name)
    address = f"memory://{tmp_path}/there"
    assert call(main, tmp_path / "runs", address).expect(0).out.count("files uploaded") == 2
    assert instrument.load(f"{address}/sweep").runs["run"].tolist() == ["a", "b"]


def test_upload_recovers_and_sends_a_killed_run(tmp_path: Path) -> None:
    train(tmp_path / "whole", tmp_path / "killed")
    assert list((tmp_path / "killed" / "journal").glob("*.arrows"))
    assert main([str(tmp_path / "killed"), f"memory://{tmp_path}/there"]) == 0
    run = instrument.load(f"memory://{tmp_path}/there/killed")
    assert (run.info["status"], len(run.stats)) == ("killed", 3)


def test_upload_of_a_running_run_is_refused(tmp_path: Path, call: Call) -> None:
    model = torch.nn.Linear(3, 2)
    address = f"memory://{tmp_path}/there"
    with instrument.attach(model, HOOKS, out=tmp_path / "going") as probe:
        probe.end_step(loss=model(torch.randn(4, 3)).sum())
        answer = call(main, tmp_path / "going", address).expect(1)
        assert "the run is in progress; nothing was changed" in answer.err
    assert main([str(tmp_path / "going"), address]) == 0
    assert len(instrument.load(f"{address}/going").stats) == 1


def test_upload_errors_are_reported(tmp_path: Path, call: Call) -> None:
    train(tmp_path / "mine")
    for arguments, message in (
        ([str(tmp_path / "mine")], "the run was started without sink.remote"),
        ([str(tmp_path / "nothing"), "memory://x"], "folder not found"),
        ([str(tmp_path / "mine"), "s3://key:hushhush@bucket"], "must not contain a password"),
        (["s3://bucket/mine"], "RUN: must be a local folder"),
    ):
        err = call(main, *arguments).expect(2).err
        assert message in err
        assert "hushhush" not in err


def test_upload_to_the_address_of_another_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"memory://{tmp_path}/there"
    for name, code in (("a/mine", 0), ("b/mine", 1)):
        train(tmp_path / name)
        path = tmp_path / name / "run.json"
        path.write_text(path.read_text().replace('"started": "', f'"started": "{name} '))
        assert main([str(tmp_path / name), address]) == code
    assert "already contains another run" in capsys.readouterr().err
