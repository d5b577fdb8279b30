"""Rule: a layer of one unit determines all logits."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class NarrowLayerRule(RuleBase):
    """The logits of at least three classes lie on a line, in a model with a Linear layer of one unit.

    All information passes through this unit: each class is a range of one number. A layer with as many units as there are classes less one
    does not limit the logits. Layers of one unit next to others, such as those of attention and gates, are not reported.
    """

    rule: Literal["narrow_layer"]


@RULES.register("narrow_layer")
class NarrowLayer(RelationRule):
    fields = NarrowLayerRule
    relation = "narrow_layer"
    what = "layer of one unit before several classes"
    advice = "Use more units in this layer: at least as many as there are classes."
