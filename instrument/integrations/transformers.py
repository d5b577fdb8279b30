"""A callback for the Trainer of Hugging Face Transformers."""

# ruff: noqa: ARG002 - the Trainer passes arguments that some hooks do not use

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .trainer_callback import TrainerCallbackBase


class TransformersCallback(TrainerCallbackBase, TrainerCallback):
    """Attach hooks while `trainer.train` runs.

    The Trainer does not report errors to its callbacks. Use the callback as a context manager, so that the hooks are
    also detached after an error:

        with TransformersCallback("hooks.yaml", out="runs/mine") as hooks:
            Trainer(model, arguments, train_dataset=data, callbacks=[hooks]).train()

    The Trainer clips gradients before the optimizer's step (`max_grad_norm`, 1.0 by default), so hooks of kind
    `parameter_grad` receive clipped gradients. To record unclipped gradients, use `post_accumulate_grad`, or set
    `max_grad_norm=0`.

    Args:
        specs: The hooks, as for `instrument.attach`.
        out: Folder of the run. Default: rows are kept in memory.
        seed: Seed of interventions that draw random numbers.
        rules: The rules, as for `instrument.attach`. A rule with `then: stop` ends the training, and one with `then: checkpoint`
            saves a checkpoint of the Trainer.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Attach the hooks to the model and to the Trainer's optimizer."""
        self._attach(more["model"], optimizer=more.get("optimizer"))

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        """Set the epoch of the probe."""
        self.probe.epoch = int(state.epoch or 0)

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End a micro-step that is not the last one of its step."""
        self.probe.end_micro_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the last micro-step of a step, for which the Trainer has no other callback."""
        self.probe.end_micro_step()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **more: Any) -> None:
        """End the step. An evaluation may follow."""
        self.probe.end_step()
        control.should_training_stop |= self.probe.should_stop
        control.should_save |= self.probe.should_checkpoint
        self._expect_evaluation(control)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **more: Any) -> None:
        """Switch the phase to `eval` if an evaluation follows."""
        self._expect_evaluation(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the micro-step of an evaluation batch."""
        if self._probe is not None and self._probe.phase == "eval":
            self._probe.end_micro_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Switch the phase back to `train` after an evaluation."""
        if self._probe is not None:
            self._probe.phase = "train"

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Detach the hooks."""
        self._stack.close()

    def _expect_evaluation(self, control: TrainerControl) -> None:
        if control.should_evaluate:
            self.probe.phase = "eval"
