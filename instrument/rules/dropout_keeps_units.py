"""Rule: dropout drops nearly all units."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class DropoutKeepsUnitsRule(RuleBase):
    """A dropout module of PyTorch in training mode drops more than 0.9 of its input.

    Usual probabilities are 0.2 to 0.5, and at most 0.8 (Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html). The
    scaling of the units that are kept by 1 / (1 - p) adds noise with p / (1 - p) times their mean square: more than 9 times.
    """

    rule: Literal["dropout_keeps_units"]


@RULES.register("dropout_keeps_units")
class DropoutKeepsUnits(RelationRule):
    fields = DropoutKeepsUnitsRule
    relation = "dropout_keeps_units"
    what = "dropout of nearly all units"
    advice = "Use a smaller probability: p of a dropout module is the fraction that it drops."
