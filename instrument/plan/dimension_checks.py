"""Validation of fields that name dimensions, indices and dtypes against the tensors at a spec's sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from ..errors import ConfigError, Problem
from ..spec.base import InterventionSpec, dimension_misfits, parse_slice
from ..spec.globs import matches
from ..spec.hooks import HookSpec
from ..spec.record import RecordSpec
from ..spec.selection import SelectionError, selected_shape
from ..stats.unit_statistics import unit_dim
from .hook_plan import HookPlan, Site
from .shape_inference import InferredCalls, TensorInfo, calls_at

FIX_FOR_SMALLER_BATCH = (
    "set a value that also fits that batch; a schedule (steps, every, start, stop) that excludes it; or a number of samples "
    "that is a multiple of the batch size"
)


def check_shapes(plan: HookPlan, inferred_by_phase: Mapping[str, InferredCalls]) -> None:
    """Check every spec against the tensors at its sites.

    Args:
        plan: The sites.
        inferred_by_phase: The results of shape inference, by phase. Without one, the tensors of modules are not checked.

    Raises:
        ConfigError: With the first tensor of each spec that does not fit.
    """
    problems: dict[str, Problem] = {}
    for site in plan.sites:
        for _, info in tensors_at(site, inferred_by_phase.get(site.spec.phase, {})):
            problem = _misfit(site, info)
            if problem is not None:
                problems.setdefault(site.spec.name, problem)
    if problems:
        raise ConfigError(*problems.values())


def misfits_in_smaller_batches(
    plan: HookPlan,
    inferred_by_phase: Mapping[str, InferredCalls],
    samples: Mapping[str, int],
    smallest: Callable[[HookSpec], int],
) -> list[Problem]:
    """Check slices and lists of factors along the samples against the smallest batch that their hooks will see.

    Dimension 0 contains the samples if its size is the number of samples, or the same multiple of it in two phases.

    Args:
        plan: The sites.
        inferred_by_phase: The results of shape inference, by phase.
        samples: The number of samples in the batch of each phase.
        smallest: Returns the number of samples in the smallest batch that a spec will see.

    Returns:
        The first tensor of each spec that does not fit. A slice that ends beyond a smaller batch is cut there.
    """
    problems: dict[str, Problem] = {}
    for spec in plan.specs.values():
        if spec.definition.family != "module" or not spec.depends_on_batch_size:
            continue
        size, full_size = smallest(spec), samples[spec.phase]
        other = next((phase for phase in samples if samples[phase] != full_size), spec.phase)
        for site in plan.of(spec.name) if size < full_size else ():
            other_shapes = {(call, info.path): info.shape for call, info in tensors_at(site, inferred_by_phase[other])}
            for call, info in tensors_at(site, inferred_by_phase[spec.phase]):
                if _contains_samples(info.shape, full_size, other_shapes.get((call, info.path)), samples[other]):
                    smaller = info._replace(shape=(info.shape[0] // full_size * size, *info.shape[1:]))
                    if (problem := _misfit(site, smaller, smallest=size)) is not None:
                        problems.setdefault(spec.name, problem)
    return [*problems.values()]


def _contains_samples(
    shape: Sequence[int], samples: int, other_shapes: Sequence[int] | None, samples_there: int
) -> bool:
    """Return whether dimension 0 of a tensor contains the samples of a batch, judged by its shapes in two batches."""
    if not shape:
        return False
    if other_shapes and samples_there != samples:
        return shape[0] % samples == 0 and other_shapes[0] * samples == shape[0] * samples_there
    return shape[0] == samples


def check_shape(site: Site, path: str, tensor: Tensor) -> None:
    """Check a spec against the first tensor at one of its sites, if shape inference did not check it.

    Raises:
        ConfigError: A field does not fit the shape or dtype of the tensor.
    """
    if tensor.is_nested:
        return  # its parts have different shapes
    problem = _misfit(site, TensorInfo(path, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    if problem is not None:
        raise ConfigError(problem)


def _misfit(site: Site, info: TensorInfo, smallest: int | None = None) -> Problem | None:
    """Return the first field of a site's spec that does not fit a tensor; None if all fit.

    Args:
        site: The site.
        info: The tensor.
        smallest: The number of samples of its batch, if that is smaller than the batch of shape inference.
    """
    spec = site.spec
    in_batch = "" if smallest is None else f" in the smallest batch, of {smallest} samples"
    for field, message, allowed in _problems(site, info, may_exceed=smallest is not None):
        path = f" at path {info.path!r}" if info.path and spec.definition.family == "module" else ""
        what = "loss" if spec.kind == "loss" else f"{spec.tensor_role} of {site.label!r}{path}"
        return Problem(
            f"hooks.{spec.name}.{field}",
            f"{message} the {what}, which has shape {list(info.shape)}{in_batch}",
            given=attrgetter(field)(spec),
            allowed=allowed if smallest is None else (),
            fix="" if smallest is None else FIX_FOR_SMALLER_BATCH,
        )
    return None


def _problems(site: Site, info: TensorInfo, *, may_exceed: bool) -> Iterator[tuple[str, str, str]]:
    """Yield the fields that do not fit: the field, the problem up to the name of the tensor, and what is allowed.

    Args:
        site: The site.
        info: The tensor.
        may_exceed: Whether a slice may end beyond a dimension.
    """
    spec, shape = site.spec, info.shape
    try:
        selected = selected_shape_at(site, shape)
    except SelectionError as error:
        yield error.field, str(error), error.allowed
        return
    if spec.slice is not None:
        first = spec.samples if isinstance(spec.samples, int) else None
        yield from _slice_problems(
            spec.slice, (*(min(first or size, size) for size in shape[:1]), *shape[1:]), may_exceed=may_exceed
        )
    if isinstance(spec, RecordSpec):
        if spec.unit_dim is not None:
            yield from dimension_misfits("unit_dim", [spec.unit_dim], len(selected))
        if spec.dtype is not None and info.dtype.is_complex:
            message = f"{spec.dtype} cannot represent the complex values of"
            yield "dtype", message, f"no 'dtype': {info.dtype} is not converted"
    yield from spec.misfits(selected, shape)


def selected_shape_at(site: Site, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the part of a tensor that the spec of a site selects.

    Args:
        site: The site.
        shape: The shape of the complete tensor.

    Raises:
        SelectionError: The tensor does not have the selected elements.
    """
    spec = site.spec
    if not spec.selection:
        return tuple(shape)
    of_parameter = spec.definition.family != "module"
    units = unit_dim(len(shape), site.layer.module, of_parameter=of_parameter)
    return selected_shape(spec, shape, units)


