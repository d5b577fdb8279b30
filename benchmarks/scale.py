"""A hundred million rows of statistics, of a sweep of a thousand runs, asked four questions.

    python benchmarks/scale.py [--rows 100000000] [--runs 1000] [--repeats 5]

The rows are written by the code that makes parts of a run's journals, one layout after the other into a temporary folder: as
runs leave them, and twice by hand, one file a run and eight files in all, with the run in every row and the overrides in a
table beside them. Each question is asked in a fresh process, with imports done: everything from opening the folder to the answer
is timed. All answers have to be the same. `cold` is the first of the repeats, before which the system was told to forget the
files; `warm` is the fastest of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from instrument.analysis.load import load
from instrument.capture.tables import TABLES
from instrument.sinks.parts import ROW_GROUP_ROWS, Part, in_order, new_part

STATS = TABLES["stats"]
LAYERS = [f"encoder.{block}.{layer}" for block in range(8) for layer in range(5)]
PLACES = [
    *(("activations", layer, "forward", "output", "") for layer in LAYERS),
    *(
        ("gradients", layer, "parameter_grad", "param_grad", name)
        for layer in LAYERS[29::-1]
        for name in ("weight", "bias")
    ),
]
LABELS = ("hook", "layer", "kind", "role", "path")
SCALED = ("mean", "std", "rms", "min", "max", "abs_max", "l1", "l2")  # what is another number in every run
SINGLE = ("min", "max", "abs_max")  # what a float32 holds
NORMS, RATES = (0.01, 0.1, 1.0, 10.0), (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
ONE = 417  # the run that is asked about, or the last one

QUESTIONS = {
    "one layer's curve in one run": """select step, l2 from stats where {one} layer = 'encoder.3.2' and hook = 'gradients'
        and path = 'weight' order by step""",
    "a group-by over all layers in one run": """select layer, hook, avg(l2) as mean, max(abs_max) as largest from stats
        where {one} true group by layer, hook order by layer, hook""",
    "the worst gradient over all runs": """select {run} as run, layer, path, step, l2 from stats
        where kind = 'parameter_grad' order by l2 desc limit 1""",
    "a join with overrides": """select {norm} as norm, layer, avg(l2) as mean, max(abs_max) as largest from stats {join}
        where hook = 'activations' group by all order by norm, layer""",
}


def overrides_of(run: int) -> dict[str, Any]:
    """What a run was started with."""
    seed, norm, rate = run % 10, NORMS[run // 10 % len(NORMS)], RATES[run // 40 % len(RATES)]
    return {"hooks.tame.norm": norm, "optimizer.lr": rate, "seed": seed}


def rows_of(run: int, steps: int) -> pa.Table:
    """The statistics of a run, in the order in which its hooks fire; shape [steps x 100]."""
    shape = (steps, len(PLACES))
    draw = np.random.default_rng(0)
    numel = np.broadcast_to(draw.integers(64, 100_000, len(PLACES)), shape)
    std = np.exp(draw.normal(0, 1, len(PLACES)) + 0.03 * np.cumsum(draw.normal(size=shape), axis=0))
    mean = std * draw.normal(0, 0.1, shape)
    low, high = (sign * std * draw.normal(4, 0.3, shape) for sign in (-1, 1))
    rms = np.sqrt(std**2 + mean**2)
    values = {"mean": mean, "std": std, "rms": rms, "min": low, "max": high, "abs_max": np.maximum(-low, high)}
    values |= {"l1": 0.8 * std * numel * draw.normal(1, 0.01, shape), "l2": rms * np.sqrt(numel)}
    own = np.random.default_rng(run + 1)
    scale = np.exp(own.normal() + own.normal(0, 0.1, shape))
    cells: dict[str, Any] = {name: (cells * scale).ravel() for name, cells in values.items()}
    cells |= {name: cells[name].astype(np.float32).astype(np.float64) for name in SINGLE}
    relu = np.array([layer.endswith("1") and hook == "activations" for hook, layer, *_ in PLACES])
    zeros = np.where(relu, own.binomial(numel, 0.5) / numel, 0.0)
    cells |= {"step": np.repeat(np.arange(steps), len(PLACES)), "numel": numel.ravel(), "zero_fraction": zeros.ravel()}
    cells |= {
        "position": np.tile(np.arange(len(PLACES), dtype=np.int32), steps),
        "recompute": np.zeros(numel.size, bool),
    }
    for name, column in zip(LABELS, zip(*PLACES, strict=True), strict=True):
        cells[name] = _labels(column, steps)
    cells |= {
        name: _labels([word] * len(PLACES), steps) for name, word in {"phase": "train", "module_type": "Linear"}.items()
    }
    return pa.table([_column(field, cells, numel.size) for field in STATS.schema], schema=STATS.schema)


def _labels(words: Any, steps: int) -> pa.DictionaryArray:
    known = list(dict.fromkeys(words))
    return pa.DictionaryArray.from_arrays(np.tile(np.array([known.index(w) for w in words], np.int32), steps), known)


def _column(field: pa.Field, cells: dict[str, Any], rows: int) -> pa.Array:
    if field.name in cells:
        return cells[field.name] if isinstance(cells[field.name], pa.Array) else pa.array(cells[field.name], field.type)
    is_number = pa.types.is_integer(field.type)  # counts, calls, micro-steps: zero
    return pa.array(np.zeros(rows), field.type, safe=False) if is_number else pa.nulls(rows, field.type)


def write_run(folder: Path, run: int, steps: int) -> None:
    """A run as it is left: parts, and run.json."""
    place = folder / str(run)
    place.mkdir(parents=True)
    info = {"status": "done", "overrides": overrides_of(run), "seed": run % 10, "metrics": {"loss": 1 / (1 + run)}}
    (place / "run.json").write_text(json.dumps(info))
    rows = rows_of(run, steps)
    with new_part(place, STATS, Part(0, 0)) as writer:
        for group in _whole_steps(rows):
            writer.write_table(in_order(STATS, group))


def _whole_steps(rows: pa.Table) -> Iterator[pa.Table]:
    size = -(-ROW_GROUP_ROWS // len(PLACES)) * len(PLACES)
    ends = [*range(0, len(rows), size), len(rows)]
    return (rows.slice(start, end - start) for start, end in pairwise(ends))


def write_file(folder: Path, runs: list[int], steps: int) -> None:
    """Runs as one file made by hand: the run's name in every row, pyarrow's usual options with zstd."""
    folder.mkdir(parents=True, exist_ok=True)
    file, writer = folder / f"{runs[0]:04d}.parquet", None
    for run in runs:
        rows = rows_of(run, steps).drop_columns(["position"])
        rows = rows.add_column(0, "run", pa.array([str(run)] * len(rows)).dictionary_encode())
        writer = writer or pq.ParquetWriter(file, rows.schema, compression="zstd")
        writer.write_table(rows, row_group_size=122_880)
    assert writer is not None
    writer.close()


def make(layout: str, folder: Path, runs: int, steps: int) -> None:
    """Write all runs in a layout, on all cores."""
    with ProcessPoolExecutor() as pool:
        if layout == "runs":
            done = [pool.submit(write_run, folder, run, steps) for run in range(runs)]
        else:
            count = runs if layout == "a file a run" else 8
            groups = [group.tolist() for group in np.array_split(np.arange(runs), count)]
            done = [pool.submit(write_file, folder / "stats", group, steps) for group in groups]
            frame = pd.DataFrame([{"run": str(run), **overrides_of(run)} for run in range(runs)])
            folder.mkdir(parents=True, exist_ok=True)
            frame.to_parquet(folder / "runs.parquet")
        for one in done:
            one.result()


def ours(folder: Path, question: str, one: str) -> pd.DataFrame:
    """instrument, on the folder of a sweep."""
    words = {"one": f"run = '{one}' and", "run": "run", "norm": '"hooks.tame.norm"', "join": ""}
    return load(folder).sql(QUESTIONS[question].format(**words))


def ours_alone(folder: Path, question: str, one: str) -> pd.DataFrame:
    """instrument, on the folder of the one run that is asked about."""
    return load(folder / one).sql(QUESTIONS[question].format(one="", run="", norm="", join=""))


def ours_joined(folder: Path, question: str, one: str) -> pd.DataFrame:
    """instrument, with the table of runs where the overrides are asked for."""
    words = {
        "one": f"run = '{one}' and",
        "run": "run",
        "norm": 'r."hooks.tame.norm"',
        "join": "join runs r using (run)",
    }
    return load(folder).sql(QUESTIONS[question].format(**words))


def ours_lazy(folder: Path, question: str, one: str) -> pd.DataFrame:
    """instrument, and polars on its files."""
    return _polars(load(folder).lazy("stats"), question, one, None)


def duckdb_by_hand(folder: Path, question: str, one: str) -> pd.DataFrame:
    """DuckDB on files made by hand."""
    import duckdb

    words = {"one": f"run = '{one}' and", "run": "run", "norm": 'r."hooks.tame.norm"'}
    join = f"join '{folder}/runs.parquet' r using (run)"
    with duckdb.connect() as connection:
        connection.execute(f"create view stats as select * from '{folder}/stats/*.parquet'")
        return connection.execute(QUESTIONS[question].format(**words, join=join)).df()


def polars_by_hand(folder: Path, question: str, one: str) -> pd.DataFrame:
    """polars on files made by hand."""
    import polars as pl

    return _polars(
        pl.scan_parquet(folder / "stats" / "*.parquet"), question, one, pl.scan_parquet(folder / "runs.parquet")
    )


def _polars(rows: Any, question: str, one: str, runs: Any) -> pd.DataFrame:
    import polars as pl

    place = pl.col("run") == one
    asked = list(QUESTIONS).index(question)
    if asked == 0:
        there = (
            place & (pl.col("layer") == "encoder.3.2") & (pl.col("hook") == "gradients") & (pl.col("path") == "weight")
        )
        answer = rows.filter(there).select("step", "l2").sort("step")
    elif asked == 1:
        means = [pl.col("l2").mean().alias("mean"), pl.col("abs_max").max().alias("largest")]
        answer = rows.filter(place).group_by("layer", "hook").agg(means)
    elif asked == 2:
        answer = (
            rows.filter(pl.col("kind") == "parameter_grad")
            .select("run", "layer", "path", "step", "l2")
            .top_k(1, by="l2")
        )
    else:
        rows = rows.filter(pl.col("hook") == "activations")
        rows = rows if runs is None else rows.with_columns(pl.col("run").cast(str)).join(runs, on="run")
        means = [pl.col("l2").mean().alias("mean"), pl.col("abs_max").max().alias("largest")]
        answer = rows.group_by(pl.col("hooks.tame.norm").alias("norm"), "layer").agg(means)
    frame = answer.with_columns(pl.col(pl.Categorical).cast(str)).collect(engine="streaming").to_pandas()
    return frame.sort_values(list(frame.columns[:2])) if asked in (1, 3) else frame


Ask = Callable[[Path, str, str], pd.DataFrame]
READERS: dict[str, tuple[str, Ask, tuple[int, ...]]] = {
    "instrument, the run's own folder": ("runs", ours_alone, (0, 1)),
    "instrument, the sweep's folder": ("runs", ours, (0, 1, 2, 3)),
    "instrument, the table `runs`": ("runs", ours_joined, (3,)),
    "instrument, run.lazy": ("runs", ours_lazy, (0, 1, 2, 3)),
    "DuckDB, a file a run": ("a file a run", duckdb_by_hand, (0, 1, 2, 3)),
    "polars, a file a run": ("a file a run", polars_by_hand, (0, 1, 2, 3)),
    "DuckDB, eight files": ("eight files", duckdb_by_hand, (0, 1, 2, 3)),
    "polars, eight files": ("eight files", polars_by_hand, (0, 1, 2, 3)),
}


def ask(reader: str, folder: Path, question: str, one: str) -> None:
    """In a fresh process: answer, and say how long it took and what it took of memory."""
    import duckdb  # noqa: F401
    import polars  # noqa: F401

    started = time.perf_counter()
    answer = READERS[reader][1](folder, question, one)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = [
        [round(c, 9) if isinstance(c, float) else c for c in row] for row in answer.astype(object).to_numpy().tolist()
    ]
    print(json.dumps({"seconds": seconds, "peak": peak, "rows": rows}))


def forget(folder: Path) -> None:
    """Tell the system that files need not be kept in memory."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(reader: str, folder: Path, question: str, one: str, repeats: int) -> tuple[dict[str, float], Any]:
    """Seconds, cold and warm, and the peak of memory in MB; and the answer."""
    forget(folder)
    found = []
    for _ in range(repeats):
        command = [sys.executable, "-W", "ignore", __file__, "--ask", reader, str(folder), question, one]
        found.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    warm = min(one["seconds"] for one in found[1:])
    return {"cold": found[0]["seconds"], "warm": warm, "peak": max(one["peak"] for one in found)}, found[0]["rows"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ask", nargs=4, metavar=("READER", "FOLDER", "QUESTION", "RUN"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask is not None:
        reader, folder, question, one = given.ask
        return ask(reader, Path(folder), question, one)
    steps = max(1, given.rows // given.runs // len(PLACES))
    one = str(min(ONE, given.runs - 1))
    packages = ", ".join(f"{name} {version(name)}" for name in ("duckdb", "polars", "pyarrow", "numpy"))
    print(
        f"{given.runs * steps * len(PLACES):,} rows of {given.runs:,} runs; {os.cpu_count()} cores; {packages}\n",
        flush=True,
    )
    print("| question | asked of | cold, s | warm, s | peak, MB |\n|---|---|---|---|---|", flush=True)
    answers: dict[str, Any] = {}
    told: list[str] = []
    for layout in dict.fromkeys(layout for layout, _, _ in READERS.values()):
        with tempfile.TemporaryDirectory() as above:
            folder = Path(above) / "sweep"
            started = time.perf_counter()
            make(layout, folder, given.runs, steps)
            size = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
            told.append(f"{layout}: {size / 1e9:.2f} GB, written in {time.perf_counter() - started:.0f} s")
            for reader, (its, _, asked) in READERS.items():
                for question in (list(QUESTIONS)[number] for number in asked if its == layout):
                    figures, rows = measure(reader, folder, question, one, given.repeats)
                    assert answers.setdefault(question, rows) == rows or _near(answers[question], rows), (
                        reader,
                        question,
                    )
                    print(
                        f"| {question} | {reader} | {figures['cold']:.2f} | {figures['warm']:.2f} | {figures['peak']:.0f} |",
                        flush=True,
                    )
            shutil.rmtree(folder)
    print("\n" + "\n".join(told))
    return None


def _near(one: Any, other: Any) -> bool:
    """Whether two answers are the same but for the order in which means were added up."""
    left, right = pd.DataFrame(one), pd.DataFrame(other)
    return left.shape == right.shape and all(
        np.allclose(left[name], right[name], rtol=1e-9)
        if left[name].dtype == float
        else (left[name] == right[name]).all()
        for name in left
    )


if __name__ == "__main__":
    main()
