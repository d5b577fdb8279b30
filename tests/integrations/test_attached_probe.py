"""The probe of `attach` reads what it has recorded, as `instrument.load` does."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hook_runs import keep, record
from torch import nn

import instrument
from instrument.analysis.run_tables import RunTables


def spread(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.max() - tensor.min()


HOOKS: dict[str, Any] = {
    "seen": record("forward", "**", quantiles=True),
    "custom": record("forward", "1", stats=["mean", {"_target_": f"{__name__}.spread"}]),
    "kept": keep("forward", "0", dtype="float64"),
    "half": record("forward", "1", tensors=True, dtype="float16", phase="eval"),
    "tame": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 0.01},
}
TABLES = ("stats", "distributions", "effects", "metrics", "layers", "events", "samples")


def train(out: Path | None) -> instrument.AttachedProbe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(4, 5, 4)
    with instrument.attach(model, HOOKS, optimizer=optimizer, out=out, seed=3) as probe:
        for step, batch in enumerate(data):
            optimizer.zero_grad()
            for micro_step, part in enumerate(batch.split(3)):
                probe.batch(ids=range(len(part)) if micro_step else [2, 1, 0], targets=part[:, 0] > 0)
                model(part).square().mean().backward()
                probe.end_micro_step()
            optimizer.step()
            probe.end_step(loss=torch.tensor(float(step)))
            with probe.evaluating():
                probe.batch(ids=[7, 8])
                model(batch[:2])
    return probe


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> tuple[instrument.AttachedProbe, instrument.AttachedProbe]:
    """The same training, recorded in memory and in a folder."""
    return train(None), train(tmp_path_factory.mktemp("probe") / "run")


def same(one: pd.DataFrame, other: pd.DataFrame) -> None:
    clock = ["seconds", "samples_per_second"]
    one, other = (frame.drop(columns=[name for name in clock if name in frame]) for frame in (one, other))
    pd.testing.assert_frame_equal(one, other)


@pytest.mark.spread(1)
@pytest.mark.parametrize("table", TABLES)
def test_tables_in_memory_equal_those_of_a_folder(probes: Any, table: str) -> None:
    in_memory, in_folder = probes
    loaded = instrument.load(in_folder.run.path)
    frame = getattr(in_memory, table)
    assert len(frame) or table == "events"
    same(frame, getattr(loaded, table))
    same(getattr(in_folder, table), getattr(loaded, table))
    same(in_memory.read(table, list(frame.columns[:3])), loaded.read(table, list(frame.columns[:3])))
    assert in_memory.count(table) == loaded.count(table) == len(frame)


def test_custom_statistics_are_columns(probes: Any) -> None:
    for probe in probes:
        assert probe.custom_statistics == ("spread",)
        assert probe.stats.query("hook == 'custom'")["spread"].gt(0).all()


def test_coverage_table_is_in_the_run(probes: Any) -> None:
    in_memory, in_folder = probes
    same(in_memory.run.coverage, in_folder.run.coverage)
    assert in_memory.coverage()[0]["hook"] == "seen"


def test_tensors_in_memory_equal_those_of_a_folder(probes: Any) -> None:
    in_memory, in_folder = (probe.tensors() for probe in probes)
    assert in_memory.dtype.unique().tolist() == ["float64", "float16"]
    for one, other in zip(in_memory["values"], in_folder["values"], strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    same(in_memory.drop(columns="values"), in_folder.drop(columns="values"))
    assert len(probes[0].tensors(step=1, phase="train")) == 2


def test_features_in_memory_equal_those_of_a_folder(probes: Any) -> None:
    choice = {"hook": "half", "phase": "eval", "step": 4}
    in_memory, in_folder = (probe.features("1", **choice) for probe in probes)
    assert in_memory.X.dtype == np.float16
    assert np.array_equal(in_memory.X, in_folder.X)
    assert in_memory.ids.tolist() == in_folder.ids.tolist() == [7, 8]
    targets = probes[0].features("0", phase="train", step=0).y
    assert targets.dtype == np.bool_


def test_queries_work_in_memory(probes: Any) -> None:
    query = "select hook, count(*) as n, max(position) as last from stats group by 1 order by 1"
    same(*(probe.sql(query) for probe in probes))
    frames = [probe.lazy("stats").select("step", "layer", "mean").collect() for probe in probes]
    assert sorted(frames[0].rows()) == sorted(frames[1].rows())
    assert sum(batch.num_rows for batch in probes[0].scan("metrics", ["loss"])) == 4


def test_views_show_rows_and_status(probes: Any) -> None:
    in_memory, in_folder = probes
    assert repr(in_memory).startswith("<AttachedProbe done: 4 steps, 5 hooks at ")
    assert "rows in memory>" in repr(in_memory)
    assert str(in_folder.run.path) in repr(in_folder)
    assert "in memory: 1 run, 1 done" in repr(in_memory.run)
    html = in_memory._repr_html_()
    assert "4 steps" in html
    assert "done" in html
    (call,) = re.findall(r"<code>(instrument\.plot\..+?)</code>", html)
    figure = eval(unescape(call), {"instrument": instrument, "probe": in_memory})
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "1", "."]
    assert in_memory.run.info["seed"] == 3
    assert in_memory.problems == []


@pytest.mark.spread(1)
@pytest.mark.parametrize("out", [None, "run"])
def test_rows_can_be_read_during_the_block(tmp_path: Path, out: str | None) -> None:
    model = nn.Linear(2, 2)
    hooks = {"f": {"layers": ".", "kind": "forward", "action": "record", "tensors": True}}
    with instrument.attach(model, hooks, out=None if out is None else tmp_path / out) as probe:
        for step in range(3):
            probe.batch(ids=[step])
            model(torch.ones(1, 2))
            probe.end_step()
            assert len(probe.stats) == len(probe.tensors()) == step + 1
            assert probe.stats.position.tolist() == [0] * (step + 1)
            assert probe.features(".").ids.tolist() == list(range(step + 1))
        assert "AttachedProbe running" in repr(probe)
        assert probe.run.info["status"] == "running"
        words = re.sub(r"(<[^>]+>|\s)+", " ", probe._repr_html_())
        assert "status running" in words
        assert "Coverage hook kind locations fired expected f forward 1 3 3" in words
    assert len(probe.stats) == 3
    assert probe.run.info["status"] == "done"


@pytest.mark.parametrize(("raised", "status"), [(ZeroDivisionError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_status_in_memory_after_an_error(raised: type[BaseException], status: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(raised), instrument.attach(model, {}) as probe:  # noqa: PT012
        probe.end_step(loss=1.0)
        raise raised
    assert probe.run.info["status"] == status
    assert probe.metrics.loss.tolist() == [1.0]


def test_probe_has_the_methods_of_a_run(probes: Any) -> None:
    probe = probes[0] if isinstance(probes, tuple) else probes
    names = {name for name in dir(instrument.Run) if not name.startswith("_")}
    assert names <= {*dir(probe)}
    assert probe.sql("select count(*) as rows from stats").rows.item() == len(probe.stats)
    with pytest.raises(AttributeError, match="no attribute 'statz'; similar: stats, "):
        probe.statz  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'end_stp'; similar: end_step,"):
        probe.end_stp  # noqa: B018
    assert issubclass(instrument.Run, RunTables)
