"""Conversion of plain mappings to specs. All problems of a file are reported at once, with the keys of the file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError, Problem, raise_problems, similar_names
from ..fields.field_types import TARGET, Target, UnknownNameError, message_of, nested_values, number_to_text
from . import apply as apply_specs
from .apply import ApplySpec
from .base import ACTIONS, HookBase
from .experiment import BudgetConfig, RunConfig
from .hook_specs import FUNCTIONS, CustomStatistic, FunctionSpec, HookSpec, StatisticsSpec, graph_problems
from .parallel import Declared, PlacementConfig
from .rules import RESERVED, RULES, CustomRule, RuleBase, WatchRule
from .schedule import Phase
from .schema import fields_of, fields_of_specs, model_at

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OTHER_WORDS = {
    **dict.fromkeys(("activation", "output"), ("forward",)),
    **dict.fromkeys(("grad", "gradient"), ("full_backward", "parameter_grad")),
    **dict.fromkeys(("weight", "parameter", "update", "optimizer"), ("step_post",)),
    **dict.fromkeys(("log", "save", "store", "capture"), ("record",)),
    **dict.fromkeys(("ablate", "patch", "replace", "zero"), ("modify",)),
}
"""Kinds of hooks and actions, by other words for them in the singular."""
ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_config(raw: Mapping[str, Any]) -> RunConfig:
    """Validate the complete configuration of a run. The ConfigError contains every problem."""
    problems: list[Problem] = []
    parsed = {}
    phase: Phase = "forward" if raw.get("mode") == "forward" else "train"
    sections: Any = {"hooks": partial(parse_hooks, phase=phase), "apply": parse_apply, "rules": parse_rules}
    for section, parse in sections.items():
        try:
            parsed[section] = parse(raw.get(section))
        except ConfigError as error:
            problems += error.problems
    if not raw.get("model"):
        fix = "set model=mnist_cnn, another option of conf/model, or a custom model: {_target_: package.Class, ...}"
        problems.append(Problem("model", "no model is configured", fix=fix))
    if not raw.get("data"):
        fix = "set data=mnist, another option of conf/data, or a custom data.dataset: {_target_: ...}"
        problems.append(Problem("data", "no dataset is configured", fix=fix))
    for section in ("optimizer", "scheduler"):  # those of PyTorch accept most invalid numbers
        for where, value in nested_values(raw.get(section), section):
            if isinstance(value, float) and not math.isfinite(value):
                problems.append(Problem(where, "must be finite", given=value, allowed="a finite number"))
    missing = {problem.where for problem in problems}
    try:
        config = RunConfig.model_validate({**raw, **{section: {} for section in sections}, **parsed})
    except ValidationError as error:
        problems += [problem for problem in _problems(error, "", RunConfig) if problem.where not in missing]
    else:
        problems += mode_problems(config)
    raise_problems(problems)
    return config


def parse_budget(raw: Any) -> BudgetConfig | None:
    """Validate the budget; None stays None."""
    return None if raw is None else build(BudgetConfig, dict(raw) if isinstance(raw, Mapping) else raw, "budget")


def parse_placement(raw: Any) -> Declared:
    """Validate the placement of tensors; None stands for no declaration."""
    return build(PlacementConfig, {"placement": {} if raw is None else raw}, "").placement


def parse_hooks(raw: Any, phase: Phase = "train") -> dict[str, HookSpec]:
    """Convert a mapping from names to hook specs, or a list of them, without null entries. The ConfigError contains every problem."""
    specs: dict[str, HookSpec] = _parse_section("hooks", raw, _hook_class, {} if phase == "train" else {"phase": phase})
    raise_problems(list(_ambiguous_statistics(specs)))
    return specs


def _ambiguous_statistics(specs: Mapping[str, HookSpec]) -> Iterable[Problem]:
    """Yield a problem for each custom statistic whose column already contains another function."""
    known: dict[str, tuple[str, CustomStatistic]] = {}
    for name, spec in specs.items():
        for custom in spec.custom_statistics if isinstance(spec, StatisticsSpec) else ():
            first, other = known.setdefault(custom.column.lower(), (name, custom))  # SQL ignores case
            definitions = [(each.column, each.to_config(), each.function) for each in (custom, other)]
            if definitions[0] != definitions[1]:
                message = f"hook {first!r} has another function with the column {custom.column!r}"
                yield Problem(f"hooks.{name}.stats", message, given=custom.target, fix="set another 'name'")


def parse_apply(raw: Any) -> dict[str, ApplySpec]:
    """Convert apply specs; see `parse_hooks`."""
    actions = apply_specs.ACTIONS
    return _parse_section("apply", raw, lambda value, where: actions[_choice(value, "action", actions, where)], {})


def parse_rules(raw: Any) -> dict[str, RuleBase]:
    """Convert rules; see `parse_hooks`.

    An entry without `rule` that has the name of a rule of the catalogue is this rule. An optional rule of the catalogue, such as a default
    rule, is left out if another entry has the same rule.
    """
    rules: dict[str, RuleBase] = _parse_section("rules", raw, _rule_class, {})
    fix, taken = "choose another name for the rule", [name for name in rules if name in RESERVED]
    raise_problems([Problem("rules", "other events have this name", given=name, fix=fix) for name in taken])
    given = {getattr(rule, "rule", None) for rule in rules.values() if not rule.optional}
    return {name: rule for name, rule in rules.items() if not rule.optional or getattr(rule, "rule", None) not in given}


def _parse_section(
    section: str, raw: Any, model_for: Callable[[Mapping[str, Any], str], Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    specs: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in named_specs(section, raw):
        where = f"{section}.{name}"
        try:
            if not isinstance(name, str):
                raise ConfigError(Problem(section, _not_a_string(name), given=name, fix="put the name in quotes"))
            if not NAME.fullmatch(name):
                message = "a name must consist of letters, digits and underscores, and must not start with a digit"
                raise ConfigError(Problem(section, message, given=name))
            if not isinstance(value, Mapping):
                is_field = name in fields_of_specs(section)
                fix = f"give the spec a name: {section}: {{NAME: {{{name}: {value}, ...}}}}" if is_field else ""
                raise ConfigError(Problem(where, "must be a mapping", given=value, fix=fix))
            if value.get("name") not in (None, "", name):
                message = "the name differs from the key of the spec"
                raise ConfigError(Problem(f"{where}.name", message, given=value["name"], fix="remove 'name'"))
            if name in specs:
                raise ConfigError(Problem(where, "this name is used twice; names must be unique"))
            try:
                model: type[BaseModel] = model_for(value, where)
            except ConfigError as error:  # its action is unknown; fields that no action has are reported too
                known = fields_of_specs(section)
                others = [str(key) for key in value if key not in (*known, "name")]
                unknown = [_unknown(key, value[key], known, where) for key in others]
                raise ConfigError(*error.problems, *unknown) from None
            specs[name] = build(model, {**defaults, **value, "name": name}, where)
        except ConfigError as error:
            problems += error.problems
    raise_problems(problems)
    return specs


def _unknown(field: str, given: object, fields: Sequence[str], where: str) -> Problem:
    similar = similar_names(field, fields)
    fix = "" if where or similar else f"to use a value in several keys, set vars.{field}, and write ${{vars.{field}}}"
    return Problem(where, f"unknown field '{field}'", f"{field}: {given}", allowed=fields, similar=similar, fix=fix)


def _not_a_string(value: object) -> str:
    reason = "; YAML reads on, off, yes and no without quotes as true and false" if isinstance(value, bool) else ""
    return f"must be a string, not {value!r} ({type(value).__name__}){reason}"


def named_specs(section: str, raw: Any) -> Iterable[tuple[Any, Any]]:
    """Yield the names and the entries of a section that is a mapping or a list, without those that are null."""
    if isinstance(raw, list | tuple):
        names = (value.get("name") if isinstance(value, Mapping) else None for value in raw)
        items: Iterable[tuple[Any, Any]] = [
            (name or f"{section}_{i}", value) for i, (name, value) in enumerate(zip(names, raw, strict=True))
        ]
    elif isinstance(raw, Mapping | None):
        items = (raw or {}).items()
    else:
        select = f"select the set on the command line, {section}={raw}, or in the defaults list"
        fix = select if isinstance(raw, str) else ""
        message = "must be a mapping from names to specs, or a list of specs"
        raise ConfigError(Problem(section, message, given=raw, fix=fix))
    for name, value in items:
        if value is not None:
            yield str(name) if isinstance(name, int) and not isinstance(name, bool) else name, value


def _hook_class(value: Mapping[str, Any], where: str) -> type[BaseModel]:
    kind = value.get("kind")
    if kind == "backward":
        message = "kind backward is deprecated in PyTorch: its gradients are wrong for modules with several operations"
        raise ConfigError(Problem(where, message, given="kind: backward", similar=["full_backward"]))
    action = _choice(value, "action", ACTIONS, where)
    if action != "modify":
        return ACTIONS[action]
    fn = value.get("fn")
    if isinstance(fn, Mapping | Target) or callable(fn):
        return FunctionSpec
    return FUNCTIONS[_choice(value, "fn", FUNCTIONS, where, "or {_target_: package.function}")]


def _rule_class(value: Mapping[str, Any], where: str) -> type[BaseModel]:
    if value.get("_target_") is not None:
        return CustomRule
    if "watch" in value:
        return WatchRule
    name = where.rpartition(".")[2]
    if name not in RULES or "rule" in value:
        name = _choice(value, "rule", RULES, where, "or {watch: HOOK, ...}, or {_target_: package.Class}")
    fields: type[BaseModel] = RULES[name].fields
    return fields


def _choice(value: Mapping[str, Any], key: str, options: Collection[str], where: str, hint: str = "") -> str:
    allowed = [*options, hint] if hint else [*options]
    given = number_to_text(value.get(key))
    if given is None:
        similar = similar_names(key, [str(name) for name in value if name != key])
        similar = similar or similar_names(where.rpartition(".")[2], options)
        raise ConfigError(Problem(f"{where}.{key}", "is missing", allowed=allowed, similar=similar))
    if not isinstance(given, str) or given not in options:
        message = f"unknown {key}" if isinstance(given, str) else _not_a_string(given)
        raise ConfigError(Problem(f"{where}.{key}", message, given, allowed, _meant(str(given), options)))
    return given


def _meant(given: str, options: Collection[str]) -> list[str]:
    """Return the options that a word means, or else the most similar ones."""
    meant = [name for name in _OTHER_WORDS.get(given.lower().rstrip("s"), ()) if name in options]
    return meant or similar_names(given, options)


def build(model: type[ModelT], value: Mapping[str, Any], where: str) -> ModelT:
    """Return a model of the fields of a mapping. `where` is the key of the mapping in problems."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ConfigError(*_problems(error, where, model)) from None


