"""Custom metrics as columns of `metrics`, in every reader. A name can appear in a later part of the table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from run_folders import CLIP, write_run
from torch import nn

import instrument
from instrument.analysis.rule_events import rule_events
from instrument.analysis.run_history import history_of
from instrument.commands.export import _write_csv
from instrument.comparison.diff import _metrics
from instrument.config.parse import parse_rules
from instrument.plot import compare
from instrument.report.charts import metric_curves
from instrument.report.live_run import LiveRun
from instrument.storage.run_files import RunFiles

HOOKS = {"seen": {"layers": ".", "kind": "forward", "action": "record"}}
RETURNS = [20.0, 21.0, math.nan, 23.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, whose metric `late` appears at the third one, and an evaluation."""
    path, model = tmp_path_factory.mktemp("custom") / "run", nn.Linear(2, 2)
    rules = {"high": {"watch": "metrics", "stat": "episode_return", "above": 22.5}}
    warned = pytest.warns(instrument.InstrumentWarning, match="at step 3: episode_return 23, above 22.5")
    with warned, instrument.attach(model, HOOKS, out=path, rules=rules) as probe:
        for step, value in enumerate(RETURNS):
            model(torch.ones(1, 2))
            if step == 2:
                assert "late" not in probe.run.metrics
                probe.sink.finish_parts()  # type: ignore[attr-defined]
                probe.log(late=np.float32(0.5))
            probe.end_step(loss=1.0, episode_return=value)
            assert probe.run.read("metrics", ["episode_return"])["episode_return"].iloc[-1] == pytest.approx(
                value, nan_ok=True
            )
        with probe.evaluating():
            model(torch.ones(1, 2))
            probe.log(val_return=torch.tensor(7))
    return path


NO_VALUE = "no training step has a value of this metric"


def watched(stat: str) -> dict[str, Any]:
    return {"low": {"watch": "metrics", "stat": stat, "below": 0.5}}


@pytest.mark.parametrize(
    ("stat", "expected"),
    [
        ("epsiode_return", ".*allowed  .*episode_return.*similar  episode_return"),
        ("recall", ", only the phase 'eval'"),
        ("grad_norm", ""),
    ],
)
def test_rule_on_a_metric_without_values_is_reported(stat: str, expected: str) -> None:
    model = nn.Linear(2, 2)
    warned = pytest.warns(instrument.InstrumentWarning, match=f"(?s)rules.low.stat: {NO_VALUE}{expected}")
    with warned, instrument.attach(model, HOOKS, rules=watched(stat)) as probe:
        for step in range(3):
            model(torch.ones(1, 2))
            probe.end_step(loss=1.0, **({"episode_return": 1.0} if step else {}))
        with probe.evaluating():
            model(torch.ones(1, 2))
            probe.log(recall=0.5)
    (event,) = probe.run.events.query("rule == 'metrics'").to_dict("records")
    assert event["severity"] == "warning"


