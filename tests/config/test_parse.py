"""Parsing of mappings to specs: accepted input, and the message for each problem."""

from __future__ import annotations

import functools
import json
import math
import pickle
import sys
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from torch import nn

from instrument.config import apply as apply_specs
from instrument.config.apply import INIT_FUNCTIONS
from instrument.config.base import ACTIONS as HOOK_ACTIONS
from instrument.config.experiment import BudgetConfig
from instrument.config.hook_specs import FUNCTIONS, FunctionSpec, RecordSpec
from instrument.config.parse import parse_apply, parse_config, parse_hooks
from instrument.config.spec_file import read_specs
from instrument.errors import ConfigError, Problem
from instrument.fields.field_types import DEFAULT_BINS, DEFAULT_LEVELS
from instrument.tables.kinds import KINDS
from instrument.tables.statistics import ALL, DEFAULT, statistic_of

RECORD = {"layers": "**", "kind": "forward", "action": "record"}
SWAP = {"layers": "**", "kind": "forward", "action": "modify", "fn": "swap"}
ADD = {**SWAP, "fn": "add"}
PATCH = {**SWAP, "fn": "patch"}
CLIP = {"layers": "**", "kind": "parameter_grad", "action": "clip"}
SCALE = {"layers": "**", "kind": "forward", "action": "scale"}
NOISE = {"layers": "**", "kind": "forward", "action": "modify", "fn": "noise"}
L2 = {"layers": "**", "kind": "parameter_grad", "action": "modify", "fn": "l2"}
INIT = {"layers": "**", "action": "init", "fn": "kaiming_normal_"}
FILL = {"layers": "**", "action": "fill"}
ADDED = {"layers": "**", "action": "add_parameter"}
SET = {"layers": "**", "action": "set", "attribute": "p"}
CONFIG: dict[str, Any] = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2},
    "data": {"dataset": {"_target_": "instrument.training.datasets.digits"}},
    "task": {"_target_": "instrument.tasks.Supervised"},
    "optimizer": {"_target_": "torch.optim.SGD"},
    "train": {"steps": 3},
}


def problems_in(parse: Any, raw: Any) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    return caught.value.problems


def problem_in(parse: Any, raw: Any) -> Problem:
    (problem,) = problems_in(parse, raw)
    return problem


def parsed(**spec: Any) -> Any:
    return parse_hooks({"x": spec})["x"]


# ---------------------------------------------------------------------------------------------- accepted input


def test_hooks_mapping_and_list_are_equivalent() -> None:
    clip = {**CLIP, "norm": 1.0}
    mapping = parse_hooks({"look": RECORD, "tame": clip})
    listed = parse_hooks([{**RECORD, "name": "look"}, {**clip, "name": "tame"}])
    assert mapping == listed
    assert list(mapping) == ["look", "tame"]
    assert [spec.name for spec in mapping.values()] == ["look", "tame"]


def test_unnamed_list_item_gets_its_index_as_name() -> None:
    assert list(parse_hooks([RECORD, {**RECORD, "name": "mine"}, RECORD])) == ["hooks_0", "mine", "hooks_2"]
    assert list(parse_apply([INIT])) == ["apply_0"]


@pytest.mark.parametrize("parse", [parse_hooks, parse_apply])
@pytest.mark.parametrize("empty", [None, {}, [], {"gone": None}, [None]])
def test_null_entries_are_ignored(parse: Any, empty: Any) -> None:
    assert parse(empty) == {}
    assert list(parse_hooks({"a": None, "b": RECORD})) == ["b"]


def selection_for(kind: str) -> dict[str, Any]:
    layers = {} if kind == "collective" else {"layers": "**"}
    return {**layers, "functions": "softmax"} if KINDS[kind].of_functions else layers


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_records_its_roles_and_defaults_to_the_first(kind: str) -> None:
    spec = {"kind": kind, "action": "record", **selection_for(kind)}
    assert parsed(**spec).tensor_role == KINDS[kind].roles[0]
    for role in KINDS[kind].roles:
        exact = role.replace(".*", ".exp_avg")
        assert parsed(**{**spec, "role": exact}).tensor_role == exact


@pytest.mark.parametrize("kind", KINDS)
def test_kind_allows_interventions_on_its_changeable_roles_only(kind: str) -> None:
    for role in KINDS[kind].roles:
        spec = {"kind": kind, "role": role.replace(".*", ".exp_avg"), **selection_for(kind)}
        spec |= {"action": "scale", "factor": 2}
        if role in KINDS[kind].changes:
            assert parsed(**spec).tensor_role == spec["role"]
        else:
            assert "cannot change role" in problem_in(parse_hooks, {"x": spec}).message


@pytest.mark.parametrize(
    ("requested", "given"),
    [
        ("default", DEFAULT),
        ("all", tuple(name for name in ALL if not (only := statistic_of(name).only) or ("forward", "output") in only)),
        (["max", "l1", "numel"], ("numel", "max", "l1", "nan_count", "inf_count")),
        ("rms", ("numel", "rms", "nan_count", "inf_count")),
        ("nan_count", ("numel", "nan_count", "inf_count")),
        ("none", ()),
    ],
)
def test_statistics_are_in_column_order(requested: Any, given: tuple[str, ...]) -> None:
    spec = parsed(**RECORD, tensors=True, stats=requested)
    assert isinstance(spec, RecordSpec)
    assert spec.statistics == given


