"""Checks before a run: micro-batches and processes give the gradient of one batch, and another run recorded the tensors that `replace`
and `patch` use, in batches of the same size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..actions.builtin.recorded import RecordedSpec
from ..analysis.tensors_of_earlier_runs import RunArchive, TensorPlace
from ..config.experiment import RunConfig
from ..config.schedule import STEP_PHASES
from ..errors import ConfigError, Problem, similar_names
from ..fields.globs import matches
from ..formatting import shorten
from ..plan.cost import firings_of
from ..plan.hook_plan import HookPlan
from ..plan.shape_inference import InferredCalls, calls_at, without_side_effects
from ..tasks import CountsTerms, KLDivergence, NextToken, Task, WassersteinGAN
from ..tasks.base import batch_weight, is_pytorch_loss, is_sum, weighted
from ..values.nested import to_device
from .hook_trials import HookTrials
from .loader import LoaderOptions, PhaseBatches, first_batch

Locations = Mapping[TensorPlace, tuple[int, ...]]
"""The shapes that tensors have in the first batch, by their location in the model."""
_TOLERANCE = 1e-3  # of float32; kernels round batches of different sizes differently
_ABSOLUTE = 1e-5
_FIX = (
    "define `number_of_terms(batch)` in the task: the number by which the loss is divided, or, for a loss of each "
    "micro-batch (such as a contrastive loss), its number of samples; set the attribute `reduction` of the loss or task "
    "to 'sum' if losses add up"
)


def recording_problems(trials: HookTrials, inferred_by_phase: Mapping[str, InferredCalls]) -> dict[str, Problem]:
    """Return the first problem of each spec that uses tensors of another run, by the name of the spec."""
    problems, plan = {}, trials.plan
    for name, spec in plan.specs.items():
        if not isinstance(spec, RecordedSpec) or spec.run is None or spec.definition.frequency == "occasion":
            continue
        due, locations = firings_of(spec, trials.length).steps, _locations(plan, spec, inferred_by_phase[spec.phase])
        check = _sample_problems if spec.match == "id" else _batch_problems
        batches = trials.phases[spec.phase]
        found = check(spec, trials.archive, locations, batches, due) if due and locations else iter(())
        if (problem := next(found, None)) is not None:
            problems[name] = problem
    return problems


def _locations(plan: HookPlan, spec: RecordedSpec, inferred: InferredCalls) -> dict[TensorPlace, tuple[int, ...]]:
    role, locations = spec.tensor_role, {}
    for site in plan.of(spec.name):
        if spec.definition.family != "module":
            tensor = site.current_tensor
            shape = () if tensor is None else tuple(tensor.shape)
            locations[TensorPlace(site.layer.name, role, site.own_name, 0)] = shape
            continue
        for call, infos in enumerate(calls_at(site, inferred)):
            for info in infos:
                is_selected = spec.path is None or matches(spec.path, info.path)
                has_gradient = info.requires_grad or not spec.definition.gradient
                if is_selected and has_gradient and info.dtype.is_floating_point:
                    locations[TensorPlace(site.layer.name, role, info.path, call)] = info.shape
    return locations


def _recorded_rows(spec: RecordedSpec, archive: RunArchive) -> pd.DataFrame:
    assert spec.run is not None, "only tensors of another run are looked up"
    rows = archive.index(spec.run)
    rows = rows[(rows["role"] == spec.tensor_role) & (rows["backward"] == 0)]
    return rows if spec.hook is None else rows[rows["hook"] == spec.hook]


def _sample_problems(
    spec: RecordedSpec, archive: RunArchive, locations: Locations, batches: PhaseBatches, due: Collection[int]
) -> Iterator[Problem]:
    """Yield the problems of a spec with `match: id`: samples of another split, and samples without values."""
    assert spec.run is not None, "required by match"
    where = f"hooks.{spec.name}"
    rows = _recorded_rows(spec, archive)
    phases = rows["phase"][rows["layer"].isin({location.layer for location in locations})].unique()
    data = archive.info_of(spec.run).get("data") or {}
    splits = {data.get("train_split" if phase in STEP_PHASES else "eval_split") for phase in phases}
    if spec.hook is None and splits and batches.split and splits.isdisjoint({batches.split, None}):
        recorded_splits = " and ".join(sorted(filter(None, splits)))
        message = f"the other run recorded samples of the split {recorded_splits}, but phase {spec.phase} has samples of {batches.split}"
        fix = f"record samples of the split {batches.split}, or set 'hook' if equal ids are the same samples"
        yield Problem(f"{where}.match", message, "id", fix=fix)
    needed = batches.ids(due) or set()
    missing_tensors: list[Problem] = []
    for location in locations:
        try:
            recorded = archive.by_sample(spec.run, spec.hook, spec.step, location, where)
        except ConfigError as error:
            missing_tensors += error.problems[:1]
            continue
        if missing := sorted(needed - recorded.rows.keys()):
            message = f"the other run has no values of {len(missing)} of the {len(needed)} samples at {_text(location)}"
            ids = shorten([*map(str, missing)], 6)
            allowed = f"the {len(recorded.rows)} recorded samples"
            fix = f"record the samples with the dataset indices {ids}, or change data.slice or the schedule of the hook"
            yield Problem(f"{where}.run", message, spec.run, allowed, fix=fix)
    # For gradients, missing tensors are allowed: not every tensor gets a gradient in both runs.
    if not spec.definition.gradient or len(missing_tensors) == len(locations):
        yield from missing_tensors


def _batch_problems(
    spec: RecordedSpec, archive: RunArchive, locations: Locations, batches: PhaseBatches, due: Collection[int]
) -> Iterator[Problem]:
    """Yield the problems of a spec that uses the tensors of the same batches: missing ones, and other batches."""
    assert spec.run is not None, "only tensors of another run are looked up"
    where, rows = f"hooks.{spec.name}", _recorded_rows(spec, archive)
    usable = rows if spec.hook is not None else rows[rows["phase"] == spec.phase]
    groups: Any = usable.groupby([*TensorPlace._fields])  # the keys are typed as hashable objects
    recorded = {TensorPlace(*key): group for key, group in groups}
    missing = [location for location in locations if location not in recorded]
    # For gradients, missing tensors are allowed: not every tensor gets a gradient in both runs.
    if missing and (not spec.definition.gradient or len(missing) == len(locations)):
        texts = shorten([*map(_text, missing)])
        message = f"the other run recorded no tensors with role {spec.tensor_role!r} in phase {spec.phase} at {texts}"
        similar = similar_names(_text(missing[0]), [*map(_text, recorded)])
        allowed = shorten([f"{_text(place)} {group['shape'].iloc[0].tolist()}" for place, group in recorded.items()])
        fix = "" if spec.hook is not None or rows.empty else "set 'hook' to use the tensors of another phase"
        yield Problem(f"{where}.layers", message, list(spec.globs), allowed or "none", similar, fix=fix)
        return
    steps = {*usable["step"]}
    sources = {step: step if spec.step is None else spec.step for step in due}
    if missing_steps := sorted({*sources.values()} - steps):
        message = f"the other run recorded no tensors at step {shorten([*map(str, missing_steps)], 6)}"
        allowed = f"one of {shorten([*map(str, sorted(steps))])}"
        fix = "set 'step', or a schedule of these steps only (steps, every, start, stop)"
        yield Problem(f"{where}.step", message, spec.step, allowed, fix=fix)
        return
    train = archive.info_of(spec.run).get("config", {}).get("train", {})
    accumulate = train.get("accumulate", 0) if spec.step is None and spec.phase in STEP_PHASES else 0
    for location in locations.keys() & recorded.keys() if spec.definition.frequency == "micro_step" else ():
        has_samples = spec.definition.family == "module" and locations[location][:1] == (batches.first.samples,)
        sizes = _sizes_by_step(recorded[location], has_samples)
        for step, source in sources.items():
            here, there = batches.sizes(step), sizes.get(source, [])
            has_more = accumulate > len(here) and len(there) > len(here)
            differ = any(old not in (None, new) for old, new in zip(there, here, strict=False))
            if len(there) < len(here) or has_more or differ:
                message = f"{_text(location)} was recorded in {_batches(there)} at step {source}, but this run has {_batches(here)}"
                fix = "use the batches of the other run, or a schedule (steps, every, start, stop) of steps that have the same ones"
                yield Problem(f"{where}.run", message, spec.run, fix=fix)


def _sizes_by_step(rows: pd.DataFrame, has_samples: bool) -> dict[int, list[int | None]]:
    """Return the number of samples in each recorded batch, over all processes, by step; None if it is unknown."""
    is_known = has_samples and all(
        scope != "shard" and shape[:1].tolist() == source[:1].tolist()
        for scope, shape, source in rows[["scope", "shape", "source_shape"]].itertuples(index=False)
    )
    distinct = rows.drop_duplicates(["step", "micro_step", "rank"])
    own = distinct["shape"].map(lambda shape: int(shape[0]) if is_known else 0)
    sizes: Any = own.groupby([distinct["step"], distinct["micro_step"]]).sum().groupby(level="step")
    return {step: [size if is_known else None for size in of_step.tolist()] for step, of_step in sizes}


def _text(location: TensorPlace) -> str:
    named = repr(location.layer or ".") + (f" {location.path}" if location.path else "")
    return named + (f" (call {location.call})" if location.call else "")


def _batches(sizes: Sequence[int | None]) -> str:
    many = f"{len(sizes)} {'batch' if len(sizes) == 1 else 'batches'}"
    return many if None in sizes or not sizes else f"{many} of {shorten([*map(str, sizes)], 6)} samples"


def check_loss_of_parts(
    config: RunConfig, task: Task, model: nn.Module, dataset: Dataset[Any], options: LoaderOptions
) -> None:
    """Raise a ConfigError unless the loss and its gradient are the weighted mean, or the sum, of those of two parts of a batch.

    The model is in eval mode. The check is made only with gradient accumulation or several processes. It is skipped for
    tasks whose number of terms is known or defined by the user, for losses that draw random numbers or do not exist
    in eval mode, and for custom code that fails for a part of a batch.
    """
    processes = options.shard.size
    key = "parallel" if processes > 1 else "accumulate"
    if (processes == 1 and config.train.accumulate == 1) or _has_known_terms(task):
        return
    device = next(model.parameters()).device
    try:
        parts = _batch_and_parts(dataset, max(config.train.batch_size, 2 * processes), options)
        # cuDNN computes no gradients of recurrent layers in eval mode.
        with (
            without_side_effects(model, training=False),
            torch.enable_grad(),
            torch.backends.cudnn.flags(enabled=False),
        ):
            measured = [_loss_and_gradient(task, model, to_device(batch, device)) for batch, _ in parts]
    except Exception:  # custom code that requires complete batches
        return
    results = [each for each in measured if each is not None]
    if len(results) < len(parts) or not _are_close(results[0], results[1], results):
        return
    weights = [batch_weight(task, *part) for part in parts[2:]]
    total = 1 if is_sum(task) else sum(weights)
    pairs = zip(*results[2:], strict=True)
    combined: list[Any] = [sum(weighted(v, w, total) for v, w in zip(values, weights, strict=True)) for values in pairs]
    if not _are_close(results[0], combined, results):
        how = "sum" if is_sum(task) else f"mean over {'terms' if isinstance(task, CountsTerms) else 'samples'}"
        setting = f"train.{key}={getattr(config.train, key)}"
        message = (
            f"with {setting}, the gradient of a step would differ from that of one batch: the loss of the first batch is "
            f"not the {how} of the losses of its parts"
        )
        raise ConfigError(Problem("task", message, given=config.task.target, fix=_FIX))


def _has_known_terms(task: Task) -> bool:
    package = CountsTerms.__module__.rpartition(".")[0]
    if isinstance(task, CountsTerms) and not task.number_of_terms.__module__.startswith(package):
        return True
    loss = getattr(task, "loss", None)
    is_known = isinstance(task, NextToken | WassersteinGAN) or isinstance(loss, KLDivergence) or is_pytorch_loss(loss)
    return is_known and type(task).__module__.startswith(package)


def _batch_and_parts(dataset: Dataset[Any], size: int, options: LoaderOptions) -> list[tuple[Any, int]]:
    """Load the first batch twice, and two parts of it of different size, with their numbers of samples."""

    def collate(items: list[Any]) -> list[tuple[Any, int]]:
        split = max(1, len(items) // 3)
        return [(options.collate_fn(part), len(part)) for part in (items, items, items[:split], items[split:])]

    return first_batch(dataset, size, replace(options, collate_fn=collate, pin_memory=False)).batch  # type: ignore[no-any-return]


def _loss_and_gradient(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor] | None:
    """Return the loss of a batch, and its gradient with respect to the last parameter that it depends on; None without a loss."""
    loss = task(model, batch).loss
    if loss is None:
        return None
    for parameter in reversed([each for each in model.parameters() if each.requires_grad]):
        (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)
        if gradient is not None:
            return loss.detach(), gradient.detach()
    return None


def _are_close(ones: Sequence[Any], others: Sequence[Any], results: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether loss and gradient are equal, within the rounding of their largest values in any result."""
    for index, (one, other) in enumerate(zip(ones, others, strict=True)):
        largest = max(float(result[index].nan_to_num().float().norm()) for result in results)
        tolerance = max(_TOLERANCE, 8 * torch.finfo(one.dtype).eps)
        if float((one - other).float().norm()) > tolerance * largest + _ABSOLUTE:
            return False
    return True
