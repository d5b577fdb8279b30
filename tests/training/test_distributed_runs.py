"""Distributed runs: equality with a single process, one run folder, and detection of dead ranks."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed_runs
import pandas as pd
import pytest
import torch
from distributed_loop import INTEGERS
from distributed_runs import assert_close, matched
from tiers import tiered
from training_runs import CONFIG

import instrument
from instrument.config.parse import parse_config
from instrument.errors import ConfigError
from instrument.training.distributed.strategies import DataParallel, FullySharded, Strategy, choose_strategy
from instrument.training.loader import BatchShard, Loader, LoaderOptions, check_batch_size

HERE = Path(__file__).parent
KEYS = ["step", "micro_step", "phase", "hook", "layer", "kind", "role", "path", "call"]
COUNTS = ["numel", "nan_count", "inf_count", "zero_fraction", "dead_fraction", "saturated_fraction"]
VALUES = ["mean", "std", "rms", "min", "max", "abs_max", "l1", "l2", "update_ratio"]
EXPERIMENT = """
# @package _global_
defaults:
  - override /model: mlp
  - override /data: digits
  - _self_
name: ranked
model: {sizes: [64, 32, 16, 10]}
train: {steps: 2, batch_size: 50, accumulate: 2, eval_every: 1, eval_batch_size: 50}
data: {slice: {stop: 110}, eval_slice: {stop: 120}}
hooks:
  seen:     {layers: "**", kind: forward, action: record, stats: [default, l1, dead_fraction], histogram: 32, quantiles: [0.25, 0.5]}
  evaluated: {layers: "**", kind: forward, action: record, phase: eval}
  flowing:  {layers: "**", kind: tensor, action: record}
  used:     {layers: "**", kind: parameter_grad, action: record}
  sums:     {layers: "**", kind: post_accumulate_grad, action: record, stats: [l2]}
  moved:    {layers: "**", kind: step_post, role: update, action: record, stats: [default, update_ratio]}
  weights:  {layers: "**", kind: step_post, role: param, action: record, stats: [default, dead_fraction], spectrum: 12}
  routed:   {layers: "layers.*", kind: forward, action: record, stats: [softmax_entropy, z_loss], spectrum: 5, experts: 2}
  casted:   {layers: "layers.**", kind: forward, action: record, stats: none, cast: {to: float8_e4m3fn, scale: 0.01}}
  blocks:   {layers: "layers.**", kind: step_post, role: param, params: weight, action: record, stats: none, cast: mxfp8_e4m3}
  tame:     {layers: "layers.1.**", kind: parameter_grad, action: clip, norm: 0.05}
  each:     {layers: "layers.2", kind: parameter_grad, action: clip, quantile: 0.9}
  quiet:    {layers: "layers.1", kind: full_backward, action: scale, factor: 0.5}
  called:   {layers: "layers.**", types: Linear, kind: function, functions: linear, action: record, stats: [default, l1]}
  arriving: {layers: "layers.**", types: Linear, kind: function_grad, functions: linear, action: record, stats: [default, l1]}
  damped:   {layers: "layers.1.0", kind: function, functions: linear, action: scale, factor: 0.9, when: {stat: l2, above: 0}}
  rare:     {layers: "layers.1.0", kind: forward, action: scale, factor: 0.9, when: {stat: l2, above: 1.0e+6}}
  halved:   {layers: "layers.2", kind: function_grad, functions: linear, action: scale, factor: 0.5}
  noisy:    {layers: "layers.0.0", kind: step_post, role: param, action: modify, fn: noise, std: 0.001}