@pytest.mark.parametrize(
    ("spec", "attribute", "value"),
    [
        *((RECORD | {"quantiles": off}, "quantiles", None) for off in (False, None)),
        (RECORD | {"quantiles": True}, "quantiles", DEFAULT_LEVELS),
        (RECORD | {"quantiles": 0.5}, "quantiles", (0.5,)),
        (RECORD | {"quantiles": [0.9, 0, 0.5, 0.9]}, "quantiles", (0.0, 0.5, 0.9)),
        *((RECORD | {"histogram": off}, "histogram", None) for off in (False, None)),
        (RECORD | {"histogram": True}, "histogram", DEFAULT_BINS),
        (RECORD | {"histogram": 10}, "histogram", 10),
        (CLIP | {"norm": 1.0}, "norm_scope", "all"),
        (CLIP | {"norm": 1.0, "kind": "post_accumulate_grad"}, "norm_scope", "tensor"),
        (CLIP | {"norm": 1.0, "kind": "forward"}, "norm_scope", "tensor"),
        (CLIP | {"norm": 1.0, "scope": "tensor"}, "norm_scope", "tensor"),
        (CLIP | {"norm": 1.0, "kind": "forward", "scope": "sample"}, "norm_scope", "sample"),
        (CLIP | {"norm": 1.0, "ord": math.inf}, "ord", math.inf),
        ({"types": "Linear", "kind": "forward", "action": "record"}, "globs", ("**",)),
        ({"types": "Linear", "kind": "forward", "action": "record"}, "types", ("Linear",)),
        *((RECORD | {"layers": "lstm", "path": path}, "path", "1") for path in (1, "1")),
        (RECORD | {"layers": [0, 2]}, "layers", ("0", "2")),
        (RECORD | {"exclude": 1}, "exclude", ("1",)),
        *((NOISE | {"fn": nan}, "fn", "nan") for nan in ("nan", math.nan, yaml.safe_load(".nan"))),
        *((NOISE | {"fn": "nan", "value": put}, "value", f"{put}") for put in (math.inf, -math.inf, math.nan, "inf")),
    ],
    ids=str,
)
def test_field_is_parsed_to_its_value(spec: dict[str, Any], attribute: str, value: Any) -> None:
    assert getattr(parsed(**spec), attribute) == value


def test_custom_function_keeps_its_arguments() -> None:
    fn = {"_target_": "my.module.shift", "by": 2, "inner": {"_target_": "my.other"}}
    spec = parsed(**SCALE | {"action": "modify", "fn": fn})
    assert isinstance(spec, FunctionSpec)
    assert spec.fn.to_config() == fn


def test_init_spec_keeps_the_function_arguments() -> None:
    spec = parse_apply({"x": {**INIT, "nonlinearity": "relu", "a": 0.1}})["x"]
    assert isinstance(spec, apply_specs.InitSpec)
    assert spec.arguments == {"nonlinearity": "relu", "a": 0.1}
    assert parse_apply({"a": {**SET, "value": math.inf}})


def test_specs_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parsed(**RECORD).every = 3


def test_config_is_parsed_with_defaults() -> None:
    config = parse_config({**CONFIG, "hooks": {"look": RECORD}, "apply": {"init": INIT}, "sink": None})
    assert (config.name, config.seed, config.device, config.scheduler) == ("run", 0, "auto", None)
    assert (config.data.slice.split, config.data.eval_slice.split) == (None, None)
    assert (config.train.steps, config.train.batch_size, config.sink.tensors) == (3, 64, None)
    assert config.hooks == parse_hooks({"look": RECORD})
    assert config.apply == parse_apply({"init": INIT})
    assert config.model.to_config() == CONFIG["model"]
    assert parse_config({**CONFIG, "name": 2024}).name == "2024"


# ----------------------------------------------------------------------------------------------------- invalid hooks

