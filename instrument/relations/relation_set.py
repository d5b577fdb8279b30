"""The relations of a run: when they are checked, what they read, and which of their results become rows."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..hooks.clock import Clock
from ..hooks.distributed_scope import wrappers_of
from ..hooks.hook_group import HookGroup, InertWhenCopied, StepPostHooks
from ..rules.step_rows import RelationRow
from ..runtime.lazy_compiler import has_compiled, run_outside_of_graphs
from .exchange import has_processes
from .observations import (
    BATCHES,
    LOSSES,
    TRAINING_THREADS,
    AccumulatedGradient,
    AnyLossCall,
    BinaryLossCall,
    LoaderBatch,
    LossCall,
    copied,
    smallest_parameters,
)
from .relation import RELATIONS, Checked, ModelCall, Training

EVERY, RARE = 200, 1000
_EARLY = (*range(5), *(n + k for n in (8, 16, 32, 64, 128) for k in (0, 1)))
"""Relations are checked in these steps, counted from the start of the training. Then they are checked in each step whose number is a
multiple of `EVERY`, from `RARE` on a multiple of `RARE`, and after evaluations, if `EVERY` steps were not checked: the loop may change the
mode and the parameters then. The step after each of these is checked too, since some relations compare two successive steps."""
MAX_ROWS = 20  # rows of a relation that does not hold
_MAX_CALLS, _MAX_BATCHES, _MAX_TEXT = 16, 32, 300


class RelationSet(InertWhenCopied, StepPostHooks):
    """Checks relations in the first steps, and rarely later. In other steps, its hook on the model returns at once.

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
        checked = (name for name in sorted(names) if clock.rank == 0 or RELATIONS[name].on_all_ranks)
        self._relations = {name: RELATIONS.find(name, f"rules.{name}")(self.training) for name in checked}
        self._first: int | None = None  # the first step
        self.due = sys.maxsize  # `check` does nothing at the end of earlier training steps
        self._after_evaluation = -EVERY  # the first step that is checked because of an evaluation
        self._rests = False  # whether a call of the model in training mode in phase `train` is not observed
        self._of_steps: dict[RemovableHandle, Callable[..., None]] = {}  # the hooks of the steps of optimizers
        self._observed = HookGroup((), clock)  # the hooks of the checked steps
        self._seen: Counter[tuple[str, str]] = Counter()  # rows by relation, and by relation and location
        self.reads_fingerprints = False  # whether a relation reads those that hooks record; see `Training.fingerprints`

    def attach(self) -> None:
        """Register the hooks of all relations. After an exception, `detach` removes those that were registered."""
        TRAINING_THREADS[self] = threading.get_ident()
        if not self._relations:
            return
        training, step = self.training, self.clock.moment.step
        self._first = step if self._first is None else self._first
        wrappers = wrappers_of(training.model) if has_processes() else []
        training.replicated_by = wrappers[0] if wrappers else None
        sources = [source for relation in self._relations.values() for source in relation.sources]
        self.reads_fingerprints = has_processes() and "fingerprints" in sources
        # TorchScript calls no hooks. PyTorch computes an encoder layer with hooks in another way.
        if not isinstance(training.model, nn.TransformerEncoderLayer | torch.jit.ScriptModule):
            self.handles.append(training.model.register_forward_pre_hook(self._before_call, with_kwargs=True))
        of_model = len(self.handles)
        for optimizer in training.optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self._before_step))
            self.register_after_step(optimizer)
        of_steps = ((handle, handle.hooks_dict_ref()) for handle in self.handles[of_model:])
        self._of_steps = {handle: hooks[handle.id] for handle, hooks in of_steps if hooks}
        if "batches" in sources:
            BATCHES.add(self._on_batch)
        for relation in self._relations.values():
            relation.attach()
        self._begin_step(step)

    def _begin_step(self, step: int) -> None:
        """Begin to observe losses and gradients before the first of several checked steps. End it after the last one."""
        training, checked = self.training, self._first_checked(step)
        is_checked = checked == step
        self.due = step if is_checked or self.reads_fingerprints else checked - 1
        self._rests = not (is_checked or has_processes())  # processes may make local steps
        # Compiled code that calls another hook would be compiled again.
        is_idle = self._rests and not has_compiled()
        for handle, hook in self._of_steps.items():
            if (hooks := handle.hooks_dict_ref()) and handle.id in hooks:
                # The key stays, since PyTorch may iterate over the hooks: a step may end in one, and another may call the model.
                hooks[handle.id] = _do_nothing if is_idle else hook
        if is_checked == training.is_checked:
            return
        training.is_checked = is_checked
        if not is_checked:
            self._end_observation()
            return
        training.end_step()
        LOSSES.add(self._on_loss)
        for optimizer in training.optimizers:
            gradients = [AccumulatedGradient(each, self.clock) for each in smallest_parameters(optimizer)]
            training.gradients[optimizer] = gradients
            for each in gradients:
                self._observed.handles += each.attach()

    def _first_checked(self, step: int) -> int:
        """Return the first checked step from a step on."""
        offset = step - (self._first or 0)
        every = EVERY if offset < RARE else RARE
        after = offset % every
        regular = next((each for each in _EARLY if each >= offset), offset if after <= 1 else offset + every - after)
        checked, requested = step + regular - offset, self._after_evaluation
        return min(checked, max(step, requested)) if step <= requested + 1 else checked

    def refresh(self) -> None:
        """Request a check after an evaluation if the last one was many steps ago."""
        step, _, _, phase = self.clock.moment
        offset = 0 if self._first is None else step - self._first
        if phase == "eval" and offset > RARE and min(offset % RARE, step - self._after_evaluation) >= EVERY:
            self._after_evaluation = step + 1
            self.due = min(self.due, step)

    def _end_observation(self) -> None:
        LOSSES.remove(self._on_loss)
        self._observed.detach()
        for each in chain.from_iterable(self.training.gradients.values()):
            each.release()
        self.training.gradients.clear()

    def _before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # In a compiled model, it does nothing, and the graph has no break. The other test takes longer, and is true in an export too.
        clock = self.clock
        if is_dynamo_compiling() or clock.closed:
            return
        phase = clock.moment.phase
        if self._rests and phase == "train" and module.training:
            return
        training = self.training
        is_evaluation = phase == "eval" or (phase == "train" and not (module.training or torch.is_grad_enabled()))
        if is_evaluation and not is_compiling():
            for relation in self._relations.values():
                relation.evaluate()
        training.replicated_by = wrapper = training.replicated_by or DistributedDataParallel._active_ddp_module
        if wrapper is not None and torch.is_grad_enabled():
            training.is_local = not wrapper.require_backward_grad_sync
        if training.is_checked and phase == "train" and len(training.inputs) < _MAX_CALLS and not is_compiling():
            training.inputs.append(ModelCall(training.signature, args, kwargs))

    def _before_step(self, optimizer: Optimizer, *arguments: object) -> None:  # noqa: ARG002
        if not is_compiling() and self.training.is_checked:
            self._observe("before_step", optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        self.training.has_local_steps |= self.training.is_local
        if not is_compiling() and self.training.is_checked:
            self._observe("after_step", optimizer)
            for each in self.training.gradients.get(optimizer, ()):
                each.end_step()

    @torch.no_grad()
    def _observe(self, method: str, optimizer: Optimizer) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # no values can be read
            return
        for relation in self._relations.values():
            try:
                getattr(relation, method)(optimizer)
            except Exception as error:  # it reads values of any optimizer, and must not end its training
                relation.error = error

    def _on_batch(self, batch: LoaderBatch) -> None:
        if len(self.training.batches) >= _MAX_BATCHES:
            BATCHES.remove(self._on_batch)
        elif self.clock.moment.phase == "train":
            self.training.batches.append(batch._replace(step=self.clock.moment.step))

    def _on_loss(self, call: AnyLossCall) -> None:
        training = self.training
        if self.clock.moment.phase != "train" or self.clock.closed:
            return
        calls: list[Any] = training.binary_losses if isinstance(call, BinaryLossCall) else training.pair_losses
        if isinstance(call, LossCall):
            calls = training.losses
            for relation in self._relations.values():
                relation.on_loss(call)
        if len(calls) < _MAX_CALLS:
            calls.append(copied(call) if isinstance(call, LossCall) else call)

    def check(self) -> Sequence[RelationRow]:
        """Check the relations at the end of a step or an evaluation. Return the rows to write: the first one of each location and phase."""
        step, _, _, phase = self.clock.moment
        is_checked = self.training.is_checked or phase != "train"  # an evaluation may follow any step
        if not (is_checked or self.training.fingerprints):
            if step >= self.due:
                self._begin_step(step + 1)
            return ()
        rows: list[RelationRow] = []
        if not self.clock.closed:
            for name, relation in self._relations.items():
                is_due = is_checked or "fingerprints" in relation.sources
                if is_due and phase in relation.phases and self._seen[name, ""] < MAX_ROWS:
                    rows += self._new_rows(name, relation.check, phase)
        self.training.end_step()
        if phase == "train":
            self._begin_step(step + 1)
        return rows

    def check_end(self) -> list[RelationRow]:
        """Check the relations after a training that ended without an error. Return the rows to write."""
        results = ((name, relation.check_end) for name, relation in self._relations.items())
        return [row for name, check in results for row in self._new_rows(name, check, "train")]

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
        TRAINING_THREADS.pop(self, None)
        for relation in self._relations.values():
            relation.detach()
        self._end_observation()
        BATCHES.remove(self._on_batch)
        self.training.batches.clear()
        self.training.end_step()
        super().detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the first step, and the locations that have a row."""
        return {"first": self._first, "seen": [[*key, count] for key, count in self._seen.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self._first = state["first"]
        self._seen = Counter({(name, location): count for name, location, count in state["seen"]})


def _do_nothing(optimizer: Optimizer, args: object, kwargs: object) -> None:
    pass


for _hook in (RelationSet._before_call, RelationSet._before_step, RelationSet.after_step, _do_nothing):
    run_outside_of_graphs(_hook)