"""


def write_experiment(folder: Path) -> None:
    (folder / "conf" / "exp").mkdir(parents=True, exist_ok=True)
    (folder / "conf" / "exp" / "ranked.yaml").write_text(EXPERIMENT.lstrip())


def run_experiment(
    folder: Path,
    *arguments: str,
    processes: int = 1,
    launcher: Callable[..., subprocess.CompletedProcess[str]] = distributed_runs.run_processes,
) -> subprocess.CompletedProcess[str]:
    """Run the experiment in a folder."""
    write_experiment(folder)
    return launcher(folder, *arguments, processes=processes)


VARIANTS = {
    "one": (1, []),
    "ddp2": (2, ["train.parallel=ddp", "reduce=global"]),
    "ddp4": (4, ["train.parallel=ddp", "reduce=global"]),
    "fsdp2": (2, ["train.parallel=fsdp2", "reduce=global"]),
    "fsdp4": (4, ["train.parallel=fsdp2", "reduce=global"]),
    "apart": (2, ["train.parallel=ddp"]),
    "shards": (2, ["train.parallel=fsdp2"]),
}
COMMANDS = {"ddp2", "shards"}  # started with the command line, `shards` by torchrun; the others without it
MERGED = tiered(["ddp2", "ddp4", "fsdp2", "fsdp4"], ["ddp2", "fsdp2"])


class Runs(dict[str, instrument.Run]):
    """Runs of the same experiment in one or several processes, each trained at its first access."""

    def __init__(self, folder: Path, device: str) -> None:
        super().__init__()
        self.folder, self.device = folder, device

    def __missing__(self, variant: str) -> instrument.Run:
        processes, arguments = VARIANTS[variant]
        if self.device == "cuda" and processes > torch.cuda.device_count():
            pytest.skip("fewer GPUs than processes")
        more = ("+exp=ranked", f"device={self.device}", *arguments)
        if variant in COMMANDS:
            launcher = distributed_runs.torchrun if variant == "shards" else distributed_runs.run_processes
            done = run_experiment(
                self.folder, *more, f"hydra.run.dir={variant}", processes=processes, launcher=launcher
            )
            assert done.returncode == 0, done.stderr
            assert "warning" not in done.stdout, done.stdout
            self[variant] = instrument.load(self.folder / variant)
        else:
            write_experiment(self.folder)
            self[variant] = distributed_runs.train(self.folder, variant, *more, processes=processes)
        return self[variant]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp(f"ranks-{request.param}"), request.param)


def side_by_side(runs: Runs, variant: str, table: str, keys: list[str]) -> pd.DataFrame:
    one, other = getattr(runs["one"], table), getattr(runs[variant], table)
    if table != "metrics":
        one, other = (frame[frame["hook"] != "sums"] for frame in (one, other))
    return matched(one, other, keys)


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", MERGED)
def test_reduced_statistics_equal_a_single_process(runs: Runs, variant: str) -> None:
    both = side_by_side(runs, variant, "stats", KEYS)
    assert set(both["rank_there"]) == {0}
    for name in (*COUNTS, *VALUES):
        here, there = both[name], both[f"{name}_there"]
        assert (here.isna() == there.isna()).all(), name
    for name in VALUES:
        # The trainings differ in the last bits of float32, because sums have another order.
        scale = both["abs_max"] if name in ("min", "max", "mean") else both[name].abs()
        off = (both[name] - both[f"{name}_there"]).abs()
        assert (off.dropna() <= 1e-5 * scale[off.notna()] + 1e-12).all(), name


@pytest.mark.spread(2)
@pytest.mark.parametrize("variant", MERGED)
def test_counts_and_extremes_are_exact(runs: Runs, variant: str) -> None:
    both = side_by_side(runs, variant, "stats", KEYS)
    assert (both["numel"] == both["numel_there"]).all()
    assert (both["module_type"] == both["module_type_there"]).all()
    first = both[(both["step"] == 0) & (both["micro_step"] == 0) & (both["hook"] == "seen")]
    assert len(first) > 5
    for name in ("numel", "nan_count", "inf_count", "dead_fraction", "min", "max", "abs_max"):
        pd.testing.assert_series_equal(first[name], first[f"{name}_there"], check_names=False)
    assert ((first["zero_fraction"] - first["zero_fraction_there"]).abs() < 1e-12).all()


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", MERGED)
def test_merged_rows_have_the_order_of_a_single_process(runs: Runs, variant: str) -> None:
    both = side_by_side(runs, variant, "stats", KEYS).sort_values("position")
    assert both.groupby(["step", "phase"])["position_there"].is_monotonic_increasing.all()


@pytest.mark.parametrize("variant", MERGED)
def test_effects_and_metrics_equal_a_single_process(runs: Runs, variant: str) -> None:
    effects = side_by_side(runs, variant, "effects", KEYS)
    assert {"tame", "each", "quiet", "noisy", "damped", "halved", "rare"} == set(effects["hook"])
    assert (effects["numel"] == effects["numel_there"]).all()
    for name in ("norm_before", "norm_after", "factor"):
        assert_close(effects, name)
    for held in (effects["held"], effects["held_there"]):
        assert set(effects["hook"][held.eq(True)]) == {"damped"}
        assert set(effects["hook"][held.eq(False)]) == {"rare"}
    metrics = side_by_side(runs, variant, "metrics", ["step", "phase"])
    for name in ("loss", "accuracy", "grad_norm", "lr"):
        assert_close(metrics, name)


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", MERGED)
def test_reduced_quantiles_and_histograms(runs: Runs, variant: str) -> None:
    both = side_by_side(runs, variant, "distributions", KEYS)
    for _, row in both.iterrows():
        assert sum(row["counts"]) == sum(row["counts_there"])
        width = row["high"] - row["low"]
        assert abs(row["low"] - row["low_there"]) <= 1e-5 * max(width, 1e-9)
        cumulative = pd.Series(row["counts"]).cumsum() / max(sum(row["counts"]), 1)
        for level, here, there in zip(row["levels"], row["quantiles"], row["quantiles_there"], strict=True):
            if width:
                near = int(min((there - row["low"]) / width * len(cumulative), len(cumulative) - 1))
                below = 0.0 if near == 0 else cumulative[near - 1]
                assert below - 0.01 <= level <= cumulative[near] + 0.01, (level, here, there)


@pytest.mark.spread(2)
@pytest.mark.parametrize("variant", MERGED)
def test_reduced_spectra(runs: Runs, variant: str) -> None:
    both = side_by_side(runs, variant, "spectra", KEYS)
    assert {len(values) for values in both["values"]} == {5, 10, 12}
    for name in ("spectral_norm", "stable_rank", "effective_rank"):
        assert_close(both, name)
    for _, row in both.iterrows():
        assert row["values_there"] == pytest.approx(row["values"], rel=1e-5)


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", MERGED)
def test_reduced_loads_of_experts(runs: Runs, variant: str) -> None:
    both = side_by_side(runs, variant, "experts", KEYS)
    assert {len(load) for load in both["load"]} == {32, 16, 10}
    for name in ("cv", "router_entropy"):
        assert_close(both, name)
    for _, row in both.iterrows():
        assert row["load_there"] == pytest.approx(row["load"], abs=1e-12)
    logits = side_by_side(runs, variant, "stats", KEYS)
    for name in ("softmax_entropy", "z_loss"):
        assert_close(logits[logits["hook"] == "routed"], name)


@pytest.mark.spread(2)
@pytest.mark.parametrize("variant", MERGED)
def test_reduced_casts(runs: Runs, variant: str) -> None:
    both = side_by_side(runs, variant, "casts", KEYS)
    assert set(both["hook"]) == {"casted", "blocks"}
    assert (both["underflow_fraction"] > 0).any()
    for name, tolerance in (("underflow_fraction", 0.01), ("overflow_fraction", 0.01), ("quantization_error", 0.0)):
        assert both[f"{name}_there"].tolist() == pytest.approx(both[name].tolist(), abs=tolerance, rel=1e-3)
    assert both["scale_there"].dropna().unique().tolist() == [pytest.approx(0.01)]
    for _, row in both[both["hook"] == "blocks"].iterrows():
        assert row["block_errors_there"][3] == pytest.approx(
            row["block_errors"][3], rel=0.1
        )  # the median, from sketches


@pytest.mark.slow
@pytest.mark.parametrize("variant", MERGED)
def test_diff_with_a_single_process_is_within_the_tolerance(runs: Runs, variant: str) -> None:
    found = instrument.diff(runs["one"], runs[variant])
    assert found.first is None, str(found)
    assert found.settings["ranks"] == ("1", variant[-1])
    # With DDP, accumulated gradients are those of one rank until the last micro-batch.
    assert set(found.layers[found.layers["rows"] == 0]["hook"]) <= {"sums"}


@pytest.mark.slow
def test_diff_with_rows_per_rank_compares_averaged_values(runs: Runs) -> None:
    found = instrument.diff(runs["one"], runs["apart"])
    assert found.first is None, str(found)
    compared = found.layers[found.layers["rows"] > 0]
    assert set(compared["hook"]) == {"used", "moved", "weights"}
    assert "rows only in B: " in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_compiled_runs_have_the_rows_of_uncompiled_ones(tmp_path: Path, parallel: str) -> None:
    small = ["model=mlp", "data=digits", "model.sizes=[64,16,10]", "train.steps=2", f"train.parallel={parallel}"]
    hooks = [
        "+hooks.seen={layers:'**',kind:forward,action:record}",
        "+hooks.flow={layers:'**',kind:full_backward,role:grad_output,action:record}",
        "+hooks.used={layers:'**',kind:parameter_grad,action:record}",
    ]
    tables = []
    for name, compiles in (("eager", "false"), ("compiled", "true")):
        more = ["reduce=global", f"train.compile={compiles}", f"hydra.run.dir={name}"]
        done = distributed_runs.run_processes(tmp_path, *small, *hooks, *more, processes=2)
        assert done.returncode == 0, done.stderr
        tables.append(instrument.load(tmp_path / name).stats)
    assert_close(matched(*tables, KEYS), "l2")


def test_distributed_run_has_one_folder(runs: Runs) -> None:
    run = runs["ddp2"]
    assert run.info["ranks"] == 2
    assert run.info["status"] == "done"
    assert not run.problems
    names = {file.name for file in (run.path / "stats").iterdir()}
    assert names == {"part-0000-000000.parquet", "part-0001-000000.parquet"}
    assert len(list((run.path / ".hydra").iterdir())) == 3
    assert len(list(run.path.glob("*.log"))) == 1
    assert len(run.layers) == run.layers["layer"].nunique()
    assert set(run.coverage["rank"]) == {0, 1}
    assert not list(run.path.glob(".lock*"))


def test_each_rank_records_its_own_rows(runs: Runs) -> None:
    stats = runs["apart"].stats
    scopes = stats.groupby("hook")["scope"].unique().map(list).to_dict()
    local = ["seen", "flowing", "sums", "evaluated", "called", "arriving", "routed"]
    averaged = ["used", "moved", "weights"]
    assert scopes == {**{hook: ["local"] for hook in local}, **{hook: ["averaged"] for hook in averaged}}
    assert set(stats["rank"]) == {0, 1}
    same = stats[stats["scope"] == "averaged"].set_index(["rank", *KEYS]).drop(columns=["scope"])
    pd.testing.assert_frame_equal(same.loc[0], same.loc[1])  # bit-identical, also after clipping and noise
    seen = stats[stats["hook"] == "seen"].set_index(["rank", *KEYS])
    assert (seen.loc[0]["mean"] != seen.loc[1]["mean"]).any()
    assert (seen.loc[0]["numel"] == seen.loc[1]["numel"]).all()


@pytest.mark.slow
def test_sharded_parameters_have_rows_per_shard(runs: Runs) -> None:
    shards, one = runs["shards"].stats, runs["one"].stats
    weights = shards[shards["hook"] == "weights"]
    assert set(weights["scope"]) == {"shard"}
    together = weights.groupby(["step", "layer", "path"]).agg(
        {"numel": "sum", "l2": lambda norms: norms.pow(2).sum() ** 0.5}
    )
    whole = one[one["hook"] == "weights"].set_index(["step", "layer", "path"])
    assert len(together) == len(whole)
    assert (together["numel"] == whole["numel"].reindex(together.index)).all()
    off = (together["l2"] - whole["l2"].reindex(together.index)).abs()
    assert (off <= 1e-5 * together["l2"]).all()
    assert set(shards[shards["hook"] == "sums"]["scope"]) == {"shard"}
    assert runs["shards"].coverage.query("hook == 'sums'").eval("fired == expected").all()


def loop(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the custom loops in two processes."""
    return distributed_runs.run_processes(
        folder.parent, str(folder), *arguments, processes=2, module=HERE / "distributed_loop.py"
    )


