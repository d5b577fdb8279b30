"""Distributed runs of models with unused layers, and of tasks that call parts of the model."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from distributed_runs import assert_close, matched, run_processes, start, train
from tiers import tiered

import instrument

TRAINED = [
    *("device=cpu", "data=digits", "train={steps: 6, batch_size: 40, accumulate: 2}"),
    "+hooks.used={layers: '**', kind: parameter_grad, action: record}",
]
REDUCED = ["train.parallel=ddp", "reduce=global"]
ABLATED = "+hooks.ablated={layers: middle, kind: forward, action: modify, fn: zero, start: 2}"
KEYS = ["step", "layer", "path"]


@pytest.fixture(
    scope="module",
    params=[pytest.param([], marks=pytest.mark.slow), [ABLATED]],
    ids=["unused", "ablated"],  # both have a layer without gradients
)
def single_process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Working directory of a run of one process, and its arguments."""
    folder = tmp_path_factory.mktemp("unused")
    common = [*TRAINED, "model={_target_: distributed_models.UnusedLayer}", *request.param]
    train(folder, "one", *common)
    return folder, common


@pytest.mark.parametrize("parallel", tiered(["ddp", "fsdp2"], []))
def test_parameters_without_gradients_are_not_changed(single_process: tuple[Path, list[str]], parallel: str) -> None:
    folder, common = single_process
    more = (f"train.parallel={parallel}", "reduce=global")
    single = instrument.load(folder / "one").stats
    distributed = train(folder, parallel, *common, *more, processes=2).stats
    both = matched(single, distributed, KEYS)
    assert "idle" not in set(both["layer"])
    assert (both.query("layer == 'first' and step >= 2")["l2"] == 0.0).all() == (ABLATED in common)
    assert_close(both, "l2")


@pytest.mark.parametrize("rank", tiered(["null", "0", "1"], ["1"]))
def test_unused_parameters_are_reported_before_the_step(tmp_path: Path, rank: str) -> None:
    """With two passes of shape inference and two per step, a layer is unused in step 2, on all ranks or on one."""
    arguments = [
        *TRAINED,
        f"model={{_target_: distributed_models.UnusedLayer, after: 6, rank: {rank}}}",
        "train.parallel=ddp",
        "train.steps=3",
    ]
    result = start(tmp_path, "stopped", *arguments, processes=2)
    assert result.returncode != 0
    assert "set train.find_unused_parameters=true" in result.stderr
    run = instrument.load(tmp_path / "stopped")
    assert run.info["status"] == "failed"
    assert run.info["failed_rank"] == (0 if rank == "null" else int(rank)) or rank == "null"
    assert set(run.stats["step"]) == {0, 1}, "a step without gradient reduction should not be recorded"


@pytest.mark.slow
def test_find_unused_parameters_skips_unused_layers(tmp_path: Path) -> None:
    unused = ["model={_target_: distributed_models.UnusedLayer, after: 6}", "train.find_unused_parameters=true"]
    stats = train(tmp_path, "found", *TRAINED, *unused, "train.parallel=ddp", processes=2).stats
    assert (stats.query("layer == 'middle'").step.max(), stats.query("layer == 'last'").step.max()) == (2, 5)


@pytest.mark.slow
def test_task_that_calls_parts_of_the_model(tmp_path: Path) -> None:
    gan = ["+exp=wgan_gp", "train.steps=2", "device=cpu"]
    run = train(tmp_path, "out", *gan, "train.parallel=ddp", processes=2)
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


@pytest.mark.slow
def test_reentrant_activation_checkpointing(tmp_path: Path) -> None:
    reentrant = ["model={_target_: distributed_models.Reentrant}", "train.parallel=ddp"]
    assert set(train(tmp_path, "out", *TRAINED, *reentrant, processes=2).stats["step"]) == set(range(6))


@pytest.mark.slow
def test_task_module_is_not_trained(tmp_path: Path) -> None:
    task = ["model=mlp", "model.sizes=[64,16,10]", "task={_target_: distributed_models.EmbeddingDistance}"]
    single = train(tmp_path, "one", *TRAINED, *task).stats
    distributed = train(tmp_path, "two", *TRAINED, *task, *REDUCED, processes=2).stats
    assert_close(matched(single, distributed, KEYS), "l2")


@pytest.mark.slow
def test_tokens_of_all_ranks_are_weighted_equally(tmp_path: Path) -> None:
    language = [
        "device=cpu",
        "model={_target_: torch.nn.Embedding, num_embeddings: 7, embedding_dim: 7}",
        "data={dataset: {_target_: distributed_models.partly_ignored}}",
        "task=next_token",
        "train={steps: 3, batch_size: 4, accumulate: 2, eval_batch_size: 6}",
    ]
    one = train(tmp_path, "one", *language).metrics
    two = train(tmp_path, "two", *language, *REDUCED, processes=2).metrics
    columns = ["loss", "accuracy", "grad_norm"]
    pd.testing.assert_frame_equal(one[columns], two[columns], rtol=1e-5)
