"""From plain mappings to specs: what is read, and what the user is told about each mistake."""

from __future__ import annotations

import functools
import json
import math
import pickle
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from instrument.errors import ConfigError, Mistake
from instrument.spec import apply as apply_specs
from instrument.spec import hooks as hook_specs
from instrument.spec.apply import INIT_FUNCTIONS
from instrument.spec.budget import BudgetConfig
from instrument.spec.functions import FUNCTIONS
from instrument.spec.kinds import KINDS
from instrument.spec.parse import parse_apply, parse_config, parse_hooks
from instrument.spec.record import DEFAULT_BINS, DEFAULT_LEVELS
from instrument.spec.statistics import ALL, DEFAULT

RECORD = {"layers": "**", "kind": "forward", "action": "record"}
CLIP = {"layers": "**", "kind": "parameter_grad", "action": "clip"}
SCALE = {"layers": "**", "kind": "forward", "action": "scale"}
NOISE = {"layers": "**", "kind": "forward", "action": "modify", "fn": "noise"}
L2 = {"layers": "**", "kind": "parameter_grad", "action": "modify", "fn": "l2"}
INIT = {"layers": "**", "action": "init", "fn": "kaiming_normal_"}
FILL = {"layers": "**", "action": "fill"}
CONFIG: dict[str, Any] = {
    "model": {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2},
    "data": {"dataset": {"_target_": "instrument.training.datasets.digits"}},
    "task": {"_target_": "instrument.tasks.Supervised"},
    "optimizer": {"_target_": "torch.optim.SGD"},
    "train": {"steps": 3},
}


def mistakes_in(parse: Any, raw: Any) -> tuple[Mistake, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    return caught.value.mistakes


def mistake_in(parse: Any, raw: Any) -> Mistake:
    (mistake,) = mistakes_in(parse, raw)
    return mistake


# ------------------------------------------------------------------------------------------------ what is read


def test_a_mapping_and_a_list_are_the_same_specs() -> None:
    clip = {**CLIP, "norm": 1.0}
    mapping = parse_hooks({"look": RECORD, "tame": clip})
    listed = parse_hooks([{**RECORD, "name": "look"}, {**clip, "name": "tame"}])
    assert mapping == listed
    assert list(mapping) == ["look", "tame"]
    assert [spec.name for spec in mapping.values()] == ["look", "tame"]


def test_an_item_of_a_list_without_a_name_gets_one_from_its_place() -> None:
    assert list(parse_hooks([RECORD, {**RECORD, "name": "mine"}, RECORD])) == ["hooks_0", "mine", "hooks_2"]
    assert list(parse_apply([INIT])) == ["apply_0"]


@pytest.mark.parametrize("parse", [parse_hooks, parse_apply])
@pytest.mark.parametrize("empty", [None, {}, [], {"gone": None}, [None]])
def test_null_entries_are_left_out(parse: Any, empty: Any) -> None:
    assert parse(empty) == {}


def test_a_null_entry_leaves_the_others_in() -> None:
    assert list(parse_hooks({"a": None, "b": RECORD})) == ["b"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_record_each_of_its_roles_and_takes_the_first_by_default(kind: str) -> None:
    spec = {"layers": "**", "kind": kind, "action": "record"}
    assert parse_hooks({"x": spec})["x"].tensor_role == KINDS[kind].roles[0]
    for role in KINDS[kind].roles:
        exact = role.replace(".*", ".exp_avg")
        assert parse_hooks({"x": {**spec, "role": exact}})["x"].tensor_role == exact


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_lets_interventions_change_just_the_roles_that_it_says(kind: str) -> None:
    for role in KINDS[kind].roles:
        spec = {"layers": "**", "kind": kind, "role": role.replace(".*", ".exp_avg"), "action": "scale", "factor": 2}
        if role in KINDS[kind].changes:
            assert parse_hooks({"x": spec})["x"].tensor_role == spec["role"]
        else:
            assert "cannot change role" in mistake_in(parse_hooks, {"x": spec}).problem


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("default", DEFAULT),
        ("all", tuple(name for name in ALL if name != "update_ratio")),
        (["max", "l1", "numel"], ("numel", "max", "l1", "nan_count", "inf_count")),
        ("rms", ("numel", "rms", "nan_count", "inf_count")),
        ("nan_count", ("numel", "nan_count", "inf_count")),
        ("none", ()),
    ],
)
def test_statistics_are_given_in_the_order_of_the_columns(asked: Any, given: tuple[str, ...]) -> None:
    spec = parse_hooks({"x": {**RECORD, "tensors": True, "stats": asked}})["x"]
    assert isinstance(spec, hook_specs.RecordSpec)
    assert spec.statistics == given


