"""`python -m instrument.upload`: runs that are over, killed or still running, sent to a remote folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import instrument
from instrument.upload import main

HOOKS = {"out": {"layers": "**", "kind": "forward", "action": "record"}}


def train(out: Path, copy: Path | None = None) -> None:
    """A run; what there was of it before its end is copied, as a kill would leave it."""
    model = torch.nn.Linear(3, 2)
    with instrument.attach(model, HOOKS, out=out) as probe:
        for _ in range(3):
            probe.end_step(loss=model(torch.randn(4, 3)).sum())
        if copy is not None:
            shutil.copytree(out, copy, ignore=shutil.ignore_patterns(".lock*"))


def test_a_folder_of_runs_is_sent_as_it_lies_below_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        train(tmp_path / "runs" / "sweep" / name)
    address = f"memory://{tmp_path}/there"
    assert main([str(tmp_path / "runs"), address]) == 0
    assert capsys.readouterr().out.count("files sent") == 2
    assert instrument.load(f"{address}/sweep").runs["run"].tolist() == ["a", "b"]


def test_a_run_that_was_killed_is_put_in_order_and_sent(tmp_path: Path) -> None:
    train(tmp_path / "whole", tmp_path / "killed")
    assert list((tmp_path / "killed" / "journal").glob("*.arrows"))
    assert main([str(tmp_path / "killed"), f"memory://{tmp_path}/there"]) == 0
    run = instrument.load(f"memory://{tmp_path}/there/killed")
    assert (run.info["status"], len(run.stats)) == ("killed", 3)


def test_of_a_run_that_goes_on_parts_are_sent_and_the_rest_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(3, 2)
    address = f"memory://{tmp_path}/there"
    with instrument.attach(model, HOOKS, out=tmp_path / "going") as probe:
        probe.end_step(loss=model(torch.randn(4, 3)).sum())
        assert main([str(tmp_path / "going"), address]) == 1
        assert "still running; what is in its journals is left for later" in capsys.readouterr().err
        assert instrument.load(f"{address}/going").info["status"] == "running"
    assert main([str(tmp_path / "going"), address]) == 0
    assert len(instrument.load(f"{address}/going").stats) == 1


def test_a_mistake_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "mine")
    for arguments, told in (
        ([str(tmp_path / "mine")], "the run has no remote folder of its own"),
        ([str(tmp_path / "nothing"), "memory://x"], "there is no folder"),
        ([str(tmp_path / "mine"), "s3://key:hushhush@bucket"], "may hold no password"),
        (["s3://bucket/mine"], "runs are sent from where they were made"),
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert told in err
        assert "hushhush" not in err


def test_another_run_s_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"memory://{tmp_path}/there"
    for name, code in (("a/mine", 0), ("b/mine", 1)):
        train(tmp_path / name)
        path = tmp_path / name / "run.json"
        path.write_text(path.read_text().replace('"started": "', f'"started": "{name} '))
        assert main([str(tmp_path / name), address]) == code
    assert "holds another run already" in capsys.readouterr().err
