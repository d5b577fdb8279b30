"""The relations of a run: when they are checked, what they read, and which of their results become rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..hooks.clock import Clock
from ..hooks.distributed_scope import wrappers_of
from ..hooks.hook_group_interface import InertWhenCopied
from ..rules.step_rows import RelationRow
from .exchange import has_processes
from .loader_batches import LoaderBatch, observe_batches, unobserve_batches
from .loss_calls import AnyLossCall, BinaryLossCall, LossCall, copied, observe_losses, unobserve_losses
from .relation import RELATIONS, Checked, ModelCall, Relation, Training, calls_hooks

FIRST_STEPS, EVERY = 5, 50
"""Relations are checked in the first steps of a training, and then in each step whose number is a multiple of `EVERY`, and the one after
it, since some compare two successive steps."""
MAX_ROWS = 20  # rows of a relation that does not hold
_MAX_CALLS, _MAX_BATCHES, _MAX_TEXT = 16, 32, 300


class RelationSet(InertWhenCopied):
    """Checks relations in the first steps, and rarely later.

    Args:
        names: The names of the relations.
        scaler: The gradient scaler, if it is enabled.
    """

    def __init__(
        self,
        names: Collection[str],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        clock: Clock,
        scaler: GradScaler | None = None,
    ) -> None:
        super().__init__((), clock)
        self.training = Training(model, optimizers, clock, scaler)
        self._relations: dict[str, Relation] = {
            name: RELATIONS.find(name, f"rules.{name}")(self.training)
            for name in sorted(names)
            if clock.rank == 0 or RELATIONS[name].on_all_ranks
        }
        self._first: int | None = None  # the first step
        self._seen: Counter[tuple[str, str]] = Counter()  # rows by relation, and by relation and location

    def attach(self) -> None:
        """Register the hooks of all relations. After an exception, `detach` removes those that were registered."""
        if self._first is None:
            self._first = self.clock.moment.step
        self._plan_check()
        wrappers = wrappers_of(self.training.model) if has_processes() else []
        self.training.replicated_by = wrappers[0] if wrappers else None
        sources = {source for relation in self._relations.values() for source in relation.sources}
        if "inputs" in sources and calls_hooks(self.training.model):
            self.handles.append(self.training.model.register_forward_pre_hook(self._before_call, with_kwargs=True))
        if "batches" in sources:
            observe_batches(self._on_batch)
        if "losses" in sources:
            observe_losses(self._on_loss)
        for relation in self._relations.values():
            relation.attach()

    def _before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling() or self.clock.closed:  # in a compiled model, it does nothing, and the graph has no break
            return
        training, inputs = self.training, self.training.inputs
        training.replicated_by = wrapper = training.replicated_by or DistributedDataParallel._active_ddp_module
        if wrapper is not None and torch.is_grad_enabled():
            training.is_local = not wrapper.require_backward_grad_sync
        if self._is_observed() and len(inputs) < _MAX_CALLS:
            inputs.append(ModelCall(module, args, kwargs))

    @property
    def reads_fingerprints(self) -> bool:
        """Whether a relation reads the fingerprints that hooks record; see `Training.fingerprints`."""
        return has_processes() and any("fingerprints" in relation.sources for relation in self._relations.values())

    def _on_batch(self, batch: LoaderBatch) -> None:
        if len(self.training.batches) >= _MAX_BATCHES:
            unobserve_batches(self._on_batch)
        elif self.clock.moment.phase == "train":
            self.training.batches.append(batch._replace(step=self.clock.moment.step))

    def _on_loss(self, call: AnyLossCall) -> None:
        training = self.training
        if not self._is_observed():
            return
        if isinstance(call, LossCall):
            if len(training.losses) < _MAX_CALLS:
                training.losses.append(copied(call))
        elif isinstance(call, BinaryLossCall):
            if len(training.binary_losses) < _MAX_CALLS:
                training.binary_losses.append(call)
        elif len(training.pair_losses) < _MAX_CALLS:
            training.pair_losses.append(call)

    def _is_observed(self) -> bool:
        self._plan_check()
        return self.training.is_checked and self.clock.moment.phase == "train" and not self.clock.closed

    def _plan_check(self, steps_ahead: int = 0) -> None:
        """Set whether the current step is checked, or a later one."""
        step = self.clock.moment.step + steps_ahead
        self.training.is_checked = step - (self._first or 0) < FIRST_STEPS or step % EVERY <= 1

    def check(self) -> list[RelationRow]:
        """Check the relations at the end of a step or an evaluation. Return the rows to write: the first one of each location and phase."""
        self._plan_check()
        phase, rows = self.clock.moment.phase, list[RelationRow]()
        is_checked = self.training.is_checked or phase == "eval"  # an evaluation may follow any step
        if not self.clock.closed:
            for name, relation in self._relations.items():
                is_due = is_checked or "fingerprints" in relation.sources
                if is_due and phase in relation.phases and self._seen[name, ""] < MAX_ROWS:
                    rows += self._new_rows(name, relation.check, phase)
        self._forget()
        self._plan_check(steps_ahead=phase == "train")
        return rows

    def check_end(self) -> list[RelationRow]:
        """Check the relations after a training that ended without an error. Return the rows to write."""
        return [
            row
            for name, relation in self._relations.items()
            for row in self._new_rows(name, relation.check_end, "train")
        ]

    def _new_rows(self, name: str, check: Callable[[], Iterable[Checked]], phase: str) -> list[RelationRow]:
        rows = []
        try:
            results = [*check()]
            if (error := self._relations[name].error) is not None:
                raise error
        except Exception as error:  # a check reads values of any model, and must not end its training
            results = [Checked(None, None, f"the check failed: {type(error).__name__}: {error}"[:_MAX_TEXT])]
        is_violated = any(each.holds is False for each in results)
        for holds, value, text, layer, path in results:
            if holds and is_violated:
                continue
            location = f"{phase} {layer} {path}" if holds is False else str(holds)
            if not self._seen[name, location] and self._seen[name, ""] < MAX_ROWS:
                self._seen[name, location] = 1
                self._seen[name, ""] += holds is False
                rows.append(RelationRow(name, layer, path, holds, value, text))
        return rows

    def detach(self) -> None:
        """Remove all hooks."""
        for relation in self._relations.values():
            relation.detach()
        unobserve_losses(self._on_loss)
        unobserve_batches(self._on_batch)
        self.training.batches.clear()
        self._forget()
        super().detach()

    def _forget(self) -> None:
        self.training.inputs.clear()
        self.training.losses.clear()
        self.training.binary_losses.clear()
        self.training.pair_losses.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the first step, and the locations that have a row."""
        return {"first": self._first, "seen": [[*key, count] for key, count in self._seen.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._first = state["first"]
        self._seen = Counter({(name, location): count for name, location, count in state["seen"]})
