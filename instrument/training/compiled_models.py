"""Support for models that are compiled with torch.compile."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..config.experiment import CompileConfig
from ..config.hook_specs import graph_obstacle, graph_problems
from ..errors import raise_problems
from ..plan.hook_plan import HookPlan
from ..probe.probe import Probe


def prepare_compiled(model: nn.Module, plan: HookPlan) -> str | None:
    """Prepare a model that is compiled, or will be compiled, for the attachment of hooks.

    Compiled code ignores hooks that were attached after its first call. The compiled code is therefore discarded, and
    the model is compiled again at its next call.

    Returns:
        A message for the user; None if no part of the model is compiled.

    Raises:
        ConfigError: A part is compiled with `fullgraph=True`, and a hook cannot be part of a graph.
    """
    _guard_hooks()  # also if nothing is compiled yet
    compiled = [part for part in model.modules() if hasattr(part, "dynamo_ctx") or part._compiled_call_impl is not None]
    if not compiled:
        return None
    if any(_is_full_graph(part) for part in compiled):
        fix = "compile the model with fullgraph=False"
        raise_problems([each for name, spec in plan.specs.items() for each in graph_problems(name, spec, fix)])
    torch.compiler.reset()
    return f"the model was already compiled; it is compiled again: {place_of_hooks(plan)}"


def _is_full_graph(part: nn.Module) -> bool:
    context = getattr(part, "dynamo_ctx", None)
    if context is None:  # `part.compile()` keeps the context in the closure of the compiled call only
        context = inspect.getclosurevars(part._compiled_call_impl).nonlocals.get("self")  # type: ignore[arg-type]
    return getattr(context, "fullgraph", False) is True


def compile_model(model: nn.Module, options: CompileConfig) -> nn.Module:
    """Return the compiled model. The compiler runs at the first call, after hooks are attached."""
    torch.compiler.reset()  # its cache may contain the model of a previous job of a sweep, compiled without guards on hooks
    _guard_hooks()
    return torch.compile(model, fullgraph=options.fullgraph, dynamic=options.dynamic, mode=options.mode)  # type: ignore[return-value]


def _guard_hooks() -> None:
    """Let compiled code notice that hooks were attached or removed, and that another model of the same class has others."""
    import torch._dynamo

    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()  # code that was compiled before would not notice hooks


def place_of_hooks(plan: HookPlan) -> str:
    """Describe how many hooks are inside compiled graphs, and which of them break graphs."""
    on_modules = {name: spec for name, spec in plan.specs.items() if spec.definition.family == "module"}
    outside = {name: obstacle for name, spec in on_modules.items() if (obstacle := graph_obstacle(spec)) is not None}
    inside = len(on_modules) - len(outside)
    text = f"compiled: {inside} hook{'s' * (inside != 1)} inside graphs"
    reasons = "; ".join(f"hook {name!r} breaks them: {obstacle.reason}" for name, obstacle in outside.items())
    return f"{text}; {reasons}" if outside else text


@contextmanager
def reported_graph_breaks(probe: Probe) -> Iterator[None]:
    """Write an event for the graph breaks of the block: their number, and the reasons that the compiler reports."""
    before = _graph_breaks()
    yield
    breaks = _graph_breaks() - before
    if reasons := [f"{count} x {reason.strip().splitlines()[0]}" for reason, count in breaks.items()]:
        probe.event("graph_break", f"{breaks.total()} graph breaks: {'; '.join(reasons)}", severity="info")


def _graph_breaks() -> Counter[str]:
    compiler = sys.modules.get("torch._dynamo.utils")
    return Counter() if compiler is None else Counter(compiler.counters["graph_break"])
