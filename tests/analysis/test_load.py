"""Loading runs: one run, a sweep, and a run that is still being written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pytest
import torch
from run_folders import write_steps

import instrument
from instrument.analysis.tensor_images import maps_in


def make_run(folder: Path, *, overrides: Mapping[str, Any] | None = None, seed: int = 0, close: bool = True) -> Path:
    steps = []
    for step in range(3):
        tensor = {"step": step, "values": torch.full((2, 3), float(step)), "source_shape": [2, 3, 1]}
        stats = [{"step": step, "layer": layer, "mean": seed + step} for layer in ("a", "b")]
        steps.append({"stats": stats, "tensors": [{**tensor, "layer": layer} for layer in ("a", "b")]})
    info = {"seed": seed, "overrides": dict(overrides or {}), "metrics": {"loss": 0.25 + seed}}
    return write_steps(folder, steps, close=close, info=info)


def test_run_has_one_frame_per_table_with_plain_strings(tmp_path: Path) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    assert len(run.stats) == 6
    assert list(run.stats.groupby("layer")["mean"].mean()) == [1.0, 1.0]
    assert (run.stats.hook == "seen").all()
    assert not isinstance(run.stats.layer.dtype, pd.CategoricalDtype)
    assert "run" not in run.stats.columns
    assert run.info["status"] == "done"
    for name in ("effects", "metrics", "coverage", "layers", "events"):
        assert getattr(run, name).empty
        assert len(getattr(run, name).columns) > 3
    assert list(run.read("stats").columns) == run.own_columns("stats") == next(run.scan("stats")).schema.names
    assert "1 run, 1 done" in repr(run)


def test_path_may_be_a_relative_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert len(instrument.load("run").stats) == 6


@pytest.mark.slow
def test_sweep_frame_has_typed_override_columns(tmp_path: Path) -> None:
    jobs = [0, 1, 9, 10]
    for job in jobs:
        overrides = {"hooks.tame.norm": 0.1 * job, "seed": job, "model": "mlp", "deterministic": job > 4}
        make_run(tmp_path / "sweep" / str(job), overrides=overrides, seed=job)
    sweep = instrument.load(tmp_path / "sweep")
    assert [folder.name for folder in sweep.folders] == [str(job) for job in jobs]  # numeric order: 10 after 9
    assert len(sweep.stats) == 24
    names = ["hooks.tame.norm", "seed", "deterministic"]
    assert [str(sweep.stats.dtypes[name]) for name in names] == ["float64", "int64", "bool"]
    assert list(sweep.stats.groupby("seed")["mean"].first()) == [float(job) for job in jobs]
    assert list(sweep.stats.groupby("run", sort=False).size()) == [6] * 4
    assert list(sweep.runs.run) == [str(job) for job in jobs]
    assert list(sweep.runs.loss) == [0.25 + job for job in jobs]
    assert "4 runs, 4 done" in repr(sweep)


def test_overrides_keep_their_type_and_are_null_if_missing(tmp_path: Path) -> None:
    make_run(tmp_path / "s" / "0", overrides={"a": 1.5, "sizes": [64, 10], "hooks.mine": {"layers": "a"}})
    make_run(tmp_path / "s" / "1", overrides={"b": "x", "sizes": [64, 32, 10]})
    stats = instrument.load(tmp_path / "s").stats
    assert (list(stats.a.dropna()), list(stats.b.dropna())) == ([1.5] * 6, ["x"] * 6)
    assert (stats.sizes[0], stats.sizes[11], stats["hooks.mine"][0]) == ([64, 10], [64, 32, 10], {"layers": "a"})


def test_override_named_like_a_column_is_prefixed(tmp_path: Path) -> None:
    for job in range(2):
        make_run(tmp_path / "s" / str(job), overrides={"mean": f"override {job}", "run": "x"}, seed=job)
    stats = instrument.load(tmp_path / "s").stats
    assert set(stats["mean"]) == {0.0, 1.0, 2.0, 3.0}
    assert set(stats["override.mean"]) == {"override 0", "override 1"}
    assert set(stats["run"]) == {"0", "1"}
    assert set(stats["override.run"]) == {"x"}


def test_run_that_is_still_being_written_is_readable(tmp_path: Path) -> None:
    run = instrument.load(make_run(tmp_path / "run", close=False))
    assert not (tmp_path / "run" / "metrics").exists()
    assert len(run.stats) == 6
    for name in ("metrics", "effects", "coverage", "layers", "events"):
        assert getattr(run, name).empty
    assert run.sql("select count(*) as n from metrics").n[0] == 0


@pytest.mark.parametrize(
    ("path", "words"),
    [("", r"no run\.json in .*"), ("nowhere", "folder not found: .*nowhere"), (__file__, "not a folder: ")],
)
def test_folder_without_a_run_is_reported(tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(instrument.NoRunError, match=words):
        instrument.load(tmp_path / path)


def test_path_of_a_wrong_type_is_reported(tmp_path: Path) -> None:
    run: Any = instrument.load(make_run(tmp_path / "run"))
    for wrong in (run, [run], 3):
        with pytest.raises(
            instrument.ConfigError, match=r"path: must be a folder\n.*given    (Run|int)(.|\n)*probe\.run"
        ):
            instrument.load(wrong)
    with pytest.raises(instrument.ConfigError, match=r"runs: must be a folder(.|\n)*given    Run"):
        instrument.make_reference(run)


def test_sql_without_duckdb_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(instrument.InstrumentError, match=r"^SQL requires duckdb: pip install .*\[sql\]"):
        run.sql("select 1")


def test_tensors_are_arrays_of_their_shape(tmp_path: Path) -> None:
    rows = instrument.load(make_run(tmp_path / "run")).tensors()
    assert len(rows) == 6
    assert rows["values"][0].shape == rows["shape"][0] == (2, 3)
    assert rows["source_shape"][0] == (2, 3, 1)
    assert np.array_equal(rows["values"][5], np.full((2, 3), 2, np.float32))
    assert "data" not in rows.columns


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("where", "found"),
    [
        ({"layer": "a"}, [("a", 0), ("a", 1), ("a", 2)]),
        ({"layer": "a", "step": 1}, [("a", 1)]),
        ({"step": [0, 2]}, [("a", 0), ("b", 0), ("a", 2), ("b", 2)]),
        ({"step": range(2), "layer": ("b",)}, [("b", 0), ("b", 1)]),
        ({"step": {7}}, []),
        ({"recompute": False, "layer": "b", "hook": "seen", "step": 0}, [("b", 0)]),
    ],
)
def test_tensors_are_filtered_by_columns(tmp_path: Path, where: dict[str, Any], found: list[tuple[str, int]]) -> None:
    rows = instrument.load(make_run(tmp_path / "run")).tensors(**where)
    assert list(zip(rows.layer, rows.step, strict=True)) == found


COLUMNS = r"its columns are step, .*layer"


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("read", "message"),
    [
        *(
            (read, r"unknown table 'stat'; the tables are stats, .*events")
            for read in (
                lambda run: run.read("stat", ["step"]),
                lambda run: [*run.scan("stat", ["step"])],
                lambda run: run.count("stat"),
            )
        ),
        (lambda run: run.read("stat"), "unknown table 'stat'; the tables are stats, "),
        (lambda run: run.read("stats", ["step", "leyer"]), f"table 'stats' has no column 'leyer'; {COLUMNS}"),
        (lambda run: run.read("stats", ["step", "run"]), f"table 'stats' has no column 'run'; {COLUMNS}"),
        (lambda run: [*run.scan("stats", ["step", "leyer"])], f"table 'stats' has no column 'leyer'; {COLUMNS}"),
        (lambda run: [*run.scan("stats", ["step", "run"])], f"table 'stats' has no column 'run'; {COLUMNS}"),
        (lambda run: run.read("stats", ["step"], ds.field("stp") > 1), "condition on table 'stats': .*stp"),
        (lambda run: [*run.scan("stats", ["step"], ds.field("step") > "a")], "condition on table 'stats': .*string"),
        *(
            (
                lambda run, name=name: run.tensors(**{name: "a"}),
                rf"cannot select by column '{name}'; the columns are step, ",
            )
            for name in ("leyer", "values", "shape")
        ),
    ],
)
def test_unknown_name_is_refused(tmp_path: Path, read: Any, message: str) -> None:
    run = instrument.load(make_run(tmp_path / "run"))
    with pytest.raises(ValueError, match=message):
        read(run)
    assert not run.problems


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layer": "nope"}, r"layer: the run has no such layer\n +given +nope\n +allowed +\., 0, 1$"),
    ({"layer": ["0", "00"]}, r"given +00\n +allowed +\., 0, 1\n +similar +0"),
    ({"hook": "kep"}, r"hook: the run has no such hook\n +given +kep\n +allowed +kept\n +similar +kept"),
    ({"hook": None}, "given +None"),
    ({"phase": ["train", "evl"]}, r"phase: the run has no such phase\n +given +evl\n.*\n +similar +eval"),
    ({"kind": "forwad"}, r"kind: the run has no such kind\n +given +forwad\n"),
    ({"role": "inputs"}, r"given +inputs\n.*\n +similar +input"),
    ({"path": "0"}, r"path: the run has no such path\n +given +0\n +allowed +''$"),
    ({"step": 0.5}, r"step: wrong type: .*\n +given +0\.5"),
    ({"step": 2**70}, "step: wrong type"),
    ({"step": [0, "a"]}, r"step: wrong type: .*\n +given +\[0, 'a'\]"),
    ({"layer": {"0": 1}.items()}, "layer: wrong type"),
]


def test_tensors_refuses_unknown_texts_and_wrong_types(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    kept = {"layers": [".", "0"], "kind": "forward", "action": "record", "stats": "none", "tensors": True, "every": 2}
    with instrument.attach(model, {"kept": kept}, out=tmp_path / "run") as probe:
        assert probe.tensors(layer="0").empty
        for _ in range(3):
            model(torch.ones(1, 2))
            probe.end_step()
        for where, message in REFUSED:
            with pytest.raises(instrument.ConfigError, match=message):
                probe.tensors(**where)
        assert probe.tensors(phase="eval", role="input", kind="loss").empty
        assert probe.tensors(dtype="float16", scope="shard", module_type="Conv2d").empty
    run = instrument.load(tmp_path / "run")
    for where, message in REFUSED:
        with pytest.raises(instrument.ConfigError, match=message):
            run.tensors(**where)
    assert run.tensors(layer="1").empty
    assert run.tensors(layer="0", step=1).empty
    assert run.tensors(layer=".", step={0, 2})["layer"].tolist() == ["", ""]
    assert not run.problems


FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")


def write_tensors(folder: Path, mode: Any, *tensors: torch.Tensor) -> instrument.Run:
    rows = [{"module_type": "Conv2d", "values": tensor} for tensor in tensors]
    return instrument.load(write_steps(folder, [{"tensors": rows}], tensors=mode))


@pytest.mark.spread(2)
@pytest.mark.parametrize("mode", ["list", "bytes"])
@pytest.mark.parametrize("name", FLOAT8)
def test_every_float8_number_is_read_as_in_pytorch(tmp_path: Path, mode: str, name: str) -> None:
    tensor = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).reshape(16, 16)
    (row,) = write_tensors(tmp_path / "run", mode, tensor).tensors().to_dict("records")
    assert (row["dtype"], row["shape"], row["values"].dtype) == (name, (16, 16), np.float32)
    assert np.array_equal(row["values"], tensor.to(torch.float32).numpy(), equal_nan=True)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("mode", ["list", "bytes"])
def test_tensors_of_all_dtypes_are_read_together(tmp_path: Path, mode: str) -> None:
    plain = torch.tensor([[1.5, -2.0, 0.0], [4.0, 0.25, 3.0]])
    complexes = [torch.complex(plain, -plain).to(dtype) for dtype in (torch.complex32, torch.complex64)]
    tensors = [*complexes, plain.double(), plain.bfloat16(), plain.half(), plain.to(torch.float8_e4m3fn), plain.long()]
    rows = write_tensors(tmp_path / "run", mode, *tensors, torch.zeros(0, 3, dtype=torch.complex32)).tensors()
    assert [f"torch.{name}" for name in rows.dtype] == [str(tensor.dtype) for tensor in [*tensors, complexes[0]]]
    for array, tensor in zip(rows["values"], tensors, strict=False):
        wanted = tensor.to(torch.complex64 if tensor.is_complex() else torch.float64).numpy()
        assert array.dtype == wanted.dtype or not tensor.is_complex()
        assert np.array_equal(array, wanted)
    assert rows["values"].iloc[-1].shape == (0, 3)


def test_dtype_unknown_to_numpy_does_not_affect_others(tmp_path: Path) -> None:
    for job in ("0", "1"):
        bits = torch.zeros(2, 3, 8, 8, dtype=torch.uint8).view(torch.bits8)
        write_tensors(tmp_path / "s" / job, "list", torch.ones(2, 3, 8, 8), *([bits] if job == "1" else []))
    rows = (run := instrument.load(tmp_path / "s")).tensors()
    assert [(row.run, row.dtype, row.values.shape) for row in rows.itertuples()] == [
        ("0", "float32", (2, 3, 8, 8)),
        ("1", "float32", (2, 3, 8, 8)),
    ]
    assert run.problems == ["1/tensors: NumPy does not support bits8: skipped"]
    assert len(maps_in(instrument.load(tmp_path / "s" / "1"))) == 1


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_maps_of_complex_values_are_magnitudes(tmp_path: Path) -> None:
    run = write_tensors(tmp_path / "run", "list", torch.full((2, 3, 8, 8), 3.0 - 4.0j, dtype=torch.complex32))
    (maps,) = maps_in(run)
    assert np.array_equal(maps.values(run), np.full((3, 8, 8), 5.0, np.float32))


def test_sweep_tensors_have_run_and_override_columns(tmp_path: Path) -> None:
    for job in range(2):
        make_run(tmp_path / "s" / str(job), overrides={"lr": 0.5 + job})
    rows = instrument.load(tmp_path / "s").tensors(layer="a", step=2)
    assert list(zip(rows.run, rows.lr, strict=True)) == [("0", 0.5), ("1", 1.5)]
    assert all(array.shape == (2, 3) for array in rows["values"])


@pytest.mark.slow
def test_reading_a_run_does_not_import_torch(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    script = (
        "import sys, instrument\nrun = instrument.load(sys.argv[1])\n"
        "assert len(run.stats) == len(run.tensors()) == 6\nprint('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
