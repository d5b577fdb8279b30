"""Polars on the files: only those of the runs that a condition leaves, and the rows that the condition holds for."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from buckets import connected
from test_sql import make_run, part, spoil
from tiers import tiered

import instrument
from instrument import InstrumentError, InstrumentWarning
from instrument.analysis import lazy
from instrument.analysis.query import Listed, Queried
from instrument.analysis.run_files import RunFiles
from instrument.sinks.parts import Part
from instrument.sinks.recovery import recover
from instrument.sinks.remote import RemoteFolder
from instrument.sinks.transfer import send_all

RUN, LAYER, STEP, ODD, LR, NAME = (pl.col(name) for name in ("run", "layer", "step", "odd", "lr", "name"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs with overrides; the rows of one are in no file yet."""
    place = tmp_path_factory.mktemp("runs") / "s"
    for job in range(5):
        overrides = {
            "lr": None if job == 2 else 0.1 * job,
            "odd": job % 2,
            "name": "x" if job < 3 else None,
        }
        make_run(place / str(job), overrides=overrides, mean=100 * job, close=job != 3)
    return place


@pytest.fixture
def looked_into(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The folders of the runs whose files were listed."""
    listed: set[str] = set()
    original = RunFiles.listed

    def noted(self: RunFiles, name: str) -> object:
        listed.add(self.folder.name)
        return original(self, name)

    monkeypatch.setattr(RunFiles, "listed", noted)
    return listed


def test_lazy_names_the_extra_and_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    with pytest.raises(KeyError, match=r"no table 'stat'; there are stats, .*events"):
        run.lazy("stat")
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(instrument.InstrumentError, match="pip install 'polars"):
        run.lazy("stats")


def test_rows_of_polars_come_file_by_file_and_run_by_run(tmp_path: Path) -> None:
    for job in range(3):
        make_run(tmp_path / "s" / str(job), close=job != 1)
    rows = instrument.load(tmp_path / "s").lazy("stats").filter(pl.col("layer") == "a").select("run", "step").collect()
    in_files = [("0", 6), ("1", 4), ("2", 6)]
    assert rows.rows() == [(run, step) for run, steps in in_files for step in range(steps)] + [("1", 4), ("1", 5)]


@pytest.mark.parametrize(
    ("condition", "left"),
    [
        (RUN == "2", "2"),
        ((RUN == "2") & (LAYER == "a") & (STEP > 1), "2"),
        ((ODD == 1) & (STEP == 3), "13"),
        (LR > 0.15, "34"),
        (RUN.is_in(["1", "4"]) | (LR == 0.0), "014"),
        (RUN.str.contains("[13]") & ~(pl.col("mean") > 102), "13"),
        (NAME.is_null(), "34"),
        ((RUN == "nope") & (STEP == 1), ""),
    ],
)
def test_files_of_runs_that_a_condition_rules_out_are_not_looked_into(
    folder: Path, looked_into: set[str], condition: pl.Expr, left: str
) -> None:
    rows = instrument.load(folder).lazy("stats")
    everything = rows.collect()
    looked_into.clear()
    assert rows.filter(condition).collect().equals(everything.filter(condition))
    assert "".join(sorted(looked_into)) == left


@pytest.mark.parametrize("engine", tiered(["streaming", "in-memory"], ["streaming"]))  # the other is the usual one
@pytest.mark.parametrize(
    "condition",
    [
        (RUN == "2") | (STEP == 1),
        NAME.is_null() & pl.col("hook").is_null(),
        LR.fill_null(9.0) > 1,
        (RUN + LAYER.cast(str)) == "1a",
        (STEP + ODD) == 2,
        (STEP == ODD) & (ODD == 1),
        LR.is_nan() | LR.is_null(),
        pl.lit(False),
        pl.lit(True),
        pl.col("rank").is_null(),
        pl.any_horizontal(ODD == 1, STEP == 0),
        pl.all_horizontal(ODD == 1, STEP == 0),
        RUN.max() == RUN,
        RUN.is_first_distinct(),
        RUN.rank() > 3,
        pl.int_range(pl.len()) < 5,
        STEP.shift(1) == 3,
        RUN.map_batches(lambda runs: runs == "3", return_dtype=pl.Boolean),
    ],
)
def test_a_condition_is_that_of_the_rows(folder: Path, condition: pl.Expr, engine: str) -> None:
    rows = instrument.load(folder).lazy("stats")
    everything = rows.collect()
    asked: list[Callable[[pl.LazyFrame], pl.LazyFrame]] = [
        lambda frame: frame.filter(condition),
        lambda frame: frame.filter(condition).filter(ODD == 1).select("mean", "run"),
        lambda frame: frame.filter(ODD == 1).filter(condition).select(pl.len()),
        lambda frame: frame.filter(condition).head(3),
    ]
    for question in asked:
        expected = question(everything.lazy()).collect()
        assert question(rows).collect(engine=engine).equals(expected)  # type: ignore[call-overload]


def test_parts_of_the_rows_are_those_of_all(folder: Path) -> None:
    rows = instrument.load(folder).lazy("stats")
    everything = rows.collect()
    assert everything.schema == rows.collect_schema()
    for few in (rows.head(3), rows.slice(7, 30), rows.tail(3)):
        assert few.collect().height in (3, 30)
    assert rows.slice(7, 30).collect().equals(everything.slice(7, 30))
    assert rows.select(pl.len()).collect().item() == everything.height == 60
    assert rows.select("layer").collect().height == rows.select("run").collect().height == 60
    twice = rows.filter(RUN == "1").join(rows.filter(RUN == "3"), on=["step", "layer"])
    assert twice.collect().height == 12
    assert rows.join(instrument.load(folder).lazy("effects"), on="run", how="anti").collect().height == 60


def test_rows_that_came_since_are_met(tmp_path: Path) -> None:
    make_run(tmp_path / "s" / "0")
    make_run(tmp_path / "s" / "1", close=False)
    rows = instrument.load(tmp_path / "s").lazy("stats").select(pl.len())
    assert rows.collect().item() == 24
    Part(0, 2).file(tmp_path / "s" / "0", "stats").unlink()
    assert rows.collect().item() == 20


def test_a_mistake_in_a_condition_is_told_without_reading_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFiles, "read_through", lambda *_: pytest.fail("all was read"))
    rows = instrument.load(folder).lazy("stats")
    for condition in (LAYER > 3, RUN > 3, (STEP > 1) & (LAYER > 3)):
        with pytest.raises(pl.exceptions.PolarsError, match="cannot compare"):
            rows.filter(condition).collect()
    with pytest.raises(pl.exceptions.ColumnNotFoundError, match="nope"):
        rows.filter(pl.col("nope") == 1).collect()


def test_a_file_that_is_damaged_inside_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    spoil(part(tmp_path / "run", 1))
    with pytest.warns(InstrumentWarning, match=r"part-0000-000001\.parquet: cannot be read"):
        assert run.lazy("stats").collect().height == 8
    assert run.lazy("stats").collect().height == 8


def test_a_file_that_fails_when_rows_were_given_already_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    original = lazy._Question._here

    def torn(self: Any, listed: Listed) -> Iterator[pl.DataFrame]:
        yield next(original(self, listed))
        spoil(part(tmp_path / "run", 1))
        raise pl.exceptions.ComputeError("a page cannot be read")

    with monkeypatch.context() as patched:
        patched.setattr(lazy._Question, "_here", torn)
        with pytest.warns(InstrumentWarning, match="cannot be read"), pytest.raises(InstrumentError, match="once more"):
            run.lazy("stats").collect()
    assert run.lazy("stats").collect().height == 8


def test_files_that_are_merged_while_they_are_listed_are_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run")
    run = instrument.load(folder)
    original = Queried.listed

    def merged(queried: Queried, table: str, runs: Iterable[int] | None = None) -> Listed:
        found = original(queried, table, runs)
        if part(folder, 1).exists():
            pq.write_table(
                pa.concat_tables(pq.read_table(part(folder, n)) for n in (0, 1)), Part(0, 0, 1).file(folder, "stats")
            )
            part(folder, 0).unlink()
            part(folder, 1).unlink()
        return found

    monkeypatch.setattr(Queried, "listed", merged)
    assert run.lazy("stats").select(pl.len(), STEP.max()).collect().rows() == [(12, 5)]
    assert run.problems == []


@pytest.fixture(scope="module")
def closed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs, all of which have closed their files."""
    place = shutil.copytree(folder, tmp_path_factory.mktemp("closed") / "s")
    recover(place / "3")
    return place


@pytest.fixture(scope="module", params=tiered(["memory", "s3"], ["s3"]))
def sent(request: pytest.FixtureRequest, closed: Path, s3_server: str) -> str:
    """Their address."""
    address = request.getfixturevalue("kept_bucket") if request.param == "s3" else "memory:/"
    with connected(s3_server):
        for run in sorted(closed.iterdir()):
            assert send_all(run, RemoteFolder(f"{address}{closed}/{run.name}", "")).missing == {}
    return f"{address}{closed}"


@pytest.fixture
def there(sent: str, s3: None) -> str:
    return sent


def test_all_rows_of_a_remote_folder_are_the_same(there: str, closed: Path) -> None:
    here, remote = (instrument.load(place).lazy("stats") for place in (closed, there))
    assert remote.collect().equals(here.collect())


@pytest.mark.parametrize(
    "condition",
    [
        RUN == "2",
        (ODD == 1) & (STEP == 3) & (LAYER == "a"),
        pl.col("mean") > 202,
        (RUN == "1") | (STEP == 5),
        LR.is_null(),
    ],
)
def test_a_remote_folder_gives_the_same(there: str, closed: Path, condition: pl.Expr) -> None:
    here, remote = (instrument.load(place).lazy("stats") for place in (closed, there))
    assert remote.filter(condition).collect().equals(here.filter(condition).collect())
    assert (
        remote.filter(condition)
        .select("run", "mean")
        .collect()
        .equals(here.filter(condition).select("run", "mean").collect())
    )


def test_of_remote_runs_only_those_are_looked_into_that_a_condition_leaves(there: str, looked_into: set[str]) -> None:
    rows = instrument.load(there).lazy("stats")
    assert rows.filter((ODD == 1) & (STEP < 3)).collect().height == 12
    assert looked_into == {"1", "3"}


def test_a_number_that_is_none_is_the_largest_in_a_remote_folder_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", mean=float("nan"))
    send_all(folder, RemoteFolder(f"memory://{tmp_path}/there", ""))
    for place in (folder, f"memory://{tmp_path}/there"):
        assert instrument.load(place).lazy("stats").filter(pl.col("mean") > 1e300).collect().height == 12


def test_a_damaged_file_of_a_remote_folder_is_named_and_the_rest_is_read(
    there: str, closed: Path, tmp_path: Path
) -> None:
    remote = RemoteFolder(f"{there}-damaged", "")
    send_all(closed / "1", remote)
    (tmp_path / "bad").write_bytes(b"no parquet")
    remote.put(tmp_path / "bad", "stats/part-0000-000001.parquet")
    with pytest.warns(InstrumentWarning, match=r"part-0000-000001\.parquet: cannot be read"):
        assert instrument.load(remote.address).lazy("stats").collect().height == 8
