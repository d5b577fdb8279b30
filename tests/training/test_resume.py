"""Resuming: a run that was killed and goes on leaves what the one leaves that was never stopped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import run_in
from forked import Command
from states import identical
from tiers import portions

import instrument
from instrument import ConfigError
from instrument.folders.run_folder import RunFolder
from instrument.kinds.reasons import CHECKPOINT
from instrument.spec.kinds import KINDS
from instrument.spec.parse import parse_config
from instrument.training.checkpoint import Checkpoints
from instrument.training.runner import run
from instrument.training.terminal import Terminal

CLOCK = ["seconds", "samples_per_second"]
Cli = Callable[..., Any]
TINY = [
    "model=mlp",
    "model.sizes=[64,16,10]",
    "data=digits",
    "hooks=activations",
    "train.steps=12",
    "train.checkpoint.every=5",
    "hydra.run.dir=out",
]


@pytest.fixture(scope="module", params=portions(4, 12, 4))
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    """Folders of runs that were never killed, and of the same ones that were killed again and again."""
    numbers: range = request.param
    place, here = tmp_path_factory.mktemp("resumed"), Path(__file__).parent
    arguments = [str(place), str(numbers.start), str(numbers.stop)]
    done = Command(place, here / "resumed.py", arguments, {"OMP_NUM_THREADS": "1"}, "process").wait()
    assert done.returncode == 0, done.stderr
    return [(place / f"{number}-whole", place / f"{number}-killed") for number in numbers]


def test_rows_and_weights_are_those_of_the_run_that_was_never_killed(pairs: list[tuple[Path, Path]]) -> None:
    for pair in pairs:
        check_equal(*map(instrument.load, pair))


def check_equal(whole: instrument.Run, killed: instrument.Run) -> None:
    assert (whole.info["status"], killed.info["status"]) == ("done", "done")
    for name in ("stats", "effects", "coverage", "layers"):
        pd.testing.assert_frame_equal(getattr(whole, name), getattr(killed, name), check_exact=True)
    pd.testing.assert_frame_equal(whole.metrics.drop(columns=CLOCK), killed.metrics.drop(columns=CLOCK))
    one, other = whole.tensors(), killed.tensors()
    assert [values.tobytes() for values in one["values"]] == [values.tobytes() for values in other["values"]]
    pd.testing.assert_frame_equal(one.drop(columns="values"), other.drop(columns="values"))
    assert list(killed.events[killed.events.rule != "resumed"].message) == list(whole.events.message)
    assert len(killed.events[killed.events.rule == "resumed"]) >= 1

    states = [Checkpoints(run.path, 1).load() for run in (whole, killed)]
    assert states[0]["step"] == states[1]["step"] == whole.info["config"]["train"]["steps"]
    for name in ("model", "buffers", "optimizer", "random", "batches"):
        assert identical(states[0][name], states[1][name]), name
    weights = killed.metrics[killed.metrics.phase == "train"].loss
    assert weights.iloc[-1] < weights.iloc[0], "it did train"


def stopped(cli: Cli, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """A run in `out` that failed at a step."""
    with monkeypatch.context() as patch:
        fails_at(patch, 8)
        assert cli(*arguments).code == 1


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that failed at a step."""
    place = tmp_path_factory.mktemp("failed")
    with pytest.MonkeyPatch.context() as patch:
        fails_at(patch, 8)
        assert run_in(place, *TINY).code == 1
    return place / "out"


@pytest.fixture
def out(workdir: Path, failed: Path) -> Path:
    """A copy of it in the working directory, to go on with."""
    return Path(shutil.copytree(failed, workdir / "out"))


