"""A callback for the Trainer of Hugging Face Transformers."""

# ruff: noqa: ARG002 - the Trainer passes arguments that some hooks do not use

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from ..hooks.optimizer import parameter_ids
from ..runtime.deferred_interrupts import signal_safe_contextmanager
from ..storage.run_folder import DiscardedRunError
from .trainer_callback import CLIPPING, FunctionWithListeners, TrainerCallbackBase

BACKWARD = FunctionWithListeners(Accelerator, "backward", "loss")


class TransformersCallback(TrainerCallbackBase, TrainerCallback):  # type: ignore[misc] # a class of transformers is Any
    """Attach hooks while `trainer.train` runs.

    The Trainer does not report errors to its callbacks. Use the callback as a context manager, so that the hooks are
    also detached after an error:

        with TransformersCallback("hooks.yaml", out="runs/mine") as hooks:
            Trainer(model, arguments, train_dataset=data, callbacks=[hooks]).train()

    The phase is read from the model: whether it is in training mode, and between the steps also whether it computes
    gradients. After `resume_from_checkpoint`, steps and epochs continue. With `auto_find_batch_size`, the rows of an attempt that
    ran out of memory are discarded.

    Hooks of kind `parameter_grad` and `step_pre` run before the Trainer clips gradients (`max_grad_norm`, 1.0 by default). To
    record the clipped gradients, use `step_post` with role `param_grad`.

    After an import of this module, `report_to="instrument"` adds the callback, with the hooks of `INSTRUMENT_HOOKS`.

    The table `metrics` has the loss of each step and of each evaluation that the Trainer logs.

    The arguments are those of `instrument.attach`. A rule with `then: stop` ends the training, and one with `then: checkpoint` saves
    a checkpoint of the Trainer.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach(error)

    _batch_size: int | None = None
    _first_epoch = True
    _gradients_are_complete = False
    _clips = False
    _loss: Tensor | None = None  # of the current step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Attach the hooks to the model and to the Trainer's optimizer."""
        restart = self._discard(args, state) if self._is_attached else None
        optimizer = more.get("optimizer")
        self._batch_size, self._first_epoch, self._gradients_are_complete = state.train_batch_size, True, False
        self._clips = bool(args.max_grad_norm)
        self._attach(
            more["model"],
            clipped_by=f"max_grad_norm={args.max_grad_norm}" if self._clips else None,
            around=self._observed(),
            optimizer=optimizer,
            scaler=getattr(optimizer, "scaler", None),
            step=state.global_step,
            epoch=int(state.epoch or 0),
        )
        if restart is not None:
            self.probe.event("restarted", restart, severity="info")

    @signal_safe_contextmanager
    def _observed(self) -> Iterator[None]:
        with CLIPPING.before(self._before_clipping), BACKWARD.before(self._before_backward):
            yield

    def _discard(self, args: TrainingArguments, state: TrainerState) -> str | None:
        """Detach the hooks of a training that ended with an error, and return a message if the Trainer repeats it."""
        if not args.auto_find_batch_size:
            self._detach(RuntimeError("the training ended before the Trainer called on_train_end"))
            return None
        message = (
            f"the training started again with batch size {state.train_batch_size}: with batch size {self._batch_size}, it ran "
            f"out of memory after {self.probe.step} steps, whose rows were discarded (auto_find_batch_size)"
        )
        self._detach(DiscardedRunError(message))
        return message

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **more: Any) -> None:
        """Set the epoch of the probe. That of the Trainer is a fraction if its last epoch was not complete."""
        if not self._first_epoch:
            self.probe.epoch += 1
        self._first_epoch = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin a step."""
        self._loss = None
        self._watch.begin_step()

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End a micro-step that is not the last one of its step."""
        self.probe.end_micro_step()

    def _before_backward(self, losses: list[Tensor]) -> None:
        """Add the loss of a micro-batch, which the Trainer passes to no callback."""
        loss = losses[0].detach()
        self._loss = loss if self._loss is None else self._loss + loss

    def _before_clipping(self, parameters: list[Tensor]) -> None:
        """End the gradients of a step before the Trainer clips them, for which it has no callback."""
        ids = {id(parameter) for parameter in parameters}
        if all(parameter_ids(optimizer) <= ids for optimizer in self.probe.optimizers):
            self._end_gradients()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the gradients of a step that the Trainer does not clip."""
        if self._clips and not self._gradients_are_complete:
            self._clips = False
            message = "the Trainer does not clip gradients with PyTorch's function: hooks see them after the clip"
            self.probe.event("clipping", message)
        self._end_gradients()

    def _end_gradients(self) -> None:
        """End the last micro-step of a step, and run the hooks that act before the optimizer's step."""
        if not self._gradients_are_complete:
            self._gradients_are_complete = True
            self.probe.end_micro_step()
            for optimizer in self.probe.optimizers:
                self.probe.before_optimizer_step(optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the step. Other callbacks can evaluate the model when it has ended."""
        self._gradients_are_complete = False
        self._watch.end_step()
        self.probe.end_step(loss=self._loss)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **more: Any) -> None:
        """Stop the training, or save a checkpoint, if a rule requests it."""
        control.should_training_stop |= self.probe.should_stop
        control.should_save |= self.probe.should_checkpoint

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """End the micro-step of an evaluation batch."""
        self._end_evaluation_batch()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **more: Any) -> None:
        """Write the loss of an evaluation between two steps. That of one of several data sets is a custom metric, such as `loss_name`."""
        for name, loss in metrics.items():
            prefix = name.removesuffix("_loss")
            seconds = metrics.get(f"{prefix}_runtime")
            if prefix != name and seconds is not None:
                self._write_losses({"" if prefix == "eval" else prefix.removeprefix("eval_"): loss}, seconds=seconds)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Detach the hooks."""
        self._detach()


INTEGRATION_TO_CALLBACK["instrument"] = TransformersCallback  # exported by transformers, but not documented
