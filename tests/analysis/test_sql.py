"""SQL and polars on the files: files in any state, overrides as columns, and pruning of files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import damage_inside, write_steps

import instrument
from instrument import ConfigError, InstrumentError, InstrumentWarning
from instrument.analysis import sql
from instrument.storage.parts import Part
from instrument.storage.run_files import RunFiles
from instrument.tables.schemas import TABLES

STEPS = 6


def make_run(
    folder: Path, *, overrides: Mapping[str, Any] | None = None, close: bool = True, mean: float = 0.0
) -> Path:
    """Write a run of six steps and two layers, with a part every two steps; the last rows may be in the journal."""
    steps = [
        {"stats": [{"step": step, "layer": layer, "mean": mean + step} for layer in "ba"]} for step in range(STEPS)
    ]
    info = {"overrides": dict(overrides or {}), "metrics": {"loss": 0.25}}
    return write_steps(folder, steps, parts=(1, 3), close=close, info=info)


@pytest.mark.slow
def test_rows_of_a_sweep_are_in_the_order_of_runs_and_steps(tmp_path: Path) -> None:
    for number in range(8):
        make_run(tmp_path / f"{number}", overrides={"rate": number})
    run = instrument.load(tmp_path)
    expected = [(f"{number}", step, number) for number in range(8) for step in range(STEPS) for _ in "ab"]
    for _ in range(5):
        assert tuples(run.sql("select run, step, rate from stats")) == expected
        assert tuples(run.sql("select run, step, rate from stats limit 1 offset 50")) == expected[50:51]


def tuples(frame: pd.DataFrame) -> list[tuple[Any, ...]]:
    return list(frame.astype(object).where(frame.notna(), None).itertuples(index=False, name=None))


def part(run: Path, number: int) -> Path:
    return Part(0, number).file(run, "stats")


def query_both(run: instrument.Run, sql: str, lazy: Callable[[pl.LazyFrame], pl.LazyFrame]) -> list[tuple[Any, ...]]:
    """Return the rows of DuckDB, after checking that polars returns the same."""
    answer = tuples(run.sql(sql))
    assert lazy(run.lazy("stats")).collect().rows() == answer
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("close", [True, False])
def test_parts_and_journals_are_one_table(tmp_path: Path, close: bool) -> None:
    run = instrument.load(make_run(tmp_path / "run", close=close))
    assert bool(list((tmp_path / "run").glob("journal/stats-*"))) is not close
    counted = query_both(
        run,
        "select layer, count(*), sum(mean) from stats group by 1 order by 1",
        lambda rows: (
            rows.group_by("layer")
            .agg(pl.len(), pl.col("mean").sum())
            .with_columns(pl.col("layer").cast(str))
            .sort("layer")
        ),
    )
    assert counted == [("a", 6, 15.0), ("b", 6, 15.0)]
    assert run.sql("select * from stats").columns.tolist() == run.lazy("stats").collect_schema().names()
    assert "run" not in run.sql("select * from stats")
    assert run.sql("select count(*) as n from effects").n[0] == 0
    assert run.lazy("effects").collect().height == 0


@pytest.mark.slow
def test_runs_have_folder_and_override_columns_in_every_table(tmp_path: Path) -> None:
    make_run(tmp_path / "s" / 'it\'s "0"', overrides={"lr": 1, "mean": "x", "sizes": [1, 2], 'od"d': True}, mean=1)
    make_run(tmp_path / "s" / "1", overrides={"lr": 0.5, "hooks.h": {"a": None}}, close=False, mean=2)
    sweep = instrument.load(tmp_path / "s")
    answer = query_both(
        sweep,
        'select run, lr, "override.mean", sizes, "hooks.h", "od""d", max(mean), count(*) from stats group by all order by lr',
        lambda rows: (
            rows.group_by("run", "lr", "override.mean", "sizes", "hooks.h", 'od"d')
            .agg(pl.col("mean").max(), pl.len())
            .sort("lr")
        ),
    )
    assert [row[:2] + row[6:] for row in answer] == [("1", 0.5, 7.0, 12), ('it\'s "0"', 1.0, 6.0, 12)]
    assert answer[1][2:6] == ("x", "[1, 2]", None, True)
    assert answer[0][4] == '{"a": null}'
    types = dict(tuples(sweep.sql("select column_name, column_type from (describe stats)")))
    assert (types["lr"], types['od"d'], types["sizes"], types["run"]) == ("DOUBLE", "BOOLEAN", "VARCHAR", "VARCHAR")
    assert sweep.sql("select * from stats").columns.tolist() == sweep.stats.columns.tolist()
    assert sweep.lazy("stats").collect_schema().names() == sweep.stats.columns.tolist()
    assert sweep.sql("select * from layers").columns.tolist()[-1] == 'od"d'


@pytest.mark.slow
def test_runs_table_can_be_joined(tmp_path: Path) -> None:
    for job in range(3):
        make_run(tmp_path / "s" / str(job), overrides={"lr": 0.1 * job, "seed": job}, mean=job)
    sweep = instrument.load(tmp_path / "s")
    statement = "select r.lr, r.seed, r.loss, r.status, max(s.mean) from stats s join runs r using (run) group by all order by 1"
    assert tuples(sweep.sql(statement)) == [(0.1 * job, job, 0.25, "done", 5.0 + job) for job in range(3)]
    assert tuples(sweep.sql("select * from runs")) == tuples(sweep.runs)
    alone = instrument.load(tmp_path / "s" / "0")
    assert tuples(alone.sql("select run, status from RUNS")) == [(".", "done")]


NAMES = ["a[1]", "*", "what?", "it's", 'a"b', "ä ü", "a1"]


@pytest.fixture(scope="module")
def oddly_named(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """A sweep with special characters in the names of its runs."""
    folder = tmp_path_factory.mktemp("names")
    for number, name in enumerate(NAMES):
        make_run(folder / name, overrides={"x": number})
    return instrument.load(folder)


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", NAMES)
def test_special_characters_in_folder_names_are_literal(oddly_named: instrument.Run, name: str) -> None:
    quoted = name.replace("'", "''")
    answer = query_both(
        oddly_named,
        f"select run, x, count(*) from stats where run = '{quoted}' group by all",
        lambda rows: rows.filter(pl.col("run") == name).group_by("run", "x").agg(pl.len()),
    )
    assert answer == [(name, NAMES.index(name), 12)]


FOLDER_NAMES = st.one_of(
    st.sampled_from(
        ["lr=0.1", "step=3", "layer=x", "mean=9", "run=7", "seed=1", "=", "a=", "=a", "%20", "a b", "[a]*?"]
    ),
    st.text(st.sampled_from("ab=0 .%'\"[]*?{}#&~-+;,$!äß雪"), min_size=1, max_size=8).filter(
        lambda name: not name.startswith(".") and name == name.strip()
    ),
)


def check_readers(root: Path, names: Sequence[str]) -> None:
    """Write one run per folder name, and check that every reader returns the rows that were written."""
    for number, name in enumerate(names):
        make_run(root / name / names[number - 1], overrides={"lr": number}, mean=10 * number)
    expected = [
        (10.0 * number + step, step, layer)
        for number in range(len(names))
        for step in range(STEPS)
        for layer in ("a", "b")
    ]
    run = instrument.load(root)
    columns = ["mean", "step", "layer"]
    for frame in (run.stats, run.sql("select * from stats"), run.lazy("stats").collect().to_pandas()):
        assert sorted(tuples(frame[columns])) == expected
        assert frame.columns.tolist() == run.stats.columns.tolist()
    batches = run.scan("stats", columns)
    assert sorted(row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True)) == expected
    assert run.problems == []


@pytest.mark.slow
def test_folders_named_like_columns_are_no_columns(tmp_path: Path) -> None:
    check_readers(tmp_path, ["lr=0.1", "step=3", "layer=x", "mean=9", "run=7", "=", "a%20 b", "[a]*?"])


@pytest.mark.slow
@settings(max_examples=20)
@given(st.lists(FOLDER_NAMES, min_size=1, max_size=3, unique=True))
def test_every_reader_returns_the_same_table_for_any_folder_name(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        check_readers(Path(root), names)


@pytest.mark.slow
def test_files_excluded_by_a_run_condition_are_not_opened(tmp_path: Path) -> None:
    for job in range(4):
        make_run(tmp_path / "s" / str(job), overrides={"lr": 0.1 * job})
    for job in (1, 3):
        part(tmp_path / "s" / str(job), 1).write_bytes(b"no parquet")
    sweep = instrument.load(tmp_path / "s")
    assert tuples(sweep.sql("select count(*) from stats where run = '2'")) == [(12,)]
    assert tuples(sweep.sql("select count(*) from stats where lr = 0.2")) == [(12,)]
    assert tuples(sweep.sql("select count(*) from stats where run < '1' and layer > '' and step >= 0")) == [(12,)]
    assert sweep.problems == []
    with pytest.warns(InstrumentWarning, match="part-0000-000001"):
        assert tuples(sweep.sql("select count(*) from stats")) == [(40,)]
    assert [problem.split(":")[0] for problem in sweep.problems] == [
        f"{job}/stats/part-0000-000001.parquet" for job in (1, 3)
    ]


@pytest.fixture(scope="module")
def odd_and_even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a sweep with five runs."""
    folder = tmp_path_factory.mktemp("sweep")
    for job in range(5):
        make_run(
            folder / str(job),
            overrides={"lr": 0.1 * job, "odd": job % 2, "optimizer.lr": 0.1},
            mean=100 * job,
            close=job != 3,
        )
    return folder


