"""The probe batch: rows of the same samples at chosen steps, and an unchanged training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from training_runs import DIGITS, Stateful, compose, prepared, stop_and_resume, train_here

import instrument
from instrument import ConfigError, MemorySink
from instrument.probe.probe import Probe
from instrument.tasks import Outcome
from instrument.training.environment import process_state
from instrument.training.experiment import Experiment
from instrument.training.loop import Progress, train
from instrument.training.verification import _fingerprint, verify

SUMS = {"layers": "**", "kind": "post_accumulate_grad", "action": "record", "phase": "probe"}
MAPS = {**SUMS, "layers": "1", "kind": "forward", "every": 2, "tensors": True}
FLOW = {**SUMS, "kind": "full_backward", "steps": [0, 3, 5], "tensors": True}
WEIGHTS = {**SUMS, "kind": "parameter_grad_micro", "tensors": True}
TRAINED = {"layers": "**", "kind": "full_backward", "action": "record", "tensors": True}
STEPS = 5


class Net(Stateful):
    """A network that also draws a random number in each pass."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + 0.01 * torch.rand(())


class CountingTask:
    """A task whose loss depends on the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        self.calls += 1
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return Outcome(loss * (1 + 0.1 * self.calls), len(batch[1]))

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Noisy(Dataset[Any]):
    """A dataset that draws random numbers for each sample."""

    def __init__(self, split: str) -> None:
        self.split = split

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1, 8, 8), index % 10


DATA = {"dataset": DIGITS, "slice": {"stop": 48}, "eval_slice": {"split": "test", "stop": 20}}
TRAINING = {
    "model": {"_target_": f"{__name__}.Net"},
    "data": {**DATA, "probe_batch": 6},
    "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.01},
    "train": {"steps": STEPS, "batch_size": 16, "eval_every": 2},
}


def prepare_training(**changes: Any) -> Experiment:
    return prepared(**{**TRAINING, **changes})


def traced(**changes: Any) -> tuple[list[Any], MemorySink, Experiment, list[nn.Module]]:
    """Train, and return the fingerprint of the complete state after each step, the rows, and the model at each step."""
    fingerprints, sink, models = [], MemorySink(), []
    with process_state(seed=0, deterministic=False):
        experiment = prepare_training(**changes)
        models.append(copy.deepcopy(experiment.model))

        def show(progress: Progress) -> None:
            fingerprints.append(_fingerprint(experiment, progress))
            if progress.phase == "train":
                models.append(copy.deepcopy(experiment.model))

        with Probe(
            experiment.plan, sink, optimizer=experiment.optimizers, scaler=experiment.scaler, archive=experiment.archive
        ) as probe:
            train(experiment, probe, show)
        fingerprints.append(_fingerprint(experiment, Progress(STEPS, STEPS, {}, 0, "train")))
    return fingerprints, sink, experiment, models


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [
        {"precision": "fp16", "accumulate": 2},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({}, {"precision": "fp16"}, {"accumulate": 2})),
    ],
)
def test_probe_batch_does_not_change_the_training(train: dict[str, Any]) -> None:
    settings = {"steps": STEPS, "batch_size": 16, "eval_every": 2, **train}
    hooks = {"maps": MAPS, "flow": FLOW, "weights": WEIGHTS, "sums": SUMS, "trained": TRAINED}
    without, _, _, _ = traced(train=settings, data=DATA, hooks={"trained": TRAINED})
    with_probe, sink, _, _ = traced(train=settings, hooks=hooks)
    assert len(without) == len(with_probe) > STEPS
    for one, other in zip(without, with_probe, strict=True):
        assert one == other
    assert not sink.frame("stats").query("phase == 'probe'").empty


@pytest.mark.slow
def test_selection_of_the_probe_batch_draws_no_random_numbers() -> None:
    data = {"dataset": {"_target_": f"{__name__}.Noisy"}}
    losses = []
    for probe_batch in (None, 4, {"per_class": 1}):
        hooks = {} if probe_batch is None else {"maps": MAPS}
        _, sink, _, _ = traced(data={**data, "probe_batch": probe_batch}, hooks=hooks)
        losses.append(sink.frame("metrics").query("phase == 'train'").loss.tolist())
    assert losses[0] == losses[1] == losses[2]


def test_probe_batch_does_not_change_the_state_of_the_task() -> None:
    task = {"_target_": f"{__name__}.CountingTask"}
    without, _, _, _ = traced(task=task, hooks={"maps": {**MAPS, "start": 100}})
    with_probe, _, _, _ = traced(task=task, hooks={"maps": MAPS})
    assert without == with_probe


@pytest.mark.slow
def test_probe_rows_equal_those_of_a_hand_written_pass() -> None:
    _, sink, experiment, models = traced(hooks={"maps": MAPS, "flow": FLOW, "weights": WEIGHTS})
    assert experiment.data.test is not None
    samples = [experiment.data.test[i] for i in range(6)]
    images, classes = torch.stack([image for image, _ in samples]), torch.tensor([int(t) for _, t in samples])
    rows = sink.records("tensors")
    assert sorted({row["step"] for row in rows if row["hook"] == "maps"}) == [0, 2, 4]
    assert sorted({row["step"] for row in rows if row["hook"] == "flow"}) == [0, 3, 5]
    assert sorted({row["step"] for row in rows if row["hook"] == "weights"}) == [0, 1, 2, 3, 4, 5]
    assert {(row["phase"], row["micro_step"]) for row in rows} == {("probe", 0)}
    for step, model in enumerate(models):
        outputs: list[Tensor] = []
        model.eval()[1].register_forward_hook(lambda _, __, output, seen=outputs: seen.append(output.detach()))
        model.zero_grad()
        pixels = images.clone().requires_grad_()
        torch.manual_seed(0)
        loss = nn.functional.cross_entropy(model(pixels), classes)
        loss.backward()
        expected = {
            ("maps", "1", ""): outputs[0],
            ("flow", "0", "0"): pixels.grad,
            ("weights", "4", "bias"): model[4].bias.grad,
        }
        for (hook, layer, path), tensor in expected.items():
            found = [row for row in rows if (row["hook"], row["layer"], row["step"]) == (hook, layer, step)]
            found = [row for row in found if row["path"] == path]
            for row in found:
                assert tensor is not None
                assert torch.equal(row["values"], tensor), (hook, step)
        metrics = sink.frame("metrics").query(f"phase == 'probe' and step == {step}")
        assert metrics.loss.tolist() == [loss.item()]


def test_probe_batch_is_a_slice_of_the_evaluation_samples() -> None:
    experiment = prepare_training(
        data={
            "dataset": DIGITS,
            "eval_slice": {"split": "test", "start": 10, "stop": 100},
            "probe_batch": {"per_class": 1},
        },
        hooks={"maps": MAPS},
    )
    assert experiment.probe_batch is not None
    _, classes = experiment.probe_batch.batch
    assert sorted(classes.tolist()) == [*range(10)]
    assert experiment.probe_batch.samples == 10


@pytest.mark.parametrize(
    ("probe_batch", "where", "words"),
    [
        (0, "data.probe_batch.stop", "greater than or equal to 1"),
        ({"split": "train"}, "data.probe_batch", "samples of data.eval_slice, which has the split"),
        ({"start": 100}, "data.probe_batch", "the slice is empty"),
        (21, "data.probe_batch", "ends at sample 21, but data.eval_slice has 20 samples"),
        ({"classs": [3]}, "data.probe_batch", "unknown field 'classs'"),
    ],
)
def test_invalid_probe_batch_is_reported(probe_batch: Any, where: str, words: str) -> None:
    data = {"dataset": DIGITS, "eval_slice": {"stop": 20}, "probe_batch": probe_batch}
    with pytest.raises(ConfigError) as caught:
        prepare_training(data=data, hooks={"maps": MAPS})
    assert caught.value.problems[0].where == where
    assert words in str(caught.value)


def test_probe_phase_works_in_a_custom_loop() -> None:
    model, images = nn.Linear(4, 2), torch.rand(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {
        "probed": {"layers": ".", "kind": "tensor", "action": "record", "phase": "probe", "every": 2},
        "trained": {"layers": ".", "kind": "forward", "action": "record"},
    }
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for _ in range(3):
            with probe.in_phase("probe"):
                model(images).sum().backward()
            optimizer.zero_grad()
            loss = model(images).sum()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    stats = probe.sink.frame("stats")  # type: ignore[attr-defined]
    assert stats[["hook", "phase", "step", "micro_step"]].values.tolist() == [
        ["probed", "probe", 0, 0],
        ["trained", "train", 0, 0],
        ["trained", "train", 1, 0],
        ["probed", "probe", 2, 0],
        ["trained", "train", 2, 0],
    ]
    assert all(row["fired"] == row["expected"] for row in probe.coverage())


def test_forward_phase_works_in_a_custom_loop() -> None:
    model, images = nn.Linear(4, 2), torch.rand(3, 4)
    hook = {"layers": ".", "kind": "forward", "action": "record", "phase": "forward"}
    with instrument.attach(model, {"seen": hook}) as probe, torch.no_grad():
        probe.phase = "forward"
        for _ in range(3):
            with probe.evaluating():
                model(images)
            model(images)
            probe.end_step()
    stats = probe.sink.frame("stats")  # type: ignore[attr-defined]
    assert (stats.step.tolist(), set(stats.phase)) == ([0, 1, 2], {"forward"})
    with pytest.raises(
        ValueError, match="phase must be one of 'train', 'forward', 'eval', 'probe', 'rollout', 'sanity'"
    ):
        probe.phase = "test"


@pytest.mark.slow
def test_run_with_probe_batch_is_resumed_and_verified(cli: Callable[..., Any], workdir: Path) -> None:
    arguments = [
        *("model=mlp", "model.sizes=[64,16,10]", "data=digits", "data.probe_batch=5", "train.steps=8"),
        '+hooks.flow={layers: "**", kind: full_backward, action: record, phase: probe, every: 4}',
        "train.checkpoint.every=4",
    ]
    whole = train_here(workdir / "whole", *arguments)
    resumed = stop_and_resume(workdir / "stopped", *arguments, calls=6)
    assert whole.stats.equals(resumed.stats)
    assert sorted(set(whole.stats.step)) == [0, 4, 8]
    answer = cli(*arguments, "plan=true").expect(0)
    assert "every 4 steps, in probe" in answer.out
    assert f"{len(whole.stats)}" in answer.out
    assert verify(compose(*arguments)[0]).holds


@pytest.mark.slow
def test_training_plots_ignore_probe_rows(workdir: Path) -> None:
    from instrument import plot

    model, images = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.rand(3, 4)
    hooks = {
        phase: {"layers": "*", "kind": "tensor", "action": "record", "phase": phase} for phase in ("probe", "train")
    }
    with instrument.attach(model, hooks, out="run") as probe:
        for _ in range(2):
            with probe.in_phase("probe"):
                model(images).sum().backward()
            model(images).sum().backward()
            probe.end_step()
    run = instrument.load("run")
    assert "train: tensor output" in plot.heatmap(run).axes[0].get_title()
    assert "probe: tensor output (probe)" in plot.heatmap(run, phase="probe").axes[0].get_title()
