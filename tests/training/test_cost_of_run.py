"""The dry run: predicted rows, bytes and time of hooks compared with real runs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import training_runs
from device_statistics import use_general_path
from tiers import tiered
from torch import Tensor, nn
from training_runs import DIGITS

import instrument
from instrument.analysis.load import load
from instrument.config.parse import parse_config
from instrument.errors import ConfigError
from instrument.plan.cost import Cost, Forecast
from instrument.stats.measure import Measured
from instrument.storage.parquet import ParquetSink
from instrument.training.dry_run import dry_run
from instrument.training.environment import process_state
from instrument.training.experiment import Experiment
from instrument.training.loader import LoadedBatch, Loader
from instrument.training.loop import train_step
from instrument.training.runner import run
from instrument.training.terminal import Terminal

pytestmark = pytest.mark.usefixtures("few_repeats")


class Recurrent(nn.Module):
    """Model with nested outputs, a module called twice, an unused module and a frozen module."""

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


CONFIG: dict[str, Any] = {
    **training_runs.CONFIG,
    "model": {"_target_": f"{__name__}.Recurrent"},
    "data": {"dataset": DIGITS, "slice": {"stop": 100}, "eval_slice": {"split": "test", "stop": 70}},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9},
}
CNN = {"_target_": "instrument.training.models.MnistCNN", "image_size": 8}
RECORD = {"layers": "**", "kind": "forward", "action": "record"}


def run_of(folder: Path, hooks: dict[str, Any], train: dict[str, Any], **more: Any) -> tuple[dict[str, Cost], Path]:
    """Return the predicted cost of a run, and the folder of the run."""
    raw = {**CONFIG, **more, "hooks": hooks, "train": train, "quiet": True}
    cost = forecast_of(hooks, train, **{"model": CONFIG["model"], **more}).cost
    run(parse_config(raw), folder / "run", Terminal(quiet=True), raw=raw, overrides={})
    return cost, folder / "run"


def rows_written(folder: Path) -> Counter[str]:
    done = load(folder)
    return Counter(
        hook for table in (done.stats, done.distributions, done.tensors(), done.effects) for hook in table["hook"]
    )


HOOKS: dict[str, dict[str, Any]] = {
    "every_third": {**RECORD, "every": 3},
    "window": {**RECORD, "start": 2, "stop": 7, "every": 2},
    "listed": {**RECORD, "steps": [0, 4, 50]},
    "never": {**RECORD, "start": 50},
    "inputs": {**RECORD, "role": "input"},
    "pre": {**RECORD, "kind": "forward_pre", "exclude": "lstm"},
    "part": {**RECORD, "layers": "lstm", "path": "1.*"},
    "one_statistic": {**RECORD, "stats": ["max"], "types": "Linear"},
    "in_eval": {**RECORD, "phase": "eval"},
    "in_eval_at_five": {**RECORD, "phase": "eval", "steps": [5]},
    "flow": {**RECORD, "kind": "full_backward"},
    # The last states of the LSTM get no gradient, because the loss does not depend on them.
    "flow_out": {**RECORD, "kind": "full_backward", "role": "grad_output"},
    "flow_pre": {**RECORD, "kind": "full_backward_pre"},
    "tensor_in": {**RECORD, "kind": "tensor", "role": "input"},
    "tensor_out": {**RECORD, "kind": "tensor"},
    "gradients": {**RECORD, "kind": "parameter_grad"},
    "sums": {**RECORD, "kind": "post_accumulate_grad", "params": "*weight*"},
    "parameters": {**RECORD, "kind": "step_post", "every": 2},
    "updates": {**RECORD, "kind": "step_post", "role": "update", "tensors": True},
    "buffers": {**RECORD, "kind": "step_post", "role": "buffer"},
    "momenta_before": {**RECORD, "kind": "step_pre", "role": "state.momentum_buffer"},
    "momenta": {**RECORD, "kind": "step_post", "role": "state.momentum_buffer"},
    "values": {**RECORD, "tensors": True, "samples": 2, "every": 4},
    "values_only": {**RECORD, "tensors": True, "stats": "none", "samples": 3, "slice": ":, ::2", "every": 5},
    "few_values": {**RECORD, "tensors": True, "stats": "none", "max_elements": 3, "every": 5},
    "spread": {**RECORD, "quantiles": True, "every": 4},
    "shape": {**RECORD, "stats": "none", "histogram": True, "every": 5},
    "shrink": {"layers": ["fc", "lstm"], "kind": "forward", "action": "scale", "factor": 0.9},
    "tame": {"layers": "head", "kind": "parameter_grad", "action": "clip", "norm": 1.0},
    "tame_sums": {"layers": "head", "kind": "post_accumulate_grad", "action": "clip", "value": 0.1},
    "decay": {"layers": "fc", "kind": "step_post", "action": "scale", "factor": 0.99, "every": 3},
    "quiet": {"layers": "norm", "kind": "full_backward", "action": "scale", "factor": 0.5},
}
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {"steps": 10, "batch_size": 16},
    "accumulated with a remainder": {"steps": 6, "batch_size": 16, "accumulate": 3},
    "two epochs": {"epochs": 2, "batch_size": 30, "accumulate": 2},
    "with evaluations": {"steps": 11, "batch_size": 16, "eval_every": 5, "eval_batch_size": 32},
}


# Each training ends with an evaluation.
@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(TRAININGS, ["accumulated with a remainder"]))
def test_predicted_rows_and_steps_equal_written_ones(tmp_path: Path, name: str) -> None:
    cost, folder = run_of(tmp_path, HOOKS, TRAININGS[name])
    written = rows_written(folder)
    assert {name: spent.rows for name, spent in cost.items()} == {name: written[name] for name in HOOKS}
    assert sum(written.values()) > 500
    stats = load(folder).stats
    for hook in ("every_third", "in_eval", "gradients", "sums"):
        assert cost[hook].firings == stats[stats["hook"] == hook]["step"].nunique() > 0, hook
    assert (cost["never"].firings, cost["never"].rows, cost["never"].bytes) == (0, 0, 0)
    coverage = load(folder).coverage
    assert coverage[coverage["expected"] > 0].groupby("hook")["fired"].sum().gt(0).all()


TABLES = ("stats", "distributions", "tensors", "effects")
LEAVES = {"types": ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d", "Linear"], "kind": "forward", "action": "record"}
MANY_ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "outputs of all modules": {"a": RECORD},
    "outputs of leaves": {"a": LEAVES},
    "all statistics": {"a": {**RECORD, "stats": "all"}},
    "three statistics": {"a": {**LEAVES, "stats": ["mean", "max", "zero_fraction"]}},
    "gradients": {"a": {**RECORD, "kind": "parameter_grad"}},
    "flow": {"a": {**RECORD, "kind": "full_backward", "role": "grad_output"}},
    "updates": {"a": {**RECORD, "kind": "step_post", "role": "update"}},
    "scaled outputs": {"a": {**RECORD, "action": "scale", "factor": 0.99}},
    "clipped gradients": {"a": {**RECORD, "kind": "parameter_grad", "action": "clip", "value": 0.001}},
    "tensors": {"a": {**RECORD, "tensors": True, "stats": "none", "samples": 1}},
    "few values": {"a": {**RECORD, "tensors": True, "stats": "none", "max_elements": 4}},
    "wide values": {"a": {**RECORD, "tensors": True, "stats": "none", "max_elements": 40, "dtype": "float64"}},
    "quantiles": {"a": {**LEAVES, "stats": "none", "quantiles": True}},
    "histograms": {"a": {**LEAVES, "stats": "none", "histogram": 16}},
    "seldom": {"a": {**RECORD, "every": 7}, "b": {**RECORD, "kind": "parameter_grad", "start": 50, "stop": 150}},
    "together": {
        "a": RECORD,
        "b": {**RECORD, "kind": "parameter_grad"},
        "c": {**RECORD, "tensors": True, "samples": 1},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY_ROWS)
def test_predicted_bytes_are_at_most_45_percent_too_high(tmp_path: Path, name: str) -> None:
    train = {"steps": 200, "batch_size": 16}
    slices = {**CONFIG["data"], "slice": {"split": "train"}}
    cost, folder = run_of(tmp_path, MANY_ROWS[name], train, model=CNN, data=slices)
    files = [file for table in TABLES for file in folder.glob(f"{table}/*.parquet")]
    files = [*(file for file in files if pq.read_metadata(file).num_rows), *folder.glob("blocks/*.raw")]
    on_disk = sum(file.stat().st_size for file in files)
    ratio = sum(spent.bytes for spent in cost.values()) / on_disk
    assert 0.9 <= ratio <= 1.45, "a few steps compress less than a long run"


@pytest.mark.slow
def test_predicted_bytes_of_a_hook_scheduled_at_one_step(tmp_path: Path) -> None:
    hooks = {"a": {"layers": "encoder.0", "kind": "forward", "action": "record", "phase": "eval"}}
    cost, folder = run_of(tmp_path, hooks, {"steps": 3, "batch_size": 16, "eval_batch_size": 4}, model=CNN)
    (file,) = folder.glob("stats/*.parquet")
    assert pq.read_metadata(file).num_rows == cost["a"].rows > 10
    assert 0.5 <= cost["a"].bytes / file.stat().st_size <= 2.0


def forecast_of(hooks: dict[str, Any], train: dict[str, Any] | None = None, **more: Any) -> Forecast:
    raw = {**CONFIG, "model": CNN, **more, "hooks": hooks, "train": train or {"steps": 20, "batch_size": 16}}
    config = parse_config(raw)
    with process_state(seed=config.seed, deterministic=config.deterministic):
        return dry_run(Experiment(config))


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Simulated clock. A step takes 0.5 s, each measured tensor 0.03 s; calling the fixture adds seconds."""
    now = [0.0]

    def move(seconds: float) -> None:
        now[0] += seconds

    for module in ("instrument.hooks.clock", "instrument.training.dry_run", "instrument.probe.probe"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("instrument.training.dry_run.SECONDS", 30.0)
    for name in ("MIN_REPEATS", "MAX_REPEATS"):
        monkeypatch.setattr(f"instrument.training.dry_run.{name}", 4)  # enough for a median without outliers
    monkeypatch.setattr("instrument.training.dry_run.train_step", lambda *args: (move(0.5), train_step(*args))[1])
    monkeypatch.setattr("instrument.actions.measurement.measure", lambda *args: (move(0.03), Measured())[1])
    use_general_path(monkeypatch)
    return move


@pytest.mark.slow
def test_predicted_time_counts_only_scheduled_steps(move: Callable[[float], None]) -> None:
    """Each of three hooks measures four tensors."""
    record = {**RECORD, "layers": ["encoder.*", "decoder.*"]}
    found = forecast_of({"often": record, "seldom": {**record, "every": 5}, "late": {**record, "start": 100}})
    assert found.baseline_seconds == pytest.approx(0.5)
    assert found.cost["often"].seconds == pytest.approx(0.12)
    assert found.cost["seldom"].seconds == pytest.approx(0.12)
    assert found.cost["late"].seconds == 0.0
    assert found.share("often", 20) == pytest.approx(0.24)
    assert found.share("seldom", 20) == pytest.approx(0.24 / 5)
    assert found.slowdown == pytest.approx(0.24 * 1.2)


MICRO = {"layers": "decoder.1", "kind": "parameter_grad_micro", "action": "record"}
ACCUMULATED = {"steps": 20, "batch_size": 16, "accumulate": 3}


@pytest.mark.slow
def test_step_time_includes_loading_batches(move: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight and bias are measured in each of three micro-batches; loading a micro-batch takes 0.2 s."""
    plain = Loader.load

    def loaded(self: Loader, *args: Any) -> Iterator[LoadedBatch]:
        for batch in plain(self, *args):
            if args[0].startswith("epoch"):
                move(0.2)
            yield batch

    monkeypatch.setattr(Loader, "load", loaded)
    tame = {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 1.0}
    found = forecast_of({"micro": MICRO, "tame": tame}, ACCUMULATED)
    assert found.baseline_seconds == pytest.approx(0.5 + 3 * 0.2)
    assert found.cost["micro"].seconds == pytest.approx(0.18)
    assert found.slowdown == pytest.approx(0.18 / 1.1)


@pytest.mark.slow
def test_outlier_of_the_measured_time_is_ignored(
    move: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def measured(*args: object) -> Measured:
        move(9.0 if next(calls) == 100 else 0.03)
        return Measured()

    monkeypatch.setattr("instrument.actions.measurement.measure", measured)
    assert forecast_of({"micro": MICRO}, ACCUMULATED).cost["micro"].seconds == pytest.approx(0.18)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "cut", "fits"),
    [
        pytest.param(2, "0:1", True, marks=pytest.mark.slow),
        pytest.param(None, "3", True, marks=pytest.mark.slow),
        *[(2, "1", True), (2, "5", False), (None, "90", False)],
    ],
)
def test_slice_is_checked_after_selecting_samples(samples: int | None, cut: str, fits: bool) -> None:
    keep = {**RECORD, "tensors": True, "slice": cut} | ({} if samples is None else {"samples": samples})
    if fits:
        forecast_of({"a": {**keep, "layers": "decoder"}})
        return
    with pytest.raises(ConfigError, match=r"hooks\.a\.slice: .* is out of range for dimension 0"):
        forecast_of({"a": {**keep, "layers": "decoder"}})


def test_step_that_fails_with_hooks_is_reported_before_the_run() -> None:
    """The trials on the first and on the smallest batch succeed; the calls in the steps of the dry run fail."""
    REMAINING_SUCCESSES[:] = [True, True]
    hooks = {"broken": {"layers": "encoder.0", "kind": "forward", "action": "modify", "fn": fails}}
    with pytest.raises(ConfigError) as caught:
        forecast_of(hooks)
    (problem,) = caught.value.problems
    assert problem.where == "hooks"
    assert problem.message.startswith("a step with these hooks fails")
    assert "hook 'broken'" in str(problem.given)
    assert "no such thing" in str(problem.given)


@pytest.mark.slow
def test_dry_run_does_not_call_observing_functions() -> None:
    hooks = {
        kind: {"layers": "**", "kind": kind, "action": "call", "fn": fails} for kind in ("forward", "parameter_grad")
    }
    assert all(cost.seconds > 0 for cost in forecast_of(hooks).cost.values())  # of the hooks without their functions


def test_step_that_fails_without_hooks_is_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        forecast_of({"a": RECORD}, optimizer={"_target_": f"{__name__}.BrokenOptimizer", "lr": 0.1})
    (problem,) = caught.value.problems
    assert problem.message.startswith("a step without hooks fails")
    assert "RuntimeError: this optimizer cannot step" in str(problem.given)


REMAINING_SUCCESSES: list[bool] = []  # one entry per call of `fails` that succeeds


def fails(tensor: Tensor, context: instrument.Context) -> Tensor:
    if REMAINING_SUCCESSES:
        REMAINING_SUCCESSES.pop()
        return tensor * 1
    raise LookupError(f"no such thing at {context.layer}")


class BrokenOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("this optimizer cannot step")


@pytest.mark.slow
def test_dry_run_does_not_exceed_the_scheduler_steps() -> None:
    scheduler = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1, "total_steps": 2}
    assert forecast_of({"a": RECORD}, {"steps": 2, "batch_size": 16}, scheduler=scheduler).cost["a"].rows > 0


@pytest.mark.slow
def test_predicted_rows_of_a_compiled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend="eager")
    )  # without code generation, which is much faster
    model = {"_target_": "instrument.training.models.MLP", "sizes": [64, 8, 10]}
    cost, folder = run_of(tmp_path, {"a": RECORD}, {"steps": 3, "batch_size": 16, "compile": True}, model=model)
    assert cost["a"].rows == rows_written(folder)["a"] > 0


@pytest.mark.slow
def test_dry_run_with_large_steps_makes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.training.dry_run.MAX_BYTES", 1)
    kept = []
    keep = ParquetSink.keep
    monkeypatch.setattr(ParquetSink, "keep", lambda *args: (kept.append(1), keep(*args))[1])
    found = forecast_of({"a": {**RECORD, "layers": "encoder.0", "tensors": True}})
    assert len(kept) == 1
    assert found.cost["a"].rows == 40
    assert found.cost["a"].seconds > 0


@pytest.mark.slow
def test_dry_run_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    forecast_of({"a": {**RECORD, "layers": "encoder.0", "tensors": True}})
    assert not list(tmp_path.iterdir())
