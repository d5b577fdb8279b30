"""The operators that stand for hooks in graphs of `torch.compile`, and the traced functions that call them.

The compiler traces a module's hooks like its forward pass. Traced hooks only call operators, into which it does not look, so that
a graph has no break. At run time, an operator gets the real tensor and calls the same code as without compilation.

    begin(token, order, missing, traced) -> call             before the forward pass; the hooks on inputs follow
    end(token, order, missing, begins, traced, values, paths, stage) -> call
                                                             after it; also runs the first hooks on outputs, if they only observe
    observe(value, call, token, order, stage, path, owner)   hooks that change nothing
    change(value, call, token, order, stage, path, owner) -> value, acted
                                                             interventions; `acted` says which of them acted
    change_backward(gradient, value, acted, call, ...)       the gradient of `change`, from a second evaluation

The owner of a gradient is the tensor that it belongs to, if a hook needs it.

The token of a hook group is a tensor, and so an input of the graph: modules with the same structure share one graph. A call is a tensor
too: it shows the operators in the backward pass to which call of the module a gradient belongs. The operators write to the order
according to their schema, so that the compiler neither removes nor reorders them. Operators in the backward pass have an order of
their own, because the compiler would copy one that the forward pass has changed.

Activation checkpointing copies operators with their arguments to the backward pass. The value of the order, which is the number of a
run of the graph, and the number of the call in the graph (`traced`) show which call it recomputes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten

from ..tables.reasons import NO_GRAD, NO_GRAPH, NO_INPUT_GRAPH, NO_TENSOR
from ..values.dtensor import is_sharded

GraphHooks = Any
"""An `instrument.hooks.compiled_hooks.GraphHooks`, whose module imports this one."""

_SITE = "Tensor call, Tensor token, Tensor(a!) order, int stage, str path"
_SCHEMAS = (
    "begin(Tensor token, Tensor(a!) order, str missing, int traced) -> Tensor",
    "end(Tensor token, Tensor(a!) order, str missing, bool begins, int traced, Tensor[] values, str[] paths, int stage) -> Tensor",
    f"observe(Tensor value, {_SITE}, Tensor? owner) -> ()",
    f"change(Tensor value, {_SITE}, Tensor? owner) -> (Tensor, Tensor)",
    f"change_backward(Tensor gradient, Tensor value, Tensor acted, {_SITE}) -> Tensor",
)
TAGS = (torch.Tag.cudagraph_unsafe,)  # CUDA graphs are captured between the operators, which run Python code
LIBRARY = torch.library.Library("instrument", "DEF")
for _schema in _SCHEMAS:
    LIBRARY.define(_schema, tags=TAGS)
OPERATORS: Any = torch.ops.instrument
_MAX_INTERVENTIONS = 64  # interventions of one stage
SEPARATOR = "\n"  # between the paths of one tensor
with torch.inference_mode(False):  # the order of the operators in forward and in backward passes; never written
    _FORWARD, _BACKWARD = [torch.zeros(1, dtype=torch.int64, device="cpu")], torch.zeros(1, device="cpu")


class GraphCall(NamedTuple):
    """What a call tensor contains, int64 [4]: the index of the call, and the rest as in `instrument.hooks.module_calls.Call`."""

    number: int = 0
    origin: int = 0
    is_recomputed: bool = False
    micro_step_index: int = 0

    @classmethod
    def of(cls, call: Tensor) -> GraphCall:
        number, origin, is_recomputed, micro_step_index = call.tolist()
        return cls(number, origin, bool(is_recomputed), micro_step_index)


_TARGETS: WeakValueDictionary[int, GraphHooks] = WeakValueDictionary()
_numbers = count(1)


def _traced_call_number() -> int:
    """Return a number for a call of a module in traced code, which is constant in the graph."""
    return next(_numbers)


# As torch.compiler.assume_constant_result does, which would import the compiler.
_traced_call_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def new_token(target: GraphHooks) -> Tensor:
    """Return the token of hooks, int64 [1]. The hooks may be freed: the operators then do nothing."""
    number = next(_numbers)
    _TARGETS[number] = target
    return torch.tensor([number], device="cpu")


def _begin(token: Tensor, order: Tensor, missing: str, traced: int) -> Tensor:
    target = _TARGETS.get(int(token))
    return _tensor_of(GraphCall() if target is None else target.begin(missing, (int(order), traced)))


def _end(  # noqa: PLR0917
    token: Tensor,
    order: Tensor,
    missing: str,
    begins: bool,
    traced: int,
    values: Sequence[Tensor],
    paths: Sequence[str],
    stage: int,
) -> Tensor:
    if (target := _TARGETS.get(int(token))) is None:
        return _tensor_of(GraphCall())
    call = target.end(missing, begins, (int(order), traced))
    if not torch.is_inference_mode_enabled():
        # Each run of a graph has its own order, with its own number. Autograd would refuse to recompute a part of a graph if a later
        # graph had written to the same one.
        _FORWARD[0] = torch.tensor([next(_numbers)], device="cpu")
    for value, path in zip(values, paths, strict=True):
        target.run(stage, value, call, path, None)
    return _tensor_of(call)


def _tensor_of(call: GraphCall) -> Tensor:
    return torch.tensor(call, dtype=torch.int64, device="cpu")


def _observe(
    value: Tensor, call: Tensor, token: Tensor, _order: Tensor, stage: int, path: str, owner: Tensor | None
) -> None:
    if (target := _TARGETS.get(int(token))) is not None:
        target.run(stage, value, GraphCall.of(call), path, owner)


def _change(
    value: Tensor, call: Tensor, token: Tensor, _order: Tensor, stage: int, path: str, owner: Tensor | None
) -> tuple[Tensor, Tensor]:
    target = _TARGETS.get(int(token))
    new, acted = (value, []) if target is None else target.run(stage, value, GraphCall.of(call), path, owner)
    return _copy(new, value), torch.tensor([*acted, *[False] * (_MAX_INTERVENTIONS - len(acted))], device="cpu")


def _change_backward(  # noqa: PLR0917
    gradient: Tensor, value: Tensor, acted: Tensor, call: Tensor, token: Tensor, _order: Tensor, stage: int, path: str
) -> Tensor:
    target = _TARGETS.get(int(token))
    if target is None:
        return _copy(gradient, gradient)
    return _copy(target.differentiate(stage, gradient, value, acted.tolist(), GraphCall.of(call), path), gradient)


def _copy(new: Tensor, like: Tensor) -> Tensor:
    """Return a copy with the strides of `torch.empty_like`, as the compiler expects. An operator must return new memory."""
    return torch.empty_like(like).copy_(new)


def _fake_call(*arguments: Any) -> Tensor:  # noqa: ARG001
    return torch.empty(len(GraphCall._fields), dtype=torch.int64, device="cpu")


def _fake_change(value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(value), torch.empty(_MAX_INTERVENTIONS, dtype=torch.bool, device="cpu")


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "begin": (_begin, _fake_call),
    "end": (_end, _fake_call),
    "observe": (_observe, lambda *_: None),
    "change": (_change, _fake_change),
    "change_backward": (_change_backward, lambda gradient, *_: torch.empty_like(gradient)),
}
for _name, (_real, _fake) in _IMPLEMENTATIONS.items():
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"instrument::{_name}", _fake, lib=LIBRARY)


class Stage(NamedTuple):
    """Consecutive hooks on the same tensors."""

    number: int
    changes: bool  # whether its hooks are interventions
    needs_owner: bool  # whether any of them needs the owner of a gradient


class _Change(torch.autograd.Function):
    """The operator `change` as a differentiable function."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, call: Tensor, token: Tensor, stage: int, path: str) -> Tensor:
        new, acted = OPERATORS.change(value, call, token, _FORWARD[0], stage, path, None)
        ctx.save_for_backward(value, acted, call, token)
        ctx.stage, ctx.path = stage, path
        return new  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        value, acted, call, token = ctx.saved_tensors
        new = OPERATORS.change_backward(gradient, value, acted, call, token, _BACKWARD, ctx.stage, ctx.path)
        return new, None, None, None, None


