"""Tensors recorded by earlier runs, for interventions that insert them into the current run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..actions.base import Context
from ..errors import ConfigError, Problem, similar_names
from ..spec.kinds import KINDS
from .folders import NoRunError
from .load import load
from .run_tables import RunTables

_LIKE = ("layer", "role", "path", "call", "backward")  # location of a tensor in the model
_INDEX = ("step", "micro_step", "rank", "hook", *_LIKE, "scope", "shape", "source_shape")


class RunArchive:
    """Reads tensors from the folders of runs; caches those of the step that was requested last.

    Args:
        ranks: Number of processes of the current run.
        shard: Maps the samples of a batch to those of this process; None if this is unknown.
    """

    def __init__(self, ranks: int = 1, shard: Callable[[range], range] | None = None) -> None:
        self.ranks = ranks
        self.shard = shard
        self._runs: dict[str, RunTables] = {}
        self._steps: dict[str, tuple[int, pd.DataFrame]] = {}

    def open(self, run: str, hook: str | None, where: str) -> None:
        """Check that a run exists and has tensors of the hook.

        Args:
            run: Folder of the run.
            hook: Name of the hook; None for any hook.
            where: Configuration key for error messages.

        Raises:
            ConfigError: The run does not exist, or it has no tensors of this hook.
        """
        if run not in self._runs:
            try:
                self._runs[run] = load(Path(run))
            except NoRunError as error:
                raise ConfigError(Problem(f"{where}.run", str(error), run, "the folder of a run")) from None
        hooks = sorted(self._runs[run].read("tensors", ["hook"])["hook"].unique())
        if not hooks:
            raise ConfigError(
                Problem(
                    f"{where}.run", "this run has no recorded tensors", run, fix="set 'tensors: true' in a record hook"
                )
            )
        if hook is not None and hook not in hooks:
            message = "this run has no tensors recorded by this hook"
            raise ConfigError(Problem(f"{where}.hook", message, hook, hooks, similar_names(hook, hooks)))

    def index(self, run: str) -> pd.DataFrame:
        """Return the index of an opened run's tensors: step, micro_step, rank, hook, location, scope and shapes."""
        return self._runs[run].read("tensors", [*_INDEX])

    def ranks_of(self, run: str) -> int:
        """Return the number of processes of an opened run."""
        ranks: int = self._runs[run].info.get("ranks", 1)
        return ranks

    def find(self, run: str, hook: str | None, step: int | None, context: Context) -> Tensor:
        """Return the tensor that was recorded at the same layer, role, path and call as the context, for the same
        batch.

        If the run has as many processes as the current one, this is the tensor of the same rank. Otherwise it is the
        full tensor assembled from all ranks, or the batch shard of this process.

        Args:
            run: Folder of an opened run.
            hook: Name of the hook that recorded the tensor; None for any hook.
            step: The recorded step; None for the step of the context.
            context: The context of the hook.

        Raises:
            LookupError: No tensor or several tensors match, or the shards cannot be assembled.
        """
        recorded_step = context.step if step is None else step
        rows = self._at_step(run, recorded_step)
        like = {column: getattr(context, column) for column in _LIKE}
        if KINDS[context.kind].frequency == "micro_step":
            like = {"micro_step": context.moment.micro_step, **like}
        for column, value in like.items():
            rows = rows[rows[column] == value]
        if hook is not None:
            rows = rows[rows["hook"] == hook]
        ranks = self.ranks_of(run)
        one_stands_for_all = rows["scope"].isin(["global", "averaged"]).all()
        are_shards = len(rows) > 0 and rows["scope"].eq("shard").all()  # interventions operate on the full tensor
        if ranks > 1 and not are_shards and (one_stands_for_all or ranks == self.ranks):
            rows = rows[rows["rank"] == (0 if one_stands_for_all else context.rank)]
        location = ", ".join(f"{column} {value!r}" for column, value in like.items() if value or column != "backward")
        if rows.empty or rows["rank"].duplicated().any():
            if rows.empty:
                raise LookupError(f"{run} has no tensor of step {recorded_step} at {location}")
            hooks = sorted(set(rows["hook"]))
            count = f"{len(rows)} tensors (hooks {', '.join(hooks)})"
            fix = "; set 'hook'" if len(hooks) > 1 else ""
            raise LookupError(f"ambiguous: {run} has {count} of step {recorded_step} at {location}{fix}")
        of_samples = KINDS[context.kind].family == "module"
        if len(rows) > 1 and not are_shards and (self.ranks > 1 or not of_samples):
            counts = f"recorded by {ranks} processes; cannot be used with {self.ranks}"
            raise LookupError(f"{run}: the tensor of step {recorded_step} at {location} was {counts}")
        values = np.concatenate([*rows.sort_values("rank")["values"]])
        if ranks == 1 and of_samples and self.shard is not None and values.ndim:
            samples = self.shard(range(len(values)))
            values = values[samples.start : samples.stop]
        return torch.from_numpy(values)

    def _at_step(self, run: str, step: int) -> pd.DataFrame:
        cached = self._steps.get(run)
        if cached is None or cached[0] != step:
            cached = self._steps[run] = (step, self._runs[run].tensors(step=step))
        return cached[1]
