"""Shape inference: a forward pass that lists the modules that run and the shapes of their tensors.

It has no side effects: buffers, training flags and random states are restored, and no gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..config.base import HookBase
from ..errors import ConfigError, Problem, first_line, user_code_location
from ..runtime.random_states import preserve_python_and_numpy
from ..tables.kinds import ATTENTION_FUNCTIONS, ATTENTION_ROLES
from ..values.nested import iter_tensors, join_arguments, returned_value, shape_of, shapes
from .attention_weights import attention_of
from .function_calls import (
    FunctionMode,
    Owner,
    RunningModule,
    module_frame,
    register_pauses_of,
    selects,
    written_tensor,
)
from .hook_plan import Site
from .modules import Layer, Layers


class TensorInfo(NamedTuple):
    """One tensor of a module's input or output."""

    path: str  # in a nested value
    shape: tuple[int, ...]  # of a nested tensor, that of its padded parts
    dtype: torch.dtype
    requires_grad: bool  # whether it will get a gradient


class FunctionInfo(NamedTuple):
    """One call of a torch function in a module. The paths of its tensors start with `path`."""

    path: str  # its name and its number, such as `softmax.0`
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    attention: list[TensorInfo]  # the weights, or the scores, if the spec has this role and the call computes them

    def tensors(self, role: str) -> list[TensorInfo]:
        return {"input": self.inputs, **dict.fromkeys(ATTENTION_ROLES, self.attention)}.get(role, self.outputs)


@dataclass
class ModuleTensors:
    """The inputs and outputs of a module, and its function calls for each spec of a function kind, selected or not, per call."""

    inputs: list[list[TensorInfo]] = field(default_factory=list)
    outputs: list[list[TensorInfo]] = field(default_factory=list)
    functions: dict[str, list[list[FunctionInfo]]] = field(default_factory=dict)


InferredCalls = dict[int, ModuleTensors]
"""The calls of every module that ran, by the `id` of the module."""
Observer = Callable[[nn.Module, str, Any], None]
FunctionObserver = Callable[[Site, str, Any], None]


def infer_shapes(
    model: nn.Module,
    forward: Callable[[], Any],
    *,
    training: bool,
    observe: Observer | None = None,
    function_sites: Sequence[Site] = (),
    observe_function: FunctionObserver | None = None,
) -> InferredCalls:
    """Run one forward pass and list the tensors of every module.

    Args:
        observe: Called with each module, `input` or `output`, and the value.
        function_sites: The sites of the function kinds. The functions of their modules are listed.
        observe_function: Called with a site, a role, and the tensors by path, for each selected function call. The roles are `input`,
            `output`, and that of a site with role `attention` or `scores`.

    Raises:
        ConfigError: The pass failed. The message contains the layer that failed first, and the shapes of its input.
            Also errors that `observe`, `observe_function` or `forward` raise.
    """
    layers = Layers.of(model)
    inferred: InferredCalls = {}
    running: list[tuple[Layer, Any]] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = join_arguments(args, kwargs)
        running.append((layers.by_module[id(module)], inputs))
        inferred.setdefault(id(module), ModuleTensors()).inputs.append(_infos(inputs))
        if observe is not None:
            observe(module, "input", inputs)
        if id(module) in by_module and (frame := module_frame()[0]) is not None:
            functions, observers = inferred[id(module)].functions, {}
            for site in by_module[id(module)]:
                functions.setdefault(site.spec.name, []).append([])
                observers[site.spec.name] = site, functions[site.spec.name][-1]
            listing.enter(RunningModule(frame, observers))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        while running.pop()[0].module is not module:
            pass  # a layer below failed, and the model handled the exception
        value = returned_value(output, args, kwargs)
        inferred[id(module)].outputs.append(_infos(value))
        if observe is not None:
            observe(module, "output", value)

    by_module: dict[int, list[Site]] = {}
    for site in function_sites:
        by_module.setdefault(id(site.layer.module), []).append(site)
    listing = _FunctionListing(function_sites, (before, after), observe_function)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
        listing.leave(module_frame()[0])

    try:
        with ExitStack() as hooks:
            for module in (layer.module for layer in layers if not layer.is_script):
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after, with_kwargs=True))
                if id(module) in by_module:
                    hooks.enter_context(module.register_forward_hook(leave, prepend=True, always_call=True))
            for handle in register_pauses_of(listing, (site.layer.module for site in function_sites)):
                hooks.enter_context(handle)
            hooks.callback(listing.leave_all)
            with without_side_effects(model, training), torch.enable_grad():
                forward()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_misfit(error, running, has_called=bool(inferred))) from error
    return inferred


