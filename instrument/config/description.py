"""Short descriptions of specs."""

from __future__ import annotations

from ..tables.statistics import COUNTS
from .experiment import ForwardConfig
from .hook_specs import HookSpec
from .record import PrintSpec, RecordSpec


def describe_forward(config: ForwardConfig) -> str:
    """Describe the passes of `mode: forward`: `1 pass in order, gradients of logits[:, 3]`."""
    gradients = f"gradients of {config.of or 'the loss'}" if config.grad else "no gradients"
    return f"{config.passes:,} pass{'es' * (config.passes > 1)} in order, {gradients}"


def describe_action(spec: HookSpec) -> str:
    """Describe the action of a spec in a few words: `record stats, tensors`, `clip norm 1.0`, `modify noise`."""
    if isinstance(spec, RecordSpec):
        return "record " + ", ".join(
            part
            for part, requested in (
                ("stats", spec.statistics),
                *((name, value) for values in spec.tables.values() for name, value in values.items()),
                ("tensors", spec.tensors),
            )
            if requested
        )
    if isinstance(spec, PrintSpec):
        shown = [name for name in spec.statistics if name not in COUNTS]
        return "print " + ", ".join([*shown, *(custom.column for custom in spec.custom_statistics)] or ["shape"])
    arguments = spec.model_dump(
        include={"min", "max", "value", "norm", "factor", "fn", "std", "coefficient"},
        exclude_none=True,
        exclude_unset=True,
        by_alias=True,
    )
    fn = arguments.pop("fn", None)
    parts = [
        spec.action,
        fn["_target_"] if isinstance(fn, dict) else fn,
        *(
            f"{key} {value:g}" if isinstance(value, int | float) else f"{key} {value}"
            for key, value in arguments.items()
        ),
    ]
    return " ".join(part for part in parts if part)
