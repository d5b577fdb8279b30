"""Trial calls of custom hook functions and statistics (`_target_: ...`), to report invalid results before step 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..actions.base import Action, Archive, Context, Effect, NotKeptError, StepContext
from ..actions.measurement import Measurement
from ..errors import ConfigError, InstrumentError, Problem
from ..kinds.attached_hook import AttachedHook
from ..kinds.clock import Clock
from ..kinds.together import JOINED_IN_PLACE_FIX, joins_gradients
from ..nested import iter_tensors
from ..plan.hook_plan import HookPlan, Site
from ..spec.modify import FunctionSpec
from ..spec.record import StatisticsSpec
from ..spec.schedule import Schedule


class FunctionCheck:
    """Calls custom functions of `modify`, its functions with vectors, and custom statistics once for each tensor.

    Nothing is recorded or changed. Functions of `call` are not called, because they have side effects.

    Each function gets a copy of the tensor. For a gradient, the copy of the forward tensor is used, which has the same
    shape. Functions on the state of an optimizer are not called, because the state does not exist yet. Use this class
    inside the forward pass of shape inference, which restores the random states.

    Args:
        plan: The plan of the hooks.
        seed: The seed of the run.
        archive: The tensors of other runs.

    Raises:
        ConfigError: A function does not exist or is not callable. From all methods: a function raises an exception, or
            its result cannot replace the tensor.
    """

    def __init__(self, plan: HookPlan, seed: int, archive: Archive) -> None:
        sites = [
            site
            for site in plan.sites
            if site.spec.is_tried or (isinstance(site.spec, StatisticsSpec) and site.spec.custom_statistics)
        ]
        actions = {site.spec.name: _action(site, archive) for site in sites}
        self.attached_hooks = [
            AttachedHook(site, actions[site.spec.name], Clock(_first(site.spec.schedule), seed), shapes_checked=True)
            for site in sites
        ]
        self._inputs: dict[int, list[_JoinedTensor]] = {}  # of the modules that run
        self._outputs: list[_JoinedTensor] = []
        self.called: set[tuple[AttachedHook | str, ...]] = set()
        self.by_module: dict[int, list[AttachedHook]] = {}
        for attached in self.attached_hooks:
            definition = attached.site.spec.definition
            if definition.family == "module" and not definition.of_functions:
                self.by_module.setdefault(id(attached.site.layer.module), []).append(attached)

    def check_tensors(self, module: nn.Module, role: str, value: Any, phase: str = "train") -> None:
        """Call the functions at a module with its input or output tensors.

        Args:
            module: The module.
            role: `input` or `output`.
            value: The input or output: a tensor, or nested tensors.
            phase: `train` (default) or `eval`.
        """
        if role == "output":
            _check_unmodified(self._inputs.pop(id(module), ()))
        for attached in self.by_module.get(id(module), ()):
            spec = attached.site.spec
            if spec.phase != phase or role != ("input" if "input" in spec.tensor_role else "output"):
                continue
            self._check(attached, value)
            if joins_gradients(attached.site):
                watched = self._inputs.setdefault(id(module), []) if role == "input" else self._outputs
                watched += _JoinedTensor.of(attached, value)

    def check_function(self, site: Site, role: str, value: Any, phase: str = "train") -> None:
        """Call the functions at a site of a function kind with the tensors of one call of a torch function.

        Args:
            site: The site.
            role: `input` or `output`.
            value: The tensors by their complete paths.
            phase: `train` (default) or `eval`.
        """
        for attached in self.attached_hooks:
            spec = attached.site.spec
            if attached.site is site and spec.phase == phase and (role == "input") == (spec.tensor_role == "input"):
                self._check(attached, value)
                if joins_gradients(site):
                    self._outputs += _JoinedTensor.of(attached, value)

    def check_outputs(self) -> None:
        """Check, after a forward pass, that no operation modified the outputs whose gradients hooks join."""
        outputs, self._outputs = self._outputs, []
        _check_unmodified(outputs)

    def _check(self, attached: AttachedHook, value: Any) -> None:
        is_gradient = attached.site.spec.definition.gradient
        tensors = {
            path: tensor
            for path, tensor in iter_tensors(value)
            if attached.accepts(tensor, path) and (tensor.requires_grad or not is_gradient)
        }
        if attached.together is None:
            for path, tensor in tensors.items():
                self._call(attached, {path: tensor})
        elif tensors:
            self._call(attached, tensors)

    def check_loss(self, loss: Tensor) -> None:
        """Call the functions of kind `loss` with the loss."""
        for attached in self.attached_hooks:
            if attached.site.spec.kind == "loss":
                self._call(attached, {"": loss})

    def check_parameters(self) -> None:
        """Call the functions at parameters, buffers and entries of state dicts."""
        for attached in self.attached_hooks:
            site = attached.site
            if site.spec.definition.family in ("module", "loss") or site.spec.tensor_role.startswith("state."):
                continue
            tensor = site.current_tensor
            if tensor is not None and not nn.parameter.is_lazy(tensor) and attached.accepts(tensor, site.own_name):
                value = tensor if site.spec.definition.family == "parameter" else None
                self._call(attached, {site.own_name: tensor.detach()}, value)

    def _call(self, attached: AttachedHook, tensors: Mapping[str, Tensor], value: Tensor | None = None) -> None:
        """Call one function with copies of tensors, unless it was called for their paths before.

        Args:
            attached: The hook of the function.
            tensors: One tensor by its path; several for a hook with `together: true`.
            value: The parameter of a gradient.

        Raises:
            ConfigError: The function raises an exception, or its result is invalid.
        """
        if (attached, *tensors) in self.called:
            return
        self.called.add((attached, *tensors))
        spec = attached.site.spec
        is_gradient = spec.definition.gradient
        copies = {path: _copy(tensor, has_graph=not is_gradient) for path, tensor in tensors.items()}
        of_module = is_gradient and spec.definition.family == "module"
        values = {path: tensor.detach().clone() for path, tensor in tensors.items()} if of_module else {}
        try:
            with torch.set_grad_enabled(any(copy.requires_grad for copy in copies.values())):
                if attached.together is not None:
                    attached.fire_together(copies, values=values)
                else:
                    ((path, copy),) = copies.items()
                    attached.fire(copy, path, value=values.get(path, value))
        except ConfigError:
            raise
        except InstrumentError as error:
            if isinstance(error.__cause__, NotKeptError):
                return  # no hook keeps tensors here
            message = f"the trial call on a copy before the run failed: {error}"
            if isinstance(spec, StatisticsSpec):
                allowed = "functions of the tensor that return one number"
                raise ConfigError(Problem(f"hooks.{spec.name}.stats", message, allowed=allowed)) from error
            if not isinstance(spec, FunctionSpec):
                raise ConfigError(Problem(f"hooks.{spec.name}", message)) from error
            allowed = "fn(tensor, context) that returns a new tensor of the same shape and dtype, or None"
            if spec.together:
                allowed = (
                    "fn(tensors, context) that returns a dict of new tensors of the same shapes and dtypes, or None"
                )
            raise ConfigError(Problem(f"hooks.{spec.name}.fn", message, spec.fn.target, allowed)) from error


class _JoinedTensor(NamedTuple):
    """A tensor whose gradient a hook joins with others, which requires that it is not modified in place.

    Attributes:
        attached: The hook.
        path: The path of the tensor.
        tensor: The tensor without its graph. It shares the version counter.
        version: The version when the hook would join the gradients.
    """

    attached: AttachedHook
    path: str
    tensor: Tensor
    version: int

    @classmethod
    def of(cls, attached: AttachedHook, value: Any) -> list[_JoinedTensor]:
        """Return the tensors of a call that the hook would join; none if a single one gets a gradient."""
        found = [(path, tensor) for path, tensor in iter_tensors(value) if tensor.requires_grad]
        if sum(attached.matches_path(path) for path, _ in found) < 2:
            return []
        return [cls(attached, path, tensor.detach(), tensor._version) for path, tensor in found]


def _check_unmodified(joined: Sequence[_JoinedTensor]) -> None:
    """Check that tensors were not modified in place."""
    for attached, path, tensor, version in joined:
        if tensor._version != version:
            site = attached.site
            of = "input" if site.spec.tensor_role == "grad_input" else "output"
            message = (
                f"an operation modifies the {of} {path!r} of {site.label!r} in place, so its gradients cannot be joined"
            )
            raise ConfigError(Problem(f"hooks.{site.spec.name}.together", message, given=True, fix=JOINED_IN_PLACE_FIX))


def _action(site: Site, archive: Archive) -> Action:
    """Return an action that calls the functions of a site and records nothing."""
    if isinstance(site.spec, StatisticsSpec):
        return _CustomStatistics(site.spec)
    action: Action = site.spec.build(_NoRows(), archive)
    return action


def _copy(tensor: Tensor, *, has_graph: bool) -> Tensor:
    copy = tensor.detach().clone()
    # Not a leaf, because PyTorch refuses in-place writes to a leaf.
    return copy.requires_grad_().clone() if tensor.requires_grad and has_graph else copy


class _CustomStatistics(Action):
    """Computes the custom statistics of a spec and records none."""

    def __init__(self, spec: StatisticsSpec) -> None:
        self.measurement = Measurement(spec)

    def __call__(self, tensor: Tensor, context: Context) -> None:
        self.measurement.custom_numbers(tensor, context)


def _first(schedule: Schedule) -> StepContext:
    """Return the first step of a schedule."""
    return StepContext(schedule.start if schedule.steps is None else min(schedule.steps), 0, 0, schedule.phase)


class _NoRows:
    """A recorder that discards the effects of interventions."""

    def add_effect(self, context: Context, effect: Effect) -> None:
        """Do nothing."""
