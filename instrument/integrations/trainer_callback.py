"""Base class of the trainer callbacks: attaches hooks while a trainer runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..capture.collectives import own_rank
from ..capture.phase_watch import PhaseWatch
from ..spec.spec_file import Specs
from .attach import attach
from .attached_probe import AttachedProbe


class TrainerCallbackBase:
    """Hook specs, the output folder, and the probe after attaching.

    Args:
        specs: The hooks, as for `instrument.attach`.
        out: Folder of the run. Default: rows are kept in memory.
        overwrite: Whether to replace the run in `out`, as for `instrument.attach`. Default: False.
        seed: Seed of interventions that draw random numbers.
        rules: The rules, as for `instrument.attach`. A rule with `then: stop` ends the training.
    """

    _watch: PhaseWatch  # while the hooks are attached

    def __init__(
        self,
        specs: Specs,
        *,
        out: str | Path | None = None,
        overwrite: bool = False,
        seed: int = 0,
        rules: Mapping[str, Any] | Literal["default"] | None = "default",
    ) -> None:
        self.specs = specs
        self.out = out
        self.overwrite = overwrite
        self.seed = seed
        self.rules = rules
        self._stack = ExitStack()
        self._probe: AttachedProbe | None = None

    @property
    def probe(self) -> AttachedProbe:
        """The probe of the current training, or of the last one.

        Raises:
            RuntimeError: Training has not started yet.
        """
        if self._probe is None:
            raise RuntimeError("no probe: training has not started yet")
        return self._probe

    @property
    def _is_attached(self) -> bool:
        return self._probe is not None and not self._probe.clock.closed

    def _attach(self, model: nn.Module, *, clipped_by: str | None, **more: Any) -> None:
        """Attach to the model until the exit stack is closed.

        Args:
            model: The model.
            clipped_by: The setting with which the trainer clips gradients; None if it does not.
            more: Further arguments of `instrument.attach`.
        """
        settings: dict[str, Any] = {"overwrite": self.overwrite, "seed": self.seed, "rules": self.rules, **more}
        context = attach(model, self.specs, out=self.out, steps_by_loop=True, **settings)
        self._probe = self._stack.enter_context(context)
        self._watch = self._probe.follow_model()
        if clipped_by is not None:
            self._report_clipping(self._probe, clipped_by)

    def _report_clipping(self, probe: AttachedProbe, clipped_by: str) -> None:
        """Write an event about the side of the clip at which hooks see gradients. Print it if there are such hooks."""
        message = (
            f"the trainer clips gradients ({clipped_by}). Hooks of kind parameter_grad and step_pre, and the rules that read "
            "them, see the gradients before the clip; kind step_post with role param_grad sees the clipped gradients"
        )
        probe.event("clipping", message, severity="info")
        specs = probe.plan.specs.values()
        if own_rank() == 0 and any(
            spec.tensor_role == "param_grad" and spec.definition.frequency == "step" for spec in specs
        ):
            print(f"instrument: {message}")

    def _end_evaluation_batch(self) -> None:
        """End the micro-step of an evaluation batch. Evaluations before and after the training are not recorded."""
        if self._is_attached and self.probe.phase == "eval":
            self.probe.end_micro_step()
