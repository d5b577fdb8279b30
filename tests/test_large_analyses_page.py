"""docs/guides/large_analyses.md: DuckDB, Ray Data, Dask and Spark give the result of pandas on a million rows."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from conftest import REPOSITORY
from waiting import TIMEOUT

BENCHMARK = REPOSITORY / "benchmarks" / "scale.py"
ENGINES = REPOSITORY / ".engines" / "bin" / "python"  # created by `make test-all`
PAGE = (REPOSITORY / "docs" / "guides" / "large_analyses.md").read_text()
BLOCKS = dict(re.findall(r"^## (\S+).*?\n```python\n(.*?)^```", PAGE, re.M | re.S))
RUNS, STEPS = 10, 1000  # with 100 rows per step
# The dashboard of Ray is ten more processes, and runs no query.
STARTS = {"Ray": "import ray\nray.init('local', include_dashboard=False)\n"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a sweep of a million rows."""
    specification = importlib.util.spec_from_file_location("scale", BENCHMARK)
    assert specification is not None
    assert specification.loader is not None
    scale = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARK.parent))
        specification.loader.exec_module(scale)
    folder = tmp_path_factory.mktemp("large")
    for run in range(RUNS):
        scale.write_run(folder / "runs" / "big" / "sweep", run, STEPS)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> pd.DataFrame:
    """The result of the query of the page, computed by pandas."""
    files = sorted(folder.glob("runs/big/sweep/*/stats/part-*.parquet"))
    rows = pd.concat(pd.read_parquet(file, columns=["layer", "kind", "l2"]) for file in files)
    assert len(rows) == 1_000_000
    groups = rows[rows["kind"] == "parameter_grad"].astype({"layer": str}).groupby("layer")["l2"]
    return groups.agg(largest="max", rows="size").reset_index()


@pytest.mark.parametrize("engine", ["DuckDB", "Ray", "Dask", "Spark"])
def test_engine_gives_the_result_of_pandas(folder: Path, expected: pd.DataFrame, engine: str) -> None:
    python = sys.executable
    if engine in ("Dask", "Spark"):
        python = str(ENGINES)
        if not ENGINES.exists() or (engine == "Spark" and shutil.which("java") is None):
            pytest.skip("requires the environment .engines of `make test-all`, and Java for Spark")
    script = folder / f"{engine}.py"
    script.write_text(STARTS.get(engine, "") + BLOCKS[engine] + f"result.to_csv('{engine}.csv', index=False)\n")
    done = subprocess.run(
        [python, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = pd.read_csv(folder / f"{engine}.csv").sort_values("layer", ignore_index=True)
    pd.testing.assert_frame_equal(result, expected, check_dtype=False, rtol=0, atol=0)
