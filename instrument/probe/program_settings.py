"""The settings of a program: those of its modules and optimizers, and the operators that compute its losses."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.parameter import Parameter, is_lazy
from torch.optim import Optimizer

from ..hooks.clock import Clock, operator_name
from ..hooks.hook_group import HookGroup
from ..plan.modules import Layers
from ..relations.observations import BACKWARDS, is_captured, is_readable
from ..storage.remote_folder import IS_SECRET

MAX_ITEMS = 16  # of a list that is a setting
SAMPLE = 16  # elements at most that tell whether parameters start with equal values, and that weights of classes show
NO_SETTINGS = ("training", "type")  # attributes: the mode depends on the phase, and the type is that of the module
MAX_KINDS = 8  # of the arguments of an operator that are listed
# PyTorch frees a graph whose nodes Python has seen recursively: tens of thousands of them in a row overflow the stack.
MAX_NODES = 10_000
MAX_GRAPHS = 8  # of the losses of a step
FACTOR, LOSS, GRAPH, NO_GRAD = "loss.factor", "loss", "graph", "no_grad"
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


def equal_parameters(layers: Layers) -> dict[str, dict[str, str]]:
    """Return the first parameter to which each one is equal, by layer, as settings such as `weight.equals`.

    Some elements are compared, all at once. Constants, such as zeros, are left out, and so are sparse, quantized and distributed
    parameters, and those whose memory is freed.
    """
    parameters: dict[int, tuple[str, str, Parameter]] = {}
    for layer in layers:
        for name, each in layer.own_parameters():
            is_dense = (
                type(each) is Parameter and each.layout is torch.strided and not (each.is_meta or each.is_quantized)
            )
            if is_dense and each.numel() > 1 and each.untyped_storage().nbytes():
                parameters.setdefault(id(each), (layer.name, name, each))
    contents: dict[int, bytes] = {}
    for device in {each.device for *_, each in parameters.values()}:
        of_device = [each for *_, each in parameters.values() if each.device == device]
        samples = [each.detach().flatten()[:: -(-each.numel() // SAMPLE)] for each in of_device]
        samples = [each.resolve_conj().resolve_neg().contiguous() for each in samples]
        content = torch.cat([each.view(torch.uint8) for each in samples]).cpu().numpy().tobytes()
        ends = itertools.accumulate(each.nbytes for each in samples)
        contents |= {
            id(each): content[end - sample.nbytes : end]
            for each, sample, end in zip(of_device, samples, ends, strict=True)
        }
    settings: dict[str, dict[str, str]] = {}
    first: dict[tuple[Any, ...], str] = {}
    for owner, name, each in parameters.values():
        own, size = contents[id(each)], each.element_size()
        equal = first.setdefault((each.shape, each.dtype, own), full_name := f"{owner}.{name}".removeprefix("."))
        if equal != full_name and own != own[:size] * (len(own) // size):
            settings.setdefault(owner, {})[f"{name}.equals"] = equal
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


def other_modes(layers: Layers) -> dict[str, dict[str, str]]:
    """Return the mode of each module that is not in that of its parent, such as a frozen one, as the setting `training`; also that of a
    root in evaluation mode. A module of `torch.jit.freeze` has no mode."""
    modes = {layer.name: layer.module.training for layer in layers if hasattr(layer.module, "training")}
    parents = {name: modes.get(name.rpartition(".")[0], True) if name else True for name in modes}
    return {name: {"training": str(mode)} for name, mode in modes.items() if mode != parents[name]}


class LossOperators(HookGroup):
    """The operators in the backward graphs of the losses of a step, while it is attached, the modes of modules at the first of these, and
    the parameters that are equal before the step.

    It is the first loss of `note` before a `backward`. Without one, these are the losses of all calls of `backward` that reach a
    parameter of the model, before PyTorch frees what they saved, and equal graphs, such as those of accumulated gradients, count once.
    Without such a call, it is the first loss of `note`, in which the numbers of Python are then missing.
    """

    def __init__(self, layers: Layers, clock: Clock) -> None:
        super().__init__((), clock)
        self._layers = layers
        self._noted: _Operators = Counter()
        self._graphs: list[_Operators] = []
        self._equal: dict[str, dict[str, str]] = {}
        self._modes: dict[str, dict[str, str]] = {}

    def attach(self) -> None:
        self._equal = equal_parameters(self._layers)
        BACKWARDS.add(self._on_backward)

    def detach(self) -> None:
        BACKWARDS.remove(self._on_backward)

    def note(self, loss: object) -> None:
        """Note a loss that the loop passes."""
        if isinstance(loss, Tensor) and not (self._noted or self._graphs):
            self._noted, _ = _operators(loss, self._owners)
            self._modes = other_modes(self._layers)

    def _on_backward(self, loss: Tensor) -> None:
        is_observed = self.clock.moment.phase == "train" and not (self.clock.closed or self._noted)
        if not is_observed or len(self._graphs) == MAX_GRAPHS:
            return
        operators, parameters = _operators(loss, owners := self._owners)
        if operators not in self._graphs and not owners.keys().isdisjoint(map(id, parameters)):
            self._modes = self._modes if self._graphs else other_modes(self._layers)
            self._graphs.append(operators)

    @property
    def _owners(self) -> dict[int, str]:
        """The name of the layer of each parameter by its id: the first one of a tied parameter, and the root of that of a new module."""
        named = {id(each): layer.name for layer in [*self._layers][::-1] for _, each in layer.own_parameters()}
        return {id(each): named.get(id(each), "") for each in self._layers.model.parameters()}

    @property
    def settings(self) -> dict[str, dict[str, str]]:
        """How often each operator occurs, by the layer to which it belongs, with its arguments that are numbers.

        These are also the numbers by which the program multiplies or divides, and weights of classes. The operators after the last ones
        that use parameters are those of the loss, such as `loss.NllLossBackward0`, and belong to the root. The others are those of the
        model, such as `graph.AddmmBackward0`. They belong to the layer whose parameters they use, or that precedes them.
        `no_grad.AddmmBackward0` is how many of them have an input without a gradient. Operators that multiply or divide the complete
        loss are apart, such as `loss.factor.DivBackward0`. Sizes are left out, since they depend on the batch. It is empty if no loss
        has a graph, or one has more than 10,000 nodes. With them are the settings of `equal_parameters` and `other_modes`.
        """
        kinds: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for (layer, name, arguments), count in sum(self._graphs, _Operators()).items() or self._noted.items():
            kinds[layer, name][arguments] += count
        texts: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for layer, own in (*self._equal.items(), *self._modes.items()):
            texts[layer] |= own
        parts = LOSS, GRAPH, NO_GRAD
        for (layer, name), counts in sorted(
            kinds.items(), key=lambda kind: (parts.index(kind[0][1].partition(".")[0]), kind[0])
        ):
            listed = ", ".join(
                f"{count}{arguments and f' ({arguments})'}" for arguments, count in sorted(counts.items())
            )
            texts[layer][name] = listed if len(counts) <= MAX_KINDS else str(counts.total())
        return texts


_Operators = Counter[tuple[str, str, str]]  # how often operators occur, by their layer, name and arguments


def _operators(loss: Tensor, owners: Mapping[int, str]) -> tuple[_Operators, list[Tensor]]:
    """Return the operators of the backward graph of a loss, and the parameters in it; none of a graph that is too large."""
    names_of = cache(_names_of_arguments)  # not longer than this call: the class of a custom function can hold tensors
    users: dict[Node, list[Tensor]] = {}
    of_loss = reached([] if loss.grad_fn is None else [loss.grad_fn], users)
    of_model = reached([*users])
    operators: _Operators = Counter()
    if max(len(of_loss), len(of_model)) > MAX_NODES:
        return operators, []
    factors = _factors(loss.grad_fn) - of_model
    layers = _layers(of_model, owners)
    for part, nodes in ((FACTOR, factors), (LOSS, of_loss - of_model - factors), (GRAPH, of_model)):
        for node in nodes:
            kind, layer = operator_name(node).rpartition("::")[2], layers.get(node, "")
            operators[layer, f"{part}.{kind}", _arguments(node, names_of(type(node)))] += 1
            if part != FACTOR and any(each is None for each, _ in node.next_functions):
                operators[layer, f"{NO_GRAD}.{kind}", ""] += 1
    return operators, [each for parameters in users.values() for each in parameters]


def _layers(nodes: Set[Node], owners: Mapping[int, str]) -> dict[Node, str]:
    """Return the layer of each operator: that whose parameter it uses, or of the operator that used one last before, of those on which
    it depends. PyTorch numbers operators in the order in which they run."""
    variables = {node: variable for node in nodes if (variable := _variable(node)) is not None}
    places: dict[Node, tuple[int, str]] = {}  # the number of that operator, and its layer
    numbers = {node: node._sequence_nr() for node in nodes if node not in variables}
    for node, number in sorted(numbers.items(), key=lambda item: item[1]):
        inputs = [each for each, _ in node.next_functions]
        own = [(number, owners.get(id(variables[each]), "")) for each in inputs if each in variables]
        places[node] = max([*own, *(places[each] for each in inputs if each in places)], default=(-1, ""))
    of_variables = {node: owners.get(id(variable), "") for node, variable in variables.items()}
    return {node: layer for node, (_, layer) in places.items()} | of_variables


def _factors(node: Node | None) -> set[Node]:
    """Return the operators that multiply or divide a complete loss by something without a gradient, such as a number of micro-batches."""
    found: set[Node] = set()
    while (
        node is not None
        and operator_name(node) in ("MulBackward0", "DivBackward0")
        and node.next_functions[1][0] is None
    ):
        found.add(node)
        node = node.next_functions[0][0]
    return found


def reached(
    nodes: Sequence[Node], users: dict[Node, list[Tensor]] | None = None, *, limit: float = MAX_NODES
) -> set[Node]:
    """Return the nodes of a graph that follow some nodes, and these, up to the first one after `limit` nodes.

    With `users`, nodes that use parameters are put there instead.
    """
    found: set[Node] = set()
    left = [*nodes]
    while left and len(found) <= limit:
        node = left.pop()
        if node in found:
            continue
        following = node.next_functions
        if users is not None and (parameters := [each for each in map(_parameter, following) if each is not None]):
            users[node] = parameters
            continue
        found.add(node)
        for each, _ in following:  # faster than a list of them
            if each is not None:
                left.append(each)
    return found


def _parameter(following: tuple[Node | None, int]) -> Tensor | None:
    """Return the parameter of a following node, also of a view or a cast of one; None for another node."""
    node, _ = following
    while node is not None and operator_name(node) in VIEWS and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return None if node is None else _variable(node)


def _variable(node: Node) -> Tensor | None:
    return getattr(node, "variable", None) if operator_name(node) == "torch::autograd::AccumulateGrad" else None


def _arguments(node: Node, names: Sequence[str]) -> str:
    values = {}
    for name in names:
        with suppress(Exception):  # the memory of weights of classes can be freed, as that of parameters of FSDP
            values[name] = _signed(_saved(node, name))
    return ", ".join(f"{name}={text}" for name, text in _as_texts(values).items() if text != "None")


def _saved(node: Node, name: str) -> Any:
    """Return a saved value; None for a tensor, unless it is the number by which the program multiplies or divides, or has the weights of
    classes, of which some are returned.

    PyTorch saves such a number as a tensor of double precision, without hooks on saved tensors, which could move or recompute others.
    """
    if not hasattr(node, f"_raw_saved_{name}"):
        return getattr(node, f"_saved_{name}")
    saved = getattr(node, f"_raw_saved_{name}")
    has_weights = name == "pos_weight" or (name == "weight" and "NllLoss" in operator_name(node))
    # Earlier versions of PyTorch do not tell whether there are hooks. After the backward pass, there is no value.
    can_read = (has_weights or name == "other") and getattr(saved, "unpack_hook", saved) is None
    value = saved.data if can_read else None
    if has_weights and value is not None and is_readable(value) and value.numel() and not is_captured(value):
        weights = value.detach().flatten()[:: -(-value.numel() // SAMPLE)].tolist()
        return [float(f"{each:.4g}") for each in weights]
    if (
        not isinstance(value, Tensor)
        or value.ndim
        or not value.is_cpu
        or value.dtype not in (torch.float64, torch.int64)
    ):
        return None
    return value


def _signed(value: Any) -> Any:
    """Return a value with its sign: an integer of C++ that is negative is read as one without sign."""
    if isinstance(value, tuple):
        return [_signed(each) for each in value]
    return value - 2**64 if type(value) is int and value >= 2**63 else value


def _names_of_arguments(kind: type[Node]) -> list[str]:
    """Return the names of the saved values of a kind of node, without sizes."""
    saved = sorted(name.removeprefix("_saved_") for name in dir(kind) if name.startswith("_saved_"))
    sizes = ("size", "numel", "stride", "sym", "length")
    return [name for name in saved if not any(part in name for part in sizes)]
