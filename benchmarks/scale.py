"""Four queries on 100 million rows of statistics from a sweep of 1,000 runs.

    python benchmarks/scale.py [--rows 100000000] [--runs 1000] [--repeats 5]

The same rows are written to a temporary folder in three layouts, one after the other: as run folders, with the code that writes
the parts of a run, and directly with pyarrow as one file per run and as eight files. The rows of the direct layouts contain the run,
and a separate table contains the overrides. Each query runs in a new process. The measured time is from opening the folder to the
answer, without imports. All answers must be equal. `cold` is the first repeat, after the system was asked to drop the files from its
cache. `warm` is the fastest of the other repeats.
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
from instrument.storage.parts import ROW_GROUP_ROWS, Part, in_order, new_part
from instrument.tables.schemas import TABLES

STATS = TABLES["stats"]
LAYERS = [f"encoder.{block}.{layer}" for block in range(8) for layer in range(5)]
LOCATIONS = [
    *(("activations", layer, "forward", "output", "") for layer in LAYERS),
    *(
        ("gradients", layer, "parameter_grad", "param_grad", name)
        for layer in LAYERS[29::-1]
        for name in ("weight", "bias")
    ),
]
LABELS = ("hook", "layer", "kind", "role", "path")
SCALED = ("mean", "std", "rms", "min", "max", "abs_max", "l1", "l2")  # statistics that differ between runs
FLOAT32_STATISTICS = ("min", "max", "abs_max")  # statistics that are stored as float32
NORMS, LEARNING_RATES = (0.01, 0.1, 1.0, 10.0), (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
SELECTED_RUN = 417  # the run of the queries for one run; the last run if there are fewer

QUERIES = {
    "one layer's curve in one run": """select step, l2 from stats where {run_condition} layer = 'encoder.3.2' and hook = 'gradients'
        and path = 'weight' order by step""",
    "a group-by over all layers in one run": """select layer, hook, avg(l2) as mean, max(abs_max) as largest from stats
        where {run_condition} true group by layer, hook order by layer, hook""",
    "the worst gradient over all runs": """select {run} as run, layer, path, step, l2 from stats
        where kind = 'parameter_grad' order by l2 desc limit 1""",
    "a join with overrides": """select {norm} as norm, layer, avg(l2) as mean, max(abs_max) as largest from stats {join}
        where hook = 'activations' group by all order by norm, layer""",
}


def overrides_of(run: int) -> dict[str, Any]:
    """Return the overrides of a run."""
    seed, norm, rate = run % 10, NORMS[run // 10 % len(NORMS)], LEARNING_RATES[run // 40 % len(LEARNING_RATES)]
    return {"hooks.tame.norm": norm, "optimizer.lr": rate, "seed": seed}


def rows_of(run: int, steps: int) -> pa.Table:
    """Return the statistics of a run in the order in which its hooks fire: 100 rows per step."""
    shape = (steps, len(LOCATIONS))
    shared_random = np.random.default_rng(0)
    numel = np.broadcast_to(shared_random.integers(64, 100_000, len(LOCATIONS)), shape)
    std = np.exp(
        shared_random.normal(0, 1, len(LOCATIONS)) + 0.03 * np.cumsum(shared_random.normal(size=shape), axis=0)
    )
    mean = std * shared_random.normal(0, 0.1, shape)
    low, high = (sign * std * shared_random.normal(4, 0.3, shape) for sign in (-1, 1))
    rms = np.sqrt(std**2 + mean**2)
    values = {"mean": mean, "std": std, "rms": rms, "min": low, "max": high, "abs_max": np.maximum(-low, high)}
    values |= {"l1": 0.8 * std * numel * shared_random.normal(1, 0.01, shape), "l2": rms * np.sqrt(numel)}
    run_random = np.random.default_rng(run + 1)
    scale = np.exp(run_random.normal() + run_random.normal(0, 0.1, shape))
    cells: dict[str, Any] = {name: (cells * scale).ravel() for name, cells in values.items()}
    cells |= {name: cells[name].astype(np.float32).astype(np.float64) for name in FLOAT32_STATISTICS}
    relu = np.array([layer.endswith("1") and hook == "activations" for hook, layer, *_ in LOCATIONS])
    zeros = np.where(relu, run_random.binomial(numel, 0.5) / numel, 0.0)
    cells |= {
        "step": np.repeat(np.arange(steps), len(LOCATIONS)),
        "numel": numel.ravel(),
        "zero_fraction": zeros.ravel(),
    }
    cells |= {
        "position": np.tile(np.arange(len(LOCATIONS), dtype=np.int32), steps),
        "recompute": np.zeros(numel.size, bool),
    }
    for name, column in zip(LABELS, zip(*LOCATIONS, strict=True), strict=True):
        cells[name] = _labels(column, steps)
    cells |= {
        name: _labels([word] * len(LOCATIONS), steps)
        for name, word in {"phase": "train", "module_type": "Linear"}.items()
    }
    return pa.table([_column(field, cells, numel.size) for field in STATS.schema], schema=STATS.schema)


def _labels(words: Any, steps: int) -> pa.DictionaryArray:
    unique = list(dict.fromkeys(words))
    return pa.DictionaryArray.from_arrays(np.tile(np.array([unique.index(w) for w in words], np.int32), steps), unique)


def _column(field: pa.Field, cells: dict[str, Any], rows: int) -> pa.Array:
    if field.name in cells:
        return cells[field.name] if isinstance(cells[field.name], pa.Array) else pa.array(cells[field.name], field.type)
    is_number = pa.types.is_integer(field.type)  # counts, calls and micro-steps are zero
    return pa.array(np.zeros(rows), field.type, safe=False) if is_number else pa.nulls(rows, field.type)


def write_run(folder: Path, run: int, steps: int) -> None:
    """Write the folder of a finished run: its parts and run.json."""
    run_folder = folder / str(run)
    run_folder.mkdir(parents=True)
    info = {"status": "done", "overrides": overrides_of(run), "seed": run % 10, "metrics": {"loss": 1 / (1 + run)}}
    (run_folder / "run.json").write_text(json.dumps(info))
    rows = rows_of(run, steps)
    with new_part(run_folder, STATS, Part(0, 0)) as writer:
        for group in _row_groups(rows):
            writer.write_table(in_order(STATS, group))


def _row_groups(rows: pa.Table) -> Iterator[pa.Table]:
    size = -(-ROW_GROUP_ROWS // len(LOCATIONS)) * len(LOCATIONS)
    ends = [*range(0, len(rows), size), len(rows)]
    return (rows.slice(start, end - start) for start, end in pairwise(ends))


def write_file(folder: Path, runs: list[int], steps: int) -> None:
    """Write runs into one file with pyarrow and zstd; every row contains the name of its run."""
    folder.mkdir(parents=True, exist_ok=True)
    file, writer = folder / f"{runs[0]:04d}.parquet", None
    for run in runs:
        rows = rows_of(run, steps).drop_columns(["position"])
        rows = rows.add_column(0, "run", pa.array([str(run)] * len(rows)).dictionary_encode())
        writer = writer or pq.ParquetWriter(file, rows.schema, compression="zstd")
        writer.write_table(rows, row_group_size=122_880)
    assert writer is not None
    writer.close()


def write_layout(layout: str, folder: Path, runs: int, steps: int) -> None:
    """Write all runs in one layout, on all cores."""
    with ProcessPoolExecutor() as pool:
        if layout == "runs":
            futures = [pool.submit(write_run, folder, run, steps) for run in range(runs)]
        else:
            count = runs if layout == "one file per run" else 8
            groups = [group.tolist() for group in np.array_split(np.arange(runs), count)]
            futures = [pool.submit(write_file, folder / "stats", group, steps) for group in groups]
            frame = pd.DataFrame([{"run": str(run), **overrides_of(run)} for run in range(runs)])
            folder.mkdir(parents=True, exist_ok=True)
            frame.to_parquet(folder / "runs.parquet")
        for future in futures:
            future.result()


def query_sweep(folder: Path, query: str, run: str) -> pd.DataFrame:
    """Query the folder of the sweep with `sql`."""
    words = {"run_condition": f"run = '{run}' and", "run": "run", "norm": '"hooks.tame.norm"', "join": ""}
    return load(folder).sql(QUERIES[query].format(**words))


def query_run(folder: Path, query: str, run: str) -> pd.DataFrame:
    """Query the folder of the selected run with `sql`."""
    return load(folder / run).sql(QUERIES[query].format(run_condition="", run="", norm="", join=""))


def query_joined(folder: Path, query: str, run: str) -> pd.DataFrame:
    """Query the folder of the sweep with `sql`, and join the table `runs` for the overrides."""
    words = {
        "run_condition": f"run = '{run}' and",
        "run": "run",
        "norm": 'r."hooks.tame.norm"',
        "join": "join runs r using (run)",
    }
    return load(folder).sql(QUERIES[query].format(**words))


def query_lazy(folder: Path, query: str, run: str) -> pd.DataFrame:
    """Query the folder of the sweep with `lazy`, which returns a polars frame."""
    return _polars(load(folder).lazy("stats"), query, run, None)


def query_duckdb(folder: Path, query: str, run: str) -> pd.DataFrame:
    """Query the files of a direct layout with DuckDB."""
    import duckdb

    words = {"run_condition": f"run = '{run}' and", "run": "run", "norm": 'r."hooks.tame.norm"'}
    join = f"join '{folder}/runs.parquet' r using (run)"
    with duckdb.connect() as connection:
        connection.execute(f"create view stats as select * from '{folder}/stats/*.parquet'")
        return connection.execute(QUERIES[query].format(**words, join=join)).df()


def query_polars(folder: Path, query: str, run: str) -> pd.DataFrame:
    """Query the files of a direct layout with polars."""
    import polars as pl

    return _polars(
        pl.scan_parquet(folder / "stats" / "*.parquet"), query, run, pl.scan_parquet(folder / "runs.parquet")
    )


def _polars(rows: Any, query: str, run: str, runs: Any) -> pd.DataFrame:
    import polars as pl

    of_run = pl.col("run") == run
    number = list(QUERIES).index(query)
    if number == 0:
        condition = (
            of_run & (pl.col("layer") == "encoder.3.2") & (pl.col("hook") == "gradients") & (pl.col("path") == "weight")
        )
        answer = rows.filter(condition).select("step", "l2").sort("step")
    elif number == 1:
        aggregates = [pl.col("l2").mean().alias("mean"), pl.col("abs_max").max().alias("largest")]
        answer = rows.filter(of_run).group_by("layer", "hook").agg(aggregates)
    elif number == 2:
        answer = (
            rows.filter(pl.col("kind") == "parameter_grad")
            .select("run", "layer", "path", "step", "l2")
            .top_k(1, by="l2")
        )
    else:
        rows = rows.filter(pl.col("hook") == "activations")
        rows = rows if runs is None else rows.with_columns(pl.col("run").cast(str)).join(runs, on="run")
        aggregates = [pl.col("l2").mean().alias("mean"), pl.col("abs_max").max().alias("largest")]
        answer = rows.group_by(pl.col("hooks.tame.norm").alias("norm"), "layer").agg(aggregates)
    frame = answer.with_columns(pl.col(pl.Categorical).cast(str)).collect(engine="streaming").to_pandas()
    return frame.sort_values(list(frame.columns[:2])) if number in (1, 3) else frame


Query = Callable[[Path, str, str], pd.DataFrame]
READERS: dict[str, tuple[str, Query, tuple[int, ...]]] = {
    "instrument, folder of the run": ("runs", query_run, (0, 1)),
    "instrument, folder of the sweep": ("runs", query_sweep, (0, 1, 2, 3)),
    "instrument, table `runs`": ("runs", query_joined, (3,)),
    "instrument, `run.lazy`": ("runs", query_lazy, (0, 1, 2, 3)),
    "DuckDB, one file per run": ("one file per run", query_duckdb, (0, 1, 2, 3)),
    "polars, one file per run": ("one file per run", query_polars, (0, 1, 2, 3)),
    "DuckDB, eight files": ("eight files", query_duckdb, (0, 1, 2, 3)),
    "polars, eight files": ("eight files", query_polars, (0, 1, 2, 3)),
}


def run_query(reader: str, folder: Path, query: str, run: str) -> None:
    """Run a query and print its seconds, its peak memory in MB and its answer. Called in a new process."""
    import duckdb  # noqa: F401
    import polars  # noqa: F401

    start = time.perf_counter()
    answer = READERS[reader][1](folder, query, run)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = [
        [round(c, 9) if isinstance(c, float) else c for c in row] for row in answer.astype(object).to_numpy().tolist()
    ]
    print(json.dumps({"seconds": seconds, "peak": peak, "rows": rows}))


def drop_from_cache(folder: Path) -> None:
    """Ask the system to drop the files of a folder from its page cache."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(reader: str, folder: Path, query: str, run: str, repeats: int) -> tuple[dict[str, float], Any]:
    """Return the seconds of the cold and the warm query with the peak memory in MB, and the answer."""
    drop_from_cache(folder)
    results = []
    for _ in range(repeats):
        command = [sys.executable, "-W", "ignore", __file__, "--run-query", reader, str(folder), query, run]
        results.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    warm = min(result["seconds"] for result in results[1:])
    return {"cold": results[0]["seconds"], "warm": warm, "peak": max(result["peak"] for result in results)}, results[0][
        "rows"
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run-query", nargs=4, metavar=("READER", "FOLDER", "QUERY", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_query is not None:
        reader, folder, query, run = options.run_query
        return run_query(reader, Path(folder), query, run)
    steps = max(1, options.rows // options.runs // len(LOCATIONS))
    run = str(min(SELECTED_RUN, options.runs - 1))
    packages = ", ".join(f"{name} {version(name)}" for name in ("duckdb", "polars", "pyarrow", "numpy"))
    print(
        f"{options.runs * steps * len(LOCATIONS):,} rows of {options.runs:,} runs; {os.cpu_count()} cores; {packages}\n",
        flush=True,
    )
    print("| query | source | cold, s | warm, s | peak memory, MB |\n|---|---|---|---|---|", flush=True)
    answers: dict[str, Any] = {}
    sizes: list[str] = []
    for layout in dict.fromkeys(layout for layout, _, _ in READERS.values()):
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "sweep"
            start = time.perf_counter()
            write_layout(layout, folder, options.runs, steps)
            size = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
            sizes.append(f"{layout}: {size / 1e9:.2f} GB, written in {time.perf_counter() - start:.0f} s")
            for reader, (source_layout, _, numbers) in READERS.items():
                for query in (list(QUERIES)[number] for number in numbers if source_layout == layout):
                    figures, rows = measure(reader, folder, query, run, options.repeats)
                    assert answers.setdefault(query, rows) == rows or _are_close(answers[query], rows), (
                        reader,
                        query,
                    )
                    print(
                        f"| {query} | {reader} | {figures['cold']:.2f} | {figures['warm']:.2f} | {figures['peak']:.0f} |",
                        flush=True,
                    )
            shutil.rmtree(folder)
    print("\n" + "\n".join(sizes))
    return None


def _are_close(first: Any, second: Any) -> bool:
    """Return whether two answers are equal except for the rounding of sums."""
    left, right = pd.DataFrame(first), pd.DataFrame(second)
    return left.shape == right.shape and all(
        np.allclose(left[name], right[name], rtol=1e-9)
        if left[name].dtype == float
        else (left[name] == right[name]).all()
        for name in left
    )


if __name__ == "__main__":
    main()