# What is added to a spec, the location of the problem, and words of its message.
OUT_OF_RANGE: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (RECORD, {"every": 0}, "every", "greater than or equal to 1"),
    (RECORD, {"every": -1}, "every", "greater than or equal to 1"),
    (RECORD, {"every": 1.5}, "every", "integer"),
    (RECORD, {"every": True}, "every", "not true or false"),
    (RECORD, {"every": "often"}, "every", "integer"),
    (RECORD, {"every": None}, "every", "integer"),
    (RECORD, {"start": -1}, "start", "greater than or equal to 0"),
    (RECORD, {"stop": 0}, "stop", "greater than or equal to 1"),
    (RECORD, {"start": 5, "stop": 5}, "", "stop (5) must be larger than start (5)"),
    (RECORD, {"start": 5, "stop": 3}, "", "stop (3) must be larger than start (5)"),
    (RECORD, {"steps": []}, "steps", "must not be empty"),
    (RECORD, {"steps": [-1]}, "steps.0", "greater than or equal to 0"),
    (RECORD, {"quantiles": [2]}, "quantiles.0", "less than or equal to 1"),
    (RECORD, {"steps": [0, -1]}, "steps.1", "greater than or equal to 0"),
    (RECORD, {"steps": [1], "every": 2}, "", "'steps' cannot be combined"),
    (RECORD, {"steps": [1], "start": 0}, "", "'steps' cannot be combined"),
    (RECORD, {"phase": "evaluation"}, "phase", "not an allowed value"),
    (RECORD, {"kind": "full_backward", "phase": "eval"}, "", "requires gradients"),
    (RECORD, {"kind": "parameter_grad", "phase": "eval"}, "", "requires gradients"),
    (RECORD, {"kind": "step_post", "phase": "eval"}, "", "phase eval"),
    (RECORD, {"role": "inputs"}, "", "has no role 'inputs'; its roles are output, input"),
    (RECORD, {"kind": "step_post", "role": "state."}, "", "has no role 'state.'"),
    (RECORD, {"params": "weight"}, "", "'params' requires a kind with parameters"),
    (RECORD, {"kind": "parameter_grad", "path": "0"}, "", "use 'params'"),
    (RECORD, {"path": "a..b"}, "path", "empty segment"),
    (RECORD, {"layers": []}, "layers", "must not be empty"),
    (RECORD, {"layers": True}, "layers.0", "must be a string, not True (bool); YAML reads"),
    (RECORD, {"layers": ["a", "b["]}, "layers.1", "not closed"),
    (RECORD, {"layers": "re:("}, "layers.0", "regular expression"),
    (RECORD, {"layers": "[z-a]"}, "layers.0", "range"),
    (RECORD, {"exclude": "a**"}, "exclude.0", "complete segment"),
    (RECORD, {"layers": None}, "", "requires 'layers'"),
    (RECORD, {"stats": "none"}, "", "records nothing"),
    (
        RECORD,
        {"spectrum": 3, "kind": "step_post", "role": "buffer"},
        "",
        "spectrum requires role param, param_grad, update, output, input, change, grad_output or grad_input; this hook has kind step_post",
    ),
    (RECORD, {"spectrum": 0, "kind": "parameter_grad"}, "spectrum", "greater than or equal to 1"),
    (RECORD, {"stats": []}, "", "records nothing"),
    (RECORD, {"tensors": "maybe"}, "tensors", "true or false"),
    (RECORD, {"tensors": True, "samples": 0}, "samples", "greater than or equal to 1"),
    (RECORD, {"tensors": True, "max_elements": 0}, "max_elements", "greater than or equal to 1"),
    (RECORD, {"tensors": True, "slice": "0:4, x"}, "slice", "'x' is not a slice"),
    (RECORD, {"tensors": True, "slice": "::0"}, "slice", "step of a slice must not be 0"),
    (RECORD, {"tensors": True, "slice": "::-1"}, "slice", "is not a slice"),
    (RECORD, {"slice": ["0:4", 2]}, "slice", "must be text: put the slice, with its brackets, in quotes"),
    (RECORD, {"slice": "[0:4"}, "slice", "'[0:4' is not a slice"),
    (RECORD, {"slice": "1", "units": [1]}, "", "'slice' cannot be combined with 'units'"),
    (RECORD, {"units": []}, "units", "must not be empty"),
    (RECORD, {"units": [1, 1]}, "units", "the index 1 is given twice"),
    (RECORD, {"heads": {"of": 0, "take": [1]}}, "heads.of", "greater than or equal to 1"),
    (RECORD, {"heads": {"of": 2}}, "heads.take", "is missing"),
    (RECORD, {"heads": {"of": 2, "tkae": 1, "take": 1}}, "heads", "unknown field 'tkae'"),
    (RECORD, {"int": 1}, "", "unknown field 'int'"),
    (RECORD, {"unit_dim": 1}, "", "'unit_dim' requires 'units', dead_fraction in 'stats', 'spectrum', or"),
    (RECORD, {"kind": "parameter_grad", "samples": [0]}, "", "'samples' requires a batch"),
    (RECORD, {"kind": "step_post", "positions": [0]}, "", "'positions' requires a batch"),
    (RECORD, {"kind": "parameter_grad", "heads": {"of": 2, "take": 0}}, "", "'heads' requires the tensors of a module"),
    (RECORD, {"kind": "loss", "units": [0]}, "", "'units' selects elements, but the loss is one number"),
    (SWAP, {"kind": "parameter_grad"}, "", "swap requires a batch"),
    (SWAP, {"slice": "0:2"}, "", "swap cannot be combined with 'slice'"),
    (ADD, {}, "", "requires exactly one of value, vector, and both plus and minus"),
    (ADD, {"value": 1.0, "vector": "a.npy"}, "", "requires exactly one of value, vector"),
    (ADD, {"plus": "a"}, "", "requires exactly one of value, vector, and both plus and minus"),
    (ADD, {"value": 1.0, "key": "a"}, "", "'key' requires 'vector'"),
    (ADD, {"vector": "a.npy", "hook": "a"}, "", "'hook' requires 'plus'"),
    ({**ADD, "fn": "project_out"}, {}, "", "requires exactly one of vector and run"),
    ({**ADD, "fn": "project_onto"}, {"vector": "a.npy", "components": 2}, "", "'components' requires 'run'"),
    (PATCH, {"slice": "0:2"}, "", "patch requires 'run' or 'from_sample', and not both"),
    (PATCH, {"slice": "0:2", "run": "a", "from_sample": 0}, "", "patch requires 'run' or 'from_sample', and not both"),
    (PATCH, {"slice": "0:2", "from_sample": 0, "step": 1}, "", "'hook' and 'step' require 'run'"),
    (PATCH, {"slice": "0:2", "from_sample": 0, "kind": "parameter_grad"}, "", "'from_sample' requires a batch"),
    (PATCH, {"fn": "replace"}, "", "replace requires 'run'"),
    (PATCH, {"fn": "replace", "from_sample": 0}, "", "'from_sample' requires fn patch"),
    (CLIP, {"norm": 1.0, "samples": 2}, "samples", "must be a list"),
    *((RECORD, {key: dict}, key, "must be a name, not a class") for key in ("layers", "types")),
    (RECORD, {"types": [dict]}, "types.0", "must be a name, not a class"),
    (RECORD, {"layers": nn.ReLU()}, "layers", "must be a name, not a module"),
    (RECORD, {"layers": [nn.ReLU()]}, "layers.0", "must be a name, not a module"),
    (RECORD, {"tensors": True, "dtype": "int4"}, "dtype", "not an allowed value"),
    (RECORD, {"samples": 2}, "", "require 'tensors: true'"),
    (CLIP, {}, "", "requires exactly one of min/max, value, norm, quantile, ratio; given: none"),
    (CLIP, {"norm": 1.0, "value": 1.0}, "", "given: value and norm"),
    (CLIP, {"norm": 1.0, "max": 1.0}, "", "given: min/max and norm"),
    (CLIP, {"min": 2.0, "max": 1.0}, "", "min (2.0) is above max (1.0)"),
    (CLIP, {"min": math.nan}, "min", "finite"),
    (CLIP, {"max": math.inf}, "max", "finite"),
    (CLIP, {"value": -1.0}, "value", "greater than or equal to 0"),
    (CLIP, {"value": math.nan}, "value", "finite"),
    (CLIP, {"norm": -0.5}, "norm", "greater than or equal to 0"),
    (CLIP, {"norm": math.nan}, "norm", "finite"),
    (CLIP, {"norm": math.inf}, "norm", "finite"),
    (CLIP, {"norm": "large"}, "norm", "number"),
    (CLIP, {"norm": True}, "norm", "not true or false"),
    (RECORD, {"quantiles": [0.5, 1.5]}, "quantiles.1", "less than or equal to 1"),
    (RECORD, {"quantiles": []}, "quantiles", "must not be empty"),
    (RECORD, {"quantiles": "half"}, "quantiles", "must be a list"),
    (RECORD, {"histogram": 1}, "histogram", "greater than or equal to 2"),
    (RECORD, {"histogram": 5000}, "histogram", "less than or equal to 4096"),
    (RECORD, {"histogram": "many"}, "histogram", "integer"),
    (CLIP, {"norm": 1.0, "ord": -1.0}, "ord", "greater than or equal to 0"),
    (CLIP, {"norm": 1.0, "ord": math.nan}, "ord", "greater than or equal to 0"),
    (CLIP, {"value": 1.0, "ord": 1.0}, "", "require 'norm'"),
    (CLIP, {"value": 1.0, "scope": "tensor"}, "", "require 'norm'"),
    (CLIP, {"norm": 1.0, "scope": "batch"}, "scope", "not an allowed value"),
    (CLIP, {"kind": "forward", "norm": 1.0, "scope": "all"}, "", "requires kind parameter_grad"),
    (CLIP, {"norm": 1.0, "scope": "sample"}, "", "requires a batch dimension"),
    (SCALE, {}, "factor", "is missing"),
    (SCALE, {"factor": math.nan}, "factor", "finite"),
    (SCALE, {"factor": -math.inf}, "factor", "finite"),
    (SCALE, {"factor": "half"}, "factor", "number"),
    (SCALE, {"factor": True}, "factor", "not true or false"),
    (RECORD, {"kind": "function"}, "", "requires 'functions'"),
    (RECORD, {"functions": "add"}, "", "require kind function or function_grad, not forward"),
    (RECORD, {"own": True}, "", "require kind function or function_grad, not forward"),
    (RECORD, {"kind": "function", "functions": "[a"}, "functions.0", "is not closed"),
    (RECORD, {"kind": "function", "functions": "a", "prepend": True}, "", "'prepend' requires"),
    (SCALE, {"factor": 2.0, "role": "input"}, "", "cannot change role input; forward_pre and tensor can"),
    (SCALE, {"factor": 2.0, "kind": "step_post", "role": "update"}, "", "cannot change role update"),
    (NOISE, {}, "std", "is missing"),
    (NOISE, {"std": -0.1}, "std", "greater than or equal to 0"),
    (NOISE, {"std": math.nan}, "std", "finite"),
    (NOISE, {"std": 1.0, "mean": math.inf}, "mean", "finite"),
    (L2, {"coefficient": -1.0}, "coefficient", "greater than or equal to 0"),
    (L2, {"coefficient": math.nan}, "coefficient", "finite"),
    (L2, {"coefficient": 1.0, "kind": "forward"}, "", "not forward"),
    (L2, {"fn": {}}, "fn._target_", "is missing"),
    (L2, {"fn": {"_target_": ""}}, "fn._target_", "must not be empty"),
]


