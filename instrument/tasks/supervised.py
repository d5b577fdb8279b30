"""Tasks with a loss of the model's output and a target: supervised learning, autoencoders, and language models."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from .base import IGNORED, HasLoss, Loss, Outcome, counted_targets, inputs_of, number_of_terms, pair_of
from .model_output import LossOutput


class Supervised(HasLoss):
    """A loss of the model output and the targets. A batch is a pair (inputs, targets).

    The loss uses one tensor of the output. If a model returns several, such as the logits and the auxiliary logits of
    Inception, the run reports which tensor the loss uses, and which get no gradient. `output` selects another one. To train
    with several, such as with the auxiliary logits, write a [custom task](../guides/custom.md#a-custom-task).

    Integer targets that the loss ignores (its `ignore_index`, such as -100 for the cross entropy) have no weight. All other
    targets have the same weight in the mean, or their class weight, regardless of their batch.

    Args:
        loss: Called as `loss(output, targets)`. Returns the mean over the samples, or over the targets that it does not
            ignore, a scalar; or the sum, if its `reduction` is `sum`.
        targets: `as_is` (default) passes the targets unchanged. `one_hot` converts integer classes [N] to distributions
            [N, classes].
        smoothing: Label smoothing of the distributions, from 0 to 1: the probability that is spread evenly over all
            classes. Default: 0.
        output: The tensor of the model's output from which the loss is computed, if the model returns several: a path
            such as `"0"` or `logits`, with an optional slice. If the model returns only one tensor in evaluation mode, it
            is this tensor. Default: None, the entry `logits` or `out`, or else the first tensor.

    Raises:
        ValueError: `targets`, `smoothing` or `output` has an invalid value.
    """

    def __init__(
        self,
        loss: Loss,
        targets: Literal["as_is", "one_hot"] = "as_is",
        smoothing: float = 0.0,
        output: str | None = None,
    ) -> None:
        if targets not in ("as_is", "one_hot"):
            raise ValueError(f"targets must be 'as_is' or 'one_hot', got {targets!r}")
        if not 0.0 <= smoothing <= 1.0:
            raise ValueError(f"smoothing must be from 0 to 1, got {smoothing}")
        self.loss = loss
        self.targets = targets
        self.smoothing = smoothing
        self.output = LossOutput(output)

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Compute the loss of a batch.

        Returns:
            The loss and the number of samples. `correct` is set if the targets are integer classes [N] and the output
            is [N, classes]: the fraction of the correct ones among those that are not ignored, times N.

        Raises:
            TypeError: The batch is not a pair, or the output contains no tensor.
            ConfigError: The output has no tensor at the path `output`.
        """
        inputs, targets = pair_of(batch)
        output = self.output.of(model, model(inputs))
        is_class = not targets.is_floating_point() and targets.dim() == output.dim() - 1
        expected = targets
        if self.targets == "one_hot" and is_class:
            expected = soft_targets(targets, output.shape[-1], self.smoothing).to(output.dtype)
        correct = classified = None
        if is_class and targets.dim() == 1:
            hits = output.detach().argmax(-1) == targets
            counted = None if self.targets == "one_hot" else counted_targets(self.loss, targets)
            correct = hits.sum()
            if counted is not None:
                classified = counted.sum()
                correct = (hits & counted).sum() * (len(targets) / classified.clamp(1))
        return Outcome(self.loss(output, expected), len(targets), correct, classified=classified)

    def number_of_terms(self, batch: Any) -> float:
        """Return the number of targets that the loss does not ignore, or the sum of their class weights."""
        _, targets = pair_of(batch)
        return number_of_terms(self.loss, targets, as_distributions=self.targets == "one_hot")


class KLDivergence(nn.Module):
    """The Kullback-Leibler divergence KL(targets || softmax(logits)), as the mean over the samples."""

    reduction = "batchmean"

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the divergence.

        Args:
            logits: Logits [N, classes].
            targets: Distributions [N, classes].
        """
        return F.kl_div(F.log_softmax(logits, dim=-1), targets, reduction=self.reduction)


def soft_targets(classes: Tensor, count: int, smoothing: float) -> Tensor:
    """Convert classes to smoothed distributions.

    Args:
        classes: int64, shape [N].
        count: The number of classes.
        smoothing: The probability that is spread evenly over all classes, from 0 to 1.

    Returns:
        Default dtype, shape [N, count]: smoothing / count for each class, plus 1 - smoothing for the true class.
    """
    return F.one_hot(classes, count) * (1.0 - smoothing) + smoothing / count


class Reconstruction(HasLoss):
    """A loss of the model output and the input.

    A batch is a tensor, or a tuple or list whose first element is a tensor. Further elements, such as targets, are
    ignored.

    The loss uses one tensor of the output. If a variational autoencoder returns (reconstruction, mean, log_var), it is
    trained without the KL term. The run reports which outputs get no gradient. For the KL term, write a custom task:
    see [Custom functions](../guides/custom.md#a-custom-task).

    Args:
        loss: Called as `loss(output, inputs)`. Returns the mean over the samples or elements, a scalar; or the sum, if
            its `reduction` is `sum`.
        output: The tensor of the model's output from which the loss is computed, if the model returns several; see
            `Supervised`. Default: None, the entry `logits` or `out`, or else the first tensor.

    Raises:
        ValueError: `output` is invalid.
    """

    def __init__(self, loss: Loss, output: str | None = None) -> None:
        self.loss = loss
        self.output = LossOutput(output)

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Compute the loss of a batch.

        Raises:
            ValueError: The shapes of output and input differ.
            TypeError: The inputs or the output are not a tensor.
            ConfigError: The output has no tensor at the path `output`.
        """
        inputs = inputs_of(batch)
        output = self.output.of(model, model(inputs))
        if output.shape != inputs.shape:
            raise ValueError(f"the output has shape {list(output.shape)}, but the input has shape {list(inputs.shape)}")
        return Outcome(self.loss(output, inputs), len(inputs))

    def number_of_terms(self, batch: Any) -> float:
        """Return the number of elements of the inputs; with the reduction `batchmean`, the number of samples."""
        return number_of_terms(self.loss, inputs_of(batch))


class NextToken:
    """The cross entropy between the logits of the model and the next tokens.

    A batch is tokens [N, T], or a pair of tokens [N, T] and targets [N, T] or [N], int64. Without targets, the target at
    each position is the next token. Given targets are used as they are; targets [N] are those of the last position, such
    as the answers of prompts. Targets of -100 are ignored. All other targets have the same weight in the mean,
    regardless of their batch. The model returns logits [N, T, vocabulary].

    Args:
        output: The tensor of the model's output with the logits, if the model returns several; see `Supervised`. Default:
            None, the entry `logits` or `out`, or else the first tensor.

    Raises:
        ValueError: `output` is invalid.
    """

    def __init__(self, output: str | None = None) -> None:
        self.output = LossOutput(output)

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Compute the mean loss over all predicted tokens of a batch.

        Returns:
            The loss, the number of sequences, and `correct`: the fraction of correct tokens times the number of
            sequences.

        Raises:
            TypeError: The batch has another structure.
            ValueError: The shapes of logits and targets do not match.
            ConfigError: The output has no tensor at the path `output`.
        """
        tokens, targets = _tokens_and_targets(batch)
        logits = self.output.of(model, model(tokens))  # [N, T, vocabulary]
        if targets is None:
            logits, targets = logits[:, :-1], tokens[:, 1:]  # The token after the last position is unknown.
        elif targets.dim() == 1 and logits.dim() == 3:
            logits, targets = logits[:, -1:], targets[:, None]
        if logits.dim() != 3 or targets.shape != logits.shape[:2] or not targets.numel():
            raise ValueError(
                f"targets {list(targets.shape)} do not match logits {list(logits.shape)}; next_token requires tokens [N, T], or pairs of "
                "tokens [N, T] and targets [N, T] or [N], and logits [N, T, vocabulary]"
            )
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        counted = targets != IGNORED
        hits = (logits.detach().argmax(-1) == targets) & counted
        count = counted.sum().clamp(min=1)  # If all targets are ignored, the loss is 0.
        return Outcome(total / count, len(targets), hits.sum() / count * len(targets), classified=counted.sum())

    def sample_targets(self, batch: Any) -> Tensor:
        """Return the targets of a batch, [N, T] or [N]; see `SelectsTargets`. The token after the last position is unknown."""
        tokens, targets = _tokens_and_targets(batch)
        aligned: Tensor = F.pad(tokens[:, 1:], (0, 1), value=IGNORED) if targets is None else targets
        return aligned

    def number_of_terms(self, batch: Any) -> int:
        """Return the number of targets that are not ignored."""
        return int((self.sample_targets(batch) != IGNORED).sum())


def _tokens_and_targets(batch: Any) -> tuple[Any, Any]:
    """Return tokens and targets of a batch. The targets of a batch without targets are None."""
    is_pair = isinstance(batch, list | tuple) and len(batch) != 1
    return pair_of(batch) if is_pair else (inputs_of(batch), None)
