"""Whether the fields of a spec fit the tensors of its sites: dimensions, indices and dtypes, and `path` and `functions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from operator import attrgetter

import torch
from torch import Tensor, nn

from ..config.base import dimension_misfits
from ..config.hook_specs import RecordSpec
from ..config.selection import SelectionError, selected_shape
from ..errors import ConfigError, Problem, raise_problems, similar_names
from ..fields.globs import matches
from ..formatting import shorten
from ..stats.unit_statistics import unit_dim
from ..tables.kinds import ATTENTION_FUNCTIONS
from ..values.nested import shape_of
from .hook_plan import HookPlan, Site
from .shape_inference import InferredCalls, calls_at, function_calls_of


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
    # The parts of a nested tensor have different shapes.
    if not tensor.is_nested and (problem := misfit(site, path, tensor)) is not None:
        raise ConfigError(problem)


def misfit(site: Site, path: str, tensor: Tensor, *, may_exceed: bool = False) -> Problem | None:
    """Return the first field of a site's spec that does not fit a tensor, or None. `may_exceed`: a slice may end beyond a dimension."""
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
        dim_of_units = unit_dim(len(shape), site.layer.module, of_parameter=spec.definition.family != "module")
        try:
            selected = selected_shape(spec, shape, dim_of_units, may_exceed=may_exceed)
        except SelectionError as error:
            yield error.field, str(error), error.allowed
            return
    if isinstance(spec, RecordSpec):
        if spec.unit_dim is not None:
            yield from dimension_misfits("unit_dim", [spec.unit_dim], len(selected))
        if spec.dtype is not None and dtype.is_complex:
            message = f"{spec.dtype} cannot represent the complex values of"
            yield "dtype", message, f"no 'dtype': {dtype} is not converted"
    yield from spec.misfits(selected, shape)


def check_paths(plan: HookPlan, inferred_by_phase: Mapping[str, InferredCalls]) -> None:
    """Raise a ConfigError for each `path` that matches no tensor of the modules that shape inference ran."""
    problems = []
    for name, spec in plan.specs.items():
        calls = [call for site in plan.of(name) for call in calls_at(site, inferred_by_phase[spec.phase])]
        paths = [info.path for call in calls for info in call]
        if spec.path is not None and paths and not any(matches(spec.path, path) for path in paths):
            shown_paths = list(dict.fromkeys(path or "(the tensor itself: omit 'path')" for path in paths))
            similar = similar_names(spec.path, [path for path in shown_paths if not path.startswith("(")])
            message = "this path matches no tensor of the matched modules"
            problems.append(Problem(f"hooks.{name}.path", message, spec.path, shorten(shown_paths), similar))
    raise_problems(problems)


def check_function_names(plan: HookPlan) -> None:
    """Raise a ConfigError for each name in `functions` that resembles that of a torch function or of an operator, but is not one.

    For loops whose calls are not known before they run. Other unknown names can be those of operators that are registered later.
    """
    given = {
        (f"hooks.{name}.functions", pattern)
        for name, spec in plan.specs.items()
        for pattern in spec.functions
        if spec.definition.of_functions and not spec.optional and pattern.isidentifier()
    }
    if not given:
        return
    modules = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.fft, torch.special, torch.sparse)
    operators = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    known = operators.union(*map(dir, modules))
    public = [each for each in known if not each.startswith("_")]
    problems = []
    for where, name in sorted(given):
        if name not in known and (similar := get_close_matches(name, public, cutoff=0.8)):
            problems.append(Problem(where, "no torch function has this name", name, similar=similar))
    raise_problems(problems)


def check_functions(plan: HookPlan, inferred_by_phase: Mapping[str, InferredCalls]) -> None:
    """Raise a ConfigError for each pattern of `functions`, if not optional, that matches no call that shape inference found."""
    problems = []
    for name, spec in plan.specs.items():
        calls = [call for site in plan.of(name) for call in function_calls_of(site, inferred_by_phase[spec.phase])]
        with_tensors = [each for call in calls for each in call if each.tensors(spec.tensor_role)]
        called = dict.fromkeys(each.path.partition(".")[0] for each in with_tensors)
        if calls and not spec.functions and not called:
            message = f"the matched modules call no function with role {spec.tensor_role}"
            allowed = f"modules that call {', '.join(ATTENTION_FUNCTIONS)} for attention"
            problems.append(Problem(f"hooks.{name}.role", message, spec.role, allowed))
        for pattern in spec.functions if calls and not spec.optional else ():
            if not any(matches(pattern, function) for function in called):
                message = "this pattern matches no torch function that the matched modules call"
                similar = similar_names(pattern.replace("*", ""), called)
                allowed = shorten([*called]) or "none: these modules call no torch function themselves"
                problems.append(Problem(f"hooks.{name}.functions", message, pattern, allowed, similar))
    raise_problems(problems)
