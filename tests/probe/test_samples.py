"""The table `samples`: the dataset index and the target of each sample of a recorded batch."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from attached_runs import forward_steps
from torch import nn
from torch.utils.data import TensorDataset
from training_runs import compose, train_here

import instrument
from instrument import ConfigError
from instrument.actions.base import StepContext
from instrument.probe.samples import SampleRows, scalar_targets, targets_of
from instrument.storage.row_batches import as_batch
from instrument.tables.schemas import TABLES
from instrument.training.datasets import digits

FEATURES = {"layers": "0", "kind": "forward", "action": "record", "stats": "none", "tensors": True}
TINY = ["model=mlp", "model.sizes=[64,8,10]", "data=digits", "data.slice={split: train, start: 100, stop: 250}"]


def record(ids: Any, targets: Any = None, *, rows: int | None = None) -> pd.DataFrame:
    """Return the samples of one step whose outputs are recorded."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    with instrument.attach(model, {"f": FEATURES}) as probe:
        probe.batch(ids=ids, targets=targets)
        model(torch.randn(rows or len(ids), 4))
        probe.end_step()
    return samples_of(probe)


def samples_of(probe: instrument.Probe) -> pd.DataFrame:
    return probe.sink.frame("samples")  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, pd.Series])
def test_batch_accepts_ids_and_targets_in_every_form(form: Callable[[Any], Any]) -> None:
    rows = record(form([7, 2, 5]), form([0.5, 1.5, -2.0]))
    assert rows[["position", "sample", "id"]].to_numpy().tolist() == [[0, 7, None], [1, 2, None], [2, 5, None]]
    assert rows.target.tolist() == [0.5, 1.5, -2.0]
    assert set(rows.target_dtype) <= {"float32", "float64"}
    assert rows[["step", "micro_step", "epoch", "phase", "rank"]].drop_duplicates().to_numpy().tolist() == [
        [0, 0, 0, "train", 0]
    ]


@pytest.mark.parametrize("form", [list, np.array, pd.Series])
def test_ids_may_be_strings(form: Callable[[Any], Any]) -> None:
    rows = record(form(["b.png", "a.png"]))
    assert rows.id.tolist() == ["b.png", "a.png"]
    assert rows["sample"].isna().all()
    assert rows.target.isna().all()
    assert rows.target_dtype.isna().all()


def test_rows_are_written_only_if_a_tensor_is_recorded(tmp_path: Path) -> None:
    hooks = {"f": {**FEATURES, "every": 2}, "seen": {"layers": "0", "kind": "forward", "action": "record"}}
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    with instrument.attach(model, hooks, out=tmp_path / "run") as probe:
        for step in range(4):
            for micro_step in range(2):
                probe.batch(ids=[10 * step + micro_step, 100])
                model(torch.randn(2, 4))
                probe.end_micro_step()
            probe.end_step()
    rows = instrument.load(tmp_path / "run").samples
    assert rows[["step", "micro_step", "sample"]].to_numpy().tolist() == [
        [step, micro_step, sample]
        for step in (0, 2)
        for micro_step in (0, 1)
        for sample in (10 * step + micro_step, 100)
    ]


def test_all_ids_are_written_without_recorded_tensors() -> None:
    probe = forward_steps(nn.Linear(4, 3), {}, torch.randn(2, 1, 4), sample_ids=[[0], [1]], ids="all")
    assert samples_of(probe)["sample"].tolist() == [0, 1]


def test_batch_is_forgotten_when_the_phase_changes() -> None:
    hooks = {"f": FEATURES, "e": {**FEATURES, "phase": "eval"}}
    model = nn.Sequential(nn.Linear(4, 3))
    with instrument.attach(model, hooks) as probe:
        probe.batch(ids=[1])
        model(torch.randn(1, 4))
        probe.end_step()
        probe.batch(ids=[2])
        with probe.evaluating():
            probe.batch(ids=[8, 9])
            model(torch.randn(2, 4))
            probe.end_micro_step()
        probe.batch(ids=[3])
        model(torch.randn(1, 4))
        probe.end_step()
    rows = samples_of(probe)
    assert sorted(rows[["step", "phase", "sample"]].to_numpy().tolist()) == [
        [0, "train", 1],
        [1, "eval", 8],
        [1, "eval", 9],
        [1, "train", 3],
    ]


def test_samples_of_an_interrupted_step_are_written() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ZeroDivisionError), instrument.attach(model, {"f": FEATURES}) as probe:  # noqa: PT012
        probe.batch(ids=[4, 5])
        model(torch.randn(2, 4))
        raise ZeroDivisionError
    assert samples_of(probe)["sample"].tolist() == [4, 5]