@pytest.mark.parametrize(("spec", "fields", "location", "words"), OUT_OF_RANGE)
def test_invalid_value_is_reported_with_its_location(
    spec: dict[str, Any], fields: dict[str, Any], location: str, words: str
) -> None:
    problem = problem_in(parse_hooks, {"mine": {**spec, **fields}})
    assert problem.where == ".".join(part for part in ("hooks.mine", location) if part)
    assert words in problem.message
    if location and problem.message != "is missing" and fields[location.split(".", maxsplit=1)[0]] is not None:
        assert problem.given is not None


def test_backward_kind_is_refused_with_full_backward_suggested() -> None:
    problem = problem_in(parse_hooks, {"old": {**RECORD, "kind": "backward"}})
    assert "deprecated in PyTorch: its gradients are wrong for modules with several operations" in str(problem)
    assert "similar  full_backward" in str(problem)


# What is added to a spec, then where, given, allowed and similar of the problem.
UNKNOWN: list[tuple[dict[str, Any], dict[str, Any], str, str, str, str]] = [
    (RECORD, {"evry": 2}, "hooks.mine", "evry: 2", "every", "every"),
    (RECORD, {"stat": "all"}, "hooks.mine", "stat: all", "stats", "stats"),
    (CLIP, {"norm": 1.0, "nrom": 2}, "hooks.mine", "nrom: 2", "norm", "norm"),
    (SCALE, {"factor": 1.0, "facter": 2}, "hooks.mine", "facter: 2", "factor", "factor"),
    (NOISE, {"std": 1.0, "men": 2}, "hooks.mine", "men: 2", "mean", "mean"),
    (RECORD, {"kind": "foward"}, "hooks.mine.kind", "foward", "forward", "forward"),
    (RECORD, {"kind": "backward"}, "hooks.mine", "kind: backward", "", "full_backward"),
    (RECORD, {"action": "recrod"}, "hooks.mine.action", "recrod", "record", "record"),
    (RECORD, {"action": "Clip"}, "hooks.mine.action", "Clip", "clip", "clip"),
    (NOISE, {"fn": "nose"}, "hooks.mine.fn", "nose", "noise", "noise"),
    (RECORD, {"stats": ["mean", "stdd"]}, "hooks.mine.stats", "stdd", "std", "std"),
    (RECORD, {"stats": "al"}, "hooks.mine.stats", "al", "mean", ""),
    (RECORD, {"phase": "trian"}, "hooks.mine.phase", "trian", "train", "train"),
    (RECORD, {"tensors": True, "dtype": "flaot32"}, "hooks.mine.dtype", "flaot32", "float32", "float32"),
]


