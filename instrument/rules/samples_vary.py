"""Rule: samples or batches do not vary."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class SamplesVaryRule(RuleBase):
    """All samples of a batch are equal in 3 steps, or the model gets the same batch in 4 steps although the data loader has several.

    It is checked if a PyTorch data loader with several batches is read in each of these steps. Full-batch training, a constant input that
    is no batch of a loader, and one batch that the loop keeps on purpose are not reported.
    """

    rule: Literal["samples_vary"]


@RULES.register("samples_vary")
class SamplesVary(RelationRule):
    fields = SamplesVaryRule
    relation = "samples_vary"
    what = "samples do not vary"
    advice = "Pass the current batch to the model, call iter(loader) once per epoch, and use the index in the dataset."
