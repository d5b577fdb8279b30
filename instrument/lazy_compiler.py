"""Access to `torch._dynamo`, which is only imported if code is compiled, since its import is slow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch._compile import _disable_dynamo


def compiler_imported() -> bool:
    """Return whether the compiler is imported; before that, no code in this process is compiled."""
    return "torch._dynamo" in sys.modules


def exclude_from_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a hook from compilation by torch.compile: the hook breaks the graph and runs as plain Python.

    If the compiler is imported, this is `torch.compiler.disable`, which would import it otherwise. If it is not
    imported yet, the returned function disables compilation once the compiler is imported.

    Args:
        hook: The function to exclude.
    """
    return _disabled(hook) if compiler_imported() else _disabled_later(hook)


@cache
def _disabled(hook: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(hook)  # type: ignore[no-any-return]


@cache
def _disabled_later(hook: Callable[..., Any]) -> Callable[..., Any]:
    disabled = _disable_dynamo(hook)  # imports the compiler when it is called, not here

    @wraps(hook)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return disabled(*args, **kwargs) if compiler_imported() else hook(*args, **kwargs)

    return wrapper