@pytest.mark.slow
def test_custom_distributed_loops(tmp_path: Path) -> None:
    done = loop(tmp_path)
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.splitlines()[-1])
    assert expected["none"]["bytes"] == 0
    assert expected["global"]["bytes"] / expected["global"]["tensors"] < 4096
    assert expected["refused"] == [{"taken": True, "budget": True, "reduce": True, "micro": True}] * 2
    assert len(list((tmp_path / "none" / "stats").iterdir())) == 2

    none, merged = instrument.load(tmp_path / "none"), instrument.load(tmp_path / "global")
    apart = none.stats[none.stats["hook"] == "seen"]
    global_rows = merged.stats[merged.stats["hook"] == "seen"].set_index(["step", "layer"])
    assert global_rows["shape"].isna().all()
    assert [math.prod(shape) for shape in apart["shape"]] == apart["numel"].to_list()
    assert set(apart["scope"]) == {"local"}
    assert set(global_rows["scope"]) == {"global"}
    total = apart.groupby(["step", "layer"])
    assert (total["numel"].sum() == global_rows["numel"].sort_index()).all()
    assert (total["max"].max() == global_rows["max"].sort_index()).all()
    # Numbers that are too many to be gathered: a maximum and a sum.
    reduced = instrument.load(tmp_path / "reduced").stats.set_index(["step", "layer"])
    numbers = reduced.select_dtypes("number").dropna(axis=1).columns.drop("position")
    assert {"numel", "mean", "std", "l2", "min", "max"} <= {*numbers}
    pd.testing.assert_frame_equal(reduced[numbers], global_rows[numbers], rtol=1e-12, check_like=True)
    assert len(none.metrics) == 6  # each rank has its own loss
    assert merged.stats.query("hook == 'grads'")["rank"].unique().tolist() == [0]
    # One row for values that are equal on all ranks.
    assert set(merged.stats.query("hook == 'grads'")["scope"]) == {"global"}
    assert sorted(merged.stats.query("hook == 'sums'")["rank"].unique()) == [0, 1]
    assert sorted(merged.tensors()["rank"].unique()) == [0, 1]

    assert sorted(none.tensors()["rank"].unique()) == [0, 1]  # a second run in this folder was refused

    sharded = instrument.load(tmp_path / "sharded").stats
    units = sharded[sharded["hook"] == "units"].set_index(["step", "layer", "path"])["dead_fraction"]
    assert units.index.is_unique
    assert units.loc[:, "0", "weight"].tolist() == [5 / 32] * 3
    assert units.loc[:, "2", "weight"].tolist() == [0.0] * 3
    assert set(sharded["scope"]) == {"global"}
    exact = merged.stats[merged.stats["hook"] == "grads"].set_index(["step", "layer", "path"])["l2"]
    found = sharded[sharded["hook"] == "grads"].set_index(["step", "layer", "path"])["l2"].reindex(exact.index)
    assert ((found - exact).abs() <= 1e-5 * exact).all()

    integers = instrument.load(tmp_path / "integers").stats
    for tensors, (_, row) in zip(INTEGERS, integers.iterrows(), strict=True):
        numbers = [number for tensor in tensors if tensor is not None for number in tensor.tolist()]
        extremes = [min(numbers), max(numbers), max(map(abs, numbers))]
        assert [int(row[name]) for name in ("min", "max", "abs_max")] == extremes
        assert row["dead_fraction"] == 0.0

    check_uneven_run(instrument.load(tmp_path / "uneven"))

    failed = instrument.load(tmp_path / "failed")
    assert failed.info["status"] == "failed"
    broken = failed.stats[failed.stats["hook"] == "seen"]
    assert broken.groupby("step")["scope"].unique().map(list).to_dict() == {0: ["global"], 1: ["local"]}
    assert sorted(broken[broken["step"] == 1]["rank"].unique()) == [0, 1]


