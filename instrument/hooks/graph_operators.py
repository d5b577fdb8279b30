"""Properties of ATen operators, and the operators of code that `torch.compile` generates, made visible to `OperatorMode`.

Inductor calls a pass with each graph of ATen operators after all its own passes (`post_grad_custom_post_pass`). The pass adds a call of
`RECORD_OPERATOR` for each result. A result that is read by it is written to memory, also inside a fused kernel.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.overrides import BaseTorchFunctionMode

from .compiled_operators import LIBRARY, TAGS

TORCH, PACKAGE = (
    f"{Path(module.__file__ or '').parent}/" for module in (torch, sys.modules[__package__.partition(".")[0]])
)
SHOWN = ("tasks/", "training/models.py")  # losses and models
# Operators whose result has no values yet: their names begin with one of these.
_UNINITIALIZED = ("empty", "new_empty", "resize", "set_", "_resize_output")
_OVERWRITING = ("copy_", "fill_", "zero_")  # in-place operators that do not read what they change
_COLLECTIVES = ("c10d", "_c10d_functional")  # their results can be incomplete when they return
# An operator that does nothing: the mode sees it with the result of an operator, in graphs to which `_record` adds it.
LIBRARY.define(
    "record_operator(Tensor value, str operator, bool is_backward, str path, str source, int output, bool random, int graph, "
    "int index, int count) -> ()",
    tags=TAGS,
)
LIBRARY.impl("record_operator", lambda *_: None, "CompositeExplicitAutograd")
RECORD_OPERATOR: Any = torch.ops.instrument.record_operator.default


class OperatorSchema(NamedTuple):
    """The properties of an operator."""

    name: str
    written: tuple[tuple[int, str], ...]  # the positions and names of the arguments that it changes
    unread: tuple[tuple[int, str], ...]  # those of them whose values it does not read
    has_values: bool  # whether its outputs have new values: it is not a view, and does not leave them uninitialized
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
    roots = (each for each in path.parents if each.name == "site-packages" or each == Path.cwd())
    return next((str(path.relative_to(each)) for each in roots), file)


_FRAME = re.compile(r'File "(.*)", line (\d+)')
_ROOT = re.compile(r"^[LG]\['\w+'\]")  # the variable that holds the module whose code is compiled
_SEGMENT = re.compile(r"\w+")
_graphs = count()


class _OtherGraphs(BaseTorchFunctionMode):
    """Makes the compiler use other graphs inside a block than outside of it, because it guards the active modes."""


@contextmanager
def visible_operators() -> Iterator[None]:
    """Compile code in the block with visible operators. Code that was compiled before is used again after the block.

    The pass is a function, which Inductor cannot hash, so neither reads nor writes its caches of graphs.
    """
    from torch._inductor import config

    given = config.post_grad_custom_post_pass
    passes = [] if given is None else [*given] if isinstance(given, list | tuple) else [given]
    torch.fx.node.has_side_effect(RECORD_OPERATOR)
    with config.patch(post_grad_custom_post_pass=[*passes, _record] if passes else _record), _OtherGraphs():
        yield


def _record(graph: fx.Graph) -> None:
    """Add a call of `RECORD_OPERATOR` for each output of the operators that a graph was traced from.

    Several nodes can come from one operator that the compiler decomposes. Its outputs are those that other operators read.
    """
    origins = {node: _origin(node) for node in graph.nodes if node.op == "call_function"}
    results: dict[Any, list[fx.Node]] = {}
    for node, (key, _) in origins.items():
        is_read = any(user not in origins or origins[user][0] != key for user in node.users)
        is_mutating = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        if is_read and isinstance(node.meta.get("val"), Tensor) and not is_mutating:
            results.setdefault(key, []).append(node)
    is_backward = any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)
    returned = {node: at for at, node in enumerate(graph.output_node().all_input_nodes)}
    number, calls = next(_graphs), []
    for nodes in results.values():
        made = origins[nodes[0]][1]
        schema = operator_schema(_called(made))
        # Parts of operators of the other pass are left out: computed again instead of saved, or earlier.
        is_other = made.meta.get("partitioner_tag") == ("is_forward" if is_backward else "is_backward")
        # The copies of arguments that a custom operator changes, such as the order of hooks, have the name `auto_functionalized_v2`.
        is_copy = schema.name.startswith("auto_functionalized")
        if not schema.has_values or schema.name.startswith("instrument.") or is_other or is_copy:
            continue
        for output, node in _outputs(nodes, made, returned if is_backward else {}):
            calls.append((node, (schema.name, is_backward, _path(made), _source(made), output, schema.is_random)))
    for index, (node, about) in enumerate(calls):
        with graph.inserting_after(node):
            call = graph.call_function(RECORD_OPERATOR, (node, *about, number, index, len(calls)))
        call.meta["val"] = None


def _origin(node: fx.Node) -> tuple[Any, fx.Node]:
    """Return a key that the nodes of one call of an operator share, and a node whose `meta` describes this call.

    A function of the backward pass that returns its argument overwrites a part of the `meta` of a node of the forward pass.
    """
    made: Any = node.args[0] if node.target is operator.getitem else node
    while (
        made.meta.get("partitioner_tag") == "is_backward" and made.meta.get("nn_module_stack") and made.all_input_nodes
    ):
        made = made.all_input_nodes[0]
    called = str(_called(made))
    if called == str(made.target):  # copies of operators are not equal
        return made, made
    modules = made.meta.get("nn_module_stack") or made.meta.get("fwd_nn_module_stack")
    place = (made.meta.get(name) for name in ("seq_nr", "stack_trace", "partitioner_tag"))
    return (called, str(modules), *place), made


def _called(made: fx.Node) -> Any:
    return made.meta.get("original_aten") or made.target


def _outputs(nodes: list[fx.Node], made: fx.Node, gradients: Mapping[fx.Node, int]) -> Iterator[tuple[int, fx.Node]]:
    """Yield the nodes that are outputs of an operator, each with its index.

    The first output of a decomposed operator is its largest one of floating point: the last one if several are. Of the others, only the
    gradients of parameters are known, if they are returned: they have the order of the parameters.
    """
    if str(_called(made)) == str(made.target):
        yield from ((node.args[1] if node.target is operator.getitem else 0, node) for node in nodes)  # type: ignore[misc]
        return
    ends = {node: [gradients[each] for each in (node, *node.users) if each in gradients] for node in nodes}
    places = {node: min(each, default=None) for node, each in ends.items()}
    known = sorted((node for node in nodes if places[node] is not None), key=lambda node: places[node] or 0)
    first = max(nodes[::-1], key=_rank)
    if gradients and known and sum(_rank(node) == _rank(first) for node in nodes) > 1:
        first = known[0]
    yield from enumerate([first, *(node for node in known if node is not first)])


def _rank(node: fx.Node) -> tuple[bool, int]:
    value = node.meta["val"]
    return value.dtype.is_floating_point, prod(
        size if isinstance(size, int) else size.node.hint or 1 for size in value.shape
    )


def _path(node: fx.Node) -> str:
    """Return the name of the module that calls an operator, inside the module whose code is compiled."""
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = [*modules.values()][-1][0] if modules else ""
    return ".".join(name for name in _SEGMENT.findall(_ROOT.sub("", path)) if name not in ("__self__", "_modules"))


def _source(node: fx.Node) -> str:
    """Return the file and line of the innermost code that is shown; empty if it is unknown."""
    frames = reversed(_FRAME.findall(node.meta.get("stack_trace") or ""))
    return next((f"{shown}:{line}" for file, line in frames if (shown := file_shown(file))), "")