@pytest.mark.parametrize(
    ("asked", "levels"),
    [(True, DEFAULT_LEVELS), (False, None), (None, None), (0.5, (0.5,)), ([0.9, 0, 0.5, 0.9], (0.0, 0.5, 0.9))],
    ids=str,
)
def test_quantiles_are_asked_for_by_their_levels(asked: Any, levels: tuple[float, ...] | None) -> None:
    assert parse_hooks({"h": {**RECORD, "quantiles": asked}})["h"].quantiles == levels


@pytest.mark.parametrize(("asked", "bins"), [(True, DEFAULT_BINS), (False, None), (None, None), (10, 10)])
def test_a_histogram_is_asked_for_by_its_bins(asked: Any, bins: int | None) -> None:
    assert parse_hooks({"h": {**RECORD, "histogram": asked}})["h"].histogram == bins


def test_stats_none_records_tensors_alone() -> None:
    spec = parse_hooks({"x": {**RECORD, "stats": "none", "tensors": True}})["x"]
    assert isinstance(spec, hook_specs.RecordSpec)
    assert spec.statistics == ()


@pytest.mark.parametrize(
    ("fields", "scope"),
    [
        ({"kind": "parameter_grad"}, "all"),
        ({"kind": "post_accumulate_grad"}, "tensor"),
        ({"kind": "forward"}, "tensor"),
        ({"kind": "parameter_grad", "scope": "tensor"}, "tensor"),
        ({"kind": "forward", "scope": "sample"}, "sample"),
    ],
)
def test_the_norms_scope_is_that_of_clip_grad_norm_where_all_gradients_are_at_hand(
    fields: dict[str, str], scope: str
) -> None:
    spec = parse_hooks({"x": {**CLIP, "norm": 1.0, **fields}})["x"]
    assert isinstance(spec, hook_specs.ClipSpec)
    assert spec.norm_scope == scope


def test_the_order_of_a_norm_may_be_infinite() -> None:
    spec = parse_hooks({"x": {**CLIP, "norm": 1.0, "ord": math.inf}})["x"]
    assert isinstance(spec, hook_specs.ClipSpec)
    assert spec.ord == math.inf


def test_a_function_of_ones_own_keeps_its_arguments() -> None:
    fn = {"_target_": "my.module.shift", "by": 2, "inner": {"_target_": "my.other"}}
    spec = parse_hooks({"x": {**SCALE, "action": "modify", "fn": fn}})["x"]
    assert isinstance(spec, hook_specs.FunctionSpec)
    assert spec.fn.to_config() == fn


def test_types_alone_select_among_all_modules() -> None:
    spec = parse_hooks({"x": {"types": "Linear", "kind": "forward", "action": "record"}})["x"]
    assert (spec.globs, spec.types) == (("**",), ("Linear",))


def test_an_init_spec_keeps_the_functions_arguments() -> None:
    spec = parse_apply({"x": {**INIT, "nonlinearity": "relu", "a": 0.1}})["x"]
    assert isinstance(spec, apply_specs.InitSpec)
    assert spec.arguments == {"nonlinearity": "relu", "a": 0.1}


def test_specs_cannot_be_written_to() -> None:
    spec = parse_hooks({"x": RECORD})["x"]
    with pytest.raises(ValueError, match="frozen"):
        spec.every = 3


