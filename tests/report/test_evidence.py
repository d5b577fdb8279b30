"""The picture of a finding: points, threshold and step at known positions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from run_folders import write_run

import instrument
from instrument.analysis.diagnosis import Finding
from instrument.analysis.run_history import history_of
from instrument.report.charts import HEIGHT, MARGIN, WIDTH, evidence

MIDDLE = WIDTH / 2
LOW, HIGH = HEIGHT - MARGIN, MARGIN  # of the smallest and the largest value


def finding(where: str, statistic: str, threshold: float | None = None, step: int = 1) -> Finding:
    return Finding("wrong", where, step, "value", "warning", rule="a", statistic=statistic, threshold=threshold)


def picture(folder: Path, about: Finding, values: Sequence[float | None], table: str = "stats", **cells: str) -> str:
    name = about.statistic
    rows = {table: [{"step": step, name: value, **cells} for step, value in enumerate(values)]}
    return evidence(history_of(instrument.load(write_run(folder / "run", rows=rows))), about)


def points(svg: str) -> list[tuple[float, ...]]:
    root = ElementTree.fromstring(svg)
    return [
        tuple(map(float, pair.split(","))) for line in root.iter("polyline") for pair in line.attrib["points"].split()
    ]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("where", "cells"),
    [
        ("a output (seen)", {}),
        (". output (seen, eval)", {"layer": "", "phase": "eval"}),
        (
            "a.weight param_grad (mine)",
            {"path": "weight", "kind": "parameter_grad", "role": "param_grad", "hook": "mine"},
        ),
    ],
)
def test_statistic_of_the_location_is_drawn(tmp_path: Path, where: str, cells: dict[str, str]) -> None:
    svg = picture(tmp_path, finding(where, "std"), [0.0, 1.0, 2.0], **cells)
    assert points(svg) == [(MARGIN, LOW), (MIDDLE, HEIGHT / 2), (WIDTH - MARGIN, HIGH)]
    (step,) = [line for line in ElementTree.fromstring(svg).iter("line") if line.attrib["class"] == "step"]
    assert float(step.attrib["x1"]) == float(step.attrib["x2"]) == MIDDLE
    assert "std, 0 to 2, steps 0 to 2; marked: step 1<" in svg


def test_threshold_is_a_line_within_the_picture(tmp_path: Path) -> None:
    svg = picture(tmp_path, finding("a output (seen)", "dead_fraction", 0.5), [0.0, 0.25, 0.25])
    (bound,) = [line for line in ElementTree.fromstring(svg).iter("line") if line.attrib["class"] == "bound"]
    assert float(bound.attrib["y1"]) == HIGH
    assert points(svg)[1] == (MIDDLE, HEIGHT / 2)
    assert "dashed: threshold 0.5<" in svg


def test_wide_range_is_logarithmic(tmp_path: Path) -> None:
    svg = picture(tmp_path, finding("training", "loss"), [1.0, 1e2, 1e4], "metrics")
    assert points(svg)[1] == (MIDDLE, HEIGHT / 2)
    assert "loss, logarithmic, 1 to 1e+04" in svg


def test_missing_value_is_a_gap(tmp_path: Path) -> None:
    svg = picture(tmp_path, finding("training", "loss"), [1.0, 1.0, float("nan"), 1.0], "metrics")
    assert [len(line.split()) for line in re.findall('points="(.*?)"', svg)] == [2]
    assert svg.count("<circle") == 1


@pytest.mark.parametrize(
    ("about", "values"),
    [
        (finding("a output (seen)", "std"), [1.0]),
        (finding("a output (seen)", "std"), [None, None, 1.0]),
        (finding("b output (seen)", "std"), [1.0, 2.0]),
        (finding("a output (other)", "std"), [1.0, 2.0]),
    ],
)
def test_finding_without_a_curve_has_no_picture(tmp_path: Path, about: Finding, values: list[float | None]) -> None:
    assert picture(tmp_path, about, values) == ""
