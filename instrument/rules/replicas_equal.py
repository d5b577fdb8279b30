"""Rule: the parameters of data-parallel processes differ."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class ReplicasEqualRule(RuleBase):
    """The trained parameters of the processes of a data-parallel training are not equal in all bits after a step.

    All processes start with the same parameters and apply the same mean gradients (Li et al., VLDB 2020), so that any difference is a
    fault: a process calls `model.module`, changes its gradients or parameters, or has another optimizer. TrainCheck (Jiang et al., OSDI
    2025) finds the divergence of DeepSpeed issue 1801 by this relation. A training is data-parallel if it has a
    `DistributedDataParallel`, also one that the loop does not call, or if the gradients of all processes were equal once, although their
    inputs were not. Processes that shard parameters or average them later are not checked.
    """

    rule: Literal["replicas_equal"]


@RULES.register("replicas_equal")
class ReplicasEqual(RelationRule):
    fields = ReplicasEqualRule
    relation = "replicas_equal"
    what = "parameters of processes differ"
    advice = "Call the wrapped model in the forward pass, and change gradients and parameters in all processes alike."
