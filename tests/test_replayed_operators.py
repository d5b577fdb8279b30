"""`python -m instrument.replay RUN --steps N --ops`, and the comparison of two such replays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Call, finished, replay_in
from distributed_runs import run_processes

import instrument
from instrument.commands.diff import main

SMALL = ("model=mlp", "data=digits", "train.steps=3", "train.eval_every=0", "quiet=true", "device=cpu")
OPS = ("--steps", "2", "--ops")
SOFTMAX = """
import sys, torch, instrument
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Softmax(-1))
with instrument.attach(model, {}, out=sys.argv[1]) as probe:
    with probe.record_operators():
        model(torch.rand(32, 1000) * 10)
    probe.end_step()
"""


def test_a_repeated_step_has_equal_operators(tmp_path: Path, call: Call) -> None:
    finished(tmp_path / "run", *SMALL)
    for name in ("once", "twice"):
        out = replay_in(tmp_path, "run", *OPS, f"hydra.run.dir={name}").expect(0).out
    rows = instrument.load(tmp_path / "once").operators
    assert f"operators    {rows['number'].nunique()} calls, in the table operators\n" in out
    assert {*rows["step"]} == {2}
    assert instrument.load(tmp_path / "once").info["replay"]["operators"] is True
    assert [*rows[rows["operator"] == "aten.addmm.default"]["layer"]] == ["layers.0.0", "layers.1.0", "layers.2"]
    assert rows[rows["part"] == "loop"]["source"].str.startswith("instrument/tasks/supervised.py:").any()
    out = call(main, tmp_path / "once", tmp_path / "twice").expect(0).out
    assert "compared: operators, step 2" in out
    assert f"EQUAL BITS: {rows['fingerprint'].notna().sum()} outputs of operators are equal" in out


@pytest.mark.slow
def test_compiled_code_is_compared_at_its_operators(tmp_path: Path, call: Call) -> None:
    for name, compiled in (("eager", "false"), ("compiled", "true")):
        finished(tmp_path / name, *SMALL, "hooks=activations", "hooks.activations.every=1", f"train.compile={compiled}")
        replay_in(tmp_path, name, *OPS, f"hydra.run.dir={name}_ops").expect(0)
    rows = instrument.load(tmp_path / "compiled_ops").operators
    assert {"aten.addmm.default", "aten.mm.default", "aten.relu.default"} <= {*rows["operator"]}
    assert "aten.mm.out" not in {*rows["operator"]}
    assert all(name.startswith("aten.") for name in rows["operator"].unique()), "no copies of the order of hooks"
    out = call(main, tmp_path / "eager_ops", tmp_path / "compiled_ops").expect(0).out
    assert "first operator that differs" in out
    operators = instrument.diff(tmp_path / "eager_ops", tmp_path / "compiled_ops").operators
    assert operators is not None
    assert operators.compared > 50
    assert operators.above is None


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="the processor has no vector instructions"
)
def test_other_kernels_of_the_processor_are_named(tmp_path: Path) -> None:
    for name, chosen in (("vector", {}), ("scalar", {"ATEN_CPU_CAPABILITY": "default"})):
        command = [sys.executable, "-c", SOFTMAX, name]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **chosen}, timeout=200, check=True)
    operators = instrument.diff(tmp_path / "vector", tmp_path / "scalar").operators
    assert operators is not None
    assert operators.unmatched == (0, 0)
    assert operators.first is not None
    assert operators.first.a["operator"] == "aten._softmax.default"
    assert operators.first.a["inputs"] == operators.first.b["inputs"]
    assert operators.above is None


@pytest.mark.slow
def test_one_process_is_compared_with_two(tmp_path: Path, call: Call) -> None:
    for processes in (1, 2):
        parallel = ["train.parallel=ddp"] if processes > 1 else []
        for arguments, module in (
            ([*SMALL, *parallel, f"hydra.run.dir=run{processes}"], "instrument"),
            ([f"run{processes}", "--steps", "0", "--ops", f"hydra.run.dir=ops{processes}"], "instrument.replay"),
        ):
            done = run_processes(tmp_path, *arguments, processes=processes, module=module)
            assert done.returncode == 0, done.stderr
    answer = call(main, tmp_path / "ops1", tmp_path / "ops2").expect(0)
    assert " outputs of operators follow a relation of the processes" in answer.out
    operators = instrument.diff(tmp_path / "ops1", tmp_path / "ops2").operators
    assert operators is not None
    assert operators.compared > 40
