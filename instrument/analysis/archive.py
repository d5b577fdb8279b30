"""The tensors of finished runs, for hooks that put them into this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..actions.base import Context
from ..errors import ConfigError, Mistake, nearest
from ..spec.kinds import KINDS
from .folders import NoRunError
from .load import Run, load

_LIKE = ("layer", "role", "path", "call", "backward")  # where a tensor is in the model
_INDEX = ("step", "micro_step", "rank", "hook", *_LIKE, "scope", "shape", "source_shape")


class RunArchive:
    """Finds tensors in runs' folders; those of the step that was asked for last are kept in memory.

    Args:
        ranks: How many processes train together here.
        share: Which samples of a batch are this one's; None where that is not known.
    """

    def __init__(self, ranks: int = 1, share: Callable[[range], range] | None = None) -> None:
        self.ranks = ranks
        self.share = share
        self._runs: dict[str, Run] = {}
        self._steps: dict[str, tuple[int, pd.DataFrame]] = {}

    def open(self, run: str, hook: str | None, where: str) -> None:
        """Make sure that there is such a run, with tensors of such a hook.

        Raises:
            ConfigError: There is none, or it holds no such tensors.
        """
        if run not in self._runs:
            try:
                self._runs[run] = load(Path(run))
            except NoRunError as error:
                raise ConfigError(Mistake(f"{where}.run", str(error), run, "the folder of a run")) from None
        hooks = sorted(self._runs[run].read("tensors", ["hook"])["hook"].unique())
        if not hooks:
            raise ConfigError(Mistake(f"{where}.run", "this run kept no tensors: record with 'tensors: true'", run))
        if hook is not None and hook not in hooks:
            problem = "this run kept no tensors of such a hook"
            raise ConfigError(Mistake(f"{where}.hook", problem, hook, hooks, nearest(hook, hooks)))

    def index(self, run: str) -> pd.DataFrame:
        """Which tensors a run that is open kept: step, micro_step, rank, hook, place in the model, scope and shapes."""
        return self._runs[run].read("tensors", [*_INDEX])

    def ranks_of(self, run: str) -> int:
        """How many processes made a run that is open."""
        ranks: int = self._runs[run].info.get("ranks", 1)
        return ranks

    def find(self, run: str, hook: str | None, step: int | None, context: Context) -> Tensor:
        """The tensor that was recorded at the layer, role, path and call of a context, of the same batch of the step.

        Of a run of as many processes it is this one's own; of any other, the whole that they had parts of, or this process's
        part of it.

        Raises:
            LookupError: There is none, or several; or parts that make no whole.
        """
        wanted = context.step if step is None else step
        kept = self._at_step(run, wanted)
        like = {column: getattr(context, column) for column in _LIKE}
        if KINDS[context.kind].rhythm == "micro_step":
            like = {"micro_step": context.moment.micro_step, **like}
        for column, value in like.items():
            kept = kept[kept[column] == value]
        if hook is not None:
            kept = kept[kept["hook"] == hook]
        ranks = self.ranks_of(run)
        one_stands_for_all = kept["scope"].isin(["global", "averaged"]).all()
        are_shards = len(kept) > 0 and kept["scope"].eq("shard").all()  # an intervention is made on the whole of them
        if ranks > 1 and not are_shards and (one_stands_for_all or ranks == self.ranks):
            kept = kept[kept["rank"] == (0 if one_stands_for_all else context.rank)]
        place = ", ".join(f"{column} {value!r}" for column, value in like.items() if value or column != "backward")
        if kept.empty or kept["rank"].duplicated().any():
            what = (
                "no tensor" if kept.empty else f"{len(kept)} tensors, by the hooks {', '.join(sorted(set(kept.hook)))}"
            )
            raise LookupError(f"{run} holds {what} of step {wanted} at {place}")
        of_samples = KINDS[context.kind].family == "module"
        if len(kept) > 1 and not are_shards and (self.ranks > 1 or not of_samples):
            several = f"{ranks} processes recorded tensors of step {wanted} at {place}, and here are {self.ranks}"
            raise LookupError(f"{several}: {run} has no whole one")
        values = np.concatenate([*kept.sort_values("rank")["values"]])
        if ranks == 1 and of_samples and self.share is not None and values.ndim:
            samples = self.share(range(len(values)))
            values = values[samples.start : samples.stop]
        return torch.from_numpy(values)

    def _at_step(self, run: str, step: int) -> pd.DataFrame:
        known = self._steps.get(run)
        if known is None or known[0] != step:
            known = self._steps[run] = (step, self._runs[run].tensors(step=step))
        return known[1]
