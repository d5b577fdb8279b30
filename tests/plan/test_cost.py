"""What a plan says that it will write, held against what a run really writes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from instrument.analysis.load import load
from instrument.plan.cost import Cost, Length, cost_of
from instrument.plan.sites import make_plan
from instrument.plan.trial import try_forward
from instrument.run.data import Batches
from instrument.run.experiment import prepare
from instrument.run.runner import run
from instrument.run.terminal import Terminal
from instrument.spec.config import TrainConfig
from instrument.spec.parse import parse_config, parse_hooks
from instrument.spec.schedule import Evaluations


class Recurrent(nn.Module):
    """Nested outputs, a module that is called twice, one that is called never, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.fc = nn.Linear(6, 6)
        self.twin = self.fc
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.ReLU()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows, _ = self.lstm(images.squeeze(1))  # [N, 8, 6]
        return self.head(self.norm(self.frozen(self.twin(self.fc(rows[:, -1])))))


BASE: dict[str, Any] = {
    "model": {"_target_": f"{__name__}.Recurrent"},
    "data": {
        "dataset": {"_target_": "instrument.run.datasets.digits"},
        "slice": {"stop": 100},
        "eval_slice": {"split": "test", "stop": 70},
    },
    "task": {"_target_": "instrument.run.tasks.Supervised", "loss": {"_target_": "torch.nn.CrossEntropyLoss"}},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9},
}
CNN = {"_target_": "instrument.run.models.MnistCNN", "image_size": 8}
LOOK = {"layers": "**", "kind": "forward", "action": "record"}


def run_of(folder: Path, hooks: dict[str, Any], train: dict[str, Any], **more: Any) -> tuple[dict[str, Cost], Path]:
    raw = {**BASE, **more, "hooks": hooks, "train": train, "quiet": True}
    config = parse_config(raw)
    cost = prepare(config).cost
    run(config, folder / "run", Terminal(quiet=True), raw=raw, overrides={})
    return cost, folder / "run"


def rows_written(folder: Path) -> Counter[str]:
    done = load(folder)
    return Counter(hook for table in (done.stats, done.tensors(), done.effects) for hook in table["hook"])


HOOKS: dict[str, dict[str, Any]] = {
    "every_third": {**LOOK, "every": 3},
    "window": {**LOOK, "start": 2, "stop": 7, "every": 2},
    "listed": {**LOOK, "steps": [0, 4, 50]},
    "never": {**LOOK, "start": 50},
    "inputs": {**LOOK, "role": "input"},
    "pre": {**LOOK, "kind": "forward_pre", "exclude": "lstm"},
    "part": {**LOOK, "layers": "lstm", "path": "1.*"},
    "one_statistic": {**LOOK, "stats": ["max"], "types": "Linear"},
    "in_eval": {**LOOK, "phase": "eval"},
    "in_eval_at_five": {**LOOK, "phase": "eval", "steps": [5]},
    "flow": {**LOOK, "kind": "full_backward"},
    # No gradient comes to the LSTM's last states, which the loss does not depend on: a trial cannot know.
    "flow_out": {**LOOK, "exclude": "lstm", "kind": "full_backward", "role": "grad_output"},
    "flow_pre": {**LOOK, "exclude": "lstm", "kind": "full_backward_pre"},
    "tensor_in": {**LOOK, "kind": "tensor", "role": "input"},
    "tensor_out": {**LOOK, "exclude": "lstm", "kind": "tensor"},
    "gradients": {**LOOK, "kind": "parameter_grad"},
    "sums": {**LOOK, "kind": "post_accumulate_grad", "params": "*weight*"},
    "parameters": {**LOOK, "kind": "step_post", "every": 2},
    "updates": {**LOOK, "kind": "step_post", "role": "update", "tensors": True},
    "buffers": {**LOOK, "kind": "step_post", "role": "buffer"},
    "momenta": {**LOOK, "kind": "step_post", "role": "state.momentum_buffer"},
    "values": {**LOOK, "tensors": True, "samples": 2, "every": 4},
    "values_only": {**LOOK, "tensors": True, "stats": "none", "slice": "0:3, ::2", "every": 5},
    "few_values": {**LOOK, "tensors": True, "stats": "none", "max_elements": 3, "every": 5},
    "shrink": {"layers": ["fc", "lstm"], "kind": "forward", "action": "scale", "factor": 0.9},
    "tame": {"layers": "head", "kind": "parameter_grad", "action": "clip", "norm": 1.0},
    "tame_sums": {"layers": "head", "kind": "post_accumulate_grad", "action": "clip", "value": 0.1},
    "decay": {"layers": "fc", "kind": "step_post", "action": "scale", "factor": 0.99, "every": 3},
    "quiet": {"layers": "norm", "kind": "full_backward", "action": "scale", "factor": 0.5},
}
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {"steps": 10, "batch_size": 16},
    "accumulated, with a rest in each epoch": {"steps": 10, "batch_size": 16, "accumulate": 3},
    "two epochs": {"epochs": 2, "batch_size": 30, "accumulate": 2},
    "with evaluations": {"steps": 11, "batch_size": 16, "eval_every": 5, "eval_batch_size": 32},
}


