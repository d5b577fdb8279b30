"""Support for models that are compiled with torch.compile."""

from __future__ import annotations

import sys
from collections import Counter

from torch import nn

from ..errors import ConfigError, Problem
from ..plan.hook_plan import HookPlan
from ..spec.kinds import KINDS

# from `docs/performance.md`
SLOWDOWN = "in benchmarks, steps took 2 to 3 times as long with a hook on every module, scheduled or not"


def prepare_compiled(model: nn.Module, plan: HookPlan) -> str | None:
    """Prepare a model that is compiled, or will be compiled, for the attachment of hooks.

    Compiled code ignores hooks that were attached after its first call. The compiled code is therefore discarded, and
    the model is compiled again at its next call.

    Args:
        model: The model.
        plan: The plan of the hooks.

    Returns:
        A message for the user; None if no part of the model is compiled.

    Raises:
        ConfigError: The model is compiled with `fullgraph=True`, which does not allow hooks on modules.
    """
    import torch._dynamo  # Imported also if nothing is compiled yet, so that later compilations exclude the hooks.

    compiled = [part for part in model.modules() if hasattr(part, "dynamo_ctx") or part._compiled_call_impl is not None]
    if not compiled:
        return None
    is_fullgraph = any(getattr(getattr(part, "dynamo_ctx", None), "fullgraph", False) for part in compiled)
    on_modules = [name for name, spec in plan.specs.items() if spec.definition.family == "module"]
    if is_fullgraph and on_modules:
        kinds = ", ".join(name for name, kind in KINDS.items() if kind.family != "module")
        kind = plan.specs[on_modules[0]].kind
        message = f"hooks of kind {kind} cause graph breaks, which fullgraph=True forbids"
        fix = "compile the model with fullgraph=False"
        raise ConfigError(Problem(f"hooks.{on_modules[0]}.kind", message, allowed=kinds, fix=fix))
    torch.compiler.reset()
    return "the model was already compiled; it is compiled again so that the hooks fire"


def cost_of_hooks(plan: HookPlan) -> str | None:
    """Return what the hooks of a plan cost in compiled code, for the summary; None if they break no graph."""
    if all(spec.definition.family != "module" for spec in plan.specs.values()):
        return None
    return f"hooks on modules break the compiled graph: {SLOWDOWN}"


def graph_breaks() -> Counter[str]:
    """Return the number of graph breaks in this process, by the reason that the compiler reports."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return Counter() if compiler is None else Counter(compiler.counters["graph_break"])


def describe_graph_breaks(before: Counter[str]) -> str:
    """Describe the graph breaks since an earlier call of `graph_breaks`.

    Args:
        before: The result of the earlier call.

    Returns:
        The number of graph breaks with the reasons; an empty string without graph breaks.
    """
    breaks = graph_breaks() - before
    reasons = [f"{count} x {reason.strip().splitlines()[0]}" for reason, count in breaks.items()]
    return f"{breaks.total()} graph breaks: {'; '.join(reasons)}" if reasons else ""
