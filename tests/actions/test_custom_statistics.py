"""Custom statistics: functions of a tensor whose results are columns of `stats`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Answer
from device_statistics import use_device_statistics
from fuzz import CONFIG
from hook_runs import run_steps
from report_fixtures import data_of
from torch import Tensor, nn
from training_runs import compose

import instrument
from instrument.actions.base import StepContext
from instrument.actions.measurement import Measurement
from instrument.config.hook_specs import RecordSpec
from instrument.config.parse import parse_config, parse_hooks
from instrument.trackers.tags import scalars
from instrument.training.distributed.strategies import reduce_problems
from instrument.training.experiment import Experiment
from instrument.training.sweep_objective import read_objective


def spread(tensor: Tensor) -> Tensor:
    return tensor.amax() - tensor.amin()


def scaled(tensor: Tensor, factor: float = 1.0) -> float:
    return float(tensor.sum()) * factor


def hook(*stats: Any, **fields: Any) -> dict[str, Any]:
    return {"layers": "*", "kind": "forward", "action": "record", "stats": list(stats), **fields}


def record(specs: dict[str, Any], **options: Any) -> instrument.Probe:
    """Record two steps of two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    return run_steps(model, specs, lambda: model(torch.randn(5, 4)), 2, **options)


def zero(tensor: Tensor) -> float:
    return float(tensor[0]) * 0.0


def test_custom_statistic_keeps_the_sign_of_a_zero(tmp_path: Path) -> None:
    model, signs = nn.Identity(), iter([1.0, -1.0, 1.0])
    run_steps(model, {"mine": hook(zero, layers=".")}, lambda: model(torch.full((2,), next(signs))), 3, out=tmp_path)
    assert [math.copysign(1.0, number) for number in instrument.load(tmp_path).stats.zero] == [1.0, -1.0, 1.0]


@pytest.mark.slow
def test_custom_statistics_are_columns_of_every_reader(tmp_path: Path) -> None:
    named = {"_target_": f"{__name__}.scaled", "name": "doubled", "factor": 2.0}
    specs = {"mine": hook("mean", "min", "max", "numel", spread, named), "usual": hook("default")}
    record(specs, out=tmp_path / "run")
    run = instrument.load(tmp_path / "run")
    stats = run.stats
    mine, usual = (stats[stats.hook == name] for name in ("mine", "usual"))
    assert len(mine) == len(usual) == 4
    assert mine.spread.to_list() == pytest.approx((mine["max"] - mine["min"]).to_list())
    assert mine.doubled.to_list() == pytest.approx((2 * mine["mean"] * mine.numel).to_list(), rel=1e-5)
    assert usual[["spread", "doubled"]].isna().all(axis=None)
    assert "custom" not in stats
    assert run.read("stats", ["layer", "spread"])["spread"].equals(stats["spread"])
    assert run.read("stats", ["layer"]).columns.to_list() == ["layer"]
    found = run.sql("select hook, max(spread) as largest from stats group by hook order by hook")
    assert found.largest[0] == mine.spread.max()
    assert math.isnan(found.largest[1])
    assert run.sql("select * from stats").columns.to_list() == stats.columns.to_list()
    frame = run.lazy("stats")
    assert frame.collect_schema().names() == stats.columns.to_list()
    assert frame.select("spread").max().collect().item() == mine.spread.max()


def test_memory_sink_has_custom_columns() -> None:
    frame = record({"mine": hook(spread), "usual": hook("mean")}).sink.frame("stats")
    assert "custom" not in frame
    assert frame[frame.hook == "mine"].spread.notna().all()
    assert frame[frame.hook == "usual"].spread.isna().all()


@pytest.mark.slow
def test_sweep_joins_runs_with_different_custom_statistics(tmp_path: Path) -> None:
    for name, stats in (("a", [spread]), ("b", [{"name": "total", "_target_": scaled}]), ("c", ["mean"])):
        record({"mine": hook(*stats)}, out=tmp_path / name)
    runs = instrument.load(tmp_path)
    for frame in (runs.stats, runs.sql("select * from stats order by run"), runs.lazy("stats").collect().to_pandas()):
        counts = frame.groupby("run")[["spread", "total"]].count()
        assert counts.to_numpy().tolist() == [[4, 0], [0, 4], [0, 0]]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """Three runs with different factors of a hook; the last one lacks the custom statistic."""
    folder = tmp_path_factory.mktemp("sweep")
    for name, factor, stats in (("a", 1.0, ["max", spread]), ("b", 3.0, ["max", spread]), ("c", 2.0, ["max"])):
        scale = {"layers": "0", "kind": "forward", "action": "scale", "factor": factor}
        record({"grow": scale, "mine": hook(*stats)}, out=folder / name)
    return instrument.load(folder)


def test_scan_reads_custom_statistics(sweep: instrument.Run) -> None:
    columns = ["spread", "layer", "max"]
    batches = [batch.to_pandas() for batch in sweep.scan("stats", columns)]
    assert all(batch.columns.to_list() == columns for batch in batches)
    scanned = [value for batch in batches for value in batch["spread"]]
    assert scanned == pytest.approx(sweep.stats["spread"].to_list(), nan_ok=True)
    assert [batch.schema.names for batch in sweep.scan("stats", ["spread"])] == [["spread"]] * 3


