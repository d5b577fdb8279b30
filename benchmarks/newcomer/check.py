"""Check the files of the newcomer jobs: `python benchmarks/newcomer/check.py FOLDER [JOB ...]`. README.md has the jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

import instrument

Check = Callable[[Path], None]


def answer(folder: Path, name: str) -> object:
    """Return an entry of `answer.json`."""
    return json.loads((folder / "answer.json").read_text())[name]


def own_model(folder: Path) -> None:
    rows = instrument.load(folder / "run").stats.query("kind == 'forward'")
    assert {"0", "1", "2"} <= {*rows["layer"]}, f"layers {sorted({*rows['layer']})} were recorded, not 0, 1 and 2"
    assert {*rows["step"]} == {*range(20)}, "not every one of 20 steps was recorded"
    assert rows["std"].notna().all(), "the standard deviation is missing"
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG"), "plot.png is no PNG"


def find_nan(folder: Path) -> None:
    assert len(instrument.load(folder / "run").stats), "the run has no statistics"
    given = (answer(folder, "step"), str(answer(folder, "layer")))
    assert given == (6, "2"), f"the answer is step 6 at layer 2, not {given}"


def sweep(folder: Path) -> None:
    runs = instrument.load(folder / "runs")
    jobs = runs.runs
    assert len(jobs) == 6, f"{len(jobs)} jobs instead of 6"
    assert {*jobs["status"]} == {"done"}, f"the states are {sorted({*jobs['status']})}"
    last = runs.metrics.query("phase == 'train'").groupby("run").tail(1)
    best = last.astype({"optimizer.lr": float}).groupby("optimizer.lr")["loss"].mean().idxmin()
    assert answer(folder, "lr") == best, f"the best learning rate is {best}, not {answer(folder, 'lr')}"


def hf_trainer(folder: Path) -> None:
    run = instrument.load(folder / "run")
    assert run.info["status"] == "done", f"the status is {run.info['status']}"
    for kind in ("forward", "parameter_grad"):
        rows = run.stats.query("kind == @kind")
        assert {*rows["step"]} == {0, 1, 2, 3}, f"the rows of kind {kind} have the steps {sorted({*rows['step']})}"


def probe(folder: Path) -> None:
    features, *_ = instrument.load(folder / "run").features(str(answer(folder, "layer")))
    given = np.load(folder / "features.npy")
    assert len(given) >= 100, f"{len(given)} samples instead of at least 100"
    np.testing.assert_allclose(given, features[: len(given)], rtol=1e-5, err_msg="features.npy is not that of the run")
    accuracy = answer(folder, "accuracy")
    assert isinstance(accuracy, float), f"the accuracy {accuracy} is no fraction"
    assert 0.8 <= accuracy <= 1, f"the accuracy is {accuracy}"


def compare(folder: Path) -> None:
    first = instrument.diff(folder / "a", folder / "b").first
    assert first is not None, "the runs do not differ"
    assert answer(folder, "step") == first.step, f"the first difference is at step {first.step}"


def ci(folder: Path) -> None:
    for name, expected in (("healthy", 0), ("broken", 4)):
        instrument.load(folder / name)
        code = subprocess.run(["bash", "check.sh", name], cwd=folder, capture_output=True, check=False).returncode
        assert code == expected, f"check.sh {name} exits with {code} instead of {expected}"


def tables(folder: Path) -> None:
    assert "import instrument" not in (folder / "read.py").read_text(), "read.py imports instrument"
    given = pd.read_csv(folder / "l2.csv", dtype={"layer": str}, keep_default_na=False).set_index("layer")["l2"]
    expected = instrument.load(folder / "run").stats.astype({"layer": str}).groupby("layer")["l2"].mean()
    assert given.to_dict().keys() == expected.to_dict().keys(), "l2.csv has other layers than the run"
    np.testing.assert_allclose(given[expected.index], expected, rtol=1e-5, err_msg="l2.csv has other values")


JOBS: dict[str, Check] = {
    check.__name__: check for check in (own_model, find_nan, sweep, hf_trainer, probe, compare, ci, tables)
}


def main(folder: Path, *names: str) -> int:
    """Print the result of each job, and return 1 if a job fails."""
    failed = 0
    for name in names or JOBS:
        result = "pass"
        try:
            JOBS[name](folder / name)
        except Exception as error:  # whatever the files contain
            failed += 1
            result = f"fail  {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        print(f"{name:<11}{result}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
