"""The Hydra callback: errors before a run starts, names of jobs, and cleanup after refused runs."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import contents, write
from omegaconf import OmegaConf
from tiers import tiered

import instrument

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "device=cpu", "train.steps=1")


@pytest.mark.parametrize("arguments", [("hydra.run.dir=${nothing}",), ("-m", "seed=1,2", "hydra.sweep.dir=${nothing}")])
def test_invalid_folder_name_is_reported_once(cli: Cli, arguments: tuple[str, ...]) -> None:
    answer = cli(*arguments, *TINY).expect(2)
    assert answer.err.count("Interpolation key 'nothing' not found") == 1
    assert "HydraCallback" not in answer.err
    assert list(Path.cwd().iterdir()) == []


def test_sweep_with_an_unwritable_record_is_not_started(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(config: object, file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "out/multirun.yaml")

    monkeypatch.setattr(OmegaConf, "save", raise_disk_full)
    answer = cli("-m", "seed=1,2", *TINY, "hydra.sweep.dir=out").expect(1)
    assert answer.err.startswith("\nout/multirun.yaml: No space left on device\n")
    assert not Path("out/0").exists()


@pytest.mark.slow
def test_job_with_chdir_is_named_by_its_folder(cli: Cli) -> None:
    overrides = ("hydra.job.chdir=true", "hydra.sweep.dir=out")
    answer = cli("-m", "seed=1,-2", *TINY, *overrides).expect(2)
    assert f"{Path.cwd()}/out/0  seed=1  loss" in answer.out
    assert f"job {Path.cwd()}/out/1 was refused\n" in answer.err
    assert list(instrument.load("out").runs.run) == ["0"]


@pytest.mark.slow
def test_job_refused_without_a_message_is_failed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_without_message(config: object) -> None:
        raise ValueError

    monkeypatch.setattr("instrument.commands.job.read_config", raise_without_message)
    assert "out/0  failed  ValueError" in cli("-m", "seed=1", *TINY, "hydra.sweep.dir=out").expect(1).err


def test_custom_launcher_is_reported_by_its_name(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    write("conf/hydra/launcher/ours.yaml", "defaults: [slurm, _self_]\npartition: fast\n")
    monkeypatch.setenv("PATH", "")
    answer = cli("-m", "seed=1", *TINY, "hydra/launcher=ours").expect(2)
    assert "Slurm is not available" in answer.err
    assert "    given    ours\n" in answer.err


@pytest.mark.parametrize("model", ["mlp,'lenet'", "{_target_: torch.nn.Identity}"])
def test_valid_groups_are_no_error_of_another_override(cli: Cli, model: str) -> None:
    answer = cli("-m", f"model={model}", "apply=null").expect(2)
    assert answer.err.startswith("\napply: must name one of the config files")


@pytest.mark.parametrize("values", ["1,range(2,4)", "range(0,3,0)"])
def test_invalid_sweep_values_are_named(cli: Cli, values: str) -> None:
    answer = cli("-m", *TINY, f"seed={values}", "hydra.sweep.dir=out").expect(2)
    assert f"    given    seed={values}\n" in answer.err
    assert "Traceback" not in answer.err
    assert not Path("out").exists()


REFUSALS = {
    "configuration": ["train.steps=0"],
    "model": ["model.sizes=[64,a]"],
    "pattern": ["+hooks.x={layers:nope,kind:forward,action:record}"],
    "shape": ["+hooks.x={layers:layers.0,kind:forward,action:scale,factor:[1,2]}"],
    "optimizer": ["optimizer.lr=-1"],
    "checkpoint to patch from": ["+hooks.x={layers:layers.0,kind:forward,action:modify,fn:replace,run:nowhere}"],
    "composition": ["hooks.nope.every=3"],
}


@pytest.mark.spread(1)
@pytest.mark.parametrize("refusal", tiered(REFUSALS, ["configuration", "shape", "composition"]))
def test_refused_run_leaves_no_folder(cli: Cli, refusal: str) -> None:
    assert cli(*TINY, *REFUSALS[refusal]).code == 2
    assert cli(*TINY, *REFUSALS[refusal], "hydra.run.dir=some/where/out").code == 2
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.slow
def test_refused_run_keeps_other_files_of_its_folder(cli: Cli) -> None:
    for file in ("out/.hydra/config.yaml", "out/notes.txt"):
        write(file, "mine\n")
    before = contents("out")
    assert cli(*TINY, *REFUSALS["shape"], "hydra.run.dir=out").code == 2
    assert contents("out") == before
    assert cli("-m", *TINY, *REFUSALS["shape"], "seed=1", "hydra.sweep.dir=out").code == 2
    assert contents("out") == before
    Path("empty").mkdir()
    assert cli(*TINY, *REFUSALS["shape"], "hydra.run.dir=empty").code == 2
    assert list(Path("empty").iterdir()) == []


@pytest.mark.slow
def test_refused_run_keeps_the_runs_next_to_it(cli: Cli) -> None:
    assert cli(*TINY, "name=mine").code == 0
    before = contents("runs")
    assert cli(*TINY, "name=mine", *REFUSALS["shape"]).code == 2
    assert contents("runs") == before
    assert len(list(Path("runs/mine").iterdir())) == 1


@pytest.mark.slow
def test_refused_resume_does_not_change_the_run(cli: Cli) -> None:
    Path("net_of_guard.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    stop = "+hooks.x={layers:'.',kind:forward,action:modify,fn:{_target_:hook_of_guard.stop}}"
    Path("hook_of_guard.py").write_text(
        "def stop(tensor, context):\n    return tensor[:1] if context.step else tensor * 1\n"
    )
    own = ("model._target_=net_of_guard.Net", "~model.sizes", "train.steps=3", "train.checkpoint.every=1")
    assert cli(*TINY[:1], *TINY[2:4], *own, stop, "hydra.run.dir=out").code == 1
    before = contents("out")
    sys.modules.pop("hook_of_guard")
    Path("hook_of_guard.py").write_text("def halt(tensor, context):\n    return tensor\n")
    cli("resume=out").expect(2)
    assert contents("out") == before


@pytest.mark.slow
@pytest.mark.parametrize("refusal", tiered(["configuration", "shape", "composition"], ["shape", "composition"]))
def test_sweep_without_a_started_job_leaves_no_folder(cli: Cli, refusal: str) -> None:
    answer = cli("-m", *TINY, *REFUSALS[refusal], "seed=1,2").expect(2)
    assert "continue" not in answer.err
    has_started = refusal != "composition"  # Hydra reports it before it creates a folder.
    assert ("no job was started; nothing is kept in runs/run/sweep_" in answer.err) == has_started
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.slow
def test_refused_job_of_a_sweep_leaves_the_reason_and_no_run(cli: Cli) -> None:
    factor = "+hooks.x={layers:layers.0,kind:forward,action:scale,factor:1}"
    cli("-m", *TINY, factor, "hooks.x.factor=2,[1,2]", "hydra.sweep.dir=out").expect(2)
    assert "hooks.x.factor: 2 factors do not fit" in Path("out/1/refused.txt").read_text()
    assert not Path("out/1/run.json").exists()
    assert not Path("out/1/stats").exists()
    assert list(instrument.load("out").runs.status) == ["done"]


def test_refused_attachment_leaves_no_folder(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    specs = {"h": {"layers": ".", "kind": "forward", "action": "scale", "factor": [1, 2]}}
    for out in (tmp_path / "a" / "b", tmp_path / "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        (tmp_path / "there" / "notes.txt").touch()
        with pytest.raises(instrument.ConfigError), instrument.attach(model, specs, out=out):
            model(torch.ones(2, 4))
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "notes.txt"]


def test_refused_attachment_keeps_files_of_the_loop(tmp_path: Path) -> None:
    out = tmp_path / "out"
    hook = {"layers": "0", "kind": "forward", "action": "record", "tensors": True}
    specs = {"seen": hook, "cut": {**hook, "layers": "1", "slice": "0:20"}}
    mine = [out / "notes.txt", out / "sub" / "w.pt", out / "stats" / "mine.csv", out / "sub" / ".hydra" / "config.yaml"]
    mine.append(out / "sub" / "run.json")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))

    def loop() -> None:
        with instrument.attach(model, specs, out=out):
            for path in mine:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("mine\n")
            model(torch.randn(3, 4))

    with pytest.raises(instrument.ConfigError, match="slice"):
        loop()
    assert {path for path in out.rglob("*") if path.is_file()} == set(mine)


def test_configuration_error_after_a_step_keeps_the_rows(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    specs = {"h": {"layers": ".", "kind": "forward", "phase": "eval", "action": "scale", "factor": [1, 2]}}

    def loop() -> None:
        with instrument.attach(model, specs, out=tmp_path / "out") as probe:
            probe.end_step(loss=1.0)
            with probe.evaluating():
                model(torch.ones(2, 4))

    with pytest.raises(instrument.ConfigError):
        loop()
    assert list(instrument.load(tmp_path / "out").metrics.loss) == [1.0]
    assert instrument.load(tmp_path / "out").info["status"] == "failed"


def test_refused_run_keeps_files_created_meanwhile(cli: Cli) -> None:
    """For example, a downloaded dataset."""
    Path("data_of_guard.py").write_text(
        "from pathlib import Path\n\nfrom instrument.training.datasets import digits\n\n\n"
        "def load(split, size):\n    Path('downloaded').mkdir(exist_ok=True)\n    return digits(split, size)\n"
    )
    cli(*TINY, "data.dataset._target_=data_of_guard.load", *REFUSALS["shape"], "hydra.run.dir=.").expect(2)
    assert {path.name for path in Path.cwd().iterdir()} - {"__pycache__"} == {"data_of_guard.py", "downloaded"}