@pytest.mark.slow
def test_effects_of_a_key_on_a_custom_statistic(sweep: instrument.Run) -> None:
    effects = sweep.effects_of("hooks.grow.factor", baseline=1.0)
    of_layer = effects[(effects.statistic == "spread") & (effects.layer == "0")]
    (found,) = of_layer.to_dict("records")  # a pair in which a run lacks the statistic has no row
    means = sweep.stats[sweep.stats.layer == "0"].groupby("run")["spread"].mean()
    assert (found["value"], found["pairs"]) == (3.0, 1)
    assert [found["mean_baseline"], found["mean_value"]] == pytest.approx(means[["a", "b"]].to_list())
    assert found["mean_value"] == pytest.approx(3 * found["mean_baseline"], rel=1e-5)


def test_plots_show_custom_statistics(sweep: instrument.Run) -> None:
    run = instrument.load(sweep.folders[0])
    for data in (run, run.stats):
        figure = instrument.plot.heatmap(data, "spread")
        expected = run.stats.pivot_table(index="layer", columns="step", values="spread").to_numpy()
        np.testing.assert_array_equal(figure.axes[0].collections[0].get_array(), expected)
        assert figure.axes[0].get_title().startswith("spread of mine")
    assert "max of mine" in instrument.plot.heatmap(run, "max").axes[0].get_title()
    for data in (sweep, sweep.stats):
        lines = instrument.plot.compare(data, y="spread", layer="0").axes[0].get_lines()
        values = [line.get_ydata().tolist() for line in lines if np.isfinite(line.get_ydata()).any()]
        assert values == [sweep.stats[sweep.stats.run == name].spread.to_list()[::2] for name in ("a", "b")]
        with pytest.raises(instrument.InstrumentError, match=r"y: unknown metric or statistic[\s\S]*similar +spread"):
            instrument.plot.compare(data, y="sprea")


@pytest.mark.slow
def test_report_contains_custom_statistics(sweep: instrument.Run) -> None:
    first = sweep.folders[0]
    data = data_of(instrument.report.make(first).html)
    (series,) = data["series"]
    assert [row[0] for row in series["statistics"]["spread"]] == pytest.approx(
        instrument.load(first).stats.query("step == 0").spread.to_list(), rel=1e-4
    )
    assert data["statistics"]["spread"]["formula"] == "a custom statistic"
    data = data_of(instrument.report.make(sweep.path).html)
    spreads = data["series"][0]["statistics"]["spread"]["last"]
    assert [row is None or None in row for row in spreads] == [False, False, True]
    assert data["statistics"]["spread"]["axis"] == "spread"


def test_export_and_trackers_contain_custom_statistics(tmp_path: Path) -> None:
    from instrument.commands.export import _write_csv
    from instrument.storage.run_files import RunFiles

    probe = record({"mine": hook(spread)})
    row = probe.sink.rows["stats"][0]
    assert {scalar.tag: scalar.value for scalar in scalars("stats", row)}["mine/0/spread"] == row[-1]["spread"]
    record({"mine": hook(spread)}, out=tmp_path / "run")
    _write_csv(RunFiles(tmp_path / "run"), tmp_path)
    header, first, *_ = (tmp_path / "stats.csv").read_text().splitlines()
    assert "custom" not in header
    position = header.replace('"', "").split(",").index("spread") - len(header.split(","))
    assert float(first.split(",")[position]) == pytest.approx(row[-1]["spread"])


