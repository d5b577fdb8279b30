"""The settings of a program: those of its modules and optimizers, and the operators that compute its loss."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..plan.modules import Layers
from ..storage.remote_folder import IS_SECRET

MAX_ITEMS = 16  # of a list that is a setting
NO_SETTINGS = ("training", "type")  # attributes: the mode depends on the phase, and the type is that of the module
MAX_KINDS = 8  # of the arguments of an operator that are listed
# PyTorch frees a graph whose nodes Python has seen recursively: tens of thousands of them in a row overflow the stack.
MAX_NODES = 10_000
LOSS, GRAPH = "loss", "graph"
# Operators between a parameter and the operator that uses it.
VIEWS = frozenset(
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "Unsqueeze", "Expand", "ToCopy")
)


def module_settings(layers: Layers, optimizers: Sequence[Optimizer]) -> dict[str, dict[str, str]]:
    """Return the settings of each module by its name; see the column `settings` of the table `layers`."""
    groups = [(type(each).__name__, group) for each in optimizers for group in each.param_groups]
    labels = ["optimizer"] if len(groups) == 1 else [f"optimizer[{number}]" for number in range(len(groups))]
    optimized = {
        id(parameter): label for label, (_, group) in zip(labels, groups, strict=True) for parameter in group["params"]
    }
    first: dict[int, str] = {}  # the name of each parameter
    settings: dict[str, dict[str, str]] = {}
    for layer in layers:
        own = vars(layer.module).items()
        given = {name: value for name, value in own if not name.startswith("_") and name not in NO_SETTINGS}
        known = settings[layer.name] = _as_texts(given)
        for name, parameter in layer.own_parameters():
            full_name = f"{layer.name}.{name}".removeprefix(".")
            owner = first.setdefault(id(parameter), full_name)
            size = "lazy" if is_lazy(parameter) else [*parameter.shape]
            dtype = str(parameter.dtype).removeprefix("torch.")
            known[name] = f"{dtype} {size}" if owner == full_name else f"that of {owner}"
            known[f"{name}.optimizer"] = optimized.get(id(parameter), "none") if parameter.requires_grad else "frozen"
    for label, (name, group) in zip(labels, groups, strict=True):
        texts = _as_texts({key: value for key, value in group.items() if key != "params"})
        settings[""] |= {label: name, **{f"{label}.{key}": text for key, text in texts.items()}}
    return settings


def _as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, str) and IS_SECRET.search(name):
            continue
        # An attribute can be anything, such as a tensor without a value or a list that contains itself: training continues.
        with suppress(Exception):
            if (text := _as_text(value)) is not None:
                texts[name] = text
    return texts


def _as_text(value: Any) -> str | None:
    """Return a setting as text; None for an object that is not a setting, and for text that can be a path."""
    match value:
        case None | bool() | int() | float() | np.generic() | torch.dtype():
            return str(value)
        case str():
            return str(value) if value.isidentifier() else None
        case list() | tuple() if len(value) <= MAX_ITEMS:
            texts = [_as_text(each) for each in value]
            return None if None in texts else str(texts).replace("'", "")
        # Tensors of other classes can have no value, or, as distributed ones, require the other processes to read it.
        case Tensor() if type(value) is Tensor and value.numel() == 1 and not value.is_meta:
            return str(value.item())
        case FunctionType() | BuiltinFunctionType() | type():
            return value.__name__
    return None


def graph_settings(loss: Tensor) -> dict[str, str]:
    """Return how often each operator occurs in the backward graph of a loss, with its arguments that are numbers.

    The operators after the last ones that use parameters are those of the loss, such as `loss.NllLossBackward0`. The others are those of
    the model, such as `graph.AddmmBackward0`. Sizes are left out, since they depend on the batch.

    Returns:
        The numbers of operators by name, such as `2 (dim=1, index=0), 1 (dim=2, index=0)`; empty if the loss has no graph, or one with
        more than 10,000 nodes.
    """
    names_of = cache(_names_of_arguments)  # not longer than this call: the class of a custom function can hold tensors
    users: list[Node] = []
    of_loss = _reached([loss.grad_fn] if loss.grad_fn is not None else [], users)
    of_model = _reached(users)
    if max(len(of_loss), len(of_model)) > MAX_NODES:
        return {}
    texts: dict[str, str] = {}
    for part, nodes in ((LOSS, of_loss - of_model), (GRAPH, of_model)):
        kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for node in nodes:
            kinds[node.name().rpartition("::")[2]][_arguments(node, names_of(type(node)))] += 1
        for name, counts in sorted(kinds.items()):
            listed = ", ".join(
                f"{count}{arguments and f' ({arguments})'}" for arguments, count in sorted(counts.items())
            )
            texts[f"{part}.{name}"] = listed if len(counts) <= MAX_KINDS else str(counts.total())
    return texts


def _reached(nodes: Sequence[Node], users: list[Node] | None = None) -> set[Node]:
    """Return the nodes of a graph that follow some nodes, and these. With `users`, nodes that use parameters are put there instead."""
    found: set[Node] = set()
    left = [*nodes]
    while left and len(found) <= MAX_NODES:
        node = left.pop()
        if node in found:
            continue
        following = [each for each, _ in node.next_functions if each is not None]
        if users is not None and any(map(_is_parameter, following)):
            users.append(node)
            continue
        found.add(node)
        left += following
    return found


def _is_parameter(node: Node) -> bool:
    """Return whether a node is that of a parameter, or of a view or a cast of one."""
    while node.name() in VIEWS and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node.name() == "torch::autograd::AccumulateGrad"


def _arguments(node: Node, names: Sequence[str]) -> str:
    values = {name: _signed(getattr(node, f"_saved_{name}")) for name in names}
    return ", ".join(f"{name}={text}" for name, text in _as_texts(values).items() if text != "None")


def _signed(value: Any) -> Any:
    """Return a value with its sign: an integer of C++ that is negative is read as one without sign."""
    if isinstance(value, tuple):
        return [_signed(each) for each in value]
    return value - 2**64 if type(value) is int and value >= 2**63 else value


def _names_of_arguments(kind: type[Node]) -> list[str]:
    """Return the names of the saved values of a kind of node, without those that are tensors, which hooks could unpack, and sizes."""
    attributes = set(dir(kind))
    saved = sorted(name.removeprefix("_saved_") for name in attributes if name.startswith("_saved_"))
    sizes = ("size", "numel", "stride", "sym", "length")
    return [
        name for name in saved if f"_raw_saved_{name}" not in attributes and not any(part in name for part in sizes)
    ]
