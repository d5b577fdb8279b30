"""Custom sinks: in `attach`, and in the configuration of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_runs import forward_steps
from conftest import Answer
from torch import nn
from training_runs import train_here

import instrument
from instrument.errors import SinkError
from instrument.tables.schemas import TABLES

RECORD = {"layers": ".", "kind": "forward", "action": "record", "tensors": True}


class JsonLines:
    def __init__(self, path: str, fails: str = "") -> None:
        self.file, self.fails = open(path, "w"), fails  # noqa: SIM115

    def write(self, table: str, rows: Any) -> None:
        if self.fails == table:
            raise OSError("no room left")
        for row in rows:
            print(json.dumps({"table": table, **dict(zip(TABLES[table].names, row, strict=False))}), file=self.file)

    def keep(self, key: Any, source_shape: Any, tensor: torch.Tensor, dtype: Any = None) -> int:
        return tensor.nbytes

    def end_step(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class NoSink:
    def write(self, table: str, rows: Any) -> None:
        pass


RUN = (
    *("model=mlp", "data=digits", "data.slice.stop=64", "data.eval_slice.stop=64", "train.steps=3", "device=cpu"),
    *("train.batch_size=32", "quiet=true"),
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
    return forward_steps(nn.Linear(2, 2), {"h": RECORD}, torch.ones(3, 4, 2), sink=sink, **options)


@pytest.mark.spread(1)
@pytest.mark.parametrize("files", [False, True], ids=["in place of memory", "in addition to files"])
def test_sink_of_attach_receives_all_rows(tmp_path: Path, files: bool) -> None:
    sink: instrument.Sink = (counts := Counts())
    train(sink, **({"out": tmp_path / "run"} if files else {}))
    assert counts.rows == {"stats": 3, "tensors": 3, "metrics": 3, "coverage": 1, "layers": 1}
    assert counts.calls.count("close") == 1
    assert counts.calls[-1] == "close"
    if files:
        run = instrument.load(tmp_path / "run")
        assert (len(run.stats), len(run.tensors())) == (3, 3)


@pytest.mark.parametrize("method", ["write", "keep", "end_step", "close"])
@pytest.mark.parametrize("files", [False, True])
def test_exception_of_a_sink_names_its_class(method: str, files: bool, tmp_path: Path) -> None:
    counts = Counts(method)
    message = rf"Counts\.{method} failed: ValueError: broken \(in .*test_custom.py"
    with pytest.raises(SinkError, match=message) as caught:
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


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (object(), r"sink: .* object has no write and no keep and no end_step and no close"),
        (instrument.MemorySink, r"must be an instance(.|\n)*pass MemorySink\(\.\.\.\)"),
    ],
    ids=["object", "class"],
)
def test_object_that_is_no_sink_is_refused(sink: object, message: str) -> None:
    with pytest.raises(instrument.ConfigError, match=message):
        train(sink)


def test_sink_of_a_configuration_is_in_addition_to_parquet(tmp_path: Path) -> None:
    run = train_here(tmp_path / "out", *RUN, f"+sink={{_target_: {__name__}.JsonLines, path: rows.jsonl}}")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for table in ("stats", "metrics", "coverage"):
        assert len([row for row in rows if row["table"] == table]) == len(getattr(run, table)) > 0
    assert [row["l2"] for row in rows if row["table"] == "stats"] == run.stats.l2.to_list()
    assert run.info["config"]["sink"]["_target_"] == f"{__name__}.JsonLines"


@pytest.mark.slow
@pytest.mark.parametrize(("on_error", "code"), [("stop", 1), ("continue", 0)])
def test_exception_of_a_configured_sink_obeys_on_error(cli: Cli, workdir: Path, on_error: str, code: int) -> None:
    sink = f"{{_target_: {__name__}.JsonLines, path: rows.jsonl, fails: stats, on_error: {on_error}}}"
    answer = cli(*RUN, "hydra.run.dir=out", f"+sink={sink}")
    assert answer.code == code
    assert "JsonLines.write failed: OSError: no room left" in answer.out + answer.err
    run = instrument.load(workdir / "out")
    assert run.info["status"] == ("failed" if code else "done")
    assert len(run.stats) == (1 if code else 3)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (f"{{_target_: {__name__}.NoSink}}", "NoSink has no keep and no end_step and no close"),
        (f"{{_target_: {__name__}.JsonLine, path: x}}", "test_custom has no 'JsonLine'"),
        (f"{{_target_: {__name__}.JsonLines, file: x}}", "JsonLines could not be built"),
        ("{path: x}", "unknown field 'path'"),
    ],
)
def test_invalid_sink_is_a_configuration_error(tmp_path: Path, sink: str, message: str) -> None:
    with pytest.raises(instrument.ConfigError, match=message):
        train_here(tmp_path / "out", *RUN, f"+sink={sink}")
    assert not (tmp_path / "out").exists()