def test_names_and_functions_of_statistics_in_run_json(tmp_path: Path) -> None:
    stats = ["mean", spread, {"name": "lowest", "_target_": lambda tensor: tensor.min()}]
    record({"mine": hook(*stats)}, out=tmp_path / "run")
    recorded = instrument.load(tmp_path / "run").info["config"]["hooks"]["mine"]["stats"]
    assert recorded[:2] == ["mean", {"_target_": f"{__name__}.spread"}]
    assert recorded[2]["name"] == "lowest"
    assert recorded[2]["_target_"].startswith("<lambda> at test_custom_statistics.py:")


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda tensor: 3, 3.0),
        (lambda tensor: np.float32(0.5), 0.5),
        (lambda tensor: torch.tensor([2], dtype=torch.int64), 2.0),
        (lambda tensor: torch.tensor(True), 1.0),
        (lambda tensor: math.nan, None),
        (lambda tensor: None, None),
        (lambda tensor: math.inf, math.inf),
    ],
)
def test_results_are_converted_to_numbers(function: Any, expected: float | None) -> None:
    row = record({"mine": hook({"name": "found", "_target_": function})}).sink.records("stats")[0]
    assert row["custom"] == {"found": expected}
    assert row["mean"] is None
    assert row["nan_count"] == 0


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tensor: tensor, r"'found' must return one real number, but returned a tensor of shape \[5, 3\]"),
        (lambda tensor: "many", "'found' must return one real number, but returned str"),
        (lambda tensor: torch.ones((), dtype=torch.complex64), "must return one real number"),
        (lambda tensor: tensor.zero_().sum(), "modified its tensor in place"),
        (lambda tensor: torch.rand(()), "changes the global random state"),
        (lambda tensor: {}["gone"], "KeyError: 'gone'"),
    ],
)
def test_invalid_result_is_an_error_that_names_the_hook(function: Any, message: str) -> None:
    with pytest.raises(instrument.HookError, match=message) as caught:
        record({"mine": hook({"name": "found", "_target_": function})})
    assert "hook 'mine' (forward) on layer '0'" in str(caught.value)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"a": hook(lambda tensor: 0)}, "requires a name"),
        ({"a": hook({"name": "mean", "_target_": spread})}, "already have a column"),
        ({"a": hook({"name": "layer", "_target_": spread})}, "already have a column 'layer'"),
        ({"a": hook({"name": "Mean", "_target_": spread})}, "already have a column"),
        ({"a": hook(spread, {"name": "Spread", "_target_": spread})}, "another function with the column 'Spread'"),
        ({"a": hook({"name": "grad_norm", "_target_": spread})}, "already have a column 'grad_norm'"),
        ({"a": hook({"name": "run", "_target_": spread})}, "already have a column 'run'"),
        ({"a": hook(spread, {"name": "spread", "_target_": scaled})}, "another function with the column 'spread'"),
        ({"a": hook(spread), "b": hook({"name": "spread", "_target_": scaled})}, "hook 'a' has another function"),
        ({"a": hook({"_target_": f"{__name__}.spraed"})}, f"similar  {__name__}.spread"),
        ({"a": hook({"_target_": f"{__name__}.scaled", "faktor": 1})}, "faktor"),
        ({"a": hook({"name": "nothing"})}, "_target_"),
        ({"a": hook("meen")}, "unknown statistic"),
    ],
)
def test_invalid_statistic_is_a_configuration_error(specs: dict[str, Any], message: str) -> None:
    with pytest.raises(instrument.ConfigError, match=message) as caught:
        record(specs)
    assert all(problem.where.startswith("hooks.") and "stats" in problem.where for problem in caught.value.problems)


def test_two_hooks_share_a_statistic() -> None:
    frame = record({"a": hook(spread), "b": hook(spread, "mean")}).sink.frame("stats")
    assert frame.spread.notna().all()


def test_custom_statistics_are_not_merged_over_processes() -> None:
    specs = parse_hooks({"a": hook(spread), "b": hook("mean")})
    (problem,) = reduce_problems(None, specs)
    assert (problem.where, problem.fix) == ("hooks.a.stats", "set reduce=none")


def test_value_on_a_device_is_read_at_the_end_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_hooks({"a": hook("mean", spread)})["a"]
    assert isinstance(spec, RecordSpec)
    layer = nn.Identity()
    context = instrument.Context("a", "forward", "output", "0", layer, "", StepContext(0, 0, 0, "train"))
    value = Measurement(spec).custom_numbers(torch.ones(2, 3, device="meta"), context)["spread"]
    assert isinstance(value, torch.Tensor)
    assert value.is_meta
    specs = {"a": hook("mean", spread)}
    on_host = record(specs).sink.frame("stats")
    use_device_statistics(monkeypatch)
    mixed = record(specs).sink.frame("stats")
    assert mixed.spread.to_list() == on_host.spread.to_list()
    assert mixed["mean"].to_list() == pytest.approx(on_host["mean"].to_list())


RUN = ("model=mlp", "data=digits", "data.slice.stop=64", "train.steps=2", "device=cpu", "hydra.run.dir=out")


@pytest.mark.slow
def test_statistic_of_a_configuration_can_be_an_objective(cli: Callable[..., Answer]) -> None:
    target = f"{{_target_: {__name__}.spread, name: Width}}"
    arguments = (*RUN, f"+hooks.h={{layers: layers.0, kind: forward, action: record, stats: [{target}]}}")
    answer = cli(*arguments, "objective='max(stats.width where step = 1)'", "sink.tensorboard=false")
    assert answer.code == 0, answer.err
    assert instrument.load("out").stats.Width.notna().all()
    with pytest.raises(instrument.ConfigError, match="no numeric column of stats is named height"):
        read_objective("max(stats.height)", compose(*arguments)[1]["hooks"])


def itself(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("statistic", "message"),
    [
        ("itself", "the trial call on a copy before the run failed: .*'itself' must return one real number"),
        ("missing", "test_custom_statistics has no 'missing'"),
    ],
)
@pytest.mark.parametrize("kind", ["forward", "parameter_grad", "full_backward"])
def test_invalid_statistic_is_refused_when_a_run_is_prepared(statistic: str, message: str, kind: str) -> None:
    hook = {"layers": "layers.1", "kind": kind, "action": "record", "stats": [{"_target_": f"{__name__}.{statistic}"}]}
    with pytest.raises(instrument.ConfigError, match=rf"hooks\.h\.stats[\s\S]*{message}"):
        Experiment(parse_config({**CONFIG, "apply": None, "hooks": {"h": hook}}))
