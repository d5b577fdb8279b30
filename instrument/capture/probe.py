"""The probe: a plan attached to a model for the time of a `with` block."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from torch.optim import Optimizer

from ..actions.base import Moment
from ..actions.registry import make_action
from ..errors import AlreadyAttachedError, ConfigError, HookError, Mistake
from ..kinds.live import NO_GRADIENT, NO_STEP, NOT_CALLED, Clock, Family, LiveSite
from ..kinds.module import ModuleHooks
from ..kinds.module_backward import IN_PLACE_ERROR, ModuleBackwardHooks
from ..kinds.optimizer import StepHooks
from ..kinds.parameter import AccumulationHooks, BoundaryHooks
from ..plan.sites import HookPlan
from .coverage import coverage_rows, coverage_warnings
from .recorder import RANK, Recorder, fetch
from .sink import Sink


class Probe:
    """Attaches a plan's hooks when entered, and takes every one of them away again when left, however it is left.

    A loop tells it when a step ends, and nothing else is required of it:

        with Probe(plan, sink, optimizer=optimizer) as probe:
            for batch in loader:
                ...
                optimizer.step()
                probe.end_step(loss=loss)

    Args:
        plan: What is hooked.
        sink: Who keeps the rows; it is closed when the probe is left.
        optimizer: Needed by kinds at the optimizer boundary (parameter_grad, step_post), and for the learning rate.
        seed: The seed of what interventions draw at random.

    Raises:
        ConfigError: A kind needs the optimizer, and there is none; or a function of the user's is not there.
    """

    def __init__(self, plan: HookPlan, sink: Sink, *, optimizer: Optimizer | None = None, seed: int = 0) -> None:
        self.plan = plan
        self.sink = sink
        self.optimizer = optimizer
        self.recorder = Recorder(sink)
        self.clock = Clock(Moment(0, 0, 0, "train"), seed)
        actions = {name: make_action(spec, self.recorder) for name, spec in plan.specs.items()}
        self.lives = [LiveSite(site, actions[site.spec.name], self.clock) for site in plan.sites]
        self._families: list[Family] = []
        self.warnings: list[str] = []
        self._entered = False
        self._micro_steps = 0  # of the training step that an evaluation interrupts
        self._step_began = time.perf_counter()
        self._require_optimizer()

    # ------------------------------------------------------------------------------------------------ attaching

    def __enter__(self) -> Self:
        if self._entered:
            raise AlreadyAttachedError("this probe was attached before; make a new one for another loop")
        self._entered = True
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise
        self._write_layers()
        self._retime()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        self.clock.closed = True
        try:
            self._finish(error)
        finally:
            self.sink.close()
        if isinstance(error, RuntimeError) and IN_PLACE_ERROR in str(error):
            raise HookError(self._in_place_message()) from error

    def _attach(self) -> None:
        by_module: dict[int, list[LiveSite]] = {}
        by_module_backward: dict[int, list[LiveSite]] = {}
        by_parameter: dict[int, list[LiveSite]] = {}
        boundary: list[LiveSite] = []
        steps: list[LiveSite] = []
        for live in self.lives:
            spec = live.site.spec
            if spec.definition.family == "module":
                groups = by_module_backward if spec.via == "module" else by_module
                groups.setdefault(id(live.site.layer.module), []).append(live)
            elif spec.kind == "post_accumulate_grad":
                by_parameter.setdefault(id(live.site.parameter), []).append(live)
            else:
                (boundary if spec.kind == "parameter_grad" else steps).append(live)
        for lives in by_module.values():
            self._families.append(ModuleHooks(lives[0].site.layer.module, lives, self.clock))
        for lives in by_module_backward.values():
            self._families.append(ModuleBackwardHooks(lives[0].site.layer.module, lives, self.clock))
        for lives in by_parameter.values():
            self._families.append(AccumulationHooks(lives[0].current_parameter(), lives, self.clock))
        if self.optimizer is not None and boundary:
            self._families.append(BoundaryHooks(self.optimizer, boundary, self.clock))
        if self.optimizer is not None and steps:
            self._families.append(StepHooks(self.optimizer, steps, self.clock))

    def _detach(self) -> None:
        while self._families:
            self._families.pop().detach()

    def _require_optimizer(self) -> None:
        needing = [name for name, spec in self.plan.specs.items() if spec.definition.at_boundary]
        if needing and self.optimizer is None:
            raise ConfigError(
                Mistake(
                    f"hooks.{needing[0]}.kind",
                    f"kind {self.plan.specs[needing[0]].kind} acts around the optimizer's step: hand the optimizer over, optimizer=",
                )
            )

    # ------------------------------------------------------------------------------------------------ time

    @property
    def step(self) -> int:
        """The optimizer step that is running, from 0; the number of steps done."""
        return self.clock.moment.step

    @property
    def phase(self) -> str:
        """`train` or `eval`."""
        return self.clock.moment.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        if phase not in ("train", "eval"):
            raise ValueError(f"phase has to be 'train' or 'eval', not {phase!r}")
        if phase == self.phase:
            return
        if self._busy:
            self.end_micro_step()
        if phase == "eval":
            self._micro_steps = self.clock.moment.micro_step
        self._retime(micro_step=0 if phase == "eval" else self._micro_steps, phase=phase)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The phase is `eval` inside; its rows are written when it ends."""
        began = time.perf_counter()
        self.phase = "eval"
        try:
            yield
        finally:
            self.phase = "train"
        self.recorder.end_step()
        self._step_began += time.perf_counter() - began  # it is no part of the step that it stands in

    @property
    def epoch(self) -> int:
        """The time through the data, from 0."""
        return self.clock.moment.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.clock.moment = self.clock.moment._replace(epoch=epoch)

    def end_micro_step(self) -> None:
        """A micro-batch's forward and backward are done, or a batch of an evaluation: the next one has the next number.

        A loop that does not accumulate gradients need not call it.
        """
        for live in self.lives:
            if live.due and not live.at_boundary:
                live.settle(NO_GRADIENT if live.site.parameter is not None else NOT_CALLED, NO_GRADIENT)
        self.clock.turn += 1
        self.clock.moment = self.clock.moment._replace(micro_step=self.clock.moment.micro_step + 1)

    @property
    def _busy(self) -> bool:
        """Whether anything happened in the micro-step that is running."""
        return any(live.busy for live in self.lives if not live.at_boundary)

    def end_step(
        self, *, loss: Tensor | float | None = None, samples: int | None = None, **metrics: Tensor | float | None
    ) -> dict[str, float | None]:
        """The optimizer has made its step: the rows go to the sink, and the next step begins.

        Args:
            loss: The step's loss; a tensor is read here, with all else that is on the device.
            samples: Samples in the step, for samples_per_second.
            metrics: Further columns of the metrics table: accuracy, grad_norm, lr.

        Returns:
            The row of metrics that was written.
        """
        if self._busy or not self.clock.moment.micro_step:
            self.end_micro_step()
        for live in self.lives:
            if live.due and live.at_boundary:
                live.settle(NO_STEP, NO_GRADIENT)
        row = self.write_metrics(loss=loss, samples=samples, seconds=time.perf_counter() - self._step_began, **metrics)
        self.recorder.end_step()
        self._step_began = time.perf_counter()
        self._retime(step=self.step + 1, micro_step=0)
        return row

    def write_metrics(
        self, *, seconds: float, samples: int | None = None, **metrics: Tensor | float | None
    ) -> dict[str, float | None]:
        """A row of the metrics table for this step and phase; tensors are read here, all at once."""
        metrics |= {"seconds": seconds, "samples_per_second": None if samples is None else samples / seconds}
        if metrics.get("lr") is None and self.optimizer is not None and self.phase == "train":
            metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        fetched = fetch([value for value in metrics.values() if isinstance(value, Tensor)])
        row: dict[str, float | None] = {
            name: next(fetched)[0] if isinstance(value, Tensor) else value for name, value in metrics.items()
        }
        step, _, epoch, phase = self.clock.moment
        columns = ("loss", "accuracy", "lr", "grad_norm", "seconds", "samples_per_second")
        self.recorder.write("metrics", [(step, epoch, phase, RANK, *(row.get(name) for name in columns))])
        return row

    def _retime(self, **moment: Any) -> None:
        """Move the clock on, and tell the families of sites that became due, or ceased to be."""
        self.clock.moment = self.clock.moment._replace(**moment)
        self.clock.turn += 1
        changed = False
        dues = {name: spec.schedule.due(self.step, self.phase) for name, spec in self.plan.specs.items()}
        for live in self.lives:
            due = dues[live.site.spec.name]
            changed |= due != live.due
            live.due = due
        if changed or self.clock.turn == 1:
            for family in self._families:
                family.refresh()

    # ------------------------------------------------------------------------------------------------ the record

    def event(self, rule: str, message: str, *, severity: str = "warning", layer: str | None = None) -> None:
        """A row of the events table; a warning is also kept in `warnings`."""
        if severity == "warning":
            self.warnings.append(message)
        self.recorder.write("events", [(self.step, RANK, layer, rule, message, severity)])

    def coverage(self) -> list[dict[str, Any]]:
        """The ledger so far: one entry a site, with what was expected, what fired, and the cause where it is less."""
        return coverage_rows(self.lives, running=self._busy)

    def _write_layers(self) -> None:
        rows = []
        for layer in self.plan.layers:
            parameters = [parameter for _, parameter in layer.own_parameters()]
            rows.append(
                (
                    layer.name,
                    list(layer.aliases),
                    layer.type,
                    layer.depth,
                    sum(parameter.numel() for parameter in parameters),
                    sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
                    list(dict.fromkeys(site.spec.name for site in self.plan.at(layer))),
                )
            )
        self.recorder.write("layers", rows)

    def _finish(self, error: BaseException | None) -> None:
        """Write down what is left: the rows of a step that broke off, the ledger, and what is wrong with it."""
        self.recorder.end_step()
        rows = coverage_rows(self.lives, running=self._busy or error is not None)
        self.recorder.write("coverage", [(*row.values(),) for row in rows])
        for message, layer in coverage_warnings(rows):
            self.event("coverage", message, layer=layer)
        if error is not None:
            rule = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
            self.event(rule, f"{type(error).__name__}: {error}", severity="error")
        self.sink.end_step()

    def _in_place_message(self) -> str:
        sites = [live.site for live in self.lives if live.site.spec.via == "module"]
        places = ", ".join(dict.fromkeys(f"{site.label!r} ({site.layer.type})" for site in sites))
        return (
            f"hook {sites[0].spec.name!r} ({sites[0].spec.kind}) at step {self.step}: with 'via: module' PyTorch wraps a "
            f"layer's output, and a later operation changes one of them in place; it is among {places}. Leave 'via' out: "
            "tensor hooks give the same values and can live with it"
        )