def check_uneven_run(uneven: instrument.Run) -> None:
    """Check the rows of a model with a layer that only rank 0 calls."""
    assert len(uneven.stats.query("layer == 'sometimes' and hook == 'seen'")) == 3
    (event,) = uneven.events.query(
        "rule == 'ranks' and layer.isna() and rank == 0 and message.str.contains(\"'seen'\")"
    )["message"]
    assert event == "hook 'seen' recorded nothing at 'sometimes' on rank 1 in step 0, but other ranks did"

    plain = uneven.stats[uneven.stats["hook"] == "plain"].set_index(["step", "layer"])
    assert plain.index.is_unique
    assert plain["numel"].unstack().to_dict("list") == {"": [48] * 3, "always": [48] * 3, "sometimes": [24] * 3}
    exact = uneven.stats[uneven.stats["hook"] == "seen"].set_index(["step", "layer"]).reindex(plain.index)
    for name in ("mean", "std", "min", "max"):
        assert plain[name].to_list() == pytest.approx(exact[name].to_list(), rel=1e-12)


@pytest.mark.slow
def test_dead_rank_in_a_custom_loop_is_reported(tmp_path: Path) -> None:
    done = loop(tmp_path / "out", "1")
    assert done.returncode != 0
    run = instrument.load(tmp_path / "out")
    assert set(run.stats.query("scope == 'global'")["step"]) == {0}
    assert "RankError: rank 1 has ended; rank 0 cannot continue without it" in done.stderr
    assert (run.info["status"], run.info["failed_rank"]) == ("failed", 1)