@pytest.mark.parametrize(("spec", "fields", "where", "written", "allowed", "near"), UNKNOWN)
def test_unknown_name_message_has_four_parts(
    spec: dict[str, Any], fields: dict[str, Any], where: str, written: str, allowed: str, near: str
) -> None:
    problem = problem_in(parse_hooks, {"mine": {**spec, **fields}})
    assert (problem.where, problem.given) == (where, written)
    assert not allowed or allowed in problem.allowed
    assert not near or problem.similar[0] == near
    lines = str(problem).splitlines()
    assert lines[0].startswith(f"{where}: ")
    assert lines[1].split() == ["given", *written.split()]
    assert not near or lines[-1].split()[:2] in (["similar", near], ["similar", f"{near},"])


@pytest.mark.parametrize(
    ("missing", "where"), [("kind", "hooks.mine.kind"), ("action", "hooks.mine.action"), ("layers", "hooks.mine")]
)
def test_missing_field_is_reported(missing: str, where: str) -> None:
    spec = {key: value for key, value in RECORD.items() if key != missing}
    problem = problem_in(parse_hooks, {"mine": spec})
    assert problem.where == where
    assert missing in f"{problem}"


@pytest.mark.parametrize(
    "action", [{"action": "modify", "fn": "zero"}, {"action": "print"}, {"action": "clip", "value": 1.0}]
)
def test_field_of_another_action_is_reported(action: dict[str, Any]) -> None:
    problem = problem_in(parse_hooks, {"mine": {"layers": "**", "kind": "forward", "cast": "bfloat16", **action}})
    assert (problem.where, problem.message, problem.given) == (
        "hooks.mine.cast",
        "another action has this field",
        "bfloat16",
    )
    assert problem.allowed == "action: record"
    assert problem.fix == "write a second hook with action: record, or remove 'cast'"


def test_missing_field_suggests_the_misspelt_key() -> None:
    missing, unknown = problems_in(parse_hooks, {"mine": {"layers": "**", "kind": "forward", "acton": "record"}})
    assert (missing.where, missing.message, list(missing.similar)) == ("hooks.mine.action", "is missing", ["acton"])
    assert (unknown.where, unknown.message) == ("hooks.mine", "unknown field 'acton'")
    problem = problem_in(parse_hooks, {"mine": {"layers": "**", "kind": "forward", "action": "modify"}})
    assert problem.where == "hooks.mine.fn"
    assert "noise" in problem.allowed
    assert "or {_target_: package.function}" in problem.allowed


@pytest.mark.parametrize("parse", [parse_hooks, parse_apply])
@pytest.mark.parametrize("raw", ["encoder", 5, True])
def test_section_of_wrong_type_is_refused(parse: Any, raw: Any) -> None:
    problem = problem_in(parse, raw)
    assert "mapping from names to specs, or a list" in problem.message
    assert problem.given == raw


def test_set_as_the_value_of_a_section_is_told_how_to_select_it() -> None:
    with pytest.raises(
        ConfigError, match="select the set on the command line, hooks=gradients, or in the defaults list"
    ):
        parse_hooks("gradients")


@pytest.mark.parametrize("spec", ["record", 3, ["record"], False])
def test_spec_of_wrong_type_is_refused(spec: Any) -> None:
    problem = problem_in(parse_hooks, {"mine": spec})
    assert (problem.where, problem.message, problem.given) == ("hooks.mine", "must be a mapping", spec)


@pytest.mark.parametrize("name", ["my hook", "a.b", "1st", "", "é!"])
def test_name_that_is_no_identifier_is_refused(name: str) -> None:
    problem = problem_in(parse_hooks, {name: RECORD})
    assert (problem.where, problem.given) == ("hooks", name)
    assert "letters, digits and underscores" in problem.message


def test_name_is_unique_and_equals_its_key() -> None:
    problem = problem_in(parse_hooks, [{**RECORD, "name": "a"}, {**RECORD, "name": "a"}])
    assert (problem.where, problem.message) == ("hooks.a", "this name is used twice; names must be unique")
    assert parse_hooks({"a": {**RECORD, "name": "a"}})["a"].name == "a"
    problem = problem_in(parse_hooks, {"a": {**RECORD, "name": "b"}})
    assert (problem.where, problem.given) == ("hooks.a.name", "b")


