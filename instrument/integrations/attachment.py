"""What the callbacks of all trainers have in common: hooks that are attached while a trainer runs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from ..capture.probe import Probe
from ..run.attach import Specs, attach


class Attachment:
    """Specs, where their rows go, and the probe once they are attached.

    Args:
        specs: As for `instrument.attach`.
        out: The folder of the run; in memory without it.
        seed: The seed of what interventions draw at random.
    """

    def __init__(self, specs: Specs, *, out: str | Path | None = None, seed: int = 0) -> None:
        self.specs = specs
        self.out = out
        self.seed = seed
        self._stack = ExitStack()
        self._probe: Probe | None = None

    @property
    def probe(self) -> Probe:
        """The probe of the training that is running, or of the last one.

        Raises:
            RuntimeError: There was none yet.
        """
        if self._probe is None:
            raise RuntimeError("nothing is attached before the trainer trains")
        return self._probe

    def _attach(self, model: nn.Module, **more: Any) -> None:
        """Attach, until the stack is closed; what is given beside the model is as for `instrument.attach`."""
        context = attach(model, self.specs, out=self.out, seed=self.seed, **more)
        self._probe = self._stack.enter_context(context)
