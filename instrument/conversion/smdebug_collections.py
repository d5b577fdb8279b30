"""Conversion of the collections of SageMaker Debugger: which tensors are saved, what of them, and when."""

from __future__ import annotations

import re
from typing import Any

from ..errors import ConfigError, Problem
from .experiment import Experiment
from .selection import EVERYTHING, layers_containing, multiples
from .source import Fields, whole_number

SCHEDULE = ("save_interval", "save_steps", "start_step", "end_step")
DEFAULT_INTERVAL = 500
STATISTICS = {
    "min": "min",
    "max": "max",
    "mean": "mean",
    "std": "std",
    "l1": "l1",
    "l2": "l2",
    "abs_max": "abs_max",
    "abs_l1": "l1",
    "abs_l2": "l2",
    "abs_sum": "l1",
}
DERIVED = {
    "variance": ("std", "it is the square of std"),
    "sum": ("mean", "it is mean times numel"),
    "abs_mean": ("l1", "it is l1 divided by numel"),
    "median": ("", "set quantiles: 0.5 in the hook"),
}
"""Reductions that follow from another statistic."""
RELU = ["ReLU"]
WEIGHTS = {"layers": EVERYTHING, "params": "*weight*", "kind": "step_pre", "role": "param"}
BIASES = {"layers": EVERYTHING, "params": "*bias*", "kind": "step_pre", "role": "param"}
GRADIENTS = {"layers": EVERYTHING, "kind": "parameter_grad"}
COLLECTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "weights": {"": WEIGHTS},
    "biases": {"": BIASES},
    "gradients": {"": GRADIENTS},
    "all": {
        "_outputs": {"layers": EVERYTHING, "kind": "forward"},
        "_inputs": {"layers": EVERYTHING, "kind": "forward", "role": "input"},
        "_parameters": {"layers": EVERYTHING, "kind": "step_pre", "role": "param"},
        "_gradients": GRADIENTS,
    },
    "relu_output": {"": {"types": RELU, "kind": "forward"}},
    "relu_input": {"": {"types": RELU, "kind": "forward_pre"}},
    "losses": {},
}
LOSSES = "no hook: the table 'metrics' has the loss of every step"


def convert_collection(name: str, fields: Fields, tensorboard: bool, experiment: Experiment) -> list[str]:
    """Add the hooks of a collection, and return their names."""
    regex = fields.texts("include_regex")
    chosen = dict(COLLECTIONS.get(name, {}))
    for number, pattern in enumerate(regex):
        found = hooks_for_regex(pattern, fields.key("include_regex"), experiment)
        chosen.update({f"{key}_{number + 1}" if number else key: spec for key, spec in found.items()})
    action = _action(fields, tensorboard, experiment)
    schedules = _schedules(fields, experiment)
    if name == "losses" and not regex:
        experiment.note(fields.where, LOSSES)
    elif not chosen and name not in COLLECTIONS:
        experiment.note(fields.where, "no counterpart: not a collection of PyTorch, and without include_regex")
    hooks = [{**spec, "action": "record", **schedule, **action} for spec in chosen.values() for schedule in schedules]
    names = [f"{name}{key}" for key in chosen for _ in schedules]
    added = []
    for hook, hook_name in zip(hooks, names, strict=True):
        if hook.get("phase") == "eval" and hook["kind"] not in ("forward", "forward_pre"):
            experiment.note(fields.where, f"no counterpart in evaluations: {hook_name}")
        else:
            added.append(experiment.add_hook(hook_name + ("_eval" if "phase" in hook else ""), hook))
    return added


