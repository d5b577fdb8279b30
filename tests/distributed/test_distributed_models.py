"""Distributed runs of models with unused layers, and of tasks that call parts of the model."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from distributed_runs import run_processes
from tiers import tiered

import instrument

TRAINED = [
    "device=cpu",
    "data=digits",
    "train={steps: 6, batch_size: 40, accumulate: 2}",
    "+hooks.used={layers: '**', kind: parameter_grad, action: record}",
]
ABLATED = "+hooks.ablated={layers: middle, kind: forward, action: modify, fn: zero, start: 2}"
KEYS = ["step", "layer", "path"]


@pytest.fixture(
    scope="module",
    params=[pytest.param([], marks=pytest.mark.slow), [ABLATED]],
    ids=["unused", "ablated"],  # both have a layer without gradients
)
def single_process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Working directory of a run of one process, and its arguments."""
    folder, common = (
        tmp_path_factory.mktemp("unused"),
        [*TRAINED, "model={_target_: distributed_models.UnusedLayer}", *request.param],
    )
    one = run_processes(folder, *common, "hydra.run.dir=one")
    assert one.returncode == 0, one.stderr
    return folder, common


@pytest.mark.parametrize("parallel", tiered(["ddp", "fsdp2"], []))
def test_parameters_without_gradients_are_not_changed(single_process: tuple[Path, list[str]], parallel: str) -> None:
    folder, common = single_process
    more = (f"hydra.run.dir={parallel}", f"train.parallel={parallel}", "reduce=global")
    two = run_processes(folder, *common, *more, processes=2)
    assert two.returncode == 0, two.stderr
    single, distributed = (instrument.load(folder / name).stats for name in ("one", parallel))
    both = single.merge(distributed, on=KEYS, suffixes=("", "_there"), how="outer", indicator=True, validate="1:1")
    assert (both["_merge"] == "both").all()
    assert "idle" not in set(both["layer"])
    assert (both.query("layer == 'first' and step >= 2")["l2"] == 0.0).all() == (ABLATED in common)
    assert ((both["l2"] - both["l2_there"]).abs() <= 1e-5 * both["l2"] + 1e-12).all()


@pytest.mark.parametrize("rank", tiered(["null", "0", "1"], ["1"]))
def test_unused_parameters_are_reported_before_the_step(tmp_path: Path, rank: str) -> None:
    """With two passes of shape inference and two per step, a layer is unused in step 2, on all ranks or on one."""
    arguments = [
        *TRAINED,
        f"model={{_target_: distributed_models.UnusedLayer, after: 6, rank: {rank}}}",
        "train.parallel=ddp",
        "train.steps=3",
    ]
    result = run_processes(tmp_path, *arguments, "hydra.run.dir=stopped", processes=2)
    assert result.returncode != 0
    assert "set train.find_unused_parameters=true" in result.stderr
    run = instrument.load(tmp_path / "stopped")
    assert run.info["status"] == "failed"
    assert run.info["failed_rank"] == (0 if rank == "null" else int(rank)) or rank == "null"
    assert set(run.stats["step"]) == {0, 1}, "a step without gradient reduction should not be recorded"


def test_find_unused_parameters_skips_unused_layers(tmp_path: Path) -> None:
    arguments = [*TRAINED, "model={_target_: distributed_models.UnusedLayer, after: 6}", "train.parallel=ddp"]
    result = run_processes(
        tmp_path, *arguments, "train.find_unused_parameters=true", "hydra.run.dir=found", processes=2
    )
    assert result.returncode == 0, result.stderr
    stats = instrument.load(tmp_path / "found").stats
    assert (stats.query("layer == 'middle'").step.max(), stats.query("layer == 'last'").step.max()) == (2, 5)


