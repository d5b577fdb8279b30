"""Tensors recorded by earlier runs, for interventions that insert them into the current run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..actions.base import Archive, Context
from ..errors import ConfigError, Problem, similar_names
from ..formatting import shorten
from ..storage.run_search import NoRunError
from ..tables.kinds import KINDS
from .load import Run, load

_LIKE = ("layer", "role", "path", "call", "backward")  # location of a tensor in the model
_Source = tuple[str, str | None, int | None]  # folder of the run, hook, and step of a spec
_INDEX = ("step", "micro_step", "phase", "rank", "hook", *_LIKE, "placement", "scope", "shape", "source_shape")


class _Request(NamedTuple):
    """What a hook asks for: the tensor that was recorded at the same place as its own one. `like`: pairs of columns and values."""

    like: tuple[tuple[str, object], ...]
    has_samples: bool
    rank: int
    pinned: bool

    @classmethod
    def of(cls, context: Context, *, any_phase: bool, pinned: bool) -> _Request:
        kind = KINDS[context.kind]
        of_batch, of_phase = kind.frequency == "micro_step", not any_phase
        columns = ["micro_step"] * of_batch + ["phase"] * of_phase
        moment = context.moment._asdict()
        like = [(name, moment[name]) for name in columns] + [(name, getattr(context, name)) for name in _LIKE]
        return cls(tuple(like), kind.family == "module", context.rank, pinned)


class _Step(NamedTuple):
    number: int
    rows: pd.DataFrame
    tensors: dict[_Request, Tensor]


class TensorPlace(NamedTuple):
    """A place in the model where tensors are recorded: the columns of the table."""

    layer: str
    role: str
    path: str
    call: int


class RecordedSamples(NamedTuple):
    """The recorded values of samples."""

    values: Tensor  # [samples, ...], without dimensions of size 1 at the end
    rows: dict[int | str, int]  # the row of each sample, by its id


def _phases_at(step: _Step, place: _Request) -> str:
    """Return the end of a message: the hooks that recorded the tensor of a place in other phases; empty if none did."""
    rows = step.rows
    for column, value in place.like:
        rows = rows if column == "phase" else rows[rows[column] == value]
    hooks = [f"{hook!r} in phase {phase!r}" for hook, phase in sorted({*zip(rows["hook"], rows["phase"], strict=True)})]
    return f", but one of hook {', '.join(hooks)}; set 'hook' to use it" if hooks else ""


def _of_spec(problem: Problem, where: str) -> Problem:
    """Return a problem with the tensors of a run as one of the spec that uses them."""
    fields = {"layer": "layers", "call": "layers", "samples": "run", "phase": "hook"}
    fix = "set 'step' to one of them, or record each sample once" if problem.where == "step" else problem.fix
    message, key = f"in the other run, {problem.message}", fields.get(problem.where, problem.where)
    return replace(problem, message=message, where=f"{where}.{key}", fix=fix.replace("pass ", "set "))


class RunArchive(Archive):
    """Reads tensors from the folders of runs.

    For each run, recorded hook and fixed step of a spec, the tensors of the step that was requested last are kept. `shard` maps the samples
    of a batch to those of this process; None if this is unknown.
    """

    substitutes_samples = False  # whether others replace missing ones: a dry run uses batches of other steps

    def __init__(self, ranks: int = 1, shard: Callable[[range], range] | None = None) -> None:
        super().__init__()
        self.ranks = ranks
        self.shard = shard
        self._runs: dict[str, Run] = {}
        self._steps: dict[_Source, _Step] = {}
        self._samples: dict[tuple[Any, ...], RecordedSamples] = {}

    def open(self, run: str, hook: str | None, where: str, *, field: str = "run") -> None:
        """See `Archive.open`."""
        if run not in self._runs:
            try:
                earlier_run = load(Path(run))
            except NoRunError as error:
                raise ConfigError(Problem(f"{where}.{field}", str(error), run, "the folder of a run")) from None
            if earlier_run.folders != [earlier_run.path]:
                message = "this folder contains runs, but is not the folder of a run"
                allowed = shorten([str(folder) for folder in earlier_run.folders])
                raise ConfigError(Problem(f"{where}.{field}", message, run, allowed))
            self._runs[run] = earlier_run
        hooks = sorted(self._runs[run].read("tensors", ["hook"])["hook"].unique())
        if not hooks:
            message, fix = "this run has no recorded tensors", "set 'tensors: true' in a record hook"
            raise ConfigError(Problem(f"{where}.{field}", message, run, fix=fix))
        if hook is not None and hook not in hooks:
            message = "this run has no tensors recorded by this hook"
            raise ConfigError(Problem(f"{where}.hook", message, hook, hooks, similar_names(hook, hooks)))

    def index(self, run: str) -> pd.DataFrame:
        """Return the index of an opened run's tensors: step, micro_step, phase, rank, hook, location, scope and shapes."""
        return self._runs[run].read("tensors", [*_INDEX])

    def info_of(self, run: str) -> dict[str, Any]:
        """Return the content of run.json of an opened run."""
        return self._runs[run].info

    def tensors_at(self, run: str, hook: str | None, layer: str, context: Context, *, where: str) -> Iterator[Tensor]:
        """See `Archive.tensors_at`.

        The tensors of one step are in memory at a time. Those of all calls, micro-steps and phases are included.
        """
        rows = self.index(run)
        rows = rows[rows["hook"] == hook] if hook is not None else rows
        same_role = rows[(rows["role"] == context.role) & (rows["backward"] == 0)]
        matches = same_role[(same_role["layer"] == layer) & (same_role["path"] == context.path)]
        hooks = sorted(set(matches["hook"]))
        if not hooks:
            recorded = same_role.drop_duplicates(["layer", "path"])
            same_layer = recorded["layer"] == layer
            recorded = recorded[same_layer] if same_layer.any() else recorded
            layers = [str(name) or "." for name in recorded["layer"]]
            shapes = [[int(size) for size in shape] for shape in recorded["shape"]]
            located = [f"{name} {path}".strip() for name, path in zip(layers, recorded["path"], strict=True)]
            allowed = [f"{location} {shape}" for location, shape in zip(located, shapes, strict=True)][:20] or "none"
            path = f" and path {context.path!r}" if context.path or same_layer.any() else ""
            message = f"this run recorded no tensors of layer {layer or '.'!r} with role {context.role!r}{path}"
            similar = () if same_layer.any() else similar_names(layer, layers)
            target = "record this one" if same_layer.any() else "set 'layer' to a recorded layer, or record this one"
            raise ConfigError(Problem(where, message, run, allowed, similar, fix=f"{target} with 'tensors: true'"))
        if len(hooks) > 1:
            message = f"several hooks of this run recorded layer {layer or '.'!r}: {', '.join(hooks)}"
            raise ConfigError(Problem(where, message, run, fix="set 'hook'"))
        at = {"hook": hooks[0], "layer": layer, "role": context.role, "path": context.path, "backward": 0}
        for step in sorted(set(matches["step"])):
            for values in self._runs[run].tensors(step=int(step), **at)["values"]:
                yield torch.tensor(values)  # a copy, since the array is read-only

    def of_samples(self, run: str, hook: str | None, step: int | None, context: Context) -> Tensor:
        """See `Archive.of_samples`."""
        if context.ids is None:
            raise LookupError("the ids of the samples are unknown; call probe.batch(ids=ids) before each forward pass")
        place = TensorPlace(context.layer, context.role, context.path, context.call)
        recorded = self.by_sample(run, hook, step, place, f"hooks.{context.hook}")
        ids = context.ids.tolist() if isinstance(context.ids, Tensor) else context.ids
        missing = [name for name in ids if name not in recorded.rows]
        if missing and not self.substitutes_samples:
            raise LookupError(f"{run} has no values of sample {missing[0]!r} at layer {context.layer or '.'!r}")
        return recorded.values[[recorded.rows.get(name, 0) for name in ids]]

    def by_sample(
        self, run: str, hook: str | None, step: int | None, place: TensorPlace, where: str
    ) -> RecordedSamples:
        """Return all values that were recorded at a place, by sample. They are read once and stay in memory.

        Raise a ConfigError if the run has no tensors with samples at this place, or several of a sample.
        """
        key = (run, hook, step, place)
        if key not in self._samples:
            layer, role, path, call = place
            conditions: dict[str, Any] = {"hook": hook, "role": role, "path": path, "call": call, "step": step}
            try:
                features = self._runs[run].features(layer or ".", **conditions)
            except ConfigError as error:
                raise ConfigError(*(_of_spec(problem, where) for problem in error.problems)) from None
            rows = {name: row for row, name in enumerate(features.ids.tolist())}
            self._samples[key] = RecordedSamples(torch.from_numpy(features.X), rows)
        return self._samples[key]

    def find(self, run: str, hook: str | None, step: int | None, context: Context, *, pinned: bool = False) -> Tensor:
        """See `Archive.find`. Without a hook, the phase must be the same too.

        If the run has as many processes as the current one, this is the tensor of the same rank. Otherwise it is the
        full tensor assembled from all ranks, or the batch shard of this process.
        """
        place = _Request.of(context, any_phase=hook is not None, pinned=pinned)
        source, number = (run, hook, step), context.step if step is None else step
        current = self._steps.get(source)
        if current is None or current.number != number:
            of_hook = {} if hook is None else {"hook": hook}
            current = self._steps[source] = _Step(number, self._runs[run].tensors(step=number, **of_hook), {})
        if place not in current.tensors:
            current.tensors[place] = self._tensor(run, current, place)
        return current.tensors[place]

    def _tensor(self, run: str, step: _Step, place: _Request) -> Tensor:
        rows = step.rows
        for column, value in place.like:
            rows = rows[rows[column] == value]
        ranks: int = self._runs[run].info.get("ranks", 1)
        one_stands_for_all = rows["scope"].isin(["global", "averaged"]).all()
        are_shards = len(rows) > 0 and rows["scope"].eq("shard").all()  # interventions operate on the full tensor
        if ranks > 1 and not are_shards and (one_stands_for_all or ranks == self.ranks):
            rows = rows[rows["rank"] == (0 if one_stands_for_all else place.rank)]
        location = ", ".join(f"{column} {value!r}" for column, value in place.like if value or column != "backward")
        if rows.empty or rows["rank"].duplicated().any():
            if rows.empty:
                raise LookupError(f"{run} has no tensor of step {step.number} at {location}{_phases_at(step, place)}")
            hooks = sorted(set(rows["hook"]))
            count = f"{len(rows)} tensors (hooks {', '.join(hooks)})"
            fix = "; set 'hook'" if len(hooks) > 1 else ""
            raise LookupError(f"ambiguous: {run} has {count} of step {step.number} at {location}{fix}")
        if len(rows) > 1 and not are_shards and (self.ranks > 1 or not place.has_samples):
            counts = f"recorded by {ranks} processes; cannot be used with {self.ranks}"
            raise LookupError(f"{run}: the tensor of step {step.number} at {location} was {counts}")
        placement = rows["placement"].iloc[0] if are_shards else None
        match = re.fullmatch(r"shard\((\d+)\)", placement or "shard(0)")  # missing in runs of earlier versions
        if match is None:
            raise LookupError(f"the shards of the recorded tensor, placed {placement!r}, cannot be joined")
        values = np.concatenate([*rows.sort_values("rank")["values"]], axis=int(match[1]))
        if ranks == 1 and place.has_samples and self.shard is not None and values.ndim:
            samples = self.shard(range(len(values)))
            values = values[samples.start : samples.stop]
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if place.pinned else tensor
