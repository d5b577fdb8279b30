"""The hooks of a plan on a model and its optimizers, attached and removed together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import is_

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..formatting import shorten
from ..hooks.attached_hook import AttachedHook
from ..hooks.clock import Clock
from ..hooks.functions import FunctionHooks, FunctionThreads
from ..hooks.hook_group import HookGroup, InertWhenCopied
from ..hooks.loss import LossHooks
from ..hooks.module_hooks import ModuleHooks
from ..hooks.optimizer import StepHooks, parameter_ids
from ..hooks.parameter_gradients import BoundaryHooks, GradientHooks
from ..hooks.site_grouping import group_sites
from ..plan.hook_plan import HookPlan
from ..runtime.deferred_interrupts import uninterrupted
from ..runtime.lazy_compiler import excluded_method, has_compiled
from ..tables.reasons import MOVED, MOVED_TOGETHER, OTHER_STEP, REPLACED, SKIPPED_STEP, SWAPPED
from ..tables.sink_interface import EventWriter
from .optimizer_checks import Optimizers, UnheldParameters, flatten_optimizer, given_optimizers, optimizers_of
from .optimizer_step_watch import StepWatch, WrapperWatch, runs_hooks_twice
from .phase_watch import PhaseWatch


class HookSet:
    """All hooks of a plan on a model and its optimizers; see `Probe`. `steps` observes the optimizer steps while they are attached."""

    def __init__(
        self,
        plan: HookPlan,
        attached_hooks: Sequence[AttachedHook],
        optimizer: Optimizers,
        scaler: GradScaler | None,
        clock: Clock,
        event: EventWriter,
        *,
        steps_by_loop: bool,
    ) -> None:
        self.model = plan.layers.model
        self.attached_hooks = attached_hooks
        self.optimizers = optimizers = optimizers_of(optimizer)
        given = {id(each): each for each in (*given_optimizers(optimizer), *optimizers)}
        self._wrappers = [  # without those that make several steps, or pass on the attribute `step`
            (each, *inner)
            for each in given.values()
            if len(inner := flatten_optimizer(each)) == 1
            and callable(getattr(type(each), "step", None))
            and (inner[0] is not each or runs_hooks_twice(each))
        ]
        self.clock = clock
        self.event = event
        self.steps_by_loop = steps_by_loop
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        self.steps = StepWatch(optimizers, enabled, clock, announced=steps_by_loop)
        self._groups: list[HookGroup] = []
        self._gradient_groups: list[GradientHooks] = []
        self._step_hooks = [attached for attached in attached_hooks if attached.frequency == "step"]
        self._attached = ExitStack()  # detaches what was attached
        self._functions: FunctionThreads | None = None
        self._modules = ModuleWatch(self.model, attached_hooks, optimizers, clock, event)
        self.unheld = self._modules.unheld

    def attach(self) -> None:
        """Attach all hooks. After an exception, `detach` removes those that were attached.

        A signal that arrives meanwhile is handled afterwards, as in `refresh` and `detach`.

        Raises:
            ConfigError: PyTorch does not support a hook at this module or parameter.
        """
        with uninterrupted():
            self._attach(self.steps)
            self._attach(self._modules)
            if self.steps.scaler is not None:
                self.clock.amp_scale = self.steps.scale
            # An encoder layer without hooks takes PyTorch's fast path, which rounds differently. All batches take the same path.
            encoders = [part for part in self.model.modules() if isinstance(part, nn.TransformerEncoderLayer)]
            for group in group_sites(
                self.attached_hooks,
                self.optimizers,
                self.clock,
                steps_by_loop=self.steps_by_loop,
                never_suspended={part for encoder in encoders for part in encoder.modules()},
            ):
                self._groups.append(group)
                if isinstance(group, GradientHooks):
                    self._gradient_groups.append(group)
                self._attach(group)
                if isinstance(group, FunctionHooks):
                    self._functions = group.threads
            for wrapper, optimizer in self._wrappers:
                self._attach(WrapperWatch(wrapper, optimizer, self._groups, self.clock))
            if self._gradient_groups:
                self._attach(LoadWatch(self.model, self.clock, self.report_replacements))

    def _attach(self, hooks: HookGroup) -> None:
        self._attached.callback(hooks.detach)
        hooks.attach()

    def add(self, hooks: HookGroup) -> None:
        """Attach further hooks, which `detach` removes."""
        with uninterrupted():
            self._attach(hooks)

    def watch_phase(self, watch: PhaseWatch) -> None:
        """Add the hooks that set the phase, after `attach`.

        The other hooks on their modules stay registered: PyTorch selects the hooks of a call before the phase changes.
        """
        modules = {*watch.modules}
        for group in self._groups:
            if isinstance(group, ModuleHooks | FunctionHooks) and group.attached_hooks[0].site.layer.module in modules:
                group.hooks.keep_registered()
        self._groups.append(watch)
        self.add(watch)

    def detach(self) -> None:
        with uninterrupted():
            self._groups.clear()
            self._gradient_groups.clear()
            self._attached.close()

    def refresh(self) -> None:
        """Notify the hooks that some of them start or stop being scheduled, or that code was compiled.

        Code that was compiled without a suspended hook is discarded, since it would never call the hook.
        """
        was_suspended = any(
            isinstance(group, ModuleHooks | FunctionHooks) and group.hooks.is_suspended for group in self._groups
        )
        with uninterrupted():
            for group in self._groups:
                group.refresh()
            if was_suspended and has_compiled():
                torch.compiler.reset()

    def end_step(self, row: Mapping[str, float | None]) -> None:
        """Update the coverage of hooks around optimizer steps, report replaced modules, and end calls that an interrupt left unfinished."""
        stepped = self.steps.end_step()
        if self._step_hooks:
            self._update_step_coverage(row, stepped=stepped)
        self.report_replacements()
        self.unheld.end_step()
        if self._functions is not None:
            self._functions.mode.leave_all()

    def loss(self, loss: Tensor) -> Tensor:
        for group in self._groups:
            if isinstance(group, LossHooks):
                loss = group.apply(loss)
        return loss

    def before_optimizer_step(self, optimizer: Optimizer | None) -> None:
        if not self.steps_by_loop:
            raise ValueError(
                "before_optimizer_step requires steps_by_loop=True; otherwise optimizer.step() runs these hooks itself"
            )
        selected = self.optimizers if optimizer is None else optimizers_of(optimizer)
        if (optimizer is None and len(selected) > 1) or not set(selected) <= set(self.optimizers):
            problem = "is required, since there are several" if optimizer is None else "was not passed to this probe"
            raise ValueError(f"before_optimizer_step(optimizer): the optimizer {problem}")
        self.steps.announce(selected)
        self._modules.check()
        for group in self._groups:
            if isinstance(group, BoundaryHooks | StepHooks) and group.optimizer in selected:
                group.before_step()

    def report_changed(self) -> None:
        """Write an event for each reported layer, or the model, that has changed although no known optimizer holds it."""
        for layer in self.unheld.changed():
            message = f"another optimizer, or the program itself, changed parameters of {layer or 'the model'}"
            self.event("optimizer", message, severity="info", layer=layer)

    def _update_step_coverage(self, row: Mapping[str, float | None], *, stepped: bool) -> None:
        several = len(self.optimizers) > 1  # not all make a step in every step of the loop
        scheduled = [attached for attached in self._step_hooks if attached.is_scheduled]
        without_opportunity = [attached for attached in scheduled if not attached.has_opportunities]
        skipped = False
        if without_opportunity and self.steps.scaler is not None:
            skipped = several and self.steps.backed_off() if stepped else bool(row["skipped"])
        if stepped and several and not skipped:
            for attached in without_opportunity:
                attached.count_exempt(OTHER_STEP)
        for attached in scheduled:
            attached.update_coverage(SKIPPED_STEP if skipped else None)

    def report_replacements(self) -> None:
        """Report modules and parameters that were replaced during training, and attach parameter hooks again."""
        self._modules.check()
        for group in self._gradient_groups:
            if not group.is_lost():
                continue
            was_found = group.parameter is not None
            with uninterrupted():
                group.attach()
            if was_found and group.parameter is not None:
                site = group.site.site
                message = f"parameter {site.label} was replaced; its hooks were attached to the new parameter"
                if group.is_swapped:
                    message = f"hook '{site.spec.name}' ({site.spec.kind}) on {site.label}: {SWAPPED}"
                self.event("replaced", message, layer=site.layer.name, severity="info")


class ModuleWatch(HookGroup):
    """Reports hooked modules that are replaced, also as a part of another module. Hooks on their parameters and buffers stop then.

    New parameters of new modules that no optimizer holds are reported, too. It checks this before each optimizer step and at the end
    of each training step.
    """

    def __init__(
        self,
        model: nn.Module,
        attached_hooks: Sequence[AttachedHook],
        optimizers: Sequence[Optimizer],
        clock: Clock,
        event: EventWriter,
    ) -> None:
        super().__init__(attached_hooks, clock)
        self.model = model
        self.optimizers = optimizers
        self.event = event
        self.unheld = UnheldParameters()
        self._unreported: dict[nn.Module, list[AttachedHook]] = {}
        for attached in attached_hooks:
            self._unreported.setdefault(attached.site.layer.module, []).append(attached)
        slots = []
        watched = {*self._unreported}  # and the modules that contain them
        for parent in reversed([*model.modules()]):
            if isinstance(parent, torch.jit.ScriptModule):  # its modules cannot be replaced
                continue
            children = [each for each in parent._modules.items() if not isinstance(each[1], weakref.ProxyTypes)]
            found = [(parent._modules, key, child) for key, child in children if child in watched]
            if found:
                watched.add(parent)
                slots += found
        self._parents, self._keys, self._children = [*zip(*slots, strict=True)] or [()] * 3
        self._gone: dict[nn.Module, nn.Module | None] = {}  # and the new ones

    def attach(self) -> None:
        if self._children and any(attached.frequency == "step" for attached in self.attached_hooks):
            before_step = excluded_method(self.before_step)
            self.handles += [optimizer.register_step_pre_hook(before_step) for optimizer in self.optimizers]

    def before_step(self, *_: object) -> None:
        if not self.clock.closed:
            self.check()

    def check(self) -> None:
        found = (*map(dict.get, self._parents, self._keys),)
        earlier = self._gone
        if all(map(is_, found, self._children)) and not earlier:  # in each step: without a loop in Python
            return
        self._gone = gone = {old: new for old, new in zip(self._children, found, strict=True) if new is not old}
        present = {module: name for name, module in self.model.named_modules()}
        removed = {part for module in gone for part in module.modules()} - present.keys()
        for attached in self.attached_hooks:
            attached.is_replaced = attached.site.layer.module in removed
        unreported = [part for part in (*gone, *(removed - gone.keys())) if part in self._unreported]
        unreported = [part for part in unreported if part in removed or part not in earlier]
        moved = [part for part in unreported if part not in removed]
        if len(moved) > 2:
            first, last = (self._unreported[part][0].site.layer for part in (moved[0], moved[-1]))
            reason = MOVED_TOGETHER.format(present.get(moved[0]))
            message = f"{len(moved)} modules with hooks, {first.label} to {last.label}: {reason}"
            self.event("replaced", message, layer=first.name)
        for part in unreported if len(moved) <= 2 else [part for part in unreported if part in removed]:
            of_module, reason = self._unreported[part], MOVED.format(present.get(part))
            if part in removed:
                del self._unreported[part]
                reason = REPLACED
                for attached in of_module:
                    attached.default_reason = reason
            layer, names = of_module[0].site.layer, dict.fromkeys(attached.site.spec.name for attached in of_module)
            message = f"hook{'s' * (len(names) > 1)} {', '.join(map(repr, names))} on {layer.label}: {reason}"
            self.event("replaced", message, layer=layer.name)
        if unreported:
            self._report_untrained([(old, new) for old, new in gone.items() if old not in earlier])

    def _report_untrained(self, replaced: Sequence[tuple[nn.Module, nn.Module | None]]) -> None:
        """Report new modules with parameters that no optimizer holds, if one holds those of the replaced modules."""
        held = {key for optimizer in self.optimizers for key in parameter_ids(optimizer)}
        names = {module: name for name, module in self.model.named_modules()}
        for old, new in replaced:
            known = {*map(id, old.parameters())}
            if new is None or new not in names or held.isdisjoint(known):
                continue
            known |= held
            left = {name: each for name, each in new.named_parameters() if each.requires_grad and id(each) not in known}
            if left:
                message = (
                    f"the optimizer does not hold {shorten([*left])} of the new module {names[new]}, so its steps do not change "
                    "them; call optimizer.add_param_group, or replace the module before the optimizer is created"
                )
                self.event("optimizer", message, layer=names[new])
                self.unheld.add(names[new], left.values())


class LoadWatch(InertWhenCopied):
    """Reports loaded state dicts. `assign=True` replaces parameters."""

    def __init__(self, model: nn.Module, clock: Clock, on_load: Callable[[], None]) -> None:
        super().__init__((), clock)
        self.model = model
        self.on_load = on_load

    def attach(self) -> None:
        self.handles.append(self.model.register_load_state_dict_post_hook(self.loaded))

    def loaded(self, module: nn.Module, incompatible: object) -> None:  # noqa: ARG002
        if not self.clock.closed:
            self.on_load()
