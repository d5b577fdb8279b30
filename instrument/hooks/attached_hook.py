"""Attached sites: the action of a site, the state of its schedule, and what happens when it fires."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ..actions.base import KNOWN_RECOMPUTED, UNKNOWN_CALL, UNKNOWN_RECOMPUTED, Action, Context, KeptTensors
from ..actions.intervention import describe, straight_through
from ..actions.stages import Selector, SiteCondition, act_on_indices
from ..config.base import ObservationSpec
from ..config.hook_specs import RecordSpec, StatisticsSpec
from ..config.schedule import STEP_PHASES
from ..errors import HookError, InstrumentError
from ..fields.globs import matches
from ..plan.hook_plan import Site
from ..plan.tensor_checks import check_shape
from ..runtime.own_operations import unseen_by_checkpoint
from ..stats.flatten import unreadable
from ..stats.sums import needs_of
from ..tables.reasons import INFERENCE, NO_GRAD, NO_GRAPH, NO_TENSOR, OTHER_CALLS, not_floating_point
from ..tables.statistics import Sum
from ..values.dtensor import (
    NOT_SHARDED,
    Shards,
    as_dtensor,
    full_tensor,
    is_awaited,
    is_sharded,
    local_shard,
    reduced,
    sharded_like,
)
from ..values.nested import iter_tensors, map_tensors
from ..values.sparse import is_sparse
from .clock import FIRST_CALL, Clock, FiringIndex, HookTimer
from .distributed_scope import scope_of
from .hook_coverage import HookCoverage
from .mesh_layout import MeshLayout
from .module_calls import current_segment, is_first_reentrant_pass
from .plain_calls import Direct, call_action, check_not_captured, direct_of, failed, firing_of


class AttachedHook(HookCoverage):
    """An attached site: its action, the state of its schedule, and its coverage."""

    __slots__ = (
        "_composed",
        "_is_composed",
        "_scheduled_step_and_phase",
        "action",
        "calls",
        "checked_paths",
        "condition",
        "direct",
        "is_paused",
        "is_record_hook",
        "is_scheduled",
        "role",
        "scheduled_count",
        "scope",
        "selector",
        "shards",
        "split_dim",
        "state",
        "subsampling",
        "was_ever_scheduled",
    )

    def __init__(self, site: Site, action: Action, clock: Clock, *, shapes_checked: bool = False) -> None:
        super().__init__(site, clock)
        # Paths whose shapes were checked; None if shape inference has checked all.
        self.checked_paths: set[str] | None = None if shapes_checked else set()
        self.action = action
        self.direct: Direct | None = None  # what it does with plain tensors while it is scheduled
        self._composed: Direct | None = None  # the same, also while it is not scheduled
        self._is_composed = False
        self.selector = Selector.of(site.spec, site.layer.module)  # None if the action gets complete tensors
        given = site.spec.condition  # None without one, or if the hook follows a rule
        self.condition = None if given is None else SiteCondition(site.spec, given)
        self.calls = site.spec.call_range  # None: all
        self.split_dim = site.spec.split_dim if isinstance(site.spec, RecordSpec) else None
        # Whether it changes nothing: it records, prints or calls a function.
        self.is_record_hook = isinstance(site.spec, ObservationSpec)
        self.role = site.spec.tensor_role
        self.scope: str = scope_of(site.spec.definition, self.role, clock.parallel)
        self.shards = NOT_SHARDED  # the placement of plain tensors, if it does not depend on the tensor
        if clock.layout is not None and site.spec.definition.family in PLACED_FAMILIES and self.role != "buffer":
            self.shards = clock.layout.of_plain(site)
            self.scope = self.shards.scope
        self.state: dict[str, Any] = {}  # see `Context.state`
        self.is_scheduled = False
        self.was_ever_scheduled = False
        # Whether a record hook is paused in steps, to measure them without it.
        self.is_paused = False
        self.subsampling = 1  # with a budget, it runs at every n-th scheduled step
        self.scheduled_count = 0  # steps at which its schedule is active
        self._scheduled_step_and_phase: tuple[int, str] | None = None

    def update_schedule(self, scheduled: bool, *, has_new_spec: bool) -> bool:
        """Update whether the hook runs at the new time of the clock. Return whether that changed."""
        moment = (self.clock.moment.step, self.clock.moment.phase)
        if scheduled and moment != self._scheduled_step_and_phase:
            self._scheduled_step_and_phase = moment
            self.scheduled_count += 1
        scheduled = scheduled and (self.scheduled_count - 1) % self.subsampling == 0
        self.was_ever_scheduled |= scheduled
        is_needed = self.site.spec.keep_as is not None  # by a hook function
        if scheduled and self.is_paused and not is_needed and self.clock.moment.phase in STEP_PHASES:
            scheduled = False
        changed = scheduled != self.is_scheduled
        self.is_scheduled = scheduled
        self._is_composed &= not has_new_spec
        if scheduled and not self._is_composed:
            self.compose()
        self.direct = self._composed if scheduled else None
        return changed

    def compose(self) -> None:
        """Determine what it does with plain tensors while it is scheduled. Call it after a change of its action."""
        direct, timer = direct_of(self), self.clock.timer
        self._composed = direct if direct is None or timer is None else self._timed(direct, timer)
        self._is_composed = True
        self.direct = self._composed if self.is_scheduled else None

    def _timed(self, direct: Direct, timer: HookTimer) -> Direct:
        def timed(tensor: Tensor, path: str, firing: FiringIndex) -> Tensor | None:
            with timer.measure_time(self):
                new = direct(tensor, path, firing)
            timer.firings[self] += new is not None
            return new

        return timed

    def state_dict(self) -> dict[str, Any]:
        """Return the coverage counts and the state of the schedule between two micro-steps."""
        return {
            **super().state_dict(),
            "was_ever_scheduled": self.was_ever_scheduled,
            "subsampling": self.subsampling,
            "scheduled_count": self.scheduled_count,
            "condition": None if self.condition is None else self.condition.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.was_ever_scheduled = state["was_ever_scheduled"]
        self.subsampling, self.scheduled_count = state["subsampling"], state["scheduled_count"]
        if self.site.spec.phase in STEP_PHASES:  # the next step is counted already
            self._scheduled_step_and_phase = (self.clock.moment.step, self.site.spec.phase)
        if self.condition is not None:
            self.condition.load_state_dict(state["condition"])

    def acts_in(self, call: int) -> bool:
        """Return whether the hook acts in a call of its module. A call that `calls` leaves out is not expected to fire.

        Raises:
            HookError: It is an intervention, and the call is unknown.
        """
        if self.calls is None or call in self.calls:
            return True
        if call == UNKNOWN_CALL and not self.is_record_hook:
            context = self.context("", FiringIndex(call, 0, True))
            raise HookError(f"{describe(context)}: {UNKNOWN_RECOMPUTED}: cannot apply 'calls'; {KNOWN_RECOMPUTED}")
        self.count_exempt(OTHER_CALLS)
        return False

    def matches_path(self, path: str) -> bool:
        pattern = self.site.spec.path
        return pattern is None or matches(pattern, path)

    def accepts(self, tensor: Tensor, path: str) -> bool:
        """Return whether the hook acts on this tensor. Record hooks accept any dtype, interventions floating-point ones."""
        return self.matches_path(path) and (self.is_record_hook or tensor.is_floating_point())

    def no_tensor_reason(self, value: Any, root: str = "") -> str:
        """Return why the hook accepts no tensor of a value, whose path is `root`."""
        dtypes = {tensor.dtype: None for path, tensor in iter_tensors(value, root) if self.matches_path(path)}
        return NO_TENSOR if self.is_record_hook or not dtypes else not_floating_point(dtypes)

    def needs(self, sum_: Sum) -> bool:
        """Return whether a statistic that it measures needs a sum."""
        return sum_ in needs_of(self._measured)

    @property
    def _measured(self) -> tuple[str, ...]:
        """The statistics that it measures, also for its condition."""
        spec = self.site.spec
        names = spec.statistics if isinstance(spec, StatisticsSpec) else ()
        return names if spec.condition is None else (*names, spec.condition.stat)

    @property
    def has_statistics(self) -> bool:
        """Whether each firing writes a row of statistics."""
        return isinstance(self.site.spec, RecordSpec) and bool(self.site.spec.statistics)

    @property
    def is_scaled(self) -> bool:
        """Whether it sees gradients that a gradient scaler has multiplied, if there is one."""
        definition = self.site.spec.definition
        return definition.gradient and definition.frequency == "micro_step"

    def fire(
        self,
        tensor: Tensor,
        path: str,
        firing: FiringIndex = FIRST_CALL,
        *,
        value: Tensor | Parameter | None = None,
        amp_scale: Tensor | None = None,
    ) -> Tensor:
        """Run the action on one tensor.

        For a sharded tensor, record hooks see the shard. Interventions act on the full tensor: a norm is that of all
        shards, and all processes draw the same random numbers.

        Args:
            path: The path of the tensor in a nested value, or the name of the parameter.
            value: The tensor that a gradient belongs to.
            amp_scale: The factor of a gradient scaler in the tensor.

        Returns:
            The tensor that replaces it; the same object if it is unchanged.

        Raises:
            HookError: The action failed or returned an invalid result. The message contains hook, kind, layer and step.
            ConfigError: The spec does not fit the shape of the site's first tensor.
        """
        direct = self.direct if amp_scale is None else None
        if direct is not None and (new := direct(tensor, path, firing)) is not None:
            return new
        context = self.context(path, firing)
        context.shards, given, part = self._placed(tensor, path, firing)
        context.scope = context.shards.scope or self.scope
        if not context.shards.dims:
            self.check_shape(path, part)
        if value is not None:
            context.value = self._placed(value, path, firing)[2]
        if self.is_scaled and self.clock.amp_scale is not None:
            amp_scale = self.clock.amp_scale()
        if amp_scale is None:
            new = self.run(part, context)
        else:
            divided = unscaled(part, amp_scale)
            new = rescaled(self.run(divided, context), divided, part, amp_scale)
        if new is part:
            return tensor
        if not is_sharded(given):
            return new
        replacement = sharded_like(new, given)
        return replacement if is_sharded(tensor) else local_shard(replacement)

    def _placed(self, tensor: Tensor, path: str, firing: FiringIndex) -> tuple[Shards, Tensor, Tensor]:
        """Return the placement of what the action gets, the tensor with its placement if it is a shard, and what the action gets.

        Raises:
            HookError: An intervention, or a selection of elements, needs the complete tensor, but its placement is unknown.
        """
        layout = self.clock.layout
        if is_sharded(tensor):
            layout = layout or MeshLayout((), tensor.device_mesh)
        elif layout is None or not layout.is_model_parallel or not self.shards.mesh:
            return self.shards, tensor, self._awaited(tensor)
        shards = layout.of(tensor, self.site, path, firing.call)
        selects = self.selector is not None or self.split_dim is not None
        is_of_module = self.site.spec.definition.family == "module"
        if self.is_record_hook and not (selects and is_of_module and (shards.dims or not shards.is_known)):
            if shards.is_partial and layout.reduces:
                tensor = reduced(tensor, shards)
                shards = layout.of(tensor, self.site, path, firing.call)
            return shards, tensor, self._awaited(tensor)
        if not shards.is_known:
            raise HookError(
                f"{describe(self.context(path, firing))} acts on the complete tensor, but the placement of this one on the mesh "
                f"({shards.mesh}) is not known; declare it with 'placement'"
            )
        given = as_dtensor(tensor.detach() if self.is_record_hook else tensor, shards)
        complete = full_tensor(given) if is_sharded(given) else self._awaited(tensor)
        return layout.of(tensor, self.site, path, firing.call, is_complete=True), given, complete

    def _awaited(self, tensor: Tensor) -> Tensor:
        """Return the shard of this process, after the collective operation that computes it. An intervention gets it with its graph."""
        return local_shard(tensor) if self.is_record_hook or not is_awaited(tensor) else tensor.clone()

    def note_placement(self, tensor: Tensor, path: str, firing: FiringIndex) -> None:
        """Note the placement of a tensor whose gradient, or whose change, it will get."""
        if self.clock.layout is not None and self.clock.layout.is_model_parallel:
            self.clock.layout.of(tensor, self.site, path, firing.call)

    def count_and_fire(
        self, tensor: Tensor, *, value: Parameter | None = None, amp_scale: Tensor | None = None
    ) -> Tensor | None:
        """Count an opportunity at the tensor of a parameter or a buffer, and run the action if the tensor can be read.

        Returns:
            The tensor that replaces it, the same object if it is unchanged; None if it cannot be read.
        """
        firing, path = firing_of(self.opportunities, 0, False, None), self.site.own_name
        if self.direct is not None and amp_scale is None and (new := self.direct(tensor, path, firing)) is not None:
            self.opportunities += 1
            self.firings += 1
            return new
        if not self.count_and_check_readable(tensor):
            return None
        return self.fire(tensor, path, firing, value=value, amp_scale=amp_scale)

    def check_shape(self, path: str, tensor: Tensor) -> None:
        """Check once for each path that the spec fits the shape; see `fire`."""
        if self.checked_paths is not None and path not in self.checked_paths and not is_sharded(tensor):
            self.checked_paths.add(path)
            check_shape(self.site, path, tensor)

    def context(self, path: str, firing: FiringIndex) -> Context:
        spec, layer = self.site.spec, self.site.layer
        return Context(
            hook=spec.name,
            kind=spec.kind,
            role=spec.tensor_role,
            layer=layer.name,
            module=layer.module,
            path=path,
            moment=self.clock.boundary if self.frequency == "step" else self.clock.moment,
            call=firing.call,
            backward=firing.backward,
            recompute=firing.recompute,
            origin=firing.origin,
            parameters=self.site.parameters,
            seed=self.clock.seed,
            scope=self.scope,
            shards=self.shards,
            rank=self.clock.rank,
            ids=self.clock.ids,
            targets=self.clock.targets,
            tensors=self._kept_tensors(),
            state=self.state,
            holds=None if spec.follows is None else True,  # a rule turns the hook on
            unit_dim=spec.unit_dim,
        )

    def _kept_tensors(self) -> KeptTensors:
        store = self.clock.kept
        if not store.original:
            return KeptTensors()
        if self.is_record_hook or self.site.spec.definition.gradient or self.frequency == "step":
            return store.all()
        return store.for_intervention(in_checkpoint=current_segment() is not None and torch.is_grad_enabled())

    def _keep(self, name: str, tensor: Tensor, context: Context) -> None:
        """Keep a tensor for hook functions. A gradient belongs to the original pass, also that of a recomputed one."""
        is_gradient = self.site.spec.definition.gradient
        if context.recompute and not is_gradient:
            return
        location = ".".join(part for part in (context.layer, context.path) if part)
        self.clock.kept.keep(name, location, tensor, has_lost_graph=not is_gradient and is_first_reentrant_pass())

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Pass all tensors of the spec, or their selected parts, to the action before it is called for each of them."""
        try:
            self.action.prepare(tensors if self.selector is None else self.selector.parts(tensors))
        except InstrumentError:
            raise
        except Exception as error:
            raise failed(error, list(tensors), self.context("", FIRST_CALL)) from error

    def run(self, tensor: Tensor, context: Context) -> Tensor:
        """Run the action on a tensor that is not a shard and has no factor of a gradient scaler; see `fire`."""
        if (timer := self.clock.timer) is None:
            return self._run(tensor, context)
        with timer.measure_action(self):
            return self._run(tensor, context)

    def _run(self, tensor: Tensor, context: Context) -> Tensor:
        if tensor.is_cuda:
            check_not_captured(context)
        name = self.site.spec.keep_as
        if context.recompute and self.is_record_hook and not self.site.spec.definition.gradient:
            return tensor  # recorded in the original pass
        if tensor.is_nested and (self.selector is not None or self.split_dim is not None) and self._measured:
            raise HookError(
                f"{describe(context)} measures a part of a nested tensor, whose padding would count as elements; record the "
                "complete tensor, or keep the part with stats: none and tensors: true"
            )
        action: Callable[[Tensor, Context], Tensor | None] = self.action
        if self.condition is not None:
            action = partial(self.condition.apply, action)
        if self.selector is not None:
            action = partial(self.selector.apply, action)
        if self.split_dim is not None:
            action = partial(act_on_indices, action, self.split_dim)
        with unseen_by_checkpoint() if self.is_record_hook else nullcontext():
            new = call_action(action, tensor, context)
        result = tensor if new is None else new
        if name is not None:
            self._keep(name, result, context)
        return result


