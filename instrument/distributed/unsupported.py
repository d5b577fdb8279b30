"""Configuration checks for distributed runs, made before the first step."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Mistake
from ..spec.budget import BudgetConfig
from ..spec.functions import PenaltySpec
from ..spec.hooks import HookSpec


def budget_mistakes(budget: BudgetConfig | None) -> list[Mistake]:
    """Report a recording budget, which cannot be combined with `reduce=global`.

    Args:
        budget: Budget of the run; None for no budget.

    Returns:
        The problems found; empty if neither `time` nor `bytes` is limited.
    """
    if budget is None or (budget.time is None and budget.bytes is None):
        return []
    problem = "each rank would look away at other times, and rows of all ranks need all of them"
    return [Mistake("budget", problem, allowed="reduce=none")]


def shard_mistakes(hooks: Mapping[str, HookSpec]) -> list[Mistake]:
    """Report hooks that never fire, or have no effect, on parameters that FSDP2 shards.

    Args:
        hooks: Hook specs by name.

    Returns:
        One problem for each such hook. Its `allowed` names a kind that works.
    """
    mistakes = []
    for name, spec in hooks.items():
        if spec.kind == "parameter_grad_micro":
            mistakes.append(
                Mistake(
                    f"hooks.{name}.kind",
                    "Tensor.register_hook never fires on parameters that fsdp2 shards",
                    written=spec.kind,
                    allowed="post_accumulate_grad: the averaged gradient, in this rank's shard; parameter_grad: at the "
                    "optimizer boundary",
                )
            )
        if isinstance(spec, PenaltySpec) and spec.kind == "loss":
            mistakes.append(
                Mistake(
                    f"hooks.{name}.kind",
                    "a penalty on the loss does not reach parameters that fsdp2 shards",
                    written=spec.kind,
                    allowed="parameter_grad",
                )
            )
    return mistakes