@pytest.fixture(scope="module")
def all_rows(odd_and_even: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database with all rows of the sweep."""
    with duckdb.connect() as connection:
        connection.register("stats", pa.Table.from_pandas(instrument.load(odd_and_even).stats))
        yield connection


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "condition",
    [
        "run = '2' and lr = 0.2",
        "run >= '2' and lr < 0.35 and odd = 1 and layer = 'a'",
        "run in ('1', '2') and odd = 0",
        "run = '1' or run = '3'",
        "run like '3%' and odd = 1 and step > 2",
        pytest.param("run = '2'", marks=pytest.mark.slow),
        pytest.param("run >= '1' and odd = 0", marks=pytest.mark.slow),
        pytest.param("odd = 1 and run <> '1'", marks=pytest.mark.slow),
        pytest.param("run = '4' and odd = 1", marks=pytest.mark.slow),
    ],
)
def test_conditions_on_run_columns_equal_those_on_rows(
    odd_and_even: Path, all_rows: duckdb.DuckDBPyConnection, condition: str
) -> None:
    statement = f"select run, lr, odd, min(mean), count(*) from stats where {condition} group by all order by all"
    assert tuples(instrument.load(odd_and_even).sql(statement)) == tuples(all_rows.execute(statement).df())


def test_tables_not_in_the_query_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    table_files: list[str] = []
    original = sql._table_files

    def noted(queried: instrument.Run, table: str, **options: bool) -> sql._TableFiles:
        table_files.append(table)
        return original(queried, table, **options)

    monkeypatch.setattr(sql, "_table_files", noted)
    run.sql("with effects as (select 1) select count(*) from STATS s, effects")
    assert table_files == ["stats"]
    run.sql(
        "create temp table mine as select * from metrics; select count(*) from mine"
    )  # several statements: all tables
    assert set(table_files) == set(TABLES)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("content", "error"),
    [(b"", "cannot be read"), (b"PAR1" + b"\0" * 100 + b"PAR1", "cannot be read"), (b"no parquet", "cannot be read")],
)
@pytest.mark.combinations
@pytest.mark.parametrize("number", [0, 1])
def test_damaged_files_are_reported_and_the_rest_is_read(
    tmp_path: Path, content: bytes, error: str, number: int
) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    part(tmp_path / "run", number).write_bytes(content)
    with pytest.warns(InstrumentWarning, match=f"part-0000-00000{number}.parquet: {error}"):
        assert tuples(run.sql("select count(*) from stats")) == [(8,)]
    assert run.lazy("stats").collect().height == 8
    assert len(run.problems) == 1


@pytest.mark.spread(1)
@pytest.mark.parametrize("reader", ["sql", "lazy"])
def test_file_damaged_inside_is_reported_and_the_rest_is_read(tmp_path: Path, reader: str) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    damage_inside(part(tmp_path / "run", 1))
    with pytest.warns(InstrumentWarning, match=r"part-0000-000001\.parquet: cannot be read"):
        if reader == "sql":
            statement = "select count(*), max(rank), min(layer), max(phase) from stats"
            assert tuples(run.sql(statement)) == [(8, 0, "a", "train")]
        else:
            assert run.lazy("stats").collect().height == 8
    assert run.lazy("stats").collect().height == 8


def test_files_with_other_columns_are_reported(tmp_path: Path) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    pq.write_table(pa.table({"step": [1], "mine": [2]}), part(tmp_path / "run", 1))
    with pytest.warns(InstrumentWarning, match="column micro_step, .* is missing"):
        assert tuples(run.sql("select count(*), max(mean) from stats")) == [(8, 5.0)]


@pytest.mark.slow
@pytest.mark.parametrize("old", [[0], pytest.param([1], marks=pytest.mark.slow), [0, 1, 2]])
def test_columns_missing_in_earlier_versions_are_null(tmp_path: Path, old: list[int]) -> None:
    for job in range(3):
        make_run(tmp_path / "s" / str(job))
    for job in old:
        for file in (tmp_path / "s" / str(job) / "stats").glob("*.parquet"):
            pq.write_table(pq.read_table(file).drop_columns(["update_ratio", "position"]), file)
    sweep = instrument.load(tmp_path / "s")
    answer = query_both(
        sweep,
        "select count(*), count(position), count(update_ratio), count(mean) from stats",
        lambda rows: rows.select(pl.len(), *(pl.col(name).count() for name in ("position", "update_ratio", "mean"))),
    )
    assert answer == [(36, 36 - 12 * len(old), 0, 36)]
    assert sweep.problems == []


@pytest.mark.spread(1)
@pytest.mark.parametrize("reader", ["sql", "lazy"])
def test_files_merged_while_listing_are_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    folder = make_run(tmp_path / "run")
    run = instrument.load(folder)
    original = sql._table_files

    def merged(queried: instrument.Run, table: str, **options: bool) -> sql._TableFiles:
        found = original(queried, table, **options)
        if part(folder, 1).exists():
            pq.write_table(
                pa.concat_tables(pq.read_table(part(folder, n)) for n in (0, 1)), Part(0, 0, 1).file(folder, "stats")
            )
            part(folder, 0).unlink()
            part(folder, 1).unlink()
        return found

    monkeypatch.setattr(sql, "_table_files", merged)
    if reader == "sql":
        assert tuples(run.sql("select count(*), max(step) from stats")) == [(12, 5)]
    else:
        assert run.lazy("stats").select(pl.len(), pl.col("step").max()).collect().rows() == [(12, 5)]
    assert run.problems == []


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("query", "words", "similar"),
    [
        ("select meen from stats", "meen", "mean"),
        ('select s."optimizer.rl" from stats s', "optimizer.rl", "optimizer.lr"),
        ("select staus from runs", "staus", "status"),
        ("select * from stat", "does not exist", "stats"),
        ("selec", "syntax error", None),
        ("select '", "unterminated", None),
        ("", "the query is empty", None),
        ("-- nothing", "the query is empty", None),
        (None, "must be a query as text", None),
        ("select max(layer + 1) from stats", "No function matches", None),
        ("select cast(layer as int) from stats", "Could not convert", None),
        ("select * from own", "does not exist", None),
    ],
)
def test_query_error_is_reported_briefly(
    odd_and_even: Path, monkeypatch: pytest.MonkeyPatch, query: str, words: str, similar: str | None
) -> None:
    own = pd.DataFrame({"a": [1]})  # by default, DuckDB would use this variable as a table
    sweep = instrument.load(odd_and_even)
    monkeypatch.setattr(RunFiles, "check_contents", lambda *_: pytest.fail("all files were read"))
    with pytest.raises(ConfigError, match=r"run\.sql: .*" + words) as error:
        sweep.sql(query)
    (problem,) = error.value.problems
    assert (problem.similar[:1] or [None])[0] == similar
    assert len(own) == 1
    assert len(str(problem)) < 1500
    assert str(problem).count("\n") <= 3
    assert error.value.__cause__ is None


def test_error_outside_the_query_text_is_reported(tmp_path: Path) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    with pytest.raises(InstrumentError, match=r"run\.sql: IOException: .*nowhere\.parquet"):
        run.sql(f"select * from '{tmp_path}/nowhere.parquet'")


@pytest.mark.slow
def test_overrides_may_have_any_name(tmp_path: Path) -> None:
    names = ["file_index", "filename", "rowid", "stats", "runs", "select", "a\"b'c.\u00fc \u96ea", "x\ny", "%s{}$1", ""]
    for job in range(3):
        make_run(tmp_path / "s" / str(job), overrides=dict.fromkeys(names, 7 + job), close=job != 1)
    sweep = instrument.load(tmp_path / "s")
    columns = [*names[:-1], "override.", "seed"]
    quoted = ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
    answer = sweep.sql(f"select {quoted}, count(*) from stats group by all order by 1")
    assert tuples(answer) == [(7 + job,) * len(names) + (0, 12) for job in range(3)]
    assert sweep.lazy("stats").select(columns[:-1]).unique().sort("stats").collect().rows() == [
        (7 + job,) * len(names) for job in range(3)
    ]


@pytest.mark.slow
def test_special_numbers_and_quoted_texts_are_overrides(tmp_path: Path) -> None:
    values: list[Any] = [float("inf"), float("-inf"), 1e-300, None]
    others = ["", " blanks ", "\u00e4", None]
    for job, value in enumerate(values):
        overrides = {
            "x": value,
            "text": f'it\'s "{job}" \\n',
            "other": others[job],
            "wide": "w" * (job + 1),
            "none": None,
        }
        make_run(tmp_path / "s" / str(job), overrides=overrides)
    sweep = instrument.load(tmp_path / "s")
    statement = "select other, wide, any_value(none), count(*) from stats group by all order by wide"
    assert tuples(sweep.sql(statement)) == [(other, "w" * (job + 1), None, 12) for job, other in enumerate(others)]
    answer = sweep.sql("select run, any_value(x), any_value(text) from stats group by 1 order by 1")
    assert [(x, text) for _, x, text in tuples(answer)] == [
        (value, f'it\'s "{job}" \\n') for job, value in enumerate(values)
    ]
