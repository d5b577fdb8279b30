"""Checks before a run that specs fit the shapes of all its batches.

The checks cover slices, factors, and the tensors of other runs that the actions `replace` and `patch` use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..analysis.archive import RunArchive
from ..errors import ConfigError, Mistake
from ..plan.cost import Length, firings_of
from ..plan.dimension_checks import misfits_in_smaller, tensors_at
from ..plan.layer_selection import some
from ..plan.shape_inference import Trial
from ..plan.sites import HookPlan
from ..spec.base import parse_slice
from ..spec.functions import RecordedSpec
from ..spec.hooks import HookSpec

Shape = tuple[int, ...]
ONCE = 0  # The micro-batch index of kinds that act once per step.


@dataclass(frozen=True)
class Tried:
    """The batches of a phase.

    Attributes:
        trial: The result of shape inference on the first batch.
        samples: The number of samples in the first batch of this process.
        sizes: Called with a step; returns the number of samples in each of its batches, over all processes.
    """

    trial: Trial
    samples: int
    sizes: Callable[[int], Sequence[int]]


class Place(NamedTuple):
    """The location of a tensor in the model.

    Attributes:
        layer: The name of the module.
        path: The path of the tensor in nested inputs or outputs; empty for a single tensor.
        call: The index of the call of the module within one forward pass, from 0.
    """

    layer: str
    path: str
    call: int

    def __str__(self) -> str:
        named = repr(self.layer or ".") + (f" {self.path}" if self.path else "")
        return named + (f" (call {self.call})" if self.call else "")


class Kept(NamedTuple):
    """A tensor that another run recorded.

    Attributes:
        hook: The hook that recorded it.
        shape: The recorded shape; None for a shard.
        source: The shape of the tensor before slicing; None for a shard.
    """

    hook: str
    shape: Shape | None
    source: Shape | None


def refuse_unfit_recordings(plan: HookPlan, archive: RunArchive, tried: Mapping[str, Tried], length: Length) -> None:
    """Check that slices fit all batches, and that `replace` and `patch` find tensors of matching shape.

    Args:
        plan: The plan of the hooks.
        archive: Reads the recorded tensors of other runs.
        tried: The batches of each phase.
        length: The length of the run.

    Raises:
        ConfigError: With the first problem of each spec, and the allowed values.
    """

    def smallest(spec: HookSpec) -> int:
        """Return the number of samples in the smallest batch of this process at the scheduled steps of a spec."""
        steps = firings_of(spec, length).steps
        if spec.phase == "train":  # The batch sizes are the same in every epoch.
            steps = sorted({step % length.epoch_steps for step in steps})
        batches = tried[spec.phase]
        sizes = [size for step in steps for size in batches.sizes(step)]
        return min(sizes) // archive.ranks if sizes else batches.samples

    trials = {phase: batches.trial for phase, batches in tried.items()}
    samples = {phase: batches.samples for phase, batches in tried.items()}
    mistakes = misfits_in_smaller(plan, trials, samples, smallest)
    for name, spec in plan.specs.items():
        if isinstance(spec, RecordedSpec) and spec.definition.rhythm != "occasion":
            archive.open(spec.run, spec.hook, f"hooks.{name}")
            shapes = {
                Place(site.layer.name, info.path, call): info.shape
                for site in plan.of(name)
                for call, info in tensors_at(site, tried[spec.phase].trial)
                if info.dtype.is_floating_point
            }
            check = _Check(spec, shapes, tried[spec.phase], _kept(spec, archive))
            mistakes += [problem for problem in [next(check.problems(firings_of(spec, length).steps), None)] if problem]
    if mistakes:
        raise ConfigError(*mistakes)


def _kept(spec: RecordedSpec, archive: RunArchive) -> dict[Place, dict[tuple[int, int], list[Kept]]]:
    """Return the recorded tensors that a spec may refer to: by location, then by (step, micro-batch)."""
    rows = archive.index(spec.run)
    rows = rows[(rows["role"] == spec.tensor_role) & (rows["backward"] == 0)]
    if spec.hook is not None:
        rows = rows[rows["hook"] == spec.hook]
    kept: dict[Place, dict[tuple[int, int], list[Kept]]] = {}
    for row in rows.sort_values("rank", kind="stable").to_dict("records"):
        batch = row["micro_step"] if spec.definition.rhythm == "micro_step" else ONCE
        at_place = kept.setdefault(Place(row["layer"], row["path"], row["call"]), {})
        there = at_place.setdefault((row["step"], batch), [])
        is_shard = row["scope"] == "shard"
        shape, source = (None if is_shard else tuple(map(int, row[column])) for column in ("shape", "source_shape"))
        if not there or there[-1].hook != row["hook"]:
            there.append(Kept(row["hook"], shape, source))
        elif spec.definition.family == "module" and row["scope"] == "local":  # The batch shard of another process.
            there[-1] = Kept(row["hook"], _joined(there[-1].shape, shape), _joined(there[-1].source, source))
    return kept


def _joined(one: Shape | None, other: Shape | None) -> Shape | None:
    """Return the shape of two batch shards, concatenated along dimension 0; None if one shape is unknown."""
    return (one[0] + other[0], *one[1:]) if one and other else one


@dataclass(frozen=True)
class _Check:
    """The tensors that one spec needs, and the recorded tensors.

    Attributes:
        spec: The spec.
        shapes: The tensors that the spec changes, with their shapes in shape inference.
        tried: The batches of the phase of the spec.
        kept: The recorded tensors that the spec may refer to.
        fitting: The combinations of location, batch size and recorded shape that are known to fit.
    """

    spec: RecordedSpec
    shapes: Mapping[Place, Shape]
    tried: Tried
    kept: Mapping[Place, Mapping[tuple[int, int], list[Kept]]]
    fitting: set[tuple[Place, int, Shape]] = field(default_factory=set)

    def problems(self, due: Collection[int]) -> Iterator[Mistake]:
        """Yield the tensors that are missing, ambiguous or of the wrong shape.

        Args:
            due: The steps at which the spec is scheduled.
        """
        if not due or not self.shapes:
            return
        missing = [place for place in self.shapes if place not in self.kept]
        # For gradients, missing tensors are allowed: not every tensor gets a gradient in both runs.
        if missing and (not self.spec.definition.gradient or len(missing) == len(self.shapes)):
            problem = f"that run kept no tensors with role {self.spec.tensor_role!r} of {some([*map(str, missing)])}"
            yield self._mistake("layers", problem, list(self.spec.globs), some(sorted(map(str, self.kept))) or "none")
            return
        steps = {step for there in self.kept.values() for step, _ in there}
        if lacking := sorted({self._from(step) for step in due} - steps):
            problem = f"that run kept no tensors of step {some([*map(str, lacking)], 6)}"
            allowed = (
                f"one of {some([*map(str, sorted(steps))])}; or a schedule of those alone (steps, every, start, stop)"
            )
            yield self._mistake("step", problem, self.spec.step, allowed)
            return
        per_batch = self.spec.definition.rhythm == "micro_step"
        checked: set[tuple[int, tuple[int, ...]]] = set()  # Steps of the other run, and batch sizes of this run.
        for step in due:
            sizes = tuple(self.tried.sizes(step)) if per_batch else (0,)
            if (self._from(step), sizes) not in checked:
                checked.add((self._from(step), sizes))
                for place in self.shapes:
                    if place in self.kept:
                        yield from self._problems_at(place, step, sizes)

    def _from(self, step: int) -> int:
        """Return the step of the other run whose tensor is used at a step of this run."""
        return step if self.spec.step is None else self.spec.step

    def _problems_at(self, place: Place, step: int, sizes: Sequence[int]) -> Iterator[Mistake]:
        """Yield the problems of one tensor in the batches of one step."""
        for batch, size in enumerate(sizes):
            kept = self.kept[place].get((self._from(step), batch), [])
            if not kept:
                yield self._other_batches(place, step)
            elif len(kept) > 1:
                problem = f"several hooks of that run kept {place} at step {self._from(step)}"
                yield self._mistake("hook", problem, self.spec.hook, [each.hook for each in kept])
            elif (shape := kept[0].shape) is not None and (place, size, shape) not in self.fitting:
                if problems := [*self._misfits(place, step, kept[0], size)]:
                    yield from problems
                else:
                    self.fitting.add((place, size, shape))

    def _misfits(self, place: Place, step: int, kept: Kept, size: int) -> Iterator[Mistake]:
        """Yield a problem if a recorded tensor does not fit a batch of `size` samples.

        Tensors at parameters do not depend on the batch size.
        """
        shape = self.shapes[place]
        samples, size = (self.tried.samples, size) if self.spec.definition.family == "module" else (1, 1)
        here = _scaled(shape, samples, size)
        assert kept.shape is not None, "shards are not checked"
        try:
            part = (
                torch.empty(here, device="meta")[parse_slice(self.spec.slice)].shape if self.spec.slice and here else ()
            )
        except IndexError:
            problem = f"there is no such part of {place}, a tensor of shape {list(here)}"
            yield self._mistake("slice", problem, self.spec.slice, ())
            return
        if kept.shape == tuple(part) or _fits(kept.shape, shape, samples, size):
            return
        if shape[:1] == (samples,) and kept.source is not None and kept.source[:1] != here[:1]:
            yield self._other_batches(place, step)
        else:
            problem = f"{place} was recorded as {list(kept.shape)}, and is {list(here)} in this run"
            yield self._mistake("run", problem, self.spec.run, ())

    def _other_batches(self, place: Place, step: int) -> Mistake:
        """Return the problem that the batches of a step differ between the runs.

        The message contains the settings that make them equal.
        """
        evaluates = self.spec.phase == "eval"
        follows = self.spec.definition.family == "module" and self.shapes[place][:1] == (self.tried.samples,)
        by_step: dict[int, list[int | None]] = {}
        for (source, _), kept in sorted(self.kept[place].items()):
            shape = kept[0].source
            by_step.setdefault(source, []).append(shape[0] if shape and follows else None)
        there, here = by_step.get(self._from(step), []), list(self.tried.sizes(step))
        problem = (
            f"{place} was recorded in {_batches(there)} at step {self._from(step)}, and this run has {_batches(here)}"
        )
        usual = list(self.tried.sizes(0))
        usual_there = max(by_step.values(), key=lambda sizes: (len(sizes), sum(filter(None, sizes))))
        settings = []
        if usual_there[0] not in (None, usual[0]):
            settings.append(f"train.{'eval_batch_size' if evaluates else 'batch_size'}={usual_there[0]}")
        if not evaluates and len(usual_there) != len(usual):
            settings.append(f"train.accumulate={len(usual_there)}")
        if evaluates and None not in there and (total := sum(filter(None, there))) != sum(here):
            settings.append(f"a data.eval_slice of {total} samples")
        if settings:
            allowed = " and ".join(settings)
        elif evaluates or None in there:
            allowed = f"batches of the same samples: {_batches(there)}"
        elif there == usual:
            allowed = (
                "a schedule (steps, every, start, stop) without the steps that have smaller batches; "
                f"or a data.slice of a multiple of {sum(usual)} samples"
            )
        else:
            allowed = f"a schedule (steps, every, start, stop) of steps that have {_batches(there)}"
            allowed += "; or another 'step'" if self.spec.step is not None else ""
        return self._mistake("run", problem, self.spec.run, allowed)

    def _mistake(self, key: str, problem: str, written: object, allowed: Sequence[str] | str) -> Mistake:
        """Return the problem of a key of the spec."""
        return Mistake(f"hooks.{self.spec.name}.{key}", problem, written, allowed)


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

    def follows(old: int, tried: int) -> bool:
        """Return whether a dimension scales with the number of samples."""
        return old * samples == tried * size

    if len(recorded) != len(shape):
        return False
    if shape and shape[0] == samples and not follows(recorded[0], shape[0]):
        return False
    is_free = bool(shape) and shape[0] % samples != 0
    pairs = list(zip(recorded, shape, strict=True))[is_free:]
    return all(old == tried or follows(old, tried) for old, tried in pairs)


def _batches(sizes: Sequence[int | None]) -> str:
    """Describe the number of batches and their sizes."""
    many = f"{len(sizes)} {'batch' if len(sizes) == 1 else 'batches'}"
    return many if None in sizes or not sizes else f"{many} of {some([*map(str, sizes)], 6)} samples"
