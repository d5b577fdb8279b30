"""Custom functions of specs: they are imported, and called so that they cannot affect the rest of the run; and the action `call`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, HookError, Problem, first_line
from ..fields.field_types import Target
from ..fields.targets import locate
from .base import Action, Context
from .builtin.call import CallSpec
from .intervention import describe, versioned_copy, with_version


def custom_function(target: Target, where: str, *arguments: str, trial: bool = True) -> Callable[..., Any]:
    """Import a custom function and bind its further arguments.

    A class is instantiated once, and the instance is called.

    Args:
        arguments: The names of the arguments with which it is called: `tensor`, or `tensor` (or `tensors`) and `context`.
        trial: Whether a function written in C that declares no parameters is called once, which is the only way to
            test them. Default: True.

    Returns:
        The function. It raises a RuntimeError if it changes PyTorch's global random state.

    Raises:
        ConfigError: It does not exist, cannot be called with these arguments, is a generator or asynchronous, or the
            constructor of the class raises an exception.
    """
    imported: Callable[..., Any] = target.function or locate(target.target, where)
    further = target.model_extra or {}
    bound = {} if inspect.isclass(imported) else further
    try:
        function: Any = imported(**further) if inspect.isclass(imported) else imported
        _check_arguments(function, len(arguments), bound, trial=trial)
    except (TypeError, ValueError) as error:
        message = f"cannot be called as fn({', '.join(arguments)}): {first_line(error)}"
        raise ConfigError(Problem(where, f"{target.target} {message}", further or target.target)) from None
    except Exception as error:
        message = f"{target.target} could not be built: {type(error).__name__}: {error}"
        raise ConfigError(Problem(where, message, further or target.target)) from error
    return check_random_state(partial(function, **bound))


def observe(function: Callable[..., Any], tensor: Tensor, context: Context, *further: Context) -> Any:
    """Call a custom function with a tensor that it must not change, without gradients. Return its result.

    Raises:
        HookError: The function modified the tensor in place.
    """
    given = with_version(tensor).detach()
    version = given._version
    with torch.no_grad():
        result = function(given, *further)
    if given._version != version:
        message = f"{describe(context)} modified its tensor in place, but may only read it; modify a copy instead"
        raise HookError(message)
    return result


def check_random_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of a tensor, or a dict of tensors, fail if it changes PyTorch's random state, which would alter the run."""

    def checked(given: Tensor | dict[str, Tensor], *further: Any) -> Any:
        tensor = given if isinstance(given, Tensor) else next(iter(given.values()))
        before = _random_state(tensor)
        new = function(given, *further)
        if not torch.equal(before, _random_state(tensor)):
            raise RuntimeError(
                "the function changes the global random state, which affects the rest of the run; "
                "pass generator=context.generator(tensor.device)"
            )
        return new

    return checked


def _random_state(tensor: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(tensor.device) if tensor.is_cuda else torch.get_rng_state()


def _check_arguments(function: Callable[..., Any], count: int, bound: dict[str, Any], *, trial: bool) -> None:
    """Raise a TypeError if the function cannot be called with `count` arguments and the bound ones, or runs later."""
    for code in (function, getattr(function, "__call__", None)):  # noqa: B004 - an instance runs its method
        if inspect.iscoroutinefunction(code) or inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
            raise TypeError("a call of an asynchronous function or of a generator does not run its code")
    try:
        signature = inspect.signature(function)
    # A function written in C that does not declare its parameters: only a call can test them.
    except ValueError:
        if trial:
            function(*(torch.zeros(1), object())[:count], **bound)
        return
    signature.bind(*(torch.empty(0), None)[:count], **bound)


class CallFunction(Action):
    """The call action of a spec."""

    def __init__(self, spec: CallSpec) -> None:
        self.function = custom_function(spec.fn, f"hooks.{spec.name}.fn", "tensor", "context", trial=False)

    def __call__(self, tensor: Tensor, context: Context) -> None:
        """Call the function with a copy of the tensor, so that a change of the copy's memory through NumPy has no effect.

        Raises:
            HookError: The function modified the copy in place, or returned a value.
        """
        returned = observe(self.function, versioned_copy(tensor), context, context)
        if returned is not None:
            raise HookError(
                f"{describe(context)}: a function of action call must return None, but returned "
                f"{type(returned).__name__}; use action modify to replace the tensor"
            )
