"""The table `samples`: the dataset index and the target of each sample of a recorded batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import instrument
from instrument import ConfigError
from instrument.probe.samples import SampleRows, targets_of
from instrument.storage.row_batches import as_batch
from instrument.tables.schemas import TABLES
from instrument.training.datasets import digits

FEATURES = {"layers": "0", "kind": "forward", "action": "record", "stats": "none", "tensors": True}
Cli = Callable[..., Any]
TINY = ["model=mlp", "model.sizes=[64,8,10]", "data=digits", "data.slice={split: train, start: 100, stop: 250}"]
KEYS = ["step", "micro_step", "rank", "position"]


def record(folder: Path | None = None, **hooks: Any) -> tuple[nn.Module, Any]:
    """Return a model and the context manager that attaches hooks to it."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    return model, instrument.attach(model, hooks or {"f": FEATURES}, out=folder)


def samples_of(probe: instrument.Probe) -> pd.DataFrame:
    return probe.sink.frame("samples")  # type: ignore[attr-defined, no-any-return]


# ------------------------------------------------------------------------------------------------------------ in a loop


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, pd.Series])
def test_batch_accepts_ids_and_targets_in_every_form(form: Callable[[Any], Any]) -> None:
    model, attached = record()
    with attached as probe:
        probe.batch(ids=form([7, 2, 5]), targets=form([0.5, 1.5, -2.0]))
        model(torch.randn(3, 4))
        probe.end_step()
    rows = samples_of(probe)
    assert rows[["position", "sample", "id"]].to_numpy().tolist() == [[0, 7, None], [1, 2, None], [2, 5, None]]
    assert rows.target.tolist() == [0.5, 1.5, -2.0]
    assert set(rows.target_dtype) <= {"float32", "float64"}
    assert rows[["step", "micro_step", "epoch", "phase", "rank"]].drop_duplicates().to_numpy().tolist() == [
        [0, 0, 0, "train", 0]
    ]


@pytest.mark.parametrize("form", [list, np.array, pd.Series])
def test_ids_may_be_strings(form: Callable[[Any], Any]) -> None:
    model, attached = record()
    with attached as probe:
        probe.batch(ids=form(["b.png", "a.png"]))
        model(torch.randn(2, 4))
        probe.end_step()
    rows = samples_of(probe)
    assert rows.id.tolist() == ["b.png", "a.png"]
    assert rows["sample"].isna().all()
    assert rows.target.isna().all()
    assert rows.target_dtype.isna().all()


def test_rows_are_written_only_if_a_tensor_is_recorded(tmp_path: Path) -> None:
    hooks = {"f": {**FEATURES, "every": 2}, "seen": {"layers": "0", "kind": "forward", "action": "record"}}
    model, attached = record(tmp_path / "run", **hooks)
    with attached as probe:
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
    model = nn.Linear(4, 3)
    with instrument.attach(model, {}, ids="all") as probe:
        for step in range(2):
            probe.batch(ids=[step])
            model(torch.randn(1, 4))
            probe.end_step()
    assert samples_of(probe)["sample"].tolist() == [0, 1]


def test_batch_is_forgotten_when_the_phase_changes() -> None:
    hooks = {"f": FEATURES, "e": {**FEATURES, "phase": "eval"}}
    model, attached = record(**hooks)
    with attached as probe:
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
    model, attached = record()
    with pytest.raises(ZeroDivisionError), attached as probe:  # noqa: PT012
        probe.batch(ids=[4, 5])
        model(torch.randn(2, 4))
        raise ZeroDivisionError
    assert samples_of(probe)["sample"].tolist() == [4, 5]


@pytest.mark.parametrize("part", ["inputs", "targets"])
def test_batch_modified_in_place_keeps_its_values(part: str) -> None:
    model, attached = record()
    ids, targets = torch.tensor([3, 4]), torch.tensor([1, 0])
    with attached as probe:
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
        ([0, 1], torch.zeros(2, 3), r"targets: must be scalars\n +given +shape \[2, 3\]\n +allowed +shape \[2\]"),
        ([0, 1], [1, 2, 3], r"targets: one is required for each of the 2 ids\n +given +shape \[3\]\n +allowed +shape \[2\]"),
        ([0, 1], 1.0, r"targets: one is required for each of the 2 ids\n +given +shape \[\]"),
        ([0, 1], ["a", "b"], r"targets: must be numbers[\s\S]*given +\['a', 'b'\]"),
        ([0, 1], torch.zeros(2, dtype=torch.complex64), r"targets: must be real numbers\n +given +complex64"),
    ],
)  # fmt: skip
def test_invalid_ids_and_targets_are_refused(ids: Any, targets: Any, message: str) -> None:
    model, attached = record()
    with pytest.raises(ConfigError, match=message), attached as probe:  # noqa: PT012
        probe.batch(ids=ids, targets=targets)
        model(torch.randn(2, 4))
        probe.end_step()


def test_second_batch_in_a_micro_step_is_refused() -> None:
    model, attached = record()
    with pytest.raises(ConfigError, match=r"probe\.batch: .*\n +fix +call probe\.end_micro_step"), attached as probe:  # noqa: PT012
        probe.batch(ids=[9, 8, 7])
        for _ in range(2):
            probe.batch(ids=[0, 1])
            model(torch.randn(2, 4))