def test_a_whole_configuration_is_read_with_its_defaults() -> None:
    config = parse_config({**CONFIG, "hooks": {"look": RECORD}, "apply": {"init": INIT}, "sink": None})
    assert (config.name, config.seed, config.device, config.scheduler) == ("run", 0, "auto", None)
    assert (config.data.slice.split, config.data.eval_slice.split) == ("train", "test")
    assert (config.train.steps, config.train.batch_size, config.sink.tensors) == (3, 64, "list")
    assert config.hooks == parse_hooks({"look": RECORD})
    assert config.apply == parse_apply({"init": INIT})
    assert config.model.to_config() == CONFIG["model"]


# ------------------------------------------------------------------------------------------------ mistakes in a hook

# What is written over a spec, where the mistake is told, and words of its problem.
OUT_OF_RANGE: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (RECORD, {"every": 0}, "every", "greater than or equal to 1"),
    (RECORD, {"every": -1}, "every", "greater than or equal to 1"),
    (RECORD, {"every": 1.5}, "every", "integer"),
    (RECORD, {"every": True}, "every", "not true or false"),
    (RECORD, {"every": "often"}, "every", "integer"),
    (RECORD, {"every": None}, "every", "integer"),
    (RECORD, {"start": -1}, "start", "greater than or equal to 0"),
    (RECORD, {"stop": 0}, "stop", "greater than or equal to 1"),
    (RECORD, {"start": 5, "stop": 5}, "", "stop (5) has to be larger than start (5)"),
    (RECORD, {"start": 5, "stop": 3}, "", "stop (3) has to be larger than start (5)"),
    (RECORD, {"steps": []}, "steps", "at least 1 item"),
    (RECORD, {"steps": [0, -1]}, "steps.1", "greater than or equal to 0"),
    (RECORD, {"steps": [1], "every": 2}, "", "'steps' stands alone"),
    (RECORD, {"steps": [1], "start": 0}, "", "'steps' stands alone"),
    (RECORD, {"phase": "evaluation"}, "phase", "not one of the values allowed"),
    (RECORD, {"kind": "full_backward", "phase": "eval"}, "", "needs gradients"),
    (RECORD, {"kind": "parameter_grad", "phase": "eval"}, "", "needs gradients"),
    (RECORD, {"kind": "step_post", "phase": "eval"}, "", "phase eval"),
    (RECORD, {"role": "inputs"}, "", "has no role 'inputs'; it has output, input"),
    (RECORD, {"kind": "step_post", "role": "state."}, "", "has no role 'state.'"),
    (RECORD, {"via": "module"}, "", "is for full_backward"),
    (RECORD, {"params": "weight"}, "", "'params' is for kinds that see parameters"),
    (RECORD, {"kind": "parameter_grad", "path": "0"}, "", "use 'params'"),
    (RECORD, {"path": "a..b"}, "path", "empty segment"),
    (RECORD, {"layers": []}, "layers", "at least 1 item"),
    (RECORD, {"layers": True}, "layers.0", "YAML reads this as True"),
    (RECORD, {"layers": ["a", "b["]}, "layers.1", "not closed"),
    (RECORD, {"layers": "re:("}, "layers.0", "regular expression"),
    (RECORD, {"layers": "[z-a]"}, "layers.0", "range"),
    (RECORD, {"exclude": "a**"}, "exclude.0", "stand alone"),
    (RECORD, {"layers": None}, "", "needs 'layers'"),
    (RECORD, {"stats": "none"}, "", "records nothing"),
    (RECORD, {"stats": []}, "", "records nothing"),
    (RECORD, {"tensors": "maybe"}, "tensors", "boolean"),
    (RECORD, {"tensors": True, "samples": 0}, "samples", "greater than or equal to 1"),
    (RECORD, {"tensors": True, "max_elements": 0}, "max_elements", "greater than or equal to 1"),
    (RECORD, {"tensors": True, "slice": "0:4, x"}, "slice", "'x' is no slice"),
    (RECORD, {"tensors": True, "slice": "::0"}, "slice", "step cannot be 0"),
    (RECORD, {"tensors": True, "slice": "::-1"}, "slice", "is no slice"),
    (RECORD, {"tensors": True, "dtype": "int8"}, "dtype", "not one of the values allowed"),
    (RECORD, {"samples": 2}, "", "say 'tensors: true' too"),
    (CLIP, {}, "", "needs one of min/max, value, norm, quantile, ratio; it has none"),
    (CLIP, {"norm": 1.0, "value": 1.0}, "", "it has value and norm"),
    (CLIP, {"norm": 1.0, "max": 1.0}, "", "it has min/max and norm"),
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
    (RECORD, {"quantiles": []}, "quantiles", "at least 1 item"),
    (RECORD, {"quantiles": "half"}, "quantiles", "tuple"),
    (RECORD, {"histogram": 1}, "histogram", "greater than or equal to 2"),
    (RECORD, {"histogram": 5000}, "histogram", "less than or equal to 4096"),
    (RECORD, {"histogram": "many"}, "histogram", "integer"),
    (CLIP, {"norm": 1.0, "ord": -1.0}, "ord", "greater than or equal to 0"),
    (CLIP, {"norm": 1.0, "ord": math.nan}, "ord", "greater than or equal to 0"),
    (CLIP, {"value": 1.0, "ord": 1.0}, "", "belong to 'norm'"),
    (CLIP, {"value": 1.0, "scope": "tensor"}, "", "belong to 'norm'"),
    (CLIP, {"norm": 1.0, "scope": "batch"}, "scope", "not one of the values allowed"),
    (CLIP, {"kind": "forward", "norm": 1.0, "scope": "all"}, "", "only kind parameter_grad has"),
    (CLIP, {"norm": 1.0, "scope": "sample"}, "", "needs a batch dimension"),
    (SCALE, {}, "factor", "is missing"),
    (SCALE, {"factor": math.nan}, "factor", "finite"),
    (SCALE, {"factor": -math.inf}, "factor", "finite"),
    (SCALE, {"factor": "half"}, "factor", "number"),
    (SCALE, {"factor": True}, "factor", "not true or false"),
    (SCALE, {"factor": 2.0, "role": "input"}, "", "cannot change role input; forward_pre and tensor can"),
    (SCALE, {"factor": 2.0, "kind": "step_post", "role": "update"}, "", "cannot change role update"),
    (NOISE, {}, "std", "is missing"),
    (NOISE, {"std": -0.1}, "std", "greater than or equal to 0"),
    (NOISE, {"std": math.nan}, "std", "finite"),
    (NOISE, {"std": 1.0, "mean": math.inf}, "mean", "finite"),
    (L2, {"coefficient": -1.0}, "coefficient", "greater than or equal to 0"),
    (L2, {"coefficient": math.nan}, "coefficient", "finite"),
    (L2, {"coefficient": 1.0, "kind": "forward"}, "", "forward cannot"),
    (L2, {"fn": {}}, "fn._target_", "is missing"),
    (L2, {"fn": {"_target_": ""}}, "fn._target_", "at least 1 character"),
]


