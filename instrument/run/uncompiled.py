"""Optimizers that do not import PyTorch's compiler.

`import torch._dynamo` takes half as long as `import torch`, and every optimizer imports it, compiled or not: PyTorch keeps
`add_param_group`, `zero_grad` and the like out of compiled graphs, and breaks the graph around `step`. As long as the compiler
is not imported nothing is compiled, and the methods that PyTorch has wrapped can be called directly. Each function here looks
at every call whether it is imported, and from then on calls what PyTorch has wrapped around the method.

The training is the same to the last bit. With a version of PyTorch that wraps its methods in another way nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

from ..compiler import compiler_imported

_NEVER_TRACED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_IN_PLACE = "__dynamo_disable"  # the attribute in which PyTorch keeps what it calls in place of such a method


@cache
def spare_methods() -> None:
    """Let the methods that all optimizers share run without the compiler, in this process."""
    for name in _NEVER_TRACED:
        wrapper = getattr(Optimizer, name)
        if isinstance(method := getattr(wrapper, "__wrapped__", None), FunctionType):
            vars(method).setdefault(_IN_PLACE, _until_imported(wrapper, method))


def _until_imported(wrapper: Callable[..., Any], method: FunctionType) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiler_imported():
            return method(*args, **kwargs)
        if vars(method).get(_IN_PLACE) is call:
            delattr(method, _IN_PLACE)  # the wrapper puts its own there
        return wrapper(*args, **kwargs)

    return call


def spare_step(optimizer: Optimizer) -> None:
    """Let `step` of one of PyTorch's optimizers run without the compiler; one of another kind is left as it is."""
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