PLACED_FAMILIES = ("module", "loss", "parameter", "optimizer")
"""The families of kinds whose plain tensors have a placement."""


def fire_all(
    attached_hooks: Iterable[AttachedHook],
    tensor: Tensor,
    path: str,
    firing: FiringIndex = FIRST_CALL,
    value: Tensor | Parameter | None = None,
) -> Tensor:
    """Run several hooks on one tensor in the order of the configuration. Each sees the result of the previous one."""
    for attached in attached_hooks:
        tensor = attached.fire(tensor, path, firing, value=value)
    return tensor


def act_on_tensors(
    attached_hooks: Sequence[AttachedHook], value: Any, firing: FiringIndex, in_place: Any = ()
) -> tuple[Any, set[AttachedHook], dict[AttachedHook, str]]:
    """Run hooks on all tensors of a value. Return the new value, the hooks that fired, and why others could not act on a tensor."""
    fired: set[AttachedHook] = set()
    obstacles: dict[AttachedHook, str] = {}

    def act(path: str, tensor: Tensor) -> Tensor:
        accepting = [attached for attached in attached_hooks if attached.accepts(tensor, path)]
        if accepting and (reason := unreadable(tensor)) is not None:
            obstacles.update(dict.fromkeys(accepting, reason))
            return tensor
        fired.update(accepting)
        return fire_all(accepting, tensor, path, firing)

    return map_tensors(value, act, in_place=in_place), fired, obstacles


def no_gradient_reason() -> str:
    """Return why a tensor requires no gradient, as far as that is known here."""
    if torch.is_inference_mode_enabled():
        return INFERENCE
    return NO_GRAPH if torch.is_grad_enabled() else NO_GRAD


def unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """Divide a gradient by the factor of a gradient scaler, in float32 or the wider dtype of the gradient."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / scale.to(gradient.device)


def rescaled(new: Tensor, given: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
    """Multiply the result of an action, which got the gradient without the factor of a gradient scaler (`given`), by this factor.

    Elements that the action does not change stay bit-identical for any factor.
    """
    if new is given:
        return gradient
    scaled = (new * scale.to(gradient.device)).to(gradient.dtype)
    if is_sparse(gradient):
        return scaled
    is_unchanged = (new == given) | (new.isnan() & given.isnan())
    return straight_through(scaled, torch.where(is_unchanged, gradient, scaled))
