"""Trials of hooks before step 0: their actions run on the tensors of shape inference, and their errors are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..actions.base import NotKeptError, Rows, StepContext
from ..actions.builtin.call import CallSpec
from ..actions.builtin.recorded import RecordedSpec
from ..analysis.tensors_of_earlier_runs import RunArchive
from ..config.hook_specs import FunctionSpec, HookSpec, RecordSpec, StatisticsSpec
from ..config.schedule import STEP_PHASES
from ..errors import ConfigError, InstrumentError, Problem
from ..hooks.attached_hook import AttachedHook
from ..hooks.clock import Clock
from ..hooks.plain_calls import current_transform
from ..plan.cost import Length, firings_of
from ..plan.hook_plan import HookPlan, Site
from ..plan.tensor_checks import misfit, stand_in
from ..stats.flatten import unreadable
from ..values.nested import iter_tensors
from .loader import LoadedBatch, PhaseBatches

ANY_SIZE = 0
SMALLER_BATCH_FIX = (
    "set a value that also fits that batch; a schedule (steps, every, start, stop) that excludes it; or a number of samples "
    "that is a multiple of the batch size"
)


class HookTrials:
    """Runs the actions of hooks inside the forward passes of shape inference, which restore the state of the model.

    No row is written. Each action runs once for each tensor and size of a batch. It gets a copy of the tensor, and for a gradient a
    copy of the forward tensor, which has the same shape. Functions of `call` are not called, because they may have side
    effects, and built-in statistics are not computed, because they cannot fail. The state of an optimizer does not exist
    yet, so only its shape is checked.

    Raises:
        ConfigError: The action of a spec cannot be built, because a function or a run does not exist.
    """

    def __init__(
        self, plan: HookPlan, seed: int, archive: RunArchive, length: Length, phases: Mapping[str, PhaseBatches]
    ) -> None:
        # By name of the spec: the first field that does not fit a tensor, and the first error of the action.
        self.misfits: dict[str, Problem] = {}
        self.failures: dict[str, Problem] = {}
        self.plan, self.archive, self.length, self.phases = plan, archive, length, phases
        self.function_sites = [site for site in plan.sites if site.spec.definition.of_functions]
        self._hooks: list[AttachedHook] = []
        for name, spec in plan.specs.items():
            action = spec.build(_NoRows(), archive)  # type: ignore[abstract]  # its methods return None
            clock = Clock(StepContext(0, 0, 0, spec.phase), seed)
            self._hooks += [AttachedHook(site, action, clock, shapes_checked=True) for site in plan.of(name)]
        self._moments = {name: _moments(spec, length, phases[spec.phase].sizes) for name, spec in plan.specs.items()}
        self._at: dict[int, list[AttachedHook]] = {}  # by the `id` of the module
        for attached in self._hooks:
            self._at.setdefault(id(attached.site.layer.module), []).append(attached)
        # The hooks of the current forward pass, and whether their actions run.
        self._active: dict[AttachedHook, bool] = {}
        self._samples = 0  # of this process
        self._is_first = True
        self._done: set[tuple[AttachedHook, str]] = set()

    def smallest_batch_size(self, phase: str) -> int | None:
        """Return the number of samples in the smallest batch of a phase in the run; None without batches.

        It does not depend on hooks, so that a model or a dataset that counts its calls trains in the same way without them.
        """
        steps = range(min(self.length.steps, self.length.epoch_steps)) if phase in STEP_PHASES else range(1)
        return min((size for step in steps for size in self.phases[phase].sizes(step)), default=None)

    @contextmanager
    def on_batch(
        self, phase: str, batch: LoadedBatch, *, is_first: bool, targets: Tensor | None = None
    ) -> Iterator[None]:
        """Run hooks in the forward pass of a block: on the first batch all of the phase, on another one those scheduled for its size."""
        self._samples, self._is_first = batch.samples, is_first
        for attached in self._hooks:
            spec = attached.site.spec
            moments = self._moments[spec.name]
            if spec.phase == phase and (is_first or batch.total in moments):
                moment = moments.get(batch.total, moments.get(ANY_SIZE))
                schedule = spec.schedule
                first = schedule.start if schedule.steps is None else min(schedule.steps)
                attached.clock.moment = moment or StepContext(first, 0, 0, phase)
                attached.clock.name_samples(batch.indices, targets)
                has_tensors = moment is not None and spec.definition.frequency != "occasion"
                self._active[attached] = _runs_in_trials(spec) and (has_tensors or not _is_of_run(spec))
        self.archive.substitutes_samples = True  # the samples are not those of the step
        try:
            yield
        finally:
            self.archive.substitutes_samples = False
            for attached in self._active:
                attached.clock.kept.clear()
            self._active.clear()
            self._done.clear()

    def on_tensors(self, module: nn.Module, role: str, value: Any) -> None:
        """Run the hooks at a module on its `input` or `output`."""
        for attached in self._at.get(id(module), ()):
            site = attached.site
            definition = site.spec.definition
            if attached not in self._active or definition.family != "module" or definition.of_functions:
                continue
            if current_transform() is not None:
                continue  # hooks do not act in transforms of torch.func
            if role == ("input" if "input" in site.spec.tensor_role else "output"):
                self._run(attached, value)

    def on_function(self, site: Site, role: str, value: Any) -> None:
        """Run the hooks at a site of a function kind on the `input`, `output`, `attention` or `scores` of one call of a torch function."""
        of_site = "output" if site.spec.tensor_role == "grad_output" else site.spec.tensor_role
        for attached in self._at.get(id(site.layer.module), ()):
            if attached.site is site and attached in self._active and current_transform() is None and role == of_site:
                self._run(attached, value)

    def on_loss(self, loss: Tensor) -> None:
        for attached in self._active:
            if attached.site.spec.kind == "loss" and unreadable(loss) is None:
                self._run_on(attached, "", loss)

    def on_parameters(self) -> None:
        """Run the hooks at parameters, buffers and entries of state dicts."""
        tensors: dict[str, list[tuple[AttachedHook, Tensor]]] = {}
        for attached in self._active:
            tensor = stand_in(attached.site)
            if tensor is not None and attached.accepts(tensor, attached.site.own_name) and unreadable(tensor) is None:
                tensors.setdefault(attached.site.spec.name, []).append((attached, tensor))
        for pairs in tensors.values():
            first, _ = pairs[0]
            if self._runs(first):
                self._attempt(first, partial(first.prepare, [tensor for _, tensor in pairs]))
            has_value = first.site.spec.definition.family == "parameter" or first.role == "update"
            for attached, tensor in pairs:
                self._run_on(attached, attached.site.own_name, tensor, tensor if has_value else None)

    def _run(self, attached: AttachedHook, value: Any) -> None:
        is_gradient = attached.site.spec.definition.gradient
        for path, tensor in list(iter_tensors(value)):
            is_hooked = attached.accepts(tensor, path) and (tensor.requires_grad or not is_gradient)
            if is_hooked and unreadable(tensor) is None:
                self._run_on(attached, path, tensor)

    def _run_on(self, attached: AttachedHook, path: str, tensor: Tensor, value: Tensor | None = None) -> None:
        """Check the shape of a tensor, and run the action on it unless it ran for its path before."""
        spec = attached.site.spec
        problem = misfit(attached.site, path, tensor, may_exceed=not self._is_first)
        if problem is not None and spec.name not in self.misfits:
            if not self._is_first:
                message = f"{problem.message} in the smallest batch, of {self._samples} samples"
                problem = replace(problem, message=message, allowed=(), fix=SMALLER_BATCH_FIX)
            self.misfits[spec.name] = problem
        is_done = (attached, path) in self._done
        # Dimension 0 may depend on the data if it is not a multiple of the number of samples.
        depends_on_data = spec.definition.family == "module" and tensor.dim() and len(tensor) % self._samples
        if is_done or not self._runs(attached) or (_is_of_run(spec) and depends_on_data):
            return
        self._done.add((attached, path))
        is_gradient = spec.definition.gradient
        has_graph = not (is_gradient or attached.is_record_hook)
        if (is_gradient and spec.definition.family == "module") or spec.tensor_role == "change":
            value = tensor.detach().clone()

        def fire() -> None:
            copy = tensor.detach().clone()
            if tensor.requires_grad and has_graph:
                copy = copy.requires_grad_().clone()  # not a leaf, because PyTorch refuses in-place writes to a leaf
            with torch.set_grad_enabled(copy.requires_grad):
                attached.fire(copy, path, value=value)

        self._attempt(attached, fire)

    def _runs(self, attached: AttachedHook) -> bool:
        """Return whether the action of a hook can run in this pass, and is not known to fail."""
        spec = attached.site.spec
        is_state = spec.tensor_role.startswith("state.")
        return self._active[attached] and not is_state and spec.name not in {*self.misfits, *self.failures}

    def _attempt(self, attached: AttachedHook, run: Callable[[], object]) -> None:
        """Run the action of a hook. Its error becomes a problem of the spec."""
        spec = attached.site.spec
        try:
            run()
        except ConfigError as error:
            if not (spec.definition.gradient and _is_of_run(spec)):
                self.failures[spec.name] = error.problems[0]
        except InstrumentError as error:
            if isinstance(error.__cause__, NotKeptError):
                return  # no hook keeps tensors here
            if isinstance(error.__cause__, LookupError) and spec.definition.gradient and _is_of_run(spec):
                return  # not every tensor gets a gradient in both runs
            self.failures[spec.name] = _failure(spec, error)


def _failure(spec: HookSpec, error: InstrumentError) -> Problem:
    where, message = f"hooks.{spec.name}", f"the trial call on a copy before the run failed: {error}"
    if isinstance(spec, FunctionSpec):
        allowed = "fn(tensor, context) that returns a new tensor of the same shape and dtype, or None"
        return Problem(f"{where}.fn", message, spec.fn.target, allowed)
    if isinstance(spec, StatisticsSpec) and spec.custom_statistics:
        return Problem(f"{where}.stats", message, allowed="functions of the tensor that return one number")
    return Problem(f"{where}.run", message, spec.run) if _is_of_run(spec) else Problem(where, message)


def _runs_in_trials(spec: HookSpec) -> bool:
    """Return whether an action runs in trials. Built-in statistics cannot fail, and functions of `call` may have side effects."""
    if isinstance(spec, RecordSpec) and {"experts", "position_losses"} & {*spec.tables}:
        return True
    if isinstance(spec, StatisticsSpec):
        return bool(spec.custom_statistics)
    return not isinstance(spec, CallSpec)


def _is_of_run(spec: HookSpec) -> TypeGuard[RecordedSpec]:
    return isinstance(spec, RecordedSpec) and spec.run is not None


def _moments(spec: HookSpec, length: Length, sizes: Callable[[int], Sequence[int]]) -> dict[int, StepContext]:
    """Return the first time at which a hook sees a batch of each size. If it sees no batches, the size is `ANY_SIZE`."""
    steps = firings_of(spec, length).steps
    if not (_runs_in_trials(spec) or spec.selection):
        steps = steps[:1]  # it fits all batches
    if spec.definition.family not in ("module", "loss"):
        return {ANY_SIZE: StepContext(steps[0], 0, 0, spec.phase)} if steps else {}
    moments: dict[int, StepContext] = {}
    seen: set[int] = set()
    distinct = length.epoch_steps if spec.phase in STEP_PHASES else 1
    for step in steps:
        if len(seen) == distinct:
            break
        in_epoch = step % length.epoch_steps if spec.phase in STEP_PHASES else 0  # the sizes are the same in each epoch
        if in_epoch not in seen:
            seen.add(in_epoch)
            for micro_step, size in enumerate(sizes(step)):
                moments.setdefault(size, StepContext(step, micro_step, 0, spec.phase))
    return moments


class _NoRows(Rows):
    """Discards the rows of actions: each method of `Rows` does nothing, and returns None."""
