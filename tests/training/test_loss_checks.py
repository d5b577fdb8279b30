"""Losses whose micro-batches do not give the gradient of one batch are refused before the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training_runs import DIGITS, prepared

from instrument import ConfigError
from instrument.tasks import Outcome, Supervised
from instrument.training.distributed.strategies import Strategy
from instrument.training.experiment import Experiment
from instrument.training.loader import BatchShard

WEIGHTS = torch.tensor([0.1, 3.0, 20.0, 1.0, 1.0, 1.0, 2.0, 9.0, 0.5, 1.0])


class ZeroHead(nn.Sequential):
    """A model whose outputs are zero: all samples have the same loss."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        nn.init.zeros_(self[1].weight)
        nn.init.zeros_(self[1].bias)


class Recurrent(nn.Module):
    """A model with a dropout, a recurrent layer and the running means of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm, self.drop = nn.LSTM(8, 12), nn.BatchNorm1d(12), nn.Dropout(0.5)
        self.head = nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.lstm(images.flatten(0, -3).transpose(0, 1).float())
        logits: Tensor = self.head(self.drop(self.norm(states[-1])))
        return logits


def plain(output: Tensor, targets: Tensor) -> Tensor:
    """A mean over the samples."""
    return F.multi_margin_loss(output, targets)


def weighted(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, WEIGHTS)


def added(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, reduction="sum")


class Added:
    """A sum that says so, as the losses of PyTorch."""

    reduction = "sum"
    __call__ = staticmethod(added)


def contrastive(output: Tensor, targets: Tensor) -> Tensor:
    """InfoNCE: each sample is compared with all others of its batch."""
    similar = F.normalize(output) @ F.normalize(output + 0.1 * targets[:, None]).T
    return F.cross_entropy(10 * similar, torch.arange(len(output)))


def random(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output + torch.rand_like(output), targets, WEIGHTS)


def complete_batches_only(output: Tensor, targets: Tensor) -> Tensor:
    assert len(output) % 16 == 0
    return contrastive(output, targets)


class Weighted:
    """A custom task without a number of terms."""

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        images, classes = batch
        return Outcome(weighted(model(images), classes), len(classes))


class WithTerms(Weighted):
    """The same task with the sum of the class weights."""

    def number_of_terms(self, batch: Any) -> float:
        return float(WEIGHTS[batch[1]].sum())


class PerBatch(Supervised):
    """A task whose loss is that of each micro-batch."""

    def number_of_terms(self, batch: Any) -> float:
        return len(batch[1])


def prepare_task(task: Any, *, strategy: Strategy | None = None, model: str = "", **train: Any) -> Experiment:
    """Prepare an experiment with a task, or with the name of a loss function of this file."""
    loss = {"_target_": f"{__name__}.{task}", **({} if task == "Added" else {"_partial_": True})}
    return prepared(
        strategy=strategy,
        model={"_target_": f"{__name__}.{model or 'Recurrent'}"},
        data={"dataset": DIGITS, "slice": {"stop": 48}, "eval_slice": {"split": "test", "stop": 256}},  # one batch
        task=task if isinstance(task, dict) else {"_target_": "instrument.tasks.Supervised", "loss": loss},
        train={"steps": 1, "batch_size": 16, "accumulate": 2, **train},
    )


@pytest.mark.parametrize("name", ["plain", "Added", "random", "complete_batches_only"])
def test_losses_of_parts_are_accepted(name: str) -> None:
    prepare_task(name)


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["weighted", "added", "contrastive"])
def test_other_losses_are_refused_with_accumulation(name: str) -> None:
    expected = r"task: with train.accumulate=2, the gradient of a step would differ from that of one batch"
    expected += r"(.|\n)*number_of_terms(.|\n)*reduction"
    with pytest.raises(ConfigError, match=expected):
        prepare_task(name)
    prepare_task(name, accumulate=1)


def test_gradients_are_compared_if_all_losses_are_equal() -> None:
    for train in ({}, {"batch_size": 1}):  # also in micro-batches of one sample
        with pytest.raises(ConfigError, match="accumulate=2, the gradient"):
            prepare_task("weighted", model="ZeroHead", **train)
    prepare_task("plain", model="ZeroHead")


@pytest.mark.parametrize("task", [{"_target_": f"{__name__}.Weighted"}, "weighted"])
def test_other_losses_are_refused_with_several_processes(task: Any) -> None:
    strategy = Strategy()
    strategy.batch_shard = BatchShard(1, 2)
    with pytest.raises(ConfigError, match=r"with train\.parallel=ddp, the gradient of a step would differ"):
        prepare_task(task, strategy=strategy, accumulate=1, parallel="ddp")


def test_number_of_terms_of_a_custom_task_is_accepted() -> None:
    prepare_task({"_target_": f"{__name__}.WithTerms"})
    loss = {"_target_": f"{__name__}.contrastive", "_partial_": True}
    prepare_task({"_target_": f"{__name__}.PerBatch", "loss": loss})


def test_check_has_no_side_effects() -> None:
    states = []
    for accumulate in (1, 2):
        experiment = prepare_task("plain", accumulate=accumulate)
        assert all(parameter.grad is None for parameter in experiment.model.parameters())
        assert all(module.training for module in experiment.model.modules())
        states.append([*experiment.model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))
