"""Columns: one definition, which the written rows match."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch import nn

import instrument
from instrument.errors import ConfigError
from instrument.storage.row_batches import as_batch, as_table
from instrument.tables import schemas as tables
from instrument.tables.schemas import TABLES, Column, Table
from instrument.tables.statistics import STATISTICS
from instrument.tasks.base import Generated
from instrument.training.loop import write_generated

REPOSITORY = Path(__file__).parents[2]
MOMENT = ["step", "micro_step", "epoch", "phase", "rank"]
_OF_CALL = ["call", "backward", "recompute", "mesh", "placement", "scope"]
IDENTITY = [*MOMENT, "hook", "layer", "module_type", "kind", "role", "path", *_OF_CALL]


@pytest.fixture(scope="module")
def sink() -> instrument.MemorySink:
    """A run that writes rows to every table."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    model.spare = nn.Linear(1, 1)
    model.spare.bias = model[2].bias
    model.logits = nn.Unflatten(1, (1, 2))
    model.forward = lambda x: model[2](model[1](model.logits(model[0](x)).flatten(1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = {"layers": "**", "kind": "forward", "action": "record"}
    specs = {
        "r": {**record, "stats": "all", "tensors": True, "quantiles": True, "histogram": 4},
        "c": {"layers": "0", "kind": "parameter_grad", "action": "clip", "norm": 0.1},
        "z": {"layers": "1", "kind": "forward", "action": "modify", "fn": "zero"},
        "w": {"layers": "*", "kind": "step_post", "role": "param", "action": "record", "spectrum": 2},
        "e": {**record, "layers": "0", "stats": "none", "experts": 1, "capacity_factor": 1.0},
        "p": {**record, "layers": "logits", "stats": "none", "position_losses": True},
        "a": {"kind": "collective", "action": "record"},
        "n": {**record, "layers": "0", "stats": "none", "cast": "nvfp4"},
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        for batch in (torch.randn(3, 2), torch.empty(0, 2)):
            probe.batch(ids=range(len(batch)), targets=batch.sum(1).clamp(0, 1).long())
            with probe.record_operators():
                loss = model(batch).sum()
                loss.backward()
                optimizer.step()
            dist.all_reduce(loss.detach())
            write_generated(probe, [Generated("a", "b", [1], [2, 3])])
            probe.end_step(loss=loss)
    dist.destroy_process_group()
    return probe.sink


def rows_of(sink: instrument.MemorySink, name: str) -> list[tuple[Any, ...]]:
    rows = sink.rows[name]
    if name == "tensors":  # the values are a tensor until a sink writes them
        rows = [(*row[:-2], row[-2].flatten().tolist(), None) for row in rows]
    return rows


@pytest.mark.parametrize("name", TABLES)
def test_written_rows_match_their_table_schema(sink: instrument.MemorySink, name: str) -> None:
    table = TABLES[name]
    rows = rows_of(sink, name)
    assert rows
    written = as_table(table, [as_batch(table, rows[:1]), as_batch(table, rows[1:])])
    assert written.schema.equals(table.schema, check_metadata=True)
    assert written.num_rows == len(rows)
    assert not table.is_sorted or written.column("position").to_pylist() == [0, *range(len(rows) - 1)]
    back = written.select(table.names).to_pylist(maps_as_pydicts="strict")
    for row, wanted in zip(back, rows, strict=True):
        assert tuple(row) == table.names
        for value, given in zip(row.values(), wanted, strict=True):
            rounded = isinstance(given, float) or (isinstance(given, list) and name == "tensors")  # rounded to float32
            assert value == (pytest.approx(given, rel=1e-6) if rounded else given)


@pytest.mark.parametrize("name", TABLES)
def test_empty_table_has_its_schema(name: str) -> None:
    empty = as_table(TABLES[name], [])
    assert as_batch(TABLES[name], []).num_rows == 0
    assert empty.num_rows == 0
    assert empty.schema.equals(TABLES[name].schema, check_metadata=True)


def test_row_of_wrong_length_or_type_is_refused() -> None:
    table = TABLES["events"]
    right = (1, 0, "a", "rule", "message", "info", None, 0.5, None)
    assert as_batch(table, [right]).num_rows == 1
    with pytest.raises(ValueError, match="uple size"):
        as_batch(table, [right[:-1]])
    with pytest.raises(pa.ArrowException):
        as_batch(table, [("one", *right[1:])])


def test_tables_and_identity_columns_are_as_documented() -> None:
    # The order determines the row count files of journals: new tables come last.
    recorded = ["stats", "distributions", "tensors", "effects", "metrics"]
    more = [
        "generated",
        "samples",
        "spectra",
        "experts",
        "position_losses",
        "relations",
        "collectives",
        "casts",
        "operators",
    ]
    assert list(TABLES) == [*recorded, "coverage", "layers", "events", *more]
    for name in ("stats", "distributions", "tensors", "effects", "spectra", "experts", "position_losses", "casts"):
        assert list(TABLES[name].names[: len(IDENTITY)]) == IDENTITY
    assert list(TABLES["stats"].names[len(IDENTITY) :]) == [*STATISTICS, "shape", "custom"]
    effects = ["numel", "changed", "changed_fraction", "norm_before", "norm_after", "factor", "held"]
    assert list(TABLES["effects"].names[len(IDENTITY) :]) == effects


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_columns_have_unique_names_and_descriptions(table: Table) -> None:
    assert len(set(table.names)) == len(table.columns)
    assert table.row
    for column in table.stored:
        assert column.meaning
        metadata = table.schema.field(column.name).metadata
        assert metadata == {b"unit": column.unit.encode(), b"meaning": column.meaning.encode()}


def described(section: str) -> dict[str, list[str]]:
    """Return unit and meaning of each column that a section of the docs describes."""
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert all(len(row) == 4 for row in cells)
    return {row[0].strip("`"): row[2:] for row in cells}


def test_docs_describe_every_column_and_shared_ones_once() -> None:
    text = (REPOSITORY / "docs/reference/tables.md").read_text()
    shared = described(text.split("## Shared columns")[1].split("## ")[0])
    assert shared == {column.name: [column.unit, column.meaning] for column in tables.IDENTITY}
    for table in TABLES.values():
        section = text.split(f"## `{table.name}`\n\nA row is {table.row}.", 1)[1].split("\n## ")[0]
        own = described(section)
        assert [*own] == [column.name for column in table.stored if column not in tables.IDENTITY]
        for column in table.stored:
            if column in tables.IDENTITY:
                assert "all [shared columns]" in section or f"`{column.name}`" in section.split("| column")[0]
            else:
                assert own[column.name] == [column.unit, column.meaning]
    assert "| `values` | list<float> |" in text
    assert "| `layer` | string (dictionary) |" in text
    assert "| `step` | int64 | step |" in text


HERE = r"test_tables.py:\d+"


def add(name: str, *names: str, **entry: Any) -> None:
    columns = tuple(Column(column, "double", "", "a number") for column in names)
    tables.TABLES.register(name)(Table(name, "one", (*tables.IDENTITY, *columns), **entry))


@pytest.mark.parametrize(
    ("name", "columns", "entry", "message"),
    [
        ("spectra", ["a"], {}, rf"{HERE}: table 'spectra' is registered already\n.*tables/schemas.py:\d+ has this one"),
        ("mine", ["a", "b", "a"], {}, rf"{HERE}: table 'mine' cannot have the column 'a' at index 19: .* at index 17"),
        ("mine", ["seed"], {}, "cannot have the column 'seed' at index 17: readers of several runs add it"),
        ("mine", ["layer"], {}, "cannot have the column 'layer' at index 17: .* at index 6"),
        ("mine", ["position"], {"is_sorted": True}, "cannot have the column 'position' at index 18: .* at index 17"),
        ("mine", ["l2"], {"fields": {"my": (int, 1)}, "has_numbers": True}, "number 'l2', which table 'stats' has"),
        (
            "mine",
            [],
            {"fields": {"spectrum": (int, 1)}},
            r"the field or number 'spectrum', .* table 'spectra' .*tables/schemas.py:\d+",
        ),
    ],
)
def test_clash_of_tables_names_both_places(name: str, columns: list[str], entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add(name, *columns, **entry)
    assert "mine" not in TABLES
    assert TABLES["spectra"].measured_by


PACKAGE = """
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from instrument.tables.schemas import IDENTITY, Column, Table


@dataclass(frozen=True)
class Measure:
    top: int

    @property
    def size(self):
        return self.top + 1

    def values(self, tensor):
        return tensor.detach().flatten().double().topk(self.top).values.tolist()

    def cells(self, values, shape):
        return list(values), values[0] - values[-1]


largest = Table(
    "largest",
    "the largest elements of one tensor at one firing",
    (
        *IDENTITY,
        Column("elements", "list<double>", "the tensor's own", "the largest elements, descending"),
        Column("gap", "double", "the tensor's own", "difference of the first and the last of them"),
    ),
    is_sorted=True,
    has_numbers=True,
    fields={"top": Annotated[int | None, Field(description="Number of largest elements to record.")]},
    roles=("output",),
    measured_by="added_table:Measure",
)
"""
USE = """
import contextlib, io, sys
import instrument
from instrument.__main__ import main
from instrument.commands.export import main as export
from instrument.report.live_run import LiveRun
from instrument.report.charts import charts
from instrument.analysis.run_history import history_of
from instrument.trackers.tags import SCALAR_TABLES
from instrument.training.sweep_objective import read_objective

assert not main()
run = instrument.load("out")
rows = run.largest
assert len(rows) == 3 * 2 and set(rows.hook) == {"seen"}
tensors = run.tensors().set_index(["step", "layer"])["values"]
for row in rows.itertuples():
    expected = sorted(tensors[row.step, row.layer].ravel(), reverse=True)[:3]
    assert row.elements.tolist() == expected and row.gap == expected[0] - expected[2]
assert run.sql("select max(gap) as gap from largest").gap[0] == rows.gap.max()
assert read_objective("max(largest.gap)").value_of("out", {})[0] == rows.gap.max()
live = LiveRun(run.path)
live.refresh()
for (series,) in (charts(live)["series"], charts(history_of(run))["series"]):
    assert [name for name in series["statistics"] if name == "gap"] == ["gap"]
assert "largest" in SCALAR_TABLES
assert not export(["out", "--to", "csv", "--out", "csv"])
assert open("csv/largest.csv").read().count("\\n") == 1 + len(rows)

sys.argv.append("plan=true")
with contextlib.redirect_stdout(io.StringIO()) as shown:
    assert not main()
assert "record stats, top, tensors" in shown.getvalue() and "largest/" in shown.getvalue(), shown.getvalue()
"""


@pytest.mark.slow
def test_table_of_an_installed_package_is_one_entry(tmp_path: Path) -> None:
    (tmp_path / "added_table.py").write_text(PACKAGE)
    info = tmp_path / "added_table-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: added_table\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[instrument.tables]\nlargest = added_table:largest\n")
    hook = "+hooks.seen={layers: 'layers.*', kind: forward, action: record, top: 3, tensors: true, every: 1}"
    arguments = ["model=mlp", "model.sizes=[64,8,10]", "data=digits", "train.steps=3", "hydra.run.dir=out", hook]
    docs = f"sys.path.insert(0, {str(REPOSITORY / 'docs')!r})\nimport make\nassert 'difference of the first' in make.tables()"
    done = subprocess.run(
        [sys.executable, "-c", f"{USE}\n{docs}", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