@pytest.mark.slow
@pytest.mark.parametrize("processes", tiered([2, 3], [2]))
@pytest.mark.parametrize(
    ("rank", "how", "reduce"),
    [(0, "kill", "none"), pytest.param(1, "kill", "none", marks=pytest.mark.slow), (1, "raise", "global")],
)
def test_other_ranks_report_the_dead_rank(tmp_path: Path, rank: int, how: str, reduce: str, processes: int) -> None:
    done = distributed_runs.start(
        tmp_path,
        "out",
        *("data=digits", "quiet=true", "train.parallel=ddp", f"reduce={reduce}"),
        f"model={{_target_: failing_model.FailingModel, rank: {rank}, how: {how}, after: 5, passes: 2}}",
        "+hooks.seen={layers: '*', kind: forward, action: record}",
        processes=processes,
    )
    assert done.returncode != 0
    happened = "was killed" if how == "kill" else "failed with ValueError: this batch is bad"
    others = [other for other in range(processes) if other != rank]
    for other in others:
        assert f"rank {rank} {happened}; rank {other} cannot continue without it and stops" in done.stderr
    run = instrument.load(tmp_path / "out")
    assert run.info["status"] == "failed"
    assert run.info["failed_rank"] == rank
    assert not run.problems
    last = run.stats.groupby("rank")["step"].max()
    if reduce == "none":
        assert last[rank] == 4
        assert (last[others] >= 4).all()
    else:
        assert set(run.stats.query("scope == 'global'")["step"]) == {0, 1, 2, 3, 4}
        assert set(run.stats.query("scope == 'local'")["step"]) <= {5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("hooks.seen.layers=nowhere", "matches no"),  # found after the model is created
        pytest.param(
            "+hooks.own={layers: '*', kind: forward, action: modify, fn: {_target_: nowhere.at_all}}",
            "nowhere",
            marks=pytest.mark.slow,
        ),  # found after the hooks are parsed
        pytest.param(
            "optimizer={_target_: torch.optim.Adafactor, momentum: 0.9}", "TypeError", marks=pytest.mark.slow
        ),  # found when the optimizer is created
        ("train.parallel=dpd", "dpd"),  # found before the process group exists
    ],
)
def test_configuration_error_is_reported_once(tmp_path: Path, problem: str, expected: str) -> None:
    done = run_experiment(tmp_path, "+exp=ranked", "train.parallel=ddp", problem, processes=2)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if expected in line and "torchrun" not in line]
    assert len({*lines}) == len(lines) >= 1, done.stderr
    assert "cannot continue" not in done.stderr
    assert "/instrument/" not in done.stderr  # no traceback of this package
    assert not list(tmp_path.glob("runs/**/stats"))


