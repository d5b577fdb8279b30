"""Validation of `path` against the tensors that shape inference found."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigError, Problem, similar_names
from ..spec.globs import matches
from .hook_plan import HookPlan
from .layer_selection import shorten
from .shape_inference import InferredCalls, tensors_of


def check_paths(plan: HookPlan, inferred_by_phase: Mapping[str, InferredCalls]) -> None:
    """Check that each `path` matches at least one tensor of the modules that shape inference ran.

    Raises:
        ConfigError: With every spec whose path matches none, and the existing paths.
    """
    problems = []
    for name, spec in plan.specs.items():
        paths = [
            info.path
            for site in plan.of(name)
            for info in tensors_of(site.layer.module, spec.tensor_role, inferred_by_phase[spec.phase])
        ]
        if spec.path is not None and paths and not any(matches(spec.path, path) for path in paths):
            shown_paths = list(dict.fromkeys(path or "(the tensor itself: omit 'path')" for path in paths))
            similar = similar_names(spec.path, [path for path in shown_paths if not path.startswith("(")])
            message = "this path matches no tensor of the matched modules"
            problems.append(
                Problem(f"hooks.{name}.path", message, given=spec.path, allowed=shorten(shown_paths), similar=similar)
            )
    if problems:
        raise ConfigError(*problems)
