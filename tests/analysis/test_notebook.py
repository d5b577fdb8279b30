"""The notebook representation of a run and of a sweep."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_steps

import instrument
from instrument.analysis import overview
from instrument.analysis.load import Run

EVIL = "<script>alert('x')</script>"
INFO: dict[str, Any] = {
    "name": "mine",
    "status": "done",
    "seed": 3,
    "device": "cpu",
    "started": "2026-11-21T09:00:00+00:00",
    "ended": "2026-11-21T09:01:30+00:00",
    "overrides": {},
    "metrics": {"loss": 0.123456, "accuracy": 0.5, "seconds": 9.0},
}


class Tags(HTMLParser):
    """The parts of a page.

    Attributes:
        rows: The text of each cell of each row of a table.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.tags_seen: set[str] = set()
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags_seen.add(tag)
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def make_run(folder: Path, *, layer: str = "a", close: bool = True, **info: Any) -> Path:
    metrics = [{"step": step, "phase": "train", "loss": 2.0} for step in range(1200)]
    stats = {"step": 4, "hook": EVIL, "layer": layer, "numel": 10, "nan_count": 1, "inf_count": 0}
    others = [{"step": step, "layer": name, "std": step - 4.0} for step in (5, 6, 7) for name in ("b", "c", "d")]
    coverage = {"hook": "seen", "layer": "b", "fired": 2000, "expected": 3000, "cause": "the module was not called"}
    location = f"{layer} output ({EVIL})"
    message = f"first recorded non-finite value: at step 4 in {location}: 1 NaN, 0 infinite of 10"
    event = {"step": 4, "layer": layer, "location": location, "rule": "non_finite", "message": message, "value": 1.0}
    tables = {"metrics": metrics, "stats": [stats, *others], "coverage": [coverage], "events": [event]}
    return write_steps(folder, [tables], close=close, info={**INFO, **info})


def page_of(run: Run) -> tuple[str, str]:
    """Return the HTML, checked to be well formed, and its text."""
    page = run._repr_html_()
    tags = Tags(page)
    assert tags.open == []
    assert tags.tags_seen <= {"div", "b", "code", "span", "table", "thead", "tbody", "tr", "td", "th", "ul", "li"}
    return page, " ".join(" ".join(tags.words).split())


def test_run_page_has_facts_tables_and_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are counted without reading them, and no rule reads them. The page sets no background, and fetches nothing."""
    run = instrument.load(make_run(tmp_path / "run"))
    monkeypatch.setattr("instrument.analysis.findings.rule_events", None)
    monkeypatch.setattr(Run, "_frame", None)
    read = {"metrics": Run.read}
    monkeypatch.setattr(Run, "read", lambda run, table, *chosen: read[table](run, table, *chosen))
    page, words = page_of(run)
    rows = Tags(page).rows
    assert not re.search(r"background(-color)?:(?! none)", page)
    assert not re.search(r"https?:|url\(|src=|href=", page)
    assert f"mine · {run.path} status" in words
    assert "status done · device cpu · seed 3 · started 2026-11-21 09:00:00, took 0:01:30" in words
    assert "1,200 steps rows: stats 10 · metrics 1,200 · coverage 1 · events 1 Metrics" in words
    assert f"metric over the steps last loss {'▅' * 24} 2 " in words
    finding = ["first recorded non-finite value", f"a output ({EVIL})", "4", "1 NaN, 0 infinite of 10"]
    assert finding in rows
    assert f"{EVIL} a numel ! 10 1" in words
    assert "seen b std ▁▅█ 3 1.5" in words
    assert "Coverage hook kind locations fired expected seen forward 1 2000 3000" in words


def test_long_tables_are_truncated_with_a_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "MAX_ROWS", 2)
    _, words = page_of(instrument.load(make_run(tmp_path / "run")))
    assert "seen b std" in words
    assert "seen c std" not in words
    assert "and 2 more in run.stats" in words


def test_layers_of_many_rows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "MAX_STATS", 9)
    _, words = page_of(instrument.load(make_run(tmp_path / "run")))
    assert "The layers are not shown: there are too many rows of statistics." in words
    assert "largest change first" not in words
    assert "Coverage" in words


def test_names_are_escaped(tmp_path: Path) -> None:
    page, words = page_of(instrument.load(make_run(tmp_path / "run", layer=EVIL, name=EVIL, error=EVIL)))
    assert "<script" not in page
    assert (
        words.count(EVIL) == 7
    )  # the name, the error, the layer and the hook in both tables, and the hook in the call


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "info",
    [
        {"status": "running", "ended": None},
        {"started": None, "metrics": {}},
        {"started": "no date", "device": None, "metrics": {"loss": None}},
    ],
)
def test_killed_run_is_shown(tmp_path: Path, info: dict[str, Any]) -> None:
    _, words = page_of(instrument.load(make_run(tmp_path / "run", close=False, **info)))
    assert f"status {'killed' if info.get('status') else 'done'}" in words
    assert "1,200 steps" in words


def test_empty_run_is_shown(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    _, words = page_of(instrument.load(tmp_path))
    assert "status unknown" in words


@pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")
def test_unreadable_files_are_listed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (file,) = (folder / "metrics").glob("*.parquet")
    file.write_bytes(b"PAR1 no more")
    _, words = page_of(instrument.load(folder))
    assert "could not be read:" in words
    assert f"metrics/{file.name}: cannot be read" in words


def test_sweep_page_has_overrides_and_counts_failures(tmp_path: Path) -> None:
    for job, status in enumerate(("done", "failed", "done")):
        overrides = {"hooks.tame.norm": 0.5 * job, "model": EVIL}
        metrics = {} if status == "failed" else {"loss": 0.25 + job, "accuracy": None}
        make_run(tmp_path / "sweep" / str(job), status=status, seed=job, overrides=overrides, metrics=metrics)
    page, words = page_of(instrument.load(tmp_path / "sweep"))
    assert words.startswith("3 runs ")
    assert "· 1 not done run" in words
    rows = Tags(page).rows
    assert rows[0] == ["run", "status", "seed", "hooks.tame.norm", "model", "loss"]  # no run has a value of accuracy
    assert rows[3] == ["2", "done", "2", "1", EVIL, "2.25"]


def test_large_sweep_is_truncated_with_a_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "MAX_RUNS", 2)
    for job in range(5):
        make_run(tmp_path / "sweep" / str(job), seed=100 + job)
    page, words = page_of(instrument.load(tmp_path / "sweep"))
    assert words.startswith("5 runs ")
    assert words.endswith("and 3 more")
    header, *rows = Tags(page).rows
    assert [row[header.index("seed")] for row in rows] == ["100", "101"]
