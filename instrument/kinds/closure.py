"""An optimizer that is given a closure has no gradients when its step begins: it calls the closure to get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def when_gradients_are_there(
    args: tuple[Any, ...], kwargs: dict[str, Any], act: Callable[[], None]
) -> Arguments | None:
    """Act at once where a step has no closure; behind the closure, each time that it is called, where there is one.

    Args:
        args: What a pre hook of `optimizer.step` is given: the optimizer, and the closure where it is positional.
        kwargs: The same, by name.
        act: What to do.

    Returns:
        What the step is to be called with instead; None where it has no closure.
    """
    optimizer, *positional = args
    closure = kwargs.get("closure", positional[0] if positional else None)
    if closure is None:
        act()
        return None

    def followed() -> Any:
        loss = closure()
        act()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": followed}
    return (optimizer, followed, *positional[1:]), kwargs