def _problems(error: ValidationError, where: str, model: type[BaseModel]) -> list[Problem]:
    items = error.errors()
    # An invalid item of a list also makes the list too short.
    problems = [
        _problem(dict(item), where, model)
        for item in items
        if item["type"] != "too_short"
        or not any(other["loc"][: len(item["loc"])] == item["loc"] != other["loc"] for other in items)
    ]
    return list({(problem.where, problem.message): problem for problem in problems}.values())


def _problem(item: dict[str, Any], where: str, model: type[BaseModel]) -> Problem:
    kind, context = item["type"], item.get("ctx", {})
    unknown = item["loc"][-1:] if kind == "extra_forbidden" else ()  # a key that may look like a type
    is_type = re.compile(r"[\[(]|^(bool|int|float|str)$").search
    loc = [part for part in map(str, item["loc"]) if part in unknown or not is_type(part)]
    key = ".".join([part for part in (where, *loc) if part])
    if kind == "extra_forbidden":
        owners = [name for name, spec in ACTIONS.items() if len(loc) == 1 and loc[0] in fields_of(spec)]
        if owners and issubclass(model, HookBase):
            fix = f"write a second hook with action: {owners[-1]}, or remove '{loc[0]}'"
            actions = f"action: {' or '.join(owners)}"
            return Problem(key, "another action has this field", item["input"], actions, fix=fix)
        fields = fields_of(model_at(model, loc[:-1]) or model)
        return _unknown(loc[-1], item["input"], fields, ".".join([part for part in (where, *loc[:-1]) if part]))
    if kind == "missing":
        if loc[-1] != "_target_":
            of_model = (model_at(model, loc[:-1]) or model).model_fields.items()
            texts = (each.description or "" for name, each in of_model if loc[-1] in (name, each.alias))
            return Problem(key, message_of(item), allowed=next(texts, ""))
        similar = similar_names("_target_", map(str, item["input"]))
        return Problem(key, message_of(item), allowed="the dotted path of a class or function", similar=similar)
    cause = context.get("error")
    if isinstance(cause, UnknownNameError):
        return Problem(key, f"unknown {cause.what}", cause.name, cause.allowed, _meant(cause.name, cause.allowed))
    given = None if isinstance(item["input"], Mapping) else item["input"]
    if kind in ("string_type", "tuple_type") and isinstance(given, type):
        return Problem(key, "must be a name, not a class", given=given, fix=f"write types: {given.__name__}")
    if kind in ("string_type", "tuple_type") and hasattr(given, "named_modules"):
        fix = "write its name in model.named_modules()"
        return Problem(key, "must be a name, not a module", given=type(given).__name__, fix=fix)
    if kind == "string_type" and isinstance(given, bool | int | float | list | tuple):
        # YAML reads a slice without quotes, such as [:, 3], as a list.
        is_list = isinstance(given, list | tuple) and not any(":" in str(each) for each in given)
        fix = "write one of the values" if is_list else "put the value in quotes"
        return Problem(key, _not_a_string(given), given=given, fix=fix)
    if kind == "literal_error":
        options = re.findall(r"'([^']+)'", context["expected"])
        message = "not an allowed value" if isinstance(given, str | None) else _not_a_string(given)
        return Problem(key, message, given, options, similar_names(str(given), options))
    if kind == "model_type":
        is_target = context["class_name"] == Target.__name__
        allowed = TARGET if is_target else ", ".join(fields_of(model_at(model, loc) or model))
        named = isinstance(given, str) and key in ("model", "data", "task", "optimizer", "scheduler", "train", "sink")
        fix = f"select the file on the command line, {key}={given}, or in the defaults list, override /{key}: {given}"
        message = message_of(item) if item["input"] is not None else "is missing"
        return Problem(key, message, given, allowed, fix=fix if named else "")
    return Problem(key, message_of(item), given=given)