@pytest.mark.parametrize("train", TRAININGS.values(), ids=TRAININGS)
def test_the_rows_foretold_are_the_rows_written(tmp_path: Path, train: dict[str, Any]) -> None:
    cost, folder = run_of(tmp_path, HOOKS, train)
    written = rows_written(folder)
    assert {name: spent.rows for name, spent in cost.items()} == {name: written[name] for name in HOOKS}
    assert sum(written.values()) > 500
    coverage = load(folder).coverage
    assert coverage[coverage["expected"] > 0].groupby("hook")["fired"].sum().gt(0).all()


def test_rows_of_a_whole_step_and_the_steps_that_are_due(tmp_path: Path) -> None:
    hooks = {name: HOOKS[name] for name in ("every_third", "never", "in_eval", "gradients", "sums")}
    cost, folder = run_of(tmp_path, hooks, {"steps": 6, "batch_size": 16, "accumulate": 2, "eval_batch_size": 32})
    stats = load(folder).stats
    for name, spent in cost.items():
        rows = stats[stats["hook"] == name].groupby("step").size()
        assert spent.firings == len(rows), name
        assert not len(rows) or spent.rows_per_step == rows.iloc[0], name
    assert (cost["never"].firings, cost["never"].rows, cost["never"].bytes) == (0, 0, 0)


LEAVES = {"types": ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Linear"], "kind": "forward", "action": "record"}
MANY_ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "outputs of all modules": {"a": LOOK},
    "outputs of leaves": {"a": LEAVES},
    "all statistics": {"a": {**LOOK, "stats": "all"}},
    "three statistics": {"a": {**LEAVES, "stats": ["mean", "max", "zero_fraction"]}},
    "gradients": {"a": {**LOOK, "kind": "parameter_grad"}},
    "flow": {"a": {**LOOK, "kind": "full_backward", "role": "grad_output"}},
    "updates": {"a": {**LOOK, "kind": "step_post", "role": "update"}},
    "scaled outputs": {"a": {**LOOK, "action": "scale", "factor": 0.99}},
    "clipped gradients": {"a": {**LOOK, "kind": "parameter_grad", "action": "clip", "value": 0.001}},
    "tensors": {"a": {**LOOK, "tensors": True, "stats": "none", "samples": 1}},
    "few values": {"a": {**LOOK, "tensors": True, "stats": "none", "max_elements": 4}},
    "wide values": {"a": {**LOOK, "tensors": True, "stats": "none", "max_elements": 40, "dtype": "float64"}},
    "together": {"a": LOOK, "b": {**LOOK, "kind": "parameter_grad"}, "c": {**LOOK, "tensors": True, "samples": 1}},
}


@pytest.mark.parametrize("hooks", MANY_ROWS.values(), ids=MANY_ROWS)
def test_the_bytes_foretold_are_those_on_disk_within_a_quarter(tmp_path: Path, hooks: dict[str, Any]) -> None:
    train = {"steps": 200, "batch_size": 16}
    slices = {**BASE["data"], "slice": {"split": "train"}}
    cost, folder = run_of(tmp_path, hooks, train, model=CNN, data=slices)
    files = [file for table in ("stats", "tensors", "effects") for file in folder.glob(f"{table}/*.parquet")]
    on_disk = sum(file.stat().st_size for file in files if pq.read_metadata(file).num_rows)
    assert sum(spent.bytes for spent in cost.values()) == pytest.approx(on_disk, rel=0.25)


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 12),
    accumulate=st.integers(1, 5),
    steps=st.integers(1, 30),
    every=st.integers(1, 4),
)
def test_micro_steps_are_those_of_the_batches(
    samples: int, batch_size: int, accumulate: int, steps: int, every: int
) -> None:
    dataset: Any = torch.utils.data.TensorDataset(torch.zeros(samples))
    batches = Batches(dataset, TrainConfig(steps=steps, batch_size=batch_size, accumulate=accumulate), seed=0)
    length = Length(steps, accumulate, batches.in_epoch, Evaluations(steps, 0), 0)
    groups = [len(group) for _, group in batches]
    due = range(0, steps, every)
    wanted = sum(groups[step] for step in due)
    assert length.micro_steps(due) == length.micro_steps(list(due)) == wanted


def test_a_tensor_met_again_costs_little() -> None:
    def bytes_of(model: nn.Module) -> int:
        plan = make_plan(parse_hooks({"a": LOOK}), model)
        trial = try_forward(model, lambda: model(torch.ones(2, 3)), training=True)
        return cost_of(plan, {"train": trial, "eval": trial}, Length(1, 1, 1, Evaluations(1, 0), 0))["a"].bytes

    one = bytes_of(nn.Linear(3, 3))
    assert bytes_of(nn.Sequential(nn.Linear(3, 3))) < 1.2 * one
    assert bytes_of(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) > 2 * one
    assert bytes_of(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))) > 2 * one