@pytest.mark.parametrize(("spec", "fields", "place", "words"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_told_with_its_place(
    spec: dict[str, Any], fields: dict[str, Any], place: str, words: str
) -> None:
    mistake = mistake_in(parse_hooks, {"mine": {**spec, **fields}})
    assert mistake.where == ".".join(part for part in ("hooks.mine", place) if part)
    assert words in mistake.problem
    if place and mistake.problem != "is missing" and fields[place.split(".", maxsplit=1)[0]] is not None:
        assert mistake.written is not None


# What is written over a spec, where it is told, what was written, what is allowed, and the nearest.
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
def test_an_unknown_name_is_told_in_four_parts(
    spec: dict[str, Any], fields: dict[str, Any], where: str, written: str, allowed: str, near: str
) -> None:
    mistake = mistake_in(parse_hooks, {"mine": {**spec, **fields}})
    assert (mistake.where, mistake.written) == (where, written)
    assert not allowed or allowed in mistake.allowed
    assert not near or mistake.nearest[0] == near
    lines = str(mistake).splitlines()
    assert lines[0].startswith(f"{where}: ")
    assert lines[1].split() == ["written", *written.split()]
    assert not near or lines[-1].split()[:2] in (["nearest", near], ["nearest", f"{near},"])


@pytest.mark.parametrize(
    ("missing", "where"), [("kind", "hooks.mine.kind"), ("action", "hooks.mine.action"), ("layers", "hooks.mine")]
)
def test_a_missing_field_is_told(missing: str, where: str) -> None:
    spec = {key: value for key, value in RECORD.items() if key != missing}
    mistake = mistake_in(parse_hooks, {"mine": spec})
    assert mistake.where == where
    assert missing in f"{mistake}"


def test_a_misspelt_key_is_offered_where_the_right_one_is_missing() -> None:
    missing, unknown = mistakes_in(parse_hooks, {"mine": {"layers": "**", "kind": "forward", "acton": "record"}})
    assert (missing.where, missing.problem, list(missing.nearest)) == ("hooks.mine.action", "is missing", ["acton"])
    assert (unknown.where, unknown.problem) == ("hooks.mine", "unknown field 'acton'")
    mistake = mistake_in(parse_hooks, {"mine": {"layers": "**", "kind": "forward", "action": "modify"}})
    assert mistake.where == "hooks.mine.fn"
    assert "noise" in mistake.allowed
    assert "or {_target_: package.function}" in mistake.allowed


@pytest.mark.parametrize("parse", [parse_hooks, parse_apply])
@pytest.mark.parametrize("raw", ["encoder", 5, True])
def test_a_section_that_is_no_mapping_and_no_list_is_refused(parse: Any, raw: Any) -> None:
    mistake = mistake_in(parse, raw)
    assert "mapping from a name to a spec, or a list" in mistake.problem
    assert mistake.written == raw


@pytest.mark.parametrize("spec", ["record", 3, ["record"], False])
def test_a_spec_that_is_no_mapping_is_refused(spec: Any) -> None:
    mistake = mistake_in(parse_hooks, {"mine": spec})
    assert (mistake.where, mistake.problem, mistake.written) == ("hooks.mine", "has to be a mapping", spec)


@pytest.mark.parametrize("name", ["my hook", "a.b", "1st", "", "é!"])
def test_a_name_that_no_override_could_spell_is_refused(name: str) -> None:
    mistake = mistake_in(parse_hooks, {name: RECORD})
    assert (mistake.where, mistake.written) == ("hooks", name)
    assert "letters, digits and underscores" in mistake.problem


def test_a_name_used_twice_is_refused() -> None:
    mistake = mistake_in(parse_hooks, [{**RECORD, "name": "a"}, {**RECORD, "name": "a"}])
    assert (mistake.where, mistake.problem) == ("hooks.a", "this name is used twice; names have to differ")


def test_a_name_inside_a_mapping_that_is_not_its_key_is_refused() -> None:
    assert parse_hooks({"a": {**RECORD, "name": "a"}})["a"].name == "a"
    mistake = mistake_in(parse_hooks, {"a": {**RECORD, "name": "b"}})
    assert (mistake.where, mistake.written) == ("hooks.a.name", "b")


def test_all_mistakes_of_all_specs_are_told_at_once() -> None:
    mistakes = mistakes_in(
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
    assert [mistake.where for mistake in mistakes] == [
        "hooks.one.every",
        "hooks.one.start",
        "hooks.one.stats",
        "hooks.two.norm",
        "hooks.two",
        "hooks.three.action",
        "hooks",
        "hooks.four",
    ]


# ------------------------------------------------------------------------------------------------ mistakes in apply


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
        ({"layers": "**", "action": "set", "attribute": "", "value": 1}, "apply.mine.attribute", "at least 1", ""),
        ({"layers": "**", "action": "add_parameter", "parameter": "a.b"}, "apply.mine.parameter", "pattern", ""),
        (
            {"layers": "**", "action": "add_parameter", "parameter": "a", "shape": [2, 0]},
            "apply.mine.shape.1",
            "greater than or equal to 1",
            "",
        ),
        ({"layers": "**", "action": "call"}, "apply.mine.fn", "is missing", ""),
        ({"action": "freeze"}, "apply.mine", "needs 'layers'", ""),
    ],
)
def test_a_mistake_in_apply_is_told_with_its_place(spec: dict[str, Any], where: str, words: str, near: str) -> None:
    mistake = mistake_in(parse_apply, {"mine": spec})
    assert mistake.where == where
    assert words in mistake.problem
    assert not near or mistake.nearest[0] == near


def test_the_functions_that_init_knows_are_those_of_torch() -> None:
    from torch import nn

    assert [name for name in INIT_FUNCTIONS if not callable(getattr(nn.init, name, None))] == []
    public = {name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")}
    assert set(INIT_FUNCTIONS) == public


# ------------------------------------------------------------------------------------------------ the whole config


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"model": None}, "model", "no model was chosen"),
        ({"data": None}, "data", "no dataset was chosen"),
        ({"model": {"in_features": 2}}, "model._target_", "is missing"),
        ({"model": "mnist_cnn"}, "model", "dictionary"),
        ({"task": None}, "task", "dictionary"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"seed": "x"}, "seed", "integer"),
        ({"seeed": 1}, "", "unknown field 'seeed'"),
        ({"device": "gpu"}, "device", "not one of the values allowed"),
        ({"name": "a/b"}, "name", "pattern"),
        ({"name": "../up"}, "name", "pattern"),
        ({"name": ""}, "name", "pattern"),
        ({"deterministic": "perhaps"}, "deterministic", "boolean"),
        ({"train": {"steps": 0}}, "train.steps", "greater than or equal to 1"),
        ({"train": {}}, "train", "needs one of steps and epochs, the other one null; it has none"),
        ({"train": {"steps": 1, "epochs": 2}}, "train", "it has both: steps 1 and epochs 2"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"train": {"steps": 1, "batch_size": 0}}, "train.batch_size", "greater than or equal to 1"),
        ({"train": {"steps": 1, "accumulate": 0}}, "train.accumulate", "greater than or equal to 1"),
        ({"train": {"steps": 1, "eval_every": -1}}, "train.eval_every", "greater than or equal to 0"),
        ({"train": {"steps": 1, "batchsize": 2}}, "train", "unknown field 'batchsize'"),
        ({"data": {**CONFIG["data"], "slice": {"split": "valid"}}}, "data.slice.split", "not one of the values"),
        ({"data": {**CONFIG["data"], "slice": {"start": 4, "stop": 4}}}, "data.slice", "the slice is empty"),
        ({"data": {**CONFIG["data"], "slice": {"stride": 0}}}, "data.slice.stride", "greater than or equal to 1"),
        ({"data": {**CONFIG["data"], "slice": {"indices": [0], "stop": 4}}}, "data.slice", "stands alone"),
        ({"data": {**CONFIG["data"], "slice": {"indices": []}}}, "data.slice.indices", "at least 1"),
        ({"data": {**CONFIG["data"], "slice": {"classes": []}}}, "data.slice.classes", "at least 1"),
        ({"data": {**CONFIG["data"], "slice": {"per_class": 0}}}, "data.slice.per_class", "greater than or equal to"),
        ({"data": {**CONFIG["data"], "slice": {"stp": 4}}}, "data.slice", "unknown field 'stp'"),
        ({"data": {**CONFIG["data"], "fallback": "mnist"}}, "data.fallback", "not one of the values"),
        ({"sink": {"tensors": "csv"}}, "sink.tensors", "not one of the values"),
        ({"sink": {"when_full": "perhaps"}}, "sink.when_full", "not one of the values allowed"),
        ({"sink": {"on_error": True}}, "sink.on_error", "YAML reads this as True"),
        ({"hooks": "all"}, "hooks", "has to be a mapping"),
        ({"apply": 3}, "apply", "has to be a mapping"),
    ],
)
def test_a_mistake_anywhere_in_the_configuration_is_told_with_its_place(
    changes: dict[str, Any], where: str, words: str
) -> None:
    mistake = mistake_in(parse_config, {**CONFIG, **changes})
    assert (mistake.where, words in mistake.problem) == (where, True), str(mistake)


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
def test_an_unknown_key_of_any_section_is_answered_with_the_nearest(changes: dict[str, Any], near: str) -> None:
    mistake = mistake_in(parse_config, {**CONFIG, **changes})
    assert mistake.nearest[0] == near
    assert near in mistake.allowed


