"""Polars on the files: only the files and rows that the condition selects are read."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from buckets import connected
from test_sql import make_run
from tiers import tiered

import instrument
from instrument import ConfigError, InstrumentWarning
from instrument.storage.maintenance import recover
from instrument.storage.parts import Part
from instrument.storage.remote_folder import RemoteFolder
from instrument.storage.remote_transfer import send_all
from instrument.storage.run_files import RunFiles

RUN, LAYER, STEP, ODD, LR, NAME = (pl.col(name) for name in ("run", "layer", "step", "odd", "lr", "name"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five runs with overrides; the rows of one are still in its journal."""
    path = tmp_path_factory.mktemp("runs") / "s"
    for job in range(5):
        overrides = {
            "lr": None if job == 2 else 0.1 * job,
            "odd": job % 2,
            "name": "x" if job < 3 else None,
        }
        make_run(path / str(job), overrides=overrides, mean=100 * job, close=job != 3)
    return path


@pytest.fixture(scope="module")
def everything(folder: Path) -> pl.DataFrame:
    return instrument.load(folder).lazy("stats").collect()


def test_lazy_errors_name_the_extra_and_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"unknown table 'stat'; the tables are stats, .*events"):
        run.lazy("stat")
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(instrument.InstrumentError, match=r"^run\.lazy requires polars: pip install .*\[polars\]"):
        run.lazy("stats")


def test_lazy_rows_are_in_file_and_run_order(tmp_path: Path) -> None:
    for job in range(3):
        make_run(tmp_path / "s" / str(job), close=job != 1)
    rows = instrument.load(tmp_path / "s").lazy("stats").filter(pl.col("layer") == "a").select("run", "step").collect()
    in_files = [("0", 6), ("1", 4), ("2", 6)]
    assert rows.rows() == [(run, step) for run, steps in in_files for step in range(steps)] + [("1", 4), ("1", 5)]


@pytest.mark.spread(1)
@pytest.mark.parametrize("engine", tiered(["streaming", "in-memory"], ["streaming"]))  # in-memory is the usual engine
@pytest.mark.parametrize(
    "condition",
    [
        (RUN == "2") | (STEP == 1),
        (ODD == 1) & (STEP == 3),
        LR > 0.15,
        NAME.is_null() & pl.col("hook").is_null(),
        (STEP + ODD) == 2,
        pl.lit(False),
        RUN.max() == RUN,
        pl.int_range(pl.len()) < 5,
        RUN.map_batches(lambda runs: runs == "3", return_dtype=pl.Boolean),
        pytest.param((RUN == "2") & (LAYER == "a") & (STEP > 1), marks=pytest.mark.slow),
        pytest.param(RUN.str.contains("[13]") & ~(pl.col("mean") > 102), marks=pytest.mark.slow),
        pytest.param(LR.fill_null(9.0) > 1, marks=pytest.mark.slow),
        pytest.param((RUN + LAYER.cast(str)) == "1a", marks=pytest.mark.slow),
        pytest.param(pl.any_horizontal(ODD == 1, STEP == 0), marks=pytest.mark.slow),
        pytest.param(RUN.is_first_distinct(), marks=pytest.mark.slow),
        pytest.param(STEP.shift(1) == 3, marks=pytest.mark.slow),
        pytest.param((STEP == ODD) & (ODD == 1), marks=pytest.mark.slow),
        pytest.param(LR.is_nan() | LR.is_null(), marks=pytest.mark.slow),
        pytest.param(pl.lit(True), marks=pytest.mark.slow),
        pytest.param(pl.col("rank").is_null(), marks=pytest.mark.slow),
        pytest.param(pl.all_horizontal(ODD == 1, STEP == 0), marks=pytest.mark.slow),
        pytest.param(RUN.rank() > 3, marks=pytest.mark.slow),
    ],
)
def test_filtered_rows_equal_those_of_the_full_frame(
    folder: Path, everything: pl.DataFrame, condition: pl.Expr, engine: str
) -> None:
    rows = instrument.load(folder).lazy("stats")
    queries: list[Callable[[pl.LazyFrame], pl.LazyFrame]] = [
        lambda frame: frame.filter(condition),
        lambda frame: frame.filter(condition).filter(ODD == 1).select("mean", "run"),
        lambda frame: frame.filter(ODD == 1).filter(condition).select(pl.len()),
        lambda frame: frame.filter(condition).head(3),
        lambda frame: frame.head(7).filter(condition),
    ]
    queries.append(lambda frame: frame.filter(condition).sort("mean", "run", "step", "layer").head(2))
    for query in queries:
        expected = query(everything.lazy()).collect()
        assert query(rows).collect(engine=engine).equals(expected)  # type: ignore[call-overload]


