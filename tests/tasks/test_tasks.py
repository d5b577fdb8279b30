"""The supervised task: losses, accuracy, targets and checks of outcomes."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instrument.tasks import KLDivergence, Outcome, Supervised
from instrument.tasks.base import accuracy, check_outcome, mean_loss
from instrument.tasks.model_output import main_output
from instrument.tasks.supervised import soft_targets

LOGITS = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0], [1.0, 0.0, 5.0], [4.0, 1.0, 0.0]])
CLASSES = torch.tensor([0, 1, 1, 0])


def outcome(task: Supervised, targets: Tensor, output: Any = LOGITS) -> Outcome:
    return task(nn.Identity(), (output, targets))


def test_cross_entropy_equals_pytorch() -> None:
    result = outcome(Supervised(nn.CrossEntropyLoss()), CLASSES)
    assert torch.equal(result.loss, CROSS_ENTROPY)
    assert (result.samples, int(result.correct)) == (4, 3)  # type: ignore[arg-type]


LOG_PROBABILITIES, ONE_HOT, NUMBERS = LOGITS.log_softmax(1), F.one_hot(CLASSES, 3), torch.linspace(-2, 3, 12).view(4, 3)
SMOOTH, UNIFORM = soft_targets(CLASSES, 3, 0.3), torch.full((4, 3), 1 / 3)
SMOOTH_LOSS = (SMOOTH * (SMOOTH.log() - LOG_PROBABILITIES)).sum(1).mean()
UNIFORM_LOSS = F.kl_div(LOG_PROBABILITIES, UNIFORM, reduction="batchmean")
CROSS_ENTROPY = F.cross_entropy(LOGITS, CLASSES)
LOSSES: dict[str, tuple[Supervised, Tensor, Tensor, int | None]] = {
    "divergence of smoothed": (Supervised(KLDivergence(), targets="one_hot", smoothing=0.3), CLASSES, SMOOTH_LOSS, 3),
    "divergence of hard": (Supervised(KLDivergence(), targets="one_hot"), CLASSES, CROSS_ENTROPY, 3),
    "divergence of distributions": (Supervised(KLDivergence(), targets="one_hot"), UNIFORM, UNIFORM_LOSS, None),
    "error of classes": (Supervised(nn.MSELoss(), targets="one_hot"), CLASSES, (LOGITS - ONE_HOT).square().mean(), 3),
    "error of numbers": (Supervised(nn.MSELoss()), NUMBERS, (LOGITS - NUMBERS).square().mean(), None),
    "float64": (Supervised(nn.MSELoss()), NUMBERS.double(), (LOGITS - NUMBERS.double()).square().mean(), None),
}


@pytest.mark.parametrize(("task", "targets", "loss", "correct"), LOSSES.values(), ids=LOSSES)
def test_loss_equals_its_formula_and_correct_classes_are_counted(
    task: Supervised, targets: Tensor, loss: Tensor, correct: int | None
) -> None:
    result = outcome(task, targets)
    torch.testing.assert_close(result.loss, loss, rtol=1e-6, atol=1e-8)
    assert (result.samples, result.correct if correct is None else int(result.correct)) == (4, correct)  # type: ignore[arg-type]
    assert (accuracy([result, result]) is None) == (correct is None)


def test_ignored_classes_have_no_weight() -> None:
    classes = torch.tensor([0, -100, 1, 0])
    task = Supervised(nn.CrossEntropyLoss())
    result = outcome(task, classes)
    assert torch.equal(result.loss, F.cross_entropy(LOGITS, classes))
    assert (result.samples, task.number_of_terms((LOGITS, classes))) == (4, 3)
    assert accuracy([result]) == pytest.approx(2 / 3)
    assert Supervised(nn.CrossEntropyLoss(ignore_index=0)).number_of_terms((LOGITS, classes)) == 2
    assert Supervised(KLDivergence()).number_of_terms((LOGITS, classes)) == 4


def test_soft_targets_are_smoothed_distributions() -> None:
    soft = soft_targets(CLASSES, 3, 0.3)
    assert torch.allclose(soft.sum(1), torch.ones(4))
    assert torch.allclose(soft[0], torch.tensor([0.8, 0.1, 0.1]))
    assert torch.equal(soft_targets(CLASSES, 3, 0.0), F.one_hot(CLASSES, 3).float())


def test_accuracy_of_dense_targets_is_none() -> None:
    task = Supervised(lambda output, targets: output.sum())
    assert outcome(task, torch.zeros(2, 4, dtype=torch.long), LOGITS.expand(2, 4, 3)).correct is None


@pytest.mark.parametrize("given", [{"targets": "onehot"}, {"smoothing": 1.5}, {"smoothing": -0.1}])
def test_invalid_task_arguments_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Supervised(nn.MSELoss(), **given)


@pytest.mark.parametrize(
    "output",
    [
        *(LOGITS, (LOGITS, torch.zeros(1)), [LOGITS], {"hidden": torch.zeros(1), "logits": LOGITS}),
        *(OrderedDict(logits=LOGITS), SimpleNamespace(loss=None, logits=LOGITS)),
    ],
    ids=lambda output: type(output).__name__,
)
def test_main_output_is_the_tensor_its_logits_or_the_first(output: Any) -> None:
    assert main_output(output) is LOGITS


@pytest.mark.parametrize("output", [None, 3, {"a": LOGITS}, (), ["x"]], ids=repr)
def test_output_without_a_main_tensor_is_refused(output: Any) -> None:
    with pytest.raises(TypeError, match=f"the model returned {type(output).__name__}"):
        main_output(output)


def test_means_over_batches_weight_samples_equally() -> None:
    parts = [Outcome(torch.tensor(1.0), 3, torch.tensor(3)), Outcome(torch.tensor(5.0), 1, torch.tensor(0))]
    assert mean_loss(parts, [3, 1]).item() == 2.0
    assert accuracy(parts).item() == 0.75  # type: ignore[union-attr]
    assert accuracy([*parts, Outcome(torch.tensor(1.0), 1)]) is None
    assert accuracy([]) is None


def test_valid_outcome_is_accepted() -> None:
    check_outcome(Outcome(torch.ones((), requires_grad=True), 1))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.ones(()), TypeError, "the task must return instrument.tasks.Outcome, but returned Tensor"),
        (Outcome(torch.ones(1, requires_grad=True), 1), TypeError, r"shape \[1\], not a scalar"),
        (Outcome(1.0, 1), TypeError, "the loss is a float"),  # type: ignore[arg-type]
        (Outcome(torch.ones(()), 1), ValueError, "does not depend on any trainable parameter"),
    ],
)
def test_invalid_outcome_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_outcome(given)