def test_all_problems_of_all_specs_are_reported_at_once() -> None:
    problems = problems_in(
        parse_hooks,
        {
            "fine": RECORD,
            "one": {**RECORD, "every": 0, "start": -1, "stats": ["avg"]},
            "two": {**CLIP, "norm": -1.0, "scop": "all"},
            "three": {**RECORD, "action": "look"},
            "my hook": RECORD,
            "four": "record",
        },
    )
    assert [problem.where for problem in problems] == [
        *("hooks.one.every", "hooks.one.start", "hooks.one.stats", "hooks.two.norm", "hooks.two", "hooks.three.action"),
        *("hooks", "hooks.four"),
    ]


# ---------------------------------------------------------------------------------------------- invalid apply specs


@pytest.mark.parametrize(
    ("spec", "where", "words", "near"),
    [
        ({**INIT, "fn": "kaiming_norml_"}, "apply.mine.fn", "unknown function of torch.nn.init", "kaiming_normal_"),
        ({**INIT, "action": "initialise"}, "apply.mine.action", "unknown action", "init"),
        ({"layers": "**", "fn": "zeros_"}, "apply.mine.action", "is missing", ""),
        ({"layers": "**", "action": "init"}, "apply.mine.fn", "is missing", ""),
        (FILL, "apply.mine.value", "is missing", ""),
        ({**FILL, "value": math.nan}, "apply.mine.value", "finite", ""),
        ({**FILL, "value": 1.0, "parms": "bias"}, "apply.mine", "unknown field 'parms'", "params"),
        ({"layers": "**", "action": "freeze", "exclud": "a"}, "apply.mine", "unknown field 'exclud'", "exclude"),
        ({"layers": "**", "action": "replace"}, "apply.mine.module", "is missing", ""),
        ({"layers": "**", "action": "replace", "module": {}}, "apply.mine.module._target_", "is missing", ""),
        ({"layers": "**", "action": "set", "value": 1}, "apply.mine.attribute", "is missing", ""),
        ({**SET, "attribute": "", "value": 1}, "apply.mine.attribute", "must not be empty", ""),
        ({**ADDED, "parameter": "a.b"}, "apply.mine.parameter", "pattern", ""),
        ({**ADDED, "parameter": "a", "shape": [2, 0]}, "apply.mine.shape.1", "greater than or equal to 1", ""),
        ({"layers": "**", "action": "call"}, "apply.mine.fn", "is missing", ""),
        ({"action": "freeze"}, "apply.mine", "requires 'layers'", ""),
        *(
            ({**INIT, "fn": "normal_", "std": std}, "apply.mine", "std must be finite", "")
            for std in (math.nan, math.inf)
        ),
        ({**SET, "value": math.nan}, "apply.mine.value", "must not be NaN", ""),
    ],
)
def test_apply_problem_is_reported_with_its_location(spec: dict[str, Any], where: str, words: str, near: str) -> None:
    problem = problem_in(parse_apply, {"mine": spec})
    assert problem.where == where
    assert words in problem.message
    assert not near or problem.similar[0] == near


def test_init_functions_are_those_of_torch() -> None:
    from torch import nn

    assert [name for name in INIT_FUNCTIONS if not callable(getattr(nn.init, name, None))] == []
    public = {name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")}
    assert set(INIT_FUNCTIONS) == public


# ------------------------------------------------------------------------------------------ the full configuration


@pytest.mark.spread(32)
@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"model": None}, "model", "no model is configured"),
        ({"data": None}, "data", "no dataset is configured"),
        ({"model": {"in_features": 2}}, "model._target_", "is missing"),
        ({"model": "mnist_cnn"}, "model", "must be a mapping"),
        ({"task": None}, "task", "is missing"),
        ({"scheduler": "step"}, "scheduler", "must be a mapping"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"seed": "x"}, "seed", "integer"),
        ({"seeed": 1}, "", "unknown field 'seeed'"),
        ({"device": "gpu"}, "device", "not an allowed value"),
        ({"name": "a/b"}, "name", "pattern"),
        ({"name": "../up"}, "name", "pattern"),
        ({"name": ""}, "name", "pattern"),
        ({"deterministic": "perhaps"}, "deterministic", "must be true or false"),
        ({"train": {"steps": 0}}, "train.steps", "set mode=forward"),
        ({"train": {}}, "train", "exactly one of steps and epochs must be set, the other must be null; neither is set"),
        ({"train": {"steps": 1, "epochs": 2}}, "train", "steps is 1 and epochs is 2"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"train": {"steps": 1, "batch_size": 0}}, "train.batch_size", "greater than or equal to 1"),
        ({"train": {"steps": 1, "accumulate": 0}}, "train.accumulate", "greater than or equal to 1"),
        ({"train": {"steps": 1, "eval_every": -1}}, "train.eval_every", "greater than or equal to 0"),
        ({"train": {"steps": 1, "batchsize": 2}}, "train", "unknown field 'batchsize'"),
        ({"data": {**CONFIG["data"], "slice": {"split": ""}}}, "data.slice.split", "must not be empty"),
        ({"data": {**CONFIG["data"], "slice": {"start": 4, "stop": 4}}}, "data.slice", "the slice is empty"),
        ({"data": {**CONFIG["data"], "slice": {"stride": 0}}}, "data.slice.stride", "greater than or equal to 1"),
        ({"data": {**CONFIG["data"], "slice": {"indices": [0], "stop": 4}}}, "data.slice", "cannot be combined"),
        ({"data": {**CONFIG["data"], "slice": {"indices": []}}}, "data.slice.indices", "must not be empty"),
        ({"data": {**CONFIG["data"], "slice": {"classes": []}}}, "data.slice.classes", "must not be empty"),
        ({"data": {**CONFIG["data"], "slice": "abc"}}, "data.slice", "must be a mapping"),
        ({"data": {**CONFIG["data"], "slice": {"classes": 3}}}, "data.slice.classes", "must be a list"),
        (
            {"data": {**CONFIG["data"], "probe_batch": "abc"}},
            "data.probe_batch",
            "must be a number of samples, or a slice",
        ),
        ({"init_from": 3}, "init_from", "must be a path, or a mapping"),
        ({"data": {**CONFIG["data"], "slice": {"per_class": 0}}}, "data.slice.per_class", "greater than or equal to"),
        ({"data": {**CONFIG["data"], "slice": {"stp": 4}}}, "data.slice", "unknown field 'stp'"),
        ({"data": {**CONFIG["data"], "fallback": "mnist"}}, "data.fallback", "not an allowed value"),
        ({"sink": {"tensors": "csv"}}, "sink.tensors", "not an allowed value"),
        ({"sink": {"when_full": "perhaps"}}, "sink.when_full", "not an allowed value"),
        ({"sink": {"on_error": True}}, "sink.on_error", "must be a string, not True (bool); YAML reads"),
        ({"hooks": "all"}, "hooks", "must be a mapping"),
        ({"apply": 3}, "apply", "must be a mapping"),
    ],
)
def test_config_problem_is_reported_with_its_location(changes: dict[str, Any], where: str, words: str) -> None:
    problem = problem_in(parse_config, {**CONFIG, **changes})
    assert (problem.where, words in problem.message) == (where, True), str(problem)