def test_mistakes_of_all_sections_are_told_at_once() -> None:
    raw = {
        **CONFIG,
        "model": None,
        "train": {"steps": 0},
        "seeed": 1,
        "hooks": {"a": {**RECORD, "every": 0}},
        "apply": {"b": {**INIT, "fn": "no"}},
    }
    mistakes = mistakes_in(parse_config, raw)
    assert {mistake.where for mistake in mistakes} == {"hooks.a.every", "apply.b.fn", "model", "train.steps", ""}
    assert len(mistakes) == 5


def test_a_mistake_can_be_sent_to_another_process() -> None:
    error = ConfigError(*mistakes_in(parse_hooks, {"mine": {**RECORD, "evry": 2}}))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("written", [1, "1"])
def test_the_path_of_an_item_may_be_written_as_a_number(written: int | str) -> None:
    hook = {"layers": "lstm", "kind": "forward", "action": "record", "path": written}
    assert parse_hooks({"x": hook})["x"].path == "1"


def test_the_deprecated_backward_kind_is_refused_with_the_right_name() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_hooks({"old": {"layers": "**", "kind": "backward", "action": "record"}})
    (mistake,) = refused.value.mistakes
    assert "deprecated in PyTorch: it sees wrong gradients of modules with several operations" in str(mistake)
    assert "nearest  full_backward" in str(mistake)


