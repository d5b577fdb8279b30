"""Language models: predict each token from the ones before it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional as F

from .base import Outcome
from .supervised import main_output


class NextToken:
    """Tokens [N, T]; cross entropy of the model's logits [N, T, vocabulary] at each place and the token at the next."""

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """The mean loss over all predicted tokens; `correct` is in samples, so that it is a share of tokens."""
        tokens = batch[0] if isinstance(batch, list | tuple) else batch
        logits = main_output(model(tokens))[:, :-1]  # [N, T - 1, vocabulary]: the last place predicts nothing we know
        targets = tokens[:, 1:]  # [N, T - 1]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        right = (logits.detach().argmax(-1) == targets).float().mean(1).sum()
        return Outcome(loss, len(tokens), right)
