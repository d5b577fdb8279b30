"""The probe: attaches the hooks of a plan to a model for the duration of a `with` block."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from types import TracebackType
from typing import Any, Literal, Self, get_args

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..actions.base import Archive, SampleIds, StepContext
from ..actions.record import Record
from ..config.experiment import BudgetConfig
from ..config.hook_specs import HookSpec, RecordSpec
from ..config.rules import RuleBase
from ..config.schedule import Phase
from ..errors import AlreadyAttachedError
from ..formatting import shorten
from ..hooks.attached_hook import AttachedHook
from ..hooks.clock import Clock
from ..hooks.mesh_layout import layout_of
from ..hooks.operators import OperatorMode
from ..plan.hook_plan import HookPlan, remarks, unhooked_locations
from ..relations.relation_set import RelationSet
from ..rules.non_finite import NonFinite
from ..rules.requirements import hooks_read
from ..rules.rule_set import RuleEvent, RuleSet
from ..runtime.deferred_interrupts import deferred_signals
from ..runtime.forks import OwnedByProcess
from ..runtime.lazy_compiler import run_outside_of_graphs
from ..stats.device_choice import BY_KERNEL, measured_by
from ..storage.memory import MemorySink
from ..tables.sink_interface import Sink
from ..values.dtensor import own_rank
from .budget import Budget
from .collectives import Ranks
from .coverage import FrozenLayers, coverage_rows, layer_rows, write_coverage
from .hook_set import HookSet
from .metrics import Metrics, checked_metrics
from .optimizer_checks import Optimizers, check_optimizers, optimizers_of, stale_optimizer
from .overhead import Overhead
from .phase_watch import PhaseWatch
from .program_settings import LossOperators
from .recorder import Recorder
from .rules import RuleActions, RuleRows
from .samples import SampleBatch, scalar_targets, targets_of
from .scheduled_hooks import ScheduledHooks
from .slab_rows import StatisticsRows
from .value_counts import ValueCounts

PHASES = (*get_args(Phase), "sanity")


class Probe(OwnedByProcess):
    """Attaches hooks to a model and records what they measure. `instrument.attach` yields one.

    A probe is a context manager. It attaches all hooks when the block starts and removes all of them when the block
    ends, also after an exception. Call `end_step` after each optimizer step; all other methods are optional. In a forked process,
    the hooks are removed, and the end of the block writes nothing.

        with Probe(plan, sink, optimizer=optimizer) as probe:
            for batch in loader:
                ...
                optimizer.step()
                probe.end_step(loss=loss)

    Args:
        plan: The hooks and the tensors that they select.
        sink: The sink that receives all rows. The probe closes it at the end of the block.
        optimizer, scaler, seed, steps_by_loop, budget, ids: See `instrument.attach`. The learning rate of the first optimizer is
            recorded.
        archive: The tensors of other runs, for `replace` and `patch`. Default: none available.
        steps: The number of training steps, if known. A budget of bytes is spread over them.
        ranks: The processes that train together. Default: None, a single process.
        print_line: Prints a line of `action: print`. Default: to stdout.
        rules: The rules that read the rows of each step. Default: none.

    Attributes:
        sink: The sink that receives all rows.
        warnings: The messages of all events of severity `warning`, in order.
        recorder: Collects the rows of a step and passes them to the sink.

    Raises:
        ConfigError: A kind or role requires an optimizer that is missing or that keeps no such state, a custom function
            cannot be imported or called, a custom statistic has the name of a column, or a spec requires the tensors of
            a run that cannot be found.
        AlreadyAttachedError: The probe is entered a second time.
        HookError: A hook failed; see `instrument.attach`.
    """

    def __init__(
        self,
        plan: HookPlan,
        sink: Sink,
        *,
        optimizer: Optimizers = None,
        scaler: GradScaler | None = None,
        seed: int = 0,
        archive: Archive | None = None,
        steps_by_loop: bool = False,
        budget: BudgetConfig | None = None,
        steps: int | None = None,
        ranks: Ranks | None = None,
        ids: Literal["recorded", "all"] = "recorded",
        print_line: Callable[[str], None] = print,
        rules: Mapping[str, RuleBase] | None = None,
    ) -> None:
        self.plan = plan
        self.sink = sink
        self.optimizers = optimizers_of(optimizer)
        self.scaler = scaler
        self.steps_by_loop = steps_by_loop
        active = {
            name: rule
            for name, rule in (rules or {}).items()
            if hooks_read(rule, plan.specs) != [] or isinstance(rule, NonFinite.fields)  # which also reads the loss
        }
        self.rules = RuleSet(active, self._write_event, FrozenLayers(plan))
        self.ranks = ranks
        self._rule_rows = RuleRows(self.rules)
        self._rule_actions = RuleActions(self.rules, plan.specs, ranks, self._write_kept)
        self.recorder = Recorder(
            sink,
            self._rule_rows.add if rules else None,
            ranks,
            all_samples=ids == "all",
            print_line=print_line,
            keep={name: spec.keep for name, spec in plan.specs.items() if isinstance(spec, RecordSpec) and spec.keep},
        )
        parallel = None if ranks is None else ranks.parallel
        is_sampled = budget is not None and (budget.time is not None or budget.bytes is not None)
        layout = None
        if ranks is not None:
            given: dict[str, Any] = {"processes": ranks.world_size, "reduces": ranks.reduces, "is_sampled": is_sampled}
            layout = layout_of(plan, ranks.mesh, ranks.placement, data=ranks.data, **given)
            if ranks.batches == 1 and layout is None:  # a stage of a pipeline: each tensor is complete in one process
                parallel = None
        self.clock = Clock(StepContext(0, 0, 0, "train"), seed, parallel=parallel, rank=own_rank(), layout=layout)
        if ranks is not None and parallel == "ddp":
            self.clock.replicas = ranks.batches if layout is None else layout.batches
            self.clock.sums_gradients = ranks.sums_gradients
        tensors = archive or Archive()
        actions = {name: spec.build(self.recorder, tensors) for name, spec in plan.specs.items()}
        self.attached_hooks = [
            AttachedHook(site, actions[site.spec.name], self.clock, shapes_checked=plan.shapes_checked)
            for site in plan.sites
        ]
        self.budget: Budget | None = None
        if budget is not None and is_sampled:
            self.budget = Budget(budget, self.attached_hooks, self.recorder, steps, self.event)
            self.clock.timer = self.budget.timer
        self._overhead = Overhead()
        self._disabled: frozenset[str] = frozenset()
        self._scheduled = ScheduledHooks(
            self.attached_hooks,
            plan.specs,
            self.clock,
            self._on_schedule_change,
            is_sampled=self.budget is not None,
            off_at=lambda step: self._disabled | self._rule_actions.off_at(step),
        )
        self._hooks = HookSet(
            plan, self.attached_hooks, optimizer, scaler, self.clock, self.event, steps_by_loop=steps_by_loop
        )
        self._relations = RelationSet(
            self.rules.relations, plan.layers.model, self.optimizers, self.clock, self._hooks.steps.scaler
        )
        self._metrics = Metrics(self.recorder, self.clock, ranks, self._hooks.steps)
        self._operators: OperatorMode | None = None
        self.warnings: list[str] = []
        self._stop_reason: str | None = None
        self._entered = False
        self._is_resumed = False  # whether it continues the recording of an earlier probe
        self._layers_pending = False
        self._losses = LossOperators(plan.layers, self.clock)  # of the first step
        self._counts = ValueCounts(self.clock)
        self._step_started_at = time.perf_counter()
        check_optimizers(plan, self.optimizers)
        super().__init__()

    # ------------------------------------------------------------------------------------------------ attaching

    def __enter__(self) -> Self:
        if self._entered:
            raise AlreadyAttachedError("this probe was already attached; create a new probe for each loop")
        self._entered = True
        self._first_step = self.step
        try:
            self._hooks.attach()
            self._hooks.add(self._relations)
            self._hooks.add(self._counts)
            if self._relations.reads_fingerprints:
                self.recorder.on_rows = self._on_rows
            if not self._is_resumed:
                self._layers_pending = self.ranks is None or self.ranks.is_rank_zero
                if self._layers_pending:
                    self._hooks.add(self._losses)
                for remark in remarks(self.plan):
                    self.event(remark.rule, remark.message, severity=remark.severity, layer=remark.layer)
                parameters = self.plan.layers.model.parameters()
                if message := stale_optimizer(self.plan.layers.model, self.optimizers):
                    self.event("optimizer", message)
                    self._hooks.unheld.add(None, (each for each in parameters if each.requires_grad))
            self._scheduled.advance(self.clock.moment, update_all=True)
            return self
        except BaseException:
            try:
                self.detach()
            finally:  # a signal can arrive before `detach` defers it
                self.detach()
                self.sink.close()
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            self.detach()
        finally:  # a signal can arrive before `detach` defers it
            with deferred_signals():
                self.detach()
                try:
                    if not self.is_inherited:
                        self._finish(exc)
                finally:
                    self.sink.close()

    def detach(self) -> None:
        """Remove all hooks before the end of the block. Nothing is recorded from then on."""
        self.clock.closed = True
        self._hooks.detach()

    def inherit(self) -> None:
        """Detach the probe in a forked process. The run and its sink belong to the parent."""
        super().inherit()
        self.detach()
        self._sink_of_parent = self.sink  # which must not be finalized
        self.sink = self.recorder.sink = MemorySink()
        self.warnings.clear()

    # ------------------------------------------------------------------------------------------------ time

    @property
    def step(self) -> int:
        """The current optimizer step, from 0. Equal to the number of completed steps."""
        return self.clock.moment.step

    @property
    def phase(self) -> str:
        """The current phase: `train`, `forward`, `eval`, `probe`, `rollout` or `sanity`.

        A hook runs in the phase of its spec. `train` is the phase of training steps and `forward` that of a loop that
        does not train; `end_step` ends their steps. `eval` is an evaluation, `probe` the pass of a probe batch, and
        `rollout` collects the data of later steps, all between two steps; see `in_phase`. `sanity` is a check before the
        training; no hook runs in it.

        The loop can assign it. This ends the current micro-step.

        Raises:
            ValueError: The assigned value is not a phase.
        """
        return self.clock.moment.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(map(repr, PHASES))}, not {phase!r}")
        if phase != self.phase:
            self.recorder.samples.end()
        self._scheduled.set_phase(phase)

    def follow_model(self) -> PhaseWatch:
        """From now on, set the phase from the mode of the model at each call. The result has to be notified of a trainer's steps."""
        watch = PhaseWatch(self.plan.layers.model, self.clock, self._scheduled, partial(setattr, self, "phase"))
        self._hooks.watch_phase(watch)
        return watch

    def evaluating(self) -> AbstractContextManager[None]:
        """Set the phase to `eval` for the duration of a `with` block; see `in_phase`."""
        return self.in_phase("eval")

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Set the phase for the duration of a `with` block between two steps: `eval`, `probe` for a probe batch, or `rollout`.

            with probe.in_phase("probe"):
                loss_of(model(fixed_batch)).backward()

        The previous phase is restored, and the rows of the block are written, when it ends.

        Raises:
            ValueError: It is not a phase.
        """
        started_at = time.perf_counter()
        previous_phase = self.phase
        self.phase = phase
        any_scheduled = bool(self._scheduled.names)
        try:
            yield
            if self._metrics.has_logged:
                self._metrics.write({}, seconds=time.perf_counter() - started_at)
            self._write_relations()
        finally:
            self.phase = previous_phase
        with deferred_signals():
            self.recorder.end_step(any_scheduled=any_scheduled, is_complete=False)
        if self.ranks is None:  # the other processes may not evaluate; all of them end the next step
            self._rule_actions.act(self.step)
        # The block is not part of the step that it interrupts. Steps that ended in it have their own seconds.
        seconds = time.perf_counter() - max(started_at, self._step_started_at)
        self._step_started_at += seconds
        if self.budget is not None and not any_scheduled:
            self.budget.exclude(seconds)

    @contextmanager
    def saving_checkpoint(self) -> Iterator[None]:
        """Mark the code that saves a checkpoint of the run: interventions leave its state dicts unchanged, and record hooks record them."""
        self.clock.in_checkpoint = True
        try:
            yield
        finally:
            self.clock.in_checkpoint = False
        if self._scheduled.end_checkpoint():
            self.recorder.end_step(is_complete=False)

    @property
    def overhead(self) -> float | None:
        """The relative overhead of hooks, as the mean over all steps so far. 0.05 means that steps take 5% longer.

        Steps with scheduled hooks are compared with steps without. None if there are too few steps of either type.
        With a time budget, it is the overhead of record hooks since the budget last changed them, or its estimate.
        """
        if self.budget is not None and self.budget.config.time is not None:
            return self.budget.relative_overhead
        return self._overhead.relative

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end after this step: a rule with `then: stop` or `then: prune` fired, or it was requested."""
        return self.stop_reason is not None

    @property
    def stop_reason(self) -> str | None:
        """Why the run should stop: the request, or the rule and its message; None if it should continue.

        Assign a reason, for run.json, to request that the loop ends after this step.
        """
        return self._stop_reason or self._rule_actions.stop_reason

    @stop_reason.setter
    def stop_reason(self, reason: str) -> None:
        self._stop_reason = reason

    @property
    def is_pruned(self) -> bool:
        """Whether the rule that stops the loop has `then: prune`: the result counts as the worst one of a search."""
        return self._rule_actions.is_pruned

    @property
    def fired_rules(self) -> frozenset[str]:
        """The names of the rules that fired in the last step, or in an evaluation after it.

        With several processes, rules without actions can differ between them.
        """
        return self._rule_actions.fired

    @property
    def should_checkpoint(self) -> bool:
        """Whether a rule with `then: checkpoint` fired in the last step. The loop should save a checkpoint."""
        return self._rule_actions.should_checkpoint

    @property
    def epoch(self) -> int:
        """The current epoch, from 0. The loop can assign an integer."""
        return self.clock.moment.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.clock.moment = self.clock.moment._replace(epoch=operator.index(epoch))

    def set_step(self, step: int, epoch: int | None = None) -> None:
        """Set the current step: the first one of a recording that begins within a training, or the selected steps of a dry run.

        Args:
            step: The optimizer step, from 0.
            epoch: The epoch, from 0. Default: the current one.
        """
        moment = StepContext(step, 0, self.epoch if epoch is None else epoch, self.phase)
        if self._entered:
            self._scheduled.advance(moment, update_all=True)
        else:
            self.clock.moment = moment

    def change_hooks(self, specs: Mapping[str, HookSpec], disabled: Collection[str]) -> None:
        """Change hooks between two steps.

        Args:
            specs: The specs with changed schedules, bounds or factors, by name. Other fields are equal.
            disabled: The names of all hooks that do not run.
        """
        for name, spec in specs.items():
            # The sites and the action of the hook share this object.
            self.plan.specs[name].__dict__.update(spec.__dict__)
        self._disabled = frozenset(disabled)
        if self._entered:
            self._scheduled.advance(self.clock.moment, update_all=True)

    def loss(self, loss: Tensor) -> Tensor:
        """Pass the loss through the hooks of kind `loss`.

        Args:
            loss: The loss: a scalar, before a gradient scaler multiplies it.

        Returns:
            The loss to call `backward` on. It differs from the argument if a hook changes it, for example adds a
            penalty.
        """
        changed = self._hooks.loss(loss)
        self._note_loss(changed)
        return changed

    def _note_loss(self, loss: object) -> None:
        """Note the first loss, for the table `layers`."""
        if self._layers_pending:
            self._losses.note(loss)

    def begin_micro_step(self, indices: Sequence[int], batch: Any) -> None:
        """Name the samples of the next batch by their indices in the complete dataset, for loops that load batches from it.

        `batch` is that of the data loader, or a mapping with its targets; see `targets_of`.
        """
        self._name_samples(indices, targets_of(batch), is_checked=False)

    def _name_samples(self, ids: SampleIds, targets: Tensor | None, *, is_checked: bool) -> None:
        self.clock.name_samples(ids, targets)
        if self.recorder.samples.are_kept:
            scalars = scalar_targets(targets, len(ids))
            batch = SampleBatch(self.clock.moment, self.clock.rank, ids, scalars, is_checked=is_checked)
            self.recorder.samples.begin(batch)

    @contextmanager
    def in_micro_step(self, number: int, indices: Sequence[int], batch: Any) -> Iterator[None]:
        """Run a pass of one of the micro-steps of a step, several of which are in flight, as in a pipeline.

        Each micro-step has one block for its forward pass and one for its backward pass. Afterwards, `end_micro_step` ends all of them.

        Args:
            number: The index of the micro-step within the step.
            indices: As for `begin_micro_step`; `batch` too.
        """
        clock = self.clock
        clock.micro_step_index += number - clock.moment.micro_step
        clock.moment = clock.moment._replace(micro_step=number)
        self.begin_micro_step(indices, batch)
        yield
        self.recorder.samples.end()

    def end_micro_step(self) -> None:
        """End the current micro-step: the forward and backward pass of a micro-batch, or one batch of an evaluation.

        Required only in loops that accumulate gradients over several micro-batches.

        Raises:
            ConfigError: The loop named another number of samples than the recorded tensors have; see `batch`.
        """
        self.recorder.samples.end()
        self._scheduled.end_micro_step()

    def end_step(
        self, *, loss: Tensor | float | None = None, samples: int | None = None, **metrics: Tensor | float | None
    ) -> Mapping[str, float | None]:
        """End the current optimizer step: pass its rows to the sink and start the next step.

        Values on a GPU are copied asynchronously and passed to the sink at the end of the next step.

        Args:
            loss: The loss of the step: a number or a tensor with one element.
            samples: The number of samples in the step. `samples_per_second` is computed from it.
            **metrics: Further columns of the `metrics` table: `accuracy`, `grad_norm`, `lr`, and numbers of any other name.
                `lr` defaults to the learning rate of the first optimizer. With several processes, the table has the numbers of
                each process, or those of rank 0 if its rows are merged.

        Returns:
            The row of the `metrics` table: `loss`, `accuracy`, `lr`, `grad_norm`, `seconds`, `samples_per_second`,
            `skipped`, and the custom metrics. Values on a GPU are awaited when the row is first read.

        Raises:
            TypeError: A name is that of a computed column, or a value is not one number.
            AlreadyAttachedError: The probe belongs to the parent of this forked process.
            InstrumentError: The block of `instrument.attach` has ended.
        """
        if self.is_inherited:
            raise AlreadyAttachedError(
                "a forked process cannot use the probe of its parent; attach a probe in this process"
            )
        checked = checked_metrics({"loss": loss, **metrics})
        self._note_loss(loss)
        with deferred_signals():
            if self.clock.timer is None:
                return self._end_step(samples, checked)
            with self.clock.timer:
                return self._end_step(samples, checked)

    def _end_step(self, samples: int | None, metrics: dict[str, Tensor | float | None]) -> Mapping[str, float | None]:
        self.clock.finish_steps()
        has_pending_rows = self.recorder.has_pending_rows
        self.recorder.samples.end()
        if not self.clock.moment.micro_step or self._scheduled.has_opportunities:
            self._scheduled.end_micro_step()
        metrics["skipped"] = self._hooks.steps.take_skipped()
        seconds = time.perf_counter() - self._step_started_at
        row = self._metrics.write(metrics, samples=samples, seconds=seconds)
        self._write_layers()
        if self.clock.moment.step >= min(self._relations.due, self._counts.due):
            self._write_relations()
        self._hooks.end_step(row)
        self.recorder.end_step(any_scheduled=bool(self._scheduled.names))
        step = self.clock.moment.step + 1
        self._rule_actions.act(step)
        if self.budget is not None:
            self.budget.end_step(step, time.perf_counter() - self._step_started_at, has_pending_rows=has_pending_rows)
        now = time.perf_counter()
        self._overhead.add(self._scheduled.names, now - self._step_started_at, has_pending_rows=has_pending_rows)
        self._step_started_at = now
        self._scheduled.advance(StepContext(step, 0, *self.clock.moment[2:]))
        return row

    def write_metrics(
        self, *, seconds: float, samples: int | None = None, **metrics: Tensor | float | None
    ) -> Mapping[str, float | None]:
        """Write a row of the `metrics` table for an evaluation of the current step, with the arguments and the row of `end_step`.

        Args:
            seconds: The duration of the evaluation, in seconds.
            samples: The number of samples.
            **metrics: Further columns: `loss`, `accuracy`, `grad_norm`, `lr`, and numbers of any other name.

        Raises:
            TypeError: A name is that of a computed column, or a value is not one number.
        """
        return self._metrics.write(checked_metrics(metrics), seconds=seconds, samples=samples)

    def log(self, **metrics: Tensor | float | None) -> None:
        """Add numbers to the next row of the `metrics` table: that of the step, or of the evaluation in whose block it is called.

            probe.log(discriminator_loss=loss)

        If a name is logged several times before the row is written, or also passed to `end_step`, the last value counts. Values on a
        GPU are copied when the row is written. The numbers are of Python, NumPy arrays or tensors with one element.

        Raises:
            TypeError: A name is that of a computed column, or a value is not one number.
        """
        self._metrics.log(metrics)

    @contextmanager
    def record_operators(self) -> Iterator[None]:
        """Record every ATen operator that this thread runs in the block, in the table `operators`.

            with probe.record_operators():
                loss = loss_fn(model(batch), targets)
                loss.backward()
                optimizer.step()

        Operators of the backward pass are included. Those of hooks that record are not. Code of `torch.compile` is compiled again for
        these blocks, so that its operators are visible. This costs time: use it in single steps. A block inside another one has no effect.

        Training stays bit-identical, except where PyTorch itself depends on dispatch modes: it computes the gradients of `prod`, and of the
        value of `masked_fill`, by other operators then. Inductor can fuse other operators than without the block, with other rounding.
        """
        if self._operators is None:
            self._operators = OperatorMode(self.plan.layers, self.clock, partial(self.recorder.write, "operators"))
        with self._operators.block():
            yield

    def _on_schedule_change(self, scheduled: list[AttachedHook]) -> None:
        if self.budget is not None:
            self.budget.set_scheduled(scheduled)
        self.recorder.samples.expects_tensors = any(
            isinstance(attached.action, Record) and attached.action.spec.tensors for attached in scheduled
        )
        self._hooks.refresh()
        self._relations.refresh()
        self._counts.observe(is_recorded=bool(scheduled and self.rules.specs))

    def _on_rows(self, stats: StatisticsRows | None, *others: Any) -> None:
        """Pass the rows of a step to the rules, and its fingerprints to the relations."""
        self._rule_rows.add(stats, *others)
        if stats is not None:
            self._relations.training.fingerprints += stats.fingerprints()

    def _write_relations(self) -> None:
        """Check the relations at the end of a step or of an evaluation, and write their rows and those of counts."""
        if rows := [*self._relations.check(), *self._counts.take()]:
            self.recorder.write_relations(self.step, self.phase, self.clock.rank, rows)

    def _write_layers(self) -> None:
        """Write the `layers` table once, at the end of the first step. Lazy modules that it did not call have no sizes."""
        if self._layers_pending:
            self._layers_pending = False
            self._losses.detach()
            rows = layer_rows(self.plan, self.optimizers, self._losses.settings)
            self.recorder.write("layers", rows)
            self.rules.set_settings({row[0]: {"type": row[2], **row[-1]} for row in rows})

    # ------------------------------------------------------------------------------------------------ the record

    def event(
        self, rule: str, message: str, *, severity: str = "warning", layer: str | None = None, step: int | None = None
    ) -> None:
        """Write a row of the `events` table.

        Args:
            rule: The type of the event, such as `coverage` or `non_finite`; see the column `rule`.
            message: The message.
            severity: `info`, `warning` (default) or `error`. Warnings are also appended to `warnings`.
            layer: The name of the layer that the event is about, if any.
            step: The optimizer step. Default: the current step.
        """
        at = self.step if step is None else step
        self._write_event(RuleEvent(rule, at, message, severity, layer, location=None, value=None, threshold=None))

    def _write_event(self, event: RuleEvent) -> None:
        if event.severity == "warning":
            place = event.location or event.layer or ""
            self.warnings.append(event.message if place in event.message else f"{event.message} ({place})")
        about = (event.location, event.value, event.threshold)
        row = (event.step, self.clock.rank, event.layer, event.rule, event.message, event.severity, *about)
        self.recorder.write("events", [row])

    def _write_kept(self, hook: str, reason: str) -> None:
        """Write the tensors that a hook with `keep` has in memory, and an event. The sink has them when this returns."""
        recorded = self.recorder.write_kept(hook)
        if not recorded:
            return
        steps = sorted({one.context.step for one in recorded})
        at = f"step {steps[0]}" if len(steps) == 1 else f"the steps {steps[0]} to {steps[-1]}"
        message = f"hook {hook!r} wrote {len(recorded):,} tensors of {at}: {reason}"
        self.event("flight_recorder", message, severity="info")
        self.sink.end_step()

    def coverage(self) -> list[dict[str, Any]]:
        """Return how often each hook fired at each site so far, one dictionary per site with the columns of the `coverage` table."""
        return self._coverage(running=self._scheduled.has_opportunities)

    def _coverage(self, *, running: bool) -> list[dict[str, Any]]:
        off, dropped = self._rule_actions.never_turned_on, self.recorder.dropped
        return coverage_rows(self.attached_hooks, self.plan.layers, dropped, running=running, never_turned_on=off)

    def _finish(self, error: BaseException | None) -> None:
        """Write the remaining rows: those of an incomplete step, the coverage table, and the warnings about it."""
        moment = self.clock.moment
        is_unfinished = self._scheduled.has_opportunities or (moment.phase == "train" and moment.micro_step > 0)
        if self.step == self._first_step and error is None and (is_unfinished or self._hooks.steps.end_step()):
            message = f"end_step was never called: all rows have step {self.step}, and no schedule advanced"
            self.event("no_end_step", f"{message}; call probe.end_step() after each optimizer step")
        if self._metrics.unwritten and error is None:
            names = ", ".join(self._metrics.unwritten)
            message = f"metrics that were logged after the last end_step are missing in the metrics table: {names}"
            self.event("metrics", f"{message}; log those of an evaluation inside `with probe.evaluating():`")
        self.recorder.samples.end(is_checked=error is None)
        if isinstance(error, Exception):
            for hook in self.recorder.flight_recorder.steps:
                self._write_kept(hook, f"the run failed with {type(error).__name__}")
        if error is None:
            self.recorder.write_relations(self.step, self.phase, self.clock.rank, self._relations.check_end())
        self.recorder.end_step(local_only=error is not None)
        self.recorder.flush()
        if error is None:
            if self.ranks is None:  # with several processes, some may have ended already
                self._rule_actions.act(self.step)
            self.recorder.end_step(any_scheduled=False)
            self.recorder.flush()
            self._report_unfired()
        self._write_layers()
        self._hooks.report_changed()
        differences = [] if self.ranks is None else self.ranks.differences.values()
        placements = [] if self.clock.layout is None else self.clock.layout.messages()
        for rule, message in (*product(("ranks",), differences), *product(("placement",), placements)):
            self.event(rule, message)
        self._scheduled.end_training()
        running = self._scheduled.has_opportunities or error is not None
        write_coverage(self._coverage(running=running), self.recorder, self.event)
        for message in [] if self.budget is None else self.budget.summary():
            self.event("budget", message)
        for device, way in measured_by().items():
            if way != BY_KERNEL:
                self.event("device_statistics", f"{device} is measured with {way}", severity="info")
        if error is not None:
            rule = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
            self.event(rule, f"{type(error).__name__}: {error}", severity="error")
        self.sink.end_step()

    def _report_unfired(self) -> None:
        """Write an event for each rule that could not fire, and each hook whose tensors no rule wrote or that missed new modules."""
        for message in self.rules.unread:
            self.event("metrics", message)
        for hook in self.recorder.flight_recorder.unwritten:
            rule = f"rule {self.plan.specs[hook].when or 'non_finite'} did not fire"
            message = f"hook {hook!r} kept tensors in memory, and they were not written: {rule}"
            self.event("flight_recorder", message, severity="info")
        for hook, what, names in unhooked_locations(self.plan):
            message = f"hook {hook!r} does not run on {what} that were added after it was attached: {shorten(names)}"
            self.event("added", f"{message}; attach hooks when all {what} exist")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a probe with the same plan requires to resume after the current step, as numbers and strings."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "phases": sorted(self.clock.phases),
            "warnings": list(self.warnings),
            "layers_pending": self._layers_pending,
            "recorder": self.recorder.state_dict(),
            "rules": self.rules.state_dict(),
            "rule_actions": self._rule_actions.state_dict(),
            "relations": self._relations.state_dict(),
            "hooks": [attached.state_dict() for attached in self.attached_hooks],
            "budget": None if self.budget is None else self.budget.state_dict(),
            "ranks": None if self.ranks is None else self.ranks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict` of an earlier probe with the same plan. Call it before entering the `with` block."""
        self._is_resumed = True
        self.set_step(state["step"], state["epoch"])
        self.clock.phases = set(state["phases"])
        self.warnings = list(state["warnings"])
        # Not in checkpoints of earlier versions. A probe that is attached already has its own folder, without layers.
        self._layers_pending |= state.get("layers_pending", False)
        self.recorder.load_state_dict(state["recorder"])
        self.rules.load_state_dict(state["rules"])
        self._rule_actions.load_state_dict(state["rule_actions"])
        if "relations" in state:  # not in checkpoints of earlier versions
            self._relations.load_state_dict(state["relations"])
        for attached, hook_state in zip(self.attached_hooks, state["hooks"], strict=True):
            attached.load_state_dict(hook_state)
        if self.budget is not None:
            self.budget.load_state_dict(state["budget"])
        if self.ranks is not None:
            self.ranks.load_state_dict(state["ranks"])


# The loop may be compiled, or a step of the optimizer whose hook calls it.
for _method in (Probe.end_step, Recorder.end_step):
    run_outside_of_graphs(_method)
