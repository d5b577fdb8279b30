"""Custom sinks: in `attach`, and in the configuration of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Answer
from torch import nn

import instrument
from instrument.errors import SinkError

RECORD = {"layers": ".", "kind": "forward", "action": "record", "tensors": True}
MODULE = """
import json
from instrument.tables.schemas import TABLES

class JsonLines:
    def __init__(self, path, fails=""):
        self.file, self.fails = open(path, "w"), fails
    def write(self, table, rows):
        if self.fails == table:
            raise OSError("no room left")
        for row in rows:
            print(json.dumps({"table": table, **dict(zip(TABLES[table].names, row))}), file=self.file)
    def keep(self, key, source_shape, tensor, dtype=None):
        return tensor.nbytes
    def end_step(self):
        self.file.flush()
    def close(self):
        self.file.close()

class NoSink:
    def write(self, table, rows):
        pass
"""
RUN = (
    *("model=mlp", "data=digits", "data.slice.stop=64", "data.eval_slice.stop=64", "train.steps=3", "device=cpu"),
    *("train.batch_size=32", "hydra.run.dir=out", "quiet=true"),
    "+hooks.seen={layers: layers.0, kind: forward, action: record}",
)
Cli = Callable[..., Answer]


class Counts:
    """A sink that counts rows, and fails at a call of a method."""

    def __init__(self, fails_at: str = "", stored: Any = 4) -> None:
        self.rows: dict[str, int] = {}
        self.calls: list[str] = []
        self.fails_at = fails_at
        self.stored = stored

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise ValueError("broken")

    def write(self, table: str, rows: Any) -> None:
        self._call("write")
        self.rows[table] = self.rows.get(table, 0) + len(list(rows))

    def keep(self, key: Any, source_shape: Any, tensor: torch.Tensor, dtype: Any = None) -> Any:
        self._call("keep")
        self.rows["tensors"] = self.rows.get("tensors", 0) + 1
        return self.stored

    def end_step(self) -> None:
        self._call("end_step")

    def close(self) -> None:
        self._call("close")


def train(sink: Any, **options: Any) -> instrument.Probe:
    model = nn.Linear(2, 2)
    with instrument.attach(model, {"h": RECORD}, sink=sink, **options) as probe:
        for _ in range(3):
            model(torch.ones(4, 2))
            probe.end_step()
    return probe


def test_sink_of_attach_receives_all_rows_in_place_of_memory() -> None:
    sink: instrument.Sink = (counts := Counts())
    train(sink)
    assert counts.rows == {"stats": 3, "tensors": 3, "metrics": 3, "coverage": 1, "layers": 1}
    assert counts.calls.count("close") == 1
    assert counts.calls[-1] == "close"


def test_sink_of_attach_is_in_addition_to_files(tmp_path: Path) -> None:
    counts = Counts()
    train(counts, out=tmp_path / "run")
    run = instrument.load(tmp_path / "run")
    assert counts.rows["stats"] == len(run.stats) == 3
    assert counts.rows["tensors"] == len(run.tensors())


@pytest.mark.parametrize("method", ["write", "keep", "end_step", "close"])
@pytest.mark.parametrize("files", [False, True])
def test_exception_of_a_sink_names_its_class(method: str, files: bool, tmp_path: Path) -> None:
    counts = Counts(method)
    with pytest.raises(
        SinkError, match=rf"Counts\.{method} failed: ValueError: broken \(in .*test_custom.py"
    ) as caught:
        train(counts, **({"out": tmp_path / "run"} if files else {}))
    assert isinstance(caught.value.__cause__, ValueError)
    assert counts.calls.count(method) == 1
    assert counts.calls[-1] == "close"
    if files:
        assert instrument.load(tmp_path / "run").info["status"] == "failed"


def test_dropped_tensors_of_a_sink_are_counted() -> None:
    with pytest.warns(instrument.InstrumentWarning, match="dropped"):
        probe = train(Counts(stored=None))
    assert probe.coverage()[0]["dropped"] == 3


def test_invalid_size_of_a_tensor_is_an_error() -> None:
    with pytest.raises(SinkError, match=r"Counts\.keep failed: TypeError: must return the size in bytes"):
        train(Counts(stored="many"))


def test_object_without_the_methods_is_refused() -> None:
    with pytest.raises(
        instrument.ConfigError, match=r"sink: .* object has no write and no keep and no end_step and no close"
    ):
        train(object())


def test_sink_of_a_configuration_is_in_addition_to_parquet(cli: Cli, workdir: Path) -> None:
    (workdir / "mymodule.py").write_text(MODULE)
    answer = cli(*RUN, "+sink={_target_: mymodule.JsonLines, path: rows.jsonl}")
    assert answer.code == 0, answer.err
    rows = [json.loads(line) for line in (workdir / "rows.jsonl").read_text().splitlines()]
    run = instrument.load(workdir / "out")
    for table in ("stats", "metrics", "coverage"):
        assert len([row for row in rows if row["table"] == table]) == len(getattr(run, table)) > 0
    assert [row["l2"] for row in rows if row["table"] == "stats"] == run.stats.l2.to_list()
    assert run.info["config"]["sink"]["_target_"] == "mymodule.JsonLines"


@pytest.mark.parametrize(("on_error", "code"), [("stop", 1), ("continue", 0)])
def test_exception_of_a_configured_sink_obeys_on_error(cli: Cli, workdir: Path, on_error: str, code: int) -> None:
    (workdir / "mymodule.py").write_text(MODULE)
    sink = f"{{_target_: mymodule.JsonLines, path: rows.jsonl, fails: stats, on_error: {on_error}}}"
    answer = cli(*RUN, f"+sink={sink}")
    assert answer.code == code
    assert "JsonLines.write failed: OSError: no room left" in answer.out + answer.err
    run = instrument.load(workdir / "out")
    assert run.info["status"] == ("failed" if code else "done")
    assert len(run.stats) == (1 if code else 3)


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        ("{_target_: mymodule.NoSink}", "NoSink has no keep and no end_step and no close"),
        ("{_target_: mymodule.JsonLine, path: x}", "mymodule has no 'JsonLine'"),
        ("{_target_: mymodule.JsonLines, file: x}", "mymodule.JsonLines could not be built"),
        ("{path: x}", "unknown field 'path'"),
    ],
)
def test_invalid_sink_is_a_configuration_error(cli: Cli, workdir: Path, sink: str, message: str) -> None:
    (workdir / "mymodule.py").write_text(MODULE)
    answer = cli(*RUN, f"+sink={sink}")
    assert answer.code == 2
    assert message in answer.err
    assert not (workdir / "out").exists()


def test_class_in_place_of_a_sink_is_refused() -> None:
    with pytest.raises(instrument.ConfigError, match=r"must be an instance(.|\n)*pass MemorySink\(\.\.\.\)"):
        train(instrument.MemorySink)
