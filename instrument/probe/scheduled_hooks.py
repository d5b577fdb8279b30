"""The hooks that are scheduled at the current step and phase, and their coverage at the end of each micro-step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

from ..actions.base import StepContext
from ..config.hook_specs import HookSpec
from ..config.schedule import STEP_PHASES, Schedule
from ..hooks.attached_hook import AttachedHook
from ..hooks.clock import Clock
from ..hooks.plain_calls import update_counts
from ..runtime.lazy_compiler import has_compiled

# Without a Python call for each hook.
_subsampling: Callable[[AttachedHook], int] = attrgetter("subsampling")


class ScheduledHooks:
    """Sets the clock of a probe, and with it the hooks that are scheduled.

    Args:
        on_change: Called after scheduled hooks have changed, with those that are not of checkpoints, and after the first
            compilation of any code.
        is_sampled: Whether a budget decides at each step which of the scheduled hooks run.
        off_at: Returns the hooks that are turned off at a step: by the rules, or by changes of a running run.
    """

    def __init__(
        self,
        attached_hooks: Sequence[AttachedHook],
        specs: Mapping[str, HookSpec],
        clock: Clock,
        on_change: Callable[[list[AttachedHook]], None],
        *,
        is_sampled: bool,
        off_at: Callable[[int], Collection[str]],
    ) -> None:
        self.attached_hooks = attached_hooks
        self.specs = specs
        self.clock = clock
        self.names: tuple[str, ...] = ()  # of the scheduled hooks, without those of checkpoints
        self._on_change = on_change
        self._schedules: dict[str, Schedule] = {}  # by spec
        self._is_scheduled: dict[str, bool] = {}
        self._micro_step_hooks = [attached for attached in attached_hooks if attached.frequency == "micro_step"]
        self._operation_hooks = [attached for attached in attached_hooks if attached.frequency == "operation"]
        self._counted: list[AttachedHook] = []  # those that are scheduled
        self._is_sampled = is_sampled
        self._off_at = off_at
        self._has_compiled = has_compiled()
        self._interrupted_micro_step = 0  # of the step that an evaluation interrupts
        self._interrupted = clock.moment  # the micro-step that a call in another phase interrupts
        self._interruptions = (-1, 0)  # the step, and the number of these calls in it

    def advance(self, moment: StepContext, *, update_all: bool = False) -> None:
        """Set the clock's moment, and update which hooks are scheduled.

        With `update_all`, hooks are updated even if the same ones are scheduled, since their specs may have changed.
        """
        clock = self.clock
        previous_step, _, _, previous_phase = clock.moment
        clock.moment = moment
        step, _, _, phase = moment
        if step != previous_step or phase != previous_phase:
            clock.kept.clear()
        clock.phases.add(phase)
        clock.micro_step_index += 1
        had_compiled, self._has_compiled = self._has_compiled, has_compiled()
        changed = phase != previous_phase or self._has_compiled != had_compiled
        if update_all or not self._schedules:
            self._schedules = {name: spec.schedule for name, spec in self.specs.items()}
            # Without a budget, hooks are only sampled if a state with one was loaded.
            self._is_sampled |= max(map(_subsampling, self.attached_hooks), default=1) > 1
        off = self._off_at(step)
        is_scheduled = {
            name: schedule.includes(step, phase) and name not in off for name, schedule in self._schedules.items()
        }
        if not (changed or update_all or self._is_sampled) and is_scheduled == self._is_scheduled:
            return
        self._is_scheduled = is_scheduled
        for attached in self.attached_hooks:
            is_due = is_scheduled[attached.site.spec.name]
            changed |= attached.update_schedule(is_due, has_new_spec=update_all)
        self._counted = [attached for attached in self._micro_step_hooks if attached.is_scheduled]
        if changed or update_all:
            scheduled = [each for each in self.attached_hooks if each.is_scheduled and each.frequency != "occasion"]
            self.names = tuple(dict.fromkeys(attached.site.spec.name for attached in scheduled))
            self.clock.in_graphs = any(attached.site.spec.definition.family == "module" for attached in scheduled)
            self._on_change(scheduled)

    def set_phase(self, phase: str) -> None:
        """End the current micro-step and set the phase; see `Probe.phase`. One that waits for its backward pass continues later."""
        moment = self.clock.moment
        if phase == moment.phase:
            return
        is_complete = self.has_opportunities and not (moment.phase == "train" and self._awaits_backward)
        if is_complete or (moment.phase in ("eval", "probe", "rollout") and not moment.micro_step):
            self.end_micro_step()
        if moment.phase in STEP_PHASES:
            self._interrupted_micro_step = self.clock.moment.micro_step
        micro_step = self._interrupted_micro_step if phase in STEP_PHASES else 0
        self.advance(self.clock.moment._replace(micro_step=micro_step, phase=phase))

    def interrupt(self, phase: str) -> None:
        """Set the phase for one call of the model within the current micro-step, which `end_interruption` continues."""
        self._interrupted = moment = self.clock.moment
        step, count = self._interruptions
        count = count + 1 if step == moment.step else 0
        self._interruptions = moment.step, count
        self.advance(moment._replace(micro_step=count, phase=phase))

    def end_interruption(self) -> None:
        """Update the coverage of the hooks of the interrupting call, and continue the micro-step."""
        for attached in self._micro_step_hooks:
            if attached.is_scheduled and attached.has_opportunities:
                attached.update_coverage()
        _, micro_step, _, phase = self._interrupted
        self.advance(self.clock.moment._replace(micro_step=micro_step, phase=phase))

    @property
    def has_opportunities(self) -> bool:
        """Whether any hook fired or could have fired in the current micro-step."""
        return any(attached.has_opportunities for attached in self._micro_step_hooks)

    @property
    def _awaits_backward(self) -> bool:
        """Whether hooks on gradients can fire after a call in the current micro-step, and none did."""
        firings = [each.firings for each in self._counted if each.site.spec.definition.gradient and each.opportunities]
        return bool(firings) and not any(firings)

    def end_micro_step(self) -> None:
        """Update the coverage of the hooks that are scheduled in each micro-step, and start the next one."""
        on_operations = self._operation_hooks and [each for each in self._operation_hooks if each.has_opportunities]
        step, micro_step, epoch, phase = self.clock.moment
        if phase == "rollout" and not self.has_opportunities:
            for attached in self._counted:
                attached.count_exempt(attached.default_reason)  # random actions need no policy
        for attached in (*update_counts(self._counted), *on_operations):
            attached.update_coverage()
        self.clock.micro_step_index += 1
        self.clock.moment = StepContext(step, micro_step + 1, epoch, phase)

    def end_checkpoint(self) -> bool:
        """Update the coverage of the hooks on state dicts. Return whether any is scheduled."""
        scheduled = [each for each in self.attached_hooks if each.is_scheduled and each.frequency == "occasion"]
        for attached in scheduled:
            if attached.has_opportunities:
                attached.update_coverage()
        return bool(scheduled)

    def end_training(self) -> None:
        """Update the coverage of the hooks on state dicts and collective operations that fired after the last step, or never."""
        for attached in self.attached_hooks:
            if (
                attached.was_ever_scheduled
                and attached.frequency in ("occasion", "operation")
                and (attached.has_opportunities or not (attached.expected or attached.exemptions))
            ):
                attached.update_coverage()