@pytest.mark.slow
def test_head_slice_and_tail_equal_those_of_the_full_frame(folder: Path, everything: pl.DataFrame) -> None:
    rows = instrument.load(folder).lazy("stats")
    assert everything.schema == rows.collect_schema()
    for subset in (rows.head(3), rows.slice(7, 30), rows.tail(3)):
        assert subset.collect().height in (3, 30)
    assert rows.slice(7, 30).collect().equals(everything.slice(7, 30))
    assert rows.select(pl.len()).collect().item() == everything.height == 60
    assert rows.select("layer").collect().height == rows.select("run").collect().height == 60
    twice = rows.filter(RUN == "1").join(rows.filter(RUN == "3"), on=["step", "layer"])
    assert twice.collect().height == 12
    assert rows.join(instrument.load(folder).lazy("effects"), on="run", how="anti").collect().height == 60


def test_new_rows_are_seen_by_an_existing_lazy_frame(tmp_path: Path) -> None:
    make_run(tmp_path / "s" / "0")
    make_run(tmp_path / "s" / "1", close=False)
    rows = instrument.load(tmp_path / "s").lazy("stats").select(pl.len())
    assert rows.collect().item() == 24
    Part(0, 2).file(tmp_path / "s" / "0", "stats").unlink()
    assert rows.collect().item() == 20


def test_invalid_condition_is_reported_without_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFiles, "check_contents", lambda *_: pytest.fail("all files were read"))
    rows = instrument.load(folder).lazy("stats")
    for condition in (LAYER > 3, RUN > 3, (STEP > 1) & (LAYER > 3)):
        with pytest.raises((pl.exceptions.PolarsError, ConfigError), match=r"(?i)cannot compare"):
            rows.filter(condition).collect()
    with pytest.raises(pl.exceptions.ColumnNotFoundError, match="nope"):
        rows.filter(pl.col("nope") == 1).collect()


@pytest.fixture(scope="module")
def closed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = shutil.copytree(folder, tmp_path_factory.mktemp("closed") / "s")
    recover(path / "3")
    return path


@pytest.fixture(scope="module", params=tiered(["memory", "s3"], ["memory"]))
def uploaded(request: pytest.FixtureRequest, closed: Path, s3_server: str) -> str:
    """Return the remote address of the same runs."""
    address = request.getfixturevalue("kept_bucket") if request.param == "s3" else "memory:/"
    with connected(s3_server):
        for run in sorted(closed.iterdir()):
            assert send_all(run, RemoteFolder(f"{address}{closed}/{run.name}", "")).failed == {}
    return f"{address}{closed}"


@pytest.fixture
def remote_path(uploaded: str, s3: None) -> str:
    return uploaded


@pytest.mark.slow
@pytest.mark.parametrize(
    "condition",
    [
        (ODD == 1) & (STEP == 3) & (LAYER == "a"),
        (RUN == "1") | (STEP == 5),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (RUN == "2", pl.col("mean") > 202, LR.is_null())),
    ],
)
def test_remote_filter_equals_local_filter(remote_path: str, closed: Path, condition: pl.Expr) -> None:
    local, remote = (instrument.load(path).lazy("stats") for path in (closed, remote_path))
    assert remote.collect().equals(local.collect())
    assert remote.filter(condition).collect().equals(local.filter(condition).collect())
    one, other = (rows.filter(condition).select("run", "mean").collect() for rows in (remote, local))
    assert one.equals(other)


@pytest.mark.slow
def test_nan_is_the_largest_number_in_remote_files_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", mean=float("nan"))
    send_all(folder, RemoteFolder(f"memory://{tmp_path}/there", ""))
    for path in (folder, f"memory://{tmp_path}/there"):
        assert instrument.load(path).lazy("stats").filter(pl.col("mean") > 1e300).collect().height == 12


def test_damaged_remote_file_is_reported_and_the_rest_is_read(remote_path: str, closed: Path, tmp_path: Path) -> None:
    remote = RemoteFolder(f"{remote_path}-damaged", "")
    send_all(closed / "1", remote)
    (tmp_path / "bad").write_bytes(b"no parquet")
    remote.put(tmp_path / "bad", "stats/part-0000-000001.parquet")
    with pytest.warns(InstrumentWarning, match=r"part-0000-000001\.parquet: cannot be read"):
        assert instrument.load(remote.address).lazy("stats").collect().height == 8