def own_function(tensor: Any, context: Any) -> Any:
    return tensor


@pytest.mark.parametrize("function", [own_function, Mistake], ids=["function", "class"])
def test_in_python_a_function_may_stand_for_its_own_path(function: Any) -> None:
    spec = {"layers": "**", "kind": "forward", "action": "modify", "fn": function}
    found = parse_hooks({"mine": spec})["mine"]
    path = f"{function.__module__}.{function.__name__}"
    assert found == parse_hooks({"mine": {**spec, "fn": {"_target_": path}}})["mine"]
    assert found.model_dump(by_alias=True)["fn"] == {"_target_": path}


@pytest.mark.parametrize(
    "function", [lambda tensor, context: tensor, functools.partial(own_function)], ids=["lambda", "partial"]
)
def test_a_function_without_a_path_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.mine\.fn.*name at the top of its module"):
        parse_hooks({"mine": {"layers": "**", "kind": "forward", "action": "modify", "fn": function}})


# ------------------------------------------------------------------------------------------------ numbers


def numeric_fields() -> list[tuple[type[Any], str]]:
    """Every field of a spec that takes a number which need not be whole."""
    models = [*hook_specs.ACTIONS.values(), *FUNCTIONS.values(), *apply_specs.ACTIONS.values(), BudgetConfig]
    return [
        (model, name)
        for model in dict.fromkeys(models)
        for name, schema in model.model_json_schema()["properties"].items()
        if '"number"' in json.dumps(schema)
    ]


