"""Checks before a run that specs fit the shapes of all its batches.

The checks cover slices, factors, and the tensors of other runs that the actions `replace` and `patch` use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import pandas as pd

from ..actions.builtin.recorded import RecordedSpec
from ..analysis.tensors_of_earlier_runs import Place, RunArchive
from ..errors import ConfigError, Problem, similar_names
from ..formatting import shorten
from ..plan.cost import Length, firings_of
from ..plan.dimension_checks import misfits_in_smaller_batches, selected_shape_at, tensors_at
from ..plan.hook_plan import HookPlan, Site
from ..plan.shape_inference import InferredCalls
from ..spec.hooks import HookSpec
from ..spec.schedule import STEP_PHASES
from ..spec.selection import SelectionError

Shape = tuple[int, ...]
ONCE = 0  # The micro-batch index of kinds that act once per step.


@dataclass(frozen=True)
class PhaseBatches:
    """The batches of a phase.

    Attributes:
        inferred: The result of shape inference on the first batch.
        samples: The number of samples in the first batch of this process.
        sizes: Called with a step; returns the number of samples in each of its batches, over all processes.
        ids: Called with steps; returns the dataset indices of their samples, over all processes. None if they are unknown.
        split: The split of the dataset; None if it has none.
    """

    inferred: InferredCalls
    samples: int
    sizes: Callable[[int], Sequence[int]]
    ids: Callable[[Collection[int]], set[int] | None]
    split: str | None


class TensorLocation(Place):
    """The location of a tensor in the model, with a text for messages."""

    def __str__(self) -> str:
        named = repr(self.layer or ".") + (f" {self.path}" if self.path else "")
        return named + (f" (call {self.call})" if self.call else "")


class TensorOfOtherRun(NamedTuple):
    """A tensor that another run recorded.

    Attributes:
        hook: The hook that recorded it.
        shape: The recorded shape; None for a shard.
        source: The shape of the tensor before slicing; None for a shard.
    """

    hook: str
    shape: Shape | None
    source: Shape | None


def check_batch_shapes(
    plan: HookPlan, archive: RunArchive, batches_by_phase: Mapping[str, PhaseBatches], length: Length
) -> None:
    """Check that slices fit all batches, and that `replace` and `patch` find tensors of matching shape.

    Args:
        plan: The plan of the hooks.
        archive: Reads the recorded tensors of other runs.
        batches_by_phase: The batches of each phase.
        length: The length of the run.

    Raises:
        ConfigError: With the first problem of each spec, and the allowed values.
    """

    def smallest_batch(spec: HookSpec) -> int:
        """Return the number of samples in the smallest batch of this process at the scheduled steps of a spec."""
        steps = firings_of(spec, length).steps
        if spec.phase in STEP_PHASES:  # The batch sizes are the same in every epoch.
            steps = sorted({step % length.epoch_steps for step in steps})
        batches = batches_by_phase[spec.phase]
        sizes = [size for step in steps for size in batches.sizes(step)]
        return min(sizes) // archive.ranks if sizes else batches.samples

    inferred_by_phase = {phase: batches.inferred for phase, batches in batches_by_phase.items()}
    samples = {phase: batches.samples for phase, batches in batches_by_phase.items()}
    problems = misfits_in_smaller_batches(plan, inferred_by_phase, samples, smallest_batch)
    for name, spec in plan.specs.items():
        if not isinstance(spec, RecordedSpec) or spec.run is None or spec.definition.frequency == "occasion":
            continue
        archive.open(spec.run, spec.hook, f"hooks.{name}")
        batches, due = batches_by_phase[spec.phase], firings_of(spec, length).steps
        tensors = {
            TensorLocation(site.layer.name, spec.tensor_role, info.path, call): (site, info.shape)
            for site in plan.of(name)
            for call, info in tensors_at(site, batches.inferred)
            if info.dtype.is_floating_point
        }
        if spec.match == "id":
            found = _sample_problems(spec, archive, tensors, batches, due)
        else:
            rows = _recorded_rows(spec, archive)
            usable = rows if spec.hook is not None else rows[rows["phase"] == spec.phase]
            recorded, hooks = _recorded_tensors(spec, usable), _recording_hooks(rows)
            accumulate = archive.accumulate_of(spec.run)
            found = _RecordingCheck(spec, tensors, batches, recorded, hooks, accumulate).problems(due)
        problems += islice(found, 1)
    if problems:
        raise ConfigError(*problems)


def _sample_problems(
    spec: RecordedSpec,
    archive: RunArchive,
    tensors: Mapping[TensorLocation, tuple[Site, Shape]],
    batches: PhaseBatches,
    due: Collection[int],
) -> Iterator[Problem]:
    """Yield the problems of a spec with `match: id`: unknown or missing samples, and values of another shape.

    Args:
        spec: The spec.
        archive: Reads the recorded tensors of other runs.
        tensors: The tensors that the spec changes: their sites, and their shapes in shape inference.
        batches: The batches of the phase of the spec.
        due: The steps at which the spec is scheduled.
    """
    assert spec.run is not None, "required by match"
    where = f"hooks.{spec.name}"
    needed = batches.ids(due)
    rows = _recorded_rows(spec, archive)
    phases = rows["phase"][rows["layer"].isin({location.layer for location in tensors})].unique()
    splits = {archive.split_of(spec.run, phase) for phase in phases}
    if spec.hook is None and splits and batches.split and splits.isdisjoint({batches.split, None}):
        recorded_splits = " and ".join(sorted(filter(None, splits)))
        message = f"the other run recorded samples of the split {recorded_splits}, but phase {spec.phase} has samples of {batches.split}"
        fix = f"record samples of the split {batches.split}, or set 'hook' if equal ids are the same samples"
        yield Problem(f"{where}.match", message, "id", fix=fix)
        return
    missing_tensors: list[Problem] = []
    for location, (site, shape) in tensors.items():
        if shape[:1] != (batches.samples,):
            message = f"dimension 0 of {location} does not contain the {batches.samples} samples of a batch: shape {list(shape)}"
            yield Problem(f"{where}.match", message, given="id", fix="remove 'match'")
            return
        try:
            recorded = archive.by_sample(spec.run, spec.hook, spec.step, location, where)
        except ConfigError as error:
            missing_tensors += error.problems[:1]
            continue
        if missing := sorted((needed or set()) - recorded.rows.keys()):
            message = f"the other run has no values of {len(missing)} of the {len(needed or ())} samples at {location}"
            ids = shorten([*map(str, missing)], 6)
            allowed = f"the {len(recorded.rows)} recorded samples"
            fix = f"record the samples with the dataset indices {ids}, or change data.slice or the schedule of the hook"
            yield Problem(f"{where}.run", message, spec.run, allowed, fix=fix)
        part = selected_shape_at(site, shape)
        shapes = [shape, part] if part[:1] == shape[:1] else [shape]
        if _without_ones(tuple(recorded.values.shape)) not in map(_without_ones, shapes):
            message = f"{location} was recorded with shape {['samples', *recorded.values.shape[1:]]}"
            message += f" per sample, but has shape {list(shape)} in this run"
            yield Problem(f"{where}.run", message, spec.run)
    # For gradients, missing tensors are allowed: not every tensor gets a gradient in both runs.
    if not spec.definition.gradient or len(missing_tensors) == len(tensors):
        yield from missing_tensors


def _without_ones(shape: Shape) -> Shape:
    """Return the shape of one sample without dimensions of size 1 at the end."""
    sizes = shape[1:]
    while sizes and sizes[-1] == 1:
        sizes = sizes[:-1]
    return sizes


def _recorded_rows(spec: RecordedSpec, archive: RunArchive) -> pd.DataFrame:
    """Return the rows of the recorded tensors that a spec may refer to, in any phase."""
    assert spec.run is not None, "only tensors of another run are looked up"
    rows = archive.index(spec.run)
    rows = rows[(rows["role"] == spec.tensor_role) & (rows["backward"] == 0)]
    return rows if spec.hook is None else rows[rows["hook"] == spec.hook]


def _recording_hooks(rows: pd.DataFrame) -> dict[TensorLocation, list[str]]:
    """Return the hooks that recorded each location, with their phases."""
    hooks: dict[TensorLocation, list[str]] = {}
    for *location, hook, phase in rows[[*Place._fields, "hook", "phase"]].drop_duplicates().to_numpy():
        hooks.setdefault(TensorLocation(*location), []).append(f"{hook} (phase {phase})")
    return hooks


def _recorded_tensors(
    spec: RecordedSpec, rows: pd.DataFrame
) -> dict[TensorLocation, dict[tuple[int, int], list[TensorOfOtherRun]]]:
    """Return the tensors of rows that a spec uses: by location, then by (step, micro-batch)."""
    recorded: dict[TensorLocation, dict[tuple[int, int], list[TensorOfOtherRun]]] = {}
    for row in rows.sort_values("rank", kind="stable").to_dict("records"):
        batch = row["micro_step"] if spec.definition.frequency == "micro_step" else ONCE
        by_step = recorded.setdefault(TensorLocation(*(row[name] for name in Place._fields)), {})
        tensors = by_step.setdefault((row["step"], batch), [])
        is_shard = row["scope"] == "shard"
        shape, source = (None if is_shard else tuple(map(int, row[column])) for column in ("shape", "source_shape"))
        if not tensors or tensors[-1].hook != row["hook"]:
            tensors.append(TensorOfOtherRun(row["hook"], shape, source))
        elif spec.definition.family == "module" and row["scope"] == "local":  # The batch shard of another process.
            tensors[-1] = TensorOfOtherRun(
                row["hook"], _concatenated(tensors[-1].shape, shape), _concatenated(tensors[-1].source, source)
            )
    return recorded


def _concatenated(first: Shape | None, second: Shape | None) -> Shape | None:
    """Return the shape of two batch shards, concatenated along dimension 0; None if one shape is unknown."""
    return (first[0] + second[0], *first[1:]) if first and second else first


@dataclass(frozen=True)
class _RecordingCheck:
    """The tensors that one spec needs, and the recorded tensors.

    Attributes:
        spec: The spec.
        tensors: The tensors that the spec changes: their sites, and their shapes in shape inference.
        batches: The batches of the phase of the spec.
        recorded: The recorded tensors that the spec may refer to: those of its hook, or of its phase.
        hooks: The hooks that recorded each location in any phase, with their phases.
        accumulate: The number of batches of each training step of the other run; 0 if it is unknown.
        fitting: The combinations of location, batch size and recorded shape that are known to fit.
    """

    spec: RecordedSpec
    tensors: Mapping[TensorLocation, tuple[Site, Shape]]
    batches: PhaseBatches
    recorded: Mapping[TensorLocation, Mapping[tuple[int, int], list[TensorOfOtherRun]]]
    hooks: Mapping[TensorLocation, Sequence[str]]
    accumulate: int
    fitting: set[tuple[TensorLocation, int, Shape]] = field(default_factory=set)

    @property
    def where(self) -> str:
        """The key of the spec."""
        return f"hooks.{self.spec.name}"

    def problems(self, due: Collection[int]) -> Iterator[Problem]:
        """Yield the tensors that are missing, ambiguous or of the wrong shape.

        Args:
            due: The steps at which the spec is scheduled.
        """
        if not due or not self.tensors:
            return
        missing = [location for location in self.tensors if location not in self.recorded]
        # For gradients, missing tensors are allowed: not every tensor gets a gradient in both runs.
        if missing and (not self.spec.definition.gradient or len(missing) == len(self.tensors)):
            if elsewhere := [location for location in missing if location in self.hooks]:
                yield self._phase_problem(elsewhere)
                return
            message = f"the other run recorded no tensors with role {self.spec.tensor_role!r} at {shorten([*map(str, missing)])}"
            names = sorted(map(str, self.recorded))
            shapes = {
                str(location): next(iter(tensors.values()))[0].shape for location, tensors in self.recorded.items()
            }
            allowed = shorten([f"{name} {list(shapes[name] or ())}" for name in names]) or "none"
            similar = similar_names(str(missing[0]), names)
            yield Problem(f"{self.where}.layers", message, list(self.spec.globs), allowed, similar)
            return
        steps = {step for tensors in self.recorded.values() for step, _ in tensors}
        if missing_steps := sorted({self._source_step(step) for step in due} - steps):
            message = f"the other run recorded no tensors at step {shorten([*map(str, missing_steps)], 6)}"
            allowed = f"one of {shorten([*map(str, sorted(steps))])}"
            fix = "set 'step', or a schedule of these steps only (steps, every, start, stop)"
            yield Problem(f"{self.where}.step", message, self.spec.step, allowed, fix=fix)
            return
        per_batch = self.spec.definition.frequency == "micro_step"
        checked: set[tuple[int, tuple[int, ...]]] = set()  # Steps of the other run, and batch sizes of this run.
        for step in due:
            sizes = tuple(self.batches.sizes(step)) if per_batch else (0,)
            if (self._source_step(step), sizes) not in checked:
                checked.add((self._source_step(step), sizes))
                for location in self.tensors:
                    if location in self.recorded:
                        yield from self._tensor_problems(location, step, sizes)

    def _phase_problem(self, locations: Sequence[TensorLocation]) -> Problem:
        """Return the problem that locations were recorded in other phases only."""
        phase = self.spec.phase
        message = f"the other run recorded no tensors in phase {phase} at {shorten([*map(str, locations)])}"
        hooks = sorted({hook for location in locations for hook in self.hooks[location]})
        fix = f"record them in phase {phase}, or set 'hook' to use those of another phase"
        return Problem(f"{self.where}.hook", message, self.spec.hook, hooks, fix=fix)

    def _source_step(self, step: int) -> int:
        """Return the step of the other run whose tensor is used at a step of this run."""
        return step if self.spec.step is None else self.spec.step

    def _tensor_problems(self, location: TensorLocation, step: int, sizes: Sequence[int]) -> Iterator[Problem]:
        """Yield the problems of one tensor in the batches of one step."""
        if self._has_fewer_batches(location, step, len(sizes)):
            yield self._batch_problem(location, step)
            return
        for batch, size in enumerate(sizes):
            tensors = self.recorded[location].get((self._source_step(step), batch), [])
            if not tensors:
                yield self._batch_problem(location, step)
            elif len(tensors) > 1:
                message = f"several hooks of the other run recorded {location} at step {self._source_step(step)}"
                yield Problem(f"{self.where}.hook", message, self.spec.hook, [tensor.hook for tensor in tensors])
            elif (shape := tensors[0].shape) is not None and (location, size, shape) not in self.fitting:
                if problems := [*self._shape_problems(location, step, tensors[0], size)]:
                    yield from problems
                else:
                    self.fitting.add((location, size, shape))

    def _has_fewer_batches(self, location: TensorLocation, step: int, count: int) -> bool:
        """Return whether a step of this run accumulates fewer batches, so that later steps have other samples.

        The passes of an optimizer with a closure are recorded as further micro-steps, but are not further batches.
        """
        is_by_step = self.spec.step is None and self.spec.phase in STEP_PHASES
        is_by_batch = self.spec.definition.frequency == "micro_step"
        more = self.accumulate > count and (step, count) in self.recorded[location]
        return is_by_step and is_by_batch and more

    def _shape_problems(
        self, location: TensorLocation, step: int, tensor: TensorOfOtherRun, size: int
    ) -> Iterator[Problem]:
        """Yield a problem if a recorded tensor does not fit a batch of `size` samples.

        Tensors at parameters do not depend on the batch size.
        """
        site, shape = self.tensors[location]
        samples, size = (self.batches.samples, size) if self.spec.definition.family == "module" else (1, 1)
        here = _scaled(shape, samples, size)
        assert tensor.shape is not None, "shards are not checked"
        try:
            part = selected_shape_at(site, here)
        except SelectionError as error:
            message = f"{error} {location}, a tensor of shape {list(here)}"
            yield Problem(f"{self.where}.{error.field}", message, attrgetter(error.field)(self.spec), error.allowed)
            return
        if tensor.shape == part or _fits(tensor.shape, shape, samples, size):
            return
        if shape[:1] == (samples,) and tensor.source is not None and tensor.source[:1] != here[:1]:
            yield self._batch_problem(location, step)
        else:
            message = f"{location} was recorded with shape {list(tensor.shape)}, but has shape {list(here)} in this run"
            yield Problem(f"{self.where}.run", message, self.spec.run)

    def _batch_problem(self, location: TensorLocation, step: int) -> Problem:
        """Return the problem that the batches of a step differ between the runs."""
        scales = self.spec.definition.family == "module" and self.tensors[location][1][:1] == (self.batches.samples,)
        source = self._source_step(step)
        of_step = sorted((batch, each) for (at, batch), each in self.recorded[location].items() if at == source)
        sources = [tensors[0].source for _, tensors in of_step]
        message = (
            f"{location} was recorded in {_batches([shape[0] if shape and scales else None for shape in sources])} at step "
            f"{source}, but this run has {_batches(self.batches.sizes(step))}"
        )
        fix = "use the batches of the other run, or a schedule (steps, every, start, stop) of steps that have the same ones"
        return Problem(f"{self.where}.run", message, self.spec.run, fix=fix)


def _scaled(shape: Shape, samples: int, size: int) -> Shape:
    """Return the expected shape in a batch of `size` samples, given the shape in a batch of `samples` samples.

    Dimension 0 scales with the batch if it is a multiple of the number of samples.
    """
    return (shape[0] // samples * size, *shape[1:]) if shape and shape[0] % samples == 0 else shape


def _fits(recorded: Shape, shape: Shape, samples: int, size: int) -> bool:
    """Return whether a recorded shape is possible in a batch of `size` samples.

    If dimension 0 of `shape` is the number of samples, it must scale with the batch. Other dimensions may scale with
    the batch or stay the same. If dimension 0 is not a multiple of the number of samples, it may depend on the data and
    is not compared.

    Args:
        recorded: The recorded shape.
        shape: The shape in a batch of `samples` samples.
        samples: The number of samples in shape inference.
        size: The number of samples in the batch.
    """

    def scales(recorded_size: int, trial_size: int) -> bool:
        """Return whether a dimension scales with the number of samples."""
        return recorded_size * samples == trial_size * size

    if len(recorded) != len(shape):
        return False
    if shape and shape[0] == samples and not scales(recorded[0], shape[0]):
        return False
    is_free = bool(shape) and shape[0] % samples != 0
    pairs = list(zip(recorded, shape, strict=True))[is_free:]
    return all(old == new or scales(old, new) for old, new in pairs)


def _batches(sizes: Sequence[int | None]) -> str:
    """Describe the number of batches and their sizes."""
    many = f"{len(sizes)} {'batch' if len(sizes) == 1 else 'batches'}"
    return many if None in sizes or not sizes else f"{many} of {shorten([*map(str, sizes)], 6)} samples"