def test_rule_reads_a_metric_from_its_first_value(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Linear(2, 2)
    with instrument.attach(model, HOOKS, rules=watched("late")) as probe:
        for step in range(100):
            model(torch.ones(1, 2))
            probe.end_step(loss=1.0, **({"late": 1.0} if step == 98 else {}))
    assert probe.run.events.empty
    assert not [each for each in recwarn if issubclass(each.category, instrument.InstrumentWarning)]


@pytest.mark.slow
def test_every_reader_has_one_column_for_each_metric(folder: Path) -> None:
    run = instrument.load(folder)
    assert run.custom_metrics == ("episode_return", "late", "val_return")
    names = list(run.custom_metrics)
    expected = np.array(
        [[20, np.nan, np.nan], [21, np.nan, np.nan], [np.nan, 0.5, np.nan], [23, np.nan, np.nan], [np.nan, np.nan, 7]]
    )
    frames = [
        run.metrics[names],
        run.read("metrics", names),
        pd.concat(batch.to_pandas() for batch in run.scan("metrics", names)),
        run.sql(f"select {', '.join(names)} from metrics order by step"),
        run.lazy("metrics").select(names).collect().to_pandas(),
    ]
    for frame in frames:
        np.testing.assert_array_equal(frame.to_numpy(np.float64), expected)
    assert list(run.sql("select step from metrics where late is null and phase = 'train'")["step"]) == [0, 1, 3]
    assert list(run.sql("select step from metrics where episode_return is null")["step"]) == [4]  # NaN is not null
    cells = run.lazy("metrics").select("episode_return").collect()["episode_return"]
    assert (cells.is_nan().to_list(), cells.null_count()) == ([False, False, True, False, None], 1)
    assert [list(run.sql("select * from metrics")), run.lazy("metrics").collect_schema().names()] == [
        [*run.metrics]
    ] * 2


def test_report_and_live_page_show_custom_metrics(folder: Path) -> None:
    live = LiveRun(folder)
    live.refresh()
    for found in map(metric_curves, (history_of(instrument.load(folder)), live)):
        train, evaluation = (found[phase]["statistics"] for phase in ("train", "eval"))
        assert train["episode_return"] == [[20.0, 21.0, None, 23.0]]
        assert found["train"]["bad"] == {"episode_return": [2]}
        assert train["late"] == [[None, None, 0.5, None]]
        assert evaluation["val_return"] == [[7.0]]
        assert "val_return" not in train


def test_exported_csv_has_custom_metrics(folder: Path, tmp_path: Path) -> None:
    _write_csv(RunFiles(folder), tmp_path)
    frame = pd.read_csv(tmp_path / "metrics.csv")
    assert frame["late"].tolist()[2] == 0.5
    assert list(frame["step"][frame["episode_return"] == 23]) == [3]
    settings = pd.read_csv(tmp_path / "layers.csv")["settings"]
    assert [json.loads(each) for each in settings] == instrument.load(folder).layers["settings"].tolist()


def test_rules_on_a_finished_run_decide_as_live(folder: Path) -> None:
    run = instrument.load(folder)
    assert [(row.rule, row.step) for row in run.events.itertuples() if row.rule == "high"] == [("high", 3)]
    found = rule_events(run, parse_rules({"high": {"watch": "metrics", "stat": "episode_return", "above": 22.5}}))
    assert [(event.step, event.value) for event in found] == [(3, 23.0)]


@pytest.fixture
def sweep(tmp_path: Path) -> instrument.Run:
    """Two settings with three seeds. The first run does not have the metric `late`."""
    for norm, gain in ((1.0, 0.0), (2.0, 3.0)):
        for seed in range(3):
            config = {"hooks": {"tame": {**CLIP, "norm": norm}}}
            rows = [{"step": i, "loss": 1.0, "custom": {"score": seed + gain + i, "late": 1.0 + i}} for i in range(2)]
            if (norm, seed) == (1.0, 0):
                rows = [{**row, "custom": {"score": row["custom"]["score"]}} for row in rows]
            folder = tmp_path / f"{norm}-{seed}"
            write_run(folder, config=config, seed=seed, rows={"metrics": rows}, overrides={"norm": norm})
    return instrument.load(tmp_path)


def test_effects_of_a_key_on_custom_metrics(sweep: instrument.Run) -> None:
    effects = sweep.effects_of("hooks.tame.norm", baseline=1.0)
    assert effects.set_index("statistic").loc["score", ["n", "difference"]].tolist() == [3, 3.0]
    assert effects.set_index("statistic").loc["late", "n"] == 2


@pytest.mark.slow
def test_plot_and_diff_of_custom_metrics(sweep: instrument.Run) -> None:
    for runs in (sweep, sweep.metrics):
        figure = compare(runs, "score", interval=0)
        assert figure.axes[0].get_ylabel() == "score"
        labels = [str(line.get_label()) for line in figure.axes[0].lines if "=" in str(line.get_label())]
        assert labels == [f"norm={norm} seed={seed}" for norm in (1, 2) for seed in range(3)]
    found = _metrics((instrument.load(sweep.folders[0]), instrument.load(sweep.folders[3])), None)
    found = found.set_index("metric").loc["score"]
    assert found[["a", "b"]].to_numpy().tolist() == [[0.0, 3.0], [1.0, 4.0]]


def test_run_without_the_column_is_readable(tmp_path: Path) -> None:
    write_run(tmp_path / "new", rows={"metrics": [{"loss": 1.0, "custom": {"score": 2.0}}]})
    write_run(tmp_path / "old", rows={"metrics": [{"loss": 3.0}]})
    (part,) = (tmp_path / "old" / "metrics").iterdir()
    pq.write_table(pq.read_table(part).drop_columns(["custom"]), part)
    run = instrument.load(tmp_path)
    for frame in (
        run.metrics,
        run.sql("select loss, score from metrics order by loss"),
        run.lazy("metrics").collect().to_pandas(),
    ):
        np.testing.assert_array_equal(frame[["loss", "score"]].to_numpy(np.float64), [[1.0, 2.0], [3.0, np.nan]])
