"""`python -m instrument.replay`: exact repetition of recorded steps, counterfactuals, and refused arguments."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import Answer, finished, replay_in, run_in
from state_comparison import assert_same_tables
from tiers import tiered

import instrument
from instrument.storage.control_folder import send
from instrument.storage.lock import FolderLock
from instrument.storage.run_record import checkpoint_steps

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 10))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, images):
        if self.training:
            self.calls += 1
        return self.layers(images) * (1 + 0.001 * self.calls.sin())

class Noisy(torch.utils.data.Dataset):
    def __init__(self, split):
        from instrument.training.datasets import digits
        self.digits = digits(split=split)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        image, target = self.digits[index]
        return image + 0.1 * torch.randn_like(image), target
"""
CHECKPOINTS = ["train.checkpoint.every=4", "train.checkpoint.keep=null"]
SMALL = [
    *("model={_target_: replayed_model.Net}", "data=digits", "data.eval_slice.stop=32", "train.batch_size=16"),
    *("optimizer.lr=0.05", "quiet=true"),
]
INTERVENTIONS = [
    "+hooks.noisy={layers: layers.1, kind: forward, action: modify, fn: noise, std: 0.1}",
    "+hooks.tame={layers: '**', kind: parameter_grad, action: clip, norm: 0.5, start: 6}",
]
CLIP = "+hooks.shrink={layers: layers.5, kind: forward, action: scale, factor: 0.5}"
CHANGES = {2: ["lr_scale=0.5", "disable=noisy"], 6: ["enable=noisy", "hooks.seen.every=1"], 8: ["hooks.tame.norm=0.2"]}


def train(folder: Path, *overrides: str) -> instrument.Run:
    """Train a small network in a folder of this name."""
    (folder.parent / "replayed_model.py").write_text(MODEL)
    return finished(folder, *SMALL, *overrides)


@pytest.fixture(autouse=True)
def forget_model() -> Iterator[None]:
    """Import the model from the folder of each test."""
    yield
    sys.modules.pop("replayed_model", None)


def certificate_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "certificate.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs `done` and `failed`. The second one was changed during the run, and failed at step 11."""
    folder = tmp_path_factory.mktemp("replays")
    scheduler = "scheduler={_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.1, total_steps: 100}"
    common = [*CHECKPOINTS, *INTERVENTIONS, scheduler, "train.accumulate=2", "optimizer.momentum=0.9"]
    seen = "+hooks.seen={layers: layers.*, kind: forward, action: record, every: 3}"
    train(folder / "done", *common, seen, "train.steps=14", "train.eval_every=6")
    with pytest.MonkeyPatch.context() as patch:
        fails_at(patch, 11, changed=folder / "failed")
        assert run_in(folder, *SMALL, *common, seen, "train.steps=20", "hydra.run.dir=failed").code == 1
    return folder


def fails_at(patch: pytest.MonkeyPatch, step: int, *, changed: Path | None = None) -> None:
    """Make a run fail at a step. Send changes to the run in the folder `changed`."""
    from instrument.training import loop

    original = loop.train_step

    def fail(experiment: Any, observer: Any, batches: Any) -> Any:
        if changed is not None and observer.step in CHANGES:
            send(changed, CHANGES[observer.step])
        if observer.step == step:
            raise RuntimeError("stopped here")
        return original(experiment, observer, batches)

    patch.setattr(loop, "train_step", fail)


def test_checkpoints_are_kept(place: Path) -> None:
    assert checkpoint_steps(place / "done") == [4, 8, 12, 14]


@pytest.fixture(scope="module")
def whole(place: Path) -> Answer:
    """Output of a replay of all steps, in the folder `all`."""
    return replay_in(place, "done", "hydra.run.dir=all").expect(0)


def test_replay_from_the_start_repeats_every_row(place: Path, whole: Answer) -> None:
    assert "EQUAL BITS: all compared values are equal" in whole.out
    assert "of 14 steps and 3 evaluations" in whole.out
    original, replayed = instrument.load(place / "done"), instrument.load(place / "all")
    assert_same_tables(original, replayed, "stats", "effects", "layers", "metrics")
    assert not (place / "all" / "checkpoints").exists()


