"""Conversion of `monitor_config.json` of msprobe, the file of TrainerMon."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .experiment import EVERYTHING, ConvertedExperiment, multiples
from .source import Fields, reading

STATISTICS = {"norm": "l2", "min": "min", "max": "max", "mean": "mean", "nans": "nan_count", "zeros": "zero_fraction"}
ACTIVATIONS = {
    "input": ("inputs", "forward_pre"),
    "output": ("outputs", "forward"),
    "output_grad": ("output_gradients", "full_backward_pre"),
    "input_grad": ("input_gradients", "full_backward"),
}
GRADIENTS = ("output_grad", "input_grad")
PARAMETERS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "wg_distribution": (("gradients", {"kind": "parameter_grad"}),),
    "param_distribution": (("parameters", {"kind": "step_pre", "role": "param"}),),
    "mv_distribution": (
        ("first_moments", {"kind": "step_post", "role": "state.exp_avg"}),
        ("second_moments", {"kind": "step_post", "role": "state.exp_avg_sq"}),
    ),
    "ur_distribution": (("updates", {"kind": "step_post", "role": "update", "histogram": True}),),
}
ELSEWHERE = {
    "module_ranks": "each process is recorded; select rows by the column 'rank'",
    "print_struct": "plan=true prints the modules of the model",
    "cc_distribution": "no counterpart: communication between processes is not recorded",
    "ndigits": "no setting: values are written in full precision",
    "alert": "no counterpart for deviations from the mean of previous values",
}


def is_monitor(source: Any) -> bool:
    """Return whether a mapping is the content of `monitor_config.json`."""
    return isinstance(source, Mapping) and bool({"targets", "all_xy", "xy_distribution", *PARAMETERS} & {*source})


def convert_monitor(source: Mapping[str, Any], experiment: ConvertedExperiment) -> None:
    """Add the hooks of a `monitor_config.json` to an experiment.

    Raises:
        ConfigError: A value is invalid.
    """
    with reading(source, "", experiment) as fields:
        targets = Fields(fields.take("targets"), "targets", experiment)
        statistics = experiment.statistics(fields.texts("ops"), STATISTICS, "ops") or [*STATISTICS.values()]
        if fields.take("eps") is not None and "zero_fraction" in statistics:
            fields.note("eps", "no counterpart: zero_fraction counts elements that are exactly zero")
        every, start = fields.number("step_interval", 1) or 0, fields.number("start_step", 0) or 0
        schedule = {**(multiples(every, 0, None, "step_interval") or {}), **({"start": start} if start else {})}
        action = {"action": "record", **schedule, "stats": statistics}
        _format(fields)
        fields.note_given(ELSEWHERE)
        if fields.flag("xy_distribution"):
            _add_activations(fields, targets, action)
        for name, hooks in PARAMETERS.items():
            if fields.flag(name):
                for hook, kind in hooks:
                    _add_parameters(hook, kind, targets, action)
        for name in ("all_xy", "forward_only", "backward_only"):  # only of xy_distribution
            fields.take(name)
    if not experiment.hooks:
        experiment.note("targets", "nothing is recorded: set xy_distribution, wg_distribution or another distribution")


def _format(fields: Fields) -> None:
    given = str(fields.take("format", ""))
    if given == "tensorboard":
        fields.experiment.settings["sink"] = {"tensorboard": True}
    elif given:
        message = "python -m instrument.export RUN --to csv" if given == "csv" else "instrument.attach(..., out=None)"
        fields.note("format", f"written to Parquet; for {given}, use {message}")


def _add_activations(fields: Fields, targets: Fields, action: Mapping[str, Any]) -> None:
    experiment = fields.experiment
    forward, backward = not fields.flag("backward_only"), not fields.flag("forward_only")
    wanted = [name for name in ACTIVATIONS if (backward if name in GRADIENTS else forward)]
    if fields.flag("all_xy"):
        for name in wanted:
            hook, kind = ACTIVATIONS[name]
            experiment.add_hook(hook, {"layers": EVERYTHING, "kind": kind, **action})
        return
    for target, value in targets.left.items():
        if _is_parameter(target):
            continue
        with reading(value, targets.key(target), experiment) as tensors:
            listed = {name: str(tensors.take(name)) for name in ACTIVATIONS if name in tensors.left}
        for name in wanted:
            if name in listed or not listed:
                hook, kind = ACTIVATIONS[name]
                index = re.fullmatch(r"tuple\[(\d+)\](?::(\d+))?", listed.get(name, ""))
                path = {"path": index[2] or "0"} if index and int(index[1]) > 1 else {}
                chosen = {"layers": _layer(target) or ".", "kind": kind, **path}
                experiment.add_hook(f"{_layer(target)}_{hook}", {**chosen, **action})


def _add_parameters(hook: str, kind: Mapping[str, Any], targets: Fields, action: Mapping[str, Any]) -> None:
    add_hook = targets.experiment.add_hook
    if kind.get("role") == "update":
        action = {**action, "stats": [*action["stats"], "update_ratio"]}
    names = [_layer(name) for name in targets.left]
    modules = [name for name in names if not _is_parameter(name)]
    if not names or "" in modules:
        add_hook(hook, {"layers": EVERYTHING, **kind, **action})
        return
    if modules:
        patterns = [f"{name}.**" for name in modules]
        add_hook(hook, {"layers": patterns if len(patterns) > 1 else patterns[0], **kind, **action})
    for name in names:
        if _is_parameter(name):
            layer, _, parameter = name.rpartition(".")
            add_hook(f"{name}_{hook}", {"layers": layer or ".", "params": parameter, **kind, **action})


def _layer(name: str) -> str:
    """Return a name without the wrapper modules in front of it."""
    return re.sub(r"^(module\.)+|^module$", "", name)


def _is_parameter(name: str) -> bool:
    return bool(re.search(r"(^|[._])(weight|bias)$", name))
