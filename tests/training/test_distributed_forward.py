"""`mode: forward`, the probe batch and saved weights in several processes, compared with a single process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from distributed_runs import run_processes, train
from state_comparison import identical
from tiers import tiered
from torch import nn

import instrument
from instrument.errors import ConfigError
from instrument.training.checkpoint import Checkpoints
from instrument.training.distributed.strategies import FullySharded

KEYS = ["step", "phase", "hook", "layer", "kind", "role", "path"]
VALUES = ["numel", "mean", "std", "min", "max", "l2"]
COMMON = ["model=mlp", "model.sizes=[64,16,10]", "data=digits", "data.slice.stop=50", "train.batch_size=20"]
FORWARD = [
    *COMMON,
    "mode=forward",
    "forward.grad=true",
    "train.checkpoint.every=2",
    '+hooks.seen={layers: "**", kind: forward, action: record}',
    '+hooks.flow={layers: "**", kind: full_backward, action: record}',
    '+hooks.sums={layers: "**", kind: post_accumulate_grad, action: record, tensors: true}',
    '+hooks.called={layers: "**", kind: function, functions: "*", action: record}',
    '+hooks.arriving={layers: "**", kind: function_grad, functions: "*", action: record}',
]
TRAINING = [*COMMON, "train.steps=3", "optimizer=adam", "train.save=true", "train.checkpoint.every=3"]
PROBED = [
    "data.probe_batch=7",
    '+hooks.flow={layers: "**", kind: full_backward, action: record, phase: probe}',
    '+hooks.sums={layers: "**", kind: post_accumulate_grad, action: record, phase: probe}',
]
PARALLEL = tiered(["ddp", "fsdp2"], ["fsdp2"])


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., instrument.Run]:
    """Function that runs a command in one process, or in two with `parallel`, once for all tests."""
    folder = tmp_path_factory.mktemp("runs")
    done: dict[tuple[str, ...], instrument.Run] = {}

    def run(*arguments: str, parallel: str | None = None) -> instrument.Run:
        more = () if parallel is None else (f"train.parallel={parallel}", "reduce=global")
        command = (*arguments, *more)
        if command not in done:
            done[command] = train(folder, f"run{len(done)}", *command, processes=1 if parallel is None else 2)
        return done[command]

    return run


def rows_of(run: instrument.Run, phase: str, *hooks: str) -> pd.DataFrame:
    rows = run.stats[(run.stats.phase == phase) & run.stats.hook.isin(hooks)]
    return rows.sort_values(KEYS)[[*KEYS, *VALUES]].reset_index(drop=True)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_forward_in_two_processes_equals_one_process(executed: Callable[..., instrument.Run], parallel: str) -> None:
    one, two = executed(*FORWARD), executed(*FORWARD, parallel=parallel)
    hooks = ["seen", "flow", "called", "arriving"]
    hooks += ["sums"] if parallel == "fsdp2" else []  # ddp: gradients of each process
    assert {*hooks} <= {*two.stats.hook}
    pd.testing.assert_frame_equal(
        rows_of(one, "forward", *hooks), rows_of(two, "forward", *hooks), rtol=1e-4, atol=1e-6, check_dtype=False
    )
    assert list(one.metrics.step) == list(two.metrics.step) == [0, 1, 2]
    for name in ("loss", "accuracy"):
        assert two.metrics[name].tolist() == pytest.approx(one.metrics[name].tolist(), rel=1e-5)
        assert two.info["metrics"][name] == pytest.approx(one.info["metrics"][name], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_values_of_samples_are_found_by_id(executed: Callable[..., instrument.Run], parallel: str) -> None:
    kept = "+hooks.kept={layers: layers.0, kind: forward, action: record, tensors: true}"
    source = executed(*COMMON, "mode=forward", kept)
    fields = f"layers: layers.0, kind: forward, action: modify, fn: replace, run: {source.path}, match: id"
    changed = [*COMMON, "seed=3", "train.steps=2", f"+hooks.put={{{fields}}}", kept]
    found = executed(*changed, "train.batch_size=16", parallel=parallel)
    wanted, values = source.features("layers.0"), found.features("layers.0")
    assert len(values.ids) == 32
    np.testing.assert_array_equal(values.X, wanted.X[np.searchsorted(wanted.ids, values.ids)])


@pytest.mark.slow
def test_parameter_gradients_of_forward_are_those_of_each_process(executed: Callable[..., instrument.Run]) -> None:
    one, two = executed(*FORWARD), executed(*FORWARD, parallel="ddp")
    rows = two.stats[two.stats.hook == "sums"]
    assert (set(rows["rank"]), set(rows["scope"])) == ({0, 1}, {"local"})
    where = ["step", "layer", "path"]
    expected = one.tensors(hook="sums").set_index(where)["values"]
    found = two.tensors(hook="sums").groupby(where)["values"].sum()  # over the processes
    assert len(expected) == len(found) == 3 * 4
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_probe_batch_does_not_change_a_distributed_training(
    executed: Callable[..., instrument.Run], parallel: str
) -> None:
    without, probed = executed(*TRAINING, parallel=parallel), executed(*TRAINING, *PROBED, parallel=parallel)
    for rank in (0, 1):
        one, other = (Checkpoints(run.path).load(rank) for run in (without, probed))
        for name in ("model", "optimizer", "buffers", "random", "batches"):
            assert identical(one[name], other[name]), (rank, name)
    single = executed(*TRAINING, *PROBED)
    pd.testing.assert_frame_equal(
        rows_of(single, "probe", "flow"), rows_of(probed, "probe", "flow"), rtol=1e-3, atol=1e-5, check_dtype=False
    )
    loss = [run.metrics[run.metrics.phase == "probe"].loss.tolist() for run in (single, probed)]
    assert loss[1] == pytest.approx(loss[0], rel=1e-4)
    assert len(loss[1]) == 4


@pytest.mark.parametrize("parallel", tiered(["ddp", "fsdp2"], ["fsdp2"]))
def test_weights_of_a_distributed_run_are_complete(executed: Callable[..., instrument.Run], parallel: str) -> None:
    trained = executed(*TRAINING, parallel=parallel).path
    single = torch.load(executed(*TRAINING).path / "weights.pt", weights_only=True)
    saved = torch.load(trained / "weights.pt", weights_only=True)
    assert saved.keys() == single.keys()
    for name, tensor in single.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-3, atol=1e-5)
    again = [*COMMON, "mode=forward", "train.save=true"]
    one = executed(*again, f"init_from={trained}")
    assert identical(torch.load(one.path / "weights.pt", weights_only=True), saved)
    two = executed(*again, f"init_from={trained}", parallel=parallel)
    assert identical(torch.load(two.path / "weights.pt", weights_only=True), saved)
    (trained / "weights.pt").rename(trained / "moved.pt")  # The checkpoint remains, with the shards of both processes.
    try:
        of_checkpoint = executed(*again, f"init_from={trained}", "seed=3")
        assert identical(torch.load(of_checkpoint.path / "weights.pt", weights_only=True), saved)
    finally:
        (trained / "moved.pt").rename(trained / "weights.pt")


@pytest.mark.slow
def test_forward_is_resumed_in_two_processes(executed: Callable[..., instrument.Run], tmp_path: Path) -> None:
    whole = executed(*FORWARD, parallel="ddp")
    command = [*FORWARD, "train.parallel=ddp", "reduce=global", "hydra.run.dir=stopped"]
    code = f"""
import sys
from training_runs import failing_after
from instrument.__main__ import main
sys.argv = ["instrument", *{command!r}]
with failing_after(2, "loop.forward_step"):
    main()
"""
    (tmp_path / "stopped.py").write_text(code)
    assert run_processes(tmp_path, processes=2, module=tmp_path / "stopped.py").returncode != 0
    assert len(instrument.load(tmp_path / "stopped").metrics) == 2
    resumed = run_processes(tmp_path, "resume=stopped", processes=2)
    assert resumed.returncode == 0, resumed.stderr
    run = instrument.load(tmp_path / "stopped")
    pd.testing.assert_frame_equal(whole.stats, run.stats, check_exact=True)
    assert run.info["metrics"]["loss"] == whole.info["metrics"]["loss"]


def test_sharding_a_model_without_parameters_is_refused() -> None:
    strategy = object.__new__(FullySharded)  # There is no process group.
    with pytest.raises(ConfigError, match="the model has no parameters to shard"):
        strategy.shard(nn.ReLU(), lambda: None)
