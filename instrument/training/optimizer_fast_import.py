"""Use optimizers without importing the compiler of PyTorch.

Every optimizer imports `torch._dynamo`, to exclude its methods from compiled graphs. Nothing is compiled before that import, so until
then the methods can be called directly. Afterwards, the wrappers of PyTorch are called.

A command with two steps takes 2.5 s instead of 3.9 s (PyTorch 2, two CPU cores). The training is bit-identical. If a version of
PyTorch wraps its methods in another way, nothing is replaced. `tests/training/test_optimizer_fast_import.py` fails when PyTorch
does not import the compiler any more, and this module can go.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

from ..runtime.lazy_compiler import compiler_imported

_UNTRACED_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_REPLACEMENT_ATTRIBUTE = "__dynamo_disable"  # The attribute in which PyTorch caches the replacement of a method.


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
