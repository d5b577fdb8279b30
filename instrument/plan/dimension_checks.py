"""Whether the fields of a spec that name dimensions, indices and dtypes fit a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from ..config.base import dimension_misfits, parse_slice
from ..config.record import RecordSpec
from ..config.selection import SelectionError, selected_shape
from ..errors import ConfigError, Problem, raise_problems
from ..stats.unit_statistics import unit_dim
from ..values.nested import shape_of
from .hook_plan import HookPlan, Site


def check_parameters(plan: HookPlan) -> None:
    """Raise a ConfigError for specs that do not fit the parameters, buffers and entries of state dicts at their sites."""
    problems: dict[str, Problem] = {}
    for site in plan.sites:
        if (tensor := stand_in(site)) is not None and (problem := misfit(site, site.own_name, tensor)) is not None:
            problems.setdefault(site.spec.name, problem)
    raise_problems(problems.values())


def stand_in(site: Site) -> Tensor | None:
    """Return a tensor with the shape of those that a hook on a parameter, buffer or entry gets; None for other hooks.

    A gradient, an update and a state of the optimizer have the shape of the parameter.
    """
    if site.spec.definition.family in ("module", "loss"):
        return None
    if site.spec.tensor_role == "state.step":
        return torch.zeros(())
    tensor = site.current_tensor
    return None if tensor is None or nn.parameter.is_lazy(tensor) else tensor.detach()


def check_shape(site: Site, path: str, tensor: Tensor) -> None:
    """Raise a ConfigError if a field of the spec at a site does not fit the shape or dtype of its first tensor."""
    if tensor.is_nested:
        return  # its parts have different shapes
    problem = misfit(site, path, tensor)
    if problem is not None:
        raise ConfigError(problem)


def misfit(site: Site, path: str, tensor: Tensor, *, may_exceed: bool = False) -> Problem | None:
    """Return the first field of a site's spec that does not fit a tensor; None if all fit.

    Args:
        may_exceed: Whether a slice may end beyond a dimension, where it is cut.
    """
    spec, shape = site.spec, shape_of(tensor)
    for field, message, allowed in _problems(site, shape, tensor.dtype, may_exceed=may_exceed):
        at = f" at path {path!r}" if path and spec.definition.family == "module" else ""
        what = "loss" if spec.kind == "loss" else f"{spec.tensor_role} of {site.label!r}{at}"
        text = f"{message} the {what}, which has shape {list(shape)}"
        return Problem(f"hooks.{spec.name}.{field}", text, attrgetter(field)(spec), allowed)
    return None


def _problems(
    site: Site, shape: tuple[int, ...], dtype: torch.dtype, *, may_exceed: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield the fields that do not fit: the field, the problem up to the name of the tensor, and what is allowed."""
    spec = site.spec
    if isinstance(spec, RecordSpec) and spec.split_dim is not None:
        if problems := [*dimension_misfits("split_dim", [spec.split_dim], len(shape))]:
            yield from problems
            return
        dim = spec.split_dim % len(shape)
        shape = shape[:dim] + shape[dim + 1 :]
    selected = shape
    if spec.selection:
        of_parameter = spec.definition.family != "module"
        try:
            selected = selected_shape(spec, shape, unit_dim(len(shape), site.layer.module, of_parameter=of_parameter))
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
        if spec.dtype is not None and dtype.is_complex:
            message = f"{spec.dtype} cannot represent the complex values of"
            yield "dtype", message, f"no 'dtype': {dtype} is not converted"
    yield from spec.misfits(selected, shape)


def _slice_problems(text: str, shape: Sequence[int], *, may_exceed: bool) -> Iterator[tuple[str, str, str]]:
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
