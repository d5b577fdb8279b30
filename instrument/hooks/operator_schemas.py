"""Properties of ATen operators, and the names of the files that call them, in eager mode and in graphs of `torch.compile`."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .compiled_operators import LIBRARY, TAGS

TORCH, PACKAGE = (
    f"{Path(module.__file__ or '').parent}/" for module in (torch, sys.modules[__package__.partition(".")[0]])
)
SHOWN = ("tasks/", "training/models.py")  # losses and models
# Operators whose result has no values yet: their names begin with one of these.
_UNINITIALIZED = ("empty", "new_empty", "resize", "set_", "_resize_output")
_OVERWRITING = ("copy_", "fill_", "zero_")  # in-place operators that do not read what they change
_COLLECTIVES = ("c10d", "_c10d_functional")  # their results can be incomplete when they return
# An operator that does nothing: the mode sees it with the result of an operator, in graphs to which `graph_operators` adds it.
LIBRARY.define(
    "record_operator(Tensor value, str operator, bool is_backward, str path, str source, int output, bool random, int graph, "
    "int index, int count) -> ()",
    tags=TAGS,
)
LIBRARY.impl("record_operator", lambda *_: None, "CompositeExplicitAutograd")
RECORD_OPERATOR: Any = torch.ops.instrument.record_operator.default


class OperatorSchema(NamedTuple):
    """The properties of an operator.

    Attributes:
        written: The positions and names of the arguments that it changes.
        unread: Those of them whose values it does not read.
        has_values: Whether its outputs have new values: it is not a view, and does not leave them uninitialized.
    """

    name: str
    written: tuple[tuple[int, str], ...]
    unread: tuple[tuple[int, str], ...]
    has_values: bool
    is_random: bool


@cache
def operator_schema(function: Any) -> OperatorSchema:
    schema = getattr(function, "_schema", None)
    if schema is None:  # a higher-order operator
        return OperatorSchema(str(function), (), (), has_values=True, is_random=False)
    namespace, _, name = schema.name.partition("::")
    arguments = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    has_values = not (is_view or name.startswith(_UNINITIALIZED) or namespace in _COLLECTIVES)
    is_random = torch.Tag.nondeterministic_seeded in function.tags
    written = tuple((i, a.name) for i, a in arguments)
    unread = tuple((i, a.name) for i, a in arguments if a.is_out or is_random or name in _OVERWRITING)
    return OperatorSchema(str(function), written, unread, has_values, is_random)


def file_shown(file: str) -> str:
    """Return the name under which a file of code is shown; empty for files of PyTorch, of this package, and generated ones."""
    if file.startswith((TORCH, "<")) or "/torchinductor_" in file:
        return ""
    if file.startswith(PACKAGE):
        inside = file.removeprefix(PACKAGE)
        return f"instrument/{inside}" if inside.startswith(SHOWN) else ""
    path = Path(file)
    return next(
        (str(path.relative_to(each)) for each in path.parents if each.name == "site-packages" or each == Path.cwd()),
        file,
    )
