"""The ATen operators that run in a block: a row of the table `operators` for each of their outputs.

A `TorchDispatchMode` sees the operators below autograd, in the forward pass, the backward pass and the optimizer. The module and
the line of code of an operator are found in Python's frames. In the backward pass, they are those of the operator that made the
node of the graph, which has the same sequence number.

Of code that `torch.compile` generates, the operators from which it is generated are seen: see `graph_operators`. No tensor is kept.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from ..plan.modules import Layers
from ..runtime.lazy_compiler import compiler_imported
from ..stats.fingerprint import fingerprint, projection
from ..stats.flatten import unreadable
from ..stats.measure import Measured, measure
from ..tables.schemas import OPERATOR_STATISTICS
from ..tables.sink_interface import Row
from ..values.dtensor import local_shard
from ..values.nested import iter_tensors
from .clock import Clock, take
from .gradient_hooks import next_sequence_number
from .graph_operators import (
    PACKAGE,
    RECORD_OPERATOR,
    SHOWN,
    TORCH,
    OperatorSchema,
    file_shown,
    operator_schema,
    visible_operators,
)

Part = Literal["forward", "recompute", "backward", "optimizer", "loop"]
_FACTOR = 6364136223846793005  # of Knuth's linear congruential generator (MMIX)
_MAX_PENDING = 4096  # rows that are kept until they are written
# Code of this package that measures: its operators are not those of the training. Functions with these names call functions of others.
_OWN = (
    *("hooks/", "probe/", "stats/", "relations/", "rules/"),
    *(f"actions/{name}.py" for name in ("record", "measurement", "context_sums")),
)
# The first is replaced in modules that `module.compile()` compiles.
_CALLS = nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__
_PASSING = ("__torch_function__", "run", "call")
_LOOP = ("training/", "commands/")  # frames outside of these are not of the training
# Functions of torch.utils.checkpoint that run, or repeat, a forward pass.
_CHECKPOINT = {"forward": "checkpoint", "backward": "repeated", "recompute_fn": "repeated"}


_Inputs = tuple[Tensor | None, list[Measured]]
"""A hash of the bits of all tensors that an operator reads, None if it reads none; and their sums."""


class _Location(NamedTuple):
    part: Part = "backward"
    layer: str | None = None
    source: str | None = None


class OperatorMode(TorchDispatchMode):
    """Records the operators of blocks."""

    supports_higher_order_operators = True

    def __init__(self, layers: Layers, clock: Clock, write: Callable[[Sequence[Row]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(layer.module): layer.name for layer in layers}
        self._owners = {id(each): layer.name for layer in layers for _, each in layer.own_parameters()}
        self._clock, self._write = clock, write
        self._thread = threading.get_ident()
        self.is_active = False
        self._step, self._number = -1, 0
        # Who made the nodes of this step: for each maker, the largest sequence number of its nodes, in ascending order.
        self._sequence, self._origins = [-1], [_Location()]
        # Whether the last operator changed a view in place, which makes another node (`CopySlices`) afterwards.
        self._makes_another = False
        self._codes: dict[int, tuple[CodeType, str]] = {}
        self._pending: list[tuple[Row, _Inputs | None, tuple[Tensor, Tensor | None, Measured] | None]] = []
        # For each graph whose results arrive: the number of its first operator, and the indices of those that are known.
        self._graphs: dict[int, tuple[int, set[int]]] = {}

    @contextmanager
    def block(self) -> Iterator[None]:
        """Record the operators of a block, unless it is inside another one. The nodes that were made before it are unknown."""
        if self.is_active:
            yield
            return
        self.is_active, self._thread = True, threading.get_ident()
        self._add_nodes(_Location())
        visible: AbstractContextManager[None] = nullcontext()
        if compiler_imported():
            visible = visible_operators()
        try:
            with visible, self:
                yield
        finally:
            self.is_active = False
            self.flush()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as compiled: otherwise the compiler skips it while a mode is active."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false: PyTorch would import the compiler, which is slow, to exclude the method below from compilation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        moment = self._clock.moment
        if moment.step != self._step:
            self._step, self._number = moment.step, 0
            self._sequence, self._origins = self._sequence[-1:], [_Location()]
            self._graphs.clear()
        is_of_graph = func is RECORD_OPERATOR
        location = self._locate(sys._getframe(1), in_graph=is_of_graph)
        if location is None:
            return func(*args, **kwargs)
        if is_of_graph:
            return self._add_of_graph(location, *args)
        operator = operator_schema(func)
        inputs = _inputs(operator, args, kwargs) if operator.has_values else (None, [])
        result = func(*args, **kwargs)
        self._makes_another = any(
            isinstance(value, Tensor) and value._is_view() for value in _written(operator, args, kwargs)
        )
        self._add(operator, inputs, _outputs(operator, args, kwargs, result), location)
        return result

    def flush(self) -> None:
        """Write the rows. Waits for devices."""
        rows = []
        for row, inputs, values in take(self._pending):
            read: tuple[int | None, int | float | None] = None, None
            if inputs is not None:
                bits, sums = inputs
                nans = sum(measured.statistics(("nan_count",))[0] or 0 for measured in sums)
                read = 0 if bits is None else int(bits), nans
            numbers: list[float | None] = [None] * (2 + len(OPERATOR_STATISTICS))
            if values is not None:
                bits, sketch, measured = values
                known = None if sketch is None else float(sketch)
                numbers = [int(bits), known, *measured.statistics(OPERATOR_STATISTICS)]
            rows.append((*row, *read, *numbers))
        if rows:
            self._write(rows)

    def _add(self, operator: OperatorSchema, inputs: _Inputs, outputs: Iterable[Tensor], location: _Location) -> None:
        """Add a row for each tensor that an operator returned or changed."""
        number, self._number = self._number, self._number + 1
        for index, tensor in enumerate(outputs):
            layer = self._owners.get(id(tensor)) if location.layer is None else location.layer
            self._add_row(number, operator, inputs, index, tensor, location._replace(layer=layer))

    def _add_of_graph(self, location: _Location, value: Tensor, *about: Any) -> None:
        """Add a row for the result of an operator of a graph, given the arguments of `RECORD_OPERATOR` and where the graph is called.

        The results of a graph arrive in any order, but once in each call.
        """
        name, is_backward, path, source, output, is_random, graph, index, count = about
        first, known = self._graphs.get(graph, (0, {index}))
        if index in known:
            first, known = self._graphs[graph] = self._number, set()
            self._number += count
        known.add(index)
        layer = ".".join(filter(None, (location.layer, path)))
        part: Part = "backward" if is_backward else location.part
        here = _Location(part, layer if layer in self._names.values() else location.layer, source or location.source)
        schema = OperatorSchema(name, (), (), has_values=True, is_random=is_random)
        self._add_row(first + index, schema, None, output, value, here)

    def _add_row(
        self,
        number: int,
        operator: OperatorSchema,
        inputs: _Inputs | None,
        index: int,
        tensor: Tensor,
        location: _Location,
    ) -> None:
        moment = self._clock.boundary if location.part == "optimizer" else self._clock.moment
        part = local_shard(tensor.detach())
        has_values = operator.has_values and _is_readable(part, index)
        place = (*moment, self._clock.rank, number, location.part, location.layer, operator.name, location.source)
        shape = None if part.is_nested else list(part.shape)
        row = (*place, index, str(part.dtype).removeprefix("torch."), shape, operator.is_random)
        values = (fingerprint(part), projection(part), measure(part)) if has_values else None
        self._pending.append((row, inputs, values))
        if len(self._pending) >= _MAX_PENDING:
            self.flush()

    def _locate(self, frame: FrameType | None, *, in_graph: bool) -> _Location | None:
        """Return where an operator is called; None for those of this package and of a graph, except `RECORD_OPERATOR` (`in_graph`)."""
        node: Any = torch._C._current_autograd_node()
        part: Part = "loop"
        layer = maker = source = None
        is_action = False
        while frame is not None:
            kind = self._kind(frame.f_code)
            if kind == "end" or (kind == "backward" and node is not None):
                break
            if kind == "call":
                name = self._name_of(frame.f_locals["self"])
                maker = name if maker is None else maker
                if name is not None and layer is None and part != "optimizer":
                    layer, part = name, "forward"
            elif kind == "checkpoint":  # the only node that is made belongs to the module around it
                maker = None
            elif kind == "repeated" and node is not None:
                part = "recompute"
            elif kind == "optimizer":
                part = "optimizer" if layer is None else part
            elif (kind == "own" and not is_action) or (kind == "graph" and not in_graph):
                return None
            elif kind == "action":
                is_action = True
            elif kind not in ("", "own", "graph", "backward") and source is None:
                source = f"{kind}:{frame.f_lineno}"
            frame = frame.f_back
        if node is None or layer is not None:
            location = _Location("recompute" if node is not None and part == "forward" else part, layer, source)
            self._add_nodes(location._replace(layer=maker))
        else:
            location = self._of_node(node, "backward" if part == "loop" else part, source)
            self._add_nodes(location)
        return location

    def _add_nodes(self, maker: _Location) -> None:
        """Record who made the nodes since the last call: the calling operator, which makes its nodes before it runs."""
        sequence = next_sequence_number() - 1
        last = self._sequence[-1]
        if sequence > last and threading.get_ident() == self._thread:
            if self._makes_another:
                self._sequence.append(last + 1)
                self._origins.append(self._origins[-1])
            self._sequence.append(sequence)
            self._origins.append(maker)

    def _of_node(self, node: Any, part: Part, source: str | None) -> _Location:
        """Return the location of an operator in the backward pass. A node of an accumulated gradient belongs to its parameter."""
        if (variable := getattr(node, "variable", None)) is not None:
            return _Location(part, self._owners.get(id(variable)), source)
        at = bisect_left(self._sequence, node._sequence_nr())
        origin = self._origins[at] if at < len(self._origins) else _Location()
        return _Location(part, origin.layer, source or origin.source)

    def _name_of(self, module: nn.Module) -> str | None:
        """Return the name of a module; that of the compiled module for the wrapper of `torch.compile`."""
        name = self._names.get(id(module))
        return self._names.get(id(getattr(module, "_orig_mod", None))) if name is None else name

    def _kind(self, code: CodeType) -> str:
        """Return what runs in frames of a code object: a part of PyTorch or of this package, or the file that is shown."""
        known = self._codes.get(id(code))
        if known is None:
            known = self._codes[id(code)] = code, _kind(code)  # keeps the code object, and with it its id
        return known[1]


def _kind(code: CodeType) -> str:
    file = code.co_filename
    if code in _CALLS:
        return "call"
    if code is _engine_run_backward.__code__:
        return "backward"
    if file == f"{TORCH}utils/checkpoint.py" and code.co_name in _CHECKPOINT:
        return _CHECKPOINT[code.co_name]
    if file.startswith(f"{TORCH}optim/"):
        return "optimizer"
    if file.startswith(PACKAGE) and not file.removeprefix(PACKAGE).startswith(SHOWN):
        inside = file.removeprefix(PACKAGE)
        if inside.startswith(_OWN):
            return "" if code.co_name in _PASSING else "own"
        return "action" if inside.startswith("actions/") else "end" if inside.startswith(_LOOP) else ""
    is_graph = {"instrument", "record_operator"} <= {*code.co_names}  # generated code that calls `RECORD_OPERATOR`
    return "graph" if is_graph else file_shown(file)


def _inputs(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inputs:
    """Return a hash of the bits of all tensors that an operator reads, None if it reads none, and their sums."""
    values = [value for at, value in enumerate(args) if at not in [position for position, _ in operator.unread]]
    values += [value for name, value in kwargs.items() if name not in [unread for _, unread in operator.unread]]
    total, measured = None, []
    for at, (_, tensor) in enumerate(iter_tensors(values)):
        part = local_shard(tensor.detach())
        if _is_readable(part, at):
            bits = fingerprint(part)
            # The factor distinguishes the order of the inputs.
            total = bits if total is None else total.to(bits.device) * _FACTOR + bits
            measured.append(measure(part))
    return total, measured


def _is_readable(tensor: Tensor, index: int) -> bool:
    """Return whether the values of a tensor can be compared.

    The bytes that a recurrent layer saves for its backward pass cannot: some are not initialized.
    """
    is_workspace = tensor.dtype == torch.uint8 and index > 0
    return not tensor.is_nested and not is_workspace and unreadable(tensor) is None


def _outputs(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator returned, and those that it changed without returning them."""
    returned = set()
    for _, tensor in iter_tensors(result):
        returned.add(id(tensor))
        yield tensor
    for value in _written(operator, args, kwargs):
        yield from (tensor for _, tensor in iter_tensors(value) if id(tensor) not in returned)


def _written(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operator changes."""
    for at, name in operator.written:
        yield args[at] if at < len(args) else kwargs.get(name)
