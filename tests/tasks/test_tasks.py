"""What a model and a batch make a loss of."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instrument.tasks import (
    KLDivergence,
    Outcome,
    Supervised,
    accuracy,
    check_outcome,
    main_output,
    mean_loss,
    soft_targets,
)

LOGITS = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 5.0], [4.0, 1.0, 0.0]])
CLASSES = torch.tensor([0, 1, 1, 0])


def outcome(task: Supervised, targets: Tensor, output: Any = LOGITS) -> Outcome:
    return task(nn.Identity(), (output, targets))


def test_cross_entropy_of_classes_is_pytorchs_and_counts_the_right_ones() -> None:
    found = outcome(Supervised(nn.CrossEntropyLoss()), CLASSES)
    assert torch.equal(found.loss, F.cross_entropy(LOGITS, CLASSES))
    assert (found.samples, int(found.correct)) == (4, 3)  # type: ignore[arg-type]


def test_soft_targets_are_distributions_that_smoothing_spreads() -> None:
    soft = soft_targets(CLASSES, 3, 0.3)
    assert torch.allclose(soft.sum(1), torch.ones(4))
    assert torch.allclose(soft[0], torch.tensor([0.8, 0.1, 0.1]))
    assert torch.equal(soft_targets(CLASSES, 3, 0.0), F.one_hot(CLASSES, 3).float())


def test_kl_divergence_with_soft_targets_is_what_its_formula_says() -> None:
    found = outcome(Supervised(KLDivergence(), targets="one_hot", smoothing=0.3), CLASSES)
    p, q = soft_targets(CLASSES, 3, 0.3), LOGITS.softmax(1)
    assert torch.allclose(found.loss, (p * (p.log() - q.log())).sum(1).mean())
    assert int(found.correct) == 3  # type: ignore[arg-type]


def test_kl_divergence_of_hard_targets_is_cross_entropy() -> None:
    found = outcome(Supervised(KLDivergence(), targets="one_hot"), CLASSES)
    assert torch.allclose(found.loss, F.cross_entropy(LOGITS, CLASSES))


def test_kl_divergence_takes_targets_that_are_distributions_already() -> None:
    soft = torch.full((4, 3), 1 / 3)
    found = outcome(Supervised(KLDivergence(), targets="one_hot"), soft)
    assert torch.allclose(found.loss, F.kl_div(LOGITS.log_softmax(1), soft, reduction="batchmean"))
    assert found.correct is None


def test_mean_squared_error_of_classes_is_of_one_hot_vectors() -> None:
    found = outcome(Supervised(nn.MSELoss(), targets="one_hot"), CLASSES)
    assert torch.allclose(found.loss, ((LOGITS - F.one_hot(CLASSES, 3)) ** 2).mean())
    assert int(found.correct) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("targets", [torch.randn(4, 3), torch.randn(4, 3, dtype=torch.float64)])
def test_accuracy_has_no_meaning_for_targets_that_are_numbers(targets: Tensor) -> None:
    found = outcome(Supervised(nn.MSELoss()), targets)
    assert found.correct is None
    assert torch.allclose(found.loss, ((LOGITS - targets) ** 2).mean())
    assert accuracy([found, found]) is None


def test_accuracy_has_no_meaning_for_a_class_at_every_place() -> None:
    found = outcome(
        Supervised(lambda output, targets: output.sum()), torch.zeros(2, 4, dtype=torch.long), LOGITS.expand(2, 4, 3)
    )
    assert found.correct is None


@pytest.mark.parametrize("given", [{"targets": "onehot"}, {"smoothing": 1.5}, {"smoothing": -0.1}])
def test_a_task_refuses_what_it_cannot_mean(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Supervised(nn.MSELoss(), **given)


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (LOGITS, torch.zeros(1)),
        [LOGITS],
        {"hidden": torch.zeros(1), "logits": LOGITS},
        OrderedDict(logits=LOGITS),
        SimpleNamespace(loss=None, logits=LOGITS),
    ],
    ids=lambda output: type(output).__name__,
)
def test_the_output_is_the_tensor_its_logits_or_the_first_of_several(output: Any) -> None:
    assert main_output(output) is LOGITS


@pytest.mark.parametrize("output", [None, 3, {"a": LOGITS}, (), ["x"]], ids=repr)
def test_an_output_without_a_main_tensor_is_refused(output: Any) -> None:
    with pytest.raises(TypeError, match=f"the model returned {type(output).__name__}"):
        main_output(output)


def test_means_over_batches_weigh_every_sample_alike() -> None:
    parts = [Outcome(torch.tensor(1.0), 3, torch.tensor(3)), Outcome(torch.tensor(5.0), 1, torch.tensor(0))]
    assert mean_loss(parts).item() == 2.0
    assert accuracy(parts).item() == 0.75  # type: ignore[union-attr]
    assert accuracy([*parts, Outcome(torch.tensor(1.0), 1)]) is None
    assert accuracy([]) is None


def test_an_outcome_that_can_be_trained_on_passes() -> None:
    check_outcome(Outcome(torch.ones((), requires_grad=True), 1))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.ones(()), "gave a Tensor"),
        (Outcome(torch.ones(1, requires_grad=True), 1), r"shape \[1\], not a scalar"),
        (Outcome(1.0, 1), "the loss is a float"),  # type: ignore[arg-type]
        (Outcome(torch.ones(()), 1), "does not depend on any parameter"),
    ],
)
def test_an_outcome_that_cannot_be_trained_on_is_refused(given: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        check_outcome(given)
