"""Kind `collective`: the collective operations of `torch.distributed`, such as those of DDP and FSDP2.

Python, the reducer of DDP in C++ and compiled code call the operators of the namespace `c10d`. While hooks are attached, a kernel for the
dispatch key BackendSelect, which is above those of all devices, gets each call of them and passes it on.

If the caller waits for the result at once (`async_op=False`), the kernel waits instead, and runs the hooks on the result. Otherwise they
run when the caller has waited, or before the future that it waits for is complete. No operation and no point of waiting is added.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..actions.record import Record
from ..errors import ConfigError, Problem
from ..fields.globs import matches
from ..runtime.own_collectives import are_own_collectives, own_collectives
from ..tables.reasons import NOT_AWAITED, NOT_DRAWN, OTHER_RANKS
from .attached_hook import AttachedHook
from .clock import FIRST_CALL, Clock
from .hook_group_interface import HookGroup

_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


OPERATORS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "gather_into_tensor_": "gather",  # not in PyTorch 2.6
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
}
"""The operators of `c10d`, with the names of their operations in `COLLECTIVES`. The first argument has the results."""


class CollectiveCells(NamedTuple):
    """The cells of a row of the table `collectives`. It is the measure of this row; see `instrument.stats.table_rows.Measure`."""

    operation: str
    reduction: str | None
    ranks: list[int]
    dtype: str
    bytes: int
    seconds: float | None

    @property
    def size(self) -> int:
        """The number of numbers in a row."""
        return 2 + len(self.ranks)

    def values(self, tensor: Tensor) -> tuple[()]:  # noqa: ARG002
        """Return nothing: the cells do not depend on the elements."""
        return ()

    def cells(self, values: object, shape: object) -> tuple[Any, ...]:  # noqa: ARG002
        """Return the cells."""
        return (*self,)


@dataclass(eq=False)
class _Call:
    """One collective operation.

    Attributes:
        operation: Its name.
        reduction: How it combines the tensors: sum, avg, ...; None if it does not.
        group: The processes.
        outputs: The tensors that this process receives.
        index: For each group of hooks: its index among the operations of this name in the micro-step, from 0.
        rows: Write the rows of the table `collectives`, given the duration in seconds.
        started_at: When it began, in seconds; see `time.perf_counter`.
    """

    operation: str
    reduction: str | None
    group: Any
    outputs: list[Tensor]
    index: dict[HookGroup, int] = field(default_factory=dict)
    rows: list[Callable[[float | None], None]] = field(default_factory=list)
    started_at: float = 0.0

    def paths(self, group: HookGroup, count: int) -> list[str]:
        """Return the paths of a number of tensors."""
        name = f"{self.operation}.{self.index[group]}"
        return [name] if count == 1 else [f"{name}.{index}" for index in range(count)]


class CollectiveHooks(HookGroup):
    """The sites of all specs of kind `collective`."""

    def __init__(self, attached_hooks: Sequence[AttachedHook], clock: Clock) -> None:
        super().__init__(attached_hooks, clock)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._counted_at = -1

    def attach(self) -> None:
        """Observe the operations of this process.

        Raises:
            ConfigError: A spec names a process that does not exist.
        """
        if not dist.is_available():
            return
        size = dist.get_world_size() if dist.is_initialized() else None
        for attached in self.attached_hooks:
            ranks = attached.site.spec.ranks
            if size is not None and ranks is not None and max(ranks) >= size:
                where = f"hooks.{attached.site.spec.name}.ranks"
                raise ConfigError(Problem(where, "no process has this rank", max(ranks), f"0 to {size - 1}"))
        _observers.append(self)
        if len(_observers) == 1:
            _install()

    def detach(self) -> None:
        """Stop to observe. The last group removes the kernels. Results that nothing has waited for are missed."""
        for work in [*_unawaited]:
            if self in work.observers and work.call is not None:
                self.miss(work.call)
                work.observers = [observer for observer in work.observers if observer is not self]
        if self in _observers:
            _observers.remove(self)
            if not _observers:
                _libraries.pop()._destroy()

    def begin(self, call: _Call) -> bool:
        """Number an operation. Return whether any site is scheduled."""
        if self.clock.closed:
            return False
        with self._lock:
            if self._counted_at != self.clock.micro_step_index:
                self._counts.clear()
                self._counted_at = self.clock.micro_step_index
            call.index[self] = self._counts[call.operation]
            self._counts[call.operation] += 1
        return any(attached.is_scheduled for attached in self.attached_hooks)

    def act(self, call: _Call, role: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the hooks on the tensors that this process sends (role input) or receives (output). Return the tensors that replace them."""
        if self.clock.closed:
            return [*tensors]
        with own_collectives(), torch.no_grad(), self.clock.timer or nullcontext():
            paths = call.paths(self, len(tensors))
            return [self._act(call, role, path, tensor) for path, tensor in zip(paths, tensors, strict=True)]

    def miss(self, call: _Call) -> None:
        """Count the results of an operation that nothing has waited for."""
        for path in call.paths(self, len(call.outputs)):
            for attached in self._selected(call, "output", path):
                attached.count_missed_opportunity(NOT_AWAITED)

    def _act(self, call: _Call, role: str, path: str, given: Tensor) -> Tensor:
        tensor = given.detach()
        new = tensor
        for attached in self._selected(call, role, path):
            if (reason := _exemption(attached, new, path)) is not None:
                attached.count_exempt(reason)
            elif attached.count_and_check_readable(new):
                new = attached.fire(new, path)
                if isinstance(attached.action, Record):
                    ranks, dtype = dist.get_process_group_ranks(call.group), str(new.dtype).removeprefix("torch.")
                    cells = CollectiveCells(call.operation, call.reduction, ranks, dtype, new.nbytes, None)
                    context = attached.context(path, FIRST_CALL)
                    call.rows.append(partial(_add_row, attached.action.rows.add_row, context, cells, new))
        return given if new is tensor else new

    def _selected(self, call: _Call, role: str, path: str) -> Iterator[AttachedHook]:
        """Yield the scheduled sites that select a tensor."""
        for attached in self.attached_hooks:
            functions = attached.site.spec.functions or ("*",)
            is_selected = any(matches(pattern, call.operation) for pattern in functions)
            if is_selected and attached.is_scheduled and attached.role == role and attached.matches_path(path):
                yield attached


