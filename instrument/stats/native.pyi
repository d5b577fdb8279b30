from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from .cpu_kernel import Slab as Slab

def connect(tensor: type, parameter: type, exchange_api: object) -> bool: ...
def connect_driver(launch: int, capture_status: int, current_device: int, elements: int) -> None: ...
def add_launcher(
    device_type: int,
    device_id: int,
    stream: int,
    kind: int,
    kernel: int,
    function: int,
    max_programs: int,
    threads: int,
    shared_memory: int,
    partials: int,
    arrived: int,
) -> bool: ...
def effect(before: Tensor, after: Tensor) -> list[float] | None: ...
def effect_of_clip(tensor: Tensor, low: float | None, high: float | None) -> tuple[bool, list[float]] | None: ...
def sums(address: int, count: int, kind: int, further: int, cast: tuple[float, ...] = ..., /) -> bytes | None: ...
def bits(address: int, size: int, element_size: int) -> int: ...
def copy_rows(
    source: int, size: int, row_size: int, destination: int, stride: int, indices: int, sums: int
) -> None: ...
def evaluate(program: bytes, numbers: Any, width: int, results: Any) -> None: ...
def keep_step(
    rows: tuple[bytes, bytes, bytes, tuple[str, ...], bytearray],
    at: int,
    numbers: Any,
    metrics: Any,
    is_training: bool,
    /,
) -> bool: ...
def histogram(address: int, count: int, kind: int, low: float, high: float, bins: int, counts: int) -> None: ...
def connect_torch(
    transform: Callable[[], object],
    is_tracing: Callable[[], bool],
    graph_task: Callable[[], int],
    is_grad_enabled: Callable[[], bool],
    packing_hooks: Callable[[bool], object],
    ordered_dict: type,
    firing: Callable[[int, int, bool, int], object],
    register_at_base: Callable[[Tensor, OutputGradientHook], None],
    compiler: Callable[[], object],
    modes: Callable[[], int],
    mode_at: Callable[[int], object],
    push_mode: Callable[[Any], None],
    pop_mode: Callable[[], object],
    code: CodeType,
) -> None: ...

class FiringCounts:
    opportunities: int
    firings: int
    expected: int
    fired: int
    has_notes: bool

def update_counts(counts: list[Any], /) -> list[Any]: ...

class CallIndices:
    latest: int
    @property
    def micro_step_index(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def open_micro_step(self) -> int: ...
    @property
    def failed_micro_step(self) -> int: ...
    def start_micro_step(self, micro_step_index: int, /) -> None: ...
    def next_index(self) -> int: ...
    def end_open_call(self) -> int | None: ...

class Recording:
    def __init__(
        self,
        slab: Slab,
        counts: FiringCounts,
        clock: object,
        slots: Mapping[Any, int],
        module: object,
        further: int,
        at_boundary: bool,
        records_recomputation: bool,
    ) -> None: ...
    def __call__(self, tensor: Tensor, path: str, firing: Any, /) -> Tensor | None: ...

class Changing:
    def __init__(self, slab: Slab | None, *given: Any) -> None: ...  # the others of `Recording`, and further ones
    def __call__(self, tensor: Tensor, path: str, firing: Any, /) -> Tensor | None: ...

class PlainCalls:
    def __init__(
        self,
        clock: object,
        indices: CallIndices,
        outputs: Sequence[Callable[[Tensor, str, Any], Tensor | None]],
        counts: Sequence[FiringCounts],
        gradients: Sequence[Recording],
        finish: Callable[[int, int, int, Tensor], Tensor | None],
    ) -> None: ...
    def enter(self) -> bool: ...
    def leave(self, output: object, /) -> Tensor | tuple[int, Any] | None: ...

class OutputGradientHook:
    @property
    def passes(self) -> set[int]: ...
    def __call__(self, gradient: Tensor | None, /) -> Tensor | None: ...

class FunctionCall:
    frame: FrameType
    observers: dict[str, Any]
    leaf_hooks: Any
    given_call: Any
    firing: Any
    counts: dict[Any, int]
    called: dict[Any, bool]
    obstacles: dict[Any, str]
    gradients: dict[Any, Any]
    compiled: tuple[Any, ...]
    pause_reason: str | None
    is_paused: bool
    has_switched_mode: bool
    def __init__(
        self, frame: FrameType, observers: dict[str, Any], leaf_hooks: object, call: object, firing: object, /
    ) -> None: ...

class FunctionObserver:
    def __init__(
        self,
        mode: object,
        known: dict[Any, Any],
        running: list[Any],
        codes: dict[int, bool],
        observe: Callable[..., Any],
        finish: Callable[..., None],
        /,
    ) -> None: ...
    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, /) -> Any: ...

class FunctionCalls:
    def __init__(
        self,
        clock: object,
        indices: CallIndices,
        is_shared: bool,
        threads: object,
        calls: object,
        function_call: type[FunctionCall],
        observers: dict[str, Any],
        leaf_hooks: object,
        /,
    ) -> None: ...
    def enter(self, group: object, args: tuple[Any, ...], /) -> bool: ...
    def leave(self, group: object, /) -> bool: ...