class _FunctionListing(FunctionMode):
    """Lists all function calls of modules. The observer of a spec is its site with the list of a module call."""

    def __init__(
        self, sites: Sequence[Site], own_hooks: Sequence[Callable[..., Any]], observe: FunctionObserver | None
    ) -> None:
        super().__init__([*{site.spec.name: site.spec for site in sites}.values()], own_hooks)
        self._observe = observe

    def selects(self, spec: HookBase, name: str) -> bool:  # noqa: ARG002
        return True

    def run(
        self, function: Any, name: str, owners: Sequence[Owner], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inputs = join_arguments(args, kwargs)
        input_infos = [_infos(inputs, owner.path) for owner in owners]
        self._check(name, owners, "input", inputs)
        result = function(*args, **kwargs)
        value = written_tensor(function, name, args, kwargs) if result is None else result
        roles = [owner.observer[0].spec.tensor_role for owner in owners]
        is_observed = name in ATTENTION_FUNCTIONS and not set(roles).isdisjoint(ATTENTION_ROLES)
        found = attention_of(name, args, kwargs, result) if is_observed else {}
        attention = {} if isinstance(found, str) else found
        for owner, infos, role in zip(owners, input_infos, roles, strict=True):
            of_role = _infos(attention.get(role, ()), owner.path)
            owner.observer[1].append(FunctionInfo(owner.path, infos, _infos(value, owner.path), of_role))
        self._check(name, owners, "output", value)
        for role, tensor in attention.items():
            self._check(name, owners, role, tensor)
        return result

    def _check(self, name: str, owners: Sequence[Owner], role: str, value: Any) -> None:
        for owner in owners:
            site = owner.observer[0]
            if self._observe is not None and selects(site.spec, name):
                self._observe(site, role, dict(iter_tensors(value, owner.path)))


def calls_of(module: nn.Module, role: str, inferred: InferredCalls) -> list[list[TensorInfo]]:
    calls = inferred.get(id(module), ModuleTensors())
    return calls.inputs if role in ("input", "grad_input") else calls.outputs


def function_calls_of(site: Site, inferred: InferredCalls) -> list[list[FunctionInfo]]:
    """Return the function calls in a module for the spec of a site, per call of the module."""
    return inferred.get(id(site.layer.module), ModuleTensors()).functions.get(site.spec.name, [])


def calls_at(site: Site, inferred: InferredCalls) -> list[list[TensorInfo]]:
    """Return the tensors that the role and the functions of a site's spec select, per call of its module."""
    role = site.spec.tensor_role
    if not site.spec.definition.of_functions:
        return calls_of(site.layer.module, role, inferred)
    return [
        [
            info
            for function in functions
            if selects(site.spec, function.path.partition(".")[0])
            for info in function.tensors(role)
        ]
        for functions in function_calls_of(site, inferred)
    ]


def _infos(value: Any, path: str = "") -> list[TensorInfo]:
    return [
        TensorInfo(path, shape_of(tensor), tensor.dtype, tensor.requires_grad)
        for path, tensor in iter_tensors(value, path)
    ]


def materialize(model: nn.Module, forward: Callable[[], Any]) -> None:
    """Give lazy modules their shapes by one forward pass. The random state is restored. Raise a ConfigError if it fails."""
    if any(isinstance(module, LazyModuleMixin) and module.has_uninitialized_params() for module in model.modules()):
        infer_shapes(model, forward, training=False)


@contextmanager
def without_side_effects(model: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Restore training flags, buffers and random states after a forward pass in training mode or not; None for the current mode."""
    flags = {module: module.training for module in model.modules()}
    buffers = [
        (buffer, buffer.detach().clone())
        for module in model.modules()
        for buffer in module._buffers.values()
        if buffer is not None and not nn.parameter.is_lazy(buffer)
    ]
    known = {
        module: dict(module._buffers) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)
    }
    if training is not None:
        model.train(training)
    try:
        with preserve_random_state():
            yield
    finally:
        with torch.no_grad():
            for module, by_name in known.items():
                module._buffers.clear()
                module._buffers.update(by_name)
            for buffer, saved in buffers:
                buffer.copy_(saved)
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def preserve_random_state() -> Iterator[None]:
    devices = range(torch.cuda.device_count())  # PyTorch warns about several unnamed devices.
    with preserve_python_and_numpy(), torch.random.fork_rng(devices):
        yield


def _misfit(error: Exception, running: list[tuple[Layer, Any]], *, has_called: bool) -> Problem:
    """Return the problem of a failed pass: in the layer that was running, or in the task before or after the model."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    location = user_code_location(error)
    location += "".join(f", in {note}" for note in getattr(error, "__notes__", ()) if note.startswith("task "))
    if not running:
        message = "cannot compute the loss from the model's output and the batch's targets"
        message = message if has_called else "the error occurs before the task calls the model"
        return Problem("task", f"{message}{location}", given=reason)
    layer, inputs = running[-1]
    own = ", ".join(
        f"{name} {list(parameter.shape)}"
        for name, parameter in layer.own_parameters()
        if not nn.parameter.is_lazy(parameter)
    )
    return Problem(
        "data, model",
        f"the batch does not fit the model: layer {layer.label!r} was given {shapes(inputs)}{location}",
        given=reason,
        allowed=f"input that fits {layer.type}"
        + (f" with {own}" if own else f": {layer.module}".replace("\n", " ")[:160]),
    )