@pytest.mark.parametrize("part", ["inputs", "targets"])
def test_batch_modified_in_place_keeps_its_values(part: str) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    ids, targets = torch.tensor([3, 4]), torch.tensor([1, 0])
    with instrument.attach(model, {"f": FEATURES}) as probe:
        probe.batch(ids=ids, targets=targets)
        (ids if part == "inputs" else targets).fill_(-100)
        model(torch.randn(2, 4))
        probe.end_step()
    assert samples_of(probe)[["sample", "target"]].to_numpy().tolist() == [[3, 1], [4, 0]]


@pytest.mark.parametrize(
    ("ids", "targets", "message"),
    [
        ([0, 1, 2], None, r"ids: the number of ids differs from the size of dimension 0[\s\S]*given +3\n +allowed +2"),
        ([0.5, 1.0], None, r"ids: must be integers or strings[\s\S]*given +\[0.5, 1.0\]\n +allowed +\[samples\] integers"),
        (torch.zeros(2), None, r"ids: must be integers[\s\S]*given +a float32 tensor of shape \[2\]"),
        (torch.zeros(2, 1).int(), None, r"ids: must be integers[\s\S]*given +a int32 tensor of shape \[2, 1\]"),
        ([True, False], None, "ids: must be integers"),
        ([1, "a"], None, "ids: must be integers"),
        ([[1], [2, 3]], None, "ids: must be integers"),
        (3, None, "ids: must be integers"),
        ([7, 2, 7], None, r"ids: an id occurs twice[\s\S]*given +7 at the positions 0 and 2\n +fix +give each sample"),
        (torch.tensor([1, 0, 0]), None, r"given +0 at the positions 1 and 2"),
        (["a", "a"], None, r"given +'a' at the positions 0 and 1"),
        (
            [0, 1],
            torch.zeros(2, 3),
            r"targets: must be scalars\n +given +shape \[2, 3\]\n +allowed +shape \[2\], or integers \[2, positions\]",
        ),
        ([0, 1], [1, 2, 3], r"targets: one is required for each of the 2 ids\n +given +shape \[3\]\n +allowed +shape \[2\]"),
        ([0, 1], 1.0, r"targets: one is required for each of the 2 ids\n +given +shape \[\]"),
        ([0, 1], ["a", "b"], r"targets: must be numbers[\s\S]*given +\['a', 'b'\]"),
        ([0, 1], torch.zeros(2, dtype=torch.complex64), r"targets: must be real numbers\n +given +complex64"),
    ],
)  # fmt: skip
def test_invalid_ids_and_targets_are_refused(ids: Any, targets: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(ids, targets, rows=2)


def test_second_batch_in_a_micro_step_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    message = r"probe\.batch: .*\n +fix +call probe\.end_micro_step"
    with pytest.raises(ConfigError, match=message), instrument.attach(model, {"f": FEATURES}) as probe:  # noqa: PT012
        probe.batch(ids=[9, 8, 7])
        for _ in range(2):
            probe.batch(ids=[0, 1])
            model(torch.randn(2, 4))


def test_layer_without_samples_is_allowed_next_to_one_with_samples() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))
    probe = forward_steps(model, {"f": {**FEATURES, "layers": "**"}}, [torch.randn(2, 4)], sample_ids=[[0, 1]])
    assert len(samples_of(probe)) == 2


def test_rows_as_a_batch() -> None:
    moment = (3, 1, 0, "eval", 2)
    numbers = [(*moment, 0, 5, None, 0.5, "float32"), (*moment, 1, 6, None, 1.0, "float32")]
    names = [(*moment, 0, None, "a", None, None), (*moment, 1, None, "b", None, None)]
    for ids, targets, dtype, expected in (
        ([5, 6], [0.5, 1.0], "float32", numbers),
        (["a", "b"], None, None, names),
        ([], None, None, []),
    ):
        rows = SampleRows(StepContext(*moment[:-1]), moment[-1], ids, targets, dtype)
        assert rows.to_batch().equals(as_batch(TABLES["samples"], expected))
        assert list(rows) == expected
        assert list(rows[1:]) == expected[1:]


Pair = make_dataclass("Pair", ["x", "labels"])
Weighted = namedtuple("Weighted", ["x", "y", "weight"])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([torch.zeros(2, 3), torch.tensor([1, 2])], [1, 2]),
        ((torch.zeros(2, 3), torch.tensor([[1.0], [2.0]])), [1.0, 2.0]),
        ({"x": torch.zeros(2), "labels": torch.tensor([3, 4])}, [3, 4]),
        (Pair(torch.zeros(2), torch.tensor([3, 4])), [3, 4]),
        (Weighted(torch.zeros(2), torch.tensor([3, 4]), torch.ones(2)), [3, 4]),
        (SimpleNamespace(x=torch.zeros(2), target=torch.tensor([3, 4])), [3, 4]),
        ([torch.zeros(2, 3), torch.zeros(2, 3)], None),
        ([torch.zeros(2, 3), torch.tensor(3)], None),
        ([torch.zeros(2, 3), ["a", "b"]], None),
        ([torch.zeros(2)] * 3, None),
        ([torch.zeros(2), torch.tensor([1, 2, 3])], None),  # as the nodes of graphs
        ({"x": torch.zeros(2)}, None),
        (torch.zeros(2), None),
    ],
)
def test_targets_of_a_batch_are_scalars_or_missing(batch: Any, expected: list[float] | None) -> None:
    targets = scalar_targets(targets_of(batch), 2)
    assert (None if targets is None else targets.tolist()) == expected