def config(**changes: Any) -> Any:
    return parse_config({**CONFIG, **changes})


@pytest.mark.slow
def test_invalid_combination_leaves_no_folder(tmp_path: Path) -> None:
    done = run_experiment(tmp_path, "+exp=ranked", "hydra.run.dir=out", processes=2)
    assert done.returncode != 0
    assert "/instrument/" not in done.stderr  # no traceback of this package
    assert not (tmp_path / "out").exists()


def test_strategy_must_match_the_number_of_processes() -> None:
    group: Any = SimpleNamespace(size=2, rank=0, is_rank_zero=True)
    with pytest.raises(ConfigError, match=r"train.parallel: torchrun started 2 processes[\s\S]*ddp, fsdp2"):
        choose_strategy(config(), group)
    with pytest.raises(
        ConfigError, match=r"train.parallel: this requires several processes[\s\S]*torchrun --nproc-per-node"
    ):
        choose_strategy(config(train={"steps": 1, "parallel": "ddp"}), None)
    with pytest.raises(ConfigError, match="plan: a dry run requires a single process"):
        choose_strategy(config(train={"steps": 1, "parallel": "ddp"}, plan=True), group)


def hook(**fields: Any) -> dict[str, Any]:
    return {"hooks": {"h": {"layers": "**", **fields}}}