def test_layer_without_samples_is_allowed_next_to_one_with_samples() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))
    with instrument.attach(model, {"f": {**FEATURES, "layers": "**"}}) as probe:
        probe.batch(ids=[0, 1])
        model(torch.randn(2, 4))
        probe.end_step()
    assert len(samples_of(probe)) == 2


def test_rows_as_a_batch_equal_the_rows() -> None:
    for ids, targets, dtype in (([5, 6], [0.5, 1.0], "float32"), (["a", "b"], None, None), ([], None, None)):
        rows = SampleRows((3, 1, 0, "eval", 2), ids, targets, dtype)
        expected = as_batch(TABLES["samples"], [tuple(row) for row in rows])
        assert rows.to_batch().equals(expected)
        assert list(rows[1:]) == list(rows)[1:]


@dataclass
class Pair:
    x: torch.Tensor
    labels: torch.Tensor


class Weighted(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([torch.zeros(2, 3), torch.tensor([1, 2])], [1, 2]),
        ((torch.zeros(2, 3), torch.tensor([[1.0], [2.0]])), [1.0, 2.0]),
        ({"x": torch.zeros(2), "labels": torch.tensor([3, 4])}, [3, 4]),
        (Pair(torch.zeros(2), torch.tensor([3, 4])), [3, 4]),
        (Weighted(torch.zeros(2), torch.tensor([3, 4]), torch.ones(2)), [3, 4]),
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
    targets = targets_of(batch, 2)
    assert (None if targets is None else targets.tolist()) == expected


# ------------------------------------------------------------------------------------------------------------ in a run


def test_run_writes_dataset_indices_and_targets(cli: Cli) -> None:
    hooks = [
        "+hooks.train={layers: layers.0, kind: forward, action: record, tensors: true}",
        "+hooks.eval={layers: layers.0, kind: forward, action: record, tensors: true, phase: eval}",
    ]
    more = ["train.steps=5", "train.batch_size=20", "train.accumulate=2", "train.eval_every=3", "hydra.run.dir=out"]
    answer = cli(*TINY, *hooks, *more)
    assert answer.code == 0, answer.err
    run = instrument.load("out")
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


TRIPLES = """
import torch
from torch.utils.data import TensorDataset

import instrument


def triples(split):
    x = torch.arange(40.0).reshape(10, 4)
    return TensorDataset(x, torch.ones(10), torch.arange(10) * 0.5)  # inputs, weights, targets


class Selecting:
    def __call__(self, model, batch):
        x, weight, y = batch
        loss = (weight * (model(x).mean(1) - y) ** 2).mean()
        return instrument.Outcome(loss=loss, samples=len(x))

    def sample_targets(self, batch):
        return batch[2]


class Failing(Selecting):
    def sample_targets(self, batch):
        return batch["y"]
"""
OF_TRIPLES = [
    "model=mlp", "model.sizes=[4,8,3]", "train.steps=2", "train.batch_size=4", "~task",
    "+data={dataset: {_target_: triples.triples}}", "+data.probe_batch=3",
    "+hooks.a={layers: layers.0, kind: forward, action: record, tensors: true}",
    "+hooks.b={layers: layers.0, kind: forward, action: record, tensors: true, phase: eval}",
    "+hooks.c={layers: layers.0, kind: forward, action: record, tensors: true, phase: probe}",
]  # fmt: skip


def test_task_selects_the_targets_of_triples(cli: Cli, workdir: Path) -> None:
    (workdir / "triples.py").write_text(TRIPLES)
    answer = cli(*OF_TRIPLES, "+task={_target_: triples.Selecting}", "hydra.run.dir=out")
    assert answer.code == 0, answer.err
    rows = instrument.load("out").samples
    assert set(rows.phase) == {"train", "eval", "probe"}
    assert rows.target.tolist() == [0.5 * sample for sample in rows["sample"]]


def test_error_in_the_selection_of_targets_is_reported_before_the_first_step(cli: Cli, workdir: Path) -> None:
    (workdir / "triples.py").write_text(TRIPLES)
    answer = cli(*OF_TRIPLES, "+task={_target_: triples.Failing}", "hydra.run.dir=out")
    assert answer.code == 2, answer.out
    assert re.search(
        r"task: Failing.sample_targets fails \(in .*TypeError: .*; the batch is \[float32", answer.err, re.DOTALL
    )
    assert not (workdir / "out").exists()


def test_ids_of_all_batches_can_be_written(cli: Cli) -> None:
    answer = cli(*TINY, "data.ids=all", "train.steps=2", "train.batch_size=100", "hydra.run.dir=out")
    assert answer.code == 0, answer.err
    rows = instrument.load("out").samples
    assert rows[rows.phase == "train"].groupby("step").size().tolist() == [100, 50]
    assert sorted(rows[rows.phase == "train"]["sample"]) == list(range(100, 250))
    assert len(rows[rows.phase == "eval"]) == 360


def test_unknown_value_of_ids_is_refused(cli: Cli) -> None:
    answer = cli(*TINY, "data.ids=some")
    assert answer.code == 2
    assert "data.ids" in answer.err
    assert "recorded" in answer.err
