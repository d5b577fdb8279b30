"""PyTorch's compiler, `torch._dynamo`: half as long to import as all of torch, and imported only where something is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch._compile import _disable_dynamo


def compiler_imported() -> bool:
    """Whether the compiler is imported: before that no code is compiled in this process."""
    return "torch._dynamo" in sys.modules


def outside_graphs(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a hook out of what torch.compile compiles: it breaks the graph there, and runs as it is written.

    Where the compiler is imported this is `torch.compiler.disable`, which would import it. Elsewhere it is a function that
    does the same as soon as the compiler is imported.
    """
    return _disabled(hook) if compiler_imported() else _disabled_later(hook)


@cache
def _disabled(hook: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(hook)  # type: ignore[no-any-return]


@cache
def _disabled_later(hook: Callable[..., Any]) -> Callable[..., Any]:
    disabled = _disable_dynamo(hook)  # imports the compiler when it is called

    @wraps(hook)
    def outside(*args: Any, **kwargs: Any) -> Any:
        return disabled(*args, **kwargs) if compiler_imported() else hook(*args, **kwargs)

    return outside
