"""A callback for the Trainer of Hugging Face's transformers."""

# ruff: noqa: ARG002 - the Trainer calls the hooks with more than each of them needs

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .attachment import Attachment


class TransformersCallback(Attachment, TrainerCallback):
    """Attaches hook specs while `trainer.train` runs.

    The Trainer does not tell its callbacks of an error, so it is best used as a context manager, which detaches
    whatever happens:

        with TransformersCallback("hooks.yaml", out="runs/mine") as hooks:
            Trainer(model, arguments, train_dataset=data, callbacks=[hooks]).train()

    The Trainer clips gradients (`max_grad_norm`, 1.0 unless it is set) before the optimizer's step: parameter_grad sees
    them clipped. Raw ones are to be seen at post_accumulate_grad, or with `max_grad_norm=0`.

    Args:
        specs: As for `instrument.attach`.
        out: The folder of the run; in memory without it.
        seed: The seed of what interventions draw at random.
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
        """Attach to the model, and to the optimizer that the Trainer made."""
        self._attach(more["model"], optimizer=more.get("optimizer"))

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        """Note the epoch."""
        self.probe.epoch = int(state.epoch or 0)

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A micro-batch that is not the last one of its step has ended."""
        self.probe.end_micro_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The last micro-batch of a step has ended, of which nothing else tells."""
        self.probe.end_micro_step()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **more: Any) -> None:
        """A step has ended; an evaluation may follow."""
        self.probe.end_step()
        self._expect_evaluation(control)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **more: Any) -> None:
        """An evaluation may follow."""
        self._expect_evaluation(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A batch of an evaluation has ended."""
        if self._probe is not None and self._probe.phase == "eval":
            self._probe.end_micro_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The evaluation is over."""
        if self._probe is not None:
            self._probe.phase = "train"

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Detach."""
        self._stack.close()

    def _expect_evaluation(self, control: TrainerControl) -> None:
        if control.should_evaluate:
            self.probe.phase = "eval"