class _Gradient(torch.autograd.Function):
    """The identity, whose backward pass runs the hooks on the gradient."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, value: Tensor, call: Tensor, token: Tensor, stages: Sequence[Stage], path: str, is_shared: bool
    ) -> Tensor:
        ctx.save_for_backward(call, token, value if any(stage.needs_owner for stage in stages) else None)
        ctx.stages, ctx.path = stages, path
        # The compiler removes the view and the copy. Other code may modify the memory of a shared value, which therefore stays
        # the same. PyTorch refuses to modify such a view in place: the compilation then fails. Two results of the graph that share
        # memory would lose this function, since the compiler makes the views again outside of the graph; not those of `unbind`.
        return value.unsqueeze(0).unbind()[0] if is_shared else value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        call, token, owner = ctx.saved_tensors
        for number, changes, needs_owner in ctx.stages:
            given = (gradient, call, token, _BACKWARD, number, ctx.path, owner if needs_owner else None)
            if changes:
                gradient, _ = OPERATORS.change(*given)
            else:
                OPERATORS.observe(*given)
        return gradient, None, None, None, None, None


def traced_call(
    value: Any,
    call: Tensor,
    token: Tensor,
    stages: Sequence[Stage],
    gradient_stages: Sequence[Stage],
    shared: Sequence[Tensor] | None = None,
) -> Any:
    """Call the operators for all tensors of a value. Return the value that replaces it; None if no tensor changes.

    Args:
        value: The inputs or the output of a module: tensors in containers that `torch.utils._pytree` knows.
        shared: The tensors whose memory other code may modify. Default: all.
    """
    leaves, paths, structure = _flattened(value)
    is_changed = False
    for number, changes, _ in stages:
        for at, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if not changes:
                OPERATORS.observe(leaf, call, token, _FORWARD[0], number, paths[at], None)
            elif leaf.is_floating_point():
                leaves[at], is_changed = _Change.apply(leaf, call, token, number, paths[at]), True
    if gradient_stages and torch.is_grad_enabled():
        given = [*leaves]
        bases = [leaf._base for leaf in given if isinstance(leaf, Tensor)]
        for at, leaf in enumerate(given):
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                continue
            # An output at several paths stays one tensor, which other code may modify. Inputs have a gradient for each path.
            places = [at] if shared is None else [index for index, each in enumerate(given) if each is leaf]
            if places[0] < at:
                leaves[at] = leaves[places[0]]
                continue
            is_shared = shared is None or leaf._base is not None or any(leaf is each for each in (*shared, *bases))
            path = SEPARATOR.join([paths[index] for index in places])
            leaves[at], is_changed = _Gradient.apply(leaf, call, token, gradient_stages, path, is_shared), True
    return tree_unflatten(leaves, structure) if is_changed else None


def begin_call(token: Tensor, missing: str) -> Tensor:
    """Call the operator that begins a call. Return the call tensor; see `GraphHooks.begin`."""
    return OPERATORS.begin(token, _FORWARD[0], missing, _traced_call_number())  # type: ignore[no-any-return]


def end_call(value: Any, token: Tensor, missing: str, begins: bool, stage: Stage | None) -> Tensor:
    """Call the operator that ends a call, and runs the hooks of a stage, which change nothing, on the output. Return the call tensor."""
    number = _traced_call_number() if begins else 0
    if stage is None:
        return OPERATORS.end(token, _FORWARD[0], missing, begins, number, [], [], 0)  # type: ignore[no-any-return]
    leaves, paths, _ = _flattened(value)
    tensors = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    given = [leaves[at] for at in tensors], [paths[at] for at in tensors]
    return OPERATORS.end(token, _FORWARD[0], missing, begins, number, *given, stage.number)  # type: ignore[no-any-return]


def _flattened(value: Any) -> tuple[list[Any], list[str], Any]:
    """Return the leaves of a traced value, their paths, and its structure."""
    items, structure = tree_flatten_with_path(value)
    paths = [".".join([str(_name_of(key)) for key in keys]) for keys, _ in items]
    return [leaf for _, leaf in items], paths, structure


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def has_writable(value: Any) -> bool:
    """Return whether a traced value contains a list or dictionary, to which a module can write."""
    if isinstance(value, tuple):
        return any(has_writable(each) for each in value)
    return isinstance(value, (list, dict)) and len(tensors_in(value)) > 0  # the compiler traces no union


def has_shards(value: Any) -> bool:
    """Return whether a traced value contains a DTensor. The operators see no placement."""
    return any(is_sharded(tensor) for tensor in tensors_in(value))


def has_unknown(value: Any) -> bool:
    """Return whether a traced value contains a dataclass that is not a container for `torch.utils._pytree`."""
    return any(hasattr(leaf, "__dataclass_fields__") for leaf in tree_leaves(value))


def why_no_gradient(value: Any, *, is_data: bool) -> str:
    """Return why no tensor of a traced value gets a gradient; empty if one does. None is expected for a value of data alone (`is_data`)."""
    tensors = tensors_in(value)
    if not tensors:
        return NO_TENSOR
    if not torch.is_grad_enabled():
        return NO_GRAD
    if any(tensor.requires_grad for tensor in tensors):
        return ""
    return NO_INPUT_GRAPH if is_data else NO_GRAPH


def _name_of(key: Any) -> Any:
    """Return the part of a path that an entry of `torch.utils._pytree` stands for."""
    if hasattr(key, "key"):
        return key.key
    return key.idx if hasattr(key, "idx") else key.name