@pytest.mark.slow
def test_replay_of_a_window_records_other_hooks(place: Path) -> None:
    answer = replay_in(place, "done", "--steps", "9:12", "hooks=everything", "hydra.run.dir=window").expect(0)
    run, original = instrument.load(place / "window"), instrument.load(place / "done")
    assert set(run.stats["step"]) == {9, 10, 11}
    everything = ("inputs", "outputs", "output_gradients", "parameter_gradients", "parameters", "updates")
    assert set(run.stats["hook"]) == {*everything, "seen"}  # and the hook of the run
    seen = [each.stats.query("hook == 'seen' and 9 <= step < 12 and phase == 'train'") for each in (original, run)]
    assert set(seen[0]["step"]) == {9}
    pd.testing.assert_frame_equal(*(each.drop(columns="position").reset_index(drop=True) for each in seen))
    assert list(run.metrics.query("phase == 'train'")["step"]) == [8, 9, 10, 11]
    assert run.effects["step"].between(8, 11).all()
    assert_same_effects(original, run, "8 <= step < 12")
    assert certificate_of(run.path)["holds"]
    assert run.info["replay"] == {
        "source": str(place / "done"),
        "source_config_hash": original.info["config_hash"],
        "begin": 8,
        "steps": [9, 12],
        "counterfactual": [],
        "first_step": None,
        "operators": False,
        "forced": [],
        "changes": [],
        "changes_left_out": [],
    }
    assert "record hooks that are not scheduled" not in answer.out
    assert list(run.events["rule"]) == ["replay"]


@pytest.mark.slow
def test_hook_set_means_the_same_in_a_replay_and_a_run(place: Path, tmp_path: Path) -> None:
    """A set is added to the other hooks. A hook of the same name is an error."""
    (tmp_path / "conf" / "hooks").mkdir(parents=True)
    (tmp_path / "conf" / "exp").mkdir()
    own = "{layers: layers.*, kind: forward, action: record}"
    (tmp_path / "conf" / "hooks" / "like.yaml").write_text(f"seen: {own}\n")
    (tmp_path / "conf" / "hooks" / "more.yaml").write_text(f"more: {own}\n")
    (tmp_path / "conf" / "exp" / "own.yaml").write_text(f"# @package _global_\nhooks: {{seen: {own}}}\n")
    (tmp_path / "replayed_model.py").write_text(MODEL)
    run = [*SMALL, "+exp=own", "train.steps=1"]
    assert run_in(tmp_path, *run, "hooks=more", "hydra.run.dir=both").code == 0
    assert run_in(tmp_path, *run, "hydra.run.dir=run").code == 0
    shown = "+hooks.shown={layers: layers.1, kind: forward, action: print}"
    answer = replay_in(tmp_path, "run", "hooks=more", shown, "hydra.run.dir=again", "--json").expect(0)
    assert json.loads(answer.out) == certificate_of(tmp_path / "again")
    assert "shown  step 0  layers.1  output" in answer.err
    tables = [instrument.load(tmp_path / name).stats.query("phase == 'train'") for name in ("both", "again")]
    assert set(tables[0]["hook"]) == {"seen", "more"}
    first, second = (table.sort_values(["hook", "layer", "path"], ignore_index=True) for table in tables)
    pd.testing.assert_frame_equal(first.drop(columns="position"), second.drop(columns="position"))
    for answer in (
        run_in(tmp_path, *run, "hooks=like", "hydra.run.dir=no"),
        replay_in(tmp_path, "run", "hooks=like", "hydra.run.dir=no"),
    ):
        assert answer.code == 2
        assert "hooks.seen: two configurations define this name" in answer.err
        assert "hooks/like.yaml" in answer.err
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_default_folder_contains_the_name_of_the_source(place: Path) -> None:
    assert replay_in(place, "done", "--steps", "0:1", "quiet=true").code == 0
    (folder,) = (place / "runs" / "replays" / "done").iterdir()
    assert instrument.load(folder).info["replay"]["steps"] == [0, 1]


EVERY_STEP = ("hooks.output_gradients.every=1", "hooks.parameter_gradients.every=1")


@pytest.fixture(scope="module")
def before(place: Path) -> Answer:
    """Output of a replay of the last two steps of the failed run, in the folder `before`."""
    answer = replay_in(place, "failed", "--before-failure", "2", "hooks=gradients", *EVERY_STEP, "hydra.run.dir=before")
    assert answer.code == 0, answer.out + answer.err
    return answer


