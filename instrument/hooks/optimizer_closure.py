"""Support for optimizers with a closure: gradients do not exist when the step begins, but after the closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def run_after_gradients(args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], None]) -> Arguments | None:
    """Run a function as soon as gradients exist: at once, or after each call of the closure if there is one.

    Args:
        args: The positional arguments of a pre hook of `optimizer.step`: the optimizer, and possibly the closure.
        kwargs: The keyword arguments.
        act: The function.

    Returns:
        The arguments with which to call the step instead; None without a closure.
    """
    optimizer, *positional = args
    closure = kwargs.get("closure", positional[0] if positional else None)
    if closure is None:
        act()
        return None

    def wrapped_closure() -> Any:
        loss = closure()
        act()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": wrapped_closure}
    return (optimizer, wrapped_closure, *positional[1:]), kwargs
