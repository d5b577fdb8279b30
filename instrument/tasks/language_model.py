"""Task for language models: predict each token from the previous tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .base import IGNORED, Outcome, inputs_of, pair_of
from .model_output import LossOutput


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
        _check_shapes(logits, targets)
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
        tokens, targets = _tokens_and_targets(batch)
        return int(((tokens[:, 1:] if targets is None else targets) != IGNORED).sum())


def _tokens_and_targets(batch: Any) -> tuple[Any, Any]:
    """Return tokens and targets of a batch. The targets of a batch without targets are None."""
    is_pair = isinstance(batch, list | tuple) and len(batch) != 1
    return pair_of(batch) if is_pair else (inputs_of(batch), None)


def _check_shapes(logits: Tensor, targets: Tensor) -> None:
    """Check that the logits of each position have one target."""
    if logits.dim() != 3 or targets.shape != logits.shape[:2] or not targets.numel():
        raise ValueError(
            f"targets {list(targets.shape)} do not match logits {list(logits.shape)}; next_token requires tokens [N, T], or pairs of "
            "tokens [N, T] and targets [N, T] or [N], and logits [N, T, vocabulary]"
        )
