"""Access to `torch._dynamo`, which is only imported if code is compiled, since its import is slow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch._C._dynamo import eval_frame
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling


def compiler_imported() -> bool:
    """Return whether the compiler is imported; before that, no code in this process is compiled."""
    return "torch._dynamo" in sys.modules


def uncompiled() -> AbstractContextManager[object]:
    """Return a context in which compiled functions and modules run as plain Python."""
    return torch.compiler.set_stance("force_eager") if compiler_imported() else nullcontext()


def has_compiled() -> bool:
    """Return whether torch.compile has compiled any function in this process."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler is not None and bool(compiler.counters["frames"])


def is_compiled_module(module: object) -> bool:
    """Return whether an object is the result of `torch.compile(module)`."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def compiler_entries() -> dict[int, bool]:
    """Return the `id` of the code objects that call compiled code, each with true; empty before the compiler is imported."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return {} if compiler is None else _entries(compiler._TorchDynamoContext.__call__)


@cache  # by the function: the hash of its code would be computed at each call
def _entries(function: FunctionType) -> dict[int, bool]:
    return {id(inner): True for inner in function.__code__.co_consts if isinstance(inner, CodeType)}


@cache
def exclude_from_graphs(hook: Callable[..., Any], instead: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Exclude a hook, which gets positional arguments, from torch.compile: it breaks the graph and runs as plain Python.

    Like `torch.compiler.disable`, which would import the compiler, and which takes longer at each call. Compiled code calls `instead`
    in its place, or the hook itself.
    """
    disabled = _disable_dynamo(instead or hook)  # imports the compiler when it is called, not here

    @wraps(hook)
    def wrapper(*args: Any) -> Any:
        if is_compiling() or get_eval_frame_callback() is not None:
            return disabled(*args)
        return hook(*args)

    # All wrappers have this code. The compiler would trace it for each hook and number of arguments, and warn at its limit.
    run_outside_of_graphs(wrapper, with_calls=False)
    return wrapper


def excluded_method(method: Callable[..., Any]) -> MethodType:
    """Return a bound method that is excluded from compilation; see `exclude_from_graphs`. A copied object gets its own."""
    bound = cast(MethodType, method)
    return MethodType(exclude_from_graphs(bound.__func__), bound.__self__)


def run_outside_of_graphs(hook: Callable[..., Any], *, with_calls: bool = True) -> None:
    """Let a hook run as plain Python, also `with_calls` of functions, where the code that calls it is not part of a graph.

    In a graph, it is traced. Like `torch._dynamo.eval_frame.skip_code`, which would import the compiler.
    """
    code = cast(FunctionType, hook).__code__
    actions = eval_frame._FrameAction
    recursive = actions.SKIP if with_calls else actions.DEFAULT
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(actions.SKIP, recursive))
