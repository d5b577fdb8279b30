"""Hooks and torch.compile."""

from __future__ import annotations

import sys
from collections import Counter

from torch import nn

from ..errors import ConfigError, Mistake
from ..plan.sites import HookPlan
from ..spec.kinds import KINDS


def meet_compiled(model: nn.Module, plan: HookPlan) -> str | None:
    """Prepare a model that may be compiled, or have been compiled already, for the hooks that are about to be attached.

    Compiled code does not look for hooks that came after its first call, so it is thrown away; it is compiled anew at
    the next one.

    Returns:
        What to tell the user; None where nothing is compiled.

    Raises:
        ConfigError: The model was compiled with `fullgraph=True`, which leaves no room for hooks on modules.
    """
    import torch._dynamo  # hooks are kept out of graphs that are compiled after they were attached, too

    compiled = [part for part in model.modules() if hasattr(part, "dynamo_ctx") or part._compiled_call_impl is not None]
    if not compiled:
        return None
    whole = any(getattr(getattr(part, "dynamo_ctx", None), "fullgraph", False) for part in compiled)
    on_modules = [name for name, spec in plan.specs.items() if spec.definition.family == "module"]
    if whole and on_modules:
        kinds = ", ".join(name for name, kind in KINDS.items() if kind.family != "module")
        problem = (
            f"kind {plan.specs[on_modules[0]].kind} breaks the graph, and the model is compiled with fullgraph=True"
        )
        raise ConfigError(Mistake(f"hooks.{on_modules[0]}.kind", problem, allowed=f"{kinds}; or fullgraph=False"))
    torch.compiler.reset()
    return "the model was compiled before: it will be compiled again, so that the hooks fire"


def graph_breaks() -> Counter[str]:
    """How often compiled graphs of this process were broken, by the reason that the compiler gives."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return Counter() if compiler is None else Counter(compiler.counters["graph_break"])


def broken_graphs(before: Counter[str]) -> str:
    """How often compiled graphs were broken since `before`, and why; empty where they were not."""
    breaks = graph_breaks() - before
    reasons = [f"{count} x {reason.strip().splitlines()[0]}" for reason, count in breaks.items()]
    return f"{breaks.total()} graph breaks: {'; '.join(reasons)}" if reasons else ""
