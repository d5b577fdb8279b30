"""Configuration checks for distributed runs, made before the first step."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Problem
from ..spec.budget import BudgetConfig
from ..spec.hooks import HookSpec
from ..spec.modify import PenaltySpec


def budget_problems(budget: BudgetConfig | None) -> list[Problem]:
    """Report a recording budget, which cannot be combined with `reduce=global`.

    Args:
        budget: Budget of the run; None for no budget.

    Returns:
        The problems found; empty if neither `time` nor `bytes` is limited.
    """
    if budget is None or (budget.time is None and budget.bytes is None):
        return []
    message = "each rank would pause hooks at different steps, but reduce=global requires the rows of all ranks"
    return [Problem("budget", message, fix="set reduce=none")]


def shard_problems(hooks: Mapping[str, HookSpec]) -> list[Problem]:
    """Report hooks that never fire, or have no effect, on parameters that FSDP2 shards.

    Args:
        hooks: Hook specs by name.

    Returns:
        One problem for each such hook. Its `allowed` names a kind that works.
    """
    problems = []
    for name, spec in hooks.items():
        if spec.kind == "parameter_grad_micro":
            problems.append(
                Problem(
                    f"hooks.{name}.kind",
                    "Tensor.register_hook never fires on parameters sharded by fsdp2",
                    given=spec.kind,
                    allowed=("post_accumulate_grad", "parameter_grad"),
                )
            )
        if isinstance(spec, PenaltySpec) and spec.kind == "loss":
            problems.append(
                Problem(
                    f"hooks.{name}.kind",
                    "a penalty on the loss has no effect on parameters sharded by fsdp2",
                    given=spec.kind,
                    allowed="parameter_grad",
                )
            )
    return problems
