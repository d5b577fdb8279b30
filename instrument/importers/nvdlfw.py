"""Conversion of configurations of nvidia-dlfw-inspect, with the features of Transformer Engine.

Formats: https://github.com/NVIDIA/nvidia-dlfw-inspect/blob/main/docs/config_file.md and
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/debug.html
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any

from ..errors import ConfigError, Problem
from .conversion import (
    EVERYTHING,
    MAX_NUMBERS,
    ConvertedExperiment,
    Fields,
    layers_containing,
    layers_with_text,
    multiples,
    read_ranges,
    reading,
)

LINEAR = "*Linear"
"""Classes of the layers that Transformer Engine inspects."""
STATISTICS = {name: name for name in ("min", "max", "mean", "std")}
STATISTICS |= {"l1_norm": "l1", "l2_norm": "l2", "cur_amax": "abs_max"}
# The tensors of a layer. In the namespace base, your code names the tensor that it passes, by custom its output.
_WEIGHT = {"params": "weight"}
TENSORS: dict[str, dict[str, Any]] = {
    "activation": {"kind": "forward_pre"},
    "weight": {**_WEIGHT, "kind": "step_pre", "role": "param"},
    "gradient": {"kind": "full_backward_pre"},
    "output": {"kind": "forward"},
    "wgrad": {**_WEIGHT, "kind": "parameter_grad"},
    "dgrad": {"kind": "full_backward"},
}
BASE_TENSORS = {**TENSORS, "activation": {"kind": "forward"}}
FEATURES_OF_QUANTIZED = ("LogFp8TensorStats", "LogNvfp4TensorStats")
RECIPES: dict[str, dict[str, Any]] = {
    "fp8_current_scaling": {"to": "float8_e4m3fn", "scale": "previous"},
    "fp8_delayed_scaling": {"to": "float8_e4m3fn", "scale": "previous"},
    "mxfp8": {"to": "mxfp8_e4m3"},
    "nvfp4": {"to": "nvfp4"},
}
"""The casts of recipes, which are the prefixes of statistics. Without a prefix, the source uses the recipe of the layer."""
STATISTICS_OF_QUANTIZED = {
    "underflows%": "100 underflow_fraction",
    "overflows%": "100 overflow_fraction",
    "mse": "quantization_error rms^2",
    "scale_inv_min": "1 / scale",
    "scale_inv_max": "1 / scale",
}


def convert_nvdlfw(source: Any) -> ConvertedExperiment:
    """Convert the content of a configuration file. Raise a ConfigError if it does not have this form, or a value is invalid."""
    selects = {"enabled", "layers", "layer_name_regex_pattern"}
    sections = [*source.values()] if isinstance(source, Mapping) else []
    if not sections or not all(isinstance(each, Mapping) and selects & {*each} for each in sections):
        message = "is not a configuration of nvidia-dlfw-inspect: its sections have the fields 'enabled' and 'layers'"
        raise ConfigError(Problem("FILE", message, fix="set --from to the tool that the file belongs to"))
    experiment = ConvertedExperiment("nvidia-dlfw-inspect")
    for name, section in source.items():
        with reading(section, str(name), experiment) as fields:
            if fields.flag("enabled", True):
                _convert_section(fields)
            else:
                fields.skip("disabled in the source")
    if any(spec["action"] == "record" for spec in experiment.hooks.values()):
        experiment.settings["reduce"] = "global"  # The tool also computes statistics over all processes.
    return experiment


def _convert_section(section: Fields) -> None:
    experiment = section.experiment
    given = section.take("layers")
    # An example of the documentation has the pattern in the section itself.
    pattern = _layers(section if given is None else Fields(given, section.key("layers"), experiment))
    namespaces = ("base", "transformer_engine")
    features = [(name, value, False) for name, value in section.left.items() if name not in namespaces]
    for namespace in namespaces:
        inner = Fields(section.take(namespace), section.key(namespace), experiment)
        features += [(f"{namespace}.{name}", value, namespace != "base") for name, value in inner.left.items()]
    section.left.clear()
    for key, value, of_engine in features:
        name = key.rpartition(".")[2]
        where = section.key(key)
        if not isinstance(value, Mapping):
            experiment.note(where, "unknown field")
            continue
        with reading(value, where, experiment) as fields:
            if not fields.flag("enabled", True):
                fields.skip("disabled in the source")
            elif name in ("LogTensorStats", "DumpTensors") or (name in FEATURES_OF_QUANTIZED and of_engine):
                _convert_records(fields, pattern, section.where, of_engine)
            else:
                fields.skip("no counterpart")


def _layers(fields: Fields) -> str | list[str]:
    exact, regex = fields.texts("exact_layer_names"), fields.take("layer_name_regex_pattern")
    # An example of the documentation has layer_type.
    texts = [text for key in ("layer_types", "layer_type") for text in fields.texts(key)]
    numbers = fields.take("layer_numbers")
    if exact:  # the same order of precedence as in the tool
        pattern: str | list[str] = exact
    elif regex is not None:
        pattern = layers_containing(str(regex), fields.key("layer_name_regex_pattern"))
    elif numbers not in (None, "all") and "all" not in _as_list(numbers):
        pattern = _numbered(_as_list(numbers), fields.key("layer_numbers"), [] if "all" in texts else texts)
    elif texts and "all" not in texts:
        pattern = layers_with_text(texts)
    elif texts or numbers is not None:
        pattern = EVERYTHING
    else:
        allowed = "layer_name_regex_pattern, layer_types, layer_numbers or exact_layer_names"
        raise ConfigError(Problem(fields.where, "selects no layers", allowed=allowed))
    ignored = [("layer_types", texts), ("layer_numbers", numbers)] if exact or regex is not None else []
    for name, value in [*ignored, *((name, regex) for name in ("layer_name_regex_pattern",) if exact)]:
        if value:
            fields.note(name, "ignored, because another field selects the layers")
    return pattern


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _numbered(numbers: list[Any], where: str, texts: list[str]) -> str:
    """Return the pattern of the layers whose names contain one of several numbers, and one of several texts if there are any."""
    layer_numbers = [number for each in read_ranges(numbers, where) for number in islice(each, MAX_NUMBERS)]
    # The number of a layer does not belong to the names fc1 and fc2.
    number = rf"(?:.*[^\d])?(?<!fc)({'|'.join(map(str, layer_numbers))})(?:[^\d].*)?"
    return f"re:(?={layers_with_text(texts)[3:]}){number}" if texts else f"re:{number}"


def _tensors(feature: Fields) -> Iterator[Fields]:
    """Yield the fields of each tensor of a feature, among them `tensor`, its name."""
    items = feature.mappings("tensors_struct")
    names = feature.texts("tensors")
    shared = dict(feature.left)
    feature.left.clear()
    for item in items or [{"tensor": name} for name in names]:
        merged = {**shared, **item}
        yield Fields(merged, f"{feature.where}[{merged.get('tensor', '')}]", feature.experiment)
    if not items and not names:
        raise ConfigError(Problem(feature.where, "names no tensors", allowed="tensors, or tensors_struct"))


def _convert_records(feature: Fields, layers: str | list[str], section: str, of_engine: bool) -> None:
    known = TENSORS if of_engine else BASE_TENSORS
    experiment, kind = feature.experiment, feature.where.rpartition(".")[2]
    for tensor in _tensors(feature):
        with reading(tensor.left, tensor.where, experiment) as fields:
            name = str(fields.take("tensor", ""))
            if kind in FEATURES_OF_QUANTIZED:
                actions = _casts(fields, name, "nvfp4" if "Nvfp4" in kind else "fp8_current_scaling")
            elif kind == "DumpTensors":
                if fields.flag("quantized_tensor"):
                    fields.note("quantized_tensor", "no counterpart: only tensors before quantization are recorded")
                actions = [{"stats": "none", "tensors": True}] if fields.flag("high_precision_tensor") else []
            else:
                actions = _statistics(fields)
            schedules = _schedules(fields, of_engine)
            if name not in known:
                message = f"no counterpart for the tensor {name!r}, which your code passes to the tool by this name"
                fields.skip(message if not of_engine else f"unknown tensor; known: {', '.join(known)}")
                continue
            if actions and name == "activation" and not of_engine:
                message = "converted to the output of the layer; set kind: forward_pre if your code passes the input"
                experiment.note("activation", message)
            chosen = {"layers": layers, **({"types": LINEAR} if of_engine else {}), **known[name], "action": "record"}
            for schedule, action in product(schedules, actions):
                experiment.add_hook(f"{section}_{name}", {**chosen, **schedule, **action})


def _names(fields: Fields) -> list[str]:
    given = fields.take("stats") or fields.take("type", [])  # An example of the documentation has type.
    names = [next(iter(item)) if isinstance(item, Mapping) and item else str(item) for item in _as_list(given)]
    return [name.lower() for name in names]


def _casts(fields: Fields, tensor: str, usual: str) -> list[dict[str, Any]]:
    """Return an action for each recipe of the statistics of a quantized tensor."""
    casts: dict[str, dict[str, Any]] = {}
    for name in _names(fields):
        recipe = next((recipe for recipe in RECIPES if name.startswith(f"{recipe}_")), usual)
        statistic = name.removeprefix(f"{recipe}_")
        if statistic not in STATISTICS_OF_QUANTIZED or (recipe == "mxfp8" and statistic.startswith("scale")):
            fields.note("stats", f"no counterpart for {name!r}")
            continue
        is_gradient = tensor == "gradient" and recipe.startswith("fp8")  # of the format HYBRID, the default
        casts[recipe] = RECIPES[recipe] | ({"to": "float8_e5m2"} if is_gradient else {})
        meaning = f"{name} is {STATISTICS_OF_QUANTIZED[statistic]} in the table casts"
        fields.note("stats", f"{meaning}, for a simulated cast to {casts[recipe]['to']}")
        if recipe != "mxfp8":
            fields.note("stats", f"{name}: with delayed scaling, margin 1, from the previous recorded tensor")
    return [{"stats": ["rms"], "cast": cast} for cast in casts.values()]


def _statistics(fields: Fields) -> list[dict[str, Any]]:
    statistics = fields.experiment.statistics(_names(fields), STATISTICS, fields.key("stats"))
    if "std" in statistics:
        fields.experiment.note("std", "divided by n here, by n - 1 in the source")
    return [{"stats": statistics}] if statistics else []


def _schedules(fields: Fields, of_engine: bool) -> list[dict[str, int]]:
    every = fields.number("freq", 1)
    intervals = fields.typed("start_end_list", None, list[tuple[int, int]], "a list of pairs of whole numbers")
    start, end = fields.number("start_step", 0), fields.number("end_step", -1)
    inclusive = of_engine or intervals is None  # an interval of the namespace base does not include its end
    schedules = []
    for first, last in [(start, end)] if intervals is None else intervals:
        schedule = multiples(every, first, None if last < 0 else last + inclusive, fields.key("freq"))
        if schedule is None:
            fields.experiment.note(fields.where, f"no step from {first} to {last} is a multiple of freq {every}")
        else:
            schedules.append(schedule)
    return schedules
