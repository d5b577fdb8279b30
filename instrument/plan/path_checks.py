"""Validation of `path` against the tensors that shape inference found."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigError, Mistake, nearest
from ..spec.globs import matches
from .layer_selection import some
from .shape_inference import Trial, tensors_of
from .sites import HookPlan


def refuse_idle_paths(plan: HookPlan, trials: Mapping[str, Trial]) -> None:
    """Check that each `path` matches at least one tensor of the modules that shape inference ran.

    Raises:
        ConfigError: With every spec whose path matches none, and the existing paths.
    """
    mistakes = []
    for name, spec in plan.specs.items():
        seen = [
            info.path
            for site in plan.of(name)
            for info in tensors_of(site.layer.module, spec.tensor_role, trials[spec.phase])
        ]
        if spec.path is not None and seen and not any(matches(spec.path, path) for path in seen):
            there = list(dict.fromkeys(path or "(the tensor itself: leave 'path' out)" for path in seen))
            close = nearest(spec.path, [path for path in there if not path.startswith("(")])
            problem = "this path matches no tensor of the modules matched"
            mistakes.append(
                Mistake(f"hooks.{name}.path", problem, written=spec.path, allowed=some(there), nearest=close)
            )
    if mistakes:
        raise ConfigError(*mistakes)
