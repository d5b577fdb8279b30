"""A callback for the Trainer of Lightning."""

# ruff: noqa: ARG002 - Lightning passes arguments that some hooks do not use

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from ..storage.run_record import CHECKPOINTS
from .trainer_callback import TrainerCallbackBase


class LightningCallback(TrainerCallbackBase, Callback):
    """Attach hooks while `trainer.fit` runs.

    Layer names start at the LightningModule: `net.layer1`, if the network is stored as `self.net`.

    Hooks are attached after the sanity check. The phase is read from the LightningModule: whether it is in training mode, and
    between the training batches also whether it computes gradients. After `ckpt_path`, steps and epochs continue.

    Lightning passes the forward and backward pass to the optimizer as a closure. Hooks of kind `parameter_grad` and
    `step_pre` therefore run in `on_before_optimizer_step`: after gradient accumulation and unscaling, and before
    Lightning clips gradients. To record the clipped gradients, use `step_post` with role `param_grad`.

    A module may have several optimizers (manual optimization). Each parameter belongs to the optimizer that holds it. A
    step is a training batch in which at least one optimizer made a step. Each backward pass is a micro-step of that
    step.

    The table `metrics` has the loss of each step, and of each validation in which the module logs `val_loss`, as the mean that Lightning
    computes over the batches. With several data loaders, these losses are custom metrics, such as `loss_dataloader_idx_0`.

    The arguments are those of `instrument.attach`. A rule with `then: stop` ends the training, and one with `then: checkpoint` saves
    a checkpoint of the Trainer.
    """

    _steps_done = 0
    _losses: Sequence[Tensor] = ()  # of the batches of the current step
    _validation_began = 0.0
    _validation_losses: Mapping[str, Tensor] = MappingProxyType({})  # of the latest validation that logged any

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the hooks. Lightning has restored the step and the epoch by now."""
        self._losses = []
        self._steps_done = trainer.global_step  # of all optimizers together
        several = len(trainer.optimizers) > 1
        self._attach(
            pl_module,
            clipped_by=_clipping(trainer, pl_module),
            optimizer=trainer.optimizers,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            step=trainer.fit_loop.epoch_loop._batches_that_stepped if several else trainer.global_step,
            epoch=trainer.current_epoch,
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the epoch of the probe."""
        self.probe.epoch = trainer.current_epoch

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a training batch. Lightning does not change the mode of the module for it."""
        self._watch.begin_step(training_mode=pl_module.training)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the micro-step: the gradients of a micro-batch are computed."""
        self.probe.end_micro_step()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Run the hooks that act before the optimizer's step."""
        several = len(self.probe.optimizers) > 1  # a strategy may wrap a single optimizer, so it is not passed on
        self.probe.before_optimizer_step(optimizer if several else None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the batch, and the step if an optimizer made a step in it."""
        self._watch.end_step()
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        losses = [loss] if isinstance(loss, Tensor) else []
        if pl_module.automatic_optimization:
            # Lightning has divided each by `accumulate_grad_batches`. A step may have fewer batches, and some without a loss.
            losses = [*self._losses, *(each * trainer.accumulate_grad_batches for each in losses)]
        self._losses = losses
        if trainer.global_step != self._steps_done:
            self._steps_done = trainer.global_step
            self.probe.end_step(loss=torch.stack(losses).mean() if losses else None)
            self._losses = []
            trainer.should_stop |= self.probe.should_stop
            if self.probe.should_checkpoint:
                folder = Path(trainer.default_root_dir if self.out is None else self.out) / CHECKPOINTS
                trainer.save_checkpoint(folder / f"step-{self.probe.step:08d}.ckpt")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the duration of a validation."""
        self._validation_began = perf_counter()

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *rest: Any, **more: Any) -> None:
        """Read the phase from the module: `validation_step` can call any part of it."""
        if self._is_attached:
            self._watch.observe()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any, **more: Any) -> None:
        """End the micro-step of an evaluation batch."""
        self._end_evaluation_batch()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the losses of a validation between two steps."""
        logged = trainer.callback_metrics
        losses = {name[len("val_loss/") :]: logged[name] for name in logged if name.split("/")[0] == "val_loss"}
        known, self._validation_losses = self._validation_losses, losses
        # Lightning keeps the metrics of an earlier validation.
        if new := {name: loss for name, loss in losses.items() if loss is not known.get(name)}:
            self._write_losses(new, seconds=perf_counter() - self._validation_began)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach the hooks."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Detach the hooks and record the error."""
        self._detach(exception)


def _clipping(trainer: Trainer, module: LightningModule) -> str | None:
    """Return the setting with which Lightning clips gradients; None if it does not."""
    if is_overridden("configure_gradient_clipping", module):
        return "configure_gradient_clipping"
    return f"gradient_clip_val={trainer.gradient_clip_val}" if trainer.gradient_clip_val else None