def fails_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Let a run fail at a step."""
    from instrument.training import loop

    see, calls = loop.gradient_norm, [0]

    def fail(model: torch.nn.Module) -> torch.Tensor | None:
        calls[0] += 1
        if calls[0] > step:
            raise RuntimeError("stopped here")
        return see(model)

    patch.setattr(loop, "gradient_norm", fail)


def test_the_command_needs_the_folder_and_nothing_else(cli: Cli, out: Path) -> None:
    before = instrument.load("out")
    assert (before.info["status"], len(before.metrics)) == ("failed", 8)
    assert [file.name for file in Path("out/checkpoints").iterdir()] == ["step-00000005.pt"]
    hydra = {file: file.read_bytes() for file in Path("out/.hydra").iterdir()}
    answer = cli("resume=out")
    assert answer.code == 0, answer.err
    assert "step 12/12" in answer.out
    run = instrument.load("out")
    assert run.info["status"] == "done"
    assert run.info["error"] is None
    assert run.info["overrides"] == before.info["overrides"]
    assert len(run.info["resumed"]) == 1
    assert list(run.metrics.step) == [*range(12), 12]
    assert list(run.events[run.events.rule == "resumed"].message) == ["goes on after 5 steps"]
    assert not (run.events.rule == "error").any(), "what was taken back is not told"
    assert {file: file.read_bytes() for file in Path("out/.hydra").iterdir()} == hydra
    assert [file.name for file in Path("out/checkpoints").iterdir()] == ["step-00000012.pt"]


def test_a_run_that_is_done_has_nothing_left_to_do(cli: Cli) -> None:
    assert cli(*TINY).code == 0
    answer = cli("resume=out")
    assert answer.code == 2
    assert "this run is done" in answer.err


def test_a_run_without_a_checkpoint_cannot_be_resumed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(cli, monkeypatch, *TINY, "train.checkpoint.every=0")
    answer = cli("resume=out")
    assert answer.code == 2
    assert "this run has no checkpoint: train.checkpoint.every was 0" in answer.err
    assert instrument.load("out").info["status"] == "failed"
    assert len(instrument.load("out").metrics) == 8, "nothing was taken away"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["resume=nowhere"], "its run.json cannot be read: No such file"),
        (["resume=out", "train.steps=50"], "a run goes on with the configuration that it was started with"),
        (["resume=out", "+exp=mnist_hooks"], "a run goes on with the configuration"),
        (["-m", "resume=out", "seed=1,2"], "one at a time"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_named_and_take_nothing_away(cli: Cli, out: Path, arguments: list[str], told: str) -> None:
    answer = cli(*arguments)
    assert answer.code == 2
    assert told in answer.err
    assert "Traceback" not in answer.err
    assert len(instrument.load("out").metrics) == 8


def test_a_run_that_still_runs_is_not_resumed(cli: Cli, out: Path) -> None:
    place = RunFolder.again(Path("out"))
    answer = cli("resume=out")
    assert answer.code == 2
    assert "this run is still running, in another process" in answer.err
    place.finish("failed", RuntimeError("over"))


@pytest.mark.parametrize("content", [b"", b"no checkpoint", None])
def test_a_checkpoint_that_is_none_is_refused_and_no_pickle_is_run(cli: Cli, out: Path, content: bytes | None) -> None:
    (path,) = Path("out/checkpoints").iterdir()
    if content is None:

        class Bomb:
            def __reduce__(self) -> tuple[object, tuple[str, str]]:
                return os.rename, ("out", "exploded")

        torch.save({"version": 1, "bomb": Bomb()}, path)
    else:
        path.write_bytes(content)
    answer = cli("resume=out")
    assert answer.code == 2
    assert "the checkpoint holds what cannot be read back safely" in answer.err
    assert Path("out").exists()
    assert len(instrument.load("out").metrics) == 8


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.update(version=2), "this is no checkpoint of this version"),
        (lambda state: state["probe"].pop("phases"), "the checkpoint does not fit this experiment"),
        (lambda state: state["probe"]["ledger"].pop(), "the checkpoint does not fit this experiment"),
    ],
    ids=["version", "phases", "ledger"],
)
def test_a_checkpoint_of_another_version_is_refused(
    cli: Cli, out: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    (path,) = Path("out/checkpoints").iterdir()
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    record = Path("out/run.json").read_text()
    answer = cli("resume=out")
    assert answer.code == 2, answer.err
    assert told in answer.err
    assert Path("out/run.json").read_text() == record


def test_the_plan_of_a_run_to_be_resumed_is_its_own(cli: Cli, out: Path) -> None:
    answer = cli("resume=out", "plan=true")
    assert answer.code == 0
    assert "activations" in answer.out
    assert instrument.load("out").info["status"] == "failed"


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (Path("somewhere"), "the checkpoint holds what cannot be read back safely"),
        (lambda rate: rate, "step-00000005.pt cannot be written: Can't"),
    ],
)
def test_a_state_that_could_not_be_read_back_is_told_at_the_first_checkpoint(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, odd: object, told: str
) -> None:
    keep = torch.optim.SGD.state_dict
    monkeypatch.setattr(torch.optim.SGD, "state_dict", lambda self: {**keep(self), "odd": odd})
    answer = cli(*TINY)
    assert answer.code == 1
    assert told in answer.err
    assert "Traceback" not in answer.err
    assert not list(Path("out/checkpoints").glob("*.pt"))


class Versioned(torch.nn.Module):
    """Its weight lay the other way round in states of its first version."""

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


def test_states_keep_their_types_and_versions(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    versioned = [
        "model={_target_: torch.nn.Sequential, _args_: [{_target_: torch.nn.Flatten}, {_target_: torch.nn.Linear, "
        "in_features: 64, out_features: 10}, {_target_: test_resume.Versioned}]}",
        "+scheduler._target_=test_resume.warm_then_steps",
    ]
    arguments = [argument for argument in TINY if not argument.startswith("model")] + versioned
    assert cli(*arguments, "hydra.run.dir=whole").code == 0
    stopped(cli, monkeypatch, *arguments)
    answer = cli("resume=out")
    assert answer.code == 0, answer.err
    one, other = (Checkpoints(Path(name)).load() for name in ("whole", "out"))
    assert identical(one["model"], other["model"])
    assert identical(one["scheduler"], other["scheduler"])


def warm_then_steps(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    schedules = torch.optim.lr_scheduler
    parts = [schedules.LinearLR(optimizer, 0.5, total_iters=7), schedules.MultiStepLR(optimizer, [2], 0.1)]
    return schedules.SequentialLR(optimizer, parts, [7])


def test_only_a_folder_of_a_run_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match="not one of a run of ours"):
        RunFolder.again(tmp_path)


@pytest.mark.parametrize("in_words_of_pytorch", [False, True])
def test_a_disk_that_is_full_keeps_the_checkpoint_before(
    cli: Cli, out: Path, monkeypatch: pytest.MonkeyPatch, in_words_of_pytorch: bool
) -> None:
    before = Path("out/checkpoints/step-00000005.pt").read_bytes()

    def full(state: object, file: object) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            if in_words_of_pytorch:
                raise RuntimeError("[enforce fail at inline_container.cc:679] . unexpected pos 128")  # noqa: B904
            raise

    with monkeypatch.context() as patch:
        patch.setattr("instrument.training.checkpoint.torch.save", full)
        answer = cli("resume=out")
    assert answer.code == 1
    assert "step-00000010.pt cannot be written: No space left on device" in answer.err
    assert Path("out/checkpoints/step-00000005.pt").read_bytes() == before
    assert [file.name for file in Path("out/checkpoints").iterdir()] == ["step-00000005.pt"]
    assert cli("resume=out").code == 0


CHANGES = {
    "clip": {"action": "clip", "value": 0.01},
    "scale": {"action": "scale", "factor": 2.0},
    "round": {"action": "modify", "fn": "quantize"},
}


def state_dict_hooks() -> dict[str, dict[str, Any]]:
    """Every state-dict kind with every action that it can have, on the model and on the optimizer."""
    return {
        f"{kind.name}_{name}_{role.partition('.')[0]}": {"layers": "**", "kind": kind.name, "role": role, **action}
        for kind in KINDS.values()
        for name, action in {"seen": {"action": "record"}, **CHANGES}.items()
        for role in ("entry", "state.exp_avg")
        if kind.family == "state_dict" and (name == "seen" or kind.can_change(role))
    }


def run_tiny(folder: str, hooks: dict[str, Any], resume: str | None = None) -> None:
    """A run of a few steps with a checkpoint at every second one."""
    raw = {
        "name": "tiny",
        "model": {"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.Flatten"}, LINEAR]},
        "data": {
            "dataset": {"_target_": "instrument.training.datasets.digits"},
            "eval_slice": {"split": "test", "stop": 8},
        },
        "task": {"_target_": "instrument.tasks.Supervised", "loss": {"_target_": "torch.nn.CrossEntropyLoss"}},
        "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01},
        "train": {"steps": 5, "batch_size": 8, "checkpoint": {"every": 2}},
        "hooks": hooks,
    }
    run(parse_config({**raw, "resume": resume}), Path(folder), Terminal(quiet=True), raw=raw, overrides={})


LINEAR = {"_target_": "torch.nn.Linear", "in_features": 64, "out_features": 10}


def test_checkpoints_hold_live_values_with_state_dict_hooks(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that resumes, the one that was never stopped, and the one without these hooks end in the same state."""
    hooks = state_dict_hooks()
    run_tiny("bare", {})
    run_tiny("whole", hooks)
    with monkeypatch.context() as patch:
        fails_at(patch, 3)
        with pytest.raises(RuntimeError, match="stopped here"):
            run_tiny("out", hooks)
    run_tiny("out", hooks, resume="out")
    bare, whole, resumed = (Checkpoints(Path(name)).load() for name in ("bare", "whole", "out"))
    for name in ("step", "model", "buffers", "optimizer", "random"):
        assert identical(bare[name], whole[name]), name
        assert identical(bare[name], resumed[name]), name
    one, other = instrument.load("whole"), instrument.load("out")
    for name in ("stats", "effects", "coverage"):
        pd.testing.assert_frame_equal(getattr(one, name), getattr(other, name), check_exact=True)
    assert one.effects.empty

    coverage = one.coverage.set_index("hook")
    saved = coverage[coverage.index.str.fullmatch("state_dict_(pre|post)_seen_(entry|state)")]
    assert set(zip(saved.expected, saved.fired, saved.cause, strict=True)) == {(3, 3, "")}, "after 2, 4 and 5 steps"
    changed = coverage[coverage.index.str.match("state_dict_post_(clip|scale|round)")]
    assert set(zip(changed.expected, changed.fired, changed.cause, strict=True)) == {(0, 0, CHECKPOINT)}
    assert sum(CHECKPOINT in message for message in one.events.message) == 2 * len(CHANGES)