def mode_problems(config: RunConfig) -> Iterator[Problem]:
    yield from _phase_problems(config)
    if config.mode == "train":
        if config.forward.grad:
            yield Problem("forward.grad", "requires mode: forward", given=True, fix="set mode=forward")
        if config.data.probe_batch is not None and all(spec.phase != "probe" for spec in config.hooks.values()):
            message = "the probe batch is never used: no hook has phase: probe"
            yield Problem("data.probe_batch", message, fix="set phase: probe in a hook, or data.probe_batch=null")
        return
    clean, size = config.forward.from_sample, config.train.batch_size
    if clean is not None and (clean >= size or size < 2):
        message = "each batch needs this clean sample and another, corrupted one"
        yield Problem("forward.from_sample", message, given=clean, allowed=f"train.batch_size is {size}")
    if config.train.accumulate > 1:
        message = "mode: forward accumulates no gradients: each batch is one step"
        yield Problem("train.accumulate", message, given=config.train.accumulate, allowed="1")
    if config.data.probe_batch is not None:
        message = "the probe batch runs between training steps, but mode: forward does not train"
        yield Problem("data.probe_batch", message, fix="set data.probe_batch=null")


def _phase_problems(config: RunConfig) -> Iterator[Problem]:
    phases = ["forward"] if config.mode == "forward" else ["train", "eval", "probe"]
    for name, spec in config.hooks.items():
        if spec.phase not in phases:
            yield Problem(f"hooks.{name}.phase", f"mode: {config.mode} has no such phase", spec.phase, phases)
        elif spec.phase == "probe" and config.data.probe_batch is None:
            fix = "set data.probe_batch=N for the first N evaluation samples"
            yield Problem(f"hooks.{name}.phase", "phase probe requires a probe batch", given="probe", fix=fix)
        elif spec.phase == "forward" and spec.definition.gradient and not config.forward.grad:
            message = "requires gradients, which mode: forward computes only with forward.grad=true"
            yield Problem(f"hooks.{name}.kind", message, given=spec.kind, fix="set forward.grad=true")
        if config.train.compile is not None and (not config.train.compile.graph_breaks or spec.definition.of_functions):
            yield from graph_problems(name, spec, "set train.compile={graph_breaks: true}")
