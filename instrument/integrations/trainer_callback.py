"""Base class of the trainer callbacks: attaches hooks while a trainer runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..spec.spec_file import Specs
from .attach import attach
from .attached_probe import AttachedProbe


class TrainerCallbackBase:
    """Hook specs, the output folder, and the probe after attaching.

    Args:
        specs: The hooks, as for `instrument.attach`.
        out: Folder of the run. Default: rows are kept in memory.
        seed: Seed of interventions that draw random numbers.
        rules: The rules, as for `instrument.attach`. A rule with `then: stop` ends the training.
    """

    def __init__(
        self,
        specs: Specs,
        *,
        out: str | Path | None = None,
        seed: int = 0,
        rules: Mapping[str, Any] | Literal["default"] | None = "default",
    ) -> None:
        self.specs = specs
        self.out = out
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

    def _attach(self, model: nn.Module, **more: Any) -> None:
        """Attach to the model until the exit stack is closed; other arguments are passed to `instrument.attach`."""
        context = attach(model, self.specs, out=self.out, seed=self.seed, rules=self.rules, **more)
        self._probe = self._stack.enter_context(context)
