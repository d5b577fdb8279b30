"""Runs in remote folders: everything reads as from a local folder."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from attached_runs import train_steps
from buckets import NO_ANSWER, connected, new_clients
from tiers import tiered
from waiting import TIMEOUT

import instrument
from instrument import ConfigError, InstrumentError
from instrument.commands.export import main as export
from instrument.commands.report import main as report
from instrument.storage.parts import Part, new_part
from instrument.storage.remote_folder import RemoteFolder, folder_at
from instrument.storage.remote_transfer import send_all
from instrument.storage.run_files import RunFiles
from instrument.storage.run_search import NoRunError
from instrument.tables.schemas import TABLES

HOOKS = {
    "acts": {"layers": "*", "kind": "forward", "action": "record", "tensors": True, "samples": 1},
    "tame": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 1.0},
}


def train(out: Path, seed: int, steps: int = 3) -> None:
    """Train a tiny network and write a run."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    batches, ids = torch.randn(steps, 5, 4), [range(5 * step, 5 * step + 5) for step in range(steps)]
    train_steps(model, HOOKS, batches, sample_ids=ids, out=out, seed=seed)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs."""
    path = tmp_path_factory.mktemp("local") / "sweep"
    for seed in (0, 1):
        train(path / str(seed), seed)
        record = path / str(seed) / "run.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "overrides": {"lr": 0.1 * (seed + 1)}}))
    return path


SYSTEMS = ("memory", "file", "s3")


@pytest.fixture(scope="module", params=tiered(SYSTEMS, ["memory"]))
def remote_root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of an empty folder on each file system."""
    path = tmp_path_factory.mktemp("there")
    return f"{request.getfixturevalue('kept_bucket') if request.param == 's3' else f'{request.param}://'}{path}"


@pytest.fixture(scope="module")
def uploaded(remote_root: str, local: Path, s3_server: str) -> str:
    """Return the remote address of the same runs."""
    with connected(s3_server):
        for folder in sorted(local.iterdir()):
            assert send_all(folder, RemoteFolder(f"{remote_root}/some/sweep/{folder.name}", "")).failed == {}
    return f"{remote_root}/some/sweep"


@pytest.fixture
def remote_sweep(uploaded: str, s3: None) -> str:
    return uploaded


@pytest.mark.slow
@pytest.mark.parametrize("remote_root", tiered(SYSTEMS, ["s3"]), indirect=True)
def test_every_table_of_a_remote_run_is_equal(remote_sweep: str, local: Path) -> None:
    for name in ("/0", ""):
        local_run, remote = instrument.load(f"{local}{name}"), instrument.load(f"{remote_sweep}{name}")
        for table in set(TABLES) - {"tensors"} | ({"runs"} if name == "" else set()):
            pd.testing.assert_frame_equal(getattr(remote, table), getattr(local_run, table))
        assert remote.infos == local_run.infos
        assert remote.problems == []
        assert remote.count("stats") == len(local_run.stats)
    assert remote.stats["run"].unique().tolist() == ["0", "1"]
    assert "2 done" in repr(remote)


def test_run_infos_are_fetched_concurrently(remote_sweep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both, info = threading.Barrier(2), RunFiles.info

    def wait_for_both(self: RunFiles) -> dict[str, Any]:
        both.wait(TIMEOUT)
        return info(self)

    monkeypatch.setattr(RunFiles, "info", wait_for_both)
    assert instrument.load(remote_sweep).runs["status"].tolist() == ["done", "done"]


@pytest.mark.slow
def test_remote_tensors_features_and_queries_are_equal(remote_sweep: str, local: Path) -> None:
    local_run, remote = instrument.load(local), instrument.load(remote_sweep)
    here, there = (run.tensors(layer="0", step=[0, 2]) for run in (local_run, remote))
    assert len(there) == 4
    assert all((a == b).all() for a, b in zip(here["values"], there["values"], strict=True))
    here, there = (instrument.load(f"{sweep}/1").features("0") for sweep in (local, remote_sweep))
    assert there.ids.tolist() == [0, 5, 10]
    assert (here.X == there.X).all()
    query = "select layer, count(*) as n, max(l2) as most from stats where step > 0 group by 1 order by 1"
    assert len(remote.sql(query)) > 1
    pd.testing.assert_frame_equal(remote.sql(query), local_run.sql(query))


def test_running_remote_run_shows_new_rows_when_reloaded(
    remote_root: str, s3: None, local: Path, tmp_path: Path
) -> None:
    running = tmp_path / "going"
    shutil.copytree(local / "0", running)
    path = running / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "running"}))
    remote = RemoteFolder(f"{remote_root}/going", "")
    remote.put(path, "run.json")
    before = instrument.load(remote.address)
    assert (before.info["status"], len(before.stats)) == ("running", 0)
    send_all(running, remote)
    assert len(instrument.load(remote.address).stats) == len(instrument.load(local / "0").stats)


def test_remote_folder_without_a_run_is_reported(remote_sweep: str) -> None:
    with pytest.raises(NoRunError, match=r"no run\.json in|folder not found"):
        instrument.load(f"{remote_sweep}/elsewhere")


def test_damaged_remote_part_is_reported_and_the_rest_is_read(
    remote_root: str, s3: None, local: Path, tmp_path: Path
) -> None:
    remote = RemoteFolder(f"{remote_root}/damaged", "")
    send_all(local / "0", remote)
    (tmp_path / "bad").write_bytes(b"no Parquet")
    remote.put(tmp_path / "bad", "stats/part-0000-000001.parquet")
    run = instrument.load(remote.address)
    assert len(run.stats) > 0
    (problem,) = run.problems
    assert problem.startswith("stats/part-0000-000001.parquet: cannot be read")