def test_invalid_target_is_reported_with_the_notation() -> None:
    hook = {"layers": "*", "kind": "forward", "action": "call", "fn": 3}
    problem = problem_in(parse_config, {**CONFIG, "hooks": {"seen": hook}})
    assert str(problem) == (
        "hooks.seen.fn: must be a mapping\n    given    3\n    allowed  {_target_: package.name, argument: value}"
    )
    problem = problem_in(parse_config, {**CONFIG, "model": {"_targt_": "torch.nn.Identity"}})
    assert (problem.where, problem.message, problem.similar) == ("model._target_", "is missing", ["_targt_"])


def test_name_of_a_file_in_place_of_a_section_says_how_to_select_it() -> None:
    problems = problems_in(parse_config, {**CONFIG, "model": "mlp", "budget": "5%"})
    fix = "select the file on the command line, model=mlp, or in the defaults list, override /model: mlp"
    assert {problem.where: problem.fix for problem in problems} == {"model": fix, "budget": ""}


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({"trian": {}}, "train"),
        ({"train": {"steps": 1, "batchsize": 2}}, "batch_size"),
        ({"data": {**CONFIG["data"], "slice": {"stp": 4}}}, "stop"),
        ({"data": {**CONFIG["data"], "evalslice": {}}}, "eval_slice"),
        ({"sink": {"tensor": "list"}}, "tensors"),
        ({"device": "cdua"}, "cuda"),
    ],
)
def test_unknown_config_key_suggests_the_nearest(changes: dict[str, Any], near: str) -> None:
    problem = problem_in(parse_config, {**CONFIG, **changes})
    assert problem.similar[0] == near
    assert near in problem.allowed


def test_all_problems_of_all_sections_are_reported_at_once() -> None:
    raw = {
        **CONFIG,
        "model": None,
        "train": {"steps": 0},
        "seeed": 1,
        "hooks": {"a": {**RECORD, "every": 0}},
        "apply": {"b": {**INIT, "fn": "no"}},
    }
    problems = problems_in(parse_config, raw)
    assert {problem.where for problem in problems} == {"hooks.a.every", "apply.b.fn", "model", "train.steps", ""}
    assert len(problems) == 5


def test_config_error_can_be_pickled() -> None:
    error = ConfigError(*problems_in(parse_hooks, {"mine": {**RECORD, "evry": 2}}))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def custom_function(tensor: Any, context: Any) -> Any:
    return tensor


@pytest.mark.parametrize("function", [custom_function, Problem], ids=["function", "class"])
def test_python_function_is_stored_as_its_import_path(function: Any) -> None:
    spec = {"layers": "**", "kind": "forward", "action": "modify", "fn": function}
    found = parse_hooks({"mine": spec})["mine"]
    path = f"{function.__module__}.{function.__name__}"
    assert isinstance(found, FunctionSpec)
    assert found.fn.function is function
    assert found.model_dump(by_alias=True)["fn"] == {"_target_": path}


class Callable:
    def __call__(self, tensor: Any, context: Any) -> Any:
        return tensor


LINE = sys._getframe().f_lineno


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda tensor, context: tensor, f"<lambda> at test_parse.py:{LINE + 6}"),
        (functools.partial(custom_function), f"partial of {__name__}.custom_function"),
        (Callable(), f"object of {__name__}.Callable"),
    ],
    ids=["lambda", "partial", "object"],
)
def test_function_without_import_path_is_named_by_its_source(function: Any, name: str) -> None:
    spec = {"layers": "**", "kind": "forward", "action": "modify", "fn": function}
    found = parse_hooks({"mine": spec})["mine"]
    assert found.model_dump(by_alias=True)["fn"] == {"_target_": name}
    assert read_specs({"mine": found})["mine"] == found


# ------------------------------------------------------------------------------------------------ numbers