def _add_row(
    add: Callable[..., None], context: Any, cells: CollectiveCells, tensor: Tensor, seconds: float | None
) -> None:
    # The host does not wait for a device.
    add("collectives", context, cells._replace(seconds=seconds if tensor.is_cpu else None), tensor)


def _exemption(attached: AttachedHook, tensor: Tensor, path: str) -> str | None:
    """Return why a hook does not act on a tensor that it selects; None if it acts."""
    spec = attached.site.spec
    if not attached.accepts(tensor, path):
        return attached.no_tensor_reason(tensor, path)
    if spec.ranks is not None and attached.clock.rank not in spec.ranks:
        return OTHER_RANKS
    if spec.fraction < 1:
        context = attached.context(path, FIRST_CALL)
        generator = replace(context, role=f"{context.role} drawn").generator(torch.device("cpu"))
        if torch.rand((), generator=generator).item() >= spec.fraction:
            return NOT_DRAWN
    return None


class _Operator:
    """The kernel of an operator of `c10d` that passes its calls on.

    Args:
        operator: The operator.
        operation: The name of the collective operation.
    """

    def __init__(self, operator: Any, operation: str) -> None:
        names = [argument.name for argument in operator._schema.arguments]
        self.operator, self.operation = operator, operation
        self.at = {name: index for index, name in enumerate(names)}
        self.input_at = int(names[1].startswith("input"))

    def __call__(self, keyset: Any, *args: Any) -> Any:
        run = partial(self.operator.redispatch, keyset & _BELOW)
        if are_own_collectives() or any(tensor.is_meta for tensor in _tensors(args[0])):
            return run(*args)
        call = self._call(args)
        observers = [observer for observer in [*_observers] if observer.begin(call)]
        if not observers:
            return run(*args)
        group = call.group
        root = args[self.at["root_rank"]] if "root_rank" in self.at else None
        is_root = root is None or root == group.rank()
        if is_root or self.operation not in ("broadcast", "scatter"):
            args = self._with_inputs(call, observers, args, is_root=is_root)
        if not is_root and self.operation in ("reduce", "gather"):
            call.outputs = []
        call.started_at = time.perf_counter()
        result = run(*args)
        boxed = result[-1] if isinstance(result, tuple) else result
        work = None if boxed is None else dist.Work.unbox(boxed)
        if not _argument(args, self.at["async_op"], default=True):
            if work is not None:  # NCCL may return none: the operation is in the current stream
                work.wait()
            _finish(call, observers)
            return result
        if work is None:
            for observer in observers:
                observer.miss(call)
            return result
        observed = _ObservedWork(work, call, observers).boxed()
        return (*result[:-1], observed) if isinstance(result, tuple) else observed

    def _call(self, args: tuple[Any, ...]) -> _Call:
        reduction = None
        if "reduce_op" in self.at:
            reduction = dist.ReduceOp.RedOpType(args[self.at["reduce_op"]].op()).name.lower()
        group = dist.ProcessGroup.unbox(args[self.at["process_group"]])
        return _Call(self.operation, reduction, group, [*_tensors(args[0])])

    def _with_inputs(
        self, call: _Call, observers: Sequence[CollectiveHooks], args: tuple[Any, ...], *, is_root: bool
    ) -> tuple[Any, ...]:
        """Run the hooks on what this process sends, and return the arguments with what they return."""
        given = [*_tensors(args[self.input_at])]
        sent = given
        for observer in observers:
            sent = observer.act(call, "input", sent)
        if all(map(lambda new, old: new is old, sent, given)):
            return args
        if not self.input_at and self.operation != "broadcast" and is_root:
            _write(given, sent)  # the result replaces it anyway
            return args
        new = _replaced(args[self.input_at], iter(sent))
        return (*args[: self.input_at], new, *args[self.input_at + 1 :])


