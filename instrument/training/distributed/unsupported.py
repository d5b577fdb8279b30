"""Configuration checks for distributed runs, made before the first step."""

from __future__ import annotations

from collections.abc import Mapping

from ...config.base import ObservationSpec
from ...config.budget import BudgetConfig
from ...config.hook_specs import HookSpec
from ...config.record import RecordSpec
from ...errors import Problem


def reduce_problems(budget: BudgetConfig | None, hooks: Mapping[str, HookSpec]) -> list[Problem]:
    """Report what cannot be combined with `reduce=global`: a recording budget, conditions of record hooks, rows for each
    sample, custom statistics, and fingerprints.

    Args:
        budget: Budget of the run; None for no budget.
    """
    problems = []
    if budget is not None and (budget.time is not None or budget.bytes is not None):
        message = "each rank would pause hooks at different steps, but reduce=global requires the rows of all ranks"
        problems.append(Problem("budget", message, fix="set reduce=none"))
    for name, spec in hooks.items():
        if isinstance(spec, RecordSpec) and spec.condition is not None:
            message = "each rank decides about its own tensors, but reduce=global requires the rows of all ranks"
            problems.append(Problem(f"hooks.{name}.when", message, str(spec.condition), fix="set reduce=none"))
        if isinstance(spec, RecordSpec) and spec.split_dim == 0:
            message = "dimension 0 has other samples in each process, but reduce=global merges rows of the same index"
            problems.append(Problem(f"hooks.{name}.split_dim", message, 0, fix="set reduce=none"))
        if isinstance(spec, RecordSpec) and spec.custom_statistics:
            message = "custom statistics of several processes cannot be merged into one row, as reduce=global requires"
            given = spec.custom_statistics[0].target
            problems.append(Problem(f"hooks.{name}.stats", message, given=given, fix="set reduce=none"))
        if isinstance(spec, RecordSpec) and "fingerprint" in spec.stats:
            message = "fingerprints of the parts of several processes cannot be merged into one row, as reduce=global requires"
            fix = "set reduce=none, so that each process records its own"
            problems.append(Problem(f"hooks.{name}.stats", message, given="fingerprint", fix=fix))
    return problems


def shard_problems(hooks: Mapping[str, HookSpec]) -> list[Problem]:
    """Report hooks that never fire, have no effect, or select other elements, on parameters that FSDP2 shards.

    Returns:
        The problems found. `allowed` names a kind that works, if one does.
    """
    problems = []
    for name, spec in hooks.items():
        if spec.kind == "parameter_grad_micro":
            message = "Tensor.register_hook never fires on parameters sharded by fsdp2"
            allowed = ("post_accumulate_grad", "parameter_grad")
            problems.append(Problem(f"hooks.{name}.kind", message, spec.kind, allowed))
        if isinstance(spec, ObservationSpec) and spec.definition.family != "module":
            message = "a process has a shard of this tensor, whose indices differ from those of the full tensor"
            problems += [
                Problem(f"hooks.{name}.{field}", message, getattr(spec, field), fix="record the complete tensor")
                for field in spec.selection
                if field != "slice"
            ]
        if spec.uses_parameters and spec.kind == "loss":
            message = "a penalty on the loss has no effect on parameters sharded by fsdp2"
            problems.append(Problem(f"hooks.{name}.kind", message, spec.kind, "parameter_grad"))
    return problems
