"""Models and tasks that several processes have to be told about: parts without a gradient, parts that a task calls itself."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from several import start
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
    ids=["idle", "ablated"],  # a layer stands idle in both
)
def idle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder in which one process trained, and what it was told."""
    place, common = tmp_path_factory.mktemp("idle"), [*TRAINED, "model={_target_: parts.Idle}", *request.param]
    one = start(place, *common, "hydra.run.dir=one")
    assert one.returncode == 0, one.stderr
    return place, common


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_parameters_without_a_gradient_are_left_as_they_are(idle: tuple[Path, list[str]], parallel: str) -> None:
    place, common = idle
    more = (f"hydra.run.dir={parallel}", f"train.parallel={parallel}", "reduce=global")
    two = start(place, *common, *more, processes=2)
    assert two.returncode == 0, two.stderr
    here, there = (instrument.load(place / name).stats for name in ("one", parallel))
    both = here.merge(there, on=KEYS, suffixes=("", "_there"), how="outer", indicator=True, validate="1:1")
    assert (both["_merge"] == "both").all()
    assert "idle" not in set(both["layer"])
    assert (both.query("layer == 'first' and step >= 2")["l2"] == 0.0).all() == (ABLATED in common)
    assert ((both["l2"] - both["l2_there"]).abs() <= 1e-5 * both["l2"] + 1e-12).all()


@pytest.mark.parametrize("rank", tiered(["null", "0", "1"], ["null", "1"]))
def test_what_a_step_does_not_use_is_told_before_the_step_is_made(tmp_path: Path, rank: str) -> None:
    """Two trial passes, and two passes a step: the third step, the last one, leaves a layer out, on all ranks or on one."""
    changing = [
        *TRAINED,
        f"model={{_target_: parts.Idle, after: 6, rank: {rank}}}",
        "train.parallel=ddp",
        "train.steps=3",
    ]
    stopped = start(tmp_path, *changing, "hydra.run.dir=stopped", processes=2)
    assert stopped.returncode != 0
    assert "train.find_unused_parameters=true is for models like this" in stopped.stderr
    run = instrument.load(tmp_path / "stopped")
    assert run.info["status"] == "failed"
    assert run.info["failed_rank"] == (0 if rank == "null" else int(rank)) or rank == "null"
    assert set(run.stats["step"]) == {0, 1}, "none of a step in which gradients were not brought together"


def test_what_a_step_does_not_use_is_left_as_it_is_where_that_is_said(tmp_path: Path) -> None:
    changing = [*TRAINED, "model={_target_: parts.Idle, after: 6}", "train.parallel=ddp"]
    found = start(tmp_path, *changing, "train.find_unused_parameters=true", "hydra.run.dir=found", processes=2)
    assert found.returncode == 0, found.stderr
    stats = instrument.load(tmp_path / "found").stats
    assert (stats.query("layer == 'middle'").step.max(), stats.query("layer == 'last'").step.max()) == (2, 5)


def test_a_task_that_calls_parts_of_the_model_itself(tmp_path: Path) -> None:
    gan = ["+exp=wgan_gp", "train.steps=2", "device=cpu"]
    done = start(tmp_path, *gan, "train.parallel=ddp", "hydra.run.dir=out", processes=2)
    assert done.returncode == 0, done.stderr
    run = instrument.load(tmp_path / "out")
    gradients = run.stats.query("kind == 'parameter_grad'").set_index(["rank", "hook", *KEYS]).drop(columns="scope")
    assert set(gradients.index.get_level_values("hook")) == {"critic_gradients", "generator_gradients"}
    pd.testing.assert_frame_equal(gradients.loc[0], gradients.loc[1])  # brought together
    scores = run.stats.query("hook == 'scores'").set_index(["rank", "step", "call"])["mean"]
    assert (scores.loc[0] != scores.loc[1]).all()  # of samples of their own

    refused = start(tmp_path, *gan, "train.parallel=fsdp2", "hydra.run.dir=shards", processes=2)
    assert refused.returncode != 0
    assert "train.parallel: this task calls parts of the model" in refused.stderr
    assert "instrument/run/" not in refused.stderr  # no traceback of ours


def test_a_process_that_fails_alone_before_the_training_is_named_with_its_reason(tmp_path: Path) -> None:
    done = start(
        tmp_path, *TRAINED, "model={_target_: parts.Picky}", "train.parallel=ddp", "hydra.run.dir=out", processes=2
    )
    assert done.returncode != 0
    assert "rank 1: model" in done.stderr
    assert "this card has too little memory" in done.stderr
    assert "unpack" not in done.stderr
    assert instrument.load(tmp_path / "out").info["failed_rank"] == 1


def test_a_checkpoint_that_knows_nothing_but_backward(tmp_path: Path) -> None:
    done = start(
        tmp_path, *TRAINED, "model={_target_: parts.Reentrant}", "train.parallel=ddp", "hydra.run.dir=out", processes=2
    )
    assert done.returncode == 0, done.stderr
    assert set(instrument.load(tmp_path / "out").stats["step"]) == set(range(6))


def test_a_task_that_is_a_module_is_no_part_of_what_trains(tmp_path: Path) -> None:
    task = ["model=mlp", "model.sizes=[64,16,10]", "task={_target_: parts.Distance}", "~task.loss"]
    for name, processes, more in [("one", 1, []), ("two", 2, ["train.parallel=ddp", "reduce=global"])]:
        done = start(tmp_path, *TRAINED, *task, f"hydra.run.dir={name}", *more, processes=processes)
        assert done.returncode == 0, done.stderr
    here, there = (instrument.load(tmp_path / name).stats for name in ("one", "two"))
    both = here.merge(there, on=KEYS, suffixes=("", "_there"), validate="1:1")
    assert len(both) == len(here) == len(there)
    assert ((both["l2"] - both["l2_there"]).abs() <= 1e-5 * both["l2"]).all()


def test_tokens_of_all_processes_weigh_alike_where_targets_are_ignored(tmp_path: Path) -> None:
    language = [
        "device=cpu",
        "model={_target_: torch.nn.Embedding, num_embeddings: 7, embedding_dim: 7}",
        "data={dataset: {_target_: parts.partly_ignored}}",
        "task=next_token",
        "train={steps: 3, batch_size: 4, accumulate: 2, eval_batch_size: 6}",
    ]
    for place, more, processes in (("one", [], 1), ("two", ["train.parallel=ddp", "reduce=global"], 2)):
        done = start(tmp_path, *language, *more, f"hydra.run.dir={place}", processes=processes)
        assert done.returncode == 0, done.stderr
    one, two = (instrument.load(tmp_path / place).metrics for place in ("one", "two"))
    columns = ["loss", "accuracy", "grad_norm"]
    pd.testing.assert_frame_equal(one[columns], two[columns], rtol=1e-5)