MODELS = dict.fromkeys([*HOOK_ACTIONS.values(), *FUNCTIONS.values(), *apply_specs.ACTIONS.values(), BudgetConfig])


@functools.cache
def numeric_fields(model: type[Any]) -> list[str]:
    """Return every field of a spec that takes a number and is not limited to integers."""
    properties = model.model_json_schema()["properties"]
    return [name for name, schema in properties.items() if '"number"' in json.dumps(schema)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_numeric_fields_refuse_nan(model: type[Any]) -> None:
    for field in numeric_fields(model):
        for value in (math.nan, [math.nan], {0: math.nan}):
            with pytest.raises(ValidationError) as caught:
                model.model_validate({"layers": "**", field: value})
            assert any(error["loc"][:1] == (field,) for error in caught.value.errors()), (field, value)


def test_numeric_fields_include_all_known_ones() -> None:
    names = {field for model in MODELS for field in numeric_fields(model)}
    assert names >= {"std", "mean", "p", "coefficient", "norm", "ord", "factor", "quantiles", "ratio", "value", "time"}


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_hyperparameters_have_to_be_finite(section: str, number: float) -> None:
    given = {"_target_": "torch.optim.SGD", "lr": 0.1, "groups": [{"lr": number}]}
    with pytest.raises(ConfigError) as caught:
        parse_config({section: given})
    assert f"{section}.groups[0].lr" in {problem.where for problem in caught.value.problems}


# ------------------------------------------------------------------------------------------ words that YAML converts


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        ("{layers: a, kind: off, action: record}", "hooks.h.kind"),
        ("{layers: a, kind: 1, action: record}", "hooks.h.kind"),
        ("{layers: a, kind: forward, action: on}", "hooks.h.action"),
        ("{layers: a, kind: forward, action: modify, fn: no}", "hooks.h.fn"),
        ("{layers: on, kind: forward, action: record}", "hooks.h.layers.0"),
        ("{layers: [a, no], kind: forward, action: record}", "hooks.h.layers.1"),
        ("{layers: 1.10, kind: forward, action: record}", "hooks.h.layers.0"),
        ("{layers: a, path: off, kind: forward, action: record}", "hooks.h.path"),
        ("{layers: a, phase: no, kind: forward, action: record}", "hooks.h.phase"),
    ],
)
def test_word_converted_by_yaml_is_reported(spec: str, where: str) -> None:
    (found,) = problems_in(parse_hooks, yaml.safe_load(f"h: {spec}"))
    assert found.where == where
    assert found.message.startswith("must be a string, not ")


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"role": ["input", "output"]}, "write one of the values"),
        ({"kind": ["forward", "tensor"]}, "write one of the values"),
        ({"path": [":", 3]}, "put the value in quotes"),
        ({"path": False}, "put the value in quotes"),
    ],
)
def test_value_that_is_not_a_string_has_a_fix(given: dict[str, Any], fix: str) -> None:
    (found,) = problems_in(parse_hooks, {"h": {**RECORD, **given}})
    assert (found.where, found.fix) == (f"hooks.h.{min(given)}", fix)


@pytest.mark.parametrize("key", ["fn", "action"])
def test_null_is_reported_as_missing(key: str) -> None:
    (found,) = problems_in(parse_hooks, {"h": {**NOISE, "fn": "nan", key: None}})
    assert (found.where, found.message) == (f"hooks.h.{key}", "is missing")
    assert key not in found.similar


@pytest.mark.parametrize("name", ["on", "no", "null", "1.5"])
def test_spec_name_converted_by_yaml_is_refused(name: str) -> None:
    (found,) = problems_in(parse_hooks, yaml.safe_load(f"{name}: {{layers: a, kind: forward, action: record}}"))
    assert found.where == "hooks"
    assert found.message.startswith("must be a string, not ")


@pytest.mark.parametrize(
    ("field", "given", "meant"),
    [
        ("kind", "gradients", ["full_backward", "parameter_grad"]),
        ("kind", "Activation", ["forward"]),
        ("kind", "weight", ["step_post"]),
        ("action", "log", ["record"]),
        ("action", "ablate", ["modify"]),
    ],
)
def test_other_words_for_a_kind_or_an_action_suggest_it(field: str, given: str, meant: list[str]) -> None:
    problem = problem_in(parse_hooks, {"q": {"layers": "fc", "kind": "forward", "action": "record", field: given}})
    assert (problem.where, problem.similar) == (f"hooks.q.{field}", meant)


def test_unknown_fields_are_reported_with_missing_ones() -> None:
    found = problems_in(parse_hooks, {"q": {"layerz": "fc", "kind": "forwrd", "action": "record"}})
    assert [problem.where for problem in found] == ["hooks.q.kind", "hooks.q"]
    assert found[0].similar[0] == "forward"
    assert (found[1].message, found[1].similar[0]) == ("unknown field 'layerz'", "layers")
    found = problems_in(parse_apply, {"q": {"layerz": "fc", "acton": "freeze"}})
    assert [problem.message for problem in found] == ["is missing", "unknown field 'layerz'", "unknown field 'acton'"]


@pytest.mark.parametrize("factor", [0.5, [1.0, 2.0], {0: 1.0, 20: 0.5}])
def test_every_form_of_a_factor_is_dumped_without_a_warning(factor: Any) -> None:
    (spec,) = parse_hooks({"h": {"layers": "*", "kind": "forward", "action": "scale", "factor": factor}}).values()
    assert json.loads(spec.model_dump_json())["factor"] == json.loads(json.dumps(factor))
