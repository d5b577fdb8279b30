"""The checks of `benchmarks/newcomer/`: they accept solutions of three jobs, and refuse wrong ones and an empty folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import duckdb
import pytest
import torch
from conftest import REPOSITORY, load_module
from torch import nn

import instrument

FOLDER = REPOSITORY / "benchmarks" / "newcomer"
check = load_module("newcomer_check", FOLDER / "check.py")


def train(out: Path, lr: float = 0.1) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    hooks = {"outputs": {"layers": "**", "kind": "forward", "action": "record"}}
    with instrument.attach(model, hooks, optimizer=optimizer, out=out, rules=None) as probe:
        for step in range(10):
            if step == 6 and out.parent.name == "find_nan":
                model[2].bias.data[3] = float("nan")
            loss = model(torch.randn(16, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Solutions of three jobs, as a newcomer makes them."""
    folder = tmp_path_factory.mktemp("solved")
    for out, lr in (("find_nan/run", 0.01), ("compare/a", 0.1), ("compare/b", 0.2), ("tables/run", 0.1)):
        train(folder / out, lr)
    rows = instrument.load(folder / "find_nan/run").stats.query("nan_count > 0").iloc[0]
    (folder / "find_nan/answer.json").write_text(json.dumps({"step": int(rows["step"]), "layer": rows["layer"]}))
    (folder / "compare/answer.json").write_text('{"step": 1}')  # the first outputs after a step of the optimizer
    query = f"copy (select layer, avg(l2) as l2 from '{folder}/tables/run/stats/*.parquet' group by layer) to '{folder}/tables/l2.csv'"
    duckdb.sql(query)
    (folder / "tables/read.py").write_text(query)
    return folder


@pytest.mark.slow
def test_solutions_pass(solved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(solved, "find_nan", "compare", "tables") == 0
    assert re.findall(r"\w+ +pass", capsys.readouterr().out) == [
        "find_nan   pass",
        "compare    pass",
        "tables     pass",
    ]


@pytest.mark.slow
def test_wrong_answer_fails(solved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "compare").mkdir()
    for name in ("a", "b"):
        (tmp_path / "compare" / name).symlink_to(solved / "compare" / name)
    (tmp_path / "compare/answer.json").write_text('{"step": 0}')
    assert check.main(tmp_path, "compare") == 1
    assert "compare    fail  AssertionError: the first difference is at step 1" in capsys.readouterr().out


def test_every_job_of_an_empty_folder_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(tmp_path) == 1
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [[job, "fail"] for job in check.JOBS]
    assert re.findall(r"^## (\w+)$", (FOLDER / "README.md").read_text(), re.M) == [*check.JOBS]
