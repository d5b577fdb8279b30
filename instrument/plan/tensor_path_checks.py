"""Validation of `path` and `functions` against the tensors and function calls that shape inference found."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import Problem, raise_problems, similar_names
from ..fields.globs import matches
from ..formatting import shorten
from ..tables.kinds import ATTENTION_FUNCTIONS
from .hook_plan import HookPlan
from .shape_inference import InferredCalls, calls_at, function_calls_of


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
