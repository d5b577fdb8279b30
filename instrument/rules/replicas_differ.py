"""Rule: recorded tensors of data-parallel processes differ."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from ..tables.kinds import KINDS
from .rule import RelationRule
from .step_rows import Location


class ReplicasDifferRule(RuleBase):
    """A fingerprint of a parameter, its update, gradient or optimizer state differs between data-parallel processes.

    It reads what hooks of the kinds `step_pre`, `step_post` and `parameter_grad` record with `stats: [fingerprint]`, and names the
    first step, the tensor and the ranks. Data-parallel processes apply equal gradients to equal parameters (Li et al., VLDB 2020), so
    that any difference is a fault of the program, the network or the hardware. Without a wrapper, the fingerprints have to be equal after
    an earlier step.
    """

    rule: Literal["replicas_differ"]


@RULES.register("replicas_differ")
class ReplicasDiffer(RelationRule):
    fields = ReplicasDifferRule
    relation = "replicas_differ"
    requires = "fingerprints of parameters, updates or gradients, such as hooks=fingerprints"
    what = "tensors of processes differ"
    statistics = ("fingerprint",)
    advice = "Compare the gradients of the named step before and after they are averaged, and test the memory and links of the rank."

    def selects(self, location: Location) -> bool:
        return KINDS[location.kind].frequency == "step"
