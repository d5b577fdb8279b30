"""The compiler of PyTorch: models that are compiled with torch.compile, and optimizers that do not import it.

Every optimizer imports `torch._dynamo`, to exclude its methods from compiled graphs. Nothing is compiled before that import, so until
then the methods can be called directly. Afterwards, the wrappers of PyTorch are called. A command with two steps takes 2.5 s instead of
3.9 s (PyTorch 2, two CPU cores). The training is bit-identical. If a version of PyTorch wraps its methods in another way, nothing is
replaced. `tests/training/test_optimizer_fast_import.py` fails when PyTorch does not import the compiler any more, and the functions
`bypass_compiler_in_...` can go.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

from ..config.experiment import CompileConfig
from ..config.hook_specs import graph_obstacle, graph_problems
from ..errors import raise_problems
from ..formatting import counted
from ..plan.hook_plan import HookPlan
from ..probe.probe import Probe
from ..runtime.lazy_compiler import compiler_imported

_UNTRACED_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_REPLACEMENT_ATTRIBUTE = "__dynamo_disable"  # The attribute in which PyTorch caches the replacement of a method.


def prepare_compiled(model: nn.Module, plan: HookPlan) -> str | None:
    """Prepare a model that is or will be compiled for hooks. Return a message for the user; None if no part of it is compiled.

    Compiled code ignores hooks that were attached after its first call. The compiled code is therefore discarded, and
    the model is compiled again at its next call. Raise a ConfigError if a hook cannot be part of a graph with `fullgraph=True`.
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
    text = f"{inside} hook{'s' * (inside != 1)} inside graphs"
    reasons = "; ".join(f"hook {name!r} breaks them: {obstacle.reason}" for name, obstacle in outside.items())
    return f"{text}; {reasons}" if outside else text


@contextmanager
def reported_graph_breaks(probe: Probe) -> Iterator[None]:
    """Write an event for the graph breaks of the block: their number, and the reasons that the compiler reports."""
    before = _graph_breaks()
    yield
    breaks = _graph_breaks() - before
    if reasons := [f"{count} x {_first_line(reason)}" for reason, count in breaks.items()]:
        probe.event("graph_break", f"{counted(breaks.total(), 'graph break')}: {'; '.join(reasons)}", severity="info")


def _first_line(reason: str) -> str:
    """Return the message of a call of `graph_break`, such as those of hooks, and otherwise the first line of the compiler's reason."""
    called = re.search(r"User-inserted graph break\. Message: (?!None$)(.+)", reason, re.MULTILINE)
    return called[1] if called else reason.strip().splitlines()[0]


def _graph_breaks() -> Counter[str]:
    compiler = sys.modules.get("torch._dynamo.utils")
    return Counter() if compiler is None else Counter(compiler.counters["graph_break"])


@cache
def bypass_compiler_in_methods() -> None:
    """Let the methods that all optimizers share run without the compiler, in this process."""
    for name in _UNTRACED_METHODS:
        wrapper = getattr(Optimizer, name)
        if isinstance(method := getattr(wrapper, "__wrapped__", None), FunctionType):
            vars(method).setdefault(_REPLACEMENT_ATTRIBUTE, _until_imported(wrapper, method))


def _until_imported(wrapper: Callable[..., Any], method: FunctionType) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiler_imported():
            return method(*args, **kwargs)
        if vars(method).get(_REPLACEMENT_ATTRIBUTE) is call:
            delattr(method, _REPLACEMENT_ATTRIBUTE)  # The wrapper then caches its own replacement.
        return wrapper(*args, **kwargs)

    return call


def bypass_compiler_in_step(optimizer: Optimizer) -> None:
    """Let `step` of a PyTorch optimizer run without the compiler. Other optimizers are not changed."""
    wrapper = getattr(type(optimizer).step, "__wrapped__", None)
    if "step" in vars(optimizer) or not isinstance(wrapper, FunctionType):
        return
    if wrapper.__code__ not in _use_grad_for_differentiable.__code__.co_consts:
        return
    method = wrapper.__wrapped__  # type: ignore[attr-defined]

    @wraps(wrapper)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if compiler_imported():
            return wrapper(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return method(self, *args, **kwargs)

    optimizer.step = MethodType(Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]
