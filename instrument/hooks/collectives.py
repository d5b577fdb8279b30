"""Kind `collective`: the collective operations of `torch.distributed`, such as those of DDP and FSDP2.

Python, the reducer of DDP in C++ and compiled code call the operators of the namespace `c10d`. While hooks are attached, a kernel for the
dispatch key BackendSelect, which is above those of all devices, gets each call of them and passes it on.

The hooks on a result run when the caller has waited for it, or before the future that it waits for is complete. No operation and no point
of waiting is added.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..actions.record import Record
from ..errors import ConfigError, Problem
from ..fields.globs import matches
from ..runtime.lazy_compiler import run_outside_of_graphs
from ..runtime.own_operations import are_own_collectives, own_collectives
from ..tables.reasons import AWAITED_LATER, NOT_AWAITED, NOT_DRAWN, OTHER_RANKS
from .attached_hook import AttachedHook
from .clock import FIRST_CALL, Clock
from .distributed_scope import wrappers_of
from .hook_group import HookGroup

_OPERATORS = {
    "all_reduce": ("allreduce_", "allreduce_coalesced_"),
    "all_gather": ("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    "reduce_scatter": ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    "broadcast": ("broadcast_",),
    "reduce": ("reduce_",),
    "gather": ("gather_", "gather_into_tensor_"),  # PyTorch 2.10 has the first one only
    "scatter": ("scatter_",),
    "all_to_all": ("alltoall_", "alltoall_base_"),
}  # of `c10d`, by operation; the first argument has the results
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_CPU = torch.device("cpu")
_Work: Any = dist.Work if dist.is_available() else object


@dataclass(eq=False)
class _Call:
    """One collective operation."""

    operation: str
    outputs: Sequence[Tensor]  # what this process receives
    reduction: str | None = None  # how it combines tensors: sum, avg, ...
    ranks: list[int] | None = None  # of its group; None if torch.distributed does not know the group
    # For each group of hooks that observes it, its name with its index in the micro-step, and the sites that are scheduled.
    sites: dict[CollectiveHooks, tuple[str, list[AttachedHook]]] = field(default_factory=dict)
    rows: list[tuple[Record, Any, Tensor]] = field(default_factory=list)  # the firings of record hooks
    device: torch.device = _CPU
    started_at: float | torch.Event | None = None  # see `_now`

    def act(self, role: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the hooks on what this process sends (role input) or receives (output). Return the tensors that replace them."""
        for hooks in self.sites:
            tensors = hooks.act(self, role, tensors)
        return tensors

    def miss(self) -> None:
        """Count the results as missed: nothing has waited for them."""
        for hooks in self.sites:
            hooks.miss(self)

    def finish(self) -> None:
        """Run the hooks on what this process received, and write the rows of the complete operation."""
        ended_at = _now(self.device)
        _write(self.outputs, self.act("output", self.outputs))
        for action, context, tensor in self.rows:
            dtype = str(tensor.dtype).removeprefix("torch.")
            parts = (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
            row = (self.operation, self.reduction, self.ranks, dtype, sum(part.nbytes for part in parts))
            # See `instrument.stats.table_rows.Measure`. The cells do not depend on the elements. The time is read after the step.
            cells = partial(_cells, row, self.started_at, ended_at)
            measure: Any = SimpleNamespace(size=len(row) + 1, values=lambda _: (), cells=cells)
            action.rows.add_row("collectives", context, measure, tensor)


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
            ConfigError: A spec has the rank of no process, or a communication hook of the model is not supported.
        """
        if not dist.is_available():
            return
        if dist.is_initialized():
            self._check()
        _attached.append(self)
        if len(_attached) == 1:
            _libraries.append(torch.library.Library("c10d", "IMPL"))
            for operation, names in _OPERATORS.items():
                for operator in (getattr(torch.ops.c10d, name, None) for name in names):
                    if operator is not None:
                        kernel = _Kernel(operator.default, operation)
                        _libraries[0].impl(operator.default, kernel, "BackendSelect", with_keyset=True)

    def _check(self) -> None:
        for wrapper in wrappers_of(self.attached_hooks[0].site.layer.module):
            if wrapper._get_ddp_logging_data().get("comm_hook") == "BuiltinCommHookType.FP16_COMPRESS":
                # It requires futures of a type that Python cannot create.
                message = "kind collective does not support the built-in hook FP16_COMPRESS of DistributedDataParallel"
                fix = "register fp16_compress_hook of torch.distributed.algorithms.ddp_comm_hooks.default_hooks instead"
                name = self.attached_hooks[0].site.spec.name
                raise ConfigError(Problem(f"hooks.{name}.kind", message, "collective", fix=fix))
        for spec in (attached.site.spec for attached in self.attached_hooks):
            if max(spec.ranks or (0,)) >= (size := dist.get_world_size()):
                allowed = f"0 to {size - 1}"
                raise ConfigError(Problem(f"hooks.{spec.name}.ranks", "no process has this rank", spec.ranks, allowed))

    def detach(self) -> None:
        """Stop observing. The last group removes the kernels. Results that no code has waited for are counted as missed."""
        for work in [*_works]:
            with work.lock:
                if work.call is not None and self in work.call.sites:
                    self.miss(work.call)
                    del work.call.sites[self]
        if self in _attached:
            _attached.remove(self)
            if not _attached:
                _libraries.pop()._destroy()

    def begin(self, call: _Call) -> None:
        """Number an operation, and observe it if any site is scheduled."""
        with self._lock:
            if self._counted_at != self.clock.micro_step_index:
                self._counts.clear()
                self._counted_at = self.clock.micro_step_index
                if not torch._C._distributed_c10d._get_work_registry_size():
                    _unawaited.clear()  # of works that only Python can wait for
            index = self._counts[call.operation]
            self._counts[call.operation] += 1
        if scheduled := [attached for attached in self.attached_hooks if attached.is_scheduled]:
            call.sites[self] = f"{'join.' if _is_in_join() else ''}{call.operation}.{index}", scheduled

    def act(self, call: _Call, role: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        given = [tensor.detach() for tensor in tensors]
        new = [*given]
        with own_collectives(), torch.no_grad(), self.clock.timer or nullcontext():
            for at, path, attached in self._selected(call, role, len(tensors)):
                if not attached.is_scheduled:
                    attached.count_missed_opportunity(AWAITED_LATER)
                elif (reason := _exemption(attached, new[at], path)) is not None:
                    attached.count_exempt(reason)
                elif attached.count_and_check_readable(new[at]):
                    new[at] = attached.fire(new[at], path)
                    if isinstance(attached.action, Record):
                        call.rows.append((attached.action, attached.context(path, FIRST_CALL), new[at]))
        return [old if after is before else after for old, before, after in zip(tensors, given, new, strict=True)]

    def miss(self, call: _Call) -> None:
        for _, _, attached in self._selected(call, "output", len(call.outputs)):
            attached.count_missed_opportunity(NOT_AWAITED)

    def _selected(self, call: _Call, role: str, count: int) -> Iterator[tuple[int, str, AttachedHook]]:
        """Yield the index and the path of each tensor, with the sites that select it and were scheduled at the call."""
        name, scheduled = call.sites[self]
        for at in range(count):
            path = name if count == 1 else f"{name}.{at}"
            for attached in scheduled:
                functions = attached.site.spec.functions or ("*",)
                is_selected = attached.role == role and attached.matches_path(path)
                if is_selected and any(matches(pattern, call.operation) for pattern in functions):
                    yield at, path, attached


def _exemption(attached: AttachedHook, tensor: Tensor, path: str) -> str | None:
    """Return why a hook does not act on a tensor that it selects; None if it acts."""
    spec = attached.site.spec
    if not attached.accepts(tensor, path):
        return attached.no_tensor_reason(tensor, path)
    if spec.ranks is not None and attached.clock.rank not in spec.ranks:
        return OTHER_RANKS
    context = attached.context(path, FIRST_CALL)
    drawn = replace(context, role=f"{context.role} drawn")  # other numbers than those of the action
    is_drawn = spec.fraction == 1 or torch.rand((), generator=drawn.generator(_CPU)).item() < spec.fraction
    return None if is_drawn else NOT_DRAWN


class _Kernel:
    """Passes the calls of an operator of `c10d` on, with the hooks on an operation."""

    def __init__(self, operator: Any, operation: str) -> None:
        self.operator, self.operation = operator, operation
        self.names = [argument.name for argument in operator._schema.arguments]
        self.input_at = int(self.names[1].startswith("input"))

    def __call__(self, keyset: Any, *args: Any) -> Any:
        _awaited.work = None
        outputs = _tensors(args[0])
        call = _Call(self.operation, outputs)
        if not (are_own_collectives() or any(tensor.is_meta for tensor in outputs)):
            for hooks in [*_attached]:
                hooks.begin(call)
        if not call.sites:
            return self.operator.redispatch(keyset & _BELOW, *args)
        given = dict(zip(self.names, args, strict=False))  # without default values at the end
        group = dist.ProcessGroup.unbox(given["process_group"])
        with suppress(KeyError):
            call.ranks = dist.get_process_group_ranks(group)
        if "reduce_op" in given:
            call.reduction = dist.ReduceOp.RedOpType(given["reduce_op"].op()).name.lower()
        is_root = given.get("root_rank", group.rank()) == group.rank()
        inputs = _tensors(args[self.input_at]) if is_root or self.operation not in ("broadcast", "scatter") else ()
        sent = call.act("input", inputs)
        if is_root and not self.input_at and self.operation != "broadcast":
            _write(inputs, sent)  # the result replaces it anyway
        elif inputs:
            args = (*args[: self.input_at], _replaced(args[self.input_at], iter(sent)), *args[self.input_at + 1 :])
        if not is_root and self.operation in ("reduce", "gather"):
            call.outputs = ()
        call.device = _device_of((*outputs, *inputs))
        call.started_at = _now(call.device)
        result = self.operator.redispatch(keyset & _BELOW, *args)
        *others, boxed = result if isinstance(result, tuple) else (result,)
        if boxed is not None:  # also without `async_op`: the caller waits at once
            observed = _ObservedWork(dist.Work.unbox(boxed), call).boxed()
            return (*others, observed) if others else observed
        if given.get("async_op", True):
            call.miss()
        else:  # NCCL: the operation is in the current stream
            call.finish()
        return result


def _is_in_join() -> bool:
    """Return whether the block `Join` calls an operation in place of a model, because this process has no inputs left."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_qualname != "Join.__exit__":
        frame = frame.f_back
    return frame is not None


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else _CPU


def _now(device: torch.device) -> float | torch.Event | None:
    """Return the time of the host in seconds, or an event in the current stream of a device, without waiting; None without events."""
    if device.type == "cpu":
        return time.perf_counter()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    event = torch.Event(device=device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def _cells(row: tuple[Any, ...], begin: Any, end: Any, values: object, shape: object) -> tuple[Any, ...]:  # noqa: ARG001
    """Return a row with its duration in seconds. Waits for the event at the end, so it is called when the rows of a step are written."""
    if begin is None or isinstance(begin, float):
        return (*row, None if begin is None else end - begin)
    end.synchronize()
    return (*row, begin.elapsed_time(end) / 1000)


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in _tensors(item)]


def _replaced(value: Any, new: Iterator[Tensor]) -> Any:
    return next(new) if isinstance(value, Tensor) else [_replaced(item, new) for item in value]


def _write(given: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    for tensor, changed in zip(given, new, strict=True):
        if changed is not tensor:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(changed)


class _ObservedWork(_Work):  # type: ignore[misc]
    """Stands for an asynchronous work. The hooks on the result run before its consumer gets it; errors are those of the work."""

    def __init__(self, work: Any, call: _Call) -> None:
        super().__init__()
        self.work, self.lock = work, threading.Lock()
        self.call: _Call | None = call
        self.is_on_host, self.has_waited = call.device.type == "cpu", False
        for name in _UNCHANGED:
            setattr(self, name, getattr(work, name))
        _works.add(self)
        _unawaited.add(self)  # functional collectives keep no reference to the Python object

    def __del__(self) -> None:
        if self.call is not None:
            self.call.miss()

    def finish(self) -> None:
        """Run the hooks on the result, once."""
        with self.lock:
            if self.call is not None:
                self.call.finish()
                self.call = None

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        if self.has_waited and self.is_on_host:  # gloo could write the result again
            return True
        done: bool = self.work.wait(*args, **kwargs)
        self.has_waited = True
        _awaited.work = self
        _unawaited.discard(self)
        self.finish()
        return done

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if is_completed := bool(self.work.is_completed()):
            self.finish()
        return is_completed

    def get_future(self) -> Any:
        def then(future: Any) -> Any:
            value = future.value()
            _unawaited.discard(self)
            self.finish()
            return value

        return self.work.get_future().then(then)


for _method in (_Kernel.__call__, _ObservedWork.wait, _ObservedWork.is_completed, _ObservedWork.finish):
    run_outside_of_graphs(_method)  # DDP in a compiled model calls them outside of its graphs
_UNCHANGED = [
    name
    for name in sorted({*dir(_Work)} - {*vars(_ObservedWork), "boxed", "unbox"})
    if name[0] != "_" and callable(getattr(_Work, name))
]
"""The methods of an observed work that are those of the work."""
_attached: list[CollectiveHooks] = []
_libraries: list[torch.library.Library] = []
_works: WeakSet[_ObservedWork] = WeakSet()
_unawaited: set[_ObservedWork] = set()
_awaited = threading.local()  # the last one of each thread: DDP in C++ waits, and then asks for the future