def _argument(args: Sequence[Any], at: int, *, default: Any) -> Any:
    return args[at] if at < len(args) else default


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)


def _replaced(value: Any, new: Iterator[Tensor]) -> Any:
    return next(new) if isinstance(value, Tensor) else [_replaced(item, new) for item in value]


def _write(given: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    for tensor, changed in zip(given, new, strict=True):
        if changed is not tensor:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(changed)


def _finish(call: _Call, observers: Sequence[CollectiveHooks]) -> None:
    """Run the hooks on what this process received, and write the rows of a complete operation."""
    seconds = time.perf_counter() - call.started_at
    received = call.outputs
    for observer in observers:
        received = observer.act(call, "output", received)
    _write(call.outputs, received)
    for add in call.rows:
        add(seconds)


class _ObservedWork(dist.Work):
    """Stands for an asynchronous work. The hooks on the result run before its consumer gets it; errors are those of the work."""

    def __init__(self, work: Any, call: _Call, observers: Sequence[CollectiveHooks]) -> None:
        super().__init__()
        self._work, self._lock = work, threading.Lock()
        self.call: _Call | None = call
        self.observers = observers
        _unawaited.add(self)  # C++ keeps no reference to the Python object

    def finish(self) -> None:
        """Run the hooks on the result, once."""
        with self._lock:
            if self.call is not None:
                _finish(self.call, self.observers)
                self.call = None

    def wait(self, *timeout: Any) -> bool:
        done: bool = self._work.wait(*timeout)
        self.finish()
        _unawaited.discard(self)
        return done

    def synchronize(self) -> None:
        self._work.synchronize()
        self.finish()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()
        self.finish()

    def is_completed(self) -> bool:
        is_completed: bool = self._work.is_completed()
        if is_completed:
            self.finish()
        return is_completed

    def result(self) -> list[Tensor]:
        return self._work.result()  # type: ignore[no-any-return]

    def get_future(self) -> Any:
        def then(future: Any) -> Any:
            value = future.value()
            self.finish()
            _unawaited.discard(self)
            return value

        return self._work.get_future().then(then)


_observers: list[CollectiveHooks] = []
_libraries: list[torch.library.Library] = []
_unawaited: set[_ObservedWork] = set()


def _install() -> None:
    library = torch.library.Library("c10d", "IMPL")
    for name, operation in OPERATORS.items():
        if hasattr(torch.ops.c10d, name):
            kernel = _Operator(getattr(torch.ops.c10d, name).default, operation)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
    _libraries.append(library)
