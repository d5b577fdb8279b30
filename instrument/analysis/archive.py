"""The tensors of finished runs, for hooks that put them into this one."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from ..actions.base import Context
from ..errors import ConfigError, Mistake
from .load import NoRunError, Run, load

_LIKE = ("layer", "role", "path", "call")  # what the place of a tensor in a model is told by


class RunArchive:
    """Finds tensors in runs' folders; those of the step that was asked for last are kept in memory."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self._steps: dict[str, tuple[int, pd.DataFrame]] = {}

    def open(self, run: str, where: str) -> None:
        """Make sure that there is such a run.

        Raises:
            ConfigError: There is none, or it holds no tensors.
        """
        try:
            self._runs[run] = load(Path(run))
        except NoRunError as error:
            raise ConfigError(Mistake(where, str(error), written=run, allowed="the folder of a run")) from None
        if self._runs[run].read("tensors", ["hook"]).empty:
            raise ConfigError(Mistake(where, "this run kept no tensors: record with 'tensors: true'", written=run))

    def find(self, run: str, hook: str | None, step: int | None, context: Context) -> Tensor:
        """The tensor that was recorded at the layer, role, path and call of a context.

        Raises:
            LookupError: There is none, or several.
        """
        wanted = context.step if step is None else step
        kept = self._at_step(run, wanted)
        for column in _LIKE:
            kept = kept[kept[column] == getattr(context, column)]
        if hook is not None:
            kept = kept[kept["hook"] == hook]
        if len(kept) != 1:
            what = (
                "no tensor" if kept.empty else f"{len(kept)} tensors, by the hooks {', '.join(sorted(set(kept.hook)))}"
            )
            place = ", ".join(f"{column} {getattr(context, column)!r}" for column in _LIKE)
            raise LookupError(f"{run} holds {what} of step {wanted} at {place}")
        return torch.from_numpy(kept["values"].iloc[0].copy())

    def _at_step(self, run: str, step: int) -> pd.DataFrame:
        known = self._steps.get(run)
        if known is None or known[0] != step:
            known = self._steps[run] = (step, self._runs[run].tensors(step=step))
        return known[1]