@pytest.mark.parametrize("name", ["/0", pytest.param("", marks=pytest.mark.slow)], ids=["run", "sweep"])
def test_report_of_a_remote_folder_is_written_locally(remote_sweep: str, tmp_path: Path, name: str) -> None:
    assert report([f"{remote_sweep}{name}", "--out", str(tmp_path / "one.html")]) == 0
    assert (tmp_path / "one.html").stat().st_size > 10_000


@pytest.mark.slow
def test_export_of_a_remote_sweep_is_written_locally(remote_sweep: str, tmp_path: Path) -> None:
    assert export([remote_sweep, "--to", "csv", "--out", str(tmp_path / "csv")]) == 0
    assert len(list((tmp_path / "csv").glob("*/stats.csv"))) == 2


@pytest.mark.parametrize(("write", "options"), [(report, []), (export, ["--to", "csv"])])
def test_local_folder_is_required_for_a_remote_run(
    remote_sweep: str, capsys: pytest.CaptureFixture[str], write: Callable[[list[str]], int], options: list[str]
) -> None:
    assert write([f"{remote_sweep}/0", *options]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.slow
def test_query_fetches_only_needed_columns_and_rows(
    bucket: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, rows = TABLES["stats"], 100_000
    folder = tmp_path / "large"
    folder.mkdir()
    shutil.copy(local / "0" / "run.json", folder)
    columns = {
        "step": pa.array(np.arange(rows) // (rows // 2_000)),
        **{name: pa.array(np.random.default_rng(0).normal(size=rows)) for name in ("l2", "mean", "std", "rms", "l1")},
    }
    cells = [columns.get(field.name, pa.nulls(rows, field.type)) for field in table.schema]
    with new_part(folder, table, Part(0, 0)) as writer:
        writer.write_table(pa.Table.from_arrays(cells, schema=table.schema), row_group_size=rows // 10)
    size = Part(0, 0).file(folder, "stats").stat().st_size
    send_all(folder, RemoteFolder(f"{bucket}/large", ""))
    files = type(folder_at(bucket).fs)  # type: ignore[attr-defined]
    fetched, fetch = [], files._call_s3

    async def counted(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "get_object" and "Range" in options:
            first, last = options["Range"].removeprefix("bytes=").split("-")
            fetched.append(int(last) - int(first) + 1)
        return await fetch(self, method, *arguments, **options)

    monkeypatch.setattr(files, "_call_s3", counted)
    run = instrument.load(f"{bucket}/large")
    assert run.sql("select count(l2) as n from stats where step < 100").n.tolist() == [rows // 20]
    by_query = sum(fetched)
    fetched.clear()
    assert len(run.read("stats", ["step", "l2"])) == rows
    assert by_query < size / 4
    assert sum(fetched) < size / 3


def test_credentials_in_an_address_are_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="must not contain a password") as refused:
        instrument.load("s3://key:hushhush@bucket/runs")
    assert "hushhush" not in str(refused.value)


FAILURES: list[Callable[[str], Exception]] = [
    PermissionError,
    ConnectionError,
    TimeoutError,
    lambda text: OSError(5, text),
    RuntimeError,  # of a client library
]


@pytest.mark.spread(2)
@pytest.mark.combinations
@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize(
    "ask",
    [
        lambda run: run.stats,
        lambda run: run.sql("select count(*) from stats where l2 > 0"),
        lambda run: run.lazy("stats").collect(),
        lambda run: list(run.scan("stats", ["step"])),
        lambda run: run.count("stats"),
        lambda run: run.tensors(step=0),
    ],
)
def test_network_error_is_not_reported_as_a_damaged_file(
    remote_sweep: str,
    monkeypatch: pytest.MonkeyPatch,
    opens: bool,
    ask: Callable[[instrument.Run], Any],
) -> None:
    failure: Exception

    def fail(*_: Any) -> Any:
        raise failure

    run = instrument.load(f"{remote_sweep}/0")
    run.infos  # noqa: B018
    wanted = len(instrument.load(f"{remote_sweep}/0").stats)
    files = type(run.path.fs)  # type: ignore[attr-defined]
    original = files.open

    def breaks(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        return _UnreadableFile(original(self, path, *arguments, **options), fail) if opens else fail()

    for make in FAILURES:
        failure = make("the token has expired: http://me:hushhush@host/")
        with monkeypatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("error")
            patched.setattr(files, "open", breaks)
            with pytest.raises(InstrumentError, match=rf"{type(failure).__name__}: .*expired") as error:
                ask(run)
        assert "hush" not in str(error.value)
        assert error.value.__cause__ is None
        assert run.problems == []
    assert len(run.stats) == wanted


class _UnreadableFile:
    """A file whose length is known but whose content cannot be read."""

    def __init__(self, file: Any, fail: Callable[..., Any]) -> None:
        self._file = file
        self.read = fail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_connection_error_is_reported_in_one_line(bucket: str) -> None:
    with (
        new_clients(AWS_ENDPOINT_URL=NO_ANSWER),
        pytest.raises(InstrumentError, match="s3://bucket/runs cannot be read: EndpointConnectionError"),
    ):
        instrument.load(f"{bucket}/runs")
