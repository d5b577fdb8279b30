"""Modification of all tensors of a call at once by a custom function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ..config.modify import FunctionSpec
from ..errors import HookResultError
from ..tables.kinds import KINDS
from ..values.sparse import is_sparse
from .base import Action, Context, Effects
from .custom_functions import custom_function
from .intervention import accept_result, describe, sparse_error, straight_through, with_version


class Together(Action):
    """Replaces the tensors of a call by the validated results of one function, and records an effect for each."""

    def __init__(self, spec: FunctionSpec, rows: Effects) -> None:
        self.function = custom_function(spec.fn, f"hooks.{spec.name}.fn", "tensors", "context")
        self.straight_through = spec.straight_through
        self.rows = rows

    def __call__(self, tensor: Tensor, context: Context) -> Tensor:
        """Change the only tensor of a call."""
        values = {} if context.value is None else {context.path: context.value.detach()}
        return self.change({context.path: tensor}, replace(context, values=values))[context.path]

    def change(self, tensors: Mapping[str, Tensor], context: Context) -> dict[str, Tensor]:
        """Change the tensors of a call.

        Returns:
            The new tensors by path; the same object for a tensor that is unchanged.

        Raises:
            HookError: A tensor is sparse.
            HookResultError: The result is not a dict, has other paths or an invalid tensor, or the function modified a
                tensor in place.
        """
        call = replace(context, path=path_of_call(context.kind, context.path))
        if any(is_sparse(tensor) for tensor in tensors.values()):
            raise sparse_error(call)
        given = {path: with_version(tensor) for path, tensor in tensors.items()}
        versions = {path: tensor._version for path, tensor in given.items()}
        result = self.function(dict(given), call)
        if any(tensor._version != versions[path] for path, tensor in given.items()):
            raise HookResultError(f"{describe(call)} modified a tensor in place; return new tensors instead")
        result = {} if result is None else result
        if not isinstance(result, Mapping):
            message = f"must return a dict of tensors by path or None, but returned {type(result).__name__}"
            raise HookResultError(f"{describe(call)} {message}")
        if unknown := [path for path in result if path not in tensors]:
            allowed = ", ".join(map(repr, tensors))
            message = f"returned the path {unknown[0]!r}, but its tensors have the paths {allowed}"
            raise HookResultError(f"{describe(call)} {message}")
        return {
            path: self._accept(tensor, given[path], result.get(path), replace(context, path=path))
            for path, tensor in tensors.items()
        }

    def _accept(self, tensor: Tensor, given: Tensor, new: Tensor | None, context: Context) -> Tensor:
        if new is None or new is given:
            new = tensor
        elif self.straight_through and isinstance(new, Tensor):
            new = straight_through(given, new)
        return accept_result(tensor, new, context, self.rows)


def path_of_call(kind: str, path: str) -> str:
    """Return the path that the tensors of a call have in common: that of the function call, or empty for a module."""
    return ".".join(path.split(".")[:2]) if KINDS[kind].of_functions else ""