@pytest.mark.slow
@pytest.mark.usefixtures("before")
def test_failed_run_is_repeated_up_to_its_failure(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = instrument.load(place / "before")
    assert set(run.stats["step"]) == {9, 10}
    assert certificate_of(run.path)["steps"] == 3
    fails_at(monkeypatch, 11)
    answer = replay_in(place, "failed", "--steps", "10:12", "hooks=gradients", *EVERY_STEP, "hydra.run.dir=again")
    assert answer.code == 1
    assert "EQUAL BITS: all compared values are equal" in answer.out
    assert "the replay failed with the error of the run" in answer.out
    assert certificate_of(place / "again")["repeats_failure"] is True


@pytest.mark.slow
def test_failed_step_that_is_completed_is_reported(place: Path) -> None:
    answer = replay_in(place, "failed", "--steps", "10:12", "hooks=gradients", *EVERY_STEP, "hydra.run.dir=completed")
    assert answer.code == 0, answer.err
    assert "the replay completed the step in which the run failed" in answer.out
    assert certificate_of(place / "completed")["repeats_failure"] is False


@pytest.mark.slow
def test_changes_during_the_run_are_repeated(place: Path, before: Answer) -> None:
    assert "repeated: hooks.tame.norm=0.2 after 9 steps, by instrument.control" in before.out
    assert "not repeated: hooks.seen.every=1 after 7 steps, by instrument.control" in before.out
    run, replayed = instrument.load(place / "failed"), instrument.load(place / "before")
    found = certificate_of(replayed.path)
    assert found["begin"] == 8
    assert found["changes"] == [
        *("lr_scale=0.5 after 3 steps", "disable=noisy after 3 steps", "enable=noisy after 7 steps"),
        "hooks.tame.norm=0.2 after 9 steps",
    ]
    assert found["changes_left_out"] == ["hooks.seen.every=1 after 7 steps"]
    assert list(replayed.events.query("rule == 'control'")["message"]) == ["hooks.tame.norm: 0.5 -> 0.2"]
    assert_same_effects(run, replayed, "8 <= step")


def assert_same_effects(run: instrument.Run, replay: instrument.Run, condition: str) -> None:
    """Compare the effects of the interventions at some steps, bit by bit."""
    wanted, found = (each.effects.query(condition).reset_index(drop=True) for each in (run, replay))
    assert len(wanted)
    pd.testing.assert_frame_equal(wanted, found, check_exact=True)


def actions_of(run: instrument.Run) -> dict[str, str]:
    """Return the name of the action in the finding of each intervention, by hook."""
    found = run.findings[run.findings["hook"].isin(run.effects["hook"].unique())]
    return dict(zip(found["hook"], found["what"], strict=True))


@pytest.mark.slow
def test_changes_are_repeated_before_a_counterfactual(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "failed", tmp_path / "failed", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copy(place / "replayed_model.py", tmp_path)
    tamer = ["--steps", "10:11", "--intervene", "hooks.tame.norm=0.01"]
    replay_in(tmp_path, "failed", *tamer, "hydra.run.dir=tamed").expect(0)
    run, tamed = instrument.load(place / "failed"), instrument.load(tmp_path / "tamed")
    assert (certificate_of(tamed.path)["begin"], certificate_of(tamed.path)["steps"]) == (0, 10)
    assert_same_effects(run, tamed, "step < 10")
    assert set(tamed.effects.query("step >= 10 and hook != 'noisy'")["hook"]) == {"tame_counterfactual"}
    assert actions_of(tamed) == {
        "noisy": actions_of(run)["noisy"],
        "tame": "clip norm 0.5",
        "tame_counterfactual": "clip norm 0.01",
    }


def test_killed_run_is_repeated(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "failed", tmp_path / "killed")
    record = json.loads((tmp_path / "killed" / "run.json").read_text())
    (tmp_path / "killed" / "run.json").write_text(json.dumps({**record, "status": "running", "error": None}))
    shutil.copy(place / "replayed_model.py", tmp_path)
    answer = replay_in(tmp_path, "killed", "--before-failure", "1", "hydra.run.dir=again").expect(0)
    assert certificate_of(tmp_path / "again")["begin"] == 8
    assert "record hooks that are not scheduled in these steps: seen" in answer.out


def test_counterfactual_from_a_checkpoint_lacks_the_original_hook(place: Path) -> None:
    answer = replay_in(
        place, "done", "--steps", "8:10", "--intervene", "hooks.tame.norm=0.2", "hydra.run.dir=at_checkpoint"
    )
    assert answer.code == 0, answer.err
    run = instrument.load(place / "at_checkpoint")
    assert certificate_of(run.path)["begin"] == 8
    assert set(run.coverage["hook"]) == {"noisy", "seen", "tame_counterfactual"}
    assert "never fired" not in set(run.findings["what"])


def test_counterfactual_differs_from_its_first_step_on(place: Path) -> None:
    answer = replay_in(place, "done", "--steps", "10:14", "--intervene", CLIP, "~hooks.noisy", "hydra.run.dir=other")
    assert answer.code == 0, answer.err
    assert "COUNTERFACTUAL from step 10 on, with other interventions: noisy, shrink" in answer.out
    assert "EQUAL BITS: all compared values before this step are equal" in answer.out
    assert "first effect at step 10: loss" in answer.out
    run = instrument.load(place / "other")
    found = certificate_of(run.path)
    assert (found["begin"], found["steps"], found["evaluations"]) == (8, 2, 0)
    assert found["counterfactual"] == ["noisy", "shrink"]
    assert sorted(run.effects.query("hook == 'noisy'")["step"].unique()) == [8, 9]
    assert sorted(run.effects.query("hook == 'shrink'")["step"].unique()) == [10, 11, 12, 13]
    assert run.events["rule"].iloc[0] == "counterfactual"
    original = actions_of(instrument.load(place / "done"))
    assert actions_of(run) == {**original, "shrink": "scale factor 0.5"}
    hooks = run.info["config"]["hooks"]
    assert (hooks["noisy"]["stop"], hooks["shrink"]["start"], hooks["shrink"]["stop"]) == (10, 10, 14)
    figure = instrument.plot.replay(run)
    assert [axes.get_title() for axes in figure.axes] == ["loss", "gradient norm"]
    recorded, replayed, mark = figure.axes[0].get_lines()
    assert (len(recorded.get_xdata()), len(replayed.get_xdata())) == (14, 6)
    assert list(mark.get_xdata()) == [10, 10]
    assert (run.path / "comparison.png").stat().st_size > 10_000


@pytest.mark.usefixtures("whole")
def test_plot_of_a_replay_requires_its_run(place: Path, tmp_path: Path) -> None:
    with pytest.raises(instrument.InstrumentError, match="is not a replay: its run"):
        instrument.plot.replay(instrument.load(place / "done"))
    shutil.copytree(place / "all", tmp_path / "all")
    record = json.loads((tmp_path / "all" / "run.json").read_text())
    record["replay"]["source"] = str(tmp_path / "moved")
    (tmp_path / "all" / "run.json").write_text(json.dumps(record))
    with pytest.raises(instrument.InstrumentError, match="the run of this replay is missing"):
        instrument.plot.replay(instrument.load(tmp_path / "all"))
    figure = instrument.plot.replay(instrument.load(tmp_path / "all"), source=place / "done")
    assert figure.axes[0].get_legend_handles_labels()[1] == ["run", "replay"]


@pytest.mark.slow
def test_counterfactual_continues_after_a_failure(place: Path) -> None:
    replay_in(place, "failed", "--steps", "10:20", "--intervene", CLIP, "hydra.run.dir=beyond").expect(0)
    assert list(instrument.load(place / "beyond").metrics["step"])[-1] == 20  # the evaluation after the last step


def test_difference_is_located_and_explained(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from instrument.training import loop

    norm = loop.gradient_norm
    calls: list[int] = []

    def other(model: torch.nn.Module) -> torch.Tensor | None:
        calls.append(1)
        value = norm(model)
        return value if value is None or len(calls) != 2 else torch.nextafter(value, torch.tensor(9.0))

    monkeypatch.setattr(loop, "gradient_norm", other)
    answer = replay_in(place, "done", "--steps", "8:12", "hydra.run.dir=differs").expect(1)
    assert "NOT EQUAL: step 9: grad_norm is" in answer.out
    assert "likely reason: no difference of environment, data and code is known" in answer.out
    assert "the difference comes from the backward pass" in answer.out


def test_changed_environment_is_refused_or_forced(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "done", tmp_path / "done")
    shutil.copy(place / "replayed_model.py", tmp_path)
    record = json.loads((tmp_path / "done" / "run.json").read_text())
    record["versions"]["torch"], record["data"]["hashes"]["train"] = "1.0", "0" * 16
    record["code"]["replayed_model"] = "1" * 16
    (tmp_path / "done" / "run.json").write_text(json.dumps(record))
    answer = replay_in(tmp_path, "done", "--steps", "0:1", "hydra.run.dir=again").expect(2)
    assert f"cannot be expected to be exact, because versions.torch is {version('torch')}, but was 1.0" in answer.err
    assert "; content of the train samples differ too" in answer.err
    assert not (tmp_path / "again").exists()
    answer = replay_in(tmp_path, "done", "--steps", "0:1", "--force", "hydra.run.dir=again").expect(0)
    assert "forced, although versions.torch" in answer.out
    found = certificate_of(tmp_path / "again")
    assert [text.partition(" is ")[0] for text in found["environment"]] == [
        "versions.torch",
        "content of the train samples",
        "code.replayed_model",
    ]
    assert len(instrument.load(tmp_path / "again").info["replay"]["forced"]) == 2
    del record["hardware"]
    (tmp_path / "done" / "run.json").write_text(json.dumps(record))
    answer = replay_in(tmp_path, "done").expect(2)
    assert "run.json has no entry 'hardware'" in answer.err
    assert "--force" in answer.err
    (tmp_path / "done" / "run.json").write_text(json.dumps({**record, "replay": {"of": 3}}))
    assert "this run is a replay itself" in replay_in(tmp_path, "done").expect(2).err


INVALID = [
    (["missing"], "RUN: the folder does not exist"),
    (["all"], "RUN: this run is a replay itself"),
    (["."], "RUN: the folder contains folders of runs: pass one of them, such as ./"),
    (["s3://bucket/run"], "RUN: a replay requires the files of the run"),
    (["done", "--steps", "12:99"], "steps 0 to 13"),
    (["done", "--steps", "5:5"], "--steps: the range is empty"),
    (["done", "--steps", "last"], "--steps: must be a range of steps"),
    (["failed", "--steps", "5:13"], "steps 0 to 11"),
    (["done", "--before-failure", "3"], "--before-failure: the run did not fail"),
    (["done", "--ops"], "--ops: requires --steps or --before-failure"),
    (["failed", "--before-failure", "0"], "--before-failure: must be a number of steps"),
    (["done", "optimizer.lr=1"], "optimizer.lr: a replay repeats the training of the run"),
    (["done", "+exp=clipping"], "exp: a replay repeats the training of the run"),
    (["done", "hooks.tame.norm=1"], "hooks.tame: this intervention is changed or removed"),
    (["done", "~hooks.tame"], "hooks.tame: this intervention is changed or removed"),
    (["done", CLIP], "hooks.shrink: this intervention is not part of the run"),
    (["done", "--intervene"], "--intervene: no intervention differs"),
    (
        ["done", "--steps", "3:4", "hooks=activations"],
        "hooks.activations: the hook is not scheduled in step 3: its schedule is every 10 steps",
    ),
    (["done", "--steps", "3:4", "hooks=activations"], "fix      pass hooks.activations.every=1"),
    (
        ["done", "--steps", "3:4", "hooks=gradients"],
        "fix      pass hooks.output_gradients.every=1\nhooks.parameter_gradients: ",
    ),
    (
        ["done", "--steps", "1:5", "--intervene", "hooks.tame.norm=1"],
        "hooks.tame: the hook is not scheduled in steps 1 to 4",
    ),
    (
        ["done", "--steps", "1:5", "--intervene", "hooks.tame.norm=1"],
        "fix      change its schedule, or the range of --steps",
    ),
    (["done", "--steps", "1:5", "--intervene", "~hooks.tame"], "no changed intervention runs in steps 1 to 4"),
    (["done", "hooks=nothing"], "hooks: unknown option of this group"),
    (["done", "hooks.seen.evry=1"], "hooks.seen.evry"),
    (["done", "hooks.seen=[1"], "cannot parse this override"),
]


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [each if i % 3 == 0 else pytest.param(*each, marks=pytest.mark.slow) for i, each in enumerate(INVALID)],
)
def test_invalid_arguments_are_refused(place: Path, arguments: list[str], message: str) -> None:
    before = sorted(place.rglob("*"))
    answer = replay_in(place, *arguments).expect(2)
    assert message in answer.err
    assert "Traceback" not in answer.err
    assert [path for path in sorted(place.rglob("*")) if path not in before and "__pycache__" not in str(path)] == []


def test_run_of_attach_and_run_in_progress_are_refused(tmp_path: Path, place: Path) -> None:
    shutil.copytree(place / "done", tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "config": {"hooks": record["config"]["hooks"]}}))
    assert "the run was started with instrument.attach" in replay_in(tmp_path, "run").expect(2).err
    file.write_text(json.dumps({**record, "status": "running"}))
    lock = FolderLock(tmp_path / "run")
    assert lock.acquire()
    answer = replay_in(tmp_path, "run")
    lock.release()
    assert answer.code == 2
    assert "the run is in progress" in answer.err


