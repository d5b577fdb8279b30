"""Rule: processes get the same data."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class DistinctDataRule(RuleBase):
    """Two processes of `DistributedDataParallel` get the same batch in 3 checked steps, or all workers of a loader give the same ones.

    Processes get different data with a `DistributedSampler`. Workers give equal batches if each draws from a copy of one generator
    (https://docs.pytorch.org/docs/stable/notes/faq.html#my-data-loader-workers-return-identical-random-numbers), or if each reads all
    data of an iterable dataset. Batches are compared by hashes of up to 65,536 elements of each tensor.
    """

    rule: Literal["distinct_data"]


@RULES.register("distinct_data")
class DistinctData(RelationRule):
    fields = DistinctDataRule
    relation = "distinct_data"
    what = "processes get the same data"
    advice = "Use a DistributedSampler, and seed each worker by torch.utils.data.get_worker_info()."