@pytest.mark.parametrize(
    ("strategy", "changes", "expected"),
    [
        (DataParallel, {"budget": {"time": "5%"}, "reduce": "global"}, "budget: each rank would pause hooks at different steps"),
        (
            FullySharded,
            hook(kind="parameter_grad_micro", action="record"),
            r"hooks.h.kind: Tensor.register_hook never fires[\s\S]*post_accumulate_grad",
        ),
        (
            FullySharded,
            hook(kind="loss", action="modify", fn="l2", coefficient=0.1),
            r"hooks.h.kind: a penalty on the loss does not support[\s\S]*parameter_grad",
        ),
        (FullySharded, {"train": {"steps": 1, "precision": "fp16"}}, "train.precision: the gradient scaler of fp16"),
    ],
)  # fmt: skip
def test_unsupported_options_of_a_strategy_are_refused(
    strategy: type[Strategy], changes: dict[str, Any], expected: str
) -> None:
    (problem,) = strategy.config_problems(config(**changes))
    assert re.search(expected, str(problem))


@pytest.mark.parametrize(
    "parallel",
    [
        {"mesh": {"tp": 2}, "plan": {"layers.0": "colwise"}},
        {"mesh": {"dp": 2}, "experts": {"layers.0": {"_target_": "own.ExpertParallel"}}},
        {"mesh": {"pp": 2}, "pipeline": {"split": ["layers.1"]}},
    ],
    ids=["plan", "experts", "pipeline"],
)
def test_penalty_on_the_loss_of_divided_layers_is_refused(parallel: dict[str, Any]) -> None:
    penalty = hook(kind="loss", action="modify", fn="l1", coefficient=0.1)
    train = {"steps": 1, "accumulate": 2, "parallel": parallel}
    (problem,) = DataParallel.config_problems(config(train=train, **penalty))
    assert str(problem).startswith("hooks.h.kind: a penalty on the loss does not support")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batch_shards_cover_the_batch(size: int) -> None:
    dataset: Any = list(range(23))
    shares = [Loader(dataset, 10, LoaderOptions(shard=BatchShard(rank, size))) for rank in range(size)]
    batches = [[batch.tolist() for batch, _, _ in share] for share in shares]
    assert [[*chain(*parts)] for parts in zip(*batches, strict=True)] == [
        batch.tolist() for batch, _, _ in Loader(dataset, 10)
    ]
    assert all(abs(len(mine) - len(first)) <= 1 for mine, first in zip(batches[-1], batches[0], strict=True))


def test_batch_smaller_than_the_number_of_ranks_is_refused() -> None:
    check_batch_size(22, 10, BatchShard(0, 2), "train.batch_size")
    for size, message in (
        (10, r"train\.batch_size: the last batch has 2 of the 22 samples, but there are 3 processes"),
        (2, r"at least one sample for each of the 3 processes[\s\S]*given +2\n[\s\S]*3 or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_batch_size(22, size, BatchShard(0, 3), "train.batch_size")