def hooks_for_regex(pattern: str, where: str, experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Return the hooks at the tensors whose names contain a regular expression, by a suffix of their names.

    In PyTorch, the tools names the tensors LAYER_output_0, LAYER_input_0, CLASS_LAYER.weight and gradient/CLASS_LAYER.weight.

    Args:
        pattern: The regular expression.
        where: Its key in the source.
        experiment: Receives notes.
    """
    if layers_containing(pattern, where) == EVERYTHING:
        return dict(COLLECTIONS["all"])
    found: dict[str, dict[str, Any]] = {}
    for number, part in enumerate(_alternatives(pattern)):
        last = f"_{number + 1}" if number else ""
        of_gradient = re.match(r"\^?(?:\.\*)?gradients?(/|$)", part)
        name = re.sub(r"^\^?(?:\(\?!gradients?\))?(?:(?:\.\*)?gradients?(?:/|$))?", "", part)
        side = re.search(r"[._\\]*(output|input)(_[\d.*+$\\]*|\$)?$", name)
        parameter = re.search(r"\\?[._]?\b(weight|bias)\$?$|(weight|bias)\.?\*?\$?$", name)
        if side and not of_gradient:
            layers = layers_containing(name[: side.start()], where)
            role = {"role": "input"} if side[1] == "input" else {}
            found[f"{last}_{side[1]}s"] = {"layers": layers, "kind": "forward", **role}
        elif of_gradient or parameter:
            rest = name[: parameter.start()] if parameter else name
            rest = re.sub(r"^[A-Z][A-Za-z0-9]*_", "", rest)  # the class of the model
            params = {"params": f"*{parameter[1] or parameter[2]}*"} if parameter else {}
            kind = {"kind": "parameter_grad"} if of_gradient else {"kind": "step_pre", "role": "param"}
            found[f"{last}_{'gradients' if of_gradient else 'parameters'}"] = {
                "layers": layers_containing(rest, where),
                **params,
                **kind,
            }
        else:
            layers = layers_containing(part, where)
            found[f"{last}_outputs"] = {"layers": layers, "kind": "forward"}
            found[f"{last}_inputs"] = {"layers": layers, "kind": "forward", "role": "input"}
            message = "also selects the parameters of these layers and their gradients: add hooks of kind step_pre and parameter_grad"
            experiment.note(where, f"{part!r} {message}")
    return found


def _alternatives(pattern: str) -> list[str]:
    """Split a regular expression at the bars outside of groups, if this separates different tensors."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(pattern):
        if index and pattern[index - 1] == "\\":
            continue
        depth += (char in "([") - (char in ")]")
        if char == "|" and depth == 0:
            parts.append(pattern[start:index])
            start = index + 1
    parts.append(pattern[start:])
    distinct = any(re.search(r"output|input|weight|bias|gradient", part) for part in parts)
    return parts if distinct else [pattern]


def _action(fields: Fields, tensorboard: bool, experiment: Experiment) -> dict[str, Any]:
    """Return the statistics, or the values if the source has no reductions."""
    given = [name.removesuffix("_norm") for name in fields.texts("reductions")]
    raw, histogram = fields.flag("save_raw_tensor"), fields.flag("save_histogram", True)
    if fields.flag("save_shape"):
        experiment.note(
            fields.key("save_shape"), "no setting: the table 'tensors' has the shape of each recorded tensor"
        )
    names = []
    for name in given:
        statistic, formula = DERIVED.get(name, (name, ""))
        if formula:
            experiment.note("reductions", f"{name!r} is not recorded; {formula}")
        names += [statistic] if statistic else []
    statistics = experiment.statistics(names, STATISTICS, "reductions")
    action: dict[str, Any] = {"stats": statistics} if statistics else {}
    if raw or not given:
        action["tensors"] = True
    if tensorboard and histogram:
        action["histogram"] = True
    return action


def _schedules(fields: Fields, experiment: Experiment) -> list[dict[str, Any]]:
    """Return the fields of each schedule: of training steps, and of evaluations if the source has fields for them."""
    modes: dict[str, dict[str, Any]] = {"": {}, "train": {}, "eval": {}, "predict": {}, "global": {}}
    for key in [*fields.left]:
        mode, _, name = key.rpartition(".")
        if name in SCHEDULE and mode in modes:
            modes[mode][name] = fields.take(key)
    if modes["predict"]:
        experiment.note(fields.key("predict"), "no counterpart: predictions are not a phase of a run")
    training = {**modes[""], **modes["global"], **modes["train"]}
    found = _steps(Fields(training, fields.where), experiment)
    if modes["eval"]:
        experiment.note(fields.key("eval"), "records every evaluation; the source counts the batches of evaluations")
        found.append({"phase": "eval"})
    return found


def _steps(fields: Fields, experiment: Experiment) -> list[dict[str, Any]]:
    """Return the schedules of the union of `save_steps` and the multiples of `save_interval`."""
    has_interval = "save_interval" in fields.left
    every = fields.number("save_interval", DEFAULT_INTERVAL) or 0
    start, stop = fields.number("start_step", 0) or 0, fields.number("end_step")
    try:
        steps = sorted({whole_number(step) for step in _list(fields.take("save_steps", []))})
    except ValueError:
        raise ConfigError(Problem(fields.key("save_steps"), "must be whole numbers")) from None
    interval = multiples(every, start, stop, fields.key("save_interval"))
    if steps and not has_interval:
        experiment.note("save_steps", f"without the multiples of {DEFAULT_INTERVAL}, the default of save_interval")
        return [{"steps": steps}]
    if interval is None:
        if not steps:
            experiment.note(fields.where, f"disabled in the source: no step is saved before end_step {stop}")
        return [{"steps": steps}] if steps else []
    others = [step for step in steps if step % every or step < start or (stop is not None and step >= stop)]
    return [interval, *([{"steps": others}] if others else [])]


def _list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [item for item in value.split(",") if item.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]
