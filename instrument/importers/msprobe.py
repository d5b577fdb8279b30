"""Conversion of configurations of msprobe, the precision debugger of Ascend.

Format: `config.json` of PrecisionDebugger, https://gitcode.com/Ascend/msprobe/blob/master/docs/en/dump/config_json_introduct.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..errors import ConfigError, Problem
from .conversion import EVERYTHING, ConvertedExperiment, Fields, layers_with_text, read_ranges, reading

TASKS = (
    *("statistics", "tensor", "overflow_check", "grad_probe"),
    *("run_ut", "acc_check", "free_benchmark", "structure", "exception_dump", "nan_analyze"),
)
STATISTICS = {name: name for name in ("max", "min", "mean")}
STATISTICS |= {"l2norm": "l2", "nan count": "nan_count", "zero count": "zero_fraction"}
DEFAULT_STATISTICS = ["max", "min", "mean", "l2"]
Tensors = Mapping[tuple[str, str], tuple[str, dict[str, Any]]]
"""The name and the fields of the hook on each kind of tensor."""
# msprobe names tensors by their direction. What enters a backward pass is the gradient of the output.
INPUT, OUTPUT = ("forward", "input"), ("forward", "output")
GRAD_OUTPUT, GRAD_INPUT = ("backward", "input"), ("backward", "output")
MODULE_TENSORS: Tensors = {
    INPUT: ("inputs", {"kind": "forward_pre"}),
    OUTPUT: ("outputs", {"kind": "forward"}),
    GRAD_OUTPUT: ("output_gradients", {"kind": "full_backward_pre"}),
    GRAD_INPUT: ("input_gradients", {"kind": "full_backward"}),
}
PARAMETERS: Tensors = {
    INPUT: ("parameters", {"kind": "step_pre", "role": "param"}),
    GRAD_INPUT: ("parameter_gradients", {"kind": "parameter_grad"}),
}
FUNCTION_TENSORS: Tensors = {
    INPUT: ("function_arguments", {"kind": "function", "role": "input"}),
    OUTPUT: ("function_results", {"kind": "function"}),
    GRAD_OUTPUT: ("function_gradients", {"kind": "function_grad"}),
}
FULL_FUNCTION = re.compile(
    r"(Tensor|Torch|Functional|VF|Aten|NPU|Mint|MintFunctional)\.(\w+)\.(\d+)(?:\.(forward|backward))?"
)
FULL_MODULE = re.compile(r"(?:Module|Cell)\.(?:module\.)*(.+?)\.\w+\.(?:forward|backward)(?:\.\d+)?")
ELSEWHERE = {
    "dump_path": "pass hydra.run.dir=FOLDER to the run, or out= to instrument.attach",
    "rank": "each process is recorded; select rows by the column 'rank'",
    "enable_dataloader": "set train.steps to end the run after the last recorded step",
}


@dataclass(frozen=True)
class _Plan:
    """What one task records. `modes`: the selected tensors by direction. `prefix`: of the names of the hooks."""

    modes: Sequence[tuple[str, str]]
    schedule: Mapping[str, Any]
    action: Mapping[str, Any]
    prefix: str = ""


def convert_msprobe(source: Any) -> ConvertedExperiment:
    """Convert the content of `config.json`. Raise a ConfigError if it does not have this form, or a value is invalid."""
    experiment = ConvertedExperiment("msprobe")
    if not isinstance(source, Mapping) or not {"task", "dump_path", "level", *TASKS} & {*source}:
        message = "is not a configuration of msprobe: it has no field 'task'"
        raise ConfigError(Problem("FILE", message, fix="set --from to the tool that the file belongs to"))
    with reading(source, "", experiment) as fields:
        task = str(fields.take("task", "statistics"))
        if task not in TASKS:
            raise ConfigError(Problem("task", "unknown task", given=task, allowed=TASKS))
        ranges = read_ranges(fields.take("step", []), "step")
        steps = sorted({step for each in ranges for step in each})
        schedule: dict[str, Any] = {"steps": steps} if steps else {}
        if len(ranges) == 1 and len(steps) > 1:
            schedule = {"start": ranges[0].start, "stop": ranges[0].stop}
        level = str(fields.take("level", "L1"))
        fields.note_given(ELSEWHERE)
        if (seed := fields.number("seed")) is not None:
            experiment.settings["seed"] = seed
        if fields.flag("is_deterministic"):
            experiment.settings["deterministic"] = True
        with reading(fields.take(task), task, experiment) as options:
            _convert_task(task, level, options, schedule)
        fields.note_given(dict.fromkeys(TASKS, f"not used by task {task}"))
    return experiment


def _convert_task(task: str, level: str, options: Fields, schedule: Mapping[str, Any]) -> None:
    if task not in ("statistics", "tensor", "overflow_check"):
        options.left.clear()
        options.experiment.note("task", f"no counterpart for {task!r}")
        return
    if level not in ("L0", "L1", "mix"):
        options.left.clear()
        message = f"no counterpart for {level!r}: modules (L0) and functions (L1) can be recorded, kernels cannot"
        options.experiment.note("level", message)
        return
    given = options.texts("data_mode")
    if unknown := [mode for mode in given if mode not in ("all", "forward", "backward", "input", "output")]:
        allowed = "all, forward, backward, input, output"
        raise ConfigError(Problem(options.key("data_mode"), "unknown mode", given=unknown[0], allowed=allowed))
    # A direction or a side that is not named is not restricted.
    directions = [each for each in ("forward", "backward") if each in given] or ["forward", "backward"]
    modes = [*product(directions, [each for each in ("input", "output") if each in given] or ["input", "output"])]
    statistics = ["nan_count", "inf_count"] if task == "overflow_check" else _statistics(options)
    action: dict[str, Any] = {"stats": statistics, **({"tensors": True} if task == "tensor" else {})}
    scope, names, full = options.texts("scope"), options.texts("list"), options.texts("tensor_list")
    if len(scope) > 1:
        options.note("scope", "no counterpart for the calls between two names; the hooks are not restricted")
    _add_hooks(level, [*(scope if len(scope) == 1 else []), *names], _Plan(modes, schedule, action), options)
    if full:
        _add_hooks(level, full, _Plan(modes, schedule, {"stats": "none", "tensors": True}, "tensors_"), options)


def _statistics(options: Fields) -> list[str]:
    given = options.take("summary_mode", "statistics")
    if isinstance(given, list):
        where = options.key("summary_mode")
        return options.experiment.statistics([str(each) for each in given], STATISTICS, where) or DEFAULT_STATISTICS
    if given != "statistics":
        options.note("summary_mode", f"no counterpart for checksums ({given}); statistics are recorded instead")
    return list(DEFAULT_STATISTICS)


def _add_hooks(level: str, names: Sequence[str], plan: _Plan, options: Fields) -> None:
    """Add the hooks of a level: on the named modules or functions, or on all if no name is given."""
    experiment = options.experiment
    modules = [match[1] for name in names if (match := FULL_MODULE.fullmatch(name))]
    functions = [match for name in names if (match := FULL_FUNCTION.fullmatch(name))]
    texts = [name for name in names if not FULL_MODULE.fullmatch(name) and not FULL_FUNCTION.fullmatch(name)]
    layers: list[str] = [*modules, *([layers_with_text(texts)] if texts and level != "L1" else [])]
    if level != "L1" and (layers or not names):
        _add(MODULE_TENSORS, {"layers": _one(layers) if layers else EVERYTHING}, plan, experiment)
        if not layers:
            _add(PARAMETERS, {"layers": EVERYTHING}, plan, experiment)
        else:
            message = "without the parameters of these modules and their gradients: add hooks of kind step_pre and parameter_grad"
            experiment.note(options.where, message)
    if level != "L0" and not names:
        _add_functions({"layers": ".", "functions": "*"}, plan, experiment)
    elif level == "mix" and layers:
        _add_functions({"layers": _one(layers), "functions": "*"}, plan, experiment)
    elif level == "L1" and texts:
        _add_functions({"layers": ".", "functions": _one([f"*{text}*" for text in texts])}, plan, experiment)
    for match in functions if level != "L0" else ():
        directions = [mode for mode in plan.modes if match[4] in (None, mode[0])]
        chosen = {"layers": ".", "functions": match[2], "path": f"{match[2]}.{match[3]}.**"}
        of_call = replace(plan, modes=directions, prefix=f"{plan.prefix}{match[2]}_{match[3]}_")
        _add_functions(chosen, of_call, experiment)
    for name in [match[0] for match in functions] if level == "L0" else modules if level == "L1" else []:
        options.note("list", f"{name!r} does not belong to level {level}")


def _one(values: list[str]) -> str | list[str]:
    return values[0] if len(values) == 1 else values


def _add_functions(chosen: Mapping[str, Any], plan: _Plan, experiment: ConvertedExperiment) -> None:
    if GRAD_INPUT in plan.modes:
        experiment.note("data_mode", "no counterpart for the gradients of the arguments of functions (backward output)")
    _add(FUNCTION_TENSORS, chosen, plan, experiment)
    if chosen["layers"] == ".":
        experiment.note("level", "functions outside of the model, such as the loss function, are not recorded")


def _add(tensors: Tensors, chosen: Mapping[str, Any], plan: _Plan, experiment: ConvertedExperiment) -> None:
    for mode, (name, fields) in tensors.items():
        if mode in plan.modes:
            hook = {**chosen, **fields, "action": "record", **plan.schedule, **plan.action}
            experiment.add_hook(f"{plan.prefix}{name}", hook)
