"""A callback for Lightning's Trainer."""

# ruff: noqa: ARG002 - Lightning calls the hooks with more than each of them needs

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer

from .attachment import Attachment


class LightningCallback(Attachment, Callback):
    """Attaches hook specs while `trainer.fit` runs.

    Layers are named from the LightningModule on: `net.layer1`, where it keeps the network as `self.net`. Lightning
    gives the forward and backward pass to the optimizer as a closure, so parameter_grad and step_pre act at
    `on_before_optimizer_step`: after accumulation and unscaling, and before Lightning's own gradient clipping; what
    that leaves is to be seen at step_post with role param_grad. In the sanity check before training nothing is due.

    A module may have several optimizers (manual optimization): each parameter belongs to the one that holds it. A step is
    a training batch in which any of them made a step, and each backward pass is a micro-step of it.

    Args:
        specs: As for `instrument.attach`.
        out: The folder of the run; in memory without it.
        seed: The seed of what interventions draw at random.
    """

    _steps_done = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach."""
        self._attach(
            pl_module,
            optimizer=trainer.optimizers,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            steps_by_loop=True,
        )
        self._steps_done = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the epoch."""
        self.probe.epoch = trainer.current_epoch

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A micro-batch's gradients are there."""
        self.probe.end_micro_step()

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: Optimizer,
    ) -> None:
        """An optimizer is about to use the gradients."""
        several = len(self.probe.optimizers) > 1  # a strategy may have wrapped a single one
        self.probe.before_optimizer_step(optimizer if several else None)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """A step has ended, where the optimizer made one."""
        if trainer.global_step != self._steps_done:
            self._steps_done = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self.probe.end_step(loss=loss if isinstance(loss, Tensor) else None)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An evaluation, or the trial of one."""
        self._phase("sanity" if trainer.sanity_checking else "eval")

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any, **more: Any) -> None:
        """A batch of an evaluation has ended."""
        if self._probe is not None:
            self._probe.end_micro_step()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The evaluation is over."""
        self._phase("train")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach."""
        self._stack.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Detach, and write down what happened."""
        self._stack.__exit__(type(exception), exception, exception.__traceback__)

    def _phase(self, phase: str) -> None:
        if self._probe is not None:  # `trainer.validate` runs without a fit
            self._probe.phase = phase