@pytest.mark.parametrize(("model", "field"), numeric_fields(), ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("shape", [float, lambda x: [x], lambda x: {0: x}], ids=["number", "list", "mapping"])
def test_no_number_of_a_spec_is_nan(model: type[Any], field: str, shape: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({"layers": "**", field: shape(math.nan)})
    assert any(error["loc"][:1] == (field,) for error in caught.value.errors())


def test_every_numeric_field_is_found() -> None:
    names = {field for _, field in numeric_fields()}
    assert names >= {"std", "mean", "p", "coefficient", "norm", "ord", "factor", "quantiles", "ratio", "value", "time"}


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_arguments_of_init_are_finite(number: float) -> None:
    with pytest.raises(ConfigError, match="std has to be finite"):
        parse_apply({"a": {"layers": "**", "action": "init", "fn": "normal_", "std": number}})


def test_an_attribute_is_not_set_to_nan() -> None:
    with pytest.raises(ConfigError, match="other than NaN"):
        parse_apply({"a": {"layers": "**", "action": "set", "attribute": "p", "value": math.nan}})
    assert parse_apply({"a": {"layers": "**", "action": "set", "attribute": "p", "value": math.inf}})


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_hyperparameters_are_finite(section: str, number: float) -> None:
    given = {"_target_": "torch.optim.SGD", "lr": 0.1, "groups": [{"lr": number}]}
    with pytest.raises(ConfigError) as caught:
        parse_config({section: given})
    assert f"{section}.groups[0].lr" in {problem.where for problem in caught.value.mistakes}


# ------------------------------------------------------------------------------------------------ words that YAML reads otherwise


@pytest.mark.parametrize("written", ["nan", math.nan, yaml.safe_load(".nan")])
def test_nan_is_a_function_however_yaml_reads_it(written: Any) -> None:
    (spec,) = parse_hooks({"h": _nan(written)}).values()
    assert spec.fn == "nan"  # type: ignore[union-attr]


def _nan(written: Any) -> dict[str, Any]:
    return {"layers": "**", "kind": "forward", "action": "modify", "fn": written}


@pytest.mark.parametrize(
    ("written", "value"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), ("inf", "inf")]
)
def test_bad_values_may_be_numbers_to_yaml(written: Any, value: str) -> None:
    assert parse_hooks({"h": {**_nan("nan"), "value": written}})["h"].value == value  # type: ignore[union-attr]


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
def test_a_word_that_yaml_reads_otherwise_is_named(spec: str, where: str) -> None:
    (found,) = mistakes_in(parse_hooks, yaml.safe_load(f"h: {spec}"))
    assert found.where == where
    assert found.problem.startswith("YAML reads this as ")


@pytest.mark.parametrize("key", ["fn", "action"])
def test_null_is_a_missing_word(key: str) -> None:
    (found,) = mistakes_in(parse_hooks, {"h": {**_nan("nan"), key: None}})
    assert (found.where, found.problem) == (f"hooks.h.{key}", "is missing")
    assert key not in found.nearest


@pytest.mark.parametrize("name", ["on", "no", "null", "1.5"])
def test_a_name_that_yaml_reads_otherwise_is_refused(name: str) -> None:
    (found,) = mistakes_in(parse_hooks, yaml.safe_load(f"{name}: {{layers: a, kind: forward, action: record}}"))
    assert found.where == "hooks"
    assert found.problem.startswith("YAML reads this as ")


def test_layers_and_runs_may_be_called_by_numbers() -> None:
    (spec,) = parse_hooks({"h": {**RECORD, "layers": [0, 2], "exclude": 1}}).values()
    assert (spec.layers, spec.exclude) == (("0", "2"), ("1",))
    assert parse_config({**CONFIG, "name": 2024}).name == "2024"


def test_unknown_fields_are_reported_with_missing_layers() -> None:
    found = mistakes_in(parse_hooks, {"q": {"layerz": "fc", "kind": "forwrd", "action": "record"}})
    assert [problem.where for problem in found] == ["hooks.q", "hooks.q.kind", "hooks.q"]
    assert "needs 'layers'" in found[0].problem
    assert found[1].nearest[0] == "forward"
    assert (found[2].problem, found[2].nearest[0]) == ("unknown field 'layerz'", "layers")


def test_unknown_fields_are_reported_with_a_missing_action() -> None:
    found = mistakes_in(parse_apply, {"q": {"layerz": "fc", "acton": "freeze"}})
    assert [problem.problem for problem in found] == ["is missing", "unknown field 'layerz'", "unknown field 'acton'"]


def test_what_is_evaluated_on_is_of_the_split_test() -> None:
    data = {**CONFIG["data"], "eval_slice": {"stop": 8}}
    assert parse_config({**CONFIG, "data": data}).data.eval_slice.split == "test"
    data = {**CONFIG["data"], "eval_slice": {"split": "train"}}
    assert parse_config({**CONFIG, "data": data}).data.eval_slice.split == "train"