@pytest.mark.slow
def test_run_writes_dataset_indices_and_targets(tmp_path: Path) -> None:
    hooks = [
        "+hooks.train={layers: layers.0, kind: forward, action: record, tensors: true}",
        "+hooks.eval={layers: layers.0, kind: forward, action: record, tensors: true, phase: eval}",
    ]
    more = ["train.steps=5", "train.batch_size=20", "train.accumulate=2", "train.eval_every=3"]
    run = train_here(tmp_path / "out", *TINY, *hooks, *more)
    rows, tensors = run.samples, run.tensors()
    sizes = rows.groupby(["phase", "step", "micro_step"]).size()
    expected = tensors.groupby(["phase", "step", "micro_step"])["shape"].agg(lambda shapes: shapes.iloc[0][0])
    assert sizes.to_dict() == expected.to_dict()
    assert set(sizes.index.get_level_values("phase")) == {"train", "eval"}
    first_epoch = rows[(rows.phase == "train") & (rows.epoch == 0)]
    assert sorted(first_epoch["sample"]) == list(range(100, 250))
    assert first_epoch["sample"].tolist() != sorted(first_epoch["sample"])  # shuffled
    for phase, split in (("train", "train"), ("eval", "test")):
        targets = digits(split).targets
        of_phase = rows[rows.phase == phase]
        assert of_phase.target.tolist() == [targets[sample] for sample in of_phase["sample"]]
    assert set(rows.target_dtype) == {"int64"}
    # The recorded tensors are the outputs for these samples.
    evaluated = rows[(rows.phase == "eval") & (rows.step == 5) & (rows.micro_step == 1)]
    assert evaluated["sample"].tolist() == list(range(256, 360))
    features = run.features("layers.0", hook="train", epoch=0)
    assert features.ids.tolist() == list(range(100, 250))
    assert features.X.shape == (150, 8)


def triples(split: str) -> TensorDataset:
    return TensorDataset(torch.arange(40.0).reshape(10, 4), torch.ones(10), torch.arange(10) * 0.5)


class Selecting:
    def __call__(self, model: nn.Module, batch: Any) -> instrument.Outcome:
        x, weight, y = batch
        return instrument.Outcome(loss=(weight * (model(x).mean(1) - y) ** 2).mean(), samples=len(x))

    def sample_targets(self, batch: Any) -> Any:
        return batch[2]


class Failing(Selecting):
    def sample_targets(self, batch: Any) -> Any:
        return batch["y"]


OF_TRIPLES = [
    "model=mlp", "model.sizes=[4,8,3]", "train.steps=2", "train.batch_size=4", "~task",
    f"+data={{dataset: {{_target_: {__name__}.triples}}}}", "+data.probe_batch=3",
    "+hooks.a={layers: layers.0, kind: forward, action: record, tensors: true}",
    "+hooks.b={layers: layers.0, kind: forward, action: record, tensors: true, phase: eval}",
    "+hooks.c={layers: layers.0, kind: forward, action: record, tensors: true, phase: probe}",
]  # fmt: skip


def test_task_selects_the_targets_of_triples(tmp_path: Path) -> None:
    rows = train_here(tmp_path / "out", *OF_TRIPLES, f"+task={{_target_: {__name__}.Selecting}}").samples
    assert set(rows.phase) == {"train", "eval", "probe"}
    assert rows.target.tolist() == [0.5 * sample for sample in rows["sample"]]


def test_error_in_the_selection_of_targets_is_reported_before_the_first_step(tmp_path: Path) -> None:
    message = r"(?s)task: Failing.sample_targets fails \(in .*TypeError: .*; the batch is \[float32"
    with pytest.raises(ConfigError, match=message):
        train_here(tmp_path / "out", *OF_TRIPLES, f"+task={{_target_: {__name__}.Failing}}")
    assert not (tmp_path / "out").exists()


def test_ids_of_all_batches_can_be_written(tmp_path: Path) -> None:
    rows = train_here(tmp_path / "out", *TINY, "data.ids=all", "train.steps=2", "train.batch_size=100").samples
    assert rows[rows.phase == "train"].groupby("step").size().tolist() == [100, 50]
    assert sorted(rows[rows.phase == "train"]["sample"]) == list(range(100, 250))
    assert len(rows[rows.phase == "eval"]) == 360


def test_unknown_value_of_ids_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.ids: (.|\n)*recorded"):
        compose(*TINY, "data.ids=some")
