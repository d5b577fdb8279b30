"""Language models: predict each token from the ones before it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .base import Outcome, inputs_of, pair_of
from .supervised import main_output

IGNORED = -100  # targets that F.cross_entropy leaves out


class NextToken:
    """Cross entropy of the model's logits [N, T, vocabulary] and the next token at each place.

    A batch is tokens [N, T], whose targets are the same tokens one place later; or a pair of tokens and targets, both
    [N, T]: the targets are then used as they are, and those of -100 are left out. Every target that counts has the same
    weight, whichever batch it is in.
    """

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """The mean loss over all predicted tokens; `correct` is in samples, so that it is a share of tokens."""
        tokens, targets = _tokens_and_targets(batch)
        logits = main_output(model(tokens))  # [N, T, vocabulary]
        if targets is None:
            logits, targets = logits[:, :-1], tokens[:, 1:]  # the last place predicts nothing we know
        _check_shapes(logits, targets)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        counted = targets != IGNORED
        hits = (logits.detach().argmax(-1) == targets) & counted
        count = counted.sum().clamp(min=1)  # a batch in which no target counts has a loss of 0
        return Outcome(total / count, len(targets), hits.sum() / count * len(targets))

    def number_of_terms(self, batch: Any) -> int:
        """The number of targets that count."""
        tokens, targets = _tokens_and_targets(batch)
        return int(((tokens[:, 1:] if targets is None else targets) != IGNORED).sum())


def _tokens_and_targets(batch: Any) -> tuple[Any, Any]:
    """The two parts of a pair; of tokens alone, None as targets."""
    is_pair = isinstance(batch, list | tuple) and len(batch) != 1
    return pair_of(batch) if is_pair else (inputs_of(batch), None)


def _check_shapes(logits: Tensor, targets: Tensor) -> None:
    """Whether there is one target for the logits of each place.

    Raises:
        ValueError: With the shapes.
    """
    if logits.dim() != 3 or targets.shape != logits.shape[:2] or not targets.numel():
        raise ValueError(
            f"targets {list(targets.shape)} do not fit logits {list(logits.shape)}; next_token needs tokens [N, T], or pairs of "
            "tokens [N, T] and targets [N, T], and logits [N, T, vocabulary]"
        )