def _slice_problems(text: str, shape: tuple[int, ...], *, may_exceed: bool) -> Iterator[tuple[str, str, str]]:
    for dim, (part, size) in enumerate(zip(parse_slice(text), shape, strict=False)):
        bounds = (part,) if isinstance(part, int) else () if may_exceed else (part.start, part.stop)
        last = size - 1 if isinstance(part, int) else size
        if any(bound is not None and not -size <= bound <= last for bound in bounds):
            allowed = f"{-size} to {last}; ':' for all of a dimension, 'samples: N' for at most N samples"
            yield "slice", f"{_format_part(part)} is out of range for dimension {dim} of", allowed
        elif isinstance(part, slice) and size and not range(*part.indices(size)):
            yield "slice", f"{_format_part(part)} selects nothing along dimension {dim} of", "a start before the stop"


def _format_part(part: int | slice) -> str:
    if isinstance(part, int):
        return str(part)
    bounds = (part.start, part.stop) if part.step is None else (part.start, part.stop, part.step)
    return ":".join("" if bound is None else str(bound) for bound in bounds)


def tensors_at(site: Site, inferred: InferredCalls) -> list[tuple[int, TensorInfo]]:
    """Return the tensors at a site according to shape inference. A gradient has the shape of its tensor.

    Returns:
        Each with the index of the module's call; 0 for kinds without tensors of modules.
    """
    spec = site.spec
    if spec.definition.family == "loss":
        return [(0, TensorInfo("", (), torch.float32, True))]
    if spec.definition.family != "module":
        tensor = site.current_tensor
        assert tensor is not None, "a site at a parameter or buffer was resolved from one"
        if nn.parameter.is_lazy(tensor):
            return []
        # The number of optimizer steps is a scalar.
        shape = () if spec.tensor_role == "state.step" else tuple(tensor.shape)
        return [(0, TensorInfo(site.own_name, shape, tensor.dtype, True))]
    return [
        (call, info)
        for call, infos in enumerate(calls_at(site, inferred))
        for info in infos
        if (spec.path is None or matches(spec.path, info.path))
        and (info.requires_grad or not spec.definition.gradient)
        and (info.dtype.is_floating_point or not isinstance(spec, InterventionSpec))
    ]