def test_replay_requires_as_many_processes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = replay_in(place, "done").expect(2)
    assert "the run was started with one process, and the same number is required" in answer.err
    assert "python -m instrument.replay done" in answer.err


RULES = {
    "enabled by a rule": [
        "+hooks.grads={layers: '**', kind: parameter_grad, action: record}",
        "+hooks.tame={layers: '**', kind: parameter_grad, action: clip, norm: 0.1}",
        "+rules.big={watch: grads, stat: l2, above: 1e-9, for: 3, then: [warn, {enable: tame, steps: 3}]}",
    ],
    "with a condition": [
        "+hooks.tame={layers: '**', kind: parameter_grad, action: clip, norm: 0.1, "
        "when: {stat: l2, above: 1.0, times: median, window: 5, after: 2}}",
        "+hooks.evidence={layers: '**', kind: forward, action: record, when: late}",
        "+rules.late={watch: metrics, stat: loss, above: 0, then: stop, for: 8}",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_intervention_that_depends_on_earlier_steps_is_repeated(tmp_path: Path, name: str) -> None:
    (tmp_path / "replayed_model.py").write_text(MODEL)
    answer = run_in(tmp_path, *SMALL, *RULES[name], *CHECKPOINTS, "train.steps=12", "hydra.run.dir=run")
    stops = "when" in str(RULES[name])
    assert answer.code == (3 if stops else 0), answer.err
    window = ["--before-failure", "3"] if stops else ["--steps", "6:9"]
    answer = replay_in(tmp_path, "run", *window, "hooks=everything", "hydra.run.dir=again")
    assert answer.code == 0, answer.out + answer.err
    original, replayed = (instrument.load(tmp_path / folder) for folder in ("run", "again"))
    found = certificate_of(replayed.path)
    assert (found["begin"], found["holds"]) == (0, True)
    assert replayed.effects.step.max() < found["stop"]
    assert_same_effects(original, replayed, f"step < {found['stop']}")


TRAININGS = {
    "fp16": ["train.precision=fp16", "optimizer=adam"],
    "bf16": ["train.precision=bf16"],
    "lbfgs": ["optimizer=lbfgs", "optimizer.max_iter=3", "train.accumulate=2"],
    "workers": ["data={dataset: {_target_: replayed_model.Noisy}, eval_slice: {stop: 32}}", "data.num_workers=2"],
    "gan": ["task=wgan_gp", "model=dense_gan", "optimizer=generator_and_critic"],
    "forward": ["mode=forward", "data.slice.stop=112", "forward.grad=true"],
    "sampler": ["data.sampler={_target_: torch.utils.data.RandomSampler, replacement: true, num_samples: 40}"],
    "probe_batch": ["data.probe_batch=8", "+hooks.probe={layers: '**', kind: forward, action: record, phase: probe}"],
    "epochs": ["train=epochs", "train.epochs=2", "data.slice.stop=56", "train.batch_size=16"],
}


@pytest.mark.parametrize("name", tiered([*TRAININGS], ["forward"]))
def test_replay_of_every_kind_of_training_is_exact(tmp_path: Path, name: str) -> None:
    given = TRAININGS[name]
    replaced = {override.partition("=")[0] for override in given}
    checkpoints = ["train.checkpoint.every=3", "train.checkpoint.keep=null"]
    (tmp_path / "replayed_model.py").write_text(MODEL)
    small = [each for each in SMALL if not replaced & {each.partition("=")[0], each.partition(".")[0]}]
    steps = [] if name == "epochs" else ["train.steps=7"]
    answer = run_in(tmp_path, *small, *given, *checkpoints, *steps, "hydra.run.dir=run").expect(0)
    phase = ", phase: forward" if name == "forward" else ""
    hook = f"+hooks.look={{layers: '**', kind: forward, action: record{phase}}}"
    answer = replay_in(tmp_path, "run", "--steps", "4:6", "--ops", hook, "hydra.run.dir=again")
    assert answer.code == 0, answer.out + answer.err
    found = certificate_of(tmp_path / "again")
    assert (found["begin"], found["steps"], found["holds"]) == (3, 3, True)
    replayed = instrument.load(tmp_path / "again")
    assert set(replayed.stats.query("hook == 'look'")["step"]) == {4, 5}
    assert set(replayed.operators["step"]) == {4, 5}
    assert {"forward", "backward"} <= set(replayed.operators["part"])
