"""Calls of a custom function that observes a tensor."""

from __future__ import annotations

from torch import Tensor

from ..errors import HookError
from .base import Action, Context
from .builtin.call import CallSpec
from .custom_functions import custom_function, observe
from .intervention import describe, versioned_copy


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
