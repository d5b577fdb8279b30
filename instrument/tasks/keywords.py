"""Tasks for models that take the entries of a batch by keyword, or that compute losses themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..values.nested import iter_tensors, number_of_samples, structure
from .base import IGNORED, HasLoss, Loss, Outcome, number_of_terms, pair_of

_DEFAULT_LOSS = nn.CrossEntropyLoss()


class HuggingFace(HasLoss):
    """A task for the models of Transformers, and others with the same interface.

    A batch is a mapping. Its entries are passed to the model as keyword arguments. The loss is the `loss` of the
    output. If the model returns none, or with `loss`, it is computed from the `logits` of the output and the labels.
    Labels of -100 are ignored. All other labels have the same weight in the mean, or the class weight of `loss`,
    regardless of their batch. A batch whose labels are not integers is weighted by its samples.

    Args:
        loss: Called as `loss(logits, labels)`; returns the mean over the labels that are not -100, a scalar; or the
            sum, if its `reduction` is `sum`. The labels are then not passed to the model. Default: None, the loss of
            the model, or else the cross entropy.
        labels: The entry of the batch with the labels. Default: `labels`.
        shift: Whether the target at each position is the label at the next position. Default: None, true for classes
            whose name ends with `ForCausalLM` or `LMHeadModel`, such as those of Llama and GPT-2.
    """

    def __init__(self, loss: Loss | None = None, labels: str = "labels", shift: bool | None = None) -> None:
        self.loss = loss
        self.labels = labels
        self.shift = shift

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Compute the loss of a batch.

        Returns:
            The loss and the number of samples: the size of dimension 0 of the labels, or else of the first tensor. The
            loss is None in an evaluation without labels and without a loss of the model. `correct` is set if the logits
            have a class for each label. For labels with several dimensions, it is the fraction of correct labels times
            the number of samples.

        Raises:
            TypeError: The batch is not a mapping.
            ValueError: The model returns no loss, and logits or labels are missing or do not match.
        """
        arguments = _entries(batch)
        labels = arguments.get(self.labels)
        if self.loss is not None:
            arguments.pop(self.labels, None)
        if self.shift is None:
            classes = type(getattr(model, "_orig_mod", model)).__mro__  # a compiled model contains the original one
            self.shift = any(each.__name__.endswith(("ForCausalLM", "LMHeadModel")) for each in classes)
        output = model(**arguments)
        loss, logits = _field(output, "loss"), _field(output, "logits")
        correct = classified = None
        samples = _samples(labels, batch)
        if isinstance(labels, Tensor) and isinstance(logits, Tensor):
            if self.shift and labels.dim() == 2 and logits.dim() == 3:
                logits, labels = logits[:, :-1], labels[:, 1:]
            if not labels.is_floating_point() and labels.shape == logits.shape[:-1]:
                counted = labels != IGNORED
                hits = (logits.detach().argmax(-1) == labels) & counted
                classified = counted.sum()
                correct = hits.sum() / classified.clamp(min=1) * samples
        is_unlabeled = labels is None and loss is None and not model.training
        if not is_unlabeled and (self.loss is not None or loss is None):
            loss = self._computed_loss(logits, labels, output, batch)
        if isinstance(loss, Tensor) and isinstance(labels, Tensor) and not labels.is_floating_point():
            # Without any counted label, the mean is 0/0. It has the weight 0, which NaN would survive.
            loss = torch.where((labels != IGNORED).any(), loss, loss.nan_to_num() * 0.0)
        return Outcome(loss, samples, correct, classified=classified)

    def _computed_loss(self, logits: Any, labels: Any, output: Any, batch: Any) -> Tensor:
        if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
            missing = "output has no logits" if isinstance(labels, Tensor) else f"batch has no entry {self.labels!r}"
            fields = f"{type(output).__name__} with {structure(output)}"
            raise ValueError(
                f"the model returned no loss ({fields}), and the {missing}; the batch is {structure(batch)}"
            )
        matches = labels.shape == logits.shape[:-1]
        if self.loss is None and (labels.is_floating_point() or not matches):
            raise ValueError(
                f"the cross entropy requires integer labels for each position of the logits, but labels are {structure(labels)} "
                f"and logits {structure(logits)}; set the argument loss of the task"
            )
        if labels.dim() > 1 and matches:
            logits, labels = logits.flatten(0, -2), labels.flatten()
        loss: Tensor = (_DEFAULT_LOSS if self.loss is None else self.loss)(logits, labels)
        return loss

    def number_of_terms(self, batch: Any) -> float:
        """Return the number of labels that are not ignored, or the sum of their class weights.

        Without integer labels, return the number of samples.
        """
        labels = self.sample_targets(batch)
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return _samples(labels, batch)
        return number_of_terms(_DEFAULT_LOSS if self.loss is None else self.loss, labels[labels != IGNORED])

    def sample_targets(self, batch: Any) -> Tensor | None:
        """Return the labels of a batch at the positions whose logits predict them; None if it has none. See `SelectsTargets`."""
        labels = _entries(batch).get(self.labels)
        if self.shift and isinstance(labels, Tensor) and labels.dim() == 2:
            return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return labels


class LossDict:
    """A task for models that return a dict of losses in training, such as the detection models of torchvision.

    A batch is a pair (inputs, targets), or a mapping of keyword arguments. The loss is the sum of all losses. In an
    evaluation, such models return predictions, so there is no loss.

    Args:
        weights: The weight of each loss in the sum, by name. Default: None, 1 for each loss.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = weights

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Compute the loss of a batch.

        Returns:
            The sum of the losses; None in an evaluation in which the model returns no losses. The number of samples is
            the number of inputs.

        Raises:
            TypeError: The batch is neither a pair nor a mapping, or the model returns no dict of losses in training.
            ValueError: The model does not return a loss that `weights` contains.
        """
        if isinstance(batch, Mapping):
            output, inputs = model(**batch), next(iter(batch.values()), None)
        else:
            inputs, targets = pair_of(batch)
            output = model(inputs, targets)
        samples = len(inputs) if isinstance(inputs, list | tuple) else number_of_samples(inputs)
        losses = output if isinstance(output, Mapping) else {}
        if not losses or not all(isinstance(loss, Tensor) and loss.dim() == 0 for loss in losses.values()):
            if not model.training:
                return Outcome(None, samples)
            raise TypeError(
                f"in training, the model must return a dict of scalar losses, but returned {structure(output)}"
            )
        weights = dict.fromkeys(losses, 1.0) if self.weights is None else self.weights
        if unknown := weights.keys() - losses.keys():
            raise ValueError(
                f"the model returns no loss {', '.join(sorted(unknown))}; its losses are {', '.join(losses)}"
            )
        return Outcome(torch.stack([weight * losses[name] for name, weight in weights.items()]).sum(), samples)


def _entries(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    raise TypeError(
        f"the batch is {structure(batch)}, but this task passes the entries of a mapping to the model by keyword; "
        "use a dataset with dicts as items, or set data.collate_fn"
    )


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _samples(labels: Any, batch: Any) -> int:
    """Return the size of dimension 0 of the labels, or else of the first tensor of a batch with a dimension."""
    tensors = (tensor for value in (labels, batch) for _, tensor in iter_tensors(value) if tensor.dim())
    return number_of_samples(next(tensors, batch))
