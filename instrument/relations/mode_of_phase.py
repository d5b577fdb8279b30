"""Relation: the model trains in training mode, and is evaluated in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from ..hooks.optimizer import parameter_ids
from .relation import RELATIONS, Checked, Relation, Training


class _Mode:
    def __init__(self, training: Training) -> None:
        modules = training.modules.values()
        # `children` does not support proxies of modules.
        parts = [(parent, part) for parent in modules for part in parent._modules.values()]
        dropout = [(parent, part) for parent, part in parts if isinstance(part, _DropoutNd) and part.p > 0]
        norms = [part for part in modules if isinstance(part, _BatchNorm) and part.track_running_stats]
        self.is_training = training.model.training
        # The mode of dropout in frozen parts is not relevant.
        self.of_dropout = {
            part.training for parent, part in dropout if any(p.requires_grad for p in parent.parameters())
        }
        self.of_norms = {part.training for part in norms}
        self.count = len(dropout) + len(norms)


@RELATIONS.register("mode_of_phase")
class ModeOfPhase(Relation):
    """Reads the mode of the model, of its dropout and of its batch normalization: before the step of an optimizer, and in evaluations.

    A call of a training step in evaluation mode without gradients is an evaluation, unless the step before has one too: some trainings
    compute their targets with such a call in each step.
    """

    phases = ("train", "eval")

    _in_training: _Mode | None = None
    _in_evaluation: _Mode | None = None
    _has_trained = False  # in training mode, in an earlier step
    _first: int | None = None  # the first step that trains the model
    _last_evaluated: int | None = None  # the last step of phase `train` with a call that evaluates
    _evaluated: int | None = None  # the first one of these steps after a step without

    def before_step(self, optimizer: Optimizer) -> None:
        if self.training.clock.moment.phase != "train":
            return
        own = {*map(id, self.training.parameters.values())}
        if not own.isdisjoint(parameter_ids(optimizer)):  # otherwise, it trains something else, such as an input
            self._in_training = _Mode(self.training)
            if self._first is None:
                self._first = self.training.clock.moment.step

    def evaluate(self) -> None:
        step, _, _, phase = self.training.clock.moment
        if phase == "train":
            is_after_training = self._first is not None and step > self._first
            if is_after_training and self._evaluated is None and self._last_evaluated not in (step - 1, step):
                self._evaluated = step
            self._last_evaluated = step
        elif self._in_evaluation is None:
            self._in_evaluation = _Mode(self.training)

    def check(self) -> Iterator[Checked]:
        if self.training.clock.moment.phase == "eval":
            mode, self._in_evaluation = self._in_evaluation, None
            if mode is None or not mode.count:
                return
            wrong = [
                name
                for name, modes in (("dropout", mode.of_dropout), ("batch normalization", mode.of_norms))
                if True in modes
            ]
            if mode.is_training and wrong:
                yield Checked(False, None, f"{' and '.join(wrong)} in training mode in an evaluation")
            else:
                yield Checked(True, mode.count, f"mode of {mode.count} modules in an evaluation")
            return
        yield from self.check_end()
        mode, self._in_training = self._in_training, None
        if mode is None or not mode.count:
            return
        is_wrong = not mode.is_training and True not in mode.of_dropout | mode.of_norms
        if is_wrong and (self._has_trained or mode.of_dropout):
            yield Checked(False, None, "the model is in evaluation mode in a training step")
        elif mode.is_training:
            self._has_trained = True
            yield Checked(True, mode.count, f"mode of {mode.count} modules in a training step")

    def check_end(self) -> Iterator[Checked]:
        if self._evaluated is not None:
            yield Checked(False, None, f"an evaluation or a rollout at step {self._evaluated} is recorded as training")