def test_task_that_calls_parts_of_the_model(tmp_path: Path) -> None:
    gan = ["+exp=wgan_gp", "train.steps=2", "device=cpu"]
    done = run_processes(tmp_path, *gan, "train.parallel=ddp", "hydra.run.dir=out", processes=2)
    assert done.returncode == 0, done.stderr
    run = instrument.load(tmp_path / "out")
    gradients = run.stats.query("kind == 'parameter_grad'").set_index(["rank", "hook", *KEYS]).drop(columns="scope")
    assert set(gradients.index.get_level_values("hook")) == {"critic_gradients", "generator_gradients"}
    pd.testing.assert_frame_equal(gradients.loc[0], gradients.loc[1])  # reduced
    scores = run.stats.query("hook == 'scores'").set_index(["rank", "step", "call"])["mean"]
    assert (scores.loc[0] != scores.loc[1]).all()  # different samples

    refused = run_processes(tmp_path, *gan, "train.parallel=fsdp2", "hydra.run.dir=shards", processes=2)
    assert refused.returncode != 0
    assert "train.parallel: the task calls submodules of the model" in refused.stderr
    assert "/instrument/" not in refused.stderr  # no traceback of this package


def test_error_on_one_rank_before_training_names_the_rank(tmp_path: Path) -> None:
    done = run_processes(
        tmp_path,
        *TRAINED,
        "model={_target_: distributed_models.FailsOnRank1}",
        "train.parallel=ddp",
        "hydra.run.dir=out",
        processes=2,
    )
    assert done.returncode != 0
    assert "rank 1: model" in done.stderr
    assert "this card has too little memory" in done.stderr
    assert "unpack" not in done.stderr
    assert instrument.load(tmp_path / "out").info["failed_rank"] == 1


def test_reentrant_activation_checkpointing(tmp_path: Path) -> None:
    done = run_processes(
        tmp_path,
        *TRAINED,
        "model={_target_: distributed_models.Reentrant}",
        "train.parallel=ddp",
        "hydra.run.dir=out",
        processes=2,
    )
    assert done.returncode == 0, done.stderr
    assert set(instrument.load(tmp_path / "out").stats["step"]) == set(range(6))


def test_task_module_is_not_trained(tmp_path: Path) -> None:
    task = [
        "model=mlp",
        "model.sizes=[64,16,10]",
        "task={_target_: distributed_models.EmbeddingDistance}",
        "~task.loss",
    ]
    for name, processes, more in [("one", 1, []), ("two", 2, ["train.parallel=ddp", "reduce=global"])]:
        done = run_processes(tmp_path, *TRAINED, *task, f"hydra.run.dir={name}", *more, processes=processes)
        assert done.returncode == 0, done.stderr
    single, distributed = (instrument.load(tmp_path / name).stats for name in ("one", "two"))
    both = single.merge(distributed, on=KEYS, suffixes=("", "_there"), validate="1:1")
    assert len(both) == len(single) == len(distributed)
    assert ((both["l2"] - both["l2_there"]).abs() <= 1e-5 * both["l2"]).all()


def test_tokens_of_all_ranks_are_weighted_equally(tmp_path: Path) -> None:
    language = [
        "device=cpu",
        "model={_target_: torch.nn.Embedding, num_embeddings: 7, embedding_dim: 7}",
        "data={dataset: {_target_: distributed_models.partly_ignored}}",
        "task=next_token",
        "train={steps: 3, batch_size: 4, accumulate: 2, eval_batch_size: 6}",
    ]
    for folder, more, processes in (("one", [], 1), ("two", ["train.parallel=ddp", "reduce=global"], 2)):
        done = run_processes(tmp_path, *language, *more, f"hydra.run.dir={folder}", processes=processes)
        assert done.returncode == 0, done.stderr
    one, two = (instrument.load(tmp_path / folder).metrics for folder in ("one", "two"))
    columns = ["loss", "accuracy", "grad_norm"]
    pd.testing.assert_frame_equal(one[columns], two[columns], rtol=1e-5)
